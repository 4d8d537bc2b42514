//! Generation settings that come with a model: `generation_config.json`, or GGUF's
//! `general.sampling.*`.

use formats::{Error, Folder, Result, Tensors};
use ops::sample::Options;
use serde_json::Value;
use tokens::Tokenizer;

/// The settings that a model's makers recommend, and warnings about them.
pub(crate) struct Defaults {
    pub(crate) sampling: Options,
    /// Ids that end a generation, all of them tokens of the model.
    pub(crate) ends: Vec<u32>,
    pub(crate) warnings: Vec<String>,
}

/// A setting: its key below GGUF's `general.sampling`, its key in JSON, and what it changes.
type Setting = (&'static str, &'static str, fn(&mut Options, f64));

const SETTINGS: &[Setting] = &[
    ("temp", "temperature", |options, value| options.temperature = value as f32),
    ("top_p", "top_p", |options, value| options.top_p = value as f32),
    ("min_p", "min_p", |options, value| options.min_p = value as f32),
    ("penalty_repeat", "repetition_penalty", |o, value| o.repetition_penalty = value as f32),
    // -1 and 0 are both ways to say "off".
    ("top_k", "top_k", |options, value| options.top_k = value as usize),
];

/// The settings of the model behind `tensors`, whose embedding has `vocabulary` rows.
///
/// # Errors
/// A setting of another type or out of range, and an end of generation that is no token, by file
/// and key.
pub(crate) fn read(
    tensors: &Tensors,
    vocabulary: usize,
    tokenizer: Option<&Tokenizer>,
) -> Result<Defaults> {
    // What most programs sample with where a model's makers say nothing.
    let usual =
        Options { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..Options::default() };
    let mut warnings = Vec::new();
    let (sampling, stated) = match tensors.folder() {
        Some(folder) => (of_folder(folder, usual, vocabulary)?, stated_ends(folder, tokenizer)?),
        None => (of_gguf(tensors, usual, vocabulary)?, Vec::new()),
    };
    let inside = |id: &u64| *id < vocabulary as u64;
    let known = tokenizer.into_iter().flat_map(|t| t.eos().iter().map(|id| u64::from(*id)));
    let mut ends: Vec<u32> = Vec::new();
    for id in stated.iter().map(|(_, id)| *id).chain(known).filter(inside) {
        let id = id as u32;
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    for (place, id) in stated.iter().filter(|(_, id)| !inside(id)) {
        if ends.is_empty() {
            return Err(Error::new(place, format!("a token id below {vocabulary}"), id)
                .hint("without an end that it can say, the model would never stop"));
        }
        let key = place.rsplit('/').next().unwrap_or(place);
        warnings.push(format!("{key} {id} is outside the vocabulary: other ends are used"));
    }
    if let Some(tokenizer) = tokenizer {
        if ends.is_empty() {
            warnings.push("no end token is stated: answers end only at a limit".to_string());
        }
        let size = tokenizer.vocab_size();
        if size > vocabulary && tensors.folder().is_some() {
            warnings.push(format!(
                "the tokenizer has {size} tokens, the model {vocabulary}: the last {} cannot be used",
                size - vocabulary
            ));
        }
    }
    Ok(Defaults { sampling, ends, warnings })
}

fn of_gguf(tensors: &Tensors, mut options: Options, vocabulary: usize) -> Result<Options> {
    let Some(metadata) = tensors.gguf().map(formats::Gguf::metadata) else { return Ok(options) };
    for (key, _, change) in SETTINGS {
        let key = format!("general.sampling.{key}");
        if let Some(value) = metadata.f64(&key)? {
            change(&mut options, value);
            options.validate(vocabulary).map_err(|e| Error { place: metadata.at(&key), ..e })?;
        }
    }
    Ok(options)
}

fn of_folder(folder: &Folder, usual: Options, vocabulary: usize) -> Result<Options> {
    let Some(config) = folder.generation_config() else { return Ok(usual) };
    let place = |key: &str| at(folder, "generation_config.json", key);
    let sampled = config.get("do_sample").and_then(Value::as_bool);
    let mut options = match sampled {
        // What Transformers means by leaving a setting out.
        Some(true) => Options { top_k: 50, ..Options::default() },
        _ => usual,
    };
    for (_, key, change) in SETTINGS {
        let Some(value) = config.get(key).filter(|value| !value.is_null()) else { continue };
        let number =
            value.as_f64().ok_or_else(|| Error::new(place(key), "a number", shown(value)))?;
        change(&mut options, number);
        options.validate(vocabulary).map_err(|e| Error { place: place(key), ..e })?;
    }
    if sampled == Some(false) {
        options.temperature = 0.0;
    }
    Ok(options)
}

/// Ids that a folder's files call ends of generation, and where.
fn stated_ends(folder: &Folder, tokenizer: Option<&Tokenizer>) -> Result<Vec<(String, u64)>> {
    const KEY: &str = "eos_token_id";
    let files = [
        ("generation_config.json", folder.generation_config()),
        ("config.json", Some(folder.config())),
    ];
    let mut stated = Vec::new();
    for (name, config) in files {
        let place = at(folder, name, KEY);
        let value = config.and_then(|config| config.get(KEY));
        for id in ids(&place, value)? {
            stated.push((place.clone(), id));
        }
    }
    let eos = tokenizer.and_then(Tokenizer::eos_token);
    stated.extend(eos.map(|id| (at(folder, "tokenizer_config.json", "eos_token"), id.into())));
    Ok(stated)
}

fn at(folder: &Folder, file: &str, key: &str) -> String {
    format!("{}: {key}", folder.path().join(file).display())
}

/// One id or a list of them.
fn ids(place: &str, value: Option<&Value>) -> Result<Vec<u64>> {
    let id = |value: &Value| {
        value.as_u64().ok_or_else(|| Error::new(place, "a token id, or a list", shown(value)))
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => id(value).map(|id| vec![id]),
    }
}

/// The beginning of a value.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}
