//! Shared by the tests of several crates: the reference fixtures, a test for each of them, where
//! real data is, and a list of what was skipped.
//!
//! A dependency of tests alone; it knows no other crate.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

mod fixtures;

/// Notes that the running test, or a part of it, is skipped, and why: on standard output, and in
/// the file that the variable `DELFT_TEST_SKIPPED` names, if it is set. `.ci/run` prints that file
/// at its end, so that a run on a machine that lacks something does not look like a full one.
///
/// # Panics
///
/// If the file cannot be written.
pub fn skipped(why: impl Display) {
    println!("skipped: {why}");
    let Some(path) = std::env::var_os("DELFT_TEST_SKIPPED") else { return };
    // Cargo sets the package's name where it runs tests, the harness names each test's thread.
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let thread = std::thread::current();
    let line = format!("{package} {}: {why}\n", thread.name().unwrap_or("(a thread)"));
    let file = std::fs::OpenOptions::new().append(true).create(true).open(&path);
    // One write, so that lines of tests that run at a time are not mixed.
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    written.unwrap_or_else(|why| panic!("{}: {why}", path.display()));
}

/// The folder of real inputs (tokenizers, templates, quantisation vectors, weights), which lies
/// outside the repository and is named by `DELFT_TEST_DATA`; without it, notes that the test is
/// [`skipped`].
pub fn data(folder: &str) -> Option<PathBuf> {
    let root = std::env::var_os("DELFT_TEST_DATA").filter(|root| !root.is_empty());
    if root.is_none() {
        skipped("DELFT_TEST_DATA is not set");
    }
    Some(PathBuf::from(root?).join(folder))
}

/// The folder of the reference fixtures, one folder each; its README says how they are made.
pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models")
}

/// Whether tests run all that they can: with `DELFT_ALL_FIXTURES`, which `xtask/proof` sets, those
/// that multiply fixtures by ways to run them run every product; without it, a sample.
pub fn all_fixtures() -> bool {
    std::env::var_os("DELFT_ALL_FIXTURES").is_some()
}

/// The context with which a fixture's rotation is the one that it expects, where that follows the
/// context.
pub fn context(path: &Path) -> Option<usize> {
    let contexts = [("phi3-short", 32), ("llama-dynamic-beyond", 128), ("internlm3", 128)];
    let named = |name: &str| path.components().any(|part| part.as_os_str() == name);
    contexts.into_iter().find(|(name, _)| named(name)).map(|(_, context)| context)
}
