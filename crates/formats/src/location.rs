//! Where a model lies: in files, or in the program itself.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where a model lies. Anything that is a path converts into it.
#[derive(Clone, PartialEq, Eq)]
pub enum Location {
    /// A `.gguf` file (any one of a split set), a model folder, or a `.safetensors` file of one.
    Path(PathBuf),
    /// A whole GGUF file that is part of the program, read where it is.
    Program {
        /// Its name in messages, in place of a path.
        name: &'static str,
        /// The file.
        bytes: &'static [u8],
    },
}

impl Location {
    /// The path, unless the model is part of the program.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Location::Path(path) => Some(path),
            Location::Program { .. } => None,
        }
    }
}

impl<P: AsRef<Path>> From<P> for Location {
    fn from(path: P) -> Self {
        Location::Path(path.as_ref().to_path_buf())
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Self {
        location.clone()
    }
}

/// The path, or the name in its place.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Path(path) => path.display().fmt(f),
            Location::Program { name, .. } => name.fmt(f),
        }
    }
}

/// As [`fmt::Display`]: megabytes of weights are of no use to a reader.
impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Location({self})")
    }
}
