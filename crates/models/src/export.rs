//! A model folder in the terms of GGUF: the architecture's metadata, and every weight by its GGUF
//! name with the recipe that gives it.
//!
//! All of it follows from what the architecture's own file reads: a setting whose key has a name in
//! GGUF is stated there under it, and the weights are those that the recorded Program has. GGUF
//! wants three things that checkpoints do not have: rows of q and k in the order in which adjacent
//! elements rotate together, for some architectures; matrices that belong together in one; and the
//! factors of `llama3` and LongRoPE as tensors. [`check`] says whether the file computes what the
//! folder does.

use crate::files::{self, Files};
use crate::keys::{Asked, Dialect, Key, Keys};
use crate::names::{Names, candidates};
use crate::rope::{Rotation, Scaling};
use crate::{
    Architecture, Config, ReadOptions, apertus, deci, falcon, gemma3n, gemma4, granite_swa, hybrid,
    kimi_linear, laguna, latent, lfm2, mamba, mimo_v2, minicpm, nanbeige, nets, openelm, qwen,
    scaling, step3p5,
};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Error, ErrorKind, Result, Source, Tensors};
use nn::Pairing;
use program::{Program, Weight};
use std::f64::consts::TAU;

/// A model folder in the terms of GGUF.
#[derive(Debug)]
pub struct Export {
    /// The architecture's metadata, `general.architecture` first.
    pub metadata: Vec<(String, MetadataValue)>,
    /// The weights, in the order of a forward pass.
    pub weights: Vec<Exported>,
    /// Assumptions made where the file omits something or is unusual, one line each.
    pub warnings: Vec<String>,
}

/// A weight of an [`Export`].
#[derive(Debug)]
pub struct Exported {
    /// Its name in GGUF.
    pub name: String,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// Where its elements come from.
    pub from: From,
}

/// Where the elements of an exported weight come from.
#[derive(Debug)]
pub enum From {
    /// The checkpoint's tensors.
    Source(Source),
    /// The configuration.
    Values(Vec<f32>),
}

/// Architectures whose rows of q and k GGUF has in the order in which adjacent elements rotate
/// together, by their names in config.json.
const PERMUTED: &[&str] = &[
    "arcee",
    "baichuan",
    "bailing_moe",
    "deepseek",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "internlm",
    "internlm2",
    "internlm3",
    "iquestcoder",
    "llama",
    "minicpm",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "muse_glimmer",
    "nanbeige",
    "nemotron-nas",
    "nemotron_h",
    "nemotron_h_moe",
    "olmo",
    "smollm3",
    "xverse",
];

/// Architectures for which GGUF lists the layers that have windows, by their names in config.json.
const LISTED: &[&str] = &[
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "exaone_moe",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "granite_swa",
    "granitemoe_swa",
    "laguna",
    "mellum",
    "muse_glimmer",
    "olmo3",
    "step3p5",
];

/// Architectures for which GGUF says that the rotation is not stretched, by their names in
/// config.json.
const UNSCALED: &[&str] =
    &["cohere", "cohere2", "cohere2_moe", "deepseek", "exaone_moe", "nemotron"];

/// GGUF's names of architectures whose readers want a head even where it is the embedding.
const HEADED: &[&str] = &[
    "apertus",
    "baichuan",
    "bailingmoe",
    "bailingmoe2",
    "codeshell",
    "dbrx",
    "dots1",
    "exaone-moe",
    "gpt-oss",
    "gptneox",
    "internlm2",
    "kimi-linear",
    "mellum",
    "mimo2",
    "minimax-m2",
    "muse-glimmer",
    "nemotron",
    "olmo2",
    "olmoe",
    "orion",
    "phi2",
    "qwen",
    "qwen2moe",
    "stablelm",
    "step35",
    "xverse",
];

/// GGUF's names of architectures of which llama.cpp reads YaRN's betas.
const BETAS: &[&str] = &["laguna", "mistral3", "mistral4"];

/// A line about betas of YaRN for which llama.cpp takes the usual ones.
fn unread_betas(
    architecture: &Architecture,
    metadata: &[(String, MetadataValue)],
) -> Option<String> {
    let beta = |end: &str| {
        metadata.iter().find_map(|(key, value)| match value {
            MetadataValue::F32(beta) if key.ends_with(end) => Some(*beta),
            _ => None,
        })
    };
    let (fast, slow) = (beta(".yarn_beta_fast")?, beta(".yarn_beta_slow")?);
    let usual = (fast, slow) == (32.0, 1.0) || BETAS.contains(&architecture.gguf);
    let said = || {
        format!(
            "llama.cpp takes 32 and 1 for YaRN's beta_fast and beta_slow, not {fast} and {slow}"
        )
    };
    (!usual).then(said)
}

/// Whether GGUF has a head of its own where a folder's is its embedding.
///
/// # Errors
/// Something else than true or false about it.
pub(crate) fn copies_head(
    architecture: &Architecture,
    keys: &Keys<'_>,
    outer: &Keys<'_>,
) -> Result<bool> {
    let stated = match keys.flag(Key("tie_word_embeddings", ""))? {
        Some(tied) => Some(tied),
        None => outer.flag(Key("tie_word_embeddings", ""))?,
    };
    Ok(HEADED.contains(&architecture.gguf) && stated.unwrap_or(true))
}

/// Parts of the names of modules in files and in the classes that Transformers makes of these, by
/// architecture; the first that fits counts.
const CLASS_MODULES: &[(&str, &str, &str)] = &[
    ("kimi_linear", ".self_attn.f_", ".self_attn.forget_gate.f_"),
    ("kimi_linear", ".block_sparse_moe.", ".mlp."),
    ("bailing_hybrid", ".attention.dense", ".self_attn.o_proj"),
    ("bailing_hybrid", ".attention.f_proj", ".self_attn.forget_gate.f_proj"),
    ("bailing_hybrid", ".attention.", ".self_attn."),
];

impl Architecture {
    /// Whether GGUF has the rows of q and k in the order in which adjacent elements rotate
    /// together, where its folders have the halves of each head one after the other.
    pub fn permutes_heads(&self) -> bool {
        PERMUTED.contains(&self.name)
    }

    /// The module of Hugging Face's model that holds the decoder: the model itself, or a part of it
    /// beside towers. `names` are those of a folder's tensors. Where Transformers has a class for
    /// texts alone of the same `model_type`, which its automatic class takes, it is that one's.
    pub fn decoder_module<'n>(&self, mut names: impl Iterator<Item = &'n str>) -> &'static str {
        let beside = |name: &str| {
            let mut words = name.split('.').take(2);
            words.find_map(|word| match word {
                "language_model" => Some("model.language_model"),
                "text_model" => Some("model.text_model"),
                _ => None,
            })
        };
        match self.class.ends_with("ForConditionalGeneration") {
            _ if self.has_text_class() => "model",
            // The part that listens, of one that speaks, too.
            true if self.name.contains("_omni") => "thinker.model.language_model",
            true => "model.language_model",
            false => names.find_map(beside).unwrap_or("model"),
        }
    }

    /// The module of Transformers' class that files call `stored`, whose names are others in some.
    pub fn class_module(&self, stored: &str) -> String {
        let own = CLASS_MODULES.iter().filter(|(name, ..)| *name == self.name);
        let mut renamed = own.filter(|(_, file, _)| stored.contains(file));
        renamed.next().map_or(stored.to_owned(), |(_, file, class)| stored.replacen(file, class, 1))
    }

    /// Whether Transformers has a class for texts alone of the same `model_type` as that with
    /// towers.
    fn has_text_class(&self) -> bool {
        ["llama4", "qwen3_5", "qwen3_5_moe"].contains(&self.name)
    }

    /// The name in mlx-lm of a module of Transformers': models with towers have a whole model of
    /// texts there, `language_model`, where Transformers' have its inner one, but for Gemma 3n.
    /// `towers`: whether the folder has any.
    pub fn mlx_module(&self, name: &str, towers: bool) -> String {
        match name.strip_prefix("model.language_model.") {
            Some(rest) if self.name != "gemma3n" => format!("language_model.model.{rest}"),
            // Named after the class for texts alone, which mlx-lm does not have.
            None if self.has_text_class() && towers => format!("language_model.{name}"),
            _ => name.to_owned(),
        }
    }

    /// Whether PEFT takes the gates of attention for experts', and refuses them alone.
    pub fn hides_gates(&self) -> bool {
        self.name == "afmoe"
    }

    /// The module of Hugging Face's model that holds the experts' matrices of a block, within the
    /// block.
    pub fn experts_module(&self) -> &'static str {
        match self.name {
            "ernie4_5_vl_moe" => "mlp.text_moe.experts",
            "gemma4" | "gemma4_text" => "experts",
            "granitemoe" | "granitemoeshared" | "granitemoehybrid" | "granitemoe_swa" => {
                "block_sparse_moe.experts"
            }
            "jamba" | "lfm2_moe" | "llama4" => "feed_forward.experts",
            "nemotron_h" | "nemotron_h_moe" => "mixer.experts",
            _ => "mlp.experts",
        }
    }

    /// Whether Hugging Face's model has the rows of experts' gates and ups by turns in one matrix,
    /// and not the ups behind the gates.
    pub fn gates_by_turns(&self) -> bool {
        self.name == "gpt_oss"
    }

    /// Whether PEFT takes it for granted that the axes of Hugging Face's stacks of experts are out
    /// and in, though they are in and out.
    pub fn turns_experts(&self) -> bool {
        self.name.starts_with("llama4")
    }
}

/// The folder behind `tensors` in the terms of GGUF, once it has been loaded as
/// [`load`](crate::load) does.
///
/// # Errors
/// Those of [`load`](crate::load); a GGUF file; a rotation that has no form there.
pub fn export(tensors: &Tensors) -> Result<Export> {
    let folder = tensors.folder().ok_or_else(|| {
        let hint = "quantize turns a GGUF file into another";
        Error::new(tensors.path().display(), "a model folder", "a GGUF file").hint(hint)
    })?;
    let asked = Asked::default();
    let model = crate::load_asking(tensors, &ReadOptions::default(), &asked, true)?;
    let config = model.config();
    let place = folder.stated_in().display().to_string();
    let architecture = config.architecture;
    if architecture.gguf.is_empty() {
        let expected = "an architecture whose GGUF files are read";
        return Err(Error::new(&place, expected, architecture.name).of(ErrorKind::Unsupported));
    }
    let stated = asked.stated();
    let file = tensors.path().display().to_string();
    let (dialect, tables) = (Dialect::HuggingFace, architecture.names);
    let (keys, outer) = files::of_json(folder.config(), &place, &asked)?;
    let copied = copies_head(architecture, &keys, &outer)?;
    let names = Names { tensors, dialect, file: &file, tables, quantised: None, copied };
    let (tensors, context) = (Some(tensors), None);
    let files = Files {
        architecture,
        keys,
        outer,
        names: &names,
        tensors,
        context,
        latents: None,
        apart: true,
    };
    let files = files.of_class();
    let held = &model.layers.blank.weights;
    let count = stated.iter().find_map(|(key, value)| match value {
        MetadataValue::U32(count) if *key == "expert_count" => Some(*count as usize),
        _ => None,
    });
    let count = count.unwrap_or(0);
    let (mut metadata, net) =
        (metadata(config, stated, held, count), hybrid::metadata(&files, held)?);
    let net = match ["_vl", "_vl_moe", "_omni", "_omni_moe"]
        .iter()
        .any(|end| architecture.name.ends_with(end))
    {
        true => vec![hybrid::sections(&files)?],
        false => net,
    };
    let mut heads = latent::metadata(&files, config, held)?;
    heads.extend(lfm2::metadata(config, held));
    heads.extend(falcon::metadata(config));
    heads.extend(qwen::metadata(config));
    heads.extend(mamba::metadata(config, held));
    heads.extend(laguna::metadata(&files, config)?);
    heads.extend(deci::metadata(&files, config)?);
    heads.extend(openelm::metadata(&files, config)?);
    heads.extend(granite_swa::metadata(&files, config)?);
    heads.extend(mimo_v2::metadata(&files, config)?);
    heads.extend(kimi_linear::metadata(config, held));
    heads.extend(nanbeige::metadata(&files, config)?);
    heads.extend(gemma4::metadata(&files)?);
    heads.extend(gemma3n::metadata(&files)?);
    heads.extend(step3p5::metadata(&files, config, held)?);
    metadata.retain(|(key, _)| {
        let own = |own: &str| *key == format!("{}.{own}", architecture.gguf);
        // Readers take MiniCPM 3's factors for granted.
        let granted = architecture.gguf == latent::THIRD && minicpm::FACTORS.iter().any(|f| own(f));
        !granted && !heads.iter().any(|(key, _)| own(key))
    });
    metadata.extend(
        net.into_iter()
            .chain(heads)
            .map(|(key, value)| (format!("{}.{key}", architecture.gguf), value)),
    );
    metadata.extend(apertus::metadata(&files, config.layers)?);
    let key_heads = files.keys.size("linear_num_key_heads")?.map(|heads| heads.value);
    let tiled = key_heads.filter(|_| architecture.name != hybrid::NEXT);
    let groups = mamba::groups(&files)?;
    let mut weights = weights(config, held, [count, tiled.unwrap_or(0), groups]);
    laguna::gates(&files, config, &mut weights)?;
    let own = match gemma4::tensors(&files)? {
        Some(tensors) => Some(tensors),
        None => step3p5::rotation(&files, config, &mut metadata)?,
    };
    let rotated = match (own, &config.rope) {
        (Some(tensors), _) => tensors,
        (None, Some(_)) => rotation(&files, config, &mut metadata)?,
        (None, None) => Vec::new(),
    };
    weights.splice(0..0, rotated);
    let mut warnings = config.warnings.clone();
    warnings.extend(unread_betas(architecture, &metadata));
    Ok(Export { metadata, weights, warnings })
}

/// Checks that the GGUF file `file`, of which only the headers need to be there, computes what the
/// folder does.
///
/// # Errors
/// The first operation or weight that is another one: settings that GGUF cannot say.
pub fn check(folder: &Tensors, file: &Tensors) -> Result<()> {
    let options = ReadOptions::default();
    let record = |tensors: &Tensors| {
        let asked = Asked::default();
        crate::load_asking(tensors, &options, &asked, true)?.record(false)
    };
    let wanted = record(folder)?;
    let unsaid = |found: String| {
        let place = folder.path().join("config.json").display().to_string();
        Error::new(place, "settings that GGUF can say", found).of(ErrorKind::Unsupported)
    };
    let Some(found) = record(file).map(|found| difference(&wanted, &found)).transpose() else {
        return Ok(());
    };
    let (wanted, found) = found.map_err(|why| {
        let place = format!("{}: ", file.path().display());
        unsaid(format!("others, without which {}", why.to_string().replace(&place, "")))
    })?;
    Err(unsaid(wanted).hint(format!("readers of the file would take {found}")))
}

/// The first difference of two Programs but for where their weights come from: what is in each.
fn difference(a: &Program, b: &Program) -> Option<(String, String)> {
    let weight = |weight: &Weight| format!("{} {}", weight.name, formats::shape(&weight.shape));
    let layer = |layer: &program::CacheLayer| format!("{layer:?}").replace("Some(", "");
    // Rows of q and k in another order rotate in other pairs; heads of values in another order
    // share other keys.
    let node = |node: &program::Node| {
        let text = format!("{node:?}").replace("pairing: Adjacent", "pairing: Half");
        text.replace("tiled: true", "tiled: false").replace("Some(", "")
    };
    let texts = |program: &Program| -> Vec<String> {
        let weights = program.weights.iter().map(weight);
        let nodes = program.nodes.iter().map(node);
        weights.chain(program.layers.iter().map(layer)).chain(nodes).collect()
    };
    let (a, b) = (texts(a), texts(b));
    let none = || "nothing".to_owned();
    let longest = a.len().max(b.len());
    (0..longest).find_map(|i| match (a.get(i), b.get(i)) {
        (Some(a), Some(b)) if alike(a, b) => None,
        (a, b) => {
            let [a, b] = [a, b].map(|text| text.cloned().unwrap_or_else(none));
            let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
            Some((parting(&a, same), parting(&b, same)))
        }
    })
}

/// The setting of a listed operation whose value has the character at `at`, `name: value`.
fn parting(text: &str, at: usize) -> String {
    let all: Vec<char> = text.chars().collect();
    let at = at.min(all.len());
    let word = |c: &char| c.is_ascii_alphanumeric() || "._-".contains(*c);
    let begin = |end: usize| end - all[..end].iter().rev().take_while(|c| word(c)).count();
    let value = begin(at);
    let start = if all[..value].ends_with(&[':', ' ']) { begin(value - 2) } else { value };
    let after = |c: &char| !word(c) && !"[:, ".contains(*c) || *c == ',';
    let end = all[at..].iter().position(after).map_or(all.len(), |more| at + more);
    all[start..end.max(start)].iter().take(80).collect::<String>().trim_end().to_owned()
}

/// Whether two texts are the same but for the last digits of their numbers, which GGUF has in f32.
fn alike(a: &str, b: &str) -> bool {
    let words = |text: &str| -> Vec<String> {
        let apart = |c: char| !(c.is_ascii_alphanumeric() || "._-".contains(c));
        text.split(apart).map(str::to_owned).collect()
    };
    let (a, b) = (words(a), words(b));
    // Pairs that do not turn have a frequency of nearly nothing there.
    let near = |(a, b): (&String, &String)| match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(a), Ok(b)) => (a - b).abs() <= (1e-5 * a.abs().max(b.abs())).max(1e-25),
        _ => a == b,
    };
    a.len() == b.len() && a.iter().zip(&b).all(near)
}

/// The numbers of the architecture: what its configuration says under keys that GGUF has, and what
/// GGUF always has.
fn metadata(
    config: &Config,
    stated: Vec<(&'static str, MetadataValue)>,
    held: &[Weight],
    experts: usize,
) -> Vec<(String, MetadataValue)> {
    let size = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut own = vec![
        ("context_length", Some(size(config.context))),
        ("embedding_length", Some(size(config.hidden))),
        ("block_count", Some(size(config.layers))),
        ("feed_forward_length", Some(size(config.feed_forward))),
        ("attention.head_count", Some(size(config.heads))),
        ("attention.head_count_kv", Some(size(config.kv_heads))),
        ("vocab_size", Some(size(config.vocab))),
        // Whatever else is stated, some layers have windows or none has one.
        ("attention.sliding_window", config.windows.iter().flatten().next().map(|w| size(*w))),
    ];
    if LISTED.contains(&config.architecture.name) && !config.windows.is_empty() {
        let local = config.windows.iter().map(Option::is_some).collect();
        own.push((
            "attention.sliding_window_pattern",
            Some(MetadataValue::Array(MetadataArray::Bool(local))),
        ));
    }
    if config.rope.is_some() {
        own.push(("attention.key_length", Some(size(config.head_dim))));
        own.push(("attention.value_length", Some(size(config.head_dim))));
    }
    let down = held.iter().find(|weight| weight.name.ends_with(".experts.down"));
    if let Some(columns) = down.and_then(|weight| weight.shape.last()).filter(|_| experts > 0) {
        own.push(("expert_feed_forward_length", Some(size(*columns))));
    }
    let mut all: Vec<(&str, MetadataValue)> = stated;
    for (key, value) in own {
        all.retain(|(known, _)| *known != key);
        all.extend(value.map(|value| (key, value)));
    }
    let form = config.architecture.gguf;
    let named = all.into_iter().map(|(key, value)| (format!("{form}.{key}"), value));
    let first = ("general.architecture".to_owned(), MetadataValue::String(form.to_owned()));
    std::iter::once(first).chain(named).collect()
}

/// The rotation: its keys, and the weights that state factors.
fn rotation(
    files: &Files<'_>,
    config: &Config,
    metadata: &mut Vec<(String, MetadataValue)>,
) -> Result<Vec<Exported>> {
    let global = scaling::of_kind(files, "full_attention", config.head_dim)?;
    let local = scaling::of_kind(files, "sliding_attention", config.head_dim)?;
    let Rotation { theta, scaling, .. } = match global {
        Some(global) => global,
        None => scaling::read(files, config.head_dim)?,
    };
    let form = config.architecture.gguf;
    let log_multiplier = metadata.iter().find_map(|(key, value)| match value {
        MetadataValue::F32(log) if key.ends_with(scaling::LOG_MULTIPLIER) => Some(f64::from(*log)),
        _ => None,
    });
    let mut add = |key: &str, value: MetadataValue| {
        let key = format!("{form}.rope.{key}");
        metadata.retain(|(known, _)| *known != key);
        metadata.push((key, value));
    };
    let number = |n: f64| MetadataValue::F32(n as f32);
    let width = config.rope.as_ref().map_or(0, |rope| 2 * rope.frequencies.len());
    add("freq_base", number(theta.value));
    if let Some(local) = local {
        add("freq_base_swa", number(local.theta.value));
        // Others turn as much of both.
        if let Some(rotary) = local.rotary.filter(|_| form == laguna::ARCHITECTURE.gguf) {
            add("dimension_count_swa", MetadataValue::U32(rotary.value as u32));
        }
    }
    add("dimension_count", MetadataValue::U32(width as u32));
    let factors = |name: &str, values: Vec<f32>| Exported {
        name: name.to_owned(),
        shape: vec![values.len()],
        from: From::Values(values),
    };
    let mut kind = |kind: &str, factor: f64| {
        add("scaling.type", MetadataValue::String(kind.to_owned()));
        add("scaling.factor", number(factor));
    };
    Ok(match scaling.value.clone() {
        Scaling::None => {
            if UNSCALED.contains(&config.architecture.name) {
                add("scaling.type", MetadataValue::String("none".to_owned()));
            }
            Vec::new()
        }
        Scaling::Linear { factor } => {
            kind("linear", factor);
            Vec::new()
        }
        Scaling::Yarn(yarn) => {
            kind("yarn", yarn.factor);
            add("scaling.original_context_length", MetadataValue::U32(yarn.original as u32));
            add("scaling.yarn_beta_fast", number(yarn.fast));
            add("scaling.yarn_beta_slow", number(yarn.slow));
            let log = log_multiplier.unwrap_or(0.0);
            let usual = match form {
                form if latent::is_form(form) => latent::usual_magnitude(yarn.factor, 10.0 * log),
                _ => scaling::yarn_magnitude(yarn.factor, log),
            };
            let magnitude = yarn.magnitude / usual;
            // Readers would take it for a part of the factor on scores, too.
            if latent::is_form(form) && (magnitude - 1.0).abs() > 1e-6 {
                let found = format!("sines and cosines times {magnitude}");
                let error = scaling.wrong("a rotation that GGUF can say", found);
                return Err(error.of(ErrorKind::Unsupported));
            }
            add("scaling.attn_factor", number(magnitude));
            Vec::new()
        }
        Scaling::Llama3 { factor, low, high, original } => {
            let one = |i: usize| {
                let wavelength = TAU * theta.value.powf(2.0 * i as f64 / width as f64);
                let turns = original / wavelength;
                match turns {
                    turns if turns > high => 1.0,
                    turns if turns < low => factor as f32,
                    turns => {
                        let smooth = (turns - low) / (high - low);
                        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                    }
                }
            };
            vec![factors("rope_freqs.weight", (0..width / 2).map(one).collect())]
        }
        Scaling::Factors(values) => vec![factors("rope_freqs.weight", values)],
        Scaling::Long { short, long, original, magnitudes: [near, far] } => {
            if near != far {
                let expected = "one magnitude for all contexts, as GGUF has it";
                let error = scaling.wrong(expected, format!("{near} and {far}"));
                return Err(error.of(ErrorKind::Unsupported));
            }
            add("scaling.original_context_length", MetadataValue::U32(original as u32));
            add("scaling.attn_factor", number(near));
            vec![
                factors("rope_factors_long.weight", long),
                factors("rope_factors_short.weight", short),
            ]
        }
        Scaling::Dynamic { .. } | Scaling::Proportional { .. } => {
            let dynamic = matches!(scaling.value, Scaling::Dynamic { .. });
            let found = if dynamic { "dynamic" } else { "proportional" };
            let error = scaling.wrong("a rotation that GGUF can say", found);
            return Err(error.of(ErrorKind::Unsupported));
        }
    })
}

/// Every weight that the architecture's tables have a name for in GGUF and the model has, alone or
/// as parts of what is one there.
fn weights(
    config: &Config,
    held: &[Weight],
    [experts, key_heads, groups]: [usize; 3],
) -> Vec<Exported> {
    let tables = config.architecture.names;
    // Experts one by one are an older form.
    let rows: Vec<&str> = tables.iter().flat_map(|table| table.iter()).map(|r| r.0).collect();
    let rows = || rows.iter().filter(|row| row.matches("{}").count() < 2);
    let whole = rows().filter(|row| !row.contains("{}")).map(|row| (*row).to_owned());
    let of_block = |i: usize| {
        let rows = rows().filter(|row| row.contains("{}"));
        rows.map(move |row| row.replace("{}", &i.to_string()))
    };
    let mut all: Vec<Exported> = Vec::new();
    for canonical in whole.chain((0..config.layers).flat_map(of_block)) {
        for canonical in [canonical.clone(), format!("{canonical}.bias")] {
            let named = candidates(&canonical, Dialect::Gguf, tables);
            let Some(name) = named.into_iter().next() else { continue };
            let name = falcon::name_in_gguf(config.architecture.gguf, held, name);
            // What GGUF has in parts as well as in one: readers take the parts.
            let apart = canonical.strip_suffix(".qkv").or(canonical.strip_suffix(".qkv.bias"));
            let apart = apart.map(|block| candidates(&format!("{block}.q"), Dialect::Gguf, tables));
            if apart.is_some_and(|names| !names.is_empty()) {
                continue;
            }
            let of_hybrid =
                || hybrid::exported(held, &canonical, (key_heads > 0).then_some(key_heads));
            let own = nets::exported(held, &canonical).or_else(of_hybrid);
            let latent = || latent::exported(held, &canonical, config).map(Some);
            let own = own
                .or_else(latent)
                .or_else(|| gemma4::exported(held, &canonical, experts, config.architecture.gguf));
            let own = own.or_else(|| lfm2::convs::exported(held, &canonical));
            let own = own.or_else(|| gemma3n::exported(held, &canonical));
            let made = match own.or_else(|| mamba::exported(held, &canonical, groups)) {
                Some(made) => made,
                None => made(held, &canonical, config, experts),
            };
            let Some((source, shape)) = made else { continue };
            if !all.iter().any(|known| known.name == name) {
                all.push(Exported { name, shape, from: From::Source(source) });
            }
        }
    }
    all
}

/// A weight as GGUF has it: the model's own, or one of the model's parts below each other.
fn made(
    held: &[Weight],
    canonical: &str,
    config: &Config,
    experts: usize,
) -> Option<(Source, Vec<usize>)> {
    let (stem, suffix) = match canonical.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (canonical, ""),
    };
    let find = |name: &str| held.iter().find(|weight| weight.name == name);
    if let Some(weight) = find(canonical) {
        // Zeros in the place of what is not stored.
        if matches!(weight.source, Source::Zeros(_)) {
            return None;
        }
        let (mut source, mut shape) = (weight.source.clone(), weight.shape.clone());
        let heads = match stem.rsplit('.').next() {
            Some("q" | "k") => shape[0] / config.head_dim,
            _ => 0,
        };
        // Mistral's own files have that order.
        let halves = config.rope.as_ref().is_none_or(|rope| rope.pairing == Pairing::Half);
        if heads > 0 && halves && config.architecture.permutes_heads() {
            source = Source::Permute(Box::new(source), [heads, 2, config.head_dim / 2, 1]);
        }
        if stem.ends_with(".q_scale") || stem.ends_with(".k_scale") {
            // Weights of norms by head.
            shape = vec![shape[0] / config.head_dim, config.head_dim];
            source = Source::Reshape(Box::new(source), shape.clone());
        }
        if stem.contains(".experts.") && experts > 0 {
            shape.splice(..1, [experts, weight.shape[0] / experts]);
            source = Source::Reshape(Box::new(source), shape.clone());
        }
        return Some((source, shape));
    }
    let (block, part) = stem.rsplit_once('.')?;
    let parts: &[&str] = match part {
        "qkv" => &["q", "k", "v"],
        // Experts' are two stacks.
        "gate_up" if !block.ends_with(".experts") => &["gate", "up"],
        _ => return None,
    };
    let parts: Vec<&Weight> =
        parts.iter().map(|part| find(&format!("{block}.{part}{suffix}"))).collect::<Option<_>>()?;
    let mut shape = parts[0].shape.clone();
    shape[0] = parts.iter().map(|weight| weight.shape[0]).sum();
    Some((Source::Concat(parts.iter().map(|weight| weight.source.clone()).collect()), shape))
}

#[cfg(test)]
mod tests {
    use super::parting;

    #[test]
    fn what_parts_two_operations_is_a_setting_by_name() {
        let text = "Route { odds: Near { jitter: 0.1 }, scale: 1.0, gate: Plain }";
        for (at, setting) in [
            ("0.1", "jitter: 0.1"),
            (".1 }", "jitter: 0.1"),
            ("1.0,", "scale: 1.0"),
            ("lain", "gate: Plain"),
            ("Route", "Route"),
        ] {
            assert_eq!(parting(text, text.find(at).unwrap()), setting, "{at}");
        }
        assert_eq!(parting("nothing", 0), "nothing");
        assert_eq!(parting("", 5), "");
    }
}
