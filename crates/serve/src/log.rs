//! Log lines: a time, a word and `key=value` pairs, one line for each request and each text, on
//! standard error.
//!
//! Prompts, answers and keys are never logged.

use std::fmt::{Display, Write as _};
use std::io::Write as _;

use time::OffsetDateTime;

/// Now, as RFC 3339 writes it.
pub(crate) fn timestamp() -> String {
    written(OffsetDateTime::now_utc())
}

/// A time in seconds since 1970, as RFC 3339 writes it.
pub(crate) fn timestamp_of(seconds: u64) -> String {
    let time =
        i64::try_from(seconds).ok().and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok());
    written(time.unwrap_or(OffsetDateTime::UNIX_EPOCH))
}

fn written(time: OffsetDateTime) -> String {
    format!(
        "{}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        time.year(),
        u8::from(time.month()),
        time.day(),
        time.hour(),
        time.minute(),
        time.second(),
        time.millisecond()
    )
}

/// A line in the making.
pub(crate) struct Line(String);

impl Line {
    /// A line about `event`.
    pub(crate) fn about(event: &str) -> Line {
        Line(format!("{} {event}", timestamp()))
    }

    /// Adds a pair. What could break the line, or steer a terminal, is escaped.
    pub(crate) fn with(mut self, key: &str, value: impl Display) -> Line {
        let value = value.to_string();
        let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\' | '=');
        let quoted = value.is_empty() || !value.chars().all(plain);
        let value = if quoted { format!("\"{}\"", value.escape_default()) } else { value };
        // Writing to a string cannot fail.
        let _ = write!(self.0, " {key}={value}");
        self
    }

    /// Writes the line. A closed standard error is no reason to stop serving.
    pub(crate) fn write(mut self) {
        self.0.push('\n');
        let _ = std::io::stderr().write_all(self.0.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_rfc_3339_has_them() {
        assert_eq!(timestamp_of(1_000_000_000), "2001-09-09T01:46:40.000Z");
        assert_eq!(timestamp_of(u64::MAX), "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn a_line_stays_one_line() {
        let Line(line) = Line::about("request").with("path", "/a b\n\u{1b}[2J").with("status", 200);
        let (time, rest) = line.split_once(' ').unwrap();
        assert_eq!((time.len(), time.ends_with('Z')), (24, true));
        assert_eq!(rest, "request path=\"/a b\\n\\u{1b}[2J\" status=200");
    }
}
