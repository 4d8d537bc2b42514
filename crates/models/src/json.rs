//! The keys of a JSON object, with the place of each.

use crate::stated::Keys;
use formats::{Error, Result};
use serde_json::Value;

/// A JSON object of a file, and the keys that lead to it.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a> {
    pub(crate) file: &'a str,
    /// Empty, or the key of the object with a dot behind it.
    pub(crate) prefix: &'a str,
    pub(crate) value: &'a Value,
}

impl Object<'_> {
    /// The value of a key; null is none.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// True or false; none where the key is absent.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.odd(key, "true or false", value))
    }

    /// An error about a value, of which it shows the beginning.
    pub(crate) fn odd(&self, key: &str, expected: &str, found: &Value) -> Error {
        let mut found = found.to_string();
        if let Some((end, _)) = found.char_indices().nth(60) {
            found.truncate(end);
        }
        self.wrong(key, expected, found)
    }
}

impl Keys for Object<'_> {
    fn file(&self) -> &str {
        self.file
    }

    fn spelled(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn whole(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let whole = value.as_u64().and_then(|n| usize::try_from(n).ok());
        whole.map(Some).ok_or_else(|| self.odd(key, "a whole number", value))
    }

    fn real(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.odd(key, "a number", value))
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.odd(key, "text", value))
    }
}
