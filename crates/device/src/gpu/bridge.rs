//! Passes a value from one part of a Program to the next part on another GPU of the same kind,
//! without the host.
//!
//! The first part publishes its result's buffer once the work that computes it is submitted; the
//! next part copies from it before its own work. The host waits for neither: the first device
//! starts its next step only after this copy.

use std::sync::{Arc, Mutex, PoisonError};

use formats::{Error, Result};

use super::Backend;

/// One end of a bridge; both ends share its state.
pub(super) struct Bridge<B: Backend>(Arc<Mutex<Option<Held<B>>>>);

/// A result and the device that holds it.
struct Held<B: Backend> {
    backend: Arc<B>,
    buffer: B::Buffer,
}

impl<B: Backend> Bridge<B> {
    /// Creates both ends.
    pub(super) fn new() -> [Self; 2] {
        let both = Arc::new(Mutex::new(None));
        [Bridge(Arc::clone(&both)), Bridge(both)]
    }

    /// Publishes a result whose work has been submitted.
    pub(super) fn put(&self, backend: &Arc<B>, buffer: &B::Buffer) {
        let held = Held { backend: Arc::clone(backend), buffer: buffer.clone() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
    }

    /// Copies the published result to a buffer of this device, before any work submitted from now
    /// on.
    ///
    /// # Errors
    /// Nothing was published, or the device refuses.
    pub(super) fn take(&self, backend: &B, to: &B::Buffer) -> Result<()> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let held = held.ok_or_else(|| Error::new("step", "the part before it first", "none"))?;
        backend.peer_copy(&held.backend, &held.buffer, to)
    }
}
