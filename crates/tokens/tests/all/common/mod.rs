//! What several tests share: where the real data is.

use std::path::PathBuf;

/// A folder of the real data, or a note that the test skips.
pub(crate) fn data(folder: &str) -> Option<PathBuf> {
    let Some(root) = std::env::var_os("DELFT_TEST_DATA") else {
        println!("skipped: DELFT_TEST_DATA is not set");
        return None;
    };
    Some(PathBuf::from(root).join(folder))
}
