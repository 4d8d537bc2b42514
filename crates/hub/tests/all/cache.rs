//! The cache on disk: what is listed, found and removed, without any network.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use delft_hub::{Container, Found, Hub};

const FIRST: &str = "1111111111111111111111111111111111111111";
const SECOND: &str = "2222222222222222222222222222222222222222";

fn hub(cache: &Path) -> Hub {
    Hub {
        endpoint: "http://127.0.0.1:9".to_string(),
        token: None,
        cache: cache.to_path_buf(),
        offline: true,
        retry_wait: Duration::ZERO,
        timeout: Duration::from_secs(1),
        models: None,
        room: None,
    }
}

fn write(path: &Path, bytes: usize) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, vec![0; bytes]).unwrap();
}

/// A repository `org/name`: blobs with their sizes, and snapshots with the blobs of their files.
fn repository(cache: &Path, blobs: &[(&str, usize)], snapshots: &[(&str, &str, &str)]) -> PathBuf {
    let root = cache.join("models--org--name");
    for (blob, size) in blobs {
        write(&root.join("blobs").join(blob), *size);
    }
    for (commit, file, blob) in snapshots {
        let snapshot = root.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(file)).unwrap();
    }
    root
}

fn set_ref(root: &Path, name: &str, commit: &str) {
    fs::create_dir_all(root.join("refs")).unwrap();
    fs::write(root.join("refs").join(name), commit).unwrap();
}

/// Two revisions that share a file, two quantisations, and an unfinished download.
fn two_revisions(cache: &Path) -> PathBuf {
    let blobs = [("a", 1000), ("b", 200), ("c", 30), ("d.incomplete", 7)];
    let snapshots = [
        (FIRST, "m-Q8_0.gguf", "a"),
        (FIRST, "m-Q4_K_M.gguf", "b"),
        (SECOND, "m-Q8_0.gguf", "c"),
        (SECOND, "m-Q4_K_M.gguf", "b"),
    ];
    let root = repository(cache, &blobs, &snapshots);
    set_ref(&root, "main", SECOND);
    set_ref(&root, "v1", FIRST);
    root
}

fn left(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else {
                let path = entry.path();
                names.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_string());
            }
        }
    }
    names.sort();
    names
}

#[test]
fn what_is_removed_is_what_nothing_else_uses() {
    struct Case {
        name: &'static str,
        files: usize,
        bytes: u64,
        left: &'static [&'static str],
    }
    let cases = [
        Case { name: "org/name", files: 2, bytes: 1237, left: &[] },
        Case {
            name: "org/name@v1",
            files: 2,
            bytes: 1000,
            left: &[
                "blobs/b",
                "blobs/c",
                "blobs/d.incomplete",
                "refs/main",
                "snapshots/2222222222222222222222222222222222222222/m-Q4_K_M.gguf",
                "snapshots/2222222222222222222222222222222222222222/m-Q8_0.gguf",
            ],
        },
        Case {
            name: "org/name:Q8_0",
            files: 1,
            bytes: 30,
            left: &[
                "blobs/a",
                "blobs/b",
                "blobs/d.incomplete",
                "refs/main",
                "refs/v1",
                "snapshots/1111111111111111111111111111111111111111/m-Q4_K_M.gguf",
                "snapshots/1111111111111111111111111111111111111111/m-Q8_0.gguf",
                "snapshots/2222222222222222222222222222222222222222/m-Q4_K_M.gguf",
            ],
        },
        Case {
            name: "org/name:Q4_K_M@v1",
            files: 1,
            bytes: 0,
            left: &[
                "blobs/a",
                "blobs/b",
                "blobs/c",
                "blobs/d.incomplete",
                "refs/main",
                "refs/v1",
                "snapshots/1111111111111111111111111111111111111111/m-Q8_0.gguf",
                "snapshots/2222222222222222222222222222222222222222/m-Q4_K_M.gguf",
                "snapshots/2222222222222222222222222222222222222222/m-Q8_0.gguf",
            ],
        },
    ];
    for case in cases {
        let cache = tempfile::tempdir().unwrap();
        let root = two_revisions(cache.path());
        write(&cache.path().join(".locks/models--org--name/a.lock"), 0);
        let removal = hub(cache.path()).removal(case.name).unwrap();
        assert_eq!((removal.files.len(), removal.bytes), (case.files, case.bytes), "{}", case.name);
        removal.run().unwrap();
        assert_eq!(left(&root), case.left, "{}", case.name);
        assert_eq!(root.exists(), !case.left.is_empty(), "{}", case.name);
        let locks = cache.path().join(".locks/models--org--name").exists();
        assert_eq!(locks, !case.left.is_empty(), "{}", case.name);
    }
}

#[test]
fn the_last_weights_take_the_rest_of_the_model_with_them() {
    let cache = tempfile::tempdir().unwrap();
    let blobs = [("a", 1000), ("r", 5)];
    let root =
        repository(cache.path(), &blobs, &[(FIRST, "m-Q8_0.gguf", "a"), (FIRST, "README.md", "r")]);
    set_ref(&root, "main", FIRST);
    let removal = hub(cache.path()).removal("org/name:Q8_0").unwrap();
    assert_eq!((removal.files.len(), removal.bytes), (2, 1005));
    removal.run().unwrap();
    assert!(!root.exists());
}

#[test]
fn unfinished_downloads_are_listed_and_removed() {
    let cache = tempfile::tempdir().unwrap();
    let root = repository(cache.path(), &[("a.incomplete", 400)], &[]);
    let listed = hub(cache.path()).list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].id.as_str(), listed[0].commit.as_str()), ("org/name", ""));
    assert_eq!((listed[0].bytes, listed[0].partial_bytes, listed[0].kind), (0, 400, None));
    assert!(listed[0].modified.is_some());
    let removal = hub(cache.path()).removal("org/name:Q8_0").unwrap();
    assert_eq!((removal.files.len(), removal.bytes, removal.partial_bytes), (0, 400, 400));
    removal.run().unwrap();
    assert!(!root.exists());
}

#[test]
fn shared_bytes_are_counted_once() {
    let cache = tempfile::tempdir().unwrap();
    two_revisions(cache.path());
    let listed = hub(cache.path()).list().unwrap();
    let sizes: Vec<_> = listed.iter().map(|m| (m.bytes, m.own_bytes, m.partial_bytes)).collect();
    assert_eq!(sizes, [(1200, 1200, 7), (230, 30, 0)]);
    assert!(listed.iter().all(|m| m.kind == Some(Container::Gguf) && m.modified.is_some()));
}

#[test]
fn what_is_not_there_or_in_use_is_not_removed() {
    let cache = tempfile::tempdir().unwrap();
    let root = two_revisions(cache.path());
    let hub = hub(cache.path());
    let model = cache.path().join("own.gguf");
    write(&model, 4);
    for (name, expected) in [
        ("org/other", "expected a model in the cache, found none in"),
        ("org/name@v9", "expected revision v9 in the cache, found 1111111111111111"),
        ("org/name:Q6_K", "(hint: delft rm org/name removes all of it)"),
        (model.to_str().unwrap(), "delft removes only what it fetched"),
        ("../x/y", "found nothing there"),
    ] {
        let error = hub.removal(name).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    let lock = cache.path().join(".locks/models--org--name/a.lock");
    write(&lock, 0);
    let held = fs::File::open(&lock).unwrap();
    held.lock().unwrap();
    let before = left(&root);
    let error = hub.removal("org/name").unwrap().run().unwrap_err().to_string();
    assert!(error.contains("expected no download of it under way, found one"), "{error}");
    assert_eq!(left(&root), before);
    drop(held);
    hub.removal("org/name").unwrap().run().unwrap();
    assert!(!root.exists() && model.exists());
}

/// A snapshot's link is a stranger's word: what it leads to outside the repository is not the
/// cache's to delete.
#[test]
fn a_link_out_of_the_repository_is_not_followed() {
    let cache = tempfile::tempdir().unwrap();
    let outside = cache.path().join("precious");
    write(&outside, 50);
    let root = two_revisions(cache.path());
    let link = root.join("snapshots").join(FIRST).join("m-Q2_K.gguf");
    symlink(&outside, &link).unwrap();
    let removal = hub(cache.path()).removal("org/name:Q2_K@v1").unwrap();
    assert_eq!(removal.bytes, 0);
    removal.run().unwrap();
    assert!(!link.exists() && outside.exists());
    symlink(&outside, &link).unwrap();
    hub(cache.path()).removal("org/name").unwrap().run().unwrap();
    assert!(!root.exists() && outside.exists());
}

#[test]
fn absent_and_unfinished_models_are_told_from_wrong_names() {
    let cache = tempfile::tempdir().unwrap();
    let blobs = [("a", 2), ("i", 2)];
    let snapshots = [(FIRST, "config.json", "a"), (FIRST, "model.safetensors.index.json", "i")];
    let root = repository(cache.path(), &blobs, &snapshots);
    fs::write(root.join("blobs/i"), r#"{"weight_map":{"x":"model-1.safetensors"}}"#).unwrap();
    fs::write(root.join("blobs/a"), "{}").unwrap();
    set_ref(&root, "main", FIRST);
    write(&root.join("snapshots").join(FIRST).join("model-2.safetensors"), 2);
    let hub = hub(cache.path());
    for name in ["org/name", "org/name:Q8_0", "org/other", "qwen3:0.6b"] {
        let Found::Absent(error) = hub.find(name).unwrap() else { panic!("{name}") };
        assert!(error.hint.unwrap().to_string().starts_with("delft pull "), "{name}");
    }
    assert!(hub.find("qwen3:0.7b").is_err());
}

/// One level, as a Hugging Face folder has: a disk is not to be searched for models.
#[test]
fn a_folder_is_looked_at_one_level_deep() {
    let folder = tempfile::tempdir().unwrap();
    let hub = hub(&folder.path().join("cache"));
    write(&folder.path().join("ggufs/deep/b.gguf"), 4);
    write(&folder.path().join("ggufs/tool.bin"), 4);
    let at = folder.path().join("ggufs");
    let error = hub.resolve(at.to_str()).unwrap_err().to_string();
    assert!(error.ends_with("expected safetensors or GGUF weights, found none"), "{error}");
    write(&at.join("a.gguf"), 4);
    assert_eq!(hub.resolve(at.to_str()).unwrap().path(), Some(&*at.join("a.gguf")));
}

#[test]
fn a_pipe_is_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo");
    let error = hub(folder.path()).resolve(pipe.to_str()).unwrap_err().to_string();
    assert!(
        error.ends_with("expected a file or a folder, found a pipe, socket or device"),
        "{error}"
    );
}

#[test]
fn the_bundled_model_is_there_or_the_error_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let hub = hub(folder.path());
    let found = hub.resolve(None);
    assert_eq!(found.is_ok(), cfg!(feature = "bundled-model"));
    for name in [delft_hub::BUNDLED, "(bundled)"] {
        assert_eq!(hub.resolve(Some(name)), found, "{name}");
        let error = hub.removal(name).map(|_| ()).unwrap_err().to_string();
        assert!(error.ends_with("found the one that is in the program"), "{error}");
    }
    match found {
        Ok(model) => assert_eq!((model.path(), model.name().as_str()), (None, "(bundled)")),
        Err(error) => {
            let hint = "(hint: name a model with -m, or build with the feature bundled-model)";
            assert!(error.to_string().ends_with(hint), "{error}");
        }
    }
}
