//! Python semantics that templates use beyond Jinja: `str` and `repr`, numbers and type tests.

use std::sync::Arc;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Output, Value};

use super::budget::{Budget, fits, invalid};

/// Deepest nesting that is printed.
pub(crate) const DEEPEST: usize = 128;

/// Bytes taken for each that is printed: what it is written to doubles when it is full, and is
/// copied.
const PRINTED: usize = 4;

/// Puts all of it into an environment.
pub(crate) fn install(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    // Whatever is captured has been printed, so that captures need not be counted.
    let own = Arc::clone(budget);
    environment.set_formatter(move |out, _, value| print(&own, out, value));
    for name in ["length", "count"] {
        let own = Arc::clone(budget);
        environment.add_filter(name, move |value: &Value| -> Result<usize, Error> {
            own.scan(value)?;
            length(value)
        });
    }
    for (name, convert) in [("int", int as fn(&Value, Option<Value>) -> Value), ("float", float)] {
        let own = Arc::clone(budget);
        environment.add_filter(
            name,
            move |value: &Value, default: Option<Value>| -> Result<Value, Error> {
                own.take(value.as_str().map_or(0, str::len))?;
                Ok(convert(value, default))
            },
        );
    }
    environment.add_function("raise_exception", |message: &Value| -> Result<String, Error> {
        Err(invalid(text(message)?))
    });
    // In Python a string and a mapping are sequences too, whatever can be looped over is iterable,
    // and True is 1.
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
        )
    });
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), String | Seq | Map | Iterable | Undefined)
    });
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
}

/// JSON as a template's value, keys in order.
pub(crate) fn value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(key, item)| (key.as_str(), value(item))))
        }
    }
}

/// `{{ value }}`.
fn print(budget: &Budget, out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    let made;
    let text = match value.as_str() {
        Some(text) => text,
        None => {
            made = text(value)?;
            &made
        }
    };
    budget.take(text.len().saturating_mul(PRINTED))?;
    out.write_str(text).map_err(|e| Error::new(ErrorKind::WriteFailure, e.to_string()))
}

/// Python's `str(value)`; nothing for an undefined value.
pub(crate) fn text(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => Ok(value.to_string()),
        _ => {
            let mut text = String::new();
            repr(value, 0, &mut text)?;
            Ok(text)
        }
    }
}

/// Python's `repr(value)`.
fn repr(value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(invalid("a value is nested too deeply to be printed"));
    }
    fits(text.len())?;
    match value.kind() {
        ValueKind::String => quote(value.as_str().unwrap_or_default(), text),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            text.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()?.checked() {
                if count > 0 {
                    text.push_str(", ");
                }
                repr(&item?, depth + 1, text)?;
                count += 1;
            }
            if tuple && count == 1 {
                text.push(',');
            }
            text.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            text.push('{');
            for (at, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                if at > 0 {
                    text.push_str(", ");
                }
                repr(&key, depth + 1, text)?;
                text.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, text)?;
            }
            text.push('}');
        }
        ValueKind::Undefined => text.push_str("Undefined"),
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string between single quotes, or double ones where it holds only single ones.
fn quote(string: &str, text: &mut String) {
    use std::fmt::Write;
    let mark = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(mark);
    for c in string.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == mark => text.extend(['\\', c]),
            c if (c.is_control() || c == '\u{ad}') && u32::from(c) < 0x100 => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\x{:02x}", u32::from(c));
            }
            '\u{2028}' | '\u{2029}' | '\u{200b}'..='\u{200f}' | '\u{feff}' => {
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push(mark);
}

/// A number as Python writes it: the shortest digits that read back, with an exponent from 1e16 and
/// below 1e-4.
pub(crate) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => {
            let digits = format!("{float:?}");
            match digits.split_once('e') {
                Some((mantissa, exponent)) => {
                    let exponent: i32 = exponent.parse().unwrap_or(0);
                    format!(
                        "{mantissa}e{}{:02}",
                        if exponent < 0 { '-' } else { '+' },
                        exponent.abs()
                    )
                }
                None => digits.replace("NaN", "nan"),
            }
        }
        _ => value.to_string(),
    }
}

/// `len(value)`; an undefined value has none.
fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::String | ValueKind::Seq | ValueKind::Map => {
            value.len().ok_or_else(|| invalid("a value without a length"))
        }
        ValueKind::Iterable => Ok(value.try_iter()?.count()),
        kind => Err(invalid(format!("a {kind} has no length"))),
    }
}

/// `value | int`: towards zero; the default, 0, for what is no number.
fn int(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => {
            let text = text.trim().replace('_', "");
            text.parse::<i64>()
                .ok()
                .map(Value::from)
                .or_else(|| text.parse::<f64>().ok().and_then(whole))
        }
        None if value.is_integer() => Some(value.clone()),
        None if value.kind() == ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok().and_then(whole),
    };
    parsed.or(default).unwrap_or_else(|| Value::from(0))
}

fn whole(float: f64) -> Option<Value> {
    // `as` saturates: beyond 64 bits a template has no business.
    float.is_finite().then(|| Value::from(float.trunc() as i64))
}

/// `value | float`; the default, 0.0, for what is no number.
fn float(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse::<f64>().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    parsed.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0))
}
