//! Device memory: plain bytes, shared by reference count, lent in parts.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use formats::{Error, Result};

use super::{Context, Gpu};
use crate::Usage;
use crate::gpu::meter::Taken;

/// Bytes of device memory, or a part of them. Clones are the same bytes: what a kernel writes
/// through one is seen through all.
#[derive(Clone)]
pub struct Buffer {
    allocation: Arc<Allocation>,
    offset: usize,
    bytes: usize,
}

struct Allocation {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    /// Where this process sees it, if it is the host's memory.
    host: Option<NonNull<c_void>>,
    /// What it takes of the device's memory.
    _taken: Option<Taken>,
}

// SAFETY: the host's address is only used for volatile accesses of single words within bounds,
// which need no thread.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A kernel may still be using it.
        drop(self.context.synchronize());
        // SAFETY: allocated by `cuMemHostAlloc` or `cuMemAlloc`, freed only here, and the only
        // stream has drained. In a lost context this fails, and the memory goes with the context.
        let _ = unsafe {
            match self.host {
                Some(host) => result::free_host(host.as_ptr()),
                None => result::free_sync(self.address),
            }
        };
    }
}

impl Gpu {
    /// Bytes of device memory that are left.
    ///
    /// # Errors
    /// If the driver does not answer.
    pub fn free(&self) -> Result<usize> {
        self.0.enter()?;
        self.0.check("cuda", result::mem_get_info()).map(|(free, _)| free)
    }

    /// Bytes of it that this process's buffers take.
    pub fn usage(&self) -> Usage {
        self.0.meter.usage(self.0.facts.memory)
    }

    /// Memory of so many bytes, aligned to 256; what it holds is not defined.
    ///
    /// # Errors
    /// If there is not as much left.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        self.0.enter()?;
        // SAFETY: the context is current; nothing is read before it is written except as bytes
        // without meaning.
        let address = unsafe { result::malloc_sync(bytes.max(1)) };
        let address = self.0.check(&format!("cuda: {bytes} bytes of device memory"), address)?;
        let context = Arc::clone(&self.0);
        let taken = Some(self.0.meter.take(bytes));
        let allocation = Arc::new(Allocation { context, address, host: None, _taken: taken });
        Ok(Buffer { allocation, offset: 0, bytes })
    }

    /// The host's memory, which kernels reach too, of so many bytes, all 0xFF.
    ///
    /// # Errors
    /// If there is not as much left.
    pub fn host_buffer(&self, bytes: usize) -> Result<Buffer> {
        self.0.enter()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let place = || format!("cuda: {bytes} bytes of the host's memory");
        // SAFETY: the context is current.
        let host = unsafe { result::malloc_host(bytes.max(8), flags) };
        let host = self.0.check(&place(), host)?;
        let host = NonNull::new(host).ok_or_else(|| Error::new(place(), "some", "none"))?;
        let mut address = 0;
        // SAFETY: the memory was allocated just now, for kernels to reach; nobody else knows of it
        // yet.
        let found = unsafe {
            std::ptr::write_bytes(host.as_ptr().cast::<u8>(), 0xFF, bytes.max(8));
            sys::cuMemHostGetDevicePointer_v2(&mut address, host.as_ptr(), 0).result()
        };
        let context = Arc::clone(&self.0);
        let allocation = Allocation { context, address, host: Some(host), _taken: None };
        // If there is no address, dropping the allocation frees the memory.
        self.0.check(&place(), found)?;
        Ok(Buffer { allocation: Arc::new(allocation), offset: 0, bytes })
    }

    /// Memory that holds these bytes.
    ///
    /// # Errors
    /// As [`buffer`](Gpu::buffer).
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.buffer(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }
}

impl Buffer {
    /// How many bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Some of the bytes.
    ///
    /// # Errors
    /// If they are not all inside.
    pub fn part(&self, range: Range<usize>) -> Result<Buffer> {
        if range.start > range.end || range.end > self.bytes {
            let expected = format!("a part of {} bytes", self.bytes);
            return Err(Error::new("cuda buffer", expected, format!("{range:?}")));
        }
        let allocation = Arc::clone(&self.allocation);
        Ok(Buffer { allocation, offset: self.offset + range.start, bytes: range.len() })
    }

    /// Replaces all its bytes, after everything enqueued.
    ///
    /// # Errors
    /// If it is another number of bytes, or earlier work failed.
    pub fn write(&self, from: &[u8]) -> Result<()> {
        self.same_length(from.len())?;
        let context = self.context();
        context.synchronize()?;
        // SAFETY: the range is inside the allocation, and the copy is over when the call returns.
        let copied = unsafe { result::memcpy_htod_sync(self.address(), from) };
        // From pageable memory the call may return when the bytes are staged rather than when they
        // have arrived.
        context.check("cuda: copy to the device", copied)?;
        context.check("cuda", result::ctx::synchronize())
    }

    /// Reads all its bytes, after everything enqueued.
    ///
    /// # Errors
    /// If it is another number of bytes, or earlier work failed.
    pub fn read(&self, to: &mut [u8]) -> Result<()> {
        self.same_length(to.len())?;
        let context = self.context();
        context.synchronize()?;
        // SAFETY: the range is inside the allocation, the stream has drained, and the copy is over
        // when the call returns.
        let copied = unsafe { result::memcpy_dtoh_sync(to, self.address()) };
        context.check("cuda: copy from the device", copied)
    }

    /// All its bytes.
    ///
    /// # Errors
    /// If earlier work failed.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Enqueues setting every byte.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn fill(&self, byte: u8) -> Result<()> {
        let context = self.context();
        context.enter()?;
        // SAFETY: the range is inside the allocation, which waits for the stream before it goes.
        let set =
            unsafe { result::memset_d8_async(self.address(), byte, self.bytes, context.stream) };
        context.check("cuda: fill", set)
    }

    /// Enqueues copying all bytes of another buffer of this length that does not overlap this one.
    /// Bytes of the host's memory must not change before they are copied: an
    /// [`Event`](super::Event) tells.
    ///
    /// # Errors
    /// If the lengths differ or the buffers overlap.
    pub fn copy_from(&self, from: &Buffer) -> Result<()> {
        self.same_length(from.bytes)?;
        let context = self.context();
        if !Arc::ptr_eq(context, from.context()) {
            return Err(Error::new("cuda buffer", "a copy within one GPU", "two GPUs"));
        }
        let ends = |b: &Buffer| (b.offset, b.offset + b.bytes);
        let ((a, a_end), (b, b_end)) = (ends(self), ends(from));
        if Arc::ptr_eq(&self.allocation, &from.allocation) && a < b_end && b < a_end {
            return Err(Error::new("cuda buffer", "a copy to other bytes", "overlapping ranges"));
        }
        context.enter()?;
        let (to, source, bytes) = (self.address(), from.address(), self.bytes);
        // SAFETY: both ranges are inside their allocations, which wait for the stream before they
        // go. Those of the host are pinned, so that this does not wait; Rust never refers to them.
        let copied = unsafe {
            match from.allocation.host {
                Some(host) => {
                    let source = host.as_ptr().cast_const().byte_add(from.offset);
                    sys::cuMemcpyHtoDAsync_v2(to, source, bytes, context.stream).result()
                }
                None => result::memcpy_dtod_async(to, source, bytes, context.stream),
            }
        };
        context.check("cuda: copy", copied)
    }

    /// Enqueues filling the rest of the buffer with copies of its first bytes.
    ///
    /// # Errors
    /// If there are not as many bytes, or none.
    pub fn repeat(&self, first: usize) -> Result<()> {
        let mut done = self.part(0..first)?.len();
        if done == 0 {
            return Err(Error::new("cuda buffer", "bytes to repeat", "none"));
        }
        while done < self.bytes {
            let more = done.min(self.bytes - done);
            self.part(done..done + more)?.copy_from(&self.part(0..more)?)?;
            done += more;
        }
        Ok(())
    }

    /// Two words from an even one on, of the host's memory, as they are now.
    ///
    /// # Errors
    /// If it is not the host's, or they are not inside.
    pub fn look(&self, word: usize) -> Result<[u32; 2]> {
        let at = self.host(4 * word, 8, 8)?;
        // SAFETY: inside the allocation and aligned to 8; a kernel may be writing it, in one store
        // of eight bytes.
        let both = u64::from_le(unsafe { at.cast::<u64>().read_volatile() });
        Ok([both as u32, (both >> 32) as u32])
    }

    /// Sets words of the host's memory from one on, each in one store.
    ///
    /// # Errors
    /// If it is not the host's, or the words are not whole or not inside.
    pub fn put(&self, word: usize, bytes: &[u8]) -> Result<()> {
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(Error::new("cuda buffer", "whole words", format!("{} bytes", bytes.len())));
        }
        let at = self.host(4 * word, bytes.len(), 4)?.cast::<u32>();
        for (i, word) in words.iter().enumerate() {
            // SAFETY: inside the allocation and aligned to 4: `host` has checked all of them.
            unsafe { at.add(i).write_volatile(u32::from_ne_bytes(*word)) };
        }
        Ok(())
    }

    /// Where this process sees some of its bytes, which are aligned so.
    fn host(&self, at: usize, bytes: usize, align: usize) -> Result<NonNull<u8>> {
        let outside = || {
            let expected = format!("{bytes} of {} bytes of the host's memory", self.bytes);
            Error::new("cuda buffer", expected, format!("at byte {at}"))
        };
        let host = self.allocation.host.ok_or_else(outside)?;
        let end = at.checked_add(bytes).filter(|end| *end <= self.bytes);
        if end.is_none() || !(self.offset + at).is_multiple_of(align) {
            return Err(outside());
        }
        // SAFETY: inside the allocation, as was just checked.
        Ok(unsafe { host.cast::<u8>().add(self.offset + at) })
    }

    /// Its address on the device.
    pub(super) fn address(&self) -> sys::CUdeviceptr {
        self.allocation.address + self.offset as u64
    }

    /// The largest power of two up to 256 that divides its address.
    pub(super) fn align(&self) -> usize {
        1 << self.address().trailing_zeros().min(8)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.allocation.context
    }

    fn same_length(&self, other: usize) -> Result<()> {
        if other == self.bytes {
            return Ok(());
        }
        Err(Error::new("cuda buffer", format!("{} bytes", self.bytes), other))
    }
}
