//! Patterns as JavaScript has them (ECMA-262, which JSON Schema names) in the syntax of
//! llguidance's regular expressions, Rust's: what differs is written so that it means the same
//! there.

use serde_json::{Value, json};

use super::{Object, also};

/// Patterns that widely used programs write, with looks ahead within, and ones that say the same
/// without: Zod's of ISO 8601's durations.
const KNOWN: [(&str, &str); 1] = [(
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S))?|T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S))$",
)];

/// Puts a schema's `pattern`, and the patterns of its properties, into the other syntax.
pub(super) fn translated(fields: &mut Object) {
    if let Some(Value::String(pattern)) = fields.get("pattern") {
        let known = KNOWN.iter().find(|(own, _)| own == pattern).map(|(_, same)| *same);
        let (pattern, ahead) = apart(known.unwrap_or(pattern));
        let pattern = rust(&pattern);
        fields.insert("pattern".to_string(), pattern.into());
        for more in ahead {
            also(fields, json!({ "pattern": rust(&more) }));
        }
    }
    if let Some(Value::Object(named)) = fields.get_mut("patternProperties") {
        *named =
            std::mem::take(named).into_iter().map(|(name, part)| (rust(&name), part)).collect();
    }
}

/// A pattern without the look ahead that it begins with, and patterns that say the same as that: of
/// another pattern, of a text that must not come, and of a text that must not be blank.
fn apart(pattern: &str) -> (String, Vec<String>) {
    let (mut rest, mut ahead) = (pattern.to_string(), Vec::new());
    // The end of a text, as some write it.
    if let Some(before) = rest.strip_suffix("(?![\\s\\S])") {
        rest = format!("{before}$");
    }
    // Alternatives outside of groups begin anew.
    if outer_choice(&rest) {
        return (rest, ahead);
    }
    while let Some(inner) = rest.strip_prefix("^(?") {
        let Some(close) = closing(inner) else { break };
        let (looked, behind) = (&inner[..close], &inner[close + 1..]);
        let more = match (looked.strip_prefix('='), looked.strip_prefix('!')) {
            (Some(wanted), _) => format!("^(?:{})", wanted.strip_prefix('^').unwrap_or(wanted)),
            (_, Some("\\s*$")) => "\\S".to_string(),
            (_, Some(text)) => match unlike(text) {
                Some(pattern) => pattern,
                None => break,
            },
            _ => break,
        };
        ahead.push(more);
        rest = format!("^{behind}");
    }
    (rest, ahead)
}

/// The texts that do not begin with this one, or are not it where it ends in `$`, if it is one
/// without signs.
fn unlike(text: &str) -> Option<String> {
    let (text, whole) = match text.strip_suffix('$') {
        Some(text) => (text, true),
        None => (text.strip_suffix(".*").unwrap_or(text), false),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || " :/_-@#".contains(c);
    if text.is_empty() || !text.chars().all(plain) {
        return None;
    }
    let last = |inner: Option<String>, c: char| {
        let more = inner.map_or(String::new(), |inner| format!("|{}({inner})", escaped(c)));
        Some(format!("$|[^{}]{more}", escaped(c)))
    };
    let behind = whole.then(|| "[\\s\\S]".to_string());
    text.chars().rev().fold(behind, last).map(|pattern| format!("^({pattern})"))
}

fn escaped(c: char) -> String {
    if "\\^$.|?*+()[]{}-&~#/".contains(c) { format!("\\{c}") } else { c.to_string() }
}

/// Where the group ends that a text is the inside of.
fn closing(text: &str) -> Option<usize> {
    let (mut depth, mut escape, mut class) = (0, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escape => escape = false,
            '\\' => escape = true,
            ']' if class => class = false,
            _ if class => {}
            '[' => class = true,
            '(' => depth += 1,
            ')' if depth == 0 => return Some(at),
            ')' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Whether a pattern has alternatives outside of groups.
fn outer_choice(pattern: &str) -> bool {
    let (mut depth, mut escape, mut class) = (0, false, false);
    for c in pattern.chars() {
        match c {
            _ if escape => escape = false,
            '\\' => escape = true,
            ']' if class => class = false,
            _ if class => {}
            '[' => class = true,
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 0 => return true,
            _ => {}
        }
    }
    false
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
        'u' if text[2..].starts_with('{') => {
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
        ] {
            assert_eq!(rust(script), expected, "{script}");
        }
        for (script, rest, ahead) in [
            ("^(?=.{2,9}$)[a-z]+$", "^[a-z]+$", vec!["^(?:.{2,9}$)"]),
            ("^(?!\\s*$).+", "^.+", vec!["\\S"]),
            ("^(?!ab)x(?![\\s\\S])", "^x$", vec!["^($|[^a]|a($|[^b]))"]),
            ("^(?!ab$)[a-z]+$", "^[a-z]+$", vec!["^($|[^a]|a($|[^b]|b([\\s\\S])))"]),
            ("^(?!a)b|c", "^(?!a)b|c", vec![]),
            ("^(?!.*x)b", "^(?!.*x)b", vec![]),
        ] {
            let ahead = ahead.into_iter().map(str::to_string).collect();
            assert_eq!(apart(script), (rest.to_string(), ahead), "{script}");
        }
    }
}
