//! Patterns as JavaScript has them (ECMA-262, which JSON Schema names) in the syntax of
//! llguidance's regular expressions, Rust's: what differs is written so that it means the same
//! there.

use regex_syntax::hir::{Class, ClassUnicode, HirKind};
use serde_json::{Value, json};

use super::{Object, also};
use crate::language::{Automaton, Budget, Kind, class_length, escape_length, without_looks};

/// Patterns of properties that are made such as do not meet, and most of these.
const MOST_NAMED: usize = 8;
const MOST_REGIONS: usize = 24;

/// Puts a schema's `pattern`, and the patterns of its properties, into the other syntax.
pub(super) fn translated(fields: &mut Object, budget: &Budget) {
    if let Some(Value::String(pattern)) = fields.get("pattern") {
        let mut all = plain(pattern, budget).into_iter();
        fields.insert("pattern".to_string(), all.next().unwrap_or_default().into());
        all.for_each(|more| also(fields, json!({ "pattern": more })));
    }
    if let Some(Value::Object(named)) = fields.get_mut("patternProperties") {
        *named = std::mem::take(named)
            .into_iter()
            .map(|(name, part)| (single(&name, budget), part))
            .collect();
    }
}

/// Writes the patterns of properties that may meet as ones that do not, each with the schemas of all
/// that it was a part of. llguidance takes no others.
pub(super) fn apart(fields: &mut Object, budget: &Budget) {
    let Some(Value::Object(named)) = fields.get("patternProperties") else { return };
    if !(2..=MOST_NAMED).contains(&named.len()) {
        return;
    }
    let automata: Option<Vec<_>> =
        named.iter().map(|(name, part)| Some((automaton(name, budget)?, part))).collect();
    if let Some(regions) = automata.and_then(|automata| regions(&automata, budget)) {
        fields.insert("patternProperties".to_string(), Value::Object(regions));
    }
}

fn regions(automata: &[(Automaton, &Value)], budget: &Budget) -> Option<Object> {
    let mut regions: Vec<(Automaton, Vec<Value>)> = Vec::new();
    let mut meet = false;
    for (names, part) in automata {
        let others = names.clone().complement();
        let mut own = names.clone();
        let mut finer = Vec::new();
        for (region, parts) in regions {
            let both = region.and(names, budget)?;
            if both.is_empty() {
                finer.push((region, parts));
                continue;
            }
            meet = true;
            own = own.and(&region.clone().complement(), budget)?;
            finer.push((region.and(&others, budget)?, parts.clone()));
            finer.push((both, [parts, vec![(*part).clone()]].concat()));
        }
        finer.push((own, vec![(*part).clone()]));
        finer.retain(|(region, _)| !region.is_empty());
        regions = finer;
        if regions.len() > MOST_REGIONS {
            return None;
        }
    }
    let written = |(region, mut parts): (Automaton, Vec<Value>)| {
        let part = if parts.len() == 1 { parts.remove(0) } else { json!({ "allOf": parts }) };
        Some((region.written(budget)?, part))
    };
    meet.then(|| regions.into_iter().map(written).collect())?
}

/// Has llguidance take all patterns of a schema and its parts for what they are.
pub(super) fn quoted(schema: &mut Value) {
    if let Value::Object(fields) = schema {
        if let Some(Value::String(pattern)) = fields.get_mut("pattern") {
            *pattern = quotable(pattern);
        }
        if let Some(Value::Object(named)) = fields.get_mut("patternProperties") {
            *named = std::mem::take(named)
                .into_iter()
                .map(|(name, part)| (quotable(&name), part))
                .collect();
        }
    }
    for part in super::parts(schema) {
        if let Some(part) = schema.pointer_mut(&part) {
            quoted(part);
        }
    }
}

/// Patterns without looks in the other syntax, all of which a text must match; one that has no such
/// form stays.
pub(super) fn plain(pattern: &str, budget: &Budget) -> Vec<String> {
    let pattern = rust(pattern);
    // The end of a text, as some write it.
    let pattern = match pattern.strip_suffix("(?![\\s\\S])") {
        Some(before) => format!("{before}$"),
        None => pattern,
    };
    without_looks(&pattern, Kind::Search, budget).unwrap_or(vec![pattern])
}

/// A pattern in Rust's syntax whose classes can be escaped as JSON escapes them. llguidance takes a
/// class with all control characters for one that has quotes and backslashes as well, so that one
/// without these loses the first of those.
fn quotable(pattern: &str) -> String {
    let mut out = String::new();
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '[' => class_length(rest),
            '\\' => escape_length(rest),
            _ => None,
        };
        let length = length.unwrap_or(c.len_utf8());
        let (part, more) = rest.split_at(length);
        let own = llguidance::regex_to_lark(part, "dw");
        let parsed = if part.len() > 1 { regex_syntax::parse(&own).ok() } else { None };
        match parsed.as_ref().map(|parsed| parsed.kind()) {
            Some(HirKind::Class(Class::Unicode(class))) if is_taken_for_all(class) => {
                out.push_str(&format!("[{part}&&[^\\x00]]"));
            }
            _ => out.push_str(part),
        }
        rest = more;
    }
    out
}

fn is_taken_for_all(class: &ClassUnicode) -> bool {
    let has =
        |c: char| class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&c));
    let controls = ('\0'..' ').filter(|c| *c != '\n').all(has);
    controls && !(has('"') && has('\\'))
}

/// The same as one pattern.
fn single(pattern: &str, budget: &Budget) -> String {
    let mut all = plain(pattern, budget);
    if all.len() == 1 {
        return all.remove(0);
    }
    let whole = automaton(pattern, budget).and_then(|texts| texts.written(budget));
    whole.unwrap_or_else(|| rust(pattern))
}

/// The texts that match a pattern.
pub(super) fn automaton(pattern: &str, budget: &Budget) -> Option<Automaton> {
    Automaton::of(&rust(pattern), budget)
}

fn escaped(c: char) -> String {
    if "\\^$.|?*+()[]{}-&~#/".contains(c) { format!("\\{c}") } else { c.to_string() }
}

/// A pattern in Rust's syntax.
fn rust(pattern: &str) -> String {
    let mut out = String::new();
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        let (written, length) = match c {
            '\\' => escape(rest),
            '[' => match class(rest) {
                Some(found) => found,
                None => (c.to_string(), 1),
            },
            // A brace that counts nothing stands for itself.
            '{' if !counts(rest) => ("\\{".to_string(), 1),
            c => (c.to_string(), c.len_utf8()),
        };
        out.push_str(&written);
        rest = &rest[length..];
    }
    out
}

/// An escape, and how long it is: a sign that needs none in Rust stands for itself.
fn escape(text: &str) -> (String, usize) {
    match text[1..].chars().next() {
        Some('u' | 'x' | 'p' | 'P') if text[2..].starts_with('{') => {
            let length = text.find('}').map_or(2, |at| at + 1);
            (text[..length].to_string(), length)
        }
        Some(c) if c.is_ascii_punctuation() || c == ' ' => (escaped(c), 2),
        Some(c) => (format!("\\{c}"), 1 + c.len_utf8()),
        None => ("\\".to_string(), 1),
    }
}

/// Half of a character beyond 16 bits, which no text has alone.
fn surrogate(text: &str) -> Option<u32> {
    let code = u32::from_str_radix(text.strip_prefix("\\u")?.get(..4)?, 16).ok()?;
    (0xD800..0xE000).contains(&code).then_some(code)
}

fn counts(text: &str) -> bool {
    let Some((inside, _)) = text[1..].split_once('}') else { return false };
    let mut parts = inside.splitn(2, ',');
    let digits = |part: &str| part.chars().all(|c| c.is_ascii_digit());
    parts.next().is_some_and(|first| !first.is_empty() && digits(first))
        && parts.next().is_none_or(digits)
}

/// A class of characters, and how long it is.
fn class(text: &str) -> Option<(String, usize)> {
    let negated = text[1..].starts_with('^');
    let mut out = String::from(if negated { "[^" } else { "[" });
    let mut at = if negated { 2 } else { 1 };
    if text[at..].starts_with(']') {
        // No character, or any.
        return negated.then(|| ("[\\s\\S]".to_string(), at + 1));
    }
    loop {
        let c = text[at..].chars().next()?;
        if c == ']' {
            out.push(']');
            return (out.len() > "[^]".len() || !negated && out.len() > 2).then_some((out, at + 1));
        }
        let (first, length) = atom(&text[at..])?;
        at += length;
        let range = text[at..].strip_prefix('-').filter(|more| !more.starts_with(']'));
        let last = range.and_then(atom);
        match (first, last) {
            // A dash between what are no single characters stands for itself.
            (Atom::One(first), Some((Atom::One(last), length))) => {
                out.push_str(&format!("{first}-{last}"));
                at += 1 + length;
            }
            (Atom::Half, Some((Atom::Half, length))) => at += 1 + length,
            (Atom::One(first), _) => out.push_str(&first),
            (Atom::Set(set), _) => {
                out.push_str(&set);
                if range.is_some() {
                    out.push_str("\\-");
                    at += 1;
                }
            }
            (Atom::Half, _) => {}
        }
    }
}

/// A part of a class.
enum Atom {
    One(String),
    Set(String),
    /// Half of a character.
    Half,
}

fn atom(text: &str) -> Option<(Atom, usize)> {
    let c = text.chars().next()?;
    if c != '\\' {
        return Some((Atom::One(escaped(c)), c.len_utf8()));
    }
    if surrogate(text).is_some() {
        return Some((Atom::Half, 6));
    }
    let next = text[1..].chars().next()?;
    Some(match next {
        'd' | 'D' | 's' | 'S' | 'w' | 'W' => (Atom::Set(format!("\\{next}")), 2),
        'b' => (Atom::One("\\x08".to_string()), 2),
        'p' | 'P' => {
            let length = text.find('}')? + 1;
            (Atom::Set(text[..length].to_string()), length)
        }
        'u' | 'x' if text[2..].starts_with('{') => {
            let length = text.find('}')? + 1;
            (Atom::One(text[..length].to_string()), length)
        }
        'u' => (Atom::One(text.get(..6)?.to_string()), 6),
        'x' => (Atom::One(text.get(..4)?.to_string()), 4),
        _ => {
            let (written, length) = escape(text);
            (Atom::One(written), length)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_written_otherwise() {
        for (script, expected) in [
            ("^[a-z]+\\d{2,3}$", "^[a-z]+\\d{2,3}$"),
            ("[[a&&b]", "[\\[a\\&\\&b]"),
            ("[\\w-.]", "[\\w\\-\\.]"),
            ("[a-z-]", "[a-z\\-]"),
            ("\\<a\\>\\!", "<a>!"),
            ("a{b}{1-3}", "a\\{b}\\{1-3}"),
            ("[\\u0020-\\uD7FF\\uD800\\uDBFF-\\uDC00\\uDFFF\\t]", "[\\u0020-\\uD7FF\\t]"),
            ("[^]", "[\\s\\S]"),
            ("[^\\]\"]", "[^\\]\"]"),
            ("[^\\x{2d}a-\\x{7f}]\\x{2d}", "[^\\x{2d}a-\\x{7f}]\\x{2d}"),
        ] {
            assert_eq!(rust(script), expected, "{script}");
        }
        for (pattern, expected) in [
            ("^[^\\\\]*\\S\\D.$", "^[[^\\\\]&&[^\\x00]]*\\S\\D.$"),
            ("[^\"a][a-z][\\s\\S]\\P{P}", "[[^\"a]&&[^\\x00]][a-z][\\s\\S][\\P{P}&&[^\\x00]]"),
        ] {
            assert_eq!(quotable(pattern), expected, "{pattern}");
            assert_eq!(quotable(expected), expected, "{pattern}");
        }
        let budget = Budget::new();
        for (script, expected) in [
            ("^(?=.{2,9}$)[a-z]+$", &["^(?:.{2,9}$)", "^[a-z]+$"][..]),
            ("^(?=.*[A-Z])(?=.*\\d).{8,}$", &["^(?:.*[A-Z])", "^(?:.*\\d)", "^.{8,}$"]),
            ("^x(?![\\s\\S])", &["^x$"]),
            ("^(?!ab)x", &["^(?:(?:a|(?:[^a]|a[^b])[\\s\\S]*)?)$", "^x"]),
        ] {
            assert_eq!(plain(script, &budget), expected, "{script}");
        }
    }
}
