//! Host memory on its way to a device: portions that are filled and copied, each while the next is
//! filled.

use formats::{Error, Result};

use super::Backend;

/// A portion of the host's memory, from which buffers are written.
pub trait Stage<B> {
    /// All its bytes, once no copy reads them any more.
    ///
    /// # Errors
    /// If a copy has failed.
    fn bytes(&mut self) -> Result<&mut [u8]>;

    /// Copies its first `count` bytes to those of a buffer, in the order of the device's work. It
    /// need not be done when this returns.
    ///
    /// # Errors
    /// If they are more than either has, or the device refuses.
    fn send(&mut self, count: usize, to: &B) -> Result<()>;
}

/// A portion whose copies are done when they are asked for.
pub(super) struct Heap<'a, B> {
    backend: &'a B,
    bytes: Vec<u8>,
}

impl<'a, B: Backend> Heap<'a, B> {
    /// Of so many bytes.
    ///
    /// # Errors
    /// If there is not as much memory left.
    pub(super) fn new(backend: &'a B, count: usize) -> Result<Self> {
        let mut bytes = Vec::new();
        let full = |_| Error::new("load", "memory", format!("none for {count} bytes"));
        bytes.try_reserve_exact(count).map_err(full)?;
        bytes.resize(count, 0);
        Ok(Heap { backend, bytes })
    }
}

impl<B: Backend> Stage<B::Buffer> for Heap<'_, B> {
    fn bytes(&mut self) -> Result<&mut [u8]> {
        Ok(&mut self.bytes)
    }

    fn send(&mut self, count: usize, to: &B::Buffer) -> Result<()> {
        let all = self.bytes.len();
        let more = || Error::new("load", format!("at most {all} bytes"), count);
        self.backend.write(to, self.bytes.get(..count).ok_or_else(more)?)
    }
}
