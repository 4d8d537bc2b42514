//! Which build of the program runs.

use std::sync::OnceLock;

use delft::program_digest;

/// The identity of this build: the version, and where the program's file can be read the
/// beginning of its SHA-256, as in `0.1.0+3f7a0c12e9d4`.
pub(crate) fn build() -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| {
        let version = env!("CARGO_PKG_VERSION");
        program_digest()
            .map_or_else(|_| version.to_string(), |digest| format!("{version}+{digest}"))
    })
}
