//! Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! A matrix `M` has `base_model.model.M.lora_A.weight` `[r, in]` and `lora_B.weight` `[out, r]`; a
//! table of embeddings `lora_embedding_A` `[r, tokens]` and `lora_embedding_B` `[width, r]`. The
//! change is `alpha / r` of their product, with rsLoRA (Kalajdzievski 2023) `alpha / sqrt(r)`. DoRA
//! adds `lora_magnitude_vector` `[out]`.
//!
//! Of `target_parameters`, a stack of experts' matrices has the factors of all experts in one pair
//! ([`Stack::Parameter`]). The pair is named after the module that holds the stack; where a module
//! holds several, it is wrapped once for each, and all but the last are named `base_layer` of it.

use crate::patterns::Patterns;
use crate::settings::Settings;
use crate::{AdapterFormat, Change, File, Pair, Parts, Stack, Stored, pairs};
use formats::{Error, Result, Safetensors};
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
    "lora_dropout",
    "megatron_core",
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
    if settings.text("bias").is_some_and(|bias| bias != "none") {
        return Err(settings.lacks("bias", "none"));
    }
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
    let (linears, rest) = pairs(&file, &rest, &linear)?;
    let mut adapter = File {
        kind: AdapterFormat::Peft,
        path: file,
        tensors,
        changes: vec![],
        copies: vec![],
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
            scale,
            stack,
        };
        adapter.changes.push(change);
    }
    for name in rest {
        let copied =
            module(&name).rsplit_once('.').filter(|(_, part)| ["weight", "bias"].contains(part));
        let copied = copied.map(|(n, part)| (n.strip_suffix(".base_layer").unwrap_or(n), part));
        match copied.filter(|(n, _)| n.ends_with("embed_tokens") || n.ends_with("lm_head")) {
            Some((matrix, part)) => {
                adapter.copies.push((name.clone(), matrix.to_owned(), part == "bias"));
            }
            None => return Err(adapter.wrong(&name, "factors of LoRA or DoRA", "another tensor")),
        }
    }
    if adapter.changes.is_empty() {
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
