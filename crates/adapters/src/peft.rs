//! Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! A matrix `M` has `base_model.model.M.lora_A.weight` `[r, in]` and `lora_B.weight` `[out, r]`; a
//! table of embeddings `lora_embedding_A` `[r, tokens]` and `lora_embedding_B` `[width, r]`. The
//! change is `alpha / r` of their product, with rsLoRA (Kalajdzievski 2023) `alpha / sqrt(r)`. DoRA
//! adds `lora_magnitude_vector` `[out]`, `lora_bias` a `lora_B.bias` `[out]` before that factor.
//!
//! Modules of `modules_to_save` are saved whole under their own names, biases as `bias` says, and
//! the rows of `trainable_token_indices` as `token_adapter.trainable_tokens_delta`, which are the
//! rows themselves and no differences. Copies of the table of embeddings and of the head may be
//! saved untrained, too.
//!
//! Of `target_parameters`, a stack of experts' matrices has the factors of all experts in one pair
//! ([`Stack::Parameter`]). The pair is named after the module that holds the stack; where a module
//! holds several, it is wrapped once for each, and all but the last are named `base_layer` of it.

use crate::patterns::Patterns;
use crate::renewed::Renewed;
use crate::settings::Settings;
use crate::{AdapterFormat, Change, File, Pair, Parts, Stack, Stored, pairs};
use formats::{Error, Result, Safetensors};
use serde_json::Value;
use std::path::Path;

const WEIGHTS: &str = "adapter_model.safetensors";

/// Settings that change nothing in a loaded adapter, or that are read elsewhere.
const KNOWN: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
];

/// Ways to begin that leave the base as it is.
const PLAIN: &[&str] = &["gaussian", "eva", "orthogonal"];

pub(crate) fn open(folder: &Path, settings: &Settings) -> Result<File> {
    if settings.text("peft_type") != Some("LORA") {
        return Err(settings.lacks("peft_type", "LORA"));
    }
    if let Some((key, _)) = settings.said().find(|(key, _)| !KNOWN.contains(key)) {
        let error = settings.lacks(key, "null: this setting is not supported");
        return Err(error.hint("merge it into the model with PEFT, and load that"));
    }
    let biases = settings.text("bias").unwrap_or("none");
    if !["none", "all", "lora_only"].contains(&biases) {
        return Err(settings.lacks("bias", "none, all or lora_only"));
    }
    let whole = settings.names("modules_to_save")?.unwrap_or_default();
    let tokens = token_rows(settings)?;
    let ties = settings.flag("ensure_weight_tying")?;
    // How the base stores its matrices (GPT-2's `[in, out]`); factors lie alike either way.
    settings.flag("fan_in_fan_out")?;
    if settings.text("init_lora_weights").is_some_and(|way| !PLAIN.contains(&way)) {
        let expected = "a beginning that leaves the model's weights as they are";
        return Err(settings
            .lacks("init_lora_weights", expected)
            .hint("save it with PEFT's path_initial_model_for_weight_conversion"));
    }
    let missing = |key| settings.wrong(key, "a number", "nothing");
    let rank = settings.positive("r")?.ok_or_else(|| missing("r"))?;
    let alpha = settings.positive("lora_alpha")?.ok_or_else(|| missing("lora_alpha"))?;
    let ranks = Patterns::read(settings, "rank_pattern")?;
    let alphas = Patterns::read(settings, "alpha_pattern")?;
    // How factors of a parameter of three axes lie was another matter before 0.19.
    let version = settings.text("peft_version").map(|version| {
        let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(u32::MAX));
        (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(u32::MAX))
    });
    let old = version.is_none_or(|version| version < (0, 19));
    let (dora, root) = (settings.flag("use_dora")?, settings.flag("use_rslora")?);
    let file = folder.join(WEIGHTS);
    if !file.is_file() && folder.join("adapter_model.bin").is_file() {
        return Err(Error::new(folder.display(), WEIGHTS, "adapter_model.bin")
            .hint("save the adapter again with safe_serialization=True"));
    }
    let tensors = Stored::Safetensors(Safetensors::open(&file)?);
    let parts = |down, up, magnitude| Parts { down, up, magnitude };
    const MAGNITUDES: &[&str] = &[".lora_magnitude_vector", ".lora_magnitude_vector.weight"];
    let linear = parts(".lora_A.weight", ".lora_B.weight", MAGNITUDES);
    let table = parts(".lora_embedding_A", ".lora_embedding_B", &[]);
    let (tables, rest) = pairs(&file, &tensors.names(), &table)?;
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    let of_table = |pair: &&Pair| {
        let magnitude = |end: &&str| rest.contains(&format!("{}{end}", pair.stem).as_str());
        MAGNITUDES.iter().any(magnitude)
    };
    if let Some(pair) = tables.iter().find(of_table) {
        let place = format!("{}: {}", file.display(), pair.stem);
        let expected = "DoRA of matrices that are multiplied with";
        return Err(Error::new(place, expected, "of a table of embeddings"));
    }
    let (linears, mut rest) = pairs(&file, &rest, &linear)?;
    // Biases of factors.
    const BIAS: &str = ".lora_B.bias";
    let mut own_biases: Vec<String> = Vec::new();
    rest.retain(|name| match name.strip_suffix(BIAS) {
        Some(stem) if linears.iter().any(|pair| pair.stem == stem) => {
            own_biases.push(stem.to_owned());
            false
        }
        _ => true,
    });
    let mut adapter = File {
        kind: AdapterFormat::Peft,
        path: file,
        tensors,
        changes: vec![],
        renewed: vec![],
        made_for: None,
    };
    for (pair, gathers) in
        linears.iter().map(|pair| (pair, false)).chain(tables.iter().map(|pair| (pair, true)))
    {
        let mut matrix = module(&pair.stem);
        while let Some(wrapped) = matrix.strip_suffix(".base_layer") {
            matrix = wrapped;
        }
        let scaled = |name: &str| {
            let rank = ranks.of(name).unwrap_or(rank);
            let divisor = if root { rank.sqrt() } else { rank };
            (rank, alphas.of(name).unwrap_or(alpha) / divisor)
        };
        // Experts without gates have ups alone.
        let ups = format!("{matrix}.up_proj");
        let gated = ranks.of(&ups).is_none() && alphas.of(&ups).is_none();
        let stack = matrix.ends_with(".experts").then(|| Stack::Parameter {
            gate_up: scaled(&if gated { format!("{matrix}.gate_up_proj") } else { ups }),
            down: scaled(&format!("{matrix}.down_proj")),
            old,
        });
        let down = adapter.tensors.get(&pair.name(0));
        let found = down.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0);
        let (stated, scale) = scaled(matrix);
        if stack.is_none() && found as f64 != stated {
            let expected = format!("rank {stated}, as {} says", settings_name(folder));
            return Err(adapter.wrong(&pair.name(0), expected, format!("rank {found}")));
        }
        if dora != pair.names[2].is_some() {
            let (expected, found) = match dora {
                true => ("magnitudes, since use_dora is true", "none"),
                false => ("no magnitudes, since use_dora is false", "some"),
            };
            return Err(adapter.wrong(&pair.stem, expected, found));
        }
        let change = Change {
            matrix: matrix.to_owned(),
            down: pair.name(0),
            up: pair.name(1),
            // The table is stored `[r, tokens]`, and read by token.
            turned: false,
            gathers,
            magnitude: pair.names[2].clone(),
            bias: own_biases.contains(&pair.stem).then(|| format!("{}{BIAS}", pair.stem)),
            scale,
            stack,
        };
        adapter.changes.push(change);
    }
    for tensor in rest {
        let own = renewed(&tensor, &whole, biases, &tokens, ties);
        let own =
            own.ok_or_else(|| adapter.wrong(&tensor, "factors of LoRA or DoRA", "another tensor"))?;
        adapter.renewed.push(own);
    }
    let saved = |own: &&String| {
        let renewed = adapter.renewed.iter().filter(|renewed| !renewed.bias);
        renewed.into_iter().any(|renewed| is_saved(&renewed.module, std::slice::from_ref(*own)))
    };
    if let Some(missing) = whole.iter().find(|own| !saved(own)) {
        let expected = format!("modules that {WEIGHTS} has");
        return Err(settings.wrong("modules_to_save", expected, format!("none for {missing}")));
    }
    // A table does not stand for a head that is there, too, nor a head for a table.
    let heads = adapter.renewed.iter().any(|own| !own.bias && own.module.ends_with("lm_head"));
    adapter.renewed.iter_mut().for_each(|own| own.ties &= !heads);
    if adapter.changes.is_empty() && !adapter.renewed.iter().any(|own| own.trained) {
        return Err(Error::new(adapter.path.display(), "factors of LoRA or DoRA", "none"));
    }
    Ok(adapter)
}

fn settings_name(folder: &Path) -> String {
    folder.join("adapter_config.json").display().to_string()
}

/// The name of a module in the model that PEFT wrapped.
fn module(name: &str) -> &str {
    name.strip_prefix("base_model.model.").unwrap_or(name)
}

/// A tensor that is no factor: a weight of the base.
fn renewed(
    tensor: &str,
    whole: &[String],
    biases: &str,
    tokens: &[(Option<String>, Vec<usize>)],
    ties: bool,
) -> Option<Renewed> {
    let own = Renewed { tensor: tensor.to_owned(), ..Renewed::default() };
    if let Some(stem) = tensor.strip_suffix(".token_adapter.trainable_tokens_delta") {
        let name = module(stem);
        let of = |(part, _): &&(Option<String>, Vec<usize>)| {
            part.as_ref().is_none_or(|part| name.ends_with(part.as_str()))
        };
        let (_, rows) = tokens.iter().find(of)?;
        let module = name.to_owned();
        return Some(Renewed {
            module,
            rows: Some(rows.clone()),
            trained: true,
            ties: true,
            ..own
        });
    }
    let (name, part) = module(tensor).rsplit_once('.')?;
    let bias = match part {
        "weight" => false,
        "bias" => true,
        _ => return None,
    };
    let name = name.strip_suffix(".base_layer").unwrap_or(name);
    let saved = is_saved(name, whole);
    let table = name.ends_with("embed_tokens") || name.ends_with("lm_head");
    // A module that is tied to one that is saved is saved, too.
    let saved = saved || (ties && table && !whole.is_empty());
    let trained = saved || (bias && biases != "none");
    let own = Renewed { module: name.to_owned(), bias, trained, ties: ties && saved, ..own };
    (trained || table).then_some(own)
}

/// Whether a module is one of those that are saved, or within one.
fn is_saved(module: &str, whole: &[String]) -> bool {
    let mut modules = std::iter::successors(Some(module), |name| Some(name.rsplit_once('.')?.0));
    modules.any(|name| whole.iter().any(|own| name.ends_with(own.as_str())))
}

/// The tokens whose rows are trained, of each table of embeddings that is named, or of the one that
/// the model has.
fn token_rows(settings: &Settings) -> Result<Vec<(Option<String>, Vec<usize>)>> {
    const KEY: &str = "trainable_token_indices";
    let list = |of: &Settings, key: &str| -> Result<Vec<usize>> {
        let wrong = || of.wrong(key, "a list of tokens, each once", "another");
        let Some(Value::Array(all)) = of.get(key) else { return Err(wrong()) };
        let token = |value: &Value| value.as_u64().and_then(|token| usize::try_from(token).ok());
        let all = all.iter().map(token).collect::<Option<Vec<usize>>>().ok_or_else(wrong)?;
        let mut sorted = all.clone();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) { Err(wrong()) } else { Ok(all) }
    };
    match settings.get(KEY) {
        None => Ok(Vec::new()),
        Some(Value::Array(_)) => Ok(vec![(None, list(settings, KEY)?)]),
        Some(_) => {
            let tables = settings.object(KEY)?;
            let tables = tables.iter().flat_map(|of| of.said().map(move |(key, _)| (of, key)));
            tables.map(|(of, key)| Ok((Some(key.to_owned()), list(of, key)?))).collect()
        }
    }
}
