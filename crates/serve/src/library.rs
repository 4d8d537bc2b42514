//! The models that a server may load: models that it was given by name, and the store that
//! `delft pull` fills.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use delft::hub::{self, Container, Hub};
use delft::models::Ending;
use delft::{
    Adapter, AdapterFile, Adapters, DeviceSpec, Engine, Error, ErrorKind, LoadOptions, Location,
    Memory, Plan, Prepared, Tensors,
};
use serde_json::Value;

use crate::catalogue::distinct;
use crate::keep::Keep;
use crate::models::Served;

/// The models that a server loads when a request names them, and how.
#[derive(Clone, Default)]
pub struct Library {
    /// Models by names of their own, the first of which is meant where a request names none.
    pub named: Vec<Named>,
    /// The store whose models are offered as well, and that is filled by pulls.
    pub hub: Option<Hub>,
    /// How they are loaded.
    pub options: LoadOptions,
    /// Whether all make embeddings, also those whose files do not say that they are made for it.
    pub embeddings: bool,
    /// Sources of chat templates to use instead of the models' own, by name.
    pub templates: Option<BTreeMap<String, String>>,
    /// Most bytes that the loaded ones may take of each device's memory together; unset: what is
    /// free.
    pub memory: Option<u64>,
    /// A folder that keeps what a few tokens' logits were at the last good load of each model, with
    /// which every load is compared; unset: none is.
    pub canary: Option<PathBuf>,
    /// How long the named ones stay loaded.
    pub keep_named: Keep,
    /// How long models of the store stay loaded.
    pub keep: Keep,
}

/// A model that is loaded when a request names it.
#[derive(Clone)]
pub struct Named {
    /// The name that requests give.
    pub name: String,
    /// Where it lies.
    pub model: hub::LocalModel,
    /// Where it is loaded: on each of these, which then share its requests; none: as the library's
    /// models are.
    pub devices: Vec<DeviceSpec>,
    /// Adapters of it, each a model of its own name.
    pub adapters: Vec<(String, AdapterFile)>,
}

impl Named {
    /// Its own name and its adapters' names.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(self.adapters.iter().map(|(name, _)| name))
    }

    pub(crate) fn location(&self) -> &Location {
        &self.model.location
    }
}

impl Library {
    /// Looks whether the names of models and of their adapters differ, before any is loaded.
    ///
    /// # Errors
    /// Two that do not, by name.
    pub fn check(&self) -> delft::Result<()> {
        let names: Vec<String> = self.named.iter().flat_map(Named::names).cloned().collect();
        distinct(&names)
    }

    /// Whether a model fits a device of its own, with all of its context, beside others that are
    /// loaded.
    ///
    /// # Errors
    /// Files that cannot be read, or of a model that cannot be run.
    pub fn has_room(
        &self,
        named: &Named,
        device: DeviceSpec,
        loaded: &[Engine],
    ) -> delft::Result<bool> {
        let options = self.options_of(named, device)?;
        let prepared = Engine::prepare(named.location().clone(), &options)?;
        Ok(!prepared.shortened() && self.lack(&prepared, loaded).is_none())
    }

    /// Refuses a model that would take more by itself than all may together.
    ///
    /// # Errors
    /// That, with both figures; a model that cannot be planned.
    pub fn within(&self, named: &Named, device: DeviceSpec) -> delft::Result<()> {
        if self.memory.is_none() {
            return Ok(());
        }
        let options = self.options_of(named, device)?;
        let prepared = Engine::prepare(named.location().clone(), &options)?;
        self.beyond(&prepared, &[]).map_or(Ok(()), Err)
    }

    /// The devices that a model is loaded on, at least one.
    pub fn devices_of<'a>(&'a self, named: &'a Named) -> &'a [DeviceSpec] {
        let usual = std::slice::from_ref(&self.options.device);
        if named.devices.is_empty() { usual } else { &named.devices }
    }

    /// Why a model does not fit beside those that are loaded: what is free is less than it needs
    /// and they may still take of what was planned for them, or they would take more together than
    /// they may.
    pub(crate) fn lack(&self, prepared: &Prepared, loaded: &[Engine]) -> Option<Error> {
        self.lacks(prepared, loaded, true)
    }

    /// Why a model can never be loaded beside these: together they would take more than they may.
    pub(crate) fn beyond(&self, prepared: &Prepared, loaded: &[Engine]) -> Option<Error> {
        self.lacks(prepared, loaded, false)
    }

    /// As [`Self::lack`]; `free` says whether what is free counts.
    fn lacks(&self, prepared: &Prepared, loaded: &[Engine], free: bool) -> Option<Error> {
        prepared.plan().iter().zip(prepared.places()).find_map(|(plan, place)| {
            let on_it = || loaded.iter().filter(|engine| engine.places().contains(place));
            let held = held_bytes(on_it());
            // A cache that grows beyond one context does so as long as memory is free.
            let planned = on_it().flat_map(Engine::plans).map(|plan| plan.needed() as u64);
            let planned = planned.fold(0, u64::saturating_add).max(held);
            let (needed, owed) = (plan.needed() as u64, planned - held);
            let wanted = |others: u64| needed.saturating_add(others);
            let limit = self.memory.map(|limit| (wanted(planned), planned, limit, "allowed"));
            let left = plan.free.filter(|_| free);
            let free = left.map(|left| (wanted(owed), owed, left as u64, "free"));
            let (_, others, found, word) =
                [limit, free].into_iter().flatten().find(|(wanted, _, there, _)| wanted > there)?;
            let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
            let beside = if others == 0 {
                String::new()
            } else {
                format!(" beside {} of loaded models", mib(others))
            };
            let expected = format!("{} of its memory{beside}", mib(needed));
            let error = Error::new(place, expected, format!("{} {word}", mib(found)));
            Some(error.of(ErrorKind::NoMemory))
        })
    }

    /// A model that was loaded, with its adapters by their names.
    pub fn served(&self, named: &Named, engines: Vec<Engine>) -> Served {
        let handles = |at: usize| -> Vec<Adapter> {
            engines.iter().filter_map(|own| own.adapters().get(at)).cloned().collect()
        };
        let of = |(at, (name, _)): (usize, &(String, AdapterFile))| (name.clone(), handles(at));
        let adapters = named.adapters.iter().enumerate().map(of).collect();
        Served { name: named.name.clone(), templates: self.templates.clone(), adapters, engines }
    }

    /// How a model is loaded on a device: with its adapters, and for embeddings where it is made
    /// for them.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn options_of(&self, named: &Named, device: DeviceSpec) -> delft::Result<LoadOptions> {
        let made_for_it = || {
            let tensors = Tensors::open(named.location().clone())?;
            Ok::<_, delft::Error>(delft::read_embedding_form(&tensors)?.is_some())
        };
        let embeds = self.embeddings || made_for_it()?;
        let files = named.adapters.iter().map(|(_, file)| file.clone()).collect();
        Ok(LoadOptions {
            device,
            ending: if embeds { Ending::Hidden } else { Ending::Logits },
            // A bound is for what models need.
            copies: self.options.copies && self.memory.is_none(),
            adapters: Adapters { files, ..self.options.adapters.clone() },
            // Each model has listeners of its own.
            events: delft::Events::default(),
            ..self.options.clone()
        })
    }
}

/// A part of a model's memory: its name, what was planned for it, and what it holds, where that can
/// be told.
pub(crate) type Part = (&'static str, fn(&Plan) -> usize, Option<fn(&Memory) -> usize>);

/// The parts of a model's memory.
pub(crate) const PARTS: [Part; 4] = [
    ("weights", |plan| plan.weights, Some(|memory| memory.weights)),
    ("cache", |plan| plan.cache.saturating_add(plan.pool), Some(|memory| memory.cache)),
    ("activations", |plan| plan.arena, Some(|memory| memory.arena)),
    ("working", |plan| plan.working, None),
];

/// Bytes of a part that were planned for a model's engines.
pub(crate) fn planned_part(engines: &[Engine], part: fn(&Plan) -> usize) -> usize {
    engines.iter().flat_map(Engine::plans).map(|plan| part(&plan)).fold(0, usize::saturating_add)
}

/// Bytes of a part that a model's engines hold.
pub(crate) fn held_part(memory: &[Memory], part: fn(&Memory) -> usize) -> usize {
    memory.iter().map(part).fold(0, usize::saturating_add)
}

/// Tells in an object what was planned of memory for a model's engines before they were loaded, and
/// what they hold, in bytes: together, and by what it is for.
pub(crate) fn tell_memory(object: &mut Value, engines: &[Engine]) {
    // An engine that computes tells it between two steps.
    let memory: Vec<Memory> = engines.iter().map(Engine::memory).collect();
    object["planned_bytes"] = planned_part(engines, Plan::most).into();
    object["held_bytes"] = held_part(&memory, |m| m.weights + m.cache + m.arena).into();
    for (name, planned, held) in PARTS {
        object["memory"]["planned"][name] = planned_part(engines, planned).into();
        if let Some(held) = held {
            object["memory"]["held"][name] = held_part(&memory, held).into();
        }
    }
}

/// Bytes that some engines hold.
pub(crate) fn held_bytes<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> u64 {
    let held = |engine: &Engine| {
        let memory = engine.memory();
        (memory.weights + memory.cache + memory.arena) as u64
    };
    engines.into_iter().map(held).fold(0, u64::saturating_add)
}

/// The description of a model's files.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Files {
    /// Bytes of all.
    pub(crate) bytes: u64,
    /// Seconds since 1970 when they were last changed, or fetched.
    pub(crate) modified: u64,
    /// The commit of the repository that they are of; else empty.
    pub(crate) commit: String,
    /// `gguf` or `safetensors`.
    pub(crate) format: &'static str,
}

impl Files {
    /// Those of a model by itself.
    pub(crate) fn of(model: &hub::LocalModel) -> Files {
        let metadata = model.path().and_then(|path| std::fs::metadata(path).ok());
        let bytes = match (&model.location, &metadata) {
            (Location::Program { bytes, .. }, _) => bytes.len() as u64,
            (_, Some(metadata)) if metadata.is_file() => metadata.len(),
            _ => model.path().map_or(0, bytes_of_weights),
        };
        let commit = match &model.source {
            hub::ModelSource::Hub { commit, .. } => commit.clone(),
            _ => String::new(),
        };
        let modified = metadata.and_then(|metadata| metadata.modified().ok());
        Files { bytes, modified: modified.map_or(0, seconds), commit, format: format(model.kind) }
    }

    /// Those of a model of the store.
    pub(crate) fn of_stored(stored: &hub::StoredModel) -> Files {
        Files {
            bytes: stored.bytes,
            modified: stored.modified.map_or(0, seconds),
            commit: stored.commit.clone(),
            format: format(stored.model.kind),
        }
    }
}

/// Bytes of the weights that lie in a folder.
fn bytes_of_weights(folder: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let weights = entries.filter(|entry| {
        entry.path().extension().is_some_and(|end| end == "safetensors" || end == "gguf")
    });
    let sizes = weights.filter_map(|entry| Some(std::fs::metadata(entry.path()).ok()?.len()));
    sizes.fold(0, u64::saturating_add)
}

fn format(kind: Container) -> &'static str {
    match kind {
        Container::Gguf => "gguf",
        Container::Folder => "safetensors",
    }
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
