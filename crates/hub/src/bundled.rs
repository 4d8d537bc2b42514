//! The model that comes with the program: a GGUF file found without a path.

use std::path::{Path, PathBuf};

use formats::{Error, Result};

use crate::{Cached, CachedFile, Kind};

/// The path of the model that came with the program.
///
/// It is the first `.gguf` file by name in the first of these folders that has one: `$DELFT_HOME`,
/// `$DELFT_HOME/models`, the executable's folder, `../share/delft` seen from there, and the source tree's `models`.
pub fn bundled() -> Result<PathBuf> {
    let folders = folders();
    match folders.iter().find_map(|folder| first_gguf(folder)) {
        Some(path) => Ok(path),
        None => {
            let looked: Vec<String> =
                folders.iter().map(|folder| folder.display().to_string()).collect();
            Err(Error::new(
                "the bundled model",
                "a .gguf file",
                format!("none in {}", looked.join(", ")),
            )
            .hint("name a model with -m, or set DELFT_HOME to the folder that holds one"))
        }
    }
}

/// The bundled model as [`crate::list`] shows it.
pub(crate) fn cached() -> Option<Cached> {
    let path = bundled().ok()?;
    let size = path.metadata().ok()?.len();
    let name = path.file_name()?.to_string_lossy().into_owned();
    Some(Cached {
        id: "(bundled)".to_string(),
        commit: String::new(),
        refs: Vec::new(),
        files: vec![CachedFile { name, size }],
        bytes: size,
        partial_bytes: 0,
        kind: Some(Kind::GgufFile),
        path,
    })
}

fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if let Some(home) = std::env::var_os("DELFT_HOME").filter(|home| !home.is_empty()) {
        folders.push(PathBuf::from(&home));
        folders.push(PathBuf::from(home).join("models"));
    }
    // The executable may be a link from a folder of commands: what lies beside it lies beside its target.
    if let Some(folder) = std::env::current_exe()
        .and_then(|exe| exe.canonicalize())
        .ok()
        .as_deref()
        .and_then(Path::parent)
    {
        folders.push(folder.to_path_buf());
        if let Some(prefix) = folder.parent() {
            folders.push(prefix.join("share").join("delft"));
        }
    }
    if let Some(root) = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2) {
        folders.push(root.join("models"));
    }
    folders
}

fn first_gguf(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let files = entries.flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|e| e == "gguf") && path.is_file()).min()
}
