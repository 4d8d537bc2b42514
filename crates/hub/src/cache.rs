//! The hub's cache on disk, laid out as `huggingface_hub` lays it out:
//!
//! ```text
//! models--org--name/refs/main                       the commit that a branch or tag stood at
//! models--org--name/blobs/<digest>                  the bytes, and <digest>.incomplete while they arrive
//! models--org--name/snapshots/<commit>/<file>       links to ../../blobs/<digest>
//! .locks/models--org--name/<digest>.lock            held while a blob is written
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use formats::{Error, Result};

use crate::{Container, Found, Hub, HubName, LocalModel, ModelSource, choose, spec};

/// One commit of one repository in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// `org/name`, or `(bundled)`.
    pub id: String,
    /// The commit; empty for the bundled model, and where downloads have begun and none has
    /// finished.
    pub commit: String,
    /// Branches and tags that stood at this commit when they were last fetched.
    pub refs: Vec<String>,
    /// The snapshot's files, by name.
    pub files: Vec<CachedFile>,
    /// Bytes on disk, each blob counted once.
    pub bytes: u64,
    /// The part of `bytes` that no earlier entry of the same repository has as well.
    pub own_bytes: u64,
    /// Bytes of downloads of this repository that have not finished; told with its first entry.
    pub partial_bytes: u64,
    /// When it was fetched, or last completed.
    pub modified: Option<SystemTime>,
    /// How [`Hub::resolve`] would open it; None when it holds no model that it could open.
    pub kind: Option<Container>,
    /// The snapshot's folder; None for the bundled model.
    pub path: Option<PathBuf>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedFile {
    /// Its name inside the repository, with `/` between folders.
    pub name: String,
    /// Bytes.
    pub size: u64,
}

/// [`Hub::from_env`] over any environment.
pub(crate) fn from_env(variable: &dyn Fn(&str) -> Option<String>) -> Result<Hub> {
    let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    let path = |name: &str| set(name).map(|value| expand(&value, variable));
    let no_home =
        || Error::new("HF_HOME", "a home folder for the cache", "neither HF_HOME nor HOME is set");
    let home = match (path("HF_HOME"), path("XDG_CACHE_HOME")) {
        (Some(home), _) => Some(home),
        (None, Some(caches)) => Some(caches.join("huggingface")),
        (None, None) => home_folder(variable).map(|home| home.join(".cache").join("huggingface")),
    };
    let cache = match path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")) {
        Some(cache) => cache,
        None => home.as_ref().ok_or_else(no_home)?.join("hub"),
    };
    let token_file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
    let token = set("HF_TOKEN")
        .or_else(|| set("HUGGING_FACE_HUB_TOKEN"))
        .or_else(|| read_small(&token_file?).ok())
        .map(|token| token.split_whitespace().collect::<String>())
        .filter(|token| !token.is_empty());
    let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
    let yes = |name: &str| {
        set(name).is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_lowercase().as_str()))
    };
    Ok(Hub {
        endpoint: endpoint.trim().trim_end_matches('/').to_string(),
        token,
        cache,
        offline: yes("HF_HUB_OFFLINE"),
        retry_wait: Duration::from_secs(1),
        timeout: Duration::from_secs(30),
        room: None,
        models: path("DELFT_MODELS").or_else(|| names_file(variable).filter(|file| file.is_file())),
    })
}

/// Where the user's file of names is unless the environment names another: it need not exist.
pub(crate) fn names_file(variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let set = variable("XDG_CONFIG_HOME").filter(|value| !value.trim().is_empty());
    let settings = set.map(|value| expand(&value, variable));
    let settings = settings.or_else(|| home_folder(variable).map(|home| home.join(".config")))?;
    Some(settings.join("delft").join("models.toml"))
}

fn home_folder(variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    ["HOME", "USERPROFILE"]
        .iter()
        .find_map(|name| variable(name).filter(|v| !v.is_empty()))
        .map(PathBuf::from)
}

/// `~` and `$NAME` or `${NAME}`, as Python's `expanduser` and `expandvars` read them: unknown names
/// stay as they are.
pub(crate) fn expand(value: &str, variable: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let mut out = String::new();
    let mut rest = value;
    while let Some(at) = rest.find('$') {
        out += &rest[..at];
        let after = &rest[at + 1..];
        let (name, used) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((name, _)) => (name, name.len() + 2),
            None => {
                let end = after
                    .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                    .unwrap_or(after.len());
                (&after[..end], end)
            }
        };
        match variable(name).filter(|_| !name.is_empty()) {
            Some(value) => out += &value,
            None => out += &rest[at..at + 1 + used],
        }
        rest = &after[used..];
    }
    out += rest;
    match (out.strip_prefix('~'), home_folder(variable)) {
        (Some(""), Some(home)) => home,
        (Some(tail), Some(home)) if tail.starts_with('/') => home.join(&tail[1..]),
        _ => PathBuf::from(out),
    }
}

/// A small text file's contents; refs and tokens are short, so anything long is not one.
fn read_small(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(64 << 10).read_to_string(&mut text)?;
    Ok(text.trim().to_string())
}

/// The folder of a repository.
pub(crate) fn folder(hub: &Hub, id: &str) -> PathBuf {
    hub.cache.join(folder_name(id))
}

fn folder_name(id: &str) -> String {
    format!("models--{}", id.replace('/', "--"))
}

/// The folder of a repository's locks.
pub(crate) fn locks(hub: &Hub, id: &str) -> PathBuf {
    hub.cache.join(".locks").join(folder_name(id))
}

/// The lock that guards one blob.
pub(crate) fn lock_path(hub: &Hub, id: &str, digest: &str) -> PathBuf {
    locks(hub, id).join(format!("{digest}.lock"))
}

/// Whether a text is a commit: 40 hexadecimal digits.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The commit that a revision of a repository stood at when it was last fetched.
pub(crate) fn commit_of(folder: &Path, revision: &str) -> Option<String> {
    match read_small(&folder.join("refs").join(revision)) {
        Ok(commit) if is_commit(&commit) => Some(commit),
        _ => is_commit(revision).then(|| revision.to_string()),
    }
}

/// The model that the cache holds under a name that the user spelt as `text`.
pub(crate) fn find(hub: &Hub, spec: &HubName, text: &str) -> Result<Found> {
    let folder = folder(hub, &spec.id);
    let again = format!("delft pull {text}");
    let commit = commit_of(&folder, &spec.revision);
    let snapshot = commit.map(|commit| (folder.join("snapshots").join(&commit), commit));
    let Some((snapshot, commit)) = snapshot.filter(|(snapshot, _)| snapshot.is_dir()) else {
        let found = format!("none in {}", hub.cache.display());
        let error = Error::new(text, "a model in the cache", found);
        return Ok(Found::Absent(error.hint(again)));
    };
    let place = spec.id.as_str();
    let names = names(&snapshot)?;
    let choice = match choose::choose(place, spec.file.as_deref(), &names) {
        Ok(choice) => choice,
        // A question of which one, or a file that no pull would bring.
        Err(error) if error.hint.is_some() => return Err(error),
        Err(error) => return Ok(Found::Absent(error.hint(again))),
    };
    let path = match choice.kind {
        Container::Folder => snapshot.clone(),
        Container::Gguf => snapshot.join(&choice.files[0]),
    };
    if choice.kind == Container::Folder {
        for needed in needed(&snapshot)? {
            if !names.contains(&needed) {
                let expected = format!("{needed} in the cache");
                let error = Error::new(place, expected, "an unfinished download");
                return Ok(Found::Absent(error.hint(again)));
            }
        }
    }
    let source = ModelSource::Hub { id: spec.id.clone(), commit };
    Ok(Found::Here(LocalModel::at(path, choice.kind, source)))
}

/// The files without which a safetensors snapshot cannot be loaded: its config and every shard of
/// its index.
fn needed(snapshot: &Path) -> Result<Vec<String>> {
    let mut needed = vec!["config.json".to_string()];
    let path = snapshot.join("model.safetensors.index.json");
    let Ok(file) = fs::File::open(&path) else { return Ok(needed) };
    let mut text = Vec::new();
    file.take(256 << 20)
        .read_to_end(&mut text)
        .map_err(|error| Error::io(path.display(), error))?;
    let index: serde_json::Value = serde_json::from_slice(&text).map_err(|error| {
        Error::new(path.display(), "a JSON object", error).hint("delete the file and pull again")
    })?;
    let shards = index.get("weight_map").and_then(|map| map.as_object());
    let shards: BTreeSet<&str> =
        shards.into_iter().flat_map(|map| map.values().filter_map(|v| v.as_str())).collect();
    needed.extend(shards.into_iter().map(str::to_string));
    Ok(needed)
}

/// The names of the files under a folder, with `/` between folders, sorted; links that lead nowhere
/// are left out.
pub(crate) fn names(root: &Path) -> Result<Vec<String>> {
    Ok(walk(root)?.into_iter().map(|(name, _)| name).collect())
}

/// The names of the files of a folder, none below it.
pub(crate) fn names_directly_in(folder: &Path) -> Result<Vec<String>> {
    Ok(walk_to(folder, 0)?.into_iter().map(|(name, _)| name).collect())
}

/// Names and sizes of the files under a folder, sorted by name.
pub(crate) fn walk(root: &Path) -> Result<Vec<(String, u64)>> {
    // Repositories are shallow.
    walk_to(root, 4)
}

/// [`walk`] down to a depth; 0 is the folder alone.
fn walk_to(root: &Path, deepest: usize) -> Result<Vec<(String, u64)>> {
    const FILES: usize = 100_000;
    let mut files = Vec::new();
    let mut folders = vec![(root.to_path_buf(), String::new(), 0)];
    while let Some((folder, prefix, depth)) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if depth == 0 => return Err(Error::io(folder.display(), error)),
            Err(_) => continue,
        };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Ok(own) = entry.file_type() else { continue };
            if own.is_dir() {
                if depth < deepest {
                    folders.push((entry.path(), format!("{prefix}{name}/"), depth + 1));
                }
            } else if let Ok(target) = fs::metadata(entry.path())
                && target.is_file()
                && files.len() < FILES
            {
                files.push((format!("{prefix}{name}"), target.len()));
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The ids of the repositories in the cache.
pub(crate) fn ids(hub: &Hub) -> Vec<String> {
    let entries = fs::read_dir(&hub.cache).into_iter().flatten().flatten();
    let mut ids: Vec<String> = entries.filter_map(|entry| id_of(&entry)).collect();
    ids.sort();
    ids
}

/// The id of the repository that a folder of the cache is.
fn id_of(entry: &fs::DirEntry) -> Option<String> {
    let name = entry.file_name().into_string().ok()?;
    let id = name.strip_prefix("models--")?.replacen("--", "/", 1);
    spec::check_id("", &id).is_ok().then_some(id)
}

/// See [`Hub::list`].
pub(crate) fn list(hub: &Hub) -> Result<Vec<Cached>> {
    let entries = match fs::read_dir(&hub.cache) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(hub.cache.display(), error)),
    };
    let mut all = Vec::new();
    for entry in entries.flatten() {
        if let Some(id) = id_of(&entry) {
            all.extend(of_repository(&entry.path(), &id));
        }
    }
    all.sort_by(|a, b| (&a.id, &a.commit).cmp(&(&b.id, &b.commit)));
    Ok(all)
}

/// The snapshots of one repository, or one entry for what has been downloaded of it so far. A
/// folder that cannot be read has none.
fn of_repository(folder: &Path, id: &str) -> Vec<Cached> {
    let refs = refs(folder);
    let mut held = BTreeSet::new();
    let mut all: Vec<Cached> = commits(folder)
        .into_iter()
        .filter_map(|commit| snapshot(folder, id, commit, &refs, &mut held))
        .collect();
    let partial = partial_bytes(folder);
    match all.first_mut() {
        Some(first) => first.partial_bytes = partial,
        None if partial > 0 => all.push(Cached {
            id: id.to_string(),
            commit: String::new(),
            refs: Vec::new(),
            files: Vec::new(),
            bytes: 0,
            own_bytes: 0,
            partial_bytes: partial,
            modified: modified(&folder.join("blobs")),
            kind: None,
            path: Some(folder.to_path_buf()),
        }),
        None => {}
    }
    all
}

/// Branches and tags, and the commits that they stood at.
pub(crate) fn refs(folder: &Path) -> Vec<(String, String)> {
    let names = names(&folder.join("refs")).unwrap_or_default();
    let read =
        |name: String| Some((name.clone(), read_small(&folder.join("refs").join(name)).ok()?));
    names.into_iter().filter_map(read).collect()
}

/// The commits of which there are snapshots, sorted.
pub(crate) fn commits(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("snapshots")).into_iter().flatten().flatten();
    let mut commits: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    commits.sort();
    commits
}

/// Bytes of unfinished downloads.
pub(crate) fn partial_bytes(folder: &Path) -> u64 {
    let blobs = walk(&folder.join("blobs")).unwrap_or_default();
    blobs.iter().filter(|(name, _)| name.ends_with(".incomplete")).map(|(_, size)| size).sum()
}

/// The file that holds a snapshot's file: its blob, or itself where links are not to be had.
pub(crate) fn blob_of(pointer: &Path) -> PathBuf {
    pointer.canonicalize().unwrap_or_else(|_| pointer.to_path_buf())
}

/// One snapshot; `held` are the blobs of those before it.
fn snapshot(
    folder: &Path,
    id: &str,
    commit: String,
    refs: &[(String, String)],
    held: &mut BTreeSet<PathBuf>,
) -> Option<Cached> {
    let path = folder.join("snapshots").join(&commit);
    let files = walk(&path).ok()?;
    // Two names may share a blob; its bytes count once.
    let mut own = BTreeSet::new();
    let (mut bytes, mut own_bytes) = (0, 0);
    for (name, size) in &files {
        let blob = blob_of(&path.join(name));
        if own.insert(blob.clone()) {
            bytes += size;
            own_bytes += if held.insert(blob) { *size } else { 0 };
        }
    }
    let has = |end: &str| files.iter().any(|(name, _)| name.ends_with(end));
    let kind = if has(".safetensors") && files.iter().any(|(name, _)| name == "config.json") {
        Some(Container::Folder)
    } else if has(".gguf") {
        Some(Container::Gguf)
    } else {
        None
    };
    let refs = refs.iter().filter(|(_, at)| *at == commit).map(|(name, _)| name.clone()).collect();
    let modified = modified(&path);
    let files = files.into_iter().map(|(name, size)| CachedFile { name, size }).collect();
    Some(Cached {
        id: id.to_string(),
        commit,
        refs,
        files,
        bytes,
        own_bytes,
        partial_bytes: 0,
        modified,
        kind,
        path: Some(path),
    })
}

/// When something was last put into a folder.
fn modified(folder: &Path) -> Option<SystemTime> {
    fs::metadata(folder).ok()?.modified().ok()
}

/// Makes `snapshots/<commit>/<file>` lead to `blobs/<digest>`: by a relative link, or where the
/// file system has none by a hard link or a copy. What was there is replaced in one step.
pub(crate) fn link(folder: &Path, commit: &str, file: &str, digest: &str) -> Result<()> {
    let pointer = folder.join("snapshots").join(commit).join(file);
    let fail = |error| Error::io(pointer.display(), error);
    let parent = pointer.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(fail)?;
    let up = "../".repeat(2 + file.matches('/').count());
    let aside = parent.join(format!(
        ".{digest}.{}-{:?}.new",
        std::process::id(),
        std::thread::current().id()
    ));
    let _ = fs::remove_file(&aside);
    let blob = folder.join("blobs").join(digest);
    symlink(Path::new(&format!("{up}blobs/{digest}")), &aside)
        .or_else(|_| fs::hard_link(&blob, &aside))
        .or_else(|_| fs::copy(&blob, &aside).map(|_| ()))
        .and_then(|()| fs::rename(&aside, &pointer))
        .map_err(|error| {
            let _ = fs::remove_file(&aside);
            fail(error)
        })
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Records the commit that a branch or tag stands at.
pub(crate) fn write_ref(folder: &Path, revision: &str, commit: &str) -> Result<()> {
    if revision == commit {
        return Ok(());
    }
    let path = folder.join("refs").join(revision);
    if read_small(&path).is_ok_and(|old| old == commit) {
        return Ok(());
    }
    let fail = |error| Error::io(path.display(), error);
    fs::create_dir_all(path.parent().unwrap_or(folder)).map_err(fail)?;
    fs::write(&path, commit).map_err(fail)
}

/// The snapshot that a model's folder of the cache, `models--org--name`, has: of the branch `main`,
/// or the only one.
pub(crate) fn snapshot_in(folder: &Path) -> Option<PathBuf> {
    let snapshots = folder.join("snapshots");
    if !folder.join("refs").is_dir() || !snapshots.is_dir() {
        return None;
    }
    let commit = fs::read_to_string(folder.join("refs/main")).ok();
    let main = commit.map(|commit| snapshots.join(commit.trim())).filter(|path| path.is_dir());
    main.or_else(|| {
        let mut all = fs::read_dir(&snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let first = all.next()?;
        all.next().is_none().then_some(first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub_of(pairs: &[(&str, &str)]) -> Hub {
        from_env(&|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        })
        .unwrap()
    }

    #[test]
    fn the_environment_names_the_cache_as_huggingface_hub_reads_it() {
        let cases: [(&[(&str, &str)], &str); 7] = [
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/hf")], "/hf/hub"),
            (&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
            (&[("HOME", "/h"), ("HF_HOME", "~/hf")], "/h/hf/hub"),
            (&[("HOME", "/h"), ("D", "/d"), ("HF_HOME", "${D}/$NO/hf")], "/d/$NO/hf/hub"),
        ];
        for (pairs, cache) in cases {
            assert_eq!(hub_of(pairs).cache, Path::new(cache), "{pairs:?}");
        }
    }

    #[test]
    fn the_token_comes_from_the_environment_or_the_file() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(hub_of(&[("HF_HOME", home)]).token, None);
        fs::write(Path::new(home).join("token"), "hf_file\n").unwrap();
        assert_eq!(hub_of(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
        assert_eq!(
            hub_of(&[("HF_HOME", home), ("HF_TOKEN", " hf_env\n")]).token.as_deref(),
            Some("hf_env")
        );
        assert_eq!(
            hub_of(&[("HF_HOME", home), ("HF_ENDPOINT", "http://h:1/")]).endpoint,
            "http://h:1"
        );
    }
}
