//! A model as the hub offers it: which files it is, how large they are, and what can be told of it
//! before they come.

use std::path::{Path, PathBuf};

use formats::gguf::Metadata;
use formats::{Error, Result};

use crate::choose::{self, Choice};
use crate::http::{Client, Part, encode};
use crate::pull::{self, Check, whole_on_disk};
use crate::{Container, Hub, HubName, LocalModel, ModelSource, PullProgress, cache, spec};

/// A file as the hub lists it.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) size: Option<u64>,
    pub(crate) digest: Option<Check>,
}

/// A model on the hub, asked after but not fetched; see [`Hub::offer`].
pub struct Offer<'a> {
    client: Client<'a>,
    spec: HubName,
    commit: String,
    choice: Choice,
    /// The chosen files, weights last: a fault in the small ones is known early.
    files: Vec<Listed>,
}

/// A model's description of itself, read before its weights: see [`Offer::preview`].
#[derive(Debug, Clone)]
pub enum Preview {
    /// The contents of `config.json`.
    Config(serde_json::Value),
    /// The keys at the beginning of a GGUF file, those that fit in what was read.
    Gguf(Metadata),
}

impl<'a> Offer<'a> {
    /// Asks the hub; see [`Hub::offer`].
    pub(crate) fn ask(
        hub: &'a Hub,
        spec: HubName,
        progress: &dyn PullProgress,
    ) -> Result<Offer<'a>> {
        if hub.offline {
            return Err(
                Error::new(&spec.id, "the network", "HF_HUB_OFFLINE").hint("unset it to download")
            );
        }
        let client = Client::new(hub)?;
        let (commit, listed) = info(&client, &spec, progress)?;
        let names: Vec<String> = listed.iter().map(|file| file.name.clone()).collect();
        let choice = choose::choose(&spec.id, spec.file.as_deref(), &names)?;
        if !choice.others.is_empty() {
            progress.note(&format!(
                "chose {} among {} files ({}:FILE or :TAG names another)",
                choice.files[0],
                choice.others.len() + 1,
                spec.id
            ));
        }
        let mut files: Vec<Listed> =
            listed.into_iter().filter(|file| choice.files.contains(&file.name)).collect();
        files.sort_by_key(|file| (choose::is_weights(&file.name), file.size));
        Ok(Offer { client, spec, commit, choice, files })
    }

    /// The repository, `org/name`.
    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// The file that is opened, of a model in GGUF.
    pub fn file(&self) -> Option<&str> {
        (self.choice.kind == Container::Gguf).then(|| self.choice.files[0].as_str())
    }

    /// The cache that the model goes to.
    pub fn cache(&self) -> &Path {
        &self.client.hub.cache
    }

    /// Files that are not whole on this machine.
    pub fn missing(&self) -> usize {
        self.absent().count()
    }

    /// Bytes still to be fetched, where the hub told all sizes.
    pub fn missing_bytes(&self) -> Option<u64> {
        self.absent().try_fold(0u64, |sum, file| {
            Some(sum.saturating_add(file.size?.saturating_sub(self.partial(file))))
        })
    }

    /// The model's description of itself: its `config.json`, or the beginning of its GGUF file.
    /// `None` when it has no `config.json`.
    ///
    /// # Errors
    /// The network's, and a beginning that is no GGUF file's or a configuration that is no JSON.
    pub fn preview(&self, progress: &dyn PullProgress) -> Result<Option<Preview>> {
        match self.choice.kind {
            Container::Folder => self.config(progress),
            Container::Gguf => self.keys(progress).map(Some),
        }
    }

    fn config(&self, progress: &dyn PullProgress) -> Result<Option<Preview>> {
        const LIMIT: u64 = 16 << 20;
        let Some(file) = self.files.iter().find(|file| file.name == "config.json") else {
            return Ok(None);
        };
        let place = self.place(file);
        let text = self.client.get_small(&place, &self.path(file), LIMIT, progress)?;
        let json = formats::json_of_python(&text)
            .map_err(|error| Error::new(place, "a JSON object", error))?;
        Ok(Some(Preview::Config(json)))
    }

    fn keys(&self, progress: &dyn PullProgress) -> Result<Preview> {
        /// The first keys say what a model is. Its vocabulary, which is megabytes, comes after
        /// them.
        const BEGINNING: u64 = 256 << 10;
        let first = &self.choice.files[0];
        let file = self.files.iter().find(|file| file.name == *first);
        let file = file.ok_or_else(|| Error::new(&self.spec.id, "its first file", "none"))?;
        let place = self.place(file);
        let part = Part { from: 0, last: Some(BEGINNING - 1) };
        let mut failures = 0;
        loop {
            let bytes = self
                .client
                .get(&place, &self.path(file), part)
                .and_then(|answer| self.client.read(&place, answer, BEGINNING));
            match bytes {
                Ok(bytes) => return formats::gguf::first_keys(&bytes, &place).map(Preview::Gguf),
                Err(failure) => self.client.wait(failure, &mut failures, progress)?,
            }
        }
    }

    /// Brings the model into the cache, or completes it there. Files that are there already are not
    /// fetched again.
    ///
    /// Every file is checked against the hub's digest (SHA-256 for large files, the git blob's
    /// SHA-1 for small ones) before it appears in the cache; what an interrupted download leaves
    /// behind is resumed by the next one.
    ///
    /// # Errors
    /// The network's and the disk's, and too little room on it, which is told before the first
    /// byte.
    pub fn fetch(&self, progress: &dyn PullProgress) -> Result<LocalModel> {
        self.check_room()?;
        let absent: Vec<&Listed> = self.absent().collect();
        if !absent.is_empty() {
            let have = absent.iter().map(|file| self.partial(file)).sum();
            let bytes = self.missing_bytes().map(|missing| missing.saturating_add(have));
            progress.begin(absent.len(), bytes, have);
        }
        let folder = cache::folder(self.client.hub, &self.spec.id);
        for file in &self.files {
            let place = self.place(file);
            pull::fetch(
                &self.client,
                &folder,
                &self.spec.id,
                &self.commit,
                file,
                &place,
                &self.path(file),
                progress,
            )?;
        }
        // Python's cache scanner calls a ref without its snapshot corrupt, so the ref comes last.
        cache::write_ref(&folder, &self.spec.revision, &self.commit)?;
        let snapshot = folder.join("snapshots").join(&self.commit);
        let path = match self.choice.kind {
            Container::Folder => snapshot,
            Container::Gguf => snapshot.join(&self.choice.files[0]),
        };
        let source = ModelSource::Hub { id: self.spec.id.clone(), commit: self.commit.clone() };
        Ok(LocalModel::at(path, self.choice.kind, source))
    }

    /// Whether what is still to come fits the disk, as far as sizes are known.
    fn check_room(&self) -> Result<()> {
        let missing = self.absent().fold(0u64, |sum, file| {
            let more = file.size.unwrap_or(0).saturating_sub(self.partial(file));
            sum.saturating_add(more)
        });
        check_room(self.client.hub, missing)
    }

    fn absent(&self) -> impl Iterator<Item = &Listed> {
        self.files.iter().filter(|file| !whole_on_disk(&self.pointer(file), file.size))
    }

    fn pointer(&self, file: &Listed) -> PathBuf {
        let folder = cache::folder(self.client.hub, &self.spec.id);
        folder.join("snapshots").join(&self.commit).join(&file.name)
    }

    /// Bytes of a file that earlier downloads left.
    fn partial(&self, file: &Listed) -> u64 {
        let Some(digest) = &file.digest else { return 0 };
        let blobs = cache::folder(self.client.hub, &self.spec.id).join("blobs");
        let size = |name: &str| blobs.join(name).metadata().map(|metadata| metadata.len());
        // Another revision may have brought it whole.
        let whole = size(digest.digits()).ok().filter(|&have| file.size == Some(have));
        whole.or(size(&format!("{}.incomplete", digest.digits())).ok()).unwrap_or(0)
    }

    fn place(&self, file: &Listed) -> String {
        format!("{}: {}", self.spec.id, file.name)
    }

    fn path(&self, file: &Listed) -> String {
        format!("/{}/resolve/{}/{}", self.spec.id, self.commit, encode(&file.name, true))
    }
}

/// An error when fewer bytes are free for the cache than are still to come.
pub(crate) fn check_room(hub: &Hub, missing: u64) -> Result<()> {
    match room(hub) {
        Some(free) if missing > free => {
            let place = hub.cache.display();
            let expected = format!("{} free for the download", in_words(missing));
            Err(Error::new(place, expected, in_words(free))
                .hint("delft rm makes room; HF_HUB_CACHE names a cache on another disk"))
        }
        _ => Ok(()),
    }
}

/// Bytes free for the cache, where the system can tell.
pub(crate) fn room(hub: &Hub) -> Option<u64> {
    match (hub.room, free_disk(&hub.cache)) {
        (Some(limit), Some(free)) => Some(limit.min(free)),
        (limit, free) => limit.or(free),
    }
}

/// Bytes free on the disk of a folder, which may not exist yet; none where the system does not
/// tell.
pub fn free_disk(folder: &Path) -> Option<u64> {
    let folder = std::path::absolute(folder).ok()?;
    free_bytes(folder.ancestors().find(|folder| folder.is_dir())?)
}

#[cfg(unix)]
fn free_bytes(folder: &Path) -> Option<u64> {
    // A file system without a size of its own tells nothing.
    let disk = rustix::fs::statvfs(folder).ok().filter(|disk| disk.f_blocks > 0)?;
    disk.f_frsize.checked_mul(disk.f_bavail)
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// A byte count for people: `4.7 GiB`.
fn in_words(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// The commit that the revision stands at, and its files.
fn info(
    client: &Client,
    spec: &HubName,
    progress: &dyn PullProgress,
) -> Result<(String, Vec<Listed>)> {
    const LIMIT: u64 = 64 << 20;
    let place = if spec.revision == "main" {
        spec.id.clone()
    } else {
        format!("{}@{}", spec.id, spec.revision)
    };
    let path =
        format!("/api/models/{}/revision/{}?blobs=true", spec.id, encode(&spec.revision, false));
    let body = client.get_small(&place, &path, LIMIT, progress)?;
    let wrong = |expected: &str, found: String| {
        let hint = format!("is {} a hub's address?", client.hub.endpoint);
        Error::new(format!("{place}: the hub's answer"), expected, found).hint(hint)
    };
    let json: serde_json::Value = serde_json::from_slice(&body)
        .map_err(|error| wrong("JSON", format!("something else ({error})")))?;
    let commit = json["sha"].as_str().filter(|sha| cache::is_commit(sha));
    let commit = commit.ok_or_else(|| wrong("a commit in \"sha\"", json["sha"].to_string()))?;
    let siblings = json["siblings"]
        .as_array()
        .ok_or_else(|| wrong("a list \"siblings\"", "none".to_string()))?;
    let mut listed = Vec::new();
    for file in siblings {
        let name = file["rfilename"]
            .as_str()
            .ok_or_else(|| wrong("\"rfilename\" of each file", file.to_string()))?;
        spec::check_relative(&place, "file names", name)?;
        let large = file["lfs"]["sha256"].as_str().or_else(|| file["lfs"]["oid"].as_str());
        let digest = large.or_else(|| file["blobId"].as_str()).and_then(Check::of);
        let size = file["lfs"]["size"].as_u64().or_else(|| file["size"].as_u64());
        listed.push(Listed { name: name.to_string(), size, digest });
    }
    Ok((commit.to_ascii_lowercase(), listed))
}
