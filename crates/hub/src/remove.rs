//! Taking models out of the cache: only what no other revision of the repository uses.

use std::collections::BTreeSet;
use std::fs::{self, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use formats::{Error, Result};

use crate::{Hub, HubName, cache, choose};

/// The files that [`Removal::run`] will delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removal {
    /// The repository, `org/name`.
    pub id: String,
    /// The names of the files that go, as far as they are finished.
    pub files: Vec<String>,
    /// Bytes that become free.
    pub bytes: u64,
    /// Bytes of these that are of unfinished downloads.
    pub partial_bytes: u64,
    folder: PathBuf,
    locks: PathBuf,
    what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    Repository,
    /// Links and refs first, so that nothing leads to a blob that is gone.
    Part {
        pointers: Vec<PathBuf>,
        snapshots: Vec<PathBuf>,
        refs: Vec<PathBuf>,
        blobs: Vec<PathBuf>,
    },
}

impl Removal {
    /// See [`Hub::removal`].
    pub(crate) fn of(hub: &Hub, spec: &HubName, text: &str) -> Result<Removal> {
        let folder = cache::folder(hub, &spec.id);
        if !folder.is_dir() {
            let found = format!("none in {}", hub.cache.display());
            return Err(Error::new(text, "a model in the cache", found).hint("see delft list"));
        }
        let commits = cache::commits(&folder);
        let whole = spec.file.is_none() && spec.revision == "main" && !text.contains('@');
        // Without a snapshot there are unfinished downloads alone, of whatever file.
        if whole || commits.is_empty() {
            return Ok(Removal::repository(hub, &spec.id, folder, &commits));
        }
        let commit = cache::commit_of(&folder, &spec.revision)
            .filter(|commit| commits.contains(commit))
            .ok_or_else(|| {
                let revision = format!("revision {} in the cache", spec.revision);
                Error::new(text, revision, commits.join(", "))
            })?;
        let snapshot = folder.join("snapshots").join(&commit);
        let names = cache::names(&snapshot)?;
        let chosen = match &spec.file {
            None => names.clone(),
            Some(file) => {
                choose::gguf(&spec.id, Some(file), &names)
                    .map_err(|error| error.hint(format!("delft rm {} removes all of it", spec.id)))?
                    .files
            }
        };
        let rest = names.iter().any(|name| choose::is_weights(name) && !chosen.contains(name));
        // What goes with weights is of no use without any.
        let files = if rest { chosen } else { names };
        if !rest && commits.len() == 1 {
            return Ok(Removal::repository(hub, &spec.id, folder, &commits));
        }
        Ok(Removal::part(hub, &spec.id, folder, &commit, files, rest))
    }

    fn repository(hub: &Hub, id: &str, folder: PathBuf, commits: &[String]) -> Removal {
        let names = commits.iter().flat_map(|commit| {
            cache::names(&folder.join("snapshots").join(commit)).unwrap_or_default()
        });
        let files: BTreeSet<String> = names.collect();
        let size = |part: &str| -> u64 {
            let files = cache::walk(&folder.join(part)).unwrap_or_default();
            let own = |name: &str| !folder.join(part).join(name).is_symlink();
            files.iter().filter(|(name, _)| own(name)).map(|(_, size)| size).sum()
        };
        Removal {
            id: id.to_string(),
            files: files.into_iter().collect(),
            bytes: size("blobs").saturating_add(size("snapshots")),
            partial_bytes: cache::partial_bytes(&folder),
            locks: cache::locks(hub, id),
            folder,
            what: What::Repository,
        }
    }

    /// Files of one snapshot, and the whole of it unless some of its weights stay.
    fn part(
        hub: &Hub,
        id: &str,
        folder: PathBuf,
        commit: &str,
        files: Vec<String>,
        rest: bool,
    ) -> Removal {
        let snapshot = folder.join("snapshots").join(commit);
        let pointers: Vec<PathBuf> = files.iter().map(|name| snapshot.join(name)).collect();
        let kept: BTreeSet<PathBuf> = cache::commits(&folder)
            .iter()
            .flat_map(|commit| {
                let snapshot = folder.join("snapshots").join(commit);
                let names = cache::names(&snapshot).unwrap_or_default();
                names.into_iter().map(move |name| snapshot.join(name)).collect::<Vec<_>>()
            })
            .filter(|pointer| !pointers.contains(pointer))
            .map(|pointer| cache::blob_of(&pointer))
            .collect();
        // A link may lead anywhere: only what lies in this repository's folder is its own.
        let home = cache::blob_of(&folder);
        let freed: BTreeSet<PathBuf> = pointers
            .iter()
            .map(|pointer| cache::blob_of(pointer))
            .filter(|blob| blob.starts_with(&home) && !kept.contains(blob))
            .collect();
        let size = |path: &PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
        let bytes = freed.iter().map(size).sum();
        let blobs = freed.into_iter().filter(|blob| blob.starts_with(home.join("blobs"))).collect();
        let refs = cache::refs(&folder).into_iter().filter(|(_, at)| !rest && at == commit);
        let refs = refs.map(|(name, _)| folder.join("refs").join(name)).collect();
        let snapshots = if rest { Vec::new() } else { vec![snapshot] };
        Removal {
            id: id.to_string(),
            files,
            bytes,
            partial_bytes: 0,
            locks: cache::locks(hub, id),
            folder,
            what: What::Part { pointers, snapshots, refs, blobs },
        }
    }

    /// Takes it away.
    ///
    /// # Errors
    /// A download of the same repository that is under way, and the disk's.
    pub fn run(self) -> Result<()> {
        self.check_idle()?;
        match self.what {
            What::Repository => {
                gone(fs::remove_dir_all(&self.folder), &self.folder)?;
                gone(fs::remove_dir_all(&self.locks), &self.locks)
            }
            What::Part { pointers, snapshots, refs, blobs } => {
                for file in refs.iter().chain(&pointers) {
                    gone(fs::remove_file(file), file)?;
                }
                for folder in snapshots {
                    gone(fs::remove_dir_all(&folder), &folder)?;
                }
                blobs.iter().try_for_each(|blob| gone(fs::remove_file(blob), blob))
            }
        }
    }

    /// Checks that no process is writing one of the repository's blobs.
    fn check_idle(&self) -> Result<()> {
        for entry in fs::read_dir(&self.locks).into_iter().flatten().flatten() {
            let Ok(file) = fs::File::open(entry.path()) else { continue };
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                return Err(Error::new(&self.id, "no download of it under way", "one")
                    .hint("wait for it, or end it"));
            }
        }
        Ok(())
    }
}

/// Treats a file that is already gone as removed.
fn gone(result: std::io::Result<()>, path: &Path) -> Result<()> {
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io(path.display(), error)),
        _ => Ok(()),
    }
}
