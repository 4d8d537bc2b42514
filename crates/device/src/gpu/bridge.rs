//! How a value goes from a part of a Program on one GPU to the next part on another of its kind,
//! without the host.
//!
//! The part in front leaves on the bridge where its result lies once the work that makes it is
//! submitted; the part behind it fetches it from there before its own work. The host need not wait
//! for either: the device in front begins its next step's work only once this is fetched.

use std::sync::{Arc, Mutex, PoisonError};

use formats::{Error, Result};

use super::Backend;

/// Both ends hold it.
pub(super) struct Bridge<B: Backend>(Arc<Mutex<Option<Held<B>>>>);

/// A result and the device that it lies on.
struct Held<B: Backend> {
    backend: Arc<B>,
    buffer: B::Buffer,
}

impl<B: Backend> Bridge<B> {
    /// Both ends of a new one.
    pub(super) fn new() -> [Self; 2] {
        let both = Arc::new(Mutex::new(None));
        [Bridge(Arc::clone(&both)), Bridge(both)]
    }

    /// Leaves a result, whose work is submitted.
    pub(super) fn put(&self, backend: &Arc<B>, buffer: &B::Buffer) {
        let held = Held { backend: Arc::clone(backend), buffer: buffer.clone() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
    }

    /// Copies what was left last to a buffer of this device, before any work that is submitted from
    /// now on.
    ///
    /// # Errors
    /// If nothing was left, or the device refuses.
    pub(super) fn take(&self, backend: &B, to: &B::Buffer) -> Result<()> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let held = held.ok_or_else(|| Error::new("step", "the part before it first", "none"))?;
        backend.fetch(&held.backend, &held.buffer, to)
    }
}
