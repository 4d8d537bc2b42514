//! Compiled pipelines on disk, so that a second start compiles nothing.
//!
//! Metal reads and writes an archive as a file of its own. That file is stored in the cache of
//! compiled kernels, with its hash. To be used it is unpacked into a temporary file, which Metal
//! may keep reading. An archive that is damaged, or that Metal refuses, is ignored.

use std::sync::atomic::{AtomicBool, Ordering};

use formats::Result;
use tempfile::TempPath;

use super::api::Api;
use crate::cache::{self, Cache, Key};

/// The known pipelines of a GPU.
pub(super) struct Pipelines<A: Api> {
    disk: Option<(Cache, Key)>,
    archive: Option<A::Archive>,
    /// The file that the archive was read from.
    _file: Option<TempPath>,
    /// Whether a pipeline was added since the archive was written.
    added: AtomicBool,
}

impl<A: Api> Pipelines<A> {
    /// Opens the archive of earlier runs on this GPU and system.
    pub(super) fn open(api: &A, disk: Option<Cache>) -> Pipelines<A> {
        let facts = api.facts();
        let key = cache::key(&["metal pipelines", &facts.name, &facts.system]);
        let disk = disk.map(|disk| (disk, key));
        let kept = disk.as_ref().and_then(|(disk, key)| {
            let file = unpack(&disk.get(key)?).ok()?;
            Some((api.archive(Some(&file)).ok()?, file))
        });
        let (archive, file) = match kept {
            Some((archive, file)) => (Some(archive), Some(file)),
            // Without a disk there is nothing to keep an archive for.
            None => (disk.as_ref().and_then(|_| api.archive(None).ok()), None),
        };
        Pipelines { disk, archive, _file: file, added: AtomicBool::new(false) }
    }

    /// The archive to search and extend.
    pub(super) fn archive(&self) -> Option<&A::Archive> {
        self.archive.as_ref()
    }

    /// Records that a pipeline was added.
    pub(super) fn added(&self) {
        self.added.store(true, Ordering::Relaxed);
    }

    /// Writes added pipelines. Failures are ignored: a disk that cannot be written costs time, not
    /// correctness.
    pub(super) fn save(&self, api: &A) {
        if self.added.swap(false, Ordering::Relaxed) {
            drop(self.write(api));
        }
    }

    fn write(&self, api: &A) -> Result<()> {
        let (Some((disk, key)), Some(archive)) = (&self.disk, &self.archive) else { return Ok(()) };
        let wrong = |e| formats::Error::io("metal pipelines", e);
        let folder = tempfile::tempdir().map_err(wrong)?;
        let path = folder.path().join("pipelines");
        api.save(archive, &path)?;
        disk.put(key, &std::fs::read(&path).map_err(wrong)?);
        Ok(())
    }
}

fn unpack(bytes: &[u8]) -> std::io::Result<TempPath> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), bytes)?;
    Ok(file.into_temp_path())
}
