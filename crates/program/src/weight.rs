//! Weights: by their names in a Program, and how each is made of a file's tensors.

use formats::{Described, Encoded, Error, Result, Source, Tensors, shape};

/// A weight by its canonical name, such as `blocks.3.attention.q`. Two are one weight only if their
/// recipes are equal.
#[derive(Debug, Clone, PartialEq)]
pub struct Weight {
    /// Canonical name, the same for every file format.
    pub name: String,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// How it is made of the tensors of a model's files.
    pub source: Source,
}

impl Weight {
    /// What its recipe gives, as headers tell it: the encoding that a device packs, and the bytes
    /// that are read for it.
    ///
    /// # Errors
    /// Tensors that are missing, or that cannot be used as the recipe says; another shape than the
    /// weight's.
    pub fn describe(&self, tensors: &Tensors) -> Result<Described> {
        let described = self.source.describe(tensors).map_err(|e| self.named(e))?;
        if described.shape != self.shape {
            return Err(Error::new(&self.name, shape(&self.shape), described));
        }
        Ok(described)
    }

    /// Bytes of files that are read for it.
    ///
    /// # Errors
    /// As [`Weight::describe`].
    pub fn stored_bytes(&self, tensors: &Tensors) -> Result<u64> {
        Ok(self.describe(tensors)?.stored)
    }

    /// The weight, encoded as [`Weight::describe`] says.
    ///
    /// # Errors
    /// As [`Weight::describe`].
    pub fn read<'a>(&self, tensors: &'a Tensors) -> Result<Encoded<'a>> {
        self.describe(tensors)?;
        self.source.read(tensors).map_err(|e| self.named(e))
    }

    /// An error that begins with its name.
    pub fn named(&self, error: Error) -> Error {
        Error { place: format!("{}: {}", self.name, error.place), ..error }
    }
}
