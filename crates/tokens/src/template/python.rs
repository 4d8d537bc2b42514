//! What templates take from Python beyond Jinja: JSON as `json.dumps` writes it, `repr`, methods and type tests.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

/// Deepest nesting that is printed.
const DEEPEST: usize = 128;

/// Puts all of it into an environment.
pub(crate) fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(print);
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| text(value));
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter(
        "trim",
        |value: &Value, characters: Option<&str>| -> Result<String, Error> {
            let text = text(value)?;
            Ok(match characters {
                None => text.trim().to_string(),
                Some(characters) => text.trim_matches(|c| characters.contains(c)).to_string(),
            })
        },
    );
    environment.add_filter("join", join);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter(super::rewrite::EACH, |value: Value| match value.is_none() {
        true => Err(invalid("none cannot be looped over")),
        false => Ok(value),
    });
    environment.add_function("raise_exception", |message: &Value| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
    });
    // In Python a string and a mapping are sequences too, whatever can be looped over is iterable, and True is 1.
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

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// `{{ value }}`.
fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text(value)?),
    };
    written.map_err(|e| Error::new(ErrorKind::WriteFailure, e.to_string()))
}

/// Python's `str(value)`; nothing for an undefined value.
fn text(value: &Value) -> Result<String, Error> {
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

/// A number as Python writes it: the shortest digits that read back, with an exponent from 1e16 and below 1e-4.
fn number(value: &Value) -> String {
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

fn join(value: &Value, separator: Option<&str>, options: Kwargs) -> Result<String, Error> {
    let attribute: Option<Value> = options.get("attribute")?;
    let separator = match separator {
        Some(separator) => separator.to_string(),
        None => options.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    options.assert_all_used()?;
    let mut joined = String::new();
    for (at, item) in value.try_iter()?.checked().enumerate() {
        let item = item?;
        if at > 0 {
            joined.push_str(&separator);
        }
        joined.push_str(&match &attribute {
            Some(attribute) => text(&item.get_item(attribute)?)?,
            None => text(&item)?,
        });
    }
    Ok(joined)
}

/// How JSON is written.
struct Json {
    ascii: bool,
    indent: Option<String>,
    comma: String,
    colon: String,
    sort: bool,
}

/// `json.dumps` with Transformers' defaults: not escaped for HTML, not reduced to ASCII, keys in order.
fn tojson(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<String, Error> {
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
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(text)
}

impl Json {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(invalid("a value is nested too deeply to be written as JSON"));
        }
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

/// Methods of Python's types that MiniJinja's own collection lacks or takes differently.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if name == super::rewrite::SLICE {
        return slice(value, arguments);
    }
    if let Some(string) = value.as_str()
        && let Some(result) = string_method(string, name, arguments)?
    {
        return Ok(result);
    }
    match (value.kind(), name) {
        (ValueKind::Map | ValueKind::Seq, "copy") if arguments.is_empty() => {
            return Ok(value.clone());
        }
        (ValueKind::Seq, "index") => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            return at.map(Value::from).ok_or_else(|| invalid("the value is not in the list"));
        }
        _ => {}
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

/// `value[start:stop:step]`.
fn slice(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (start, stop, step): (Option<i64>, Option<i64>, Option<i64>) = from_args(arguments)?;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("a slice's step must not be zero"));
    }
    if let Some(string) = value.as_str() {
        let characters: Vec<char> = string.chars().collect();
        return Ok(Value::from(
            places(characters.len(), start, stop, step)
                .map(|at| characters[at])
                .collect::<String>(),
        ));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
            Ok(places(items.len(), start, stop, step).map(|at| items[at].clone()).collect())
        }
        kind => Err(invalid(format!("a {kind} cannot be sliced"))),
    }
}

/// The places that a slice takes of so many, in its order.
fn places(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    // Python's rule: a negative place counts from the end; then it is clamped to what the direction can reach.
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |at: i64| if at < 0 { at.saturating_add(length) } else { at }.clamp(low, high);
    let start = start.map_or(if step > 0 { low } else { high }, place);
    let stop = stop.map_or(if step > 0 { high } else { low }, place);
    std::iter::successors(Some(start), move |at| at.checked_add(step))
        .take_while(move |at| if step > 0 { *at < stop } else { *at > stop })
        .filter_map(|at| usize::try_from(at).ok())
}

fn string_method(string: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "split" | "rsplit" => {
            let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) =
                from_args(arguments)?;
            let separator = match separator {
                Some(separator) => Some(separator),
                None => options.get::<Option<Value>>("sep")?,
            };
            let most = match most {
                Some(most) => Some(most),
                None => options.get::<Option<i64>>("maxsplit")?,
            };
            options.assert_all_used()?;
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            let separator = separator.filter(|separator| !separator.is_none());
            match &separator {
                None => strings(split_space(string, most, name == "rsplit")),
                Some(separator) => {
                    let separator = separator.as_str().filter(|separator| !separator.is_empty());
                    let separator = separator
                        .ok_or_else(|| invalid("a separator must be a string that is not empty"))?;
                    let parts = most.saturating_add(1);
                    strings(match name {
                        "split" => string.splitn(parts, separator).collect::<Vec<&str>>(),
                        _ => {
                            let mut parts: Vec<&str> = string.rsplitn(parts, separator).collect();
                            parts.reverse();
                            parts
                        }
                    })
                }
            }
        }
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(arguments)?;
            let rest = if name == "removeprefix" {
                string.strip_prefix(part)
            } else {
                string.strip_suffix(part)
            };
            Value::from(rest.unwrap_or(string))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let first = name == "partition";
            let found =
                if first { string.split_once(separator) } else { string.rsplit_once(separator) };
            let parts = match found {
                Some((left, right)) => [left, separator, right],
                None if first => [string, "", ""],
                None => ["", "", string],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "index" | "rindex" => {
            let (wanted,): (&str,) = from_args(arguments)?;
            let at = if name == "index" { string.find(wanted) } else { string.rfind(wanted) };
            let at = at.ok_or_else(|| invalid("substring not found"))?;
            Value::from(string[..at].chars().count())
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(arguments)?;
            Value::from(pad(string, name, width.min(1 << 16), fill.unwrap_or(" ")))
        }
        "casefold" => Value::from(string.to_lowercase()),
        _ => return Ok(None),
    }))
}

fn strings(parts: Vec<&str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

/// `split` at runs of white space, at most so many times, from the right if asked.
fn split_space(string: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let trim = |text| if from_right { str::trim_end(text) } else { str::trim_start(text) };
    let mut rest = trim(string);
    while !rest.is_empty() {
        let at = if from_right {
            rest.rfind(char::is_whitespace)
        } else {
            rest.find(char::is_whitespace)
        };
        let Some(at) = at.filter(|_| parts.len() < most) else {
            parts.push(rest);
            break;
        };
        let (left, right) = rest.split_at(at);
        parts.push(if from_right { right.trim_start() } else { left });
        rest = trim(if from_right { left } else { right });
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn pad(string: &str, name: &str, width: usize, fill: &str) -> String {
    let missing = width.saturating_sub(string.chars().count());
    let zeros = "0".repeat(missing);
    match name {
        "zfill" => match string.strip_prefix(['-', '+']) {
            Some(digits) => format!("{}{zeros}{digits}", &string[..1]),
            None => zeros + string,
        },
        "ljust" => string.to_string() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + string,
        // Python puts the odd one on the left where the width is odd.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            fill.repeat(left) + string + &fill.repeat(missing - left)
        }
    }
}
