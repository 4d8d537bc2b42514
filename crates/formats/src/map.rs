//! A whole file mapped read-only, with advice to the kernel about parts of it; or a file that is
//! part of the program.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::fault::Guard;
use crate::{Error, Location, Result};

/// A read-only mapping of a file. The file must not be changed while it is mapped; replacing it (a
/// new file renamed over the old) is fine. If it is cut, its end reads as zeros: see
/// [`Map::whole`].
pub(crate) struct Map {
    path: PathBuf,
    bytes: Bytes,
}

/// Identity of a mapped file; see [`Map::stamp`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stamp {
    /// Device, inode, length in bytes, then `mtime` and `ctime`, each in seconds and nanoseconds.
    #[cfg(unix)]
    File([i128; 7]),
    #[cfg(not(unix))]
    File {
        path: PathBuf,
        length: u64,
        modified: std::time::SystemTime,
    },
    Program {
        address: usize,
        length: usize,
    },
}

impl Stamp {
    #[cfg(unix)]
    fn of(file: &File, _: &Path) -> Option<Stamp> {
        use std::os::unix::fs::MetadataExt;
        let data = file.metadata().ok()?;
        let (modified, changed) = (data.mtime(), data.ctime());
        let times = [modified, data.mtime_nsec(), changed, data.ctime_nsec()].map(i128::from);
        let [a, b, c, d] = times;
        Some(Stamp::File([data.dev().into(), data.ino().into(), data.size().into(), a, b, c, d]))
    }

    #[cfg(not(unix))]
    fn of(file: &File, path: &Path) -> Option<Stamp> {
        let data = file.metadata().ok()?;
        let (path, length) = (path.canonicalize().ok()?, data.len());
        Some(Stamp::File { path, length, modified: data.modified().ok()? })
    }
}

enum Bytes {
    File {
        /// Stands before the mapping, so that it is dropped first and never guards addresses that
        /// are free.
        guard: Guard,
        file: File,
        map: Mmap,
    },
    Program {
        name: &'static str,
        bytes: &'static [u8],
        /// The same bytes in a mapping of their own, whose pages can be given back; without one no
        /// advice is given.
        map: Option<Mmap>,
    },
}

impl Map {
    /// Maps the file. Nothing is read yet.
    pub(crate) fn open(path: &Path) -> Result<Map> {
        let io = |e| Error::io(path.display(), e);
        // Before it is opened: to open a pipe that nobody writes to would wait for ever.
        let kind = std::fs::metadata(path).map_err(io)?.file_type();
        if !kind.is_file() {
            return Err(Error::new(path.display(), "a file", kind_name(kind)));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the mapping is read-only and private to this value. Another process that rewrites
        // the file in place could change bytes under us, which no mapping can prevent; the
        // documentation asks callers not to, all parsed numbers were copied out before use, and
        // Delft's own writers only rename whole files into place. One that cuts it is met by the
        // guard.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let bytes = Bytes::File { guard: Guard::over(&map), file, map };
        Ok(Map { path: path.to_path_buf(), bytes })
    }

    /// A file that is part of the program; `name` stands for its path.
    pub(crate) fn program(name: &'static str, bytes: &'static [u8]) -> Map {
        #[cfg(target_os = "linux")]
        let map = in_program_file(bytes);
        #[cfg(not(target_os = "linux"))]
        let map = None;
        Map { path: PathBuf::from(name), bytes: Bytes::Program { name, bytes, map } }
    }

    /// The mapping, if there is one.
    fn map(&self) -> Option<&Mmap> {
        match &self.bytes {
            Bytes::File { map, .. } => Some(map),
            Bytes::Program { map, .. } => map.as_ref(),
        }
    }

    /// The file's location.
    pub(crate) fn location(&self) -> Location {
        match self.bytes {
            Bytes::File { .. } => Location::from(&self.path),
            Bytes::Program { name, bytes, .. } => Location::Program { name, bytes },
        }
    }

    /// Checks that all that has been read so far was the file's.
    ///
    /// # Errors
    /// If the file became shorter than what was read of it.
    pub(crate) fn whole(&self) -> Result<()> {
        let Bytes::File { guard, file, map } = &self.bytes else { return Ok(()) };
        if !guard.damaged() {
            return Ok(());
        }
        let size = map.len();
        let found = match file.metadata() {
            Ok(now) if now.len() < size as u64 => {
                format!("{}: the file became shorter while it was read", now.len())
            }
            _ => "fewer while it was read".to_owned(),
        };
        let error = Error::new(self.path.display(), format!("{size} bytes"), found);
        Err(error.hint("wait until nothing writes to it any more, or download it again"))
    }

    /// A stamp that differs from every other file's, and from this file's after a change; `None` if
    /// the system does not provide one.
    pub(crate) fn stamp(&self) -> Option<Stamp> {
        match &self.bytes {
            Bytes::File { file, .. } => Stamp::of(file, &self.path),
            Bytes::Program { bytes, .. } => {
                Some(Stamp::Program { address: bytes.as_ptr() as usize, length: bytes.len() })
            }
        }
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::File { map, .. } | Bytes::Program { map: Some(map), .. } => map,
            Bytes::Program { bytes, map: None, .. } => bytes,
        }
    }

    /// Whether `part` is of this mapping.
    pub(crate) fn holds(&self, part: &[u8]) -> bool {
        self.range_of(part).is_some()
    }

    /// Where `part` lies in this mapping, if it does.
    fn range_of(&self, part: &[u8]) -> Option<Range<usize>> {
        let whole = self.bytes();
        let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
        let end = start.checked_add(part.len())?;
        (end <= whole.len()).then_some(start..end)
    }

    /// Gives the memory of whole pages inside `part` back; reading them again reads the file again.
    /// False when `part` is not of this mapping.
    pub(crate) fn release(&self, part: &[u8]) -> bool {
        // Pages of up to 64 KiB exist; rounding inwards to that spares the neighbours on every
        // machine.
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
        let Some(map) = self.map() else { return };
        // SAFETY: the mapping is of a file, read-only and never written through, so dropped pages
        // come back from the file with the same bytes; slices lent earlier stay valid.
        let result =
            unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
        // Advice: a kernel that refuses costs memory, not correctness.
        drop(result);
    }

    #[cfg(not(unix))]
    fn forget(&self, _start: usize, _len: usize) {}

    /// Reads the pages of `part` into memory ahead of use. False when `part` is not of this
    /// mapping.
    pub(crate) fn touch(&self, part: &[u8]) -> bool {
        let Some(range) = self.range_of(part) else { return false };
        #[cfg(target_os = "linux")]
        if let Some(map) = self.map()
            && map.advise_range(memmap2::Advice::PopulateRead, range.start, range.len()).is_ok()
        {
            return true;
        }
        // Older kernels and other systems: one read a page brings each in.
        for &byte in self.bytes()[range].iter().step_by(4096) {
            std::hint::black_box(byte);
        }
        true
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The bytes of the running program's file that `bytes` were loaded from; `None` if the system did not
/// map them from there.
#[cfg(target_os = "linux")]
fn in_program_file(bytes: &[u8]) -> Option<Mmap> {
    use std::os::unix::fs::MetadataExt;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (address, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
    let file = File::open("/proc/self/exe").ok()?;
    let inode = file.metadata().ok()?.ino().to_string();
    // Lines of `start-end permissions offset device inode path`.
    let offset = std::fs::read_to_string("/proc/self/maps").ok()?.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [range, _, offset, _, of, ..] = words[..] else { return None };
        let (start, end) = range.split_once('-')?;
        let (start, end) = (hex(start)?, hex(end)?);
        let whole = start <= address && address + len <= end && of == inode;
        if whole { Some(hex(offset)? + (address - start)) } else { None }
    })?;
    // SAFETY: the mapping is read-only, and Linux refuses to write to the file of a running program.
    unsafe { memmap2::MmapOptions::new().offset(offset).len(bytes.len()).map(&file) }.ok()
}

/// A kind of file that is no model, in words.
fn kind_name(kind: std::fs::FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    if kind.is_dir() { "a directory" } else { "a device" }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Larger than two of the largest pages.
    static PART: [u8; 200_000] = {
        let mut part = [1; 200_000];
        let mut i = 0;
        while i < part.len() {
            part[i] = (i * i % 251) as u8;
            i += 1;
        }
        part
    };

    #[test]
    fn a_part_of_the_program_is_given_back_and_read_again() {
        let map = Map::program("(part)", &PART);
        assert!(map.map().is_some() && map.bytes().as_ptr() != PART.as_ptr());
        assert!(map.bytes() == PART);
        assert!(map.touch(map.bytes()) && map.release(map.bytes()));
        assert!(map.bytes() == PART);
        // Memory that no file holds.
        let leaked: &'static [u8] = vec![7; 200_000].leak();
        let map = Map::program("(memory)", leaked);
        assert!(map.map().is_none() && map.bytes().as_ptr() == leaked.as_ptr());
    }
}
