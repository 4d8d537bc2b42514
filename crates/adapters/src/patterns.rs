//! PEFT's patterns: values of single modules, by the end of their names.

use crate::settings::Settings;
use formats::Result;

/// A value for each module whose name matches.
#[derive(Debug, Default)]
pub(crate) struct Patterns(Vec<(String, f64)>);

impl Patterns {
    /// Reads `key`: an object of names and numbers. A name stands for all modules that are called
    /// so or end so behind a dot.
    ///
    /// # Errors
    /// A name that is a regular expression beyond dots and a `^` in front; a value that is no
    /// number above 0.
    pub(crate) fn read(settings: &Settings, key: &str) -> Result<Patterns> {
        let Some(object) = settings.object(key)? else { return Ok(Patterns::default()) };
        let mut all = Vec::new();
        for (name, _) in object.said() {
            let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if !name.strip_prefix('^').unwrap_or(name).chars().all(plain) {
                let expected = "names of modules, not regular expressions";
                return Err(settings.wrong(key, expected, name));
            }
            let value = object.positive(name)?;
            all.push((name.to_owned(), value.unwrap_or(1.0)));
        }
        Ok(Patterns(all))
    }

    /// The value of a module, the first that matches.
    pub(crate) fn of(&self, module: &str) -> Option<f64> {
        let matches = |name: &str| match name.strip_prefix('^') {
            Some(whole) => module == whole,
            None => module
                .strip_suffix(name)
                .is_some_and(|front| front.is_empty() || front.ends_with('.')),
        };
        self.0.iter().find(|(name, _)| matches(name)).map(|(_, value)| *value)
    }
}
