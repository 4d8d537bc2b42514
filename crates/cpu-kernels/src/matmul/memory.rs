//! Memory for weights: zeroed, aligned to 2 MiB, in huge pages where the system has them to give.
//!
//! A matrix product that reads 600 MB of weights per token misses the TLB on every 4 KiB page; huge
//! pages are worth about a tenth of the decode speed.

use formats::{Error, Result};

/// Alignment and rounding of a [`Huge`] buffer: one huge page.
const PAGE: usize = Huge::PAGE;

/// An owned, zeroed byte buffer aligned to 2 MiB.
///
/// On Linux it is an anonymous mapping that asks for huge pages as far as whole ones reach: pages
/// that were never written take no memory.
pub struct Huge {
    start: *mut u8,
    len: usize,
}

// SAFETY: a `Huge` owns its bytes; shared references only read them, exclusive ones may write.
unsafe impl Send for Huge {}
// SAFETY: as above; `as_ptr` hands out a raw pointer whose writers make their own proof.
unsafe impl Sync for Huge {}

impl Huge {
    /// Bytes of a huge page.
    pub const PAGE: usize = 2 << 20;

    /// Allocates `len` zero bytes.
    ///
    /// # Errors
    /// The system has too little memory.
    pub fn zeroed(len: usize) -> Result<Huge> {
        let refused = |e: std::io::Error| {
            Error::new("weight memory", format!("{len} bytes"), e)
                .hint("try a smaller model or a smaller quantisation")
        };
        if len == 0 {
            return Ok(Huge { start: PAGE as *mut u8, len });
        }
        let Some(reserved) = len.checked_next_multiple_of(PAGE).and_then(|n| n.checked_add(PAGE))
        else {
            return Err(refused(std::io::ErrorKind::OutOfMemory.into()));
        };
        let start = map(reserved, len).map_err(refused)?;
        Ok(Huge { start, len })
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte, aligned to 2 MiB. The caller must not write through it while others read.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }
}

impl std::ops::Deref for Huge {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is aligned and, for `len > 0`, the mapping holds at least `len`
        // initialised (zeroed) bytes.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl std::ops::DerefMut for Huge {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: `zeroed` made this mapping of this size, and only this frees it.
            unsafe { unmap(self.start, self.len) }
        }
    }
}

/// Maps `reserved` bytes and trims them to the aligned `len.next_multiple_of(PAGE)` within.
#[cfg(target_os = "linux")]
fn map(reserved: usize, len: usize) -> std::io::Result<*mut u8> {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh anonymous mapping at an address of the system's choice touches no memory of
    // this process.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), reserved, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    let kept = len.next_multiple_of(PAGE);
    let before = base as usize;
    let start = before.next_multiple_of(PAGE);
    let (head, tail) = (start - before, before + reserved - (start + kept));
    // SAFETY: head and tail lie inside the mapping just made and outside the part that is kept;
    // advice is only advice.
    unsafe {
        if head > 0 {
            libc::munmap(base, head);
        }
        if tail > 0 {
            libc::munmap((start + kept) as *mut _, tail);
        }
        // Huge pages for whole ones only: a last one that is mostly empty would cost a small model
        // its size again.
        let whole = len / PAGE * PAGE;
        if whole > 0 {
            libc::madvise(start as *mut _, whole, libc::MADV_HUGEPAGE);
        }
        if whole < kept {
            libc::madvise((start + whole) as *mut _, kept - whole, libc::MADV_NOHUGEPAGE);
        }
    }
    Ok(start as *mut u8)
}

#[cfg(target_os = "linux")]
unsafe fn unmap(start: *mut u8, len: usize) {
    // SAFETY: the caller passes what `map` returned.
    unsafe { libc::munmap(start as *mut _, len.next_multiple_of(PAGE)) };
}

#[cfg(not(target_os = "linux"))]
fn map(_: usize, len: usize) -> std::io::Result<*mut u8> {
    let layout = std::alloc::Layout::from_size_align(len, PAGE)
        .map_err(|_| std::io::ErrorKind::OutOfMemory)?;
    // SAFETY: `len` is not zero.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() { Err(std::io::ErrorKind::OutOfMemory.into()) } else { Ok(start) }
}

#[cfg(not(target_os = "linux"))]
unsafe fn unmap(start: *mut u8, len: usize) {
    // SAFETY: the caller passes what `map` returned, with the same length, hence the same layout.
    unsafe { std::alloc::dealloc(start, std::alloc::Layout::from_size_align_unchecked(len, PAGE)) };
}
