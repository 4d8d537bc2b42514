//! How long a model stays loaded, as Ollama's `keep_alive` says it.

use std::str::FromStr;
use std::time::Duration;

use delft::{Error, Result};
use serde_json::Value;

/// How long a model stays loaded after its last request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Keep {
    /// Until its memory is needed for another, or the server ends.
    #[default]
    Always,
    /// So long at most.
    For(Duration),
}

impl Keep {
    /// Ollama's default for how long models are kept.
    pub const USUAL: Keep = Keep::For(Duration::from_secs(300));

    /// Seconds as a number, or a duration as a string; below zero is always.
    pub(crate) fn of_json(value: &Value) -> Option<Keep> {
        match value {
            Value::String(text) => text.parse().ok(),
            other => other.as_f64().and_then(Keep::seconds),
        }
    }

    fn seconds(seconds: f64) -> Option<Keep> {
        if seconds < 0.0 {
            return Some(Keep::Always);
        }
        Duration::try_from_secs_f64(seconds).ok().map(Keep::For)
    }
}

impl FromStr for Keep {
    type Err = Error;

    /// `300`, `5m`, `1h30m`, `0`; with a minus sign, always.
    fn from_str(text: &str) -> Result<Keep> {
        let wrong = || {
            let expected = "a duration such as 5m, 1h30m, 90s or 300 (seconds), or -1 for always";
            Error::new("keep-alive", expected, format!("\"{text}\""))
        };
        let (negative, rest) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
        let mut seconds = 0.0;
        let mut left = rest;
        while !left.is_empty() {
            let digits = left.find(|c: char| !c.is_ascii_digit() && c != '.');
            let (number, behind) = left.split_at(digits.unwrap_or(left.len()));
            let number: f64 = number.parse().map_err(|_| wrong())?;
            let letters = behind.find(|c: char| c.is_ascii_digit()).unwrap_or(behind.len());
            let (unit, next) = behind.split_at(letters);
            seconds += number
                * match unit {
                    // A number alone is of seconds.
                    "" if left.len() == rest.len() => 1.0,
                    "ns" => 1e-9,
                    "us" | "\u{b5}s" => 1e-6,
                    "ms" => 1e-3,
                    "s" => 1.0,
                    "m" => 60.0,
                    "h" => 3600.0,
                    _ => return Err(wrong()),
                };
            left = next;
        }
        if rest.is_empty() {
            return Err(wrong());
        }
        Keep::seconds(if negative { -1.0 } else { seconds }).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn durations_are_read_as_ollama_reads_them() {
        let seconds = |s: f64| Some(Keep::For(Duration::from_secs_f64(s)));
        let cases = [
            (json!(300), seconds(300.0)),
            (json!(0), seconds(0.0)),
            (json!(-1), Some(Keep::Always)),
            (json!("5m"), seconds(300.0)),
            (json!("1h30m"), seconds(5400.0)),
            (json!("1.5s"), seconds(1.5)),
            (json!("250ms"), seconds(0.25)),
            (json!("0"), seconds(0.0)),
            (json!("300"), seconds(300.0)),
            (json!("-1m"), Some(Keep::Always)),
            (json!("-1"), Some(Keep::Always)),
            (json!(""), None),
            (json!("-"), None),
            (json!("5 m"), None),
            (json!("m"), None),
            (json!("5d"), None),
            (json!("1m5"), None),
            (json!(1e300), None),
            (json!(true), None),
            (json!(null), None),
        ];
        for (value, keep) in cases {
            assert_eq!(Keep::of_json(&value), keep, "{value}");
        }
    }
}
