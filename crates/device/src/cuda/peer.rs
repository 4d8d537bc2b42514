//! Copies between the memories of two GPUs, ordered with the work of both.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use formats::{Error, Result};

use super::{Context, CudaBuffer, Gpu};

impl Gpu {
    /// Whether memory of another `Gpu` can be copied directly; enables peer access if so.
    pub fn has_peer(&self, other: &Gpu) -> bool {
        let (to, from) = (&self.0, &other.0);
        if Arc::ptr_eq(to, from) || to.device == from.device {
            return true;
        }
        let mut can = 0;
        // SAFETY: both devices exist; this writes one number.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, to.device, from.device) };
        if asked.result().is_err() || can == 0 || to.enter().is_err() {
            return false;
        }
        // SAFETY: `to` is current, and `from` lives at least until this call returns; access ends
        // with either of the two.
        let enabled = unsafe { sys::cuCtxEnablePeerAccess(from.handle, 0) };
        matches!(
            enabled,
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        )
    }
}

impl CudaBuffer {
    /// Enqueues a copy of a buffer of another `Gpu`: after everything enqueued there, and before
    /// anything enqueued later on either.
    ///
    /// # Errors
    /// Different lengths, or a driver that refuses.
    pub fn peer_copy(&self, from: &CudaBuffer) -> Result<()> {
        if from.len() != self.len() {
            return Err(Error::new("cuda buffer", format!("{} bytes", self.len()), from.len()));
        }
        let (here, there) = (self.context(), from.context());
        after(there, here)?;
        here.enter()?;
        // SAFETY: both ranges are inside their allocations. Each is freed only once its own stream
        // has drained, and both streams have the copy before any later work.
        let copied = unsafe {
            sys::cuMemcpyPeerAsync(
                self.address(),
                here.handle,
                from.address(),
                there.handle,
                self.len(),
                here.stream,
            )
        };
        here.check("cuda: copy between GPUs", copied.result())?;
        after(here, there)
    }
}

/// Orders later work of one context after the work enqueued in another so far.
fn after(before: &Context, then: &Context) -> Result<()> {
    before.enter()?;
    let made = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
    let event = before.check("cuda event", made)?;
    // SAFETY: the event is of the context that is current, and so is the stream.
    let recorded = unsafe { result::event::record(event, before.stream) };
    let waits = before.check("cuda event", recorded).and_then(|()| {
        then.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: a stream may wait for any context's event; both live.
        then.check("cuda event", unsafe { result::stream::wait_event(then.stream, event, flags) })
    });
    // SAFETY: made above. The driver keeps it until the waits on it are done.
    let destroyed = unsafe { result::event::destroy(event) };
    waits.and_then(|()| before.check("cuda event", destroyed))
}
