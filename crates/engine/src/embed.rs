//! Embeddings: a text as one vector, made of the hidden states of its tokens behind the model's last norm.
//!
//! How the states become one vector is the model's: `modules.json` of sentence-transformers, or GGUF's `pooling_type`, say it.

use crate::adapters::Adapter;
use crate::load::{Engine, Shared};
use crate::session::Session;
use formats::{Error, ErrorKind, Folder, Result, Tensors};
use serde_json::Value;
use std::path::{Component, Path};
use std::sync::PoisonError;

/// Which hidden states of a text its embedding is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The first token's.
    First,
    /// The mean of all.
    Mean,
    /// The last token's.
    Last,
}

/// How a model makes embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingForm {
    /// Which hidden states an embedding is made of.
    pub pooling: Pooling,
    /// Whether it is divided by its length.
    pub normalised: bool,
}

impl EmbeddingForm {
    /// What is assumed of a model that says nothing: decoders say most about a text behind its last token.
    pub(crate) const ASSUMED: EmbeddingForm =
        EmbeddingForm { pooling: Pooling::Last, normalised: true };

    /// The embedding of a text whose hidden states were summed up.
    fn finish(self, sum: &[f64], states: usize, dimensions: Option<usize>) -> Vec<f32> {
        let kept = &sum[..dimensions.unwrap_or(sum.len())];
        let length = match self.normalised {
            true => kept.iter().map(|x| x * x).sum::<f64>().sqrt(),
            false => states as f64,
        };
        // A text whose states are all zero has no direction, and stays zero.
        let by = if length > 0.0 { length.recip() } else { 0.0 };
        kept.iter().map(|x| (x * by) as f32).collect()
    }
}

/// How the model behind `tensors` makes embeddings, if its files say so: then it was trained for them.
///
/// # Errors
/// A way that there is no code for, by file and key.
pub fn read_embedding_form(tensors: &Tensors) -> Result<Option<EmbeddingForm>> {
    match (tensors.gguf(), tensors.folder()) {
        (Some(file), _) => of_gguf(file.metadata()),
        (None, Some(folder)) => of_folder(folder),
        (None, None) => Ok(None),
    }
}

fn of_gguf(metadata: &formats::gguf::Metadata) -> Result<Option<EmbeddingForm>> {
    let Some(architecture) = metadata.str("general.architecture")? else { return Ok(None) };
    let key = format!("{architecture}.pooling_type");
    let pooling = match metadata.u32(&key)? {
        None | Some(0) => return Ok(None),
        Some(1) => Pooling::Mean,
        Some(2) => Pooling::First,
        Some(3) => Pooling::Last,
        Some(other) => {
            let expected = "0 (none), 1 (mean), 2 (first token) or 3 (last token)";
            return Err(Error::new(metadata.at(&key), expected, other).of(ErrorKind::Unsupported));
        }
    };
    // GGUF does not say whether; those who read it divide by the length.
    Ok(Some(EmbeddingForm { pooling, normalised: true }))
}

/// The modules of sentence-transformers behind the decoder.
fn of_folder(folder: &Folder) -> Result<Option<EmbeddingForm>> {
    let Some(path) = folder.file("modules.json") else { return Ok(None) };
    let (modules, place) = (read_json(&path)?, path.display().to_string());
    let Some(modules) = modules.as_array() else {
        return Err(Error::new(place, "a list of modules", "something else"));
    };
    let (mut pooling, mut normalised) = (None, false);
    for (i, module) in modules.iter().enumerate() {
        let at = |key: &str| format!("{place}: [{i}].{key}");
        let kind = module["type"].as_str().unwrap_or_default();
        match kind.rsplit('.').next().unwrap_or_default() {
            "Transformer" => {}
            "Normalize" => normalised = true,
            "Pooling" => {
                let part = Path::new(module["path"].as_str().unwrap_or_default());
                if !part.components().all(|word| matches!(word, Component::Normal(_))) {
                    let found = part.display();
                    return Err(Error::new(at("path"), "a folder of the model", found));
                }
                pooling = Some(of_pooling(&folder.path().join(part).join("config.json"))?);
            }
            other => {
                let found: String = other.chars().take(80).collect();
                let expected = "Transformer, Pooling or Normalize";
                return Err(Error::new(at("type"), expected, found).of(ErrorKind::Unsupported));
            }
        }
    }
    Ok(pooling.map(|pooling| EmbeddingForm { pooling, normalised }))
}

/// What a pooling module says: one flag for each way, or the name of one.
fn of_pooling(path: &Path) -> Result<Pooling> {
    let (settings, place) = (read_json(path)?, path.display().to_string());
    let unsupported = |key: &str, found: &str| {
        let expected = "the first token, the mean or the last token";
        Error::new(format!("{place}: {key}"), expected, found).of(ErrorKind::Unsupported)
    };
    let named = |name: &str| match name {
        "cls" | "cls_token" => Some(Pooling::First),
        "mean" | "mean_tokens" => Some(Pooling::Mean),
        "lasttoken" => Some(Pooling::Last),
        _ => None,
    };
    if let Some(mode) = settings["pooling_mode"].as_str() {
        return named(mode).ok_or_else(|| unsupported("pooling_mode", mode));
    }
    let flags = settings.as_object().into_iter().flatten();
    let set = flags.filter(|(_, value)| value.as_bool() == Some(true));
    let mut modes = set.filter_map(|(key, _)| Some((key, key.strip_prefix("pooling_mode_")?)));
    match (modes.next(), modes.next()) {
        (Some((key, mode)), None) => named(mode).ok_or_else(|| unsupported(key, "true")),
        (Some(_), Some((key, _))) => Err(unsupported(key, "several at once")),
        (None, _) => Err(unsupported("pooling_mode_*", "none")),
    }
}

fn read_json(path: &Path) -> Result<Value> {
    const LONGEST: u64 = 1 << 20;
    let place = path.display().to_string();
    let size = std::fs::metadata(path).map_err(|e| Error::io(&place, e))?.len();
    if size > LONGEST {
        return Err(Error::new(place, format!("at most {LONGEST} bytes of JSON"), size));
    }
    let text = std::fs::read(path).map_err(|e| Error::io(&place, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::new(place, "JSON", e))
}

/// How texts are embedded.
#[derive(Debug, Clone, Default)]
pub struct EmbedOptions {
    /// How many of its first numbers each embedding keeps, as some models are trained to allow; `None`: all.
    pub dimensions: Option<usize>,
    /// The adapter of the engine that computes them; `None`: the model as it is.
    pub adapter: Option<Adapter>,
}

/// A text under way.
struct Text<'a> {
    index: usize,
    tokens: &'a [u32],
    session: Session,
    sum: Vec<f64>,
}

impl Engine {
    /// How it makes embeddings; `None` unless it was loaded to end in hidden states.
    pub fn embedding_form(&self) -> Option<EmbeddingForm> {
        self.0.embeds
    }

    /// The embeddings of several texts, computed together as far as there is room: of each text's tokens, in order.
    ///
    /// # Errors
    /// An engine that was not loaded with [`models::Ending::Hidden`]; a text that is empty, does not fit the context, or has tokens outside
    /// the vocabulary; more dimensions than the model has; another engine's adapter; hidden states that are not finite.
    pub fn embed(&self, texts: &[Vec<u32>], options: &EmbedOptions) -> Result<Vec<Vec<f32>>> {
        let EmbedOptions { dimensions, adapter } = options;
        let dimensions = *dimensions;
        let shared: &Shared = &self.0;
        let form = shared.embeds.ok_or_else(|| {
            Error::new("embeddings", "a model that was loaded for them", "one that generates")
        })?;
        if dimensions.is_some_and(|n| n == 0 || n > shared.width()) {
            let expected = format!("1 to {}", shared.width());
            return Err(Error::new("dimensions", expected, dimensions.unwrap_or_default()));
        }
        for (i, tokens) in texts.iter().enumerate() {
            let of_text = |e: Error| Error { place: format!("text {i}: {}", e.place), ..e };
            if tokens.is_empty() {
                return Err(Error::new(format!("text {i}"), "at least one token", "none"));
            }
            shared.check(tokens, 0).map_err(of_text)?;
        }
        // One caller at a time: several together would want more of the cache than there is.
        let _turn = shared.embedding.lock().unwrap_or_else(PoisonError::into_inner);
        let (chunk, most) = (shared.options.chunk(), shared.options.sessions.max(1));
        let mut waiting = texts.iter().enumerate();
        let mut done: Vec<Vec<f32>> = vec![Vec::new(); texts.len()];
        let mut under_way: Vec<Text<'_>> = Vec::new();
        loop {
            // The rest of those under way, then others, until a step is full.
            let rest = |text: &Text<'_>| text.tokens.len() - text.session.tokens().len();
            let mut rows: Vec<usize> = under_way.iter().map(rest).collect();
            while rows.iter().sum::<usize>() < chunk && rows.len() < most.min(chunk) {
                let Some((index, tokens)) = waiting.next() else { break };
                let (mut session, sum) = (self.session(), vec![0.0; shared.width()]);
                session.set_adapter(adapter.clone())?;
                under_way.push(Text { index, tokens, session, sum });
                rows.push(tokens.len());
            }
            if under_way.is_empty() {
                return Ok(done);
            }
            let mut room = chunk;
            for rows in &mut rows {
                *rows = (*rows).min(room);
                room -= *rows;
            }
            pool(&mut under_way, &rows, form.pooling)?;
            let ended = under_way.extract_if(.., |text| rest(text) == 0);
            for Text { index, tokens, sum, .. } in ended {
                if !sum.iter().all(|x| x.is_finite()) {
                    let place = format!("text {index}: hidden states");
                    return Err(Error::new(place, "finite numbers", "others"));
                }
                let states = if form.pooling == Pooling::Mean { tokens.len() } else { 1 };
                done[index] = form.finish(&sum, states, dimensions);
            }
        }
    }
}

/// Computes the next `rows` of each text in one step, and adds the hidden states that are wanted to its sum.
fn pool(texts: &mut [Text<'_>], rows: &[usize], pooling: Pooling) -> Result<()> {
    let wanted = |start: usize, rows: usize, all: usize| match pooling {
        Pooling::First => 0..usize::from(start == 0 && rows > 0),
        Pooling::Mean => 0..rows,
        Pooling::Last => {
            if start + rows == all {
                rows.saturating_sub(1)..rows
            } else {
                0..0
            }
        }
    };
    let mut parts = Vec::new();
    let mut sums = Vec::new();
    for (text, &rows) in texts.iter_mut().zip(rows).filter(|(_, rows)| **rows > 0) {
        let start = text.session.tokens().len();
        let wanted = wanted(start, rows, text.tokens.len());
        parts.push((&mut text.session, &text.tokens[start..start + rows], wanted));
        sums.push(&mut text.sum);
    }
    Session::prompts_together(&mut parts, &mut |part, state| {
        sums[part].iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
    })
}
