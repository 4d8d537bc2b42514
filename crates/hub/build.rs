//! Finds the model that is put into the program: the one `.gguf` file of the workspace's `models`
//! folder.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_BUNDLED_MODEL").is_none() {
        return;
    }
    let models = Path::new("../../models");
    println!("cargo::rerun-if-changed={}", models.display());
    match &gguf_files(models)[..] {
        [file] => match file.canonicalize() {
            Ok(file) => println!("cargo::rustc-env=DELFT_BUNDLED_MODEL={}", file.display()),
            Err(error) => println!("cargo::error={}: {error}", file.display()),
        },
        files => println!(
            "cargo::error=feature bundled-model: expected one .gguf file in {}, found {}",
            models.display(),
            files.len()
        ),
    }
}

fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "gguf")).collect()
}
