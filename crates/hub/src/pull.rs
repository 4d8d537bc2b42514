//! The safe arrival of one file in the cache: its size and digest, the connections that bring it,
//! and what breaks them.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use formats::{Error, Result};
use sha2::Digest;

use crate::http::{Client, Failure, Part, Steady};
use crate::offer::{Listed, check_room, room};
use crate::{PullProgress, cache};

/// The hash that a file's bytes must have. Its hexadecimal digits also name the blob, as they are
/// the hub's ETag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Check {
    /// Large files: SHA-256 of the bytes.
    Sha256(String),
    /// Files kept in git itself: SHA-1 of `blob <size>\0` and the bytes.
    GitBlob(String),
}

impl Check {
    pub(crate) fn of(digits: &str) -> Option<Check> {
        let hex = digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        match digits.len() {
            64 if hex => Some(Check::Sha256(digits.to_string())),
            40 if hex => Some(Check::GitBlob(digits.to_string())),
            _ => None,
        }
    }

    pub(crate) fn digits(&self) -> &str {
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

/// Whether a whole file of that size lies at a path. Without a size, any file is whole: none gets
/// its name earlier.
pub(crate) fn whole_on_disk(path: &Path, size: Option<u64>) -> bool {
    let have = fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| m.len());
    have.is_some() && (size.is_none() || have == size)
}

/// Brings one file into a repository's folder of the cache; `place` names it in errors, `path` on
/// the hub.
pub(crate) fn fetch(
    client: &Client,
    folder: &Path,
    id: &str,
    commit: &str,
    file: &Listed,
    place: &str,
    path: &str,
    progress: &dyn PullProgress,
) -> Result<()> {
    let pointer = folder.join("snapshots").join(commit).join(&file.name);
    if file.digest.is_some() && whole_on_disk(&pointer, file.size) {
        return Ok(());
    }
    // A mirror may list no digests: then the download's own headers tell.
    let (digest, size) = match &file.digest {
        Some(digest) => (digest.clone(), file.size),
        None => head(client, place, path, file.size, progress)?,
    };
    if whole_on_disk(&pointer, size) {
        return Ok(());
    }
    let blobs = folder.join("blobs");
    fs::create_dir_all(&blobs).map_err(|error| disk(&blobs, error))?;
    let blob = blobs.join(digest.digits());
    let lock_path = cache::lock_path(client.hub, id, digest.digits());
    let _held = lock(&lock_path, &file.name, progress)?;
    if !whole_on_disk(&blob, size) {
        let partial = blobs.join(format!("{}.incomplete", digest.digits()));
        let wanted = Wanted { place, path, name: &file.name, size, digest: &digest };
        download(client, &wanted, &partial, progress)?;
        fs::rename(&partial, &blob).map_err(|error| disk(&blob, error))?;
    } else {
        let have = fs::metadata(&blob).map_or(0, |metadata| metadata.len());
        progress.start(&file.name, size, have);
    }
    cache::link(folder, commit, &file.name, digest.digits())?;
    progress.done(&file.name);
    Ok(())
}

/// A file's digest and size from its headers.
fn head(
    client: &Client,
    place: &str,
    path: &str,
    size: Option<u64>,
    progress: &dyn PullProgress,
) -> Result<(Check, Option<u64>)> {
    let mut failures = 0;
    loop {
        match client.head(place, path) {
            Ok(answer) => {
                let tag = answer.etag.as_deref().unwrap_or_default();
                let digest = Check::of(tag).ok_or_else(|| {
                    Error::new(place, "a digest in the ETag header", format!("\"{tag}\""))
                })?;
                let redirected = answer.response.status().is_redirection();
                let announced = answer.length().filter(|_| !redirected);
                return Ok((digest, agreed(place, size, answer.linked_size, announced)?));
            }
            Err(failure) => client.wait(failure, &mut failures, progress)?,
        }
    }
}

/// The one size of a file that the hub's list, the hub's headers and the storage's name, as far as
/// they name any.
fn agreed(
    place: &str,
    listed: Option<u64>,
    linked: Option<u64>,
    announced: Option<u64>,
) -> Result<Option<u64>> {
    let told = [("the list", listed), ("X-Linked-Size", linked), ("the download", announced)];
    let mut told = told.iter().filter_map(|&(who, size)| Some((who, size?)));
    let Some((first, size)) = told.next() else { return Ok(None) };
    match told.find(|&(_, other)| other != size) {
        None => Ok(Some(size)),
        Some((who, other)) => {
            let expected = format!("{size} bytes, as {first} says");
            Err(Error::new(place, expected, format!("{other}, as {who} says"))
                .hint("something between here and the hub changes what it sends"))
        }
    }
}

/// The lock of one blob, held until dropped. Python's `filelock` takes the same one.
fn lock(path: &Path, name: &str, progress: &dyn PullProgress) -> Result<File> {
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
        // Some network file systems have no locks; every blob is verified before it gets its name,
        // so go on without.
        Err(fs::TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
        Err(fs::TryLockError::Error(error)) => return Err(fail(error)),
    }
    Ok(file)
}

/// A file that is wanted whole.
struct Wanted<'a> {
    /// Its name in errors.
    place: &'a str,
    /// Its path on the hub.
    path: &'a str,
    name: &'a str,
    size: Option<u64>,
    digest: &'a Check,
}

/// Advice where a download broke.
const RESUME: &str = "run the same command again: it resumes";

/// The bytes of progress, beyond all earlier connections, after which a broken connection is not
/// counted.
const GAIN: u64 = 256 << 10;

/// Fills `partial` with the file and verifies it, resuming what is there and resuming again when
/// the connection breaks.
///
/// It ends: only connections that bring [`GAIN`] bytes more than there ever were are free, all
/// others count.
fn download(
    client: &Client,
    wanted: &Wanted<'_>,
    partial: &Path,
    progress: &dyn PullProgress,
) -> Result<()> {
    let Wanted { place, name, size, digest, .. } = *wanted;
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
    let mut most = length(&file)?;
    let mut resumed = most > 0;
    progress.start(name, size, most);
    let mut failures = 0;
    loop {
        let have = length(&file)?;
        if size != Some(have) || have == 0 {
            match receive(client, wanted, &mut file, partial, progress) {
                Ok(()) => {}
                Err(failure) => {
                    let have = length(&file)?;
                    if have >= most.saturating_add(GAIN) {
                        failures = 0;
                    }
                    most = most.max(have);
                    client.wait(failure, &mut failures, progress)?;
                    continue;
                }
            }
        }
        let found = verify(&mut file, digest).map_err(|error| disk(partial, error))?;
        if found == digest.digits() {
            return file.sync_data().map_err(|error| disk(partial, error));
        }
        // The bytes are wrong, so nothing of them is worth keeping. They may be an older session's
        // fault: try once afresh.
        file.set_len(0).map_err(|error| disk(partial, error))?;
        progress.at(name, 0);
        if !resumed {
            let _ = fs::remove_file(partial);
            let hint = "the download was damaged on its way; try again";
            return Err(Error::new(place, format!("digest {}", digest.digits()), found).hint(hint));
        }
        progress
            .note(&format!("{name}: what an earlier download left does not match; starting anew"));
        (resumed, most) = (false, 0);
    }
}

/// Appends one response to the partial file. Its announced size is checked before the first byte is
/// written.
fn receive(
    client: &Client,
    wanted: &Wanted<'_>,
    file: &mut File,
    partial: &Path,
    progress: &dyn PullProgress,
) -> std::result::Result<(), Failure> {
    let Wanted { place, path, name, size, .. } = *wanted;
    let stuck = |error| Failure::from(disk(partial, error));
    let again =
        |error| Failure { error: Box::new(error), retry: Some(Duration::ZERO), status: None };
    let mut have = file.seek(SeekFrom::End(0)).map_err(stuck)?;
    let answer = match client.get(place, path, Part::from(have)) {
        Ok(answer) => answer,
        // 416: what is there is longer than the file, as nobody said how long that is. Begin anew.
        Err(failure) if failure.status == Some(416) && have > 0 => {
            file.set_len(0).map_err(stuck)?;
            return Err(Failure { retry: Some(Duration::ZERO), ..failure });
        }
        Err(failure) => return Err(failure),
    };
    let range = answer.header("content-range").and_then(Range::parse);
    let partly = answer.response.status().as_u16() == 206;
    if partly && range.map_or(have > 0, |range| range.first != have) {
        // Some other part, whose bytes would be written to a wrong place. Begin anew, without
        // asking for a part.
        let found = answer.header("content-range").unwrap_or("no Content-Range").to_string();
        file.set_len(0).map_err(stuck)?;
        progress.at(name, 0);
        return Err(again(Error::new(place, format!("the bytes from {have} on"), found)));
    }
    if have > 0 && !partly {
        // The server sends the whole file again.
        file.set_len(0).map_err(stuck)?;
        have = file.seek(SeekFrom::Start(0)).map_err(stuck)?;
        progress.at(name, have);
    }
    let whole = match range.filter(|_| partly).and_then(|range| range.whole) {
        Some(whole) => Some(whole),
        None => answer.length().map(|length| length.saturating_add(have)),
    };
    let total = agreed(place, size, answer.linked_size, whole)?;
    if let Some(total) = total {
        check_room(client.hub, total.saturating_sub(have))?;
    }
    // A body of unknown length ends at the disk's at the latest.
    let most = total.or(room(client.hub).map(|free| free.saturating_add(have)));
    let host = answer.host;
    let mut body = Steady::new(answer.response.into_body().into_reader(), client.hub.timeout);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => {
                let failure = client.broken(place, &host, ureq::Error::from(error));
                return Err(failure.hint(RESUME));
            }
        };
        if most.is_some_and(|most| have + count as u64 > most) {
            file.set_len(0).map_err(stuck)?;
            let expected = format!("at most {} bytes", most.unwrap_or_default());
            return Err(Error::new(place, expected, "more").into());
        }
        file.write_all(&buffer[..count]).map_err(stuck)?;
        have += count as u64;
        progress.at(name, have);
    }
    match total {
        Some(total) if have < total => {
            let found = format!("{have}, then the connection closed");
            let error = Error::new(place, format!("{total} bytes"), found);
            Err(again(error.hint(RESUME)))
        }
        _ => Ok(()),
    }
}

/// A `Content-Range` header: `bytes 100-199/1000`, where `*` stands for an unknown size of the
/// whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u64,
    whole: Option<u64>,
}

impl Range {
    fn parse(text: &str) -> Option<Range> {
        let (span, whole) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = span.split_once('-')?;
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        let whole = match whole.trim() {
            "*" => None,
            whole => Some(whole.parse().ok()?),
        };
        (first <= last && whole.is_none_or(|whole| last < whole)).then_some(Range { first, whole })
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
    fn ranges_are_read_strictly() {
        let range = |first, whole| Some(Range { first, whole });
        let cases = [
            ("bytes 0-99/100", range(0, Some(100))),
            ("bytes 100-199/*", range(100, None)),
            (" bytes 5-5/6 ", range(5, Some(6))),
            ("bytes 5-4/6", None),
            ("bytes 5-6/6", None),
            ("bytes */100", None),
            ("bytes 0-9", None),
            ("items 0-9/10", None),
            ("bytes -5-9/10", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(Range::parse(text), expected, "{text:?}");
        }
    }

    #[test]
    fn sizes_must_agree() {
        let cases = [
            (None, None, None, Ok(None)),
            (Some(5), None, None, Ok(Some(5))),
            (None, Some(5), Some(5), Ok(Some(5))),
            (
                Some(5),
                Some(6),
                None,
                Err("expected 5 bytes, as the list says, found 6, as X-Linked-Size says"),
            ),
            (None, Some(5), Some(1 << 62), Err("found 4611686018427387904, as the download says")),
        ];
        for (listed, linked, announced, expected) in cases {
            match (agreed("x", listed, linked, announced), expected) {
                (Ok(size), Ok(expected)) => assert_eq!(size, expected),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, expected) => panic!("{found:?} for {expected:?}"),
            }
        }
    }

    #[test]
    fn a_full_disk_says_what_to_do() {
        let error = disk(Path::new("/cache/blob"), ErrorKind::StorageFull.into());
        assert!(error.to_string().contains("free some space"), "{error}");
    }
}
