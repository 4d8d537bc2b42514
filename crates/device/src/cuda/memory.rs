//! Device memory: reference-counted byte ranges.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};
use formats::{Error, Result};

use super::{Context, Gpu};
use crate::Usage;
use crate::gpu::meter::Taken;

/// A range of device memory. Clones refer to the same bytes.
#[derive(Clone)]
pub struct CudaBuffer {
    allocation: Arc<Allocation>,
    offset: usize,
    bytes: usize,
}

struct Allocation {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    kind: Kind,
}

enum Kind {
    /// Device memory, which this counts.
    Device { _taken: Taken },
    /// Pinned host memory, at this address in this process.
    Host(NonNull<c_void>),
    /// So many bytes of addresses; the first of them have memory.
    Reserved { bytes: usize, pieces: Mutex<Pieces> },
}

/// The pieces of memory of reserved addresses, one behind the other.
#[derive(Default)]
struct Pieces {
    bytes: usize,
    /// The size of each, with what counts it as device memory.
    each: Vec<(usize, Taken)>,
}

// SAFETY: the host address is only used for volatile accesses of single words within bounds, which
// may happen on any thread.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn host(&self) -> Option<NonNull<c_void>> {
        match self.kind {
            Kind::Host(host) => Some(host),
            Kind::Device { .. } | Kind::Reserved { .. } => None,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A kernel may still be using it.
        drop(self.context.synchronize());
        // SAFETY: allocated by `cuMemHostAlloc`, `cuMemAlloc` or `cuMemAddressReserve`, freed only
        // here, and the only stream has drained. Each piece was mapped as a whole, behind those
        // before it, and its handle is released already. In a lost context this fails, and the
        // memory goes with the context.
        unsafe {
            match &mut self.kind {
                Kind::Host(host) => drop(result::free_host(host.as_ptr())),
                Kind::Device { .. } => drop(result::free_sync(self.address)),
                Kind::Reserved { bytes, pieces } => {
                    let mut at = self.address;
                    let pieces = pieces.get_mut().unwrap_or_else(PoisonError::into_inner);
                    for (piece, _) in &pieces.each {
                        let _ = sys::cuMemUnmap(at, *piece);
                        at += *piece as u64;
                    }
                    let _ = sys::cuMemAddressFree(self.address, *bytes);
                }
            }
        }
    }
}

/// The kind of memory that reserved addresses get: of a device, for itself.
fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// The bytes in which reserved addresses get memory; `None` if the device has no such addresses.
pub(super) fn page(device: sys::CUdevice) -> Option<usize> {
    use sys::CUdevice_attribute as Attribute;
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    // SAFETY: the device exists.
    let supported = unsafe { result::device::get_attribute(device, attribute) }.ok()?;
    let mut bytes = 0;
    let wanted = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: writes one number.
    let found =
        unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties(device), wanted) };
    (supported == 1 && found.result().is_ok() && bytes > 0).then_some(bytes)
}

impl Gpu {
    /// Free bytes of device memory.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn free(&self) -> Result<usize> {
        self.0.enter()?;
        self.0.check("cuda", result::mem_get_info()).map(|(free, _)| free)
    }

    /// Bytes of device memory taken by this process's buffers.
    pub fn usage(&self) -> Usage {
        self.0.meter.usage(self.0.facts.memory)
    }

    /// Allocates uninitialised memory, aligned to 256 bytes.
    ///
    /// # Errors
    /// Too little memory.
    pub fn buffer(&self, bytes: usize) -> Result<CudaBuffer> {
        self.0.enter()?;
        // SAFETY: the context is current; nothing is read before it is written except as bytes
        // without meaning.
        let address = unsafe { result::malloc_sync(bytes.max(1)) };
        let address = self.0.check(&format!("cuda: {bytes} bytes of device memory"), address)?;
        let kind = Kind::Device { _taken: self.0.meter.take(bytes) };
        let allocation = Allocation { context: Arc::clone(&self.0), address, kind };
        Ok(CudaBuffer { allocation: Arc::new(allocation), offset: 0, bytes })
    }

    /// Reserves addresses without memory: see [`CudaBuffer::extend`].
    ///
    /// # Errors
    /// No whole number of [`Properties::page`](super::Properties::page)s, or too few addresses.
    pub fn reserve(&self, bytes: usize) -> Result<CudaBuffer> {
        self.0.enter()?;
        let mut address = 0;
        // SAFETY: writes one address.
        let found = unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }.result();
        self.0.check(&format!("cuda: addresses for {bytes} bytes"), found)?;
        let kind = Kind::Reserved { bytes, pieces: Mutex::default() };
        let allocation = Allocation { context: Arc::clone(&self.0), address, kind };
        Ok(CudaBuffer { allocation: Arc::new(allocation), offset: 0, bytes })
    }

    /// Allocates pinned host memory that kernels can access, filled with 0xFF.
    ///
    /// # Errors
    /// Too little memory.
    pub fn host_buffer(&self, bytes: usize) -> Result<CudaBuffer> {
        self.0.enter()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let place = || format!("cuda: {bytes} bytes of the host's memory");
        // SAFETY: the context is current.
        let host = unsafe { result::malloc_host(bytes.max(8), flags) };
        let host = self.0.check(&place(), host)?;
        let host = NonNull::new(host).ok_or_else(|| Error::new(place(), "some", "none"))?;
        let mut address = 0;
        // SAFETY: the memory was allocated just now, and nothing else accesses it yet.
        let found = unsafe {
            std::ptr::write_bytes(host.as_ptr().cast::<u8>(), 0xFF, bytes.max(8));
            sys::cuMemHostGetDevicePointer_v2(&mut address, host.as_ptr(), 0).result()
        };
        let allocation =
            Allocation { context: Arc::clone(&self.0), address, kind: Kind::Host(host) };
        // If there is no address, dropping the allocation frees the memory.
        self.0.check(&place(), found)?;
        Ok(CudaBuffer { allocation: Arc::new(allocation), offset: 0, bytes })
    }

    /// Allocates memory with these contents.
    ///
    /// # Errors
    /// As [`buffer`](Gpu::buffer).
    pub fn upload(&self, bytes: &[u8]) -> Result<CudaBuffer> {
        let buffer = self.buffer(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }
}

impl CudaBuffer {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// A sub-range.
    ///
    /// # Errors
    /// A range outside the buffer.
    pub fn part(&self, range: Range<usize>) -> Result<CudaBuffer> {
        if range.start > range.end || range.end > self.bytes {
            let expected = format!("a part of {} bytes", self.bytes);
            return Err(Error::new("cuda buffer", expected, format!("{range:?}")));
        }
        let allocation = Arc::clone(&self.allocation);
        Ok(CudaBuffer { allocation, offset: self.offset + range.start, bytes: range.len() })
    }

    /// Gives the first `bytes` of reserved addresses memory, a whole number of
    /// [`Properties::page`](super::Properties::page)s. What is new is zero for work enqueued
    /// afterwards.
    ///
    /// # Errors
    /// Addresses that are not reserved, or too little memory; the buffer is then as it was.
    pub fn extend(&self, bytes: usize) -> Result<()> {
        let place = || format!("cuda: {bytes} bytes of reserved addresses");
        let context = self.context();
        context.enter()?;
        let Kind::Reserved { bytes: all, pieces } = &self.allocation.kind else {
            return Err(Error::new(place(), "addresses that are reserved", "memory"));
        };
        if bytes > *all {
            return Err(Error::new(place(), format!("at most {all}"), bytes));
        }
        let mut pieces = pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let more = bytes.saturating_sub(pieces.bytes);
        if more == 0 {
            return Ok(());
        }
        let at = self.allocation.address + pieces.bytes as u64;
        let mut handle = 0;
        // SAFETY: writes one handle.
        let made = unsafe { sys::cuMemCreate(&mut handle, more, &properties(context.device), 0) };
        context.check(&place(), made.result())?;
        // SAFETY: the addresses are reserved, behind those that have memory. The mapping keeps the
        // memory, so its handle can go.
        let mapped = unsafe {
            let mapped = sys::cuMemMap(at, more, 0, handle, 0).result();
            let _ = sys::cuMemRelease(handle);
            mapped
        };
        context.check(&place(), mapped)?;
        let access = sys::CUmemAccessDesc {
            location: location(context.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: these addresses have memory, which nothing uses yet.
        let usable = unsafe {
            let usable = sys::cuMemSetAccess(at, more, &access, 1).result();
            let zeroed = |()| result::memset_d8_async(at, 0, more, context.stream);
            usable.and_then(zeroed).inspect_err(|_| {
                let _ = sys::cuMemUnmap(at, more);
            })
        };
        context.check(&place(), usable)?;
        pieces.bytes += more;
        pieces.each.push((more, context.meter.take(more)));
        Ok(())
    }

    /// Overwrites all its bytes, after everything enqueued.
    ///
    /// # Errors
    /// Another number of bytes, or earlier work that failed.
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
    /// Another number of bytes, or earlier work that failed.
    pub fn read(&self, to: &mut [u8]) -> Result<()> {
        self.same_length(to.len())?;
        let context = self.context();
        context.synchronize()?;
        // SAFETY: the range is inside the allocation, the stream has drained, and the copy is over
        // when the call returns.
        let copied = unsafe { result::memcpy_dtoh_sync(to, self.address()) };
        context.check("cuda: copy from the device", copied)
    }

    /// Reads all its bytes into a vector.
    ///
    /// # Errors
    /// Earlier work that failed.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Enqueues filling it with a byte.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn fill(&self, byte: u8) -> Result<()> {
        let context = self.context();
        context.enter()?;
        // SAFETY: the range is inside the allocation, which waits for the stream before it goes.
        let set =
            unsafe { result::memset_d8_async(self.address(), byte, self.bytes, context.stream) };
        context.check("cuda: fill", set)
    }

    /// Enqueues a copy of another buffer of the same length that does not overlap this one. If the
    /// source is pinned host memory, it must not change until the copy is done; record an
    /// [`Event`](super::Event) to know.
    ///
    /// # Errors
    /// Different lengths, or overlapping buffers.
    pub fn copy_from(&self, from: &CudaBuffer) -> Result<()> {
        self.same_length(from.bytes)?;
        let context = self.context();
        if !Arc::ptr_eq(context, from.context()) {
            return Err(Error::new("cuda buffer", "a copy within one GPU", "two GPUs"));
        }
        let ends = |b: &CudaBuffer| (b.offset, b.offset + b.bytes);
        let ((a, a_end), (b, b_end)) = (ends(self), ends(from));
        if Arc::ptr_eq(&self.allocation, &from.allocation) && a < b_end && b < a_end {
            return Err(Error::new("cuda buffer", "a copy to other bytes", "overlapping ranges"));
        }
        context.enter()?;
        let (to, source, bytes) = (self.address(), from.address(), self.bytes);
        // SAFETY: both ranges are inside their allocations, which wait for the stream before they
        // are freed. Host memory is pinned, so the copy does not block, and Rust holds no reference
        // to it.
        let copied = unsafe {
            match from.allocation.host() {
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
    /// Too few bytes, or none to repeat.
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

    /// Reads two words of pinned host memory, from an even index, in one load.
    ///
    /// # Errors
    /// Device memory, or words outside the buffer.
    pub fn look(&self, word: usize) -> Result<[u32; 2]> {
        let at = self.host(4 * word, 8, 8)?;
        // SAFETY: inside the allocation and aligned to 8; a kernel may be writing it, in one store
        // of eight bytes.
        let both = u64::from_le(unsafe { at.cast::<u64>().read_volatile() });
        Ok([both as u32, (both >> 32) as u32])
    }

    /// Writes words of pinned host memory, each in one store.
    ///
    /// # Errors
    /// Device memory, partial words, or words outside the buffer.
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

    /// The host address of a range of its bytes, checked for bounds and alignment.
    fn host(&self, at: usize, bytes: usize, align: usize) -> Result<NonNull<u8>> {
        let outside = || {
            let expected = format!("{bytes} of {} bytes of the host's memory", self.bytes);
            Error::new("cuda buffer", expected, format!("at byte {at}"))
        };
        let host = self.allocation.host().ok_or_else(outside)?;
        let end = at.checked_add(bytes).filter(|end| *end <= self.bytes);
        if end.is_none() || !(self.offset + at).is_multiple_of(align) {
            return Err(outside());
        }
        // SAFETY: inside the allocation, as was just checked.
        Ok(unsafe { host.cast::<u8>().add(self.offset + at) })
    }

    /// Its device address.
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
