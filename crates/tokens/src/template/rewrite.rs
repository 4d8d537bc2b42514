//! What of Transformers' Jinja MiniJinja does not know, said in terms it does.
//!
//! `{% generation %}` blocks, which mark what a model is trained on and say nothing in a prompt, become `{% with %}`
//! blocks, which are scopes just the same. Slices, `x[a:b:c]`, become calls `x.__slice(a, b, c)`: negative steps over
//! what is empty are out of bounds in MiniJinja 3.0, and a slice of a list is a list in Python, not an iterator. Loops
//! over `x` become loops over `(x)|__each`, which refuses `none` as Python does.

/// The method that slices are rewritten to.
pub(crate) const SLICE: &str = "__slice";
/// The filter that what loops go over is passed through.
pub(crate) const EACH: &str = "__each";

/// The source in MiniJinja's terms. What is no well-formed tag is left as it is, for the parser to complain about.
pub(crate) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + source.len() / 16);
    let mut rest = source;
    while let Some(at) = rest.find("{").filter(|at| rest.len() >= at + 2) {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let copied = match &tag.as_bytes()[..2] {
            b"{#" => tag.find("#}").map_or(tag.len(), |end| end + 2),
            b"{%" => {
                let length = inside(&tag[2..], "%}", &mut out, "{%");
                2 + length
            }
            b"{{" => 2 + inside(&tag[2..], "}}", &mut out, "{{"),
            _ => 1,
        };
        match &tag.as_bytes()[..2] {
            b"{%" | b"{{" => {}
            _ => out.push_str(&tag[..copied]),
        }
        rest = &tag[copied..];
        if tag.starts_with("{%") && word(&tag[2..copied]) == "raw" {
            // Nothing inside of a raw block is a tag but its end.
            let end = end_of_raw(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out + rest
}

/// A tag's content up to its end, without white space control.
fn word(content: &str) -> &str {
    let content = content.strip_suffix("%}").unwrap_or(content);
    content.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'))
}

/// Where the tag that ends a raw block begins.
fn end_of_raw(text: &str) -> usize {
    let tags = text.match_indices("{%").map(|(at, _)| at);
    tags.into_iter()
        .find(|at| {
            let inner = text[at + 2..].trim_start_matches(['-', '+']).trim_start();
            inner.starts_with("endraw")
        })
        .unwrap_or(text.len())
}

/// An open bracket: where it is in the output, and where its own colons are.
struct Bracket {
    opening: char,
    at: usize,
    colons: Vec<usize>,
}

/// How far the lexer is in `{% for name in iterable if condition recursive %}`.
#[derive(PartialEq)]
enum For {
    /// This is no such tag, or its iterable is behind us.
    Not,
    /// Before `in`.
    Names,
    /// After `in`.
    Iterable,
}

/// Writes a tag to `out` and returns the length of its content with its end.
fn inside(content: &str, end: &str, out: &mut String, start: &str) -> usize {
    let tag = out.len();
    out.push_str(start);
    let mut brackets: Vec<Bracket> = Vec::new();
    let mut characters = content.char_indices().peekable();
    let mut first = true;
    let mut of_for = For::Not;
    while let Some((at, c)) = characters.next() {
        if brackets.is_empty() && content[at..].starts_with(end) {
            if of_for == For::Iterable {
                // The end may carry white space control, which stays with it.
                let control = if out.ends_with(['-', '+']) { out.pop() } else { None };
                out.push_str(&format!(")|{EACH} "));
                out.extend(control);
            }
            out.push_str(end);
            let word = word(&content[..at]).to_string();
            if end == "%}" && matches!(word.as_str(), "generation" | "endgeneration") {
                let plain = if word == "generation" { "with" } else { "endwith" };
                let text = out[tag..].replacen(&word, plain, 1);
                out.replace_range(tag.., &text);
            }
            return at + end.len();
        }
        if c.is_alphabetic() || c == '_' {
            let mut length = c.len_utf8();
            while let Some((_, next)) =
                characters.next_if(|(_, next)| next.is_alphanumeric() || *next == '_')
            {
                length += next.len_utf8();
            }
            let name = &content[at..at + length];
            let ends = of_for == For::Iterable
                && brackets.is_empty()
                && matches!(name, "if" | "recursive");
            if ends {
                out.push_str(&format!(")|{EACH} "));
                of_for = For::Not;
            }
            out.push_str(name);
            if first && name == "for" && end == "%}" {
                of_for = For::Names;
            } else if of_for == For::Names && brackets.is_empty() && name == "in" {
                out.push_str(" (");
                of_for = For::Iterable;
            }
            first = false;
            continue;
        }
        match c {
            '"' | '\'' => {
                out.push(c);
                while let Some((_, inner)) = characters.next() {
                    out.push(inner);
                    match inner {
                        '\\' => out.extend(characters.next().map(|(_, escaped)| escaped)),
                        inner if inner == c => break,
                        _ => {}
                    }
                }
                continue;
            }
            '(' | '[' | '{' => {
                brackets.push(Bracket { opening: c, at: out.len(), colons: Vec::new() })
            }
            ':' => {
                let at = out.len();
                if let Some(bracket) = brackets.last_mut() {
                    bracket.colons.push(at);
                }
            }
            ')' | ']' | '}' => {
                let slice = brackets.pop().filter(|bracket| {
                    c == ']' && bracket.opening == '[' && matches!(bracket.colons.len(), 1 | 2)
                });
                if let Some(Bracket { at, colons, .. }) = slice {
                    let starts = std::iter::once(at).chain(colons.iter().copied());
                    let ends = colons.iter().copied().chain([out.len()]);
                    let parts: Vec<&str> = starts
                        .zip(ends)
                        .map(|(start, end)| out[start + 1..end].trim())
                        .map(|part| if part.is_empty() { "none" } else { part })
                        .collect();
                    let call = format!(".{SLICE}({})", parts.join(", "));
                    out.replace_range(at.., &call);
                    continue;
                }
            }
            _ => {}
        }
        out.push(c);
    }
    content.len()
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn tags() {
        for (source, plain) in [
            ("a{%- generation -%}b{% endgeneration %}c", "a{%- with -%}b{% endwith %}c"),
            (
                "{%generation%}{% generations %}{% x generation %}",
                "{%with%}{% generations %}{% x generation %}",
            ),
            (
                "{# {% generation %} #}{{ '{% generation %}' }}",
                "{# {% generation %} #}{{ '{% generation %}' }}",
            ),
            (
                "{% raw %}{% generation %}[::-1]{% endraw %}{%generation%}",
                "{% raw %}{% generation %}[::-1]{% endraw %}{%with%}",
            ),
            ("{{ a[::-1] }}[::-1]", "{{ a.__slice(none, none, -1) }}[::-1]"),
            (
                "{% if x[1:y[::2]:-1][0] == '[::-1]' %}",
                "{% if x.__slice(1, y.__slice(none, none, 2), -1)[0] == '[::-1]' %}",
            ),
            (
                "{{ x[1:] }}{{ x[:n+1] }}{{ {'a': [1], 'b': {}} }}",
                "{{ x.__slice(1, none) }}{{ x.__slice(none, n+1) }}{{ {'a': [1], 'b': {}} }}",
            ),
            (
                "{%- for a, b in x.y('if')|items -%}",
                "{%- for a, b in ( x.y('if')|items )|__each -%}",
            ),
            (
                "{% for a in x[:1] if a in y %}",
                "{% for a in ( x.__slice(none, 1) )|__each if a in y %}",
            ),
            ("{% for a in (b if c else d)%}", "{% for a in ( (b if c else d))|__each %}"),
            (
                "{% for a in b recursive %}{{ for in c }}",
                "{% for a in ( b )|__each recursive %}{{ for in c }}",
            ),
            ("{{ 'it\\'s' }}{{ \"[::-1]\" }}", "{{ 'it\\'s' }}{{ \"[::-1]\" }}"),
            ("{% unfinished '", "{% unfinished '"),
            ("{", "{"),
            ("\u{e9}{{\u{e9}", "\u{e9}{{\u{e9}"),
        ] {
            assert_eq!(rewrite(source), plain);
        }
    }
}
