//! Compiled kernels on disk, so that a second start compiles nothing, and which of the ways of a
//! vendor's library was the fastest, so that it times none.
//!
//! One file per key in the user's cache folder: a magic line, the SHA-256 of the image, the image.
//! A file is written under a temporary name and renamed, so that processes that start together see
//! it whole or not at all. A damaged file counts as absent and is replaced.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const MAGIC: &[u8; 16] = b"delft-kernel-1\r\n";
/// Size limit of an image. No kernel comes near it.
const LIMIT: u64 = 64 << 20;

/// Identifies a compiled kernel: a hash of everything that it depends on.
pub(crate) type Key = [u8; 32];

/// The key of a list of parts, such as the source and the compiler's options.
pub(crate) fn key(parts: &[&str]) -> Key {
    let mut hash = Sha256::new();
    for part in parts {
        // With each part's length hashed before it, no two lists give the same input.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

/// The user's cache folder: `DELFT_CACHE`, else `delft` in `XDG_CACHE_HOME` or `~/.cache`. `None`
/// if none of these is set.
pub fn folder_of_user() -> Option<PathBuf> {
    let path = |key: &str| std::env::var_os(key).filter(|v| !v.is_empty()).map(PathBuf::from);
    path("DELFT_CACHE").or_else(|| {
        let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        Some(cache?.join("delft"))
    })
}

/// The folder of the user's compiled kernels, if there is a cache folder.
pub(crate) fn kernels_of_user() -> Option<PathBuf> {
    Some(folder_of_user()?.join("kernels"))
}

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The user's cache, in [`kernels_of_user`].
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

    /// The image stored under a key, if its file is present and intact.
    pub(crate) fn get(&self, key: &Key) -> Option<Vec<u8>> {
        read(&self.path(key))
    }

    /// Stores an image. Failures are ignored: a cache that cannot be written costs time, not
    /// correctness.
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
