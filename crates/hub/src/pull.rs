//! Downloading a model into the cache: what the hub lists, which files are wanted, and each file's safe arrival.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;

use formats::{Error, Result};
use sha2::Digest;

use crate::http::{Client, Failure, encode};
use crate::{Hub, Kind, Model, Progress, Source, Spec, cache, choose, spec};

/// A file as the hub lists it.
#[derive(Debug, Clone)]
struct Listed {
    name: String,
    size: Option<u64>,
    digest: Option<Check>,
}

/// What a file's bytes must hash to. Its hexadecimal digits also name the blob, as they are the hub's ETag.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Check {
    /// Large files: SHA-256 of the bytes.
    Sha256(String),
    /// Files kept in git itself: SHA-1 of `blob <size>\0` and the bytes.
    GitBlob(String),
}

impl Check {
    fn of(digits: &str) -> Option<Check> {
        let hex = digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        match digits.len() {
            64 if hex => Some(Check::Sha256(digits.to_string())),
            40 if hex => Some(Check::GitBlob(digits.to_string())),
            _ => None,
        }
    }

    fn digits(&self) -> &str {
        match self {
            Check::Sha256(digits) | Check::GitBlob(digits) => digits,
        }
    }
}

/// The running digest of a file's bytes.
enum Hasher {
    Sha256(sha2::Sha256),
    Sha1(sha1::Sha1),
}

impl Hasher {
    fn new(check: &Check, size: u64) -> Hasher {
        match check {
            Check::Sha256(_) => Hasher::Sha256(sha2::Sha256::new()),
            Check::GitBlob(_) => {
                let mut hash = sha1::Sha1::new();
                hash.update(format!("blob {size}\0"));
                Hasher::Sha1(hash)
            }
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::Sha1(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Hasher::Sha256(hash) => hex(&hash.finalize()),
            Hasher::Sha1(hash) => hex(&hash.finalize()),
        }
    }
}

/// See [`Hub::pull`].
pub(crate) fn pull(hub: &Hub, spec: &Spec, progress: &dyn Progress) -> Result<Model> {
    if hub.offline {
        return Err(
            Error::new(&spec.id, "the network", "HF_HUB_OFFLINE").hint("unset it to download")
        );
    }
    let client = Client::new(hub)?;
    let (commit, listed) = info(&client, spec, progress)?;
    let names: Vec<String> = listed.iter().map(|file| file.name.clone()).collect();
    let choice = choose::choose(&spec.id, spec.file.as_deref(), &names)?;
    if !choice.others.is_empty() {
        let others = choice.others.len();
        progress.note(&format!(
            "chose {} among {} files ({}:FILE or :TAG names another)",
            choice.files[0],
            others + 1,
            spec.id
        ));
    }
    let folder = cache::folder(hub, &spec.id);
    for file in listed.iter().filter(|file| choice.files.contains(&file.name)) {
        fetch(&client, spec, &commit, file, progress)?;
    }
    // Python's cache scanner calls a ref without its snapshot corrupt, so the ref comes last.
    cache::write_ref(&folder, &spec.revision, &commit)?;
    let snapshot = folder.join("snapshots").join(&commit);
    let path = match choice.kind {
        Kind::Folder => snapshot,
        Kind::GgufFile => snapshot.join(&choice.files[0]),
    };
    let source = Source::Hub { id: spec.id.clone(), commit };
    Ok(Model::at(path, choice.kind, source))
}

/// The commit that the revision stands at, and its files.
fn info(client: &Client, spec: &Spec, progress: &dyn Progress) -> Result<(String, Vec<Listed>)> {
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

/// Brings one file into the cache.
fn fetch(
    client: &Client,
    spec: &Spec,
    commit: &str,
    file: &Listed,
    progress: &dyn Progress,
) -> Result<()> {
    let folder = cache::folder(client.hub, &spec.id);
    let place = format!("{}: {}", spec.id, file.name);
    let path = format!("/{}/resolve/{commit}/{}", spec.id, encode(&file.name, true));
    let size_on_disk =
        |path: &Path| fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| m.len());
    // A mirror may list no digests: then the download's own headers tell.
    let (digest, size) = match &file.digest {
        Some(digest) => (digest.clone(), file.size),
        None => head(client, &place, &path, file.size, progress)?,
    };
    let pointer = folder.join("snapshots").join(commit).join(&file.name);
    let whole = |have: Option<u64>| have.is_some() && (size.is_none() || have == size);
    if whole(size_on_disk(&pointer)) {
        progress.start(&file.name, size, size_on_disk(&pointer).unwrap_or(0));
        progress.done(&file.name);
        return Ok(());
    }
    let blobs = folder.join("blobs");
    fs::create_dir_all(&blobs).map_err(|error| disk(&blobs, error))?;
    let _lock =
        lock(&cache::lock_path(client.hub, &spec.id, digest.digits()), &file.name, progress)?;
    let blob = blobs.join(digest.digits());
    if !whole(size_on_disk(&blob)) {
        let partial = blobs.join(format!("{}.incomplete", digest.digits()));
        download(client, &place, &path, &file.name, size, &digest, &partial, progress)?;
        fs::rename(&partial, &blob).map_err(|error| disk(&blob, error))?;
    } else {
        let have = size_on_disk(&blob).unwrap_or(0);
        progress.start(&file.name, size, have);
    }
    cache::link(&folder, commit, &file.name, digest.digits())?;
    progress.done(&file.name);
    Ok(())
}

/// Digest and size from the headers of a download that is not read.
fn head(
    client: &Client,
    place: &str,
    path: &str,
    size: Option<u64>,
    progress: &dyn Progress,
) -> Result<(Check, Option<u64>)> {
    let mut failures = 0;
    loop {
        match client.get(place, path, 0) {
            Ok(answer) => {
                let tag = answer.etag.unwrap_or_default();
                let digest = Check::of(&tag).ok_or_else(|| {
                    Error::new(place, "a digest in the ETag header", format!("\"{tag}\""))
                })?;
                return Ok((digest, size.or(answer.response.body().content_length())));
            }
            Err(failure) => client.wait(failure, &mut failures, progress)?,
        }
    }
}

/// The lock of one blob, held until dropped. Python's `filelock` takes the same one.
fn lock(path: &Path, name: &str, progress: &dyn Progress) -> Result<File> {
    let fail = |error| disk(path, error);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(fail)?;
    }
    let file =
        OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(fail)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            progress.note(&format!("{name}: waiting for another download of it"));
            file.lock().map_err(fail)?;
        }
        // Some network file systems have no locks; every blob is verified before it gets its name, so go on without.
        Err(fs::TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
        Err(fs::TryLockError::Error(error)) => return Err(fail(error)),
    }
    Ok(file)
}

/// Fills `partial` with the file and verifies it, resuming what is there and resuming again when the connection breaks.
fn download(
    client: &Client,
    place: &str,
    path: &str,
    name: &str,
    size: Option<u64>,
    digest: &Check,
    partial: &Path,
    progress: &dyn Progress,
) -> Result<()> {
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(partial)
        .map_err(|error| disk(partial, error))?;
    let length =
        |file: &File| file.metadata().map(|m| m.len()).map_err(|error| disk(partial, error));
    if length(&file)? > size.unwrap_or(u64::MAX) {
        file.set_len(0).map_err(|error| disk(partial, error))?;
    }
    let mut resumed = length(&file)? > 0;
    progress.start(name, size, length(&file)?);
    let mut failures = 0;
    loop {
        let before = length(&file)?;
        if size != Some(before) || before == 0 {
            match receive(client, place, path, name, size, &mut file, partial, progress) {
                Ok(()) => {}
                Err(failure) => {
                    if length(&file)? > before {
                        failures = 0;
                    }
                    client.wait(failure, &mut failures, progress)?;
                    continue;
                }
            }
        }
        let found = verify(&mut file, digest).map_err(|error| disk(partial, error))?;
        if found == digest.digits() {
            return file.sync_data().map_err(|error| disk(partial, error));
        }
        // The bytes are wrong, so nothing of them is worth keeping. They may be an older session's fault: try once afresh.
        file.set_len(0).map_err(|error| disk(partial, error))?;
        progress.at(name, 0);
        if !resumed {
            let _ = fs::remove_file(partial);
            let hint = "the download was damaged on its way; try again";
            return Err(Error::new(place, format!("digest {}", digest.digits()), found).hint(hint));
        }
        progress
            .note(&format!("{name}: what an earlier download left does not match; starting anew"));
        resumed = false;
    }
}

/// Appends one response to the partial file.
fn receive(
    client: &Client,
    place: &str,
    path: &str,
    name: &str,
    size: Option<u64>,
    file: &mut File,
    partial: &Path,
    progress: &dyn Progress,
) -> std::result::Result<(), Failure> {
    let stuck = |error| Failure::from(disk(partial, error));
    let mut have = file.seek(SeekFrom::End(0)).map_err(stuck)?;
    let answer = match client.get(place, path, have) {
        Ok(answer) => answer,
        // 416: what is there is longer than the file, as nobody said how long that is. Begin anew.
        Err(failure) if failure.status == Some(416) && have > 0 => {
            file.set_len(0).map_err(stuck)?;
            return Err(Failure { retry: Some(std::time::Duration::ZERO), ..failure });
        }
        Err(failure) => return Err(failure),
    };
    let range =
        answer.response.headers().get("content-range").and_then(|value| value.to_str().ok());
    let starts = |range: &str| {
        range.trim().strip_prefix("bytes ").and_then(|r| r.split('-').next()?.parse::<u64>().ok())
    };
    let continues =
        answer.response.status().as_u16() == 206 && range.and_then(starts) == Some(have);
    if have > 0 && !continues {
        // The server sends the whole file again.
        file.set_len(0).map_err(stuck)?;
        have = file.seek(SeekFrom::Start(0)).map_err(stuck)?;
        progress.at(name, have);
    }
    let length = answer.response.body().content_length();
    let total = size.or(length.and_then(|length| length.checked_add(have)));
    let mut body = answer.response.into_body().into_reader();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(client.broken(place, ureq::Error::from(error))),
        };
        if total.is_some_and(|total| have + count as u64 > total) {
            file.set_len(0).map_err(stuck)?;
            let expected = format!("{} bytes", total.unwrap_or_default());
            return Err(Error::new(place, expected, "more").into());
        }
        file.write_all(&buffer[..count]).map_err(stuck)?;
        have += count as u64;
        progress.at(name, have);
    }
    match total {
        Some(total) if have < total => {
            let error = Error::new(
                place,
                format!("{total} bytes"),
                format!("{have}, then the connection closed"),
            );
            let error = error.hint("run the same command again to resume");
            Err(Failure { error, retry: Some(std::time::Duration::ZERO), status: None })
        }
        _ => Ok(()),
    }
}

/// The digest of a whole file, of the kind that `check` is.
fn verify(file: &mut File, check: &Check) -> std::io::Result<String> {
    let mut hasher = Hasher::new(check, file.metadata()?.len());
    file.seek(SeekFrom::Start(0))?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// An operating-system error while writing the cache.
fn disk(path: &Path, error: std::io::Error) -> Error {
    let full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
    let denied =
        matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem);
    let error = Error::io(path.display(), error);
    if full {
        error.hint("free some space, then run the same command again: it resumes")
    } else if denied {
        error.hint("HF_HUB_CACHE names another cache folder")
    } else {
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf 'hello\n' | git hash-object --stdin` and `| sha256sum`.
    #[test]
    fn digests_are_those_of_git_and_sha256sum() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello\n").unwrap();
        for digits in [
            "ce013625030ba8dba906f756967f9e9ca394464a",
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
        ] {
            assert_eq!(verify(&mut file, &Check::of(digits).unwrap()).unwrap(), digits);
        }
        assert_eq!(Check::of("../../x"), None);
        assert_eq!(Check::of(&"Z".repeat(40)), None);
    }

    #[test]
    fn a_full_disk_says_what_to_do() {
        let error = disk(Path::new("/cache/blob"), ErrorKind::StorageFull.into());
        assert!(error.to_string().contains("free some space"), "{error}");
    }
}
