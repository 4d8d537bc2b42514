//! Adapters on top of models: low-rank changes (LoRA, rsLoRA, DoRA) as PEFT, mlx-lm and llama.cpp
//! store them.
//!
//! [`File::open`] reads settings and the table of tensors and refuses what it would have to guess.
//! [`File::resolve`] finds the matrices that the adapter changes by the model's own tables of
//! names, whichever dialect either of them is in, and makes of the adapter what devices take: a
//! [`program::AdapterFactors`]. No weight of the model is changed.

mod experts;
mod fuse;
mod gguf;
mod mlx;
mod patterns;
mod peft;
mod pieces;
mod provenance;
mod renewed;
mod resolve;
mod settings;

use formats::{Error, Gguf, Result, Safetensors, TensorView};
use renewed::Renewed;
use std::path::{Path, PathBuf};

pub use fuse::fuse;
pub use pieces::Piece;
pub use provenance::MadeFor;
pub use resolve::{Base, fused, lengths, repeats, shortened};

/// Who wrote an adapter, which says how tensors are named and turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterFormat {
    /// A folder of `adapter_config.json` and `adapter_model.safetensors`.
    Peft,
    /// A folder of `adapter_config.json` and `adapters.safetensors`.
    Mlx,
    /// A GGUF file whose `general.type` is `adapter`.
    Gguf,
}

/// Words of the names of towers for images and sounds, and of what stands between those and a
/// decoder.
const TOWERS: &[&str] = &[
    "audio_tower",
    "connector",
    "embed_audio",
    "embed_vision",
    "multi_modal_projector",
    "projector",
    "resampler_model",
    "vision_encoder",
    "vision_model",
    "vision_tower",
    "visual",
];

/// An adapter's file or folder, open.
#[derive(Debug)]
pub struct File {
    kind: AdapterFormat,
    path: PathBuf,
    tensors: Stored,
    changes: Vec<Change>,
    /// Weights of the base that it has anew.
    renewed: Vec<Renewed>,
    made_for: Option<MadeFor>,
}

#[derive(Debug)]
enum Stored {
    Safetensors(Safetensors),
    Gguf(Gguf),
}

impl Stored {
    fn names(&self) -> Vec<&str> {
        match self {
            Stored::Safetensors(file) => file.iter().map(|tensor| tensor.name).collect(),
            Stored::Gguf(file) => file.iter().map(|tensor| tensor.name).collect(),
        }
    }

    fn get(&self, name: &str) -> Option<TensorView<'_>> {
        match self {
            Stored::Safetensors(file) => file.get(name),
            Stored::Gguf(file) => file.get(name),
        }
    }
}

/// The change that an adapter makes to one matrix of the base.
#[derive(Debug, Clone, Default, PartialEq)]
struct Change {
    /// The matrix, as the base would name it in the adapter's dialect, without `.weight`.
    matrix: String,
    /// The tensors of the factors: `[rank, in]` and `[out, rank]`, or turned.
    down: String,
    up: String,
    /// Whether both are stored with their axes exchanged.
    turned: bool,
    /// Whether `down` is a table of which tokens pick rows.
    gathers: bool,
    /// DoRA's magnitudes.
    magnitude: Option<String>,
    /// A bias on the product of both, before the factor on it.
    bias: Option<String>,
    /// The factor on the product of both.
    scale: f64,
    /// How factors of several experts lie in the tensors, if `matrix` is a stack of experts'.
    stack: Option<Stack>,
}

/// How the factors of all experts of a mixture lie in two tensors.
#[derive(Debug, Clone, PartialEq)]
enum Stack {
    /// `[experts, rank, in]` and `[experts, out, rank]`.
    Each,
    /// As PEFT has those of a parameter of three axes: `[experts * rank, in]` and
    /// `[out, rank * experts]`, the expert last; or in and out the other way round, as versions
    /// before 0.19 have them (`old`). `matrix` is the module of experts; whether its gates and ups
    /// or its downs are meant is told by the shapes, and then the rank and the scale are known.
    Parameter { gate_up: (f64, f64), down: (f64, f64), old: bool },
}

impl File {
    /// Opens a folder of PEFT or mlx-lm, or a GGUF file.
    ///
    /// # Errors
    /// A setting that is missing, contradicts itself, or asks for something else than LoRA and
    /// DoRA, by file and key.
    pub fn open(path: &Path) -> Result<File> {
        if path.is_dir() {
            let file = match settings::Settings::open(path)? {
                settings if settings.is_peft() => peft::open(path, &settings),
                settings => mlx::open(path, &settings),
            };
            return Ok(File { made_for: provenance::read(path)?, ..file? });
        }
        // A file of a folder stands for the folder.
        let own = |end: &std::ffi::OsStr| end == "safetensors" || end == "json";
        if path.extension().is_some_and(own) && path.is_file() {
            let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            return File::open(folder.unwrap_or(Path::new(".")));
        }
        if !path.is_file() {
            let expected = "an adapter: a folder of PEFT or mlx-lm, or a GGUF file";
            return Err(Error::new(path.display(), expected, "no such file"));
        }
        gguf::open(path)
    }

    /// Who wrote it.
    pub fn kind(&self) -> AdapterFormat {
        self.kind
    }

    /// The model that it was made for, if that is known: of adapters that `delft tune` wrote.
    pub fn made_for(&self) -> Option<&MadeFor> {
        self.made_for.as_ref()
    }

    /// The first of its tensors that a model has itself: a table or a bias that was trained with
    /// the factors, or a bias of factors; none where there are factors alone.
    pub fn anew(&self) -> Option<&str> {
        let biases = self.changes.iter().filter_map(|change| change.bias.as_deref());
        let renewed = self.renewed.iter().filter(|own| own.trained);
        renewed.map(|own| own.tensor.as_str()).chain(biases).next()
    }

    /// Its file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The adapter of a model's text alone: without its changes of towers for images and sounds,
    /// through which texts do not go, and how many those were.
    ///
    /// # Errors
    /// An adapter of towers alone.
    pub fn of_text(mut self) -> Result<(File, usize)> {
        let all = self.changes.len();
        let tower = |name: &str| {
            let mut words = name.split('.').take(3);
            words.any(|word| TOWERS.contains(&word)) || name.contains(".vision_moe.")
        };
        self.changes.retain(|change| !tower(&change.matrix));
        if self.changes.is_empty() && all > 0 {
            let expected = "factors of what texts go through";
            return Err(Error::new(self.path.display(), expected, "those of a tower alone"));
        }
        let passed = all - self.changes.len();
        Ok((self, passed))
    }

    /// The error of a key of its weights.
    fn wrong(
        &self,
        key: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Error {
        let key: String = key.chars().take(120).collect();
        Error::new(format!("{}: {key}", self.path.display()), expected, found)
    }
}

/// How the names of the tensors of a change end, behind the name of the matrix.
struct Parts {
    down: &'static str,
    up: &'static str,
    magnitude: &'static [&'static str],
}

/// The factors of every matrix among `names`, of which each has both or is refused, and the names
/// that are none of theirs.
fn pairs(path: &Path, names: &[&str], parts: &Parts) -> Result<(Vec<Pair>, Vec<String>)> {
    let (mut pairs, mut others) = (Vec::<Pair>::new(), Vec::new());
    for name in names {
        let half = [parts.down, parts.up].into_iter().chain(parts.magnitude.iter().copied());
        let Some((i, stem)) =
            half.enumerate().find_map(|(i, end)| Some((i.min(2), name.strip_suffix(end)?)))
        else {
            others.push((*name).to_owned());
            continue;
        };
        let at = pairs.iter().position(|pair| pair.stem == stem).unwrap_or_else(|| {
            pairs.push(Pair { stem: stem.to_owned(), names: [None, None, None] });
            pairs.len() - 1
        });
        pairs[at].names[i] = Some((*name).to_owned());
    }
    for pair in &pairs {
        for (i, missing) in [parts.down, parts.up].into_iter().enumerate() {
            if pair.names[i].is_none() {
                let place = format!("{}: {}", path.display(), pair.stem);
                return Err(Error::new(place, format!("both factors, {missing} too"), "one"));
            }
        }
    }
    Ok((pairs, others))
}

/// The tensors of one change.
struct Pair {
    stem: String,
    /// Down, up and magnitude.
    names: [Option<String>; 3],
}

impl Pair {
    fn name(&self, i: usize) -> String {
        self.names[i].clone().unwrap_or_default()
    }
}
