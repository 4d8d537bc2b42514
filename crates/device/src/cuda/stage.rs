//! Pinned staging buffers, from which weights are copied to a GPU while the host fills others.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use formats::{Error, Result};

use super::{Context, CudaBuffer, Event, Gpu};
use crate::gpu::StagingBuffer;

/// A pinned staging buffer. The driver reads it only in copies made by [`StagingBuffer::send`].
pub(super) struct Pinned {
    context: Arc<Context>,
    host: NonNull<u8>,
    count: usize,
    /// The event after the last copy.
    copied: Event,
}

impl Gpu {
    /// Allocates a staging buffer.
    ///
    /// # Errors
    /// Too little memory that can be pinned.
    pub(super) fn pinned(&self, count: usize) -> Result<Pinned> {
        let (context, copied) = (Arc::clone(&self.0), self.event()?);
        context.enter()?;
        let place = format!("cuda: {count} pinned bytes of the host's memory");
        // SAFETY: the context is current.
        let host = unsafe { result::malloc_host(count.max(1), 0) };
        let host = context.check(&place, host)?.cast::<u8>();
        let host = NonNull::new(host).ok_or_else(|| Error::new(place, "some", "none"))?;
        // SAFETY: allocated just now with room for as many bytes, and initialised before any
        // reference to them exists.
        unsafe { host.write_bytes(0, count.max(1)) };
        Ok(Pinned { context, host, count, copied })
    }
}

impl StagingBuffer<CudaBuffer> for Pinned {
    fn bytes(&mut self) -> Result<&mut [u8]> {
        self.copied.wait()?;
        // SAFETY: initialised, of this length, and owned by this value until it is dropped. The
        // last copy is done, and no other begins while the borrow lasts: `send` takes `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.count) })
    }

    fn send(&mut self, count: usize, to: &CudaBuffer) -> Result<()> {
        let to = to.part(0..count)?;
        if count > self.count || !Arc::ptr_eq(to.context(), &self.context) {
            let expected =
                format!("at most {} bytes, to the GPU that they are pinned for", self.count);
            return Err(Error::new("cuda", expected, count));
        }
        self.context.enter()?;
        let (host, stream) = (self.host.as_ptr().cast_const().cast(), self.context.stream);
        // SAFETY: both ranges are inside their allocations, which wait for the stream before they
        // are freed. The host bytes do not change until `bytes` has waited for the event after the
        // copy.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), host, count, stream) };
        self.context.check("cuda: copy to the device", copied.result())?;
        // Without an event after the copy, only the stream's end tells that it is done.
        self.copied.record().inspect_err(|_| drop(self.context.synchronize()))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A copy may still read it.
        drop(self.context.synchronize());
        // SAFETY: allocated by `malloc_host`, freed only here, and the only stream has drained.
        let _ = unsafe { result::free_host(self.host.as_ptr().cast()) };
    }
}
