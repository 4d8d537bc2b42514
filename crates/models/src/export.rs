//! A model folder in the terms of GGUF: the architecture's metadata, and every weight by its GGUF
//! name with the recipe that gives it.
//!
//! GGUF wants three things that checkpoints do not have: rows of Llama's q and k in the order in
//! which adjacent elements rotate together, Gemma's norms with their 1, and the factors of `llama3`
//! and LongRoPE as tensors.

use crate::files::{self, Files};
use crate::keys::{Asked, Dialect, Key};
use crate::names::{Names, candidates};
use crate::rope::{Rotation, Scaling};
use crate::{Config, Options, scaling};
use formats::gguf::Value;
use formats::{Error, ErrorKind, Result, Source, Tensors};
use nn::Weights;
use std::f64::consts::TAU;

/// A model folder in the terms of GGUF.
#[derive(Debug)]
pub struct Export {
    /// What the architecture says, `general.architecture` first.
    pub metadata: Vec<(String, Value)>,
    /// The weights, in the order of a forward pass.
    pub weights: Vec<Exported>,
    /// What the file leaves out or says oddly, one line each.
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

/// The architectures that have a form in GGUF, and its name there.
const FORMS: &[(&str, &str)] = &[
    ("llama", "llama"),
    ("mistral", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("phi3", "phi3"),
    ("gemma2", "gemma2"),
];

/// The folder behind `tensors` in the terms of GGUF, once it has been loaded as
/// [`load`](crate::load) does.
///
/// # Errors
/// Those of [`load`](crate::load); a GGUF file; an architecture or a rotation that has no form
/// there.
pub fn export(tensors: &Tensors) -> Result<Export> {
    let folder = tensors.folder().ok_or_else(|| {
        let hint = "quantize turns a GGUF file into another";
        Error::new(tensors.path().display(), "a model folder", "a GGUF file").hint(hint)
    })?;
    let options = Options::default();
    let model = crate::load(tensors, &options)?;
    let config = model.config();
    let place = folder.path().join("config.json").display().to_string();
    let file = tensors.path().display().to_string();
    let known = FORMS.iter().find(|form| form.0 == config.architecture.name);
    let form = known.map(|form| form.1).ok_or_else(|| {
        let expected: Vec<&str> = FORMS.iter().map(|form| form.0).collect();
        Error::new(&place, format!("one of {}", expected.join(", ")), config.architecture.name)
            .of(ErrorKind::Unsupported)
    })?;
    let asked = Asked::default();
    let (keys, outer) = files::of_json(folder.config(), &place, &asked)?;
    let (_, names) = crate::open(tensors, &file, &options)?;
    let architecture = config.architecture;
    let files =
        Files { architecture, keys, outer, names: &names, tensors: Some(tensors), context: None };
    let mut metadata = metadata(&files, config, form)?;
    let mut weights = weights(&names, config, form)?;
    let rotated = rotation(&files, config, form, &mut metadata)?;
    weights.splice(0..0, rotated);
    Ok(Export { metadata, weights, warnings: config.warnings.clone() })
}

/// The numbers of the architecture.
fn metadata(files: &Files<'_>, config: &Config, form: &str) -> Result<Vec<(String, Value)>> {
    let mut all = vec![("general.architecture".to_owned(), Value::String(form.to_owned()))];
    let mut add = |key: &str, value: Value| all.push((format!("{form}.{key}"), value));
    let size = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    add("context_length", size(config.context));
    add("embedding_length", size(config.hidden));
    add("block_count", size(config.layers));
    add("feed_forward_length", size(config.feed_forward));
    add("attention.head_count", size(config.heads));
    add("attention.head_count_kv", size(config.kv_heads));
    add("attention.key_length", size(config.head_dim));
    add("attention.value_length", size(config.head_dim));
    add("attention.layer_norm_rms_epsilon", Value::F32(config.norm_eps));
    add("vocab_size", size(config.vocab));
    let window = config.windows.iter().flatten().next();
    if let Some(window) = window {
        let alternate = |(i, w): (usize, &Option<usize>)| w.is_some() == (i % 2 == 0);
        let fits = match form {
            "gemma2" => config.windows.iter().enumerate().all(alternate),
            _ => config.windows.iter().all(|w| w == &Some(*window)),
        };
        if !fits {
            let found = "windows on some layers only";
            let place = files.keys.place("sliding_window");
            return Err(Error::new(place, "windows as GGUF can say them", found));
        }
        add("attention.sliding_window", size(*window));
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = files.keys.number(Key(key, key))?.filter(|_| form == "gemma2") {
            add(key, Value::F32(cap.value as f32));
        }
    }
    if let Some(scalar) = files.keys.number(Key("query_pre_attn_scalar", ""))? {
        // Readers of GGUF take the width of a head; of the largest of the family, the width that
        // its heads would have.
        let taken =
            if config.layers == 46 { config.hidden / config.heads } else { config.head_dim };
        if form == "gemma2" && scalar.value != taken as f64 {
            return Err(
                scalar.wrong(format!("{taken}, which GGUF cannot say otherwise"), scalar.value)
            );
        }
    }
    Ok(all)
}

/// The rotation: its keys, and the weights that state factors.
fn rotation(
    files: &Files<'_>,
    config: &Config,
    form: &str,
    metadata: &mut Vec<(String, Value)>,
) -> Result<Vec<Exported>> {
    let Rotation { theta, rotary, scaling } = scaling::read(files, config.head_dim)?;
    let mut add = |key: &str, value: Value| metadata.push((format!("{form}.rope.{key}"), value));
    let number = |n: f64| Value::F32(n as f32);
    let width = rotary.map_or(config.head_dim, |rotary| rotary.value);
    add("freq_base", number(theta.value));
    add("dimension_count", Value::U32(width as u32));
    let factors = |name: &str, values: Vec<f32>| Exported {
        name: name.to_owned(),
        shape: vec![values.len()],
        from: From::Values(values),
    };
    let mut kind = |kind: &str, factor: f64| {
        add("scaling.type", Value::String(kind.to_owned()));
        add("scaling.factor", number(factor));
    };
    Ok(match scaling.value.clone() {
        Scaling::None => Vec::new(),
        Scaling::Linear { factor } => {
            kind("linear", factor);
            Vec::new()
        }
        Scaling::Yarn(yarn) => {
            kind("yarn", yarn.factor);
            add("scaling.original_context_length", Value::U32(yarn.original as u32));
            add("scaling.yarn_beta_fast", number(yarn.fast));
            add("scaling.yarn_beta_slow", number(yarn.slow));
            let usual = crate::rope::Yarn::magnitude(yarn.factor, 1.0);
            add("scaling.attn_factor", number(yarn.magnitude / usual));
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
            add("scaling.original_context_length", Value::U32(original as u32));
            add("scaling.attn_factor", number(near));
            vec![
                factors("rope_factors_long.weight", long),
                factors("rope_factors_short.weight", short),
            ]
        }
        Scaling::Dynamic { .. } => {
            let error = scaling.wrong("a rotation that GGUF can say", "dynamic");
            return Err(error.of(ErrorKind::Unsupported));
        }
    })
}

/// Every weight that the architecture's tables name and the checkpoint has.
fn weights(names: &Names<'_>, config: &Config, form: &str) -> Result<Vec<Exported>> {
    let rows: Vec<&str> =
        names.tables.iter().flat_map(|table| table.iter()).map(|row| row.0).collect();
    let whole = rows.iter().filter(|row| !row.contains("{}")).map(|row| (*row).to_owned());
    let whole = whole.filter(|name| name != "head" || !config.tied);
    let of_block = |i: usize| {
        let rows = rows.iter().filter(|row| row.contains("{}"));
        rows.map(move |row| row.replace("{}", &i.to_string()))
    };
    let mut all = Vec::new();
    for canonical in whole.chain((0..config.layers).flat_map(of_block)) {
        for canonical in [canonical.clone(), format!("{canonical}.bias")] {
            let Some(stored) = names.find(&canonical)? else { continue };
            let named = candidates(&canonical, Dialect::Gguf, names.tables);
            let Some(name) = named.into_iter().next() else { continue };
            let part = canonical.trim_end_matches(".bias");
            let heads = match part.rsplit('.').next() {
                Some("q") => config.heads,
                Some("k") => config.kv_heads,
                _ => 0,
            };
            let mut source = stored.source;
            if form == "llama" && heads > 0 {
                let axes = [heads, 2, config.head_dim / 2, 1];
                source = Source::Permute(Box::new(source), axes);
            }
            if form == "gemma2" && part.ends_with("norm") {
                source = Source::Plus(Box::new(source), 1.0);
            }
            all.push(Exported { name, shape: stored.shape, from: From::Source(source) });
        }
    }
    Ok(all)
}
