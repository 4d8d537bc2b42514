//! The one error type of Delft: where, what was expected, what was found, and a hint when one is
//! known.

use std::fmt;

/// The kind of an error, by which a program decides, as a server does about its status.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub enum ErrorKind {
    /// A file, a setting or a request that is wrong.
    #[default]
    BadInput,
    /// A file, a model or a repository that is not there.
    NotFound,
    /// Something that may be right, but that Delft or this machine cannot do.
    Unsupported,
    /// More memory or disk than there is.
    NoMemory,
    /// Something that may work later: a service that is overloaded or cannot be reached.
    Busy,
    /// A fault of Delft, of a driver or of a device.
    Internal,
}

/// A setting that a hint names. Each face spells it its own way; a command line, as a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Setting {
    /// Positions of a session.
    Context,
    /// Forgetting the oldest tokens where the context ends.
    Rotate,
    /// The element type of cached keys and values.
    CacheType,
    /// Where a model runs.
    Place,
    /// How many layers run on a GPU.
    GpuLayers,
    /// Experts on the CPU beside a GPU.
    CpuMoe,
    /// How several devices share a model.
    SplitMode,
    /// The most rows of a prompt in a step.
    Chunk,
    /// How a GPU is given a step's launches.
    Dispatch,
    /// Loading weights that are not finite.
    AllowNan,
    /// Passing over a key of a model's configuration.
    IgnoreKey,
    /// Loading an adapter that was made for another model.
    AnyBase,
    /// Learning from answers that labels judge.
    Kto,
}

impl Setting {
    /// Every setting.
    pub const ALL: &[Setting] = &[
        Setting::Context,
        Setting::Rotate,
        Setting::CacheType,
        Setting::Place,
        Setting::GpuLayers,
        Setting::CpuMoe,
        Setting::SplitMode,
        Setting::Chunk,
        Setting::Dispatch,
        Setting::AllowNan,
        Setting::IgnoreKey,
        Setting::AnyBase,
        Setting::Kto,
    ];

    /// Its name in words, for faces that have no spelling of their own.
    pub fn name(self) -> &'static str {
        match self {
            Setting::Context => "context",
            Setting::Rotate => "rotation",
            Setting::CacheType => "cache type",
            Setting::Place => "device",
            Setting::GpuLayers => "GPU layers",
            Setting::CpuMoe => "experts on the CPU",
            Setting::SplitMode => "split mode",
            Setting::Chunk => "chunk",
            Setting::Dispatch => "dispatch",
            Setting::AllowNan => "permission for NaN",
            Setting::IgnoreKey => "ignored key",
            Setting::AnyBase => "permission for adapters of other models",
            Setting::Kto => "KTO",
        }
    }
}

/// A piece of a [`Hint`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Piece {
    Text(String),
    Setting(Setting, Option<String>),
}

/// Advice for the reader of an error: words, and the settings that they name.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Hint {
    pieces: Vec<Piece>,
}

impl Hint {
    /// A hint that begins with words.
    pub fn text(words: impl fmt::Display) -> Hint {
        Hint::default().and(words)
    }

    /// A hint that begins with a setting.
    pub fn setting(setting: Setting) -> Hint {
        Hint::default().with(setting)
    }

    /// A hint that begins with a setting and its value.
    pub fn set(setting: Setting, value: impl fmt::Display) -> Hint {
        Hint::default().with_value(setting, value)
    }

    /// The same hint, continued in words.
    pub fn and(mut self, words: impl fmt::Display) -> Hint {
        self.pieces.push(Piece::Text(words.to_string()));
        self
    }

    /// The same hint, continued with a setting.
    pub fn with(mut self, setting: Setting) -> Hint {
        self.pieces.push(Piece::Setting(setting, None));
        self
    }

    /// The same hint, continued with a setting and its value.
    pub fn with_value(mut self, setting: Setting, value: impl fmt::Display) -> Hint {
        self.pieces.push(Piece::Setting(setting, Some(value.to_string())));
        self
    }

    /// The hint with settings spelled by `spell`, their values behind them.
    pub fn spelled(&self, spell: &dyn Fn(Setting) -> &'static str) -> String {
        let mut line = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(words) => line += words,
                Piece::Setting(setting, None) => line += spell(*setting),
                Piece::Setting(setting, Some(value)) => {
                    line += &format!("{} {value}", spell(*setting));
                }
            }
        }
        line
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spelled(&Setting::name))
    }
}

impl From<&str> for Hint {
    fn from(words: &str) -> Hint {
        Hint::text(words)
    }
}

impl From<String> for Hint {
    fn from(words: String) -> Hint {
        Hint::text(words)
    }
}

/// An error that tells the reader where to look. Displays as one line.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Error {
    /// A file, tensor, key or setting.
    pub place: String,
    /// The value that would have been right; empty when only `found` says something.
    pub expected: String,
    /// The value that was found instead.
    pub found: String,
    /// Advice for the reader.
    pub hint: Option<Hint>,
    /// The kind of the error.
    pub kind: ErrorKind,
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
            kind: ErrorKind::BadInput,
        }
    }

    /// The same error with advice attached.
    pub fn hint(mut self, hint: impl Into<Hint>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same error, of another kind.
    pub fn of(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// An operating-system error at a place.
    pub fn io(place: impl fmt::Display, error: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match error.kind() {
            Io::NotFound => ErrorKind::NotFound,
            Io::OutOfMemory | Io::StorageFull | Io::QuotaExceeded => ErrorKind::NoMemory,
            Io::TimedOut | Io::ResourceBusy | Io::WouldBlock => ErrorKind::Busy,
            Io::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::BadInput,
        };
        Error::new(place, "", error).of(kind)
    }

    /// The error in one line, with the settings of its hint spelled by `spell`.
    pub fn spelled(&self, spell: &dyn Fn(Setting) -> &'static str) -> String {
        let mut line = self.place.clone();
        if self.expected.is_empty() {
            line += &format!(": {}", self.found);
        } else {
            line += &format!(": expected {}, found {}", self.expected, self.found);
        }
        if let Some(hint) = &self.hint {
            line += &format!(" (hint: {})", hint.spelled(spell));
        }
        // Untrusted names may hold line breaks or escape codes: an error stays one harmless line.
        let mut harmless = String::with_capacity(line.len());
        for c in line.chars() {
            if c.is_control() { harmless.extend(c.escape_default()) } else { harmless.push(c) }
        }
        harmless
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spelled(&Setting::name))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_face_spells_the_settings_of_a_hint() {
        let hint = Hint::set(Setting::Context, 4096).and(" would fit, or ").with(Setting::Rotate);
        let error = Error::new("cpu", "less", "more").of(ErrorKind::NoMemory).hint(hint);
        assert_eq!(
            error.to_string(),
            "cpu: expected less, found more (hint: context 4096 would fit, or rotation)"
        );
        let flags = |setting| match setting {
            Setting::Context => "--ctx",
            _ => "--other",
        };
        assert_eq!(
            error.spelled(&flags),
            "cpu: expected less, found more (hint: --ctx 4096 would fit, or --other)"
        );
    }

    #[test]
    fn an_error_stays_one_harmless_line() {
        let error = Error::new("a\nb", "", "\u{1b}[31m").hint("c\rd");
        assert_eq!(error.to_string(), "a\\nb: \\u{1b}[31m (hint: c\\rd)");
    }

    #[test]
    fn the_system_says_of_what_kind_its_errors_are() {
        let kind = |kind: std::io::ErrorKind| Error::io("x", kind.into()).kind;
        assert_eq!(kind(std::io::ErrorKind::NotFound), ErrorKind::NotFound);
        assert_eq!(kind(std::io::ErrorKind::StorageFull), ErrorKind::NoMemory);
        assert_eq!(kind(std::io::ErrorKind::PermissionDenied), ErrorKind::BadInput);
    }
}
