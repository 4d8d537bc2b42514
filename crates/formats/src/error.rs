//! The one error type of Delft: where, what was expected, what was found, and a hint when one is known.

use std::fmt;

/// An error that tells the reader where to look. Displays as one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// A file, tensor, key or flag.
    pub place: String,
    /// What would have been right; empty when only `found` says something.
    pub expected: String,
    /// What was there instead.
    pub found: String,
    /// What the reader can do about it.
    pub hint: Option<String>,
}

/// `Result` with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// "place: expected this, found that".
    pub fn new(
        place: impl fmt::Display,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Self {
        Error {
            place: place.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
            hint: None,
        }
    }

    /// The same error with advice attached.
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// An operating-system error at a place.
    pub fn io(place: impl fmt::Display, error: std::io::Error) -> Self {
        Error::new(place, "", error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Untrusted names may hold line breaks or escape codes: an error stays one harmless line.
        let mut line = self.place.clone();
        if self.expected.is_empty() {
            line += &format!(": {}", self.found);
        } else {
            line += &format!(": expected {}, found {}", self.expected, self.found);
        }
        if let Some(hint) = &self.hint {
            line += &format!(" (hint: {hint})");
        }
        for c in line.chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { write!(f, "{c}")? }
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// A tensor's shape as errors show it: hostile files state thousands of dimensions.
pub fn shape(dims: &[usize]) -> String {
    const SHOWN: usize = 8;
    let text: Vec<String> = dims.iter().take(SHOWN).map(usize::to_string).collect();
    match dims.len() {
        0..=SHOWN => format!("[{}]", text.join(", ")),
        count => format!("[{}, ..] of {count} dimensions", text.join(", ")),
    }
}

/// A name from a file, short enough for an error: hostile names can be megabytes long.
pub(crate) fn clipped(name: &str) -> String {
    match name.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_string(),
    }
}
