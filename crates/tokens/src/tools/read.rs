//! Takes calls of tools out of an answer while it streams.

use serde_json::{Map, Value};

use super::pieces::{Begun, one_line_less};
use super::{Body, CallFormat, Tool, ToolCall};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text for the reader.
    Text(String),
    /// A call, whole.
    Call(ToolCall),
    /// The beginning of a call that comes piece by piece: the tool's name.
    Begin(String),
    /// More of the JSON text of the begun call's arguments.
    Arguments(String),
    /// The begun call has ended.
    End,
}

/// The mark that opens a call of Python, or any call, in Llama's form.
const PYTHON: &str = "<|python_tag|>";

/// Where in the answer the reader is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing but white space so far.
    Start,
    /// In text.
    Text,
    /// Behind what opened a call or a section of calls.
    Calls,
    /// In text that lasts to the end.
    Plain,
}

/// The reader of one answer.
#[derive(Debug, Clone)]
pub struct Calls {
    pub(super) format: &'static CallFormat,
    pub(super) tools: Vec<Tool>,
    pub(super) state: State,
    /// Text that is not decided yet.
    pub(super) held: String,
    /// White space in front of what opened calls.
    pub(super) gap: String,
    /// Whether a call came before: white space between calls is dropped.
    pub(super) after_call: bool,
    /// Whether calls are given as they are written.
    pub(super) piecewise: bool,
    /// The call that has begun.
    pub(super) begun: Option<Begun>,
}

/// The outcome of looking for something at the beginning of a text.
pub(super) enum Look<T> {
    /// It is there, with this many bytes.
    Found(T, usize),
    /// It may come to be there.
    More,
    /// Something else is there.
    Wrong,
}

impl Calls {
    /// Reads calls of these tools in this form.
    pub fn new(format: &'static CallFormat, tools: Vec<Tool>) -> Calls {
        let (held, gap) = (String::new(), String::new());
        let (after_call, piecewise, begun) = (false, false, None);
        Calls { format, tools, state: State::Start, held, gap, after_call, piecewise, begun }
    }

    /// The same, that gives the arguments of a call as they are written, where its form and the
    /// order of its fields allow it: the name of a tool that there is comes first, and then an
    /// object.
    #[must_use]
    pub fn piecewise(self) -> Calls {
        Calls { piecewise: true, ..self }
    }

    /// Takes the next piece of the answer; gives the parts that are now certain.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held += piece;
        let mut parts = Vec::new();
        // A call ends with one of these; to look at each letter of a long one would take quadratic
        // time.
        if self.state != State::Calls || piece.contains(['}', ']', '>', '<', '[', '{']) {
            while self.step(false, &mut parts) {}
        }
        self.go_on(&mut parts);
        parts
    }

    /// Ends the answer; gives what was held back. Of an answer that was `cut`, as by a limit of
    /// tokens, the beginning of a call that came to no arguments is no text, and is left out.
    pub fn finish(&mut self, cut: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        while self.step(true, &mut parts) {}
        self.go_on(&mut parts);
        if self.cut(&mut parts) {
            self.held.clear();
            return parts;
        }
        let rest = std::mem::take(&mut self.held);
        let opening = self.format.opening();
        let begun = self.state == State::Calls && !opening.is_empty();
        if self.after_call && !rest.is_empty() && (begun || opening.starts_with(rest.trim())) {
            // A further call that was cut: who reads the calls before it is told so by the reason
            // for which the answer ended.
            return parts;
        }
        if cut && self.is_beginning(&rest) {
            return parts;
        }
        if self.state == State::Calls && !blank(&rest) {
            text(&mut parts, std::mem::take(&mut self.gap));
        }
        let unread = self.state == State::Calls && !self.format.section.0.is_empty();
        let close = self.format.section.1.trim();
        if unread && !self.after_call {
            text(&mut parts, format!("{}{rest}", self.format.section.0.trim()));
        } else if !(unread && close.starts_with(rest.trim()) || self.after_call && blank(&rest)) {
            text(&mut parts, rest);
        }
        parts
    }

    /// Whether a text that was cut is the beginning of a call: behind a mark, at least half of one,
    /// or, in forms without marks, an object that begins as a call of a tool that there is.
    fn is_beginning(&self, rest: &str) -> bool {
        let opening = self.format.opening();
        if !opening.is_empty() {
            let rest = rest.trim();
            let half = rest.len() * 2 >= opening.len() && opening.starts_with(rest);
            return self.state == State::Calls || half;
        }
        let Body::Object { name, .. } = self.format.body else { return false };
        let written: String = rest.split_whitespace().collect();
        let key = format!("{{\"{name}\":\"");
        let begins = |tool: &Tool| {
            let called = format!("{key}{}\",\"", tool.name);
            written.starts_with(&called)
                || written.len() >= key.len() && called.starts_with(&written)
        };
        self.state == State::Calls && self.tools.iter().any(begins)
    }

    /// Goes on by one part or state; false when more text is needed.
    fn step(&mut self, last: bool, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Plain => {
                text(parts, std::mem::take(&mut self.held));
                false
            }
            State::Start | State::Text if self.format.opening().is_empty() => self.bare(),
            State::Start | State::Text => self.text(parts),
            State::Calls => self.call(last, parts),
        }
    }

    /// Where nothing opens calls: an answer that begins as one may be one.
    fn bare(&mut self) -> bool {
        let begin = self.held.trim_start();
        if begin.is_empty() || PYTHON.starts_with(begin) && begin.len() < PYTHON.len() {
            return false;
        }
        self.state = State::Plain;
        if let Some(rest) = begin.strip_prefix(PYTHON) {
            self.held = rest.to_string();
            self.state = State::Calls;
        } else if begin.starts_with('{') && self.format.body != Body::Harmony {
            self.state = State::Calls;
        }
        true
    }

    /// In text, up to what opens calls.
    fn text(&mut self, parts: &mut Vec<Part>) -> bool {
        let opening = self.format.opening();
        let found = self.held.find(opening);
        let certain = found.unwrap_or(self.held.len() - overlap(&self.held, opening));
        // White space in front of a call belongs to its layout.
        let shown = self.held[..certain].trim_end().len();
        let rest = self.held.split_off(shown);
        let mut shown = std::mem::replace(&mut self.held, rest);
        if self.after_call {
            shown = shown.trim_start().to_string();
        }
        if !shown.is_empty() {
            self.after_call = false;
            self.state = State::Text;
            text(parts, shown);
        }
        if found.is_none() {
            return false;
        }
        let begin = self.held.trim_start();
        if begin.len() < self.held.len() {
            self.gap = self.held[..self.held.len() - begin.len()].to_string();
            self.held = begin.to_string();
        }
        let section = self.format.section.0.trim();
        if !section.is_empty() {
            match mark(&self.held, section) {
                Look::Found((), used) => drop(self.held.drain(..used)),
                Look::More => return false,
                Look::Wrong => {
                    self.give_up(parts);
                    return true;
                }
            }
            self.after_call = false;
        }
        self.state = State::Calls;
        true
    }

    /// Decides that a mark which seemed to open a call is text.
    fn give_up(&mut self, parts: &mut Vec<Part>) {
        if self.cut(parts) {
            self.state = State::Text;
            return;
        }
        let opening = self.format.opening();
        let section = self.format.section.0.trim();
        self.state = State::Text;
        text(parts, std::mem::take(&mut self.gap));
        if self.format.opening().is_empty() {
            self.state = State::Plain;
        } else if self.held.starts_with(opening) {
            self.held.drain(..opening.len());
            text(parts, opening.to_string());
        } else if !section.is_empty() && !self.after_call {
            text(parts, section.to_string());
        }
    }

    /// Reads a call, or the end of all calls.
    fn call(&mut self, last: bool, parts: &mut Vec<Part>) -> bool {
        let CallFormat { section, call: (open, close), .. } = self.format;
        let separator = |c: char| c.is_whitespace() || c == ',' || c == ';';
        let begin = self.held.trim_start_matches(separator);
        let mut at = self.held.len() - begin.len();
        let end = section.1.trim();
        if !end.is_empty() {
            match mark(begin, end) {
                Look::Found((), used) => {
                    self.held.drain(..at + used);
                    self.state = State::Text;
                    return true;
                }
                Look::More if !last => return false,
                _ => {}
            }
        }
        if begin.is_empty() {
            return false;
        }
        match mark(begin, open.trim()) {
            Look::Found((), used) => at += used,
            Look::More if !last => return false,
            _ => {
                self.give_up(parts);
                return true;
            }
        }
        let (call, used) = match self.body(&self.held[at..]) {
            Look::Found(call, used) => (call, used),
            Look::More => return false,
            Look::Wrong => {
                self.give_up(parts);
                return true;
            }
        };
        at += used;
        match mark(&self.held[at..], close.trim()) {
            Look::Found((), used) => at += used,
            Look::More if !last => return false,
            // Models forget it, or are cut in it; the call is whole without it.
            Look::More => at = self.held.len(),
            Look::Wrong => {}
        }
        let known = self.tools.iter().any(|tool| tool.name == call.name);
        if self.format.opening().is_empty() && !known {
            // An object that looks like a call is one only of a tool that there is.
            self.state = State::Plain;
            return true;
        }
        self.go_on(parts);
        self.held.drain(..at);
        self.gap.clear();
        self.after_call = true;
        parts.push(if self.begun.take().is_some() { Part::End } else { Part::Call(call) });
        if section.0.is_empty() && !self.format.opening().is_empty() {
            self.state = State::Text;
        }
        true
    }

    /// The call at the beginning of a text.
    fn body(&self, text: &str) -> Look<ToolCall> {
        match self.format.body {
            Body::Object { name, arguments } => {
                let (value, used) = match object(text) {
                    Look::Found(value, used) => (value, used),
                    Look::More => return Look::More,
                    Look::Wrong => return Look::Wrong,
                };
                let Some(called) = value[name].as_str() else { return Look::Wrong };
                let keys = [arguments, "arguments", "parameters"];
                let found = keys.iter().map(|key| &value[*key]).find(|value| !value.is_null());
                let arguments = unwrapped(found.cloned().unwrap_or_default());
                Look::Found(ToolCall { name: called.to_string(), arguments }, used)
            }
            Body::Keyed => match object(text) {
                Look::Found(Value::Object(fields), used) if fields.len() == 1 => {
                    let Some((name, arguments)) = fields.into_iter().next() else {
                        return Look::Wrong;
                    };
                    Look::Found(ToolCall { name, arguments: unwrapped(arguments) }, used)
                }
                Look::More => Look::More,
                _ => Look::Wrong,
            },
            Body::Named { before, after, end } => named(text, before, after, end),
            Body::Tagged { name, argument, end } => {
                let end = if end.is_empty() { (self.format.call.1, false) } else { (end, true) };
                self.tagged(text, name, argument, end)
            }
            Body::Harmony => Look::Wrong,
        }
    }

    /// A call whose arguments each have marks. The end is part of it or of what follows.
    fn tagged(
        &self,
        text: &str,
        name: (&str, &str),
        argument: (&str, &str, &str),
        (end, own): (&str, bool),
    ) -> Look<ToolCall> {
        let mut at = match mark(text, name.0) {
            Look::Found((), used) => used,
            Look::More => return Look::More,
            Look::Wrong => return Look::Wrong,
        };
        let stop = match name.1.trim() {
            "" => text[at..].find(['\n', '<']),
            stop => text[at..].find(stop),
        };
        let Some(length) = stop else { return Look::More };
        let called = text[at..at + length].trim().to_string();
        at += length + name.1.trim().len();
        let tool = self.tools.iter().find(|tool| tool.name == called);
        let mut arguments = Map::new();
        loop {
            match mark(&text[at..], end.trim()) {
                Look::Found((), used) => {
                    let used = if own { at + used } else { at };
                    return Look::Found(
                        ToolCall { name: called, arguments: arguments.into() },
                        used,
                    );
                }
                Look::More => return Look::More,
                Look::Wrong => {}
            }
            match mark(&text[at..], argument.0) {
                Look::Found((), used) => at += used,
                Look::More => return Look::More,
                Look::Wrong => return Look::Wrong,
            }
            let (key_end, value_begin) = argument.1.split_once('\n').unwrap_or((argument.1, ""));
            let Some(length) = text[at..].find(key_end) else { return Look::More };
            let key = text[at..at + length].trim().to_string();
            at += length + key_end.len();
            if !value_begin.is_empty() {
                match mark(&text[at..], value_begin) {
                    Look::Found((), used) => at += used,
                    Look::More => return Look::More,
                    Look::Wrong => return Look::Wrong,
                }
            }
            let Some(length) = text[at..].find(argument.2.trim()) else { return Look::More };
            let value = one_line_less(&text[at..at + length]);
            let schema = tool.and_then(|tool| tool.argument(&key));
            arguments.insert(key, typed(value, schema));
            at += length + argument.2.trim().len();
        }
    }
}

impl CallFormat {
    /// The name of the tool that the header of a harmony message calls: `to=functions.NAME`.
    pub fn recipient(header: &str) -> Option<&str> {
        let (_, rest) = header.rsplit_once("to=functions.")?;
        let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
        (end > 0).then(|| &rest[..end])
    }
}

/// A name, and behind it arguments as JSON.
fn named(text: &str, before: &str, after: &[&str], end: &str) -> Look<ToolCall> {
    let mut at = match mark(text, before.trim()) {
        Look::Found((), used) => used,
        Look::More => return Look::More,
        Look::Wrong => return Look::Wrong,
    };
    let mut called = None;
    for stop in after {
        let Some(length) = text[at..].find(stop.trim()) else { return Look::More };
        called.get_or_insert_with(|| text[at..at + length].trim().to_string());
        at += length + stop.trim().len();
    }
    let (arguments, used) = match object(&text[at..]) {
        Look::Found(value, used) => (value, used),
        Look::More => return Look::More,
        Look::Wrong => return Look::Wrong,
    };
    at += used;
    match mark(&text[at..], end.trim()) {
        Look::Found((), used) => at += used,
        Look::More => return Look::More,
        Look::Wrong => return Look::Wrong,
    }
    Look::Found(ToolCall { name: called.unwrap_or_default(), arguments }, at)
}

/// A mark at the beginning of a text, behind white space.
pub(super) fn mark(text: &str, mark: &str) -> Look<()> {
    if mark.is_empty() {
        return Look::Found((), 0);
    }
    let begin = text.trim_start();
    let space = text.len() - begin.len();
    if begin.starts_with(mark) {
        Look::Found((), space + mark.len())
    } else if mark.starts_with(begin) {
        Look::More
    } else {
        Look::Wrong
    }
}

/// A JSON object at the beginning of a text, behind white space.
fn object(text: &str) -> Look<Value> {
    let begin = text.trim_start();
    if begin.is_empty() {
        return Look::More;
    }
    if !begin.starts_with('{') {
        return Look::Wrong;
    }
    let mut values = serde_json::Deserializer::from_str(begin).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => Look::Found(value, text.len() - begin.len() + values.byte_offset()),
        Some(Err(error)) if error.is_eof() => Look::More,
        _ => Look::Wrong,
    }
}

/// Arguments that some models write as JSON in a string; none are an empty object.
fn unwrapped(arguments: Value) -> Value {
    match arguments {
        Value::Null => Value::Object(Map::new()),
        Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        other => other,
    }
}

/// An argument's text as its schema says: text where that may be a string, else JSON.
pub(super) fn typed(text: &str, schema: Option<&Value>) -> Value {
    if is_text(schema) {
        return text.into();
    }
    serde_json::from_str(text.trim()).unwrap_or_else(|_| text.into())
}

/// Whether an argument may be a string.
pub(super) fn is_text(schema: Option<&Value>) -> bool {
    match schema.map(|schema| &schema["type"]) {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => false,
    }
}

fn text(parts: &mut Vec<Part>, more: String) {
    match parts.last_mut() {
        _ if more.is_empty() => {}
        Some(Part::Text(text)) => *text += &more,
        _ => parts.push(Part::Text(more)),
    }
}

fn blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// Bytes at the end of a text that a mark may begin with.
pub(super) fn overlap(text: &str, mark: &str) -> usize {
    let longest = text.len().min(mark.len().saturating_sub(1));
    (1..=longest).rev().find(|n| text.as_bytes().ends_with(&mark.as_bytes()[..*n])).unwrap_or(0)
}
