//! The life cycle of a model's parts, from their files to their end, told on channels.

use models::Ending;
use std::fmt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// A use of a loaded model. Each is a Program of its own, over weights that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Capability {
    /// Generating text, and the probabilities of labels.
    Generate,
    /// Making embeddings.
    Embed,
}

impl Capability {
    /// Its name: `generate`, `embed`.
    pub fn name(self) -> &'static str {
        match self {
            Capability::Generate => "generate",
            Capability::Embed => "embed",
        }
    }

    /// The results of its Program.
    pub(crate) fn ending(self) -> Ending {
        match self {
            Capability::Generate => Ending::Logits,
            Capability::Embed => Ending::Hidden,
        }
    }

    pub(crate) fn of(ending: Ending) -> Capability {
        match ending {
            Ending::Logits => Capability::Generate,
            Ending::Hidden => Capability::Embed,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A stage in the life of a model's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Its files are being fetched. Told by the caller, if it fetches them.
    Downloading,
    /// Its files are opened, its Program is recorded and its device chosen.
    Opening,
    /// The memory that it will take of each device is known.
    Planned,
    /// Loading has begun.
    Loading,
    /// Weights are being read and packed.
    Packing,
    /// All weights are on the device; kernels and buffers are being made.
    Compiling,
    /// It takes requests.
    Ready,
    /// It takes no new requests and ends those that are running.
    Draining,
    /// Its memory has been freed.
    Unloaded,
    /// It could not be loaded.
    Failed,
    /// Its device is broken: running requests fail, and it is loaded again.
    Lost,
}

impl Stage {
    /// Its name, a word in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Downloading => "downloading",
            Stage::Opening => "opening",
            Stage::Planned => "planned",
            Stage::Loading => "loading",
            Stage::Packing => "packing",
            Stage::Compiling => "compiling",
            Stage::Ready => "ready",
            Stage::Draining => "draining",
            Stage::Unloaded => "unloaded",
            Stage::Failed => "failed",
            Stage::Lost => "lost",
        }
    }
}

/// An event: a part of a model has come to a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifecycle {
    /// The stage.
    pub stage: Stage,
    /// The part, by what it does.
    pub capability: Capability,
    /// The reason, if it failed or its device was lost.
    pub why: Option<String>,
}

type Listener = Box<dyn FnMut(&Lifecycle) -> bool + Send>;

/// The listeners to a model's life cycle; clones share them.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<Listener>>>);

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "Events({} listeners)", listeners.len())
    }
}

impl Events {
    /// A channel of all stages from now on.
    pub fn subscribe(&self) -> Receiver<Lifecycle> {
        let (sender, receiver) = channel();
        self.listen(move |event| sender.send(event.clone()).is_ok());
        receiver
    }

    /// Calls `listener` at each stage from now on, on the thread that brought it about, until it
    /// returns false. It must return soon and not use the model.
    pub fn listen(&self, listener: impl FnMut(&Lifecycle) -> bool + Send + 'static) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(listener));
    }

    /// Tells all listeners that a part has come to a stage.
    pub fn tell(&self, capability: Capability, stage: Stage, why: Option<String>) {
        let event = Lifecycle { stage, capability, why };
        let mut listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain_mut(|listener| listener(&event));
    }
}
