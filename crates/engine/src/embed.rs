//! Embeddings: a text as one vector, made of the hidden states of its tokens behind the model's
//! last norm.
//!
//! How the states become one vector is the model's: `modules.json` of sentence-transformers, or
//! GGUF's `pooling_type`, say it.

use crate::adapters::Adapter;
use crate::events::Capability;
use crate::load::{Engine, Shared};
use crate::session::Session;
use crate::together::{Text, Work, compute};
use formats::{Error, ErrorKind, Folder, Result, Tensors, json};
use std::path::{Component, Path};
use std::sync::Arc;

/// No settings of modules are longer.
const LONGEST: u64 = 1 << 20;

/// The hidden states of a text from which its embedding is made.
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
    /// The hidden states from which an embedding is made.
    pub pooling: Pooling,
    /// Whether it is divided by its length.
    pub normalised: bool,
}

impl EmbeddingForm {
    /// The form of a model whose files state none: the last token's hidden state is the only one of
    /// a decoder that depends on the whole text.
    pub(crate) const ASSUMED: EmbeddingForm =
        EmbeddingForm { pooling: Pooling::Last, normalised: true };

    /// The embedding of a text, from the sum of its hidden states and their number.
    fn finish(self, sum: &[f64], states: usize) -> Vec<f32> {
        let length = match self.normalised {
            true => sum.iter().map(|x| x * x).sum::<f64>().sqrt(),
            false => states as f64,
        };
        // A text whose states are all zero has no direction, and stays zero.
        let by = if length > 0.0 { length.recip() } else { 0.0 };
        sum.iter().map(|x| (x * by) as f32).collect()
    }
}

/// How the model behind `tensors` makes embeddings, if its files say so: then it was trained for
/// them.
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
    let (modules, place) = (json::read(&path, LONGEST)?, path.display().to_string());
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

/// Reads the settings of a pooling module: one flag for each way, or the name of one.
fn of_pooling(path: &Path) -> Result<Pooling> {
    let (settings, place) = (json::read(path, LONGEST)?, path.display().to_string());
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

/// How texts are embedded.
#[derive(Debug, Clone, Default)]
pub struct EmbedOptions {
    /// How many of its first numbers each embedding keeps, as some models are trained to allow;
    /// `None`: all.
    pub dimensions: Option<usize>,
    /// The adapter of the engine that computes them; `None`: the model as it is.
    pub adapter: Option<Adapter>,
}

impl Engine {
    /// How it makes embeddings; `None` unless it was loaded to end in hidden states.
    pub fn embedding_form(&self) -> Option<EmbeddingForm> {
        self.part(Capability::Embed).embeds
    }

    /// The embeddings of several texts, computed together as far as there is room: of each text's
    /// tokens, in order.
    ///
    /// # Errors
    /// An engine that was not loaded with [`models::Ending::Hidden`]; a text that is empty, does
    /// not fit the context, or has tokens outside the vocabulary; more dimensions than the model
    /// has; another engine's adapter; hidden states that are not finite.
    pub fn embed(&self, texts: &[Vec<u32>], options: &EmbedOptions) -> Result<Vec<Vec<f32>>> {
        let shared = self.part(Capability::Embed);
        let form = shared.embeds.ok_or_else(|| {
            Error::new("embeddings", "a model that was loaded for them", "one that generates")
        })?;
        let dimensions = options.dimensions.unwrap_or(shared.width());
        if dimensions == 0 || dimensions > shared.width() {
            let expected = format!("1 to {}", shared.width());
            return Err(Error::new("dimensions", expected, dimensions));
        }
        for (i, tokens) in texts.iter().enumerate() {
            let of_text = |e: Error| Error { place: format!("text {i}: {}", e.place), ..e };
            if tokens.is_empty() {
                return Err(Error::new(format!("text {i}"), "at least one token", "none"));
            }
            shared.check(tokens, 0).map_err(of_text)?;
        }
        let (adapter, sums) = (options.adapter.as_ref(), vec![vec![0.0; dimensions]; texts.len()]);
        let mut work = Pooled { shared: &shared, texts, form, adapter, begun: 0, sums };
        compute(&shared, &mut work)?;
        let finish = |(i, (sum, tokens)): (usize, (Vec<f64>, &Vec<u32>))| {
            if !sum.iter().all(|x| x.is_finite()) {
                let place = format!("text {i}: hidden states");
                return Err(Error::new(place, "finite numbers", "others"));
            }
            let states = if form.pooling == Pooling::Mean { tokens.len() } else { 1 };
            Ok(form.finish(&sum, states))
        };
        work.sums.into_iter().zip(texts).enumerate().map(finish).collect()
    }
}

/// Adds up the hidden states that embeddings are made of.
struct Pooled<'a> {
    shared: &'a Arc<Shared>,
    texts: &'a [Vec<u32>],
    form: EmbeddingForm,
    adapter: Option<&'a Adapter>,
    /// Texts that were begun.
    begun: usize,
    /// The first elements of each text's states.
    sums: Vec<Vec<f64>>,
}

impl Work for Pooled<'_> {
    fn next(&mut self) -> Result<Option<Text>> {
        let (index, Some(tokens)) = (self.begun, self.texts.get(self.begun)) else {
            return Ok(None);
        };
        self.begun += 1;
        let mut session = Session::new(self.shared.clone());
        session.set_adapter(self.adapter.cloned())?;
        let wanted = match self.form.pooling {
            Pooling::First => 0..1,
            Pooling::Mean => 0..tokens.len(),
            Pooling::Last => tokens.len() - 1..tokens.len(),
        };
        Ok(Some(Text { index, tokens: tokens.clone(), wanted, session }))
    }

    fn row(&mut self, index: usize, _: usize, state: &[f32]) {
        self.sums[index].iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
    }

    fn done(&mut self, _: Text) -> Result<Option<Text>> {
        Ok(None)
    }
}
