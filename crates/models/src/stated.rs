//! Values with the file and the key that state them, so that whatever is wrong with one is said in
//! the file's own words.

use formats::{Error, Result};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// A value, and where it stands: "FILE: KEY".
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stated<T> {
    pub(crate) value: T,
    pub(crate) file: String,
    pub(crate) key: String,
}

impl<T> Stated<T> {
    /// The key, for errors about another value that must fit this one.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// An error about the value: what would have been right, and what is there.
    pub(crate) fn wrong(&self, expected: impl Display, found: impl Display) -> Error {
        Error::new(format!("{}: {}", self.file, self.key), expected, found)
    }

    /// Another value that the same key states.
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Stated<U> {
        Stated { value: change(self.value), file: self.file, key: self.key }
    }
}

impl Stated<usize> {
    /// The value, if it lies in `range`.
    pub(crate) fn within(&self, range: RangeInclusive<usize>) -> Result<usize> {
        if range.contains(&self.value) {
            return Ok(self.value);
        }
        Err(self.wrong(format!("{} to {}", range.start(), range.end()), self.value))
    }
}

impl Stated<f64> {
    /// The value, if it is a positive number that f32, in which models compute, has too.
    pub(crate) fn positive(&self) -> Result<f64> {
        let narrow = self.value as f32;
        if narrow.is_finite() && narrow > 0.0 {
            return Ok(self.value);
        }
        Err(self.wrong("a positive number", self.value))
    }
}
