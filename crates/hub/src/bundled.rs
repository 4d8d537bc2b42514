//! The model that comes inside the program: a GGUF file among its read-only bytes, opened where it
//! lies.

use formats::{Location, Result};

use crate::{Cached, CachedFile, Container};

/// The bundled model's name wherever a path or an id would stand.
pub(crate) const NAME: &str = "(bundled)";

/// The name by which commands and requests ask for the bundled model, unless the user's file of
/// names gives it to another one.
pub const BUNDLED: &str = "delft-stories";

#[cfg(feature = "bundled-model")]
static BYTES: &[u8] = include_bytes!(env!("DELFT_BUNDLED_MODEL"));

/// Where the bundled model lies: in the program itself. No file stands in for it.
#[cfg(feature = "bundled-model")]
pub fn bundled() -> Result<Location> {
    Ok(Location::Program { name: NAME, bytes: BYTES })
}

/// This program was built without a model in it.
#[cfg(not(feature = "bundled-model"))]
pub fn bundled() -> Result<Location> {
    let error = formats::Error::new("the bundled model", "one in this program", "none");
    Err(error.hint("name a model with -m, or build with the feature bundled-model"))
}

/// The bundled model as [`crate::list`] shows it.
pub(crate) fn cached() -> Option<Cached> {
    let Ok(Location::Program { bytes, .. }) = bundled() else { return None };
    let size = bytes.len() as u64;
    Some(Cached {
        id: NAME.to_string(),
        commit: String::new(),
        refs: Vec::new(),
        files: vec![CachedFile { name: NAME.to_string(), size }],
        bytes: size,
        own_bytes: size,
        partial_bytes: 0,
        modified: None,
        kind: Some(Container::Gguf),
        path: None,
    })
}
