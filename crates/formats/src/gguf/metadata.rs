//! The metadata of a GGUF file: an ordered table with typed getters.

use super::value::{MetadataArray, MetadataValue};
use crate::error::clipped;
use crate::{Error, Result};

/// Keys and values in file order. Getters of a key that is absent give `None`; a value of the wrong
/// type is an error that names the key. Integers of any width convert where they fit.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    place: String,
    entries: Vec<(String, MetadataValue)>,
    /// Indices into `entries`, ordered by key.
    by_key: Vec<usize>,
}

/// Kinds of GGUF files that hold no model by themselves, as `general.type` names them, and what
/// they are.
const OTHERS: &[(&str, &str)] = &[
    ("adapter", "an adapter, which works on top of a model"),
    ("mmproj", "a projector (mmproj), which lets a model see or hear"),
    ("imatrix", "statistics (imatrix) for quantising a model"),
    ("vocab", "a vocabulary alone"),
];

impl Metadata {
    /// A table of entries; `place` (a file) begins every error.
    ///
    /// # Errors
    /// A key that comes twice.
    pub fn new(place: &str, entries: Vec<(String, MetadataValue)>) -> Result<Metadata> {
        let mut by_key: Vec<usize> = (0..entries.len()).collect();
        by_key.sort_by(|&a, &b| entries[a].0.cmp(&entries[b].0));
        for pair in by_key.windows(2) {
            if entries[pair[0]].0 == entries[pair[1]].0 {
                let found = format!("{} twice", clipped(&entries[pair[0]].0));
                return Err(Error::new(place, "distinct metadata keys", found));
            }
        }
        Ok(Metadata { place: place.to_string(), entries, by_key })
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &MetadataValue)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        let found = self.by_key.binary_search_by(|&i| self.entries[i].0.as_str().cmp(key)).ok()?;
        Some(&self.entries[self.by_key[found]].1)
    }

    /// The file, as errors name it.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The file and one of its keys, as errors name them.
    pub fn at(&self, key: &str) -> String {
        match self.place.as_str() {
            "" => clipped(key),
            file => format!("{file}: {}", clipped(key)),
        }
    }

    /// The error for a key that the caller cannot do without.
    pub fn missing(&self, key: &str) -> Error {
        Error::new(self.at(key), "a value", "no such key")
    }

    /// Whether the file holds a model and not something that goes with one, as far as
    /// `general.type` says.
    ///
    /// # Errors
    /// A file of a kind that is known to hold no model.
    pub fn check_model(&self) -> Result<()> {
        const KEY: &str = "general.type";
        let stated = self.str(KEY)?;
        match OTHERS.iter().find(|(kind, _)| Some(*kind) == stated) {
            Some((_, what)) => Err(Error::new(self.at(KEY), "a model", what)),
            None => Ok(()),
        }
    }

    /// A string.
    ///
    /// # Errors
    /// A value of another type.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "string", |value| match value {
            MetadataValue::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// An integer that fits a u32.
    ///
    /// # Errors
    /// Another type, or an integer that does not fit.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "u32", |value| value.integer()?.try_into().ok())
    }

    /// An integer that fits an i32.
    ///
    /// # Errors
    /// Another type, or an integer that does not fit.
    pub fn i32(&self, key: &str) -> Result<Option<i32>> {
        self.typed(key, "i32", |value| value.integer()?.try_into().ok())
    }

    /// An integer that fits a u64.
    ///
    /// # Errors
    /// Another type, or an integer that does not fit.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "u64", |value| value.integer()?.try_into().ok())
    }

    /// A float or an integer, as f32.
    ///
    /// # Errors
    /// A value of another type.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "f32", |value| value.number().map(|v| v as f32))
    }

    /// A float or an integer, as f64.
    ///
    /// # Errors
    /// A value of another type.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "f64", MetadataValue::number)
    }

    /// A bool.
    ///
    /// # Errors
    /// A value of another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "bool", |value| match value {
            MetadataValue::Bool(v) => Some(*v),
            _ => None,
        })
    }

    /// An array of strings. An empty array of any type counts.
    ///
    /// # Errors
    /// A value of another type.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "array of string", |value| match value {
            MetadataValue::Array(MetadataArray::String(strings)) => Some(strings.as_slice()),
            MetadataValue::Array(empty) if empty.is_empty() => Some(&[]),
            _ => None,
        })
    }

    /// An array of integers that fit u32.
    ///
    /// # Errors
    /// Another type, or an integer that does not fit.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.typed(key, "array of u32", integers)
    }

    /// An array of integers that fit i32.
    ///
    /// # Errors
    /// Another type, or an integer that does not fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.typed(key, "array of i32", integers)
    }

    /// An array of floats, as f32.
    ///
    /// # Errors
    /// A value of another type.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.typed(key, "array of f32", |value| match value {
            MetadataValue::Array(MetadataArray::F32(v)) => Some(v.clone()),
            MetadataValue::Array(MetadataArray::F64(v)) => {
                Some(v.iter().map(|&v| v as f32).collect())
            }
            MetadataValue::Array(empty) if empty.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    /// An array of bools, or of integers that are 0 where they mean false.
    ///
    /// # Errors
    /// A value of another type.
    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.typed(key, "array of bool", |value| match value {
            MetadataValue::Array(MetadataArray::Bool(flags)) => Some(flags.clone()),
            other => integers::<i64>(other).map(|all| all.iter().map(|n| *n != 0).collect()),
        })
    }

    /// The value of a key through `convert`, whose `None` means the wrong type.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => {
                let found = match (value, value.integer()) {
                    (_, Some(integer)) => format!("{} {integer}", value.kind()),
                    (MetadataValue::String(text), None) => format!("string {:?}", clipped(text)),
                    (_, None) => value.kind(),
                };
                Err(Error::new(self.at(key), expected, found))
            }
        }
    }
}

fn integers<T: TryFrom<i128>>(value: &MetadataValue) -> Option<Vec<T>> {
    match value {
        MetadataValue::Array(array) => {
            array.integers()?.into_iter().map(|v| T::try_from(v).ok()).collect()
        }
        _ => None,
    }
}
