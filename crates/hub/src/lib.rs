//! Finding models: the bundled one, local files and folders, and the Hugging Face hub with its
//! shared cache.
//!
//! A model is named by one string (see [`HubName`]): an existing path, a short name (`qwen3:0.6b`),
//! `org/name`, `org/name:file.gguf`, `org/name:Q4_K_M`, any of these with `@revision`, or nothing
//! at all for the bundled model. [`resolve`] turns the name into a path without touching the
//! network, [`pull`] downloads, [`list`] tells what is there, [`recognise`] tells names from other
//! texts.
//!
//! The cache is laid out as Python's `huggingface_hub` lays it out, so both programs share one copy
//! of a model.

mod bundled;
mod cache;
mod choose;
mod http;
mod likeness;
mod names;
mod offer;
mod pull;
mod remove;
mod spec;
mod store;

use std::path::{Path, PathBuf};
use std::time::Duration;

use formats::{Error, Location, Result};
use names::Names;

pub use bundled::{BUNDLED, bundled};
pub use cache::{Cached, CachedFile};
pub use formats::Container;
pub use likeness::{Likeness, recognise};
pub use offer::{Offer, Preview, free_disk};
pub use remove::Removal;
pub use spec::HubName;
pub use store::StoredModel;

/// A model that lies on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalModel {
    /// The GGUF file (the first one of a split set), the folder, or the program.
    pub location: Location,
    /// The kind of file found there.
    pub kind: Container,
    /// Where it came from.
    pub source: ModelSource,
}

impl LocalModel {
    /// A short name for people: the hub id, or the file's or folder's own name.
    pub fn name(&self) -> String {
        match &self.source {
            ModelSource::Hub { id, .. } => id.clone(),
            ModelSource::Local | ModelSource::Bundled => {
                let name = match self.kind {
                    Container::Gguf => self.path().and_then(Path::file_stem),
                    Container::Folder => self.path().and_then(Path::file_name),
                };
                name.map_or_else(
                    || self.location.to_string(),
                    |name| name.to_string_lossy().into_owned(),
                )
            }
        }
    }

    /// The file or folder; None for the bundled model.
    pub fn path(&self) -> Option<&Path> {
        self.location.path()
    }

    /// The model in the program itself.
    ///
    /// # Errors
    /// A program that was built without one.
    pub fn bundled() -> Result<LocalModel> {
        Ok(LocalModel { location: bundled()?, kind: Container::Gguf, source: ModelSource::Bundled })
    }

    fn at(path: PathBuf, kind: Container, source: ModelSource) -> LocalModel {
        LocalModel { location: Location::Path(path), kind, source }
    }
}

/// A model on this machine, or one that a pull would bring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// It is here.
    Here(LocalModel),
    /// The name of a model on the hub that is not here, or not whole: the error to tell where it
    /// shall not be fetched.
    Absent(Error),
}

/// Where a name leads.
enum Target {
    Bundled,
    Path(PathBuf),
    Hub(HubName),
}

/// Where a model came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// It came with the program.
    Bundled,
    /// A path that the user named.
    Local,
    /// The hub's cache.
    Hub {
        /// `org/name`.
        id: String,
        /// The commit, 40 hexadecimal digits.
        commit: String,
    },
}

/// Hears what a [`pull`] does. Every method has an empty default; calls come from the pulling
/// thread.
pub trait PullProgress {
    /// A pull begins: the number of files that it brings, the bytes of these together where known,
    /// and how many of them earlier downloads left here.
    fn begin(&self, files: usize, bytes: Option<u64>, have: u64) {
        let _ = (files, bytes, have);
    }
    /// A file begins: its size where known (bytes) and how much of it was there already.
    fn start(&self, file: &str, size: Option<u64>, have: u64) {
        let _ = (file, size, have);
    }
    /// The file now has `have` bytes. Falls back when a download begins anew.
    fn at(&self, file: &str, have: u64) {
        let _ = (file, have);
    }
    /// The file is complete, verified and in the cache.
    fn done(&self, file: &str) {
        let _ = file;
    }
    /// Something worth telling: a choice among files, a retry, a wait for another download.
    fn note(&self, text: &str) {
        let _ = text;
    }
}

/// No progress report.
impl PullProgress for () {}

/// A hub and its cache: where to download from and where to keep it.
#[derive(Debug, Clone)]
pub struct Hub {
    /// The address, without a trailing slash.
    pub endpoint: String,
    /// Sent as `Authorization: Bearer`, and only to the endpoint's own host.
    pub token: Option<String>,
    /// The folder that holds `models--org--name`.
    pub cache: PathBuf,
    /// When set, [`Hub::pull`] refuses to use the network.
    pub offline: bool,
    /// The wait before the first retry; doubled for each further one.
    pub retry_wait: Duration,
    /// The longest wait for a connection, and for any bytes on one.
    pub timeout: Duration,
    /// The user's file of short names, where there is one.
    pub models: Option<PathBuf>,
    /// The most bytes that a pull may add to the cache; the disk's free bytes bound it in any case.
    pub room: Option<u64>,
}

impl Hub {
    /// The hub that the environment names, read as `huggingface_hub` reads it: `HF_ENDPOINT`;
    /// `HF_TOKEN`, or the file `HF_TOKEN_PATH` or `$HF_HOME/token`; `HF_HUB_CACHE` or
    /// `$HF_HOME/hub`, with `HF_HOME` under `XDG_CACHE_HOME` or `~/.cache`; `HF_HUB_OFFLINE`. Short
    /// names are in the file `DELFT_MODELS`, or else `delft/models.toml` under `XDG_CONFIG_HOME` or
    /// `~/.config`, if there is one.
    ///
    /// # Errors
    /// No folder for the cache: no variable names one, and there is no home folder.
    pub fn from_env() -> Result<Hub> {
        cache::from_env(&|name| std::env::var(name).ok())
    }

    /// The short names: the program's own, and over them the user's.
    pub(crate) fn names(&self) -> Result<Names> {
        Names::with(self.models.as_deref())
    }

    /// Finds a model without the network: an existing path first, then short names, then the cache;
    /// nothing named is the bundled model.
    ///
    /// # Errors
    /// A name that leads nowhere, with the nearest ones, and a model that is not on this machine.
    pub fn resolve(&self, spec: Option<&str>) -> Result<LocalModel> {
        match spec.map(|text| self.find(text)) {
            None => LocalModel::bundled(),
            Some(Ok(Found::Here(model))) => Ok(model),
            Some(Ok(Found::Absent(error)) | Err(error)) => Err(error),
        }
    }

    /// Finds a model as [`Hub::resolve`] does, and tells apart the names of models that a pull
    /// would bring.
    ///
    /// # Errors
    /// A name that leads nowhere, with the nearest ones, one that leaves open which file is meant,
    /// and a cache that cannot be read.
    pub fn find(&self, name: &str) -> Result<Found> {
        match self.target(name)? {
            Target::Bundled => LocalModel::bundled().map(Found::Here),
            Target::Path(path) => local(&path).map(Found::Here),
            Target::Hub(spec) => cache::find(self, &spec, name),
        }
    }

    /// Where a name leads: to a path that holds a model, by a short name, to the bundled model, to
    /// any other path, or to the hub.
    fn target(&self, text: &str) -> Result<Target> {
        if text.is_empty() {
            return Err(Error::new("model", "a path or a hub id", "an empty name"));
        }
        let path = Path::new(text);
        if likeness::holds_model(path) {
            return Ok(Target::Path(path.to_path_buf()));
        }
        if let Some(target) = self.names()?.expand(text) {
            return if spec::is_surely_path(&target) {
                Ok(Target::Path(self.own_path(&target)))
            } else {
                Ok(Target::Hub(HubName::parse(&target)?))
            };
        }
        if text == BUNDLED || text == bundled::NAME {
            return Ok(Target::Bundled);
        }
        if path.exists() {
            return Ok(Target::Path(path.to_path_buf()));
        }
        let spec = if spec::is_surely_path(text) { None } else { Some(HubName::parse(text)?) };
        match spec {
            Some(spec) if spec.id.contains('/') || self.has(&spec) => Ok(Target::Hub(spec)),
            _ => Err(self.nothing_there(text)),
        }
    }

    /// A path as the user's file of names gives it: `~` is the home folder, and others are seen
    /// from the file's folder.
    fn own_path(&self, path: &str) -> PathBuf {
        let path = cache::expand(path, &|name| std::env::var(name).ok());
        let folder = self.models.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
        folder.join(path)
    }

    /// Whether the cache holds anything of a repository. The hub's oldest repositories have names
    /// without a slash.
    fn has(&self, spec: &HubName) -> bool {
        cache::folder(self, &spec.id).is_dir()
    }

    /// The error for a name that leads nowhere, with the names that may have been meant.
    fn nothing_there(&self, text: &str) -> Error {
        let expected = "a file, a folder, a short name or a hub id (org/name)";
        let error = Error::new(text, expected, "nothing there");
        match self.nearest(text) {
            names if names.is_empty() => error,
            names => error.hint(format!("the nearest names: {}", names.join(", "))),
        }
    }

    /// Asks the hub what a model is made of. Nothing is fetched yet but the list of its files.
    ///
    /// # Errors
    /// A name that leads nowhere or to a path, what the hub refuses, and a network that fails.
    pub fn offer(&self, name: &str, progress: &dyn PullProgress) -> Result<Offer<'_>> {
        match self.target(name)? {
            Target::Hub(spec) => Offer::ask(self, spec, progress),
            Target::Bundled => {
                Err(Error::new(name, "a model of the hub", "the one that comes with the program"))
            }
            Target::Path(path) => {
                Err(Error::new(path.display(), "a model of the hub", "a path on this machine"))
            }
        }
    }

    /// Downloads a model into the cache, or completes it there: [`Hub::offer`], then
    /// [`Offer::fetch`].
    ///
    /// # Errors
    /// As these two.
    pub fn pull(&self, name: &str, progress: &dyn PullProgress) -> Result<LocalModel> {
        self.offer(name, progress)?.fetch(progress)
    }

    /// The files that removing a model from the cache would delete: all of a repository, with
    /// unfinished downloads; one revision of it (`org/name@revision`); or one GGUF file
    /// (`org/name:TAG`, or a short name that stands for one).
    ///
    /// # Errors
    /// A name of nothing in the cache, and a path.
    pub fn removal(&self, name: &str) -> Result<Removal> {
        match self.target(name)? {
            Target::Hub(spec) => Removal::of(self, &spec, name),
            Target::Bundled => {
                Err(Error::new(name, "a model of the cache", "the one that is in the program"))
            }
            Target::Path(path) => Err(Error::new(path.display(), "a model of the cache", "a path")
                .hint("delft removes only what it fetched")),
        }
    }

    /// The content of the cache, by id and commit. A cache that does not exist is empty.
    ///
    /// # Errors
    /// Folders that cannot be read.
    pub fn list(&self) -> Result<Vec<Cached>> {
        cache::list(self)
    }
}

/// [`Hub::resolve`] with the environment's hub.
pub fn resolve(spec: Option<&str>) -> Result<LocalModel> {
    match spec {
        // It needs no folder of the user's.
        None => LocalModel::bundled(),
        Some(name) => match Hub::from_env() {
            Ok(hub) => hub.resolve(Some(name)),
            Err(error) => without_cache(name).unwrap_or(Err(error)),
        },
    }
}

/// The model of a name that needs no cache, so that it is found where there is no folder for one: a
/// path at which something lies, or the bundled model's. None for other names.
pub fn without_cache(name: &str) -> Option<Result<LocalModel>> {
    let path = Path::new(name);
    match name {
        BUNDLED | bundled::NAME => Some(LocalModel::bundled()),
        _ => path.exists().then(|| local(path)),
    }
}

/// [`Hub::pull`] with the environment's hub.
pub fn pull(spec: &str, progress: &dyn PullProgress) -> Result<LocalModel> {
    Hub::from_env()?.pull(spec, progress)
}

/// The bundled model, where there is one, then [`Hub::list`] of the environment's hub.
pub fn list() -> Result<Vec<Cached>> {
    let mut all: Vec<Cached> = bundled::cached().into_iter().collect();
    all.extend(Hub::from_env()?.list()?);
    Ok(all)
}

/// A model at a path that exists.
fn local(path: &Path) -> Result<LocalModel> {
    if path.exists() && !path.is_dir() && !path.is_file() {
        // To open a pipe would wait for somebody to write to it.
        let found = "a pipe, socket or device";
        return Err(Error::new(path.display(), "a file or a folder", found));
    }
    if !path.is_dir() {
        // One file of a folder stands for the folder: weights without their configuration mean
        // nothing.
        if path.extension().is_some_and(|e| e == "safetensors") || likeness::names_a_folder(path) {
            let folder = path
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty())
                .unwrap_or(Path::new("."));
            return local(folder);
        }
        return Ok(LocalModel::at(path.to_path_buf(), Container::Gguf, ModelSource::Local));
    }
    if let Some(snapshot) = cache::snapshot_in(path) {
        return local(&snapshot);
    }
    let folder = || LocalModel::at(path.to_path_buf(), Container::Folder, ModelSource::Local);
    if ["config.json", "adapter_config.json"].iter().any(|name| path.join(name).is_file()) {
        return Ok(folder());
    }
    let names = cache::names_directly_in(path)?;
    let has = |end: &str| names.iter().any(|name| name.ends_with(end));
    if has(".safetensors") && !has(".gguf") {
        // Opening it tells what is missing beside the weights.
        return Ok(folder());
    }
    let file = choose::gguf(&path.display().to_string(), None, &names)?;
    Ok(LocalModel::at(path.join(&file.files[0]), Container::Gguf, ModelSource::Local))
}
