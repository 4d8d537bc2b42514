//! Model architectures, one file each, and the configuration and names under which files store them.
//!
//! [`load`] reads a configuration, checks every weight's shape and builds the layers; [`Model::record`] runs `forward`
//! once to record a Program. Nothing here names a device, an element type or a quantisation.

mod config;
mod decoder;
mod gguf;
mod hugging_face;
mod json;
mod llama;
mod mistral;
mod names;
mod qwen2;
mod qwen3;
mod rope;
mod stated;
mod unsupported;
mod unused;

use formats::{Error, ErrorKind, Result, Source, Tensors};
use names::Dialect;
use nn::{Builder, Step, Stored, Weights};
use program::Program;

pub use config::Config;

/// A row of the registry.
#[derive(Debug)]
pub struct Architecture {
    /// Its `model_type` in config.json and `general.architecture` in GGUF.
    pub name: &'static str,
    /// Its class among `architectures` in config.json.
    pub class: &'static str,
    /// Whether GGUF stores rows of q and k so that adjacent elements rotate together.
    pub adjacent_rope_in_gguf: bool,
    build: fn(&Builder<'_>, &Config) -> Result<decoder::Decoder>,
}

/// Every architecture that Delft runs.
pub const ARCHITECTURES: &[&Architecture] =
    &[&llama::ARCHITECTURE, &mistral::ARCHITECTURE, &qwen2::ARCHITECTURE, &qwen3::ARCHITECTURE];

fn by_name(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| a.name == name)
}

fn by_class(class: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| a.class == class)
}

/// The error for an architecture that is not in the registry; `place` is the key that names it.
fn unknown(place: String, name: &str) -> Error {
    let known: Vec<&str> = ARCHITECTURES.iter().map(|a| a.name).collect();
    let name: String = name.chars().take(60).collect();
    Error::new(place, known.join(", "), name)
        .of(ErrorKind::Unsupported)
        .hint("this architecture is not supported yet")
}

/// Finds stored tensors by canonical name.
pub(crate) struct Names<'a> {
    tensors: &'a Tensors,
    dialect: Dialect,
    /// The file or folder, as errors name it.
    file: &'a str,
}

impl Names<'_> {
    /// An error about the tensor behind a canonical name, where the error itself knows less.
    pub(crate) fn within(&self, canonical: &str, error: Error) -> Error {
        Error { place: self.place(canonical), ..error }
    }
}

impl Weights for Names<'_> {
    fn find(&self, canonical: &str) -> Result<Option<Stored>> {
        Ok(names::candidates(canonical, self.dialect).into_iter().find_map(|name| {
            let tensor = self.tensors.get(&name)?;
            Some(Stored { shape: tensor.shape.to_vec(), source: Source::Tensor(name) })
        }))
    }

    fn place(&self, canonical: &str) -> String {
        let first = || names::candidates(canonical, self.dialect).into_iter().next();
        let stored = self.find(canonical).ok().flatten();
        let named = stored.and_then(|s| s.source.tensors().first().map(|name| (*name).to_owned()));
        let stored = named.or_else(first);
        let stored = stored.map_or(String::new(), |stored| format!("{stored} "));
        format!("{}: {stored}({canonical})", self.file)
    }
}

/// A model's layers, ready to record.
pub struct Model {
    config: Config,
    decoder: decoder::Decoder,
    blank: Program,
}

/// Reads the configuration of the file or folder behind `tensors`, without looking at the weights' data.
///
/// # Errors
/// What is missing, of another type, or out of range, by file and key; a file that holds no model of a known architecture.
pub fn config(tensors: &Tensors) -> Result<Config> {
    let file = tensors.path().display().to_string();
    with_names(tensors, &file).map(|(config, _)| config)
}

fn with_names<'a>(tensors: &'a Tensors, file: &'a str) -> Result<(Config, Names<'a>)> {
    if let Some(gguf) = tensors.gguf() {
        let names = Names { tensors, dialect: Dialect::Gguf, file };
        return Ok((gguf::config(gguf.metadata(), file, &names, tensors)?, names));
    }
    let folder = tensors
        .folder()
        .ok_or_else(|| Error::new(file, "a GGUF file or a model folder", "neither"))?;
    let names = Names { tensors, dialect: hugging_face::DIALECT, file };
    let place = folder.path().join("config.json").display().to_string();
    let mut config = hugging_face::config(folder.config(), &place, &names)?;
    config.warnings.extend(folder.remark());
    Ok((config, names))
}

/// Reads the value of a `config.json` found at `place`; `weights` fill in what it leaves out.
///
/// # Errors
/// What is missing, of another type, or out of range, by key.
pub fn config_from_json(
    json: &serde_json::Value,
    place: &str,
    weights: &dyn Weights,
) -> Result<Config> {
    hugging_face::config(json, place, weights)
}

/// Whether Delft knows the architecture that a GGUF file's first keys name; nothing named is no error here.
///
/// # Errors
/// An architecture that is not in the registry.
pub fn check_gguf(metadata: &formats::gguf::Metadata, place: &str) -> Result<()> {
    match metadata.str("general.architecture")? {
        Some(name) if by_name(name).is_none() => {
            Err(unknown(format!("{place}: general.architecture"), name))
        }
        _ => Ok(()),
    }
}

/// Whether Delft knows the architecture and all settings of a `config.json`, before there are weights.
///
/// # Errors
/// As [`config_from_json`].
pub fn check_json(json: &serde_json::Value, place: &str) -> Result<()> {
    struct None;
    impl Weights for None {
        fn find(&self, _: &str) -> Result<Option<Stored>> {
            Ok(Option::None)
        }
    }
    config_from_json(json, place, &None).map(|_| ())
}

/// Builds the model behind `tensors`: every weight found, every shape and type checked.
///
/// # Errors
/// Those of [`config()`]; a weight that is missing, of another shape, or of a type that holds no weights, by file and name; in
/// a GGUF file, tensors that the architecture has no use for.
pub fn load(tensors: &Tensors) -> Result<Model> {
    let file = tensors.path().display().to_string();
    let (mut config, names) = with_names(tensors, &file)?;
    let builder = Builder::new(&names);
    let decoder = (config.architecture.build)(&builder, &config)?;
    let blank = builder.program();
    for weight in &blank.weights {
        let found = weight.describe(tensors)?;
        if !found.encoding.is_float() {
            let expected = "a tensor of floats or quantised blocks";
            return Err(Error::new(names.place(&weight.name), expected, found.encoding));
        }
    }
    config.warnings.extend(unused::check(&blank, tensors, &names)?);
    Ok(Model { config, decoder, blank })
}

impl Model {
    /// Its hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Records one forward pass. With `tracing`, the embeddings and every block's output are results too.
    ///
    /// # Errors
    /// Layers that do not fit together, which is a fault of the architecture, not of a file.
    pub fn record(&self, tracing: bool) -> Result<Program> {
        let step = Step::new(self.blank.clone(), tracing);
        let logits = self.decoder.forward(&step);
        step.finish(logits)
    }
}
