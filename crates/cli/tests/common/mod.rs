//! The binary under test, cut off from the user's own cache, settings and network.

use std::path::PathBuf;
use std::process::{Command, Output};

/// The `delft` binary with an environment of its own.
pub(crate) fn delft() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_delft"));
    let nowhere = std::env::temp_dir().join("delft-tests-without-a-cache");
    for name in [
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN",
        "XDG_CACHE_HOME",
        "DELFT_HOME",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ] {
        command.env_remove(name);
    }
    command.env("HF_HOME", nowhere).env("HF_ENDPOINT", "http://127.0.0.1:9").env("NO_COLOR", "1");
    command
}

/// The exit status; a signal fails the test.
pub(crate) fn status(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"))
}

/// A checkpoint of the reference fixtures.
#[allow(dead_code)] // Not every test file needs a model.
pub(crate) fn fixture(name: &str) -> String {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
    let path = models.join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path.to_str().expect("a path in UTF-8").to_string()
}
