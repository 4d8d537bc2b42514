//! `tojson`: JSON as Python's `json.dumps` writes it with Transformers' defaults.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, Value};

use super::budget::{fits, invalid};
use super::python::{DEEPEST, number};

/// Longest indentation and separators, in bytes: they are written again and again.
const LONGEST_MARK: usize = 64;

/// How JSON is written.
struct Json {
    ascii: bool,
    indent: Option<String>,
    comma: String,
    colon: String,
    sort: bool,
}

/// `json.dumps` with Transformers' defaults: not escaped for HTML, not reduced to ASCII, keys in
/// order.
pub(crate) fn tojson(
    value: &Value,
    arguments: Rest<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    // In the order of Transformers' own filter: ensure_ascii, indent, separators, sort_keys.
    let option = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        Ok(match arguments.get(at) {
            Some(value) => Some(value.clone()),
            None => options.get::<Option<Value>>(name)?,
        }
        .filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let indent = option(1, "indent")?;
    let indent = match &indent {
        None => None,
        Some(value) => match value.as_str() {
            Some(text) => Some(text.to_string()),
            None => {
                let width = i64::try_from(value.clone())
                    .map_err(|_| invalid("indent must be a number or a string"))?;
                Some(" ".repeat(usize::try_from(width.clamp(0, 64)).unwrap_or(0)))
            }
        },
    };
    let (mut comma, mut colon) =
        (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string());
    if let Some(pair) = option(2, "separators")? {
        let parts: Vec<Value> = pair.try_iter()?.collect();
        let [first, second] = parts.as_slice() else {
            return Err(invalid("separators must be two strings"));
        };
        (comma, colon) = (first.to_string(), second.to_string());
    }
    let style = Json {
        ascii: option(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        sort: option(3, "sort_keys")?.is_some_and(|value| value.is_true()),
        indent,
        comma,
        colon,
    };
    options.assert_all_used()?;
    let marks = [style.indent.as_deref().unwrap_or_default(), &style.comma, &style.colon];
    if marks.iter().any(|mark| mark.len() > LONGEST_MARK) {
        let what = format!("indent and separators must have at most {LONGEST_MARK} bytes");
        return Err(invalid(what));
    }
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(text)
}

impl Json {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(invalid("a value is nested too deeply to be written as JSON"));
        }
        fits(text.len())?;
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&json_number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq => {
                text.push('[');
                let mut count = 0;
                for item in value.try_iter()?.checked() {
                    self.between(count, depth + 1, text);
                    self.write(&item?, depth + 1, text)?;
                    count += 1;
                }
                self.end(count, depth, text);
                text.push(']');
            }
            ValueKind::Map => {
                let mut keys =
                    value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
                if self.sort {
                    keys.sort();
                }
                text.push('{');
                for (at, key) in keys.iter().enumerate() {
                    self.between(at, depth + 1, text);
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default(), text),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            text.push('"');
                            self.write(key, depth + 1, text)?;
                            text.push('"');
                        }
                        kind => return Err(invalid(format!("a {kind} cannot be a key of JSON"))),
                    }
                    text.push_str(&self.colon);
                    self.write(&value.get_item(key)?, depth + 1, text)?;
                }
                self.end(keys.len(), depth, text);
                text.push('}');
            }
            kind => {
                return Err(invalid(format!("a value of kind {kind} cannot be written as JSON")));
            }
        }
        Ok(())
    }

    fn between(&self, at: usize, depth: usize, text: &mut String) {
        if at > 0 {
            text.push_str(&self.comma);
        }
        self.line(depth, text);
    }

    fn end(&self, count: usize, depth: usize, text: &mut String) {
        if count > 0 {
            self.line(depth, text);
        }
    }

    fn line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            (0..depth).for_each(|_| text.push_str(indent));
        }
    }

    fn string(&self, string: &str, text: &mut String) {
        use std::fmt::Write;
        text.push('"');
        for c in string.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(text, "\\u{unit:04x}");
                    }
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

fn json_number(value: &Value) -> String {
    match number(value).as_str() {
        "nan" => "NaN".to_string(),
        "inf" => "Infinity".to_string(),
        "-inf" => "-Infinity".to_string(),
        digits => digits.to_string(),
    }
}
