//! Calls of tools as they are written: where in a text that is not whole yet the arguments of a
//! call begin, and how far they go.

use super::read::{Calls, Look, Part, State, is_text, mark, overlap, typed};
use super::{Body, Tool};

/// A call whose arguments are on their way.
#[derive(Debug, Clone)]
pub(super) struct Begun {
    /// Bytes of the held text that were looked at.
    at: usize,
    written: Written,
}

/// How the arguments are written.
#[derive(Debug, Clone)]
enum Written {
    /// As one object, which is given as it stands.
    Object(Object),
    /// Each between marks of its own, which become fields of an object.
    Fields {
        /// The tool, which says what each is.
        tool: Tool,
        /// Whether there was one.
        any: bool,
        place: Place,
    },
}

/// Where in an object a text has come to.
#[derive(Debug, Clone, Default)]
struct Object {
    /// Objects and lists that are open.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Whether it has ended itself.
    whole: bool,
}

/// Where between the marks of arguments a text has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Behind an argument, or before the first.
    Between,
    /// Where a text begins, of which a line break is none.
    TextBegins,
    /// In a text.
    Text,
    /// Behind the last one.
    End,
}

/// The marks of arguments, and of their end.
#[derive(Clone, Copy)]
struct Marks {
    argument: (&'static str, &'static str, &'static str),
    end: &'static str,
    /// Whether the end mark belongs to the arguments rather than to the call.
    own: bool,
}

impl Object {
    /// Bytes of it in a text: all, or those up to its end.
    fn advance(&mut self, text: &str) -> usize {
        let mut used = 0;
        for byte in text.as_bytes() {
            if self.whole {
                break;
            }
            used += 1;
            match (self.in_string, byte) {
                (true, _) if self.escaped => self.escaped = false,
                (true, b'\\') => self.escaped = true,
                (true, b'"') => self.in_string = false,
                (false, b'"') => self.in_string = true,
                (false, b'{' | b'[') => self.depth += 1,
                (false, b'}' | b']') => {
                    self.depth = self.depth.saturating_sub(1);
                    self.whole = self.depth == 0;
                }
                _ => {}
            }
        }
        // It ends behind a whole text, or behind a bracket.
        used
    }
}

impl Begun {
    /// More of the arguments, as JSON.
    fn advance(&mut self, held: &str, marks: Option<Marks>) -> String {
        let (tool, any, place) = match (&mut self.written, marks) {
            (Written::Object(object), _) => {
                let text = &held[self.at..];
                let used = object.advance(text);
                self.at += used;
                return text[..used].to_string();
            }
            (Written::Fields { tool, any, place }, Some(_)) => (tool, any, place),
            (Written::Fields { .. }, None) => return String::new(),
        };
        let mut given = String::new();
        let Some(marks) = marks else { return given };
        while let Some((json, used, next)) = field(&held[self.at..], tool, *any, *place, marks) {
            given += &json;
            self.at += used;
            *any |= *place == Place::Between && next != Place::End;
            *place = next;
        }
        given
    }
}

/// The fields that a text adds to an object at a place, how many of its bytes they take, and the
/// place after them; `None` if more of the text is needed.
fn field(
    text: &str,
    tool: &Tool,
    any: bool,
    place: Place,
    marks: Marks,
) -> Option<(String, usize, Place)> {
    let stop = marks.argument.2.trim();
    match place {
        Place::Between => {
            match mark(text, marks.end.trim()) {
                Look::Found((), used) => {
                    let json = if any { "}" } else { "{}" };
                    return Some((json.to_string(), if marks.own { used } else { 0 }, Place::End));
                }
                Look::More => return None,
                Look::Wrong => {}
            }
            let found =
                |look: Look<()>| if let Look::Found((), used) = look { Some(used) } else { None };
            let mut at = found(mark(text, marks.argument.0))?;
            let (key_end, begin) =
                marks.argument.1.split_once('\n').unwrap_or((marks.argument.1, ""));
            let length = text[at..].find(key_end)?;
            let key = text[at..at + length].trim();
            at += length + key_end.len();
            at += found(mark(&text[at..], begin))?;
            let schema = tool.argument(key);
            let head = format!("{}{}:", if any { "," } else { "{" }, quoted(key));
            if is_text(schema) {
                return Some((head + "\"", at, Place::TextBegins));
            }
            let length = text[at..].find(stop)?;
            let value = typed(one_line_less(&text[at..at + length]), schema);
            Some((format!("{head}{value}"), at + length + stop.len(), Place::Between))
        }
        Place::TextBegins => {
            let first = text.chars().next()?;
            Some((String::new(), usize::from(first == '\n'), Place::Text))
        }
        Place::Text => match text.find(stop) {
            Some(length) => {
                let value = &text[..length];
                let rest = escaped(value.strip_suffix('\n').unwrap_or(value));
                Some((rest + "\"", length + stop.len(), Place::Between))
            }
            None => {
                // What may be the mark, and a line break before it.
                let certain = &text[..text.len() - overlap(text, stop)];
                let certain = certain.strip_suffix('\n').unwrap_or(certain);
                (!certain.is_empty()).then(|| (escaped(certain), certain.len(), Place::Text))
            }
        },
        Place::End => None,
    }
}

/// A value without the line breaks that set it apart from its marks.
pub(super) fn one_line_less(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// A text as JSON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A part of a text as it stands within JSON's quotation marks.
fn escaped(text: &str) -> String {
    let quoted = quoted(text);
    quoted[1..quoted.len() - 1].to_string()
}

impl Calls {
    /// Gives what has come of a call's arguments, and its beginning before that.
    pub(super) fn go_on(&mut self, parts: &mut Vec<Part>) {
        if !self.piecewise || self.state != State::Calls {
            return;
        }
        if self.begun.is_none() {
            let Some((name, at)) = self.beginning() else { return };
            let Some(tool) = self.tools.iter().find(|tool| tool.name == name) else { return };
            let written = match self.format.body {
                Body::Tagged { .. } => {
                    Written::Fields { tool: tool.clone(), any: false, place: Place::Between }
                }
                _ => Written::Object(Object::default()),
            };
            parts.push(Part::Begin(name));
            self.begun = Some(Begun { at, written });
        }
        let marks = self.marks();
        let Some(begun) = &mut self.begun else { return };
        let more = begun.advance(&self.held, marks);
        if !more.is_empty() {
            parts.push(Part::Arguments(more));
        }
    }

    /// The marks of arguments that have some.
    fn marks(&self) -> Option<Marks> {
        let Body::Tagged { argument, end, .. } = self.format.body else { return None };
        let own = !end.is_empty();
        Some(Marks { argument, end: if own { end } else { self.format.call.1 }, own })
    }

    /// Ends a begun call that is broken or cut: what was given of it stays, and what follows is
    /// text.
    pub(super) fn cut(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(begun) = self.begun.take() else { return false };
        self.held.drain(..begun.at);
        self.gap.clear();
        self.after_call = true;
        parts.push(Part::End);
        true
    }

    /// The name of the call that the held text begins with, and where its arguments begin.
    fn beginning(&self) -> Option<(String, usize)> {
        let separator = |c: char| c.is_whitespace() || c == ',' || c == ';';
        let mut rest = self.held.trim_start_matches(separator);
        rest = rest.strip_prefix(self.format.call.0.trim())?.trim_start();
        let name = match self.format.body {
            Body::Named { before, after, .. } => {
                rest = rest.strip_prefix(before.trim())?;
                let mut name = None;
                for stop in after {
                    let (found, behind) = rest.split_once(stop.trim())?;
                    name.get_or_insert(found.trim());
                    rest = behind;
                }
                name?.to_string()
            }
            Body::Object { name, arguments } => {
                let (key, behind) = string(rest.strip_prefix('{')?)?;
                let (called, behind) = string(behind.trim_start().strip_prefix(':')?)?;
                let (second, behind) = string(behind.trim_start().strip_prefix(',')?)?;
                let known = second == arguments || second == "arguments" || second == "parameters";
                rest = behind.trim_start().strip_prefix(':')?;
                (key == name && known).then_some(called)?
            }
            Body::Keyed => {
                let (called, behind) = string(rest.strip_prefix('{')?)?;
                rest = behind.trim_start().strip_prefix(':')?;
                called
            }
            Body::Tagged { name: (before, after), .. } => {
                rest = rest.strip_prefix(before.trim())?;
                let length = match after.trim() {
                    "" => rest.find(['\n', '<']),
                    after => rest.find(after),
                }?;
                let behind = &rest[length + after.trim().len()..];
                return Some((rest[..length].trim().to_string(), self.held.len() - behind.len()));
            }
            Body::Harmony => return None,
        };
        let rest = rest.trim_start();
        rest.starts_with('{').then(|| (name, self.held.len() - rest.len()))
    }
}

/// The JSON string that a text begins with, and what is behind it.
fn string(text: &str) -> Option<(String, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<String>();
    let value = values.next()?.ok()?;
    Some((value, &text[values.byte_offset()..]))
}
