//! PEFT's patterns: values of single modules, by regular expressions of their names.

use crate::settings::Settings;
use formats::Result;
use regex::{Regex, RegexBuilder};

/// Bytes that a compiled expression may take: far more than one of names does.
const MOST: usize = 1 << 20;

/// A value for each module whose name matches.
#[derive(Debug, Default)]
pub(crate) struct Patterns(Vec<(Regex, f64)>);

impl Patterns {
    /// Reads `key`: an object of expressions and numbers. An expression stands for the modules that
    /// it matches as a whole, or from a dot on.
    ///
    /// # Errors
    /// A pattern that is no regular expression, or looks around itself; a value that is no number
    /// above 0.
    pub(crate) fn read(settings: &Settings, key: &str) -> Result<Patterns> {
        let Some(object) = settings.object(key)? else { return Ok(Patterns::default()) };
        let mut all = Vec::new();
        for (name, _) in object.said() {
            // As PEFT's `get_pattern_key`, whose match begins where the name does.
            let whole =
                RegexBuilder::new(&format!(r"^(?:(.*\.)?({name})$)")).size_limit(MOST).build();
            let whole = whole.map_err(|_| {
                settings.wrong(key, "regular expressions of names, without looking around", name)
            })?;
            let value = object.positive(name)?;
            all.push((whole, value.unwrap_or(1.0)));
        }
        Ok(Patterns(all))
    }

    /// The value of a module, the first that matches.
    pub(crate) fn of(&self, module: &str) -> Option<f64> {
        self.0.iter().find(|(name, _)| name.is_match(module)).map(|(_, value)| *value)
    }
}
