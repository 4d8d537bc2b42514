//! Compiled kernels on disk, so that a second start compiles nothing.
//!
//! One file per key in the user's cache folder: a line saying what it is, the hash of the rest, the
//! rest. It is written aside and renamed, so that programs that start together see it whole or not
//! at all. A file that is not what it says is taken for absent, and replaced.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const MAGIC: &[u8; 16] = b"delft-kernel-1\r\n";
/// More than any kernel takes: a larger file is not one.
const LIMIT: u64 = 64 << 20;

/// What identifies a compiled kernel: a hash of all that it depends on.
pub(crate) type Key = [u8; 32];

/// The key of a text compiled in some way.
pub(crate) fn key(parts: &[&str]) -> Key {
    let mut hash = Sha256::new();
    for part in parts {
        // With its length before it, no two lists of parts are alike.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// Where what can be made again is kept for the user: `DELFT_CACHE`, else `delft` in
/// `XDG_CACHE_HOME` or `~/.cache`. None if the machine has no such place.
pub fn folder_of_user() -> Option<PathBuf> {
    let path = |key: &str| std::env::var_os(key).filter(|v| !v.is_empty()).map(PathBuf::from);
    path("DELFT_CACHE").or_else(|| {
        let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        Some(cache?.join("delft"))
    })
}

/// Where the user's compiled kernels are kept. None if the machine has no such place.
pub(crate) fn kernels_of_user() -> Option<PathBuf> {
    Some(folder_of_user()?.join("kernels"))
}

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The user's, in [`kernels_of_user`]. None if the machine has no such place.
    #[cfg(any(feature = "cuda", all(feature = "metal", target_vendor = "apple")))]
    pub(crate) fn of_user() -> Option<Cache> {
        Some(Cache { folder: kernels_of_user()? })
    }

    #[cfg(test)]
    pub(crate) fn at(folder: &Path) -> Cache {
        Cache { folder: folder.to_path_buf() }
    }

    fn path(&self, key: &Key) -> PathBuf {
        let name: String = key.iter().map(|b| format!("{b:02x}")).collect();
        self.folder.join(name)
    }

    /// The file of a key, if there is a whole one.
    pub(crate) fn get(&self, key: &Key) -> Option<Vec<u8>> {
        read(&self.path(key))
    }

    /// Keeps an image. A cache that cannot be written costs time, not correctness, so nothing is
    /// reported.
    pub(crate) fn put(&self, key: &Key, image: &[u8]) {
        drop(self.write(&self.path(key), image));
    }

    fn write(&self, path: &Path, image: &[u8]) -> std::io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut aside = tempfile::NamedTempFile::new_in(&self.folder)?;
        aside.write_all(MAGIC)?;
        aside.write_all(&Sha256::digest(image))?;
        aside.write_all(image)?;
        aside.persist(path).map_err(|e| e.error)?;
        Ok(())
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut file = File::open(path).ok()?;
    let mut magic = [0; MAGIC.len()];
    let mut hash = [0; 32];
    file.read_exact(&mut magic).ok()?;
    file.read_exact(&mut hash).ok()?;
    if magic != *MAGIC || file.metadata().ok()?.len() > LIMIT {
        return None;
    }
    let mut image = Vec::new();
    file.take(LIMIT).read_to_end(&mut image).ok()?;
    (Sha256::digest(&image).as_slice() == hash).then_some(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_comes_back_and_damage_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = key(&["text", "sm_90a"]);
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"an image");
        assert_eq!(cache.get(&key).as_deref(), Some(&b"an image"[..]));

        let path = cache.path(&key);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(cache.get(&key), None, "{length} bytes of it");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get(&key), None, "byte {at} changed");
        }
        cache.put(&key, b"an image");
        assert_eq!(cache.get(&key).as_deref(), Some(&b"an image"[..]));
    }

    #[test]
    fn keys_tell_lists_of_parts_apart() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_ne!(key(&["a"]), key(&["a", ""]));
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
    }

    #[test]
    fn programs_that_start_together_read_whole_files() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = key(&["shared"]);
        let image = vec![7; 100_000];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        cache.put(&key, &image);
                        assert_eq!(cache.get(&key).as_deref(), Some(&image[..]));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing left aside");
    }
}
