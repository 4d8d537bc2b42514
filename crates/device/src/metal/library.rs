//! Precompiled kernels: a metallib made by `tile build`, and the hashes of its sources.
//!
//! Beside `kernels.metallib` lies `kernels.metallib.sha256`, one line of `sha256sum` for each
//! source that was compiled. A kernel is taken from the library only if the source that this
//! program would compile has that hash; so a library of another version does no harm.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use formats::{Error, Result};
use sha2::{Digest, Sha256};
use tile::Kernel;
use tile::emit::{self, Dialect};
use tile::passes::{self, Target};

use super::api::Api;

/// The library's file name.
pub(super) const NAME: &str = "kernels.metallib";

/// A library and the hashes of its sources.
pub(super) struct Prebuilt<L> {
    pub(super) library: L,
    hashes: HashMap<String, [u8; 32]>,
}

/// The path of the library: the one in `DELFT_METALLIB`, which is then required; else one beside
/// the program, if it exists.
pub(super) fn find(named: Option<PathBuf>, program: Option<PathBuf>) -> Option<(PathBuf, bool)> {
    if let Some(named) = named {
        return Some((named, true));
    }
    let beside = program?.parent()?.join(NAME);
    beside.is_file().then_some((beside, false))
}

/// As [`find`], for this process.
pub(super) fn of_process() -> Option<(PathBuf, bool)> {
    let named = std::env::var_os("DELFT_METALLIB").filter(|name| !name.is_empty());
    find(named.map(PathBuf::from), std::env::current_exe().ok())
}

impl<L> Prebuilt<L> {
    /// Opens a library and its list of hashes.
    ///
    /// # Errors
    /// Either is missing or malformed.
    pub(super) fn open<A: Api<Library = L>>(api: &A, path: &Path) -> Result<Prebuilt<L>> {
        let list = path.with_added_extension("sha256");
        let text = std::fs::read_to_string(&list).map_err(|e| Error::io(list.display(), e))?;
        let hashes = hashes(&text).ok_or_else(|| {
            Error::new(list.display(), "lines of sha256sum", "others")
                .hint("tile build writes it beside the library")
        })?;
        Ok(Prebuilt { library: api.open(path)?, hashes })
    }

    /// Whether the library has exactly this kernel, whose constants are not yet set.
    pub(super) fn has(&self, kernel: &Kernel) -> bool {
        let Some(hash) = self.hashes.get(&kernel.name) else { return false };
        let lowered = passes::lower(kernel, Target::Metal).ok();
        let text = lowered.and_then(|k| emit::text(&[k], Dialect::Metal).ok());
        text.is_some_and(|text| Sha256::digest(text).as_slice() == hash)
    }
}

/// Hashes by the names of kernels.
fn hashes(text: &str) -> Option<HashMap<String, [u8; 32]>> {
    let line = |line: &str| {
        let (hex, name) = line.split_once("  ")?;
        let mut hash = [0; 32];
        if hex.len() != 64 || !hex.is_ascii() {
            return None;
        }
        for (i, byte) in hash.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
        }
        Some((name.strip_suffix(".metal")?.to_owned(), hash))
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_looked_for_by_name_and_beside_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("delft");
        assert_eq!(find(None, Some(program.clone())), None);
        let beside = folder.path().join(NAME);
        std::fs::write(&beside, "").unwrap();
        assert_eq!(find(None, Some(program.clone())), Some((beside, false)));
        let named = PathBuf::from("elsewhere.metallib");
        assert_eq!(find(Some(named.clone()), Some(program)), Some((named, true)));
        assert_eq!(find(None, None), None);
    }

    #[test]
    fn a_list_is_read_whole_or_not_at_all() {
        let hex = "ab".repeat(32);
        let list = hashes(&format!("{hex}  silu_f32.metal\n{hex}  add_f32.metal\n")).unwrap();
        assert_eq!(list["silu_f32"], [0xab; 32]);
        assert_eq!(list.len(), 2);
        for damaged in [
            format!("{hex} silu_f32.metal"),
            format!("{hex}  silu_f32"),
            format!("{}  silu_f32.metal", &hex[1..]),
            format!("{}g  silu_f32.metal", &hex[1..]),
            format!("{}é  silu_f32.metal", &hex[2..]),
        ] {
            assert_eq!(hashes(&damaged), None, "{damaged}");
        }
    }
}
