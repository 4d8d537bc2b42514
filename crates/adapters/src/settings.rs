//! `adapter_config.json`, read by key; whatever says something and is not known is refused.

use formats::{Error, ErrorKind, Result, json};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

const NAME: &str = "adapter_config.json";
/// No settings are longer.
const MOST: u64 = 1 << 20;

pub(crate) struct Settings {
    file: PathBuf,
    keys: Map<String, Value>,
}

impl Settings {
    pub(crate) fn open(folder: &Path) -> Result<Settings> {
        let file = folder.join(NAME);
        match json::read(&file, MOST)? {
            Value::Object(keys) => Ok(Settings { file, keys }),
            _ => Err(Error::new(file.display(), "a JSON object", "something else")),
        }
    }

    /// Whether PEFT wrote it; mlx-lm's name no type of theirs.
    pub(crate) fn is_peft(&self) -> bool {
        self.keys.contains_key("peft_type")
    }

    pub(crate) fn wrong(
        &self,
        key: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Error {
        let found: String = found.to_string().chars().take(80).collect();
        Error::new(format!("{}: {key}", self.file.display()), expected, found)
    }

    /// The error of a key that asks for something that there is not.
    pub(crate) fn lacks(&self, key: &str, expected: &str) -> Error {
        let found = self.keys.get(key).map_or("nothing".to_owned(), Value::to_string);
        self.wrong(key, expected, found).of(ErrorKind::Unsupported)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Value::as_str)
    }

    /// A number that is finite and above zero, or none.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.map(Some).ok_or_else(|| self.wrong(key, "a number above 0", value))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    /// A list of names, if there is one.
    pub(crate) fn names(&self, key: &str) -> Result<Option<Vec<String>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let name =
            |value: &Value| value.as_str().filter(|name| !name.is_empty()).map(str::to_owned);
        let names = value.as_array().and_then(|all| all.iter().map(name).collect());
        names.map(Some).ok_or_else(|| self.wrong(key, "a list of names", value))
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Settings>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(keys)) => {
                let file = PathBuf::from(format!("{}: {key}", self.file.display()));
                Ok(Some(Settings { file, keys: keys.clone() }))
            }
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// All keys and values that say something: not null, false, nor empty.
    pub(crate) fn said(&self) -> impl Iterator<Item = (&str, &Value)> {
        let says = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(all) => !all.is_empty(),
            Value::Object(all) => !all.is_empty(),
            _ => true,
        };
        self.keys.iter().filter(move |(_, value)| says(value)).map(|(k, v)| (k.as_str(), v))
    }
}
