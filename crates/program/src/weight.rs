//! Weights: their names in a Program, and the recipe by which each is made from a file's tensors.

use formats::{Described, Encoded, Error, Result, Source, Tensors, shape};

/// A weight with its canonical name, such as `blocks.3.attention.q`. Two weights are the same only
/// if their recipes are equal.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Weight {
    /// Canonical name, the same for every file format.
    pub name: String,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// The recipe by which it is made from the tensors of the model's files.
    pub source: Source,
}

impl Weight {
    /// Describes the weight from headers alone: the encoding that a device packs, and the bytes
    /// that are read for it.
    ///
    /// # Errors
    /// Tensors that are missing or that the recipe cannot use; a shape other than the weight's.
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

    /// Reads the weight, in the encoding that [`Weight::describe`] names.
    ///
    /// # Errors
    /// As [`Weight::describe`].
    pub fn read<'a>(&self, tensors: &'a Tensors) -> Result<Encoded<'a>> {
        self.describe(tensors)?;
        self.source.read(tensors).map_err(|e| self.named(e))
    }

    /// Puts the weight's name before an error's place.
    pub fn named(&self, error: Error) -> Error {
        Error { place: format!("{}: {}", self.name, error.place), ..error }
    }
}
