//! Calls of tools as they are written: where in a text that is not whole yet the arguments of a call begin, and how far they go.

use super::Body;
use super::read::{Calls, Part, State};

/// A call whose arguments are on their way.
#[derive(Debug, Clone)]
pub(super) struct Begun {
    /// Bytes of the held text that were looked at.
    at: usize,
    /// Objects and lists that are open.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Whether the arguments' own object has ended.
    whole: bool,
}

impl Begun {
    fn new(at: usize) -> Begun {
        Begun { at, depth: 0, in_string: false, escaped: false, whole: false }
    }

    /// The bytes of arguments in a text up to its end, or up to theirs.
    fn advance<'a>(&mut self, text: &'a str) -> &'a str {
        let from = self.at;
        for byte in &text.as_bytes()[from..] {
            if self.whole {
                break;
            }
            self.at += 1;
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
        &text[from..self.at]
    }
}

impl Calls {
    /// Gives what has come of a call's arguments, and its beginning before that.
    pub(super) fn go_on(&mut self, parts: &mut Vec<Part>) {
        if !self.piecewise || self.state != State::Calls {
            return;
        }
        if self.begun.is_none() {
            let Some((name, at)) = self.beginning() else { return };
            if !self.tools.iter().any(|tool| tool.name == name) {
                return;
            }
            parts.push(Part::Begin(name));
            self.begun = Some(Begun::new(at));
        }
        let Some(begun) = &mut self.begun else { return };
        let more = begun.advance(&self.held);
        if !more.is_empty() {
            parts.push(Part::Arguments(more.to_string()));
        }
    }

    /// Ends a begun call that is broken or cut: what was given of it stays, and what follows is text.
    pub(super) fn cut(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(begun) = self.begun.take() else { return false };
        self.held.drain(..begun.at);
        self.gap.clear();
        self.after_call = true;
        parts.push(Part::End);
        true
    }

    /// The name of the call that the held text begins with, and where the object of its arguments begins.
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
            Body::Tagged { .. } | Body::Harmony => return None,
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
