//! Staging buffers for uploads: each is filled while the one before it is copied.

use formats::{Error, Result};

use super::Backend;

/// A staging buffer in host memory, from which device buffers are written.
pub trait StagingBuffer<B> {
    /// All its bytes, once no copy reads them any more.
    ///
    /// # Errors
    /// A copy that failed.
    fn bytes(&mut self) -> Result<&mut [u8]>;

    /// Copies its first `count` bytes to the start of a buffer, in the order of the device's work.
    /// The copy may still be running on return.
    ///
    /// # Errors
    /// A `count` that exceeds either buffer, or a device that refuses.
    fn send(&mut self, count: usize, to: &B) -> Result<()>;
}

/// A staging buffer in ordinary memory, whose copies are done on return.
pub(super) struct Heap<'a, B> {
    backend: &'a B,
    bytes: Vec<u8>,
}

impl<'a, B: Backend> Heap<'a, B> {
    /// Allocates `count` bytes.
    ///
    /// # Errors
    /// Too little memory.
    pub(super) fn new(backend: &'a B, count: usize) -> Result<Self> {
        let mut bytes = Vec::new();
        let full = |_| Error::new("load", "memory", format!("none for {count} bytes"));
        bytes.try_reserve_exact(count).map_err(full)?;
        bytes.resize(count, 0);
        Ok(Heap { backend, bytes })
    }
}

impl<B: Backend> StagingBuffer<B::Buffer> for Heap<'_, B> {
    fn bytes(&mut self) -> Result<&mut [u8]> {
        Ok(&mut self.bytes)
    }

    fn send(&mut self, count: usize, to: &B::Buffer) -> Result<()> {
        let all = self.bytes.len();
        let more = || Error::new("load", format!("at most {all} bytes"), count);
        self.backend.write(to, self.bytes.get(..count).ok_or_else(more)?)
    }
}
