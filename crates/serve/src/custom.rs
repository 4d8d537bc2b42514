//! OpenAI's custom tools, whose input is a text and no JSON. No family of models has a form for
//! such calls that its template knows, so a model hears of a function with one argument, a string
//! named `input`; what it writes there is taken out of the call again.

use delft::structured::Grammar;
use serde_json::{Map, Value, json};

use crate::fields::{Field, Fields, Variant, no_effect, shown, used, variant, wrong};
use crate::problem::Problem;
use crate::reply::{Called, Piece};

/// A custom tool of a chat; those of responses are flat.
pub(crate) const TOOL: &[Field] = &[used("name"), used("description"), used("format")];

/// The call of one, in a chat's message.
pub(crate) const CALLED: &[Field] = &[used("name"), used("input"), no_effect("index")];

/// The forms of an input in chats.
pub(crate) const CHAT_FORMATS: &[Variant] =
    &[variant("text", &[used("type")]), variant("grammar", &[used("type"), used("grammar")])];

/// The grammar of such a form.
pub(crate) const GRAMMAR: &[Field] = &[used("definition"), used("syntax")];

/// The forms of an input in responses.
pub(crate) const FORMATS: &[Variant] = &[
    variant("text", &[used("type")]),
    variant("grammar", &[used("type"), used("definition"), used("syntax")]),
];

/// The argument that holds a call's input.
pub(crate) const INPUT: &str = "input";

/// The arguments of a call with this input.
pub(crate) fn arguments(input: &str) -> Value {
    json!({ INPUT: input })
}

/// The schema of the arguments of a custom tool, as the model is shown it, and the grammar of its
/// text, if it has one.
///
/// # Errors
/// A format of another form.
pub(crate) fn parameters(
    fields: &Fields,
    place: &str,
    format: &Value,
    formats: &[Variant],
) -> Result<(Map<String, Value>, Option<Grammar>), Problem> {
    let mut input = json!({ "type": "string" });
    let mut grammar = None;
    let kind = match format {
        Value::Null => "text",
        format => fields.variant(place, format, "a format", &[formats], None)?,
    };
    if kind == "grammar" {
        let inner = format!("{place}.grammar");
        let (place, of) = match format.get("grammar") {
            Some(of) => (inner.as_str(), of),
            None => (place, format),
        };
        if of.get("type").is_none() {
            fields.allow(place, of, &[GRAMMAR])?;
        }
        let text = |name: &str| {
            let missing = || wrong(&format!("{place}.{name}"), "a string", &of[name]);
            of[name].as_str().ok_or_else(missing)
        };
        let definition = text("definition")?;
        grammar = match text("syntax")? {
            "regex" => {
                let expression = anchored(definition);
                input["pattern"] = expression.clone().into();
                Some(Grammar::Regex(expression))
            }
            "lark" => {
                input["description"] =
                    format!("a text of this grammar, in Lark's syntax:\n{definition}").into();
                Some(Grammar::Lark(definition.to_string()))
            }
            other => {
                let message = format!("expected regex or lark, found {}", shown(other));
                return Err(Problem::field(&format!("{place}.syntax"), message));
            }
        };
    }
    let schema = json!({ "type": "object", "properties": { INPUT: input }, "required": [INPUT],
        "additionalProperties": false });
    let Value::Object(schema) = schema else { return Ok((Map::new(), None)) };
    Ok((schema, grammar))
}

/// An expression that a whole text must match.
fn anchored(expression: &str) -> String {
    let inner = expression.strip_prefix('^').unwrap_or(expression);
    let inner = match inner.strip_suffix('$') {
        Some(rest) if (rest.len() - rest.trim_end_matches('\\').len()).is_multiple_of(2) => rest,
        _ => inner,
    };
    format!("^(?:{inner})$")
}

/// Takes the inputs of calls out of their arguments.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    /// The custom tools.
    names: Vec<String>,
    /// The input of the call that is open.
    open: Option<Input>,
}

impl Inputs {
    pub(crate) fn of(names: Vec<String>) -> Inputs {
        Inputs { names, open: None }
    }

    /// The same pieces, in which calls of custom tools have their inputs for arguments. A call
    /// that is cut has no end.
    pub(crate) fn take(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        if self.names.is_empty() {
            return pieces;
        }
        let mut taken = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match (piece, &mut self.open) {
                (Piece::Call(call), _) if self.names.contains(&call.name) => {
                    let mut input = Input::default();
                    let mut text = input.push(&call.arguments_text());
                    let (rest, ended) = input.finish();
                    text += &rest;
                    let call = Called { arguments: text.into(), custom: true, ended, ..call };
                    taken.push(Piece::Call(call));
                }
                (Piece::Begin(call), _) if self.names.contains(&call.name) => {
                    self.open = Some(Input::default());
                    taken.push(Piece::Begin(Called { custom: true, ..call }));
                }
                (Piece::Arguments(text), Some(input)) => taken.extend(arrived(input.push(&text))),
                (Piece::End, Some(input)) => {
                    let (rest, ended) = input.finish();
                    taken.extend(arrived(rest));
                    taken.extend(ended.then_some(Piece::End));
                    self.open = None;
                }
                (piece, open) => {
                    if matches!(piece, Piece::Begin(_)) {
                        *open = None;
                    }
                    taken.push(piece);
                }
            }
        }
        taken
    }
}

fn arrived(text: String) -> Option<Piece> {
    (!text.is_empty()).then_some(Piece::Arguments(text))
}

/// The input of a call, out of the JSON text of its arguments as it comes.
#[derive(Debug, Default)]
struct Input {
    /// What cannot be read yet.
    held: String,
    state: State,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the string.
    #[default]
    Before,
    /// Within it.
    Within,
    /// Behind it.
    Behind,
    /// The arguments are others than were asked for: they are given as they are.
    Other,
}

impl Input {
    fn push(&mut self, text: &str) -> String {
        if self.state == State::Behind {
            return String::new();
        }
        self.held += text;
        if self.state == State::Before {
            match opened(&self.held) {
                Opened::Not => self.state = State::Other,
                Opened::Unknown => return String::new(),
                Opened::At(begin) => {
                    self.held.drain(..begin);
                    self.state = State::Within;
                }
            }
        }
        if self.state == State::Other {
            return std::mem::take(&mut self.held);
        }
        let (text, read, closed) = unescaped(&self.held);
        self.held.drain(..read);
        if closed {
            self.state = State::Behind;
            self.held.clear();
        }
        text
    }

    /// The rest of the text, and whether it is whole.
    fn finish(&mut self) -> (String, bool) {
        match self.state {
            State::Before if matches!(self.held.trim(), "" | "{}") => (String::new(), true),
            State::Before | State::Within => (String::new(), false),
            State::Behind | State::Other => (String::new(), true),
        }
    }
}

/// Where the input begins within arguments.
enum Opened {
    /// Not known yet.
    Unknown,
    At(usize),
    /// They have no input.
    Not,
}

fn opened(text: &str) -> Opened {
    let mut rest = text;
    for expected in ["{", "\"input\"", ":", "\""] {
        rest = rest.trim_start();
        match rest.strip_prefix(expected) {
            Some(behind) => rest = behind,
            None if expected.starts_with(rest) => return Opened::Unknown,
            None if expected == "\"input\"" && "}".starts_with(rest.trim_end()) => {
                return Opened::Unknown;
            }
            None => return Opened::Not,
        }
    }
    Opened::At(text.len() - rest.len())
}

/// The characters of a JSON string's inside as far as they are known, the bytes they took, and
/// whether the string ends with them. Halves of a pair that stand alone become U+FFFD.
fn unescaped(text: &str) -> (String, usize, bool) {
    let (mut all, mut at) = (String::new(), 0);
    while let Some(c) = text[at..].chars().next() {
        let escape = &text[at..];
        match c {
            '"' => return (all, at + 1, true),
            '\\' => {
                let Some(kind) = escape[1..].chars().next() else { break };
                at += match kind {
                    'u' => {
                        let Some((one, read)) = escaped(escape) else { break };
                        all.push(one);
                        read
                    }
                    other => {
                        all.push(match other {
                            'n' => '\n',
                            't' => '\t',
                            'r' => '\r',
                            'b' => '\u{8}',
                            'f' => '\u{c}',
                            other => other,
                        });
                        1 + other.len_utf8()
                    }
                };
            }
            other => {
                all.push(other);
                at += other.len_utf8();
            }
        }
    }
    (all, at, false)
}

/// The character of an escape by its number, and the bytes it takes; none if more must come.
fn escaped(text: &str) -> Option<(char, usize)> {
    const UNKNOWN: char = char::REPLACEMENT_CHARACTER;
    let unit = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits).ok();
        digits.and_then(|digits| u16::from_str_radix(digits, 16).ok())
    };
    let text = text.as_bytes();
    let Some(first) = unit(text.get(2..6)?) else { return Some((UNKNOWN, 2)) };
    if !(0xD800..0xDC00).contains(&first) {
        return Some((char::from_u32(u32::from(first)).unwrap_or(UNKNOWN), 6));
    }
    // The second half of a pair, if it is one.
    let behind = &text[6..];
    if behind.len() < 6 && b"\\u".starts_with(&behind[..behind.len().min(2)]) {
        return None;
    }
    let second = behind.strip_prefix(b"\\u").and_then(|digits| unit(&digits[..4]));
    let pair = second.and_then(|second| char::decode_utf16([first, second]).next()?.ok());
    Some(pair.map_or((UNKNOWN, 6), |pair| (pair, 12)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An input out of arguments that come whole, by letters and by threes.
    fn read(arguments: &str) -> (String, bool) {
        let letters: Vec<char> = arguments.chars().collect();
        let read = |size: usize| {
            let mut input = Input::default();
            let parts = letters.chunks(size).map(|part| part.iter().collect::<String>());
            let mut text: String = parts.map(|part| input.push(&part)).collect();
            let (rest, ended) = input.finish();
            text += &rest;
            (text, ended)
        };
        let whole = read(letters.len().max(1));
        for size in [1, 3] {
            assert_eq!(read(size), whole, "{arguments}");
        }
        whole
    }

    #[test]
    fn inputs_are_taken_out_of_arguments() {
        for text in
            ["", "ls -l\n", "a \"b\" \\ \t\u{8}\u{c}\r/", "\u{1f600}é\u{0}", "}{", "\\u0041"]
        {
            let plain = arguments(text).to_string();
            assert_eq!(read(&plain), (text.to_string(), true));
            let escapes: String =
                text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            let spaced = format!(" {{ \"input\" :\n \"{escapes}\" }} ");
            assert_eq!(read(&spaced), (text.to_string(), true));
            let cut = plain.strip_suffix("\"}").unwrap();
            assert!(!read(cut).1, "{cut}");
        }
        for other in [r#"{"text": "x"}"#, "[1]", "\"input\"", r#"{"input": 5}"#, "ls"] {
            assert_eq!(read(other), (other.to_string(), true));
        }
        assert_eq!(read("{}"), (String::new(), true));
        assert_eq!(read(r#"{"inp"#), (String::new(), false));
        assert_eq!(
            read(r#"{"input": "a\ud83d b\ude00\uzzzzc"}"#).0,
            "a\u{fffd} b\u{fffd}\u{fffd}zzzzc"
        );
        assert_eq!(read(r#"{"input": "ab\ud83d\u"#), ("ab".to_string(), false));
    }

    #[test]
    fn expressions_are_of_the_whole_text() {
        let cases =
            [("a|b", "a|b"), ("^a|b$", "a|b"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("", "")];
        for (given, inner) in cases {
            assert_eq!(anchored(given), format!("^(?:{inner})$"));
        }
    }
}
