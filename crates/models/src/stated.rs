//! Values with the file and the key that state them, so that whatever is wrong with one is said in the file's own words.

use formats::{Error, Result};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// A value, and where it stands: "FILE: KEY".
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stated<T> {
    pub(crate) value: T,
    file: String,
    key: String,
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

/// The keys of one file (or of an object in it) with their values: what both dialects of configurations are read through.
///
/// The methods that give values refuse one of another type, by key.
pub(crate) trait Keys {
    /// The file.
    fn file(&self) -> &str;

    /// The key as the file spells it, of its part that every model has.
    fn spelled(&self, key: &str) -> String;

    /// A whole number; none where the key is absent.
    fn whole(&self, key: &str) -> Result<Option<usize>>;

    /// A number.
    fn real(&self, key: &str) -> Result<Option<f64>>;

    /// A text.
    fn text(&self, key: &str) -> Result<Option<&str>>;

    /// A value that stands under `key`, or would.
    fn stated<T>(&self, key: &str, value: T) -> Stated<T> {
        Stated { value, file: self.file().to_owned(), key: self.spelled(key) }
    }

    /// An error about a key.
    fn wrong(&self, key: &str, expected: impl Display, found: impl Display) -> Error {
        self.stated(key, ()).wrong(expected, found)
    }

    /// A whole number with its place; none where the key is absent.
    fn size(&self, key: &str) -> Result<Option<Stated<usize>>> {
        Ok(self.whole(key)?.map(|value| self.stated(key, value)))
    }

    /// A whole number without which there is no model.
    fn needed(&self, key: &str) -> Result<Stated<usize>> {
        self.size(key)?.ok_or_else(|| self.wrong(key, "a whole number", "nothing"))
    }

    /// A number with its place; none where the key is absent.
    fn number(&self, key: &str) -> Result<Option<Stated<f64>>> {
        Ok(self.real(key)?.map(|value| self.stated(key, value)))
    }

    /// A number, or the one that is usual where nothing is said.
    fn number_or(&self, key: &str, usual: f64) -> Result<Stated<f64>> {
        Ok(self.number(key)?.unwrap_or_else(|| self.stated(key, usual)))
    }

    /// A number without which there is no model.
    fn needed_number(&self, key: &str) -> Result<Stated<f64>> {
        self.number(key)?.ok_or_else(|| self.wrong(key, "a number", "nothing"))
    }
}
