//! Weights: by their names in a Program, and what of a file's tensor each is.

use std::borrow::Cow;
use std::fmt;

use formats::{Error, Hint, Result, Setting, Tensor, Tensors};

/// A weight by its canonical name, such as `blocks.3.attention.q`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    /// Canonical name, the same for every file format.
    pub name: String,
    /// The tensor's name in the file that holds it.
    pub stored: String,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// What of the tensor it is, if not all.
    pub slice: Option<Slice>,
}

/// One of several equal parts of a matrix or, by rows, of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// What is cut.
    pub axis: Axis,
    /// Which part, from 0.
    pub index: usize,
    /// Of how many.
    pub of: usize,
}

/// The side of a matrix that is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// A part has some of the rows.
    Rows,
    /// A part has some of each row.
    Columns,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::Rows => "rows",
            Axis::Columns => "columns",
        })
    }
}

impl Weight {
    /// Its tensor in a model's files: all of it.
    ///
    /// # Errors
    /// If they have none.
    pub fn tensor<'a>(&self, tensors: &'a Tensors) -> Result<Tensor<'a>> {
        let missing = || Error::new(&self.name, "a tensor", "none in the file");
        tensors.get(&self.stored).ok_or_else(missing)
    }

    /// How many bytes of that it is.
    ///
    /// # Errors
    /// If there is none, or it cannot be cut there.
    pub fn stored_bytes(&self, tensors: &Tensors) -> Result<u64> {
        let bytes = self.tensor(tensors)?.bytes.len();
        self.check(tensors)?;
        Ok((bytes / self.slice.map_or(1, |slice| slice.of)) as u64)
    }

    /// Its tensor, and the bytes of that which it is.
    ///
    /// # Errors
    /// As [`stored_bytes`](Weight::stored_bytes).
    pub fn read<'a>(&self, tensors: &'a Tensors) -> Result<(Tensor<'a>, Cow<'a, [u8]>)> {
        let tensor = self.tensor(tensors)?;
        self.check(tensors)?;
        let Some(Slice { axis, index, of }) = self.slice else {
            return Ok((tensor, Cow::Borrowed(tensor.bytes)));
        };
        let part = |bytes: &'a [u8]| {
            let share = bytes.len() / of;
            &bytes[index * share..][..share]
        };
        let bytes = match axis {
            Axis::Rows => Cow::Borrowed(part(tensor.bytes)),
            Axis::Columns => {
                let row = tensor.bytes.len() / self.shape[0].max(1);
                Cow::Owned(tensor.bytes.chunks_exact(row.max(1)).flat_map(part).copied().collect())
            }
        };
        Ok((tensor, bytes))
    }

    /// Whether it can be cut out of its tensor: parts of rows are whole blocks of a quantised type.
    fn check(&self, tensors: &Tensors) -> Result<()> {
        let Some(slice) = self.slice else { return Ok(()) };
        let tensor = self.tensor(tensors)?;
        let block = tensor.dtype.block_elements();
        let elements = self.shape.iter().product::<usize>() * slice.of;
        let row = self.shape.last().copied().unwrap_or(0);
        if elements == tensor.elements() && row.is_multiple_of(block) {
            return Ok(());
        }
        let expected = format!("{} in {} parts of whole blocks of {block}", slice.axis, slice.of);
        let found = format!("{:?} of {}", tensor.shape, tensor.dtype);
        let error = Error::new(&self.name, expected, found);
        Err(error.hint(
            Hint::text("fewer GPUs, ")
                .with_value(Setting::SplitMode, "layer")
                .and(", or a model of another type"),
        ))
    }
}
