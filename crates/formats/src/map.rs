//! A whole file mapped read-only, with advice to the kernel about parts of it.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{Error, Result};

/// A read-only mapping of a file. The file must not be changed or cut while it is mapped; replacing it (a new file
/// renamed over the old) is fine.
#[derive(Debug)]
pub(crate) struct Map {
    path: PathBuf,
    map: Mmap,
}

impl Map {
    /// Maps the file. Nothing is read yet.
    pub(crate) fn open(path: &Path) -> Result<Map> {
        let io = |e| Error::io(path.display(), e);
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.is_dir() {
            return Err(Error::new(path.display(), "a file", "a directory"));
        }
        // SAFETY: the mapping is read-only and private to this value. Another process that rewrites the file in place
        // could change bytes under us, which no mapping can prevent; the documentation asks callers not to, all
        // parsed numbers were copied out before use, and Delft's own writers only rename whole files into place.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Map { path: path.to_path_buf(), map })
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Where `part` lies in this mapping, if it does.
    fn range_of(&self, part: &[u8]) -> Option<Range<usize>> {
        let start = (part.as_ptr() as usize).checked_sub(self.map.as_ptr() as usize)?;
        let end = start.checked_add(part.len())?;
        (end <= self.map.len()).then_some(start..end)
    }

    /// Gives the memory of whole pages inside `part` back; reading them again reads the file again. False when `part`
    /// is not of this mapping.
    pub(crate) fn release(&self, part: &[u8]) -> bool {
        // Pages of up to 64 KiB exist; rounding inwards to that spares the neighbours on every machine.
        const PAGE: usize = 64 << 10;
        let Some(range) = self.range_of(part) else { return false };
        let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
        if start < end {
            self.forget(start, end - start);
        }
        true
    }

    #[cfg(unix)]
    fn forget(&self, start: usize, len: usize) {
        // SAFETY: the mapping is of a file, read-only and never written through, so dropped pages come back from the
        // file with the same bytes; slices lent earlier stay valid.
        let result = unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len)
        };
        // Advice: a kernel that refuses costs memory, not correctness.
        drop(result);
    }

    #[cfg(not(unix))]
    fn forget(&self, _start: usize, _len: usize) {}

    /// Reads the pages of `part` into memory ahead of use. False when `part` is not of this mapping.
    pub(crate) fn touch(&self, part: &[u8]) -> bool {
        let Some(range) = self.range_of(part) else { return false };
        #[cfg(target_os = "linux")]
        if self.map.advise_range(memmap2::Advice::PopulateRead, range.start, range.len()).is_ok() {
            return true;
        }
        // Older kernels and other systems: one read a page brings each in.
        for &byte in self.map[range].iter().step_by(4096) {
            std::hint::black_box(byte);
        }
        true
    }
}
