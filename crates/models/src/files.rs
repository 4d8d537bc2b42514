//! The input of an architecture: the keys of a model's configuration, and its weights by canonical
//! name.

use crate::Architecture;
use crate::keys::{Asked, Key, Keys};
use crate::unsaid::Unsaid;
use formats::gguf::Metadata;
use formats::{Error, Folder, Result, Tensors, shape};
use nn::{Bias, Weights};

/// The files of one model, as the file of its architecture sees them.
pub(crate) struct Files<'a> {
    /// The row of the registry.
    pub(crate) architecture: &'static Architecture,
    /// The decoder's keys.
    pub(crate) keys: Keys<'a>,
    /// The keys of all of `config.json`, where the decoder has an object of its own in it; else the
    /// same.
    pub(crate) outer: Keys<'a>,
    /// The weights, if they are there yet.
    pub(crate) names: &'a dyn Weights,
    pub(crate) tensors: Option<&'a Tensors>,
    /// Positions that sessions are going to have, where that is known.
    pub(crate) context: Option<usize>,
    /// See [`ReadOptions::latents`](crate::ReadOptions::latents).
    pub(crate) latents: Option<usize>,
    /// Whether weights are read as GGUF has them: matrices of keys and values that come of latents
    /// apart, numbers that multiply what weights give in those.
    pub(crate) apart: bool,
}

impl<'a> Files<'a> {
    /// All metadata, if it is a GGUF file.
    pub(crate) fn metadata(&self) -> Option<&'a Metadata> {
        Some(self.tensors?.gguf()?.metadata())
    }

    /// The same, with keys of names of their own: see [`Keys::with_names`].
    pub(crate) fn with_names(&self, own: &'static [(&'static str, &'static str)]) -> Files<'a> {
        self.with_keys(self.keys.clone().with_names(own))
    }

    /// The same, with sizes that `config.json` leaves out to the architecture's class: see
    /// [`Unsaid`]. Mistral's own files are not read by that class.
    pub(crate) fn of_class(&self) -> Files<'a> {
        let mistrals = self.tensors.and_then(Tensors::folder).is_some_and(Folder::is_mistrals);
        let unsaid = if mistrals { Unsaid::NOTHING } else { self.architecture.unsaid };
        self.with_keys(self.keys.clone().of_class(unsaid))
    }

    /// The same, with numbers that GGUF lists for each layer: see [`Keys::with_lists`].
    pub(crate) fn with_lists(&self, by_layer: &'static [&'static str]) -> Files<'a> {
        self.with_keys(self.keys.clone().with_lists(by_layer))
    }

    fn with_keys(&self, keys: Keys<'a>) -> Files<'a> {
        Files { keys, outer: self.outer.clone(), ..*self }
    }

    /// The one number that the weight `name` is, if it is stored.
    ///
    /// # Errors
    /// A tensor of more, or of none that is finite, by name.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f32>> {
        let (Some(stored), Some(tensors)) = (self.names.find(name)?, self.tensors) else {
            return Ok(None);
        };
        let place = || self.names.place(name);
        if stored.shape.iter().product::<usize>() != 1 {
            return Err(Error::new(place(), "one number", shape(&stored.shape)));
        }
        let read = stored.source.read(tensors).and_then(|number| number.to_f32());
        let number = read.map_err(|e| Error { place: place(), ..e })?[0];
        match number.is_finite() {
            true => Ok(Some(number)),
            false => Err(Error::new(place(), "a finite number", number)),
        }
    }

    /// Whether matrices have biases, as a key of `config.json` says it: where it does not say so,
    /// those that are stored count.
    ///
    /// # Errors
    /// Something else than true or false.
    pub(crate) fn bias(&self, key: &'static str) -> Result<Bias> {
        let stated = self.keys.flag(Key(key, ""))?.unwrap_or(false);
        Ok(if stated { Bias::Always } else { Bias::IfStored })
    }
}

/// The keys of `config.json` that describe a decoder, and the keys of the whole: multimodal
/// configurations keep the decoder's part in an object of its own, and those of models that speak,
/// too, all that listens in another.
///
/// # Errors
/// Something else than an object.
pub(crate) fn of_json<'a>(
    json: &'a serde_json::Value,
    file: &'a str,
    asked: &'a Asked,
) -> Result<(Keys<'a>, Keys<'a>)> {
    if !json.is_object() {
        return Err(formats::Error::new(file, "a JSON object", "something else"));
    }
    let outer = Keys::json(file, json, asked);
    let below = |json: &'a serde_json::Value, key: &str| json.get(key).filter(|v| v.is_object());
    let (listens, all) = match below(json, "thinker_config") {
        Some(listens) => (listens, outer.object("thinker_config")?),
        None => (json, Some(outer.clone())),
    };
    let keys = match (below(listens, "text_config"), all) {
        (Some(_), Some(all)) => all.object("text_config")?,
        _ => None,
    };
    Ok((keys.unwrap_or_else(|| outer.clone()), outer))
}
