//! Grammars of texts as they stand within a JSON string.
//!
//! A call's argument is written as a JSON string, so that a quote of its text is two characters
//! there. Each character is escaped by itself and in one way, so that it is enough to escape what a
//! grammar's terminals say: its strings, ranges and regular expressions. But a backslash may go on
//! with one terminal or begin the next, and llguidance's lexer decides at each byte. So a grammar
//! whose rules do not refer back becomes one terminal, which is as good as they: a regular
//! expression, in which what is ignored is written down behind each terminal. Of one whose rules
//! refer back no terminal may have a character that is escaped.

use super::{Grammar, LONGEST, quoted};
use formats::{Error, ErrorKind, Result};
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Longest grammar that is made, in bytes of its text: a class of characters may take 10 KB.
const LONGEST_ESCAPED: usize = 4 * LONGEST;

/// What Lark's `common` defines, as regular expressions.
const COMMON: [(&str, &str); 25] = [
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("_EXP", "[eE][+-]?[0-9]+"),
    ("FLOAT", r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    (
        "SIGNED_FLOAT",
        r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    ),
    ("NUMBER", r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", r#""(?:[^"\\\n]|\\.)*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[A-Za-z_][A-Za-z_0-9]*"),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(?:\r?\n)+"),
    ("SH_COMMENT", r"#[^\n]*"),
    ("CPP_COMMENT", r"//[^\n]*"),
    ("C_COMMENT", r"/\*[^*]*\*+(?:[^*/][^*]*\*+)*/"),
    ("SQL_COMMENT", r"--[^\n]*"),
];

impl Grammar {
    /// The grammar of what stands between the quotes of a JSON string whose text this one allows.
    ///
    /// # Errors
    /// A grammar with parts that have no such form: special tokens, schemas and other grammars,
    /// negated terminals, and what looks behind or ahead in expressions; the forms of JSON, which
    /// are no texts.
    pub fn in_json(&self) -> Result<Grammar> {
        match self {
            Grammar::Regex(text) => {
                let all = super::together(text);
                let all = all.iter().map(|one| Ok(expression(one, "")?.0));
                let all = all.collect::<Result<Vec<_>>>()?.join(" & ");
                Ok(Grammar::Lark(format!("start: WHOLE\nWHOLE: {all}")))
            }
            Grammar::Lark(text) => Ok(Grammar::Lark(escaped(text)?)),
            Grammar::Gbnf(text) => Grammar::Lark(super::gbnf::to_lark(text)?).in_json(),
            Grammar::Json | Grammar::Schema(_) => {
                Err(unsupported("a text's grammar", "one of JSON values"))
            }
        }
    }
}

/// A text as it stands within a JSON string.
fn escape(text: &str) -> String {
    let quoted = quoted(text);
    quoted[1..quoted.len() - 1].to_string()
}

fn unsupported(expected: &str, found: impl std::fmt::Display) -> Error {
    Error::new("grammar", expected, found).of(ErrorKind::Unsupported)
}

/// A piece of a grammar.
enum Piece<'a> {
    /// The name of a rule or a terminal, and whether its definition begins.
    Name(&'a str, bool),
    /// A string, a range or an expression, escaped, and whether it is as it was.
    Terminal(String, bool),
    /// The terminal of a name that is imported.
    Imported(&'a str, String, bool),
    /// What follows in the line is ignored between terminals.
    Ignore,
    Line,
    /// Anything else.
    Sign(char),
}

/// Whether a name is a rule's.
fn is_rule(name: &str) -> bool {
    name.contains(|c: char| c.is_ascii_lowercase())
}

/// A rule's name without the signs that say how trees are shaped.
fn plain_name(name: &str) -> &str {
    name.trim_start_matches(['!', '?'])
}

/// The grammar in Lark's syntax of escaped texts.
fn escaped(text: &str) -> Result<String> {
    let pieces = Reader { text, at: 0 }.pieces()?;
    if refers_back(&pieces) {
        let plain = |piece: &Piece| match piece {
            Piece::Terminal(_, plain) | Piece::Imported(_, _, plain) => *plain,
            _ => true,
        };
        if pieces.iter().all(plain) {
            return Ok(text.to_string());
        }
        let expected = "rules that do not refer back, or terminals without characters that JSON escapes, within a call";
        return Err(unsupported(expected, "both"));
    }
    let mut prefix = "RULE".to_string();
    while text.contains(&prefix) {
        prefix.push('X');
    }
    // Rules are terminals by a number.
    let own = |name: &str, rules: &mut Vec<String>| -> String {
        let name = plain_name(name);
        if !is_rule(name) {
            return name.to_string();
        }
        let at = rules.iter().position(|other| other == name).unwrap_or_else(|| {
            rules.push(name.to_string());
            rules.len() - 1
        });
        format!("{prefix}-{at}")
    };
    let mut rules: Vec<String> = Vec::new();
    let ignores = pieces.iter().any(|piece| matches!(piece, Piece::Ignore));
    let between = format!("{prefix}-BETWEEN");
    let (mut made, mut ignored) = (String::new(), Vec::new());
    let (mut in_rule, mut in_ignored) = (false, false);
    for piece in &pieces {
        let out = match ignored.last_mut().filter(|_| in_ignored) {
            Some(last) => last,
            None => &mut made,
        };
        let terminal = |out: &mut String, written: &str| {
            let _ = match in_rule && !in_ignored && ignores {
                true => write!(out, "({written} {between}*)"),
                false => write!(out, "{written}"),
            };
        };
        match piece {
            Piece::Name(name, true) => {
                in_rule = is_rule(name);
                *out += &own(name, &mut rules);
            }
            Piece::Name(name, false) if is_rule(name) => *out += &own(name, &mut rules),
            Piece::Name(name, false) => terminal(out, name),
            Piece::Terminal(written, _) => terminal(out, written),
            Piece::Imported(name, written, _) => {
                let _ = write!(out, "{}: {written}", own(name, &mut rules));
            }
            Piece::Ignore => {
                in_ignored = true;
                ignored.push(String::new());
            }
            Piece::Line => {
                in_ignored = false;
                made.push('\n');
            }
            Piece::Sign(sign) => out.push(*sign),
        }
        if made.len() > LONGEST_ESCAPED {
            let expected = format!("at most {LONGEST_ESCAPED} bytes with its classes written out");
            return Err(unsupported(&expected, "more"));
        }
    }
    let whole = own("start", &mut rules);
    let begin = if ignores { format!("{between}* {whole}") } else { whole };
    let _ = write!(made, "\nstart: {prefix}-WHOLE\n{prefix}-WHOLE: {begin}\n");
    if ignores {
        let ignored: Vec<String> = ignored.iter().map(|one| format!("({one})")).collect();
        let _ = writeln!(made, "{between}: {}", ignored.join(" | "));
    }
    Ok(made)
}

/// Whether rules refer to themselves, through others or not.
fn refers_back(pieces: &[Piece]) -> bool {
    let mut named: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut inside = None;
    for piece in pieces {
        match piece {
            Piece::Name(name, true) => inside = Some(plain_name(name)),
            Piece::Name(name, false) => {
                named.entry(inside.unwrap_or_default()).or_default().push(plain_name(name));
            }
            Piece::Ignore => inside = None,
            _ => {}
        }
    }
    // Rules that name none but known ones are known, until nothing is added: those that are left
    // lead to themselves.
    let mut left = named;
    loop {
        let before = left.len();
        let all: HashSet<&str> = left.keys().copied().collect();
        left.retain(|_, names| names.iter().any(|name| all.contains(name)));
        if left.len() == before {
            return before > 0;
        }
    }
}

/// Reads a grammar in Lark's syntax, of which it knows where names and terminals begin and end.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn pieces(mut self) -> Result<Vec<Piece<'a>>> {
        let mut pieces = Vec::new();
        let (mut fresh, mut length) = (true, 0);
        while let Some(c) = self.rest().chars().next() {
            let comment = c == '#' || self.rest().starts_with("//");
            let begins = fresh;
            fresh &= c == ' ' || c == '\t';
            match c {
                _ if comment => {
                    self.take(|c| c != '\n');
                }
                '\n' => {
                    fresh = true;
                    self.at += 1;
                    pieces.push(Piece::Line);
                }
                '"' => {
                    let (text, folded) = self.string()?;
                    let last = match folded {
                        false => self.range()?,
                        true => None,
                    };
                    let plain = regex_syntax::escape(&text);
                    let written = match last {
                        Some(last) => {
                            let range = format!("[{plain}-{}]", regex_syntax::escape(&last));
                            self.expression(&range, "")?
                        }
                        None if folded => self.expression(&plain, "i")?,
                        None => (quoted(&escape(&text)), escape(&text) == text),
                    };
                    length += written.0.len();
                    pieces.push(Piece::Terminal(written.0, written.1));
                }
                '/' => {
                    let (text, flags) = self.slashes()?;
                    let (written, plain) = self.expression(text, flags)?;
                    length += written.len();
                    pieces.push(Piece::Terminal(written, plain));
                }
                '%' => self.directive(&mut pieces)?,
                '<' | '@' => {
                    let found = self.take(|c| !c.is_whitespace());
                    return Err(self.refused(found));
                }
                '~' => {
                    self.at += 1;
                    pieces.push(Piece::Sign(c));
                    let next = self.rest().trim_start().chars().next();
                    if !next.is_some_and(|c| c.is_ascii_digit() || c == '+' || c == '-') {
                        return Err(self.refused("~, a negated terminal"));
                    }
                }
                // What a tree's node is called says nothing of the text.
                '-' if self.rest().starts_with("->") => {
                    self.at += 2;
                    self.take(|c| c == ' ' || c == '\t');
                    self.take(|c| c.is_ascii_alphanumeric() || c == '_');
                }
                c if c.is_ascii_alphabetic() || matches!(c, '_' | '!' | '?') && self.is_name() => {
                    let begin = self.at;
                    self.take(|c| matches!(c, '_' | '!' | '?'));
                    self.take(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
                    let name = &self.text[begin..self.at];
                    if begins && self.rest().starts_with('[') {
                        return Err(self.refused("attributes of a rule"));
                    }
                    pieces.push(Piece::Name(name, begins));
                }
                c => {
                    pieces.push(Piece::Sign(c));
                    self.at += c.len_utf8();
                }
            }
            if length > LONGEST_ESCAPED {
                let expected =
                    format!("at most {LONGEST_ESCAPED} bytes with its classes written out");
                return Err(unsupported(&expected, "more"));
            }
        }
        Ok(pieces)
    }

    /// Whether a name begins with the sign that is here.
    fn is_name(&self) -> bool {
        let rest = self.rest().trim_start_matches(['!', '?', '_']);
        rest.starts_with(|c: char| c.is_ascii_alphabetic())
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// The characters from here on that are such.
    fn take(&mut self, of: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let length = rest.find(|c| !of(c)).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    /// The line of the present place.
    fn line(&self) -> usize {
        1 + self.text[..self.at].matches('\n').count()
    }

    fn refused(&self, found: &str) -> Error {
        let expected = "rules and terminals of strings and expressions alone within a call";
        let found: String = found.chars().take(60).collect();
        unsupported(expected, format!("{found} in line {}", self.line()))
    }

    /// A string, and whether its letters count as large ones and small.
    fn string(&mut self) -> Result<(String, bool)> {
        let (mut end, mut escapes) = (None, false);
        for (at, c) in self.rest().char_indices().skip(1) {
            match c {
                '\n' => break,
                _ if escapes => escapes = false,
                '\\' => escapes = true,
                '"' => {
                    end = Some(at + 1);
                    break;
                }
                _ => {}
            }
        }
        let end = end.ok_or_else(|| self.refused("a string without an end"))?;
        let written = &self.rest()[..end];
        // Lark has escapes by two digits, JSON by four.
        let mut json = String::with_capacity(end);
        let mut chars = written.chars();
        while let Some(c) = chars.next() {
            let next = if c == '\\' { chars.next() } else { None };
            match next {
                Some('x') => json += "\\u00",
                next => json.extend([c].into_iter().chain(next)),
            }
        }
        let text = serde_json::from_str(&json);
        let text = text.map_err(|_| self.refused(&format!("the string {written}")))?;
        self.at += end;
        let folded = self.rest().starts_with('i');
        self.at += usize::from(folded);
        Ok((text, folded))
    }

    /// The end of the range that a string begins, if it does.
    fn range(&mut self) -> Result<Option<String>> {
        let blank = |c| c == ' ' || c == '\t';
        let Some(behind) = self.rest().trim_start_matches(blank).strip_prefix("..") else {
            return Ok(None);
        };
        let behind = behind.trim_start_matches(blank);
        if !behind.starts_with('"') {
            return Err(self.refused("a range without an end"));
        }
        self.at = self.text.len() - behind.len();
        Ok(Some(self.string()?.0))
    }

    /// An expression between slashes, and its flags.
    fn slashes(&mut self) -> Result<(&'a str, &'a str)> {
        let begin = self.at + 1;
        let (mut end, mut escapes) = (None, false);
        for (at, c) in self.text[begin..].char_indices() {
            match c {
                _ if escapes => escapes = false,
                '\\' => escapes = true,
                '/' => {
                    end = Some(begin + at);
                    break;
                }
                _ => {}
            }
        }
        let end = end.ok_or_else(|| self.refused("an expression without an end"))?;
        self.at = end + 1;
        let flags = self.take(|c| "imsux".contains(c));
        Ok((&self.text[begin..end], flags))
    }

    fn expression(&self, text: &str, flags: &str) -> Result<(String, bool)> {
        expression(text, flags).map_err(|mut error| {
            let _ = write!(error.found, " in line {}", self.line());
            error
        })
    }

    /// A line that begins with a per cent sign: what is passed over, and what is imported.
    fn directive(&mut self, pieces: &mut Vec<Piece<'a>>) -> Result<()> {
        let begin = self.at;
        self.at += 1;
        match self.take(|c| c.is_ascii_alphabetic()) {
            "ignore" => {
                pieces.push(Piece::Ignore);
                Ok(())
            }
            "import" => {
                let rest = self.take(|c| c != '\n' && c != '#');
                let whole = &self.text[begin..self.at];
                let names = rest.trim().strip_prefix("common").map(str::trim_start);
                let names = names.ok_or_else(|| self.refused(whole))?;
                let mut define = |name: &str, own: &'a str| -> Result<()> {
                    let row = COMMON.iter().find(|row| row.0 == name);
                    let (written, plain) =
                        expression(row.ok_or_else(|| self.refused(whole))?.1, "")?;
                    pieces.extend([Piece::Imported(own, written, plain), Piece::Line]);
                    Ok(())
                };
                if let Some(list) = names.strip_prefix('(') {
                    let list =
                        list.trim_end().strip_suffix(')').ok_or_else(|| self.refused(whole))?;
                    return list.split(',').try_for_each(|name| define(name.trim(), name.trim()));
                }
                let name = names.strip_prefix('.').ok_or_else(|| self.refused(whole))?;
                let (name, own) = name.split_once("->").unwrap_or((name, name));
                define(name.trim(), own.trim())
            }
            _ => {
                self.take(|c| !c.is_whitespace());
                Err(self.refused(&self.text[begin..self.at]))
            }
        }
    }
}

/// A regular expression of escaped texts as Lark writes it, and whether nothing is escaped there.
fn expression(text: &str, flags: &str) -> Result<(String, bool)> {
    let whole = if flags.is_empty() { text.to_string() } else { format!("(?{flags}){text}") };
    let shown = || text.chars().take(60).collect::<String>();
    let parsed = regex_syntax::parse(&whole);
    let parsed = parsed.map_err(|e| {
        let reason = match &e {
            regex_syntax::Error::Parse(e) => e.kind().to_string(),
            regex_syntax::Error::Translate(e) => e.kind().to_string(),
            _ => "another expression".to_string(),
        };
        unsupported("a regular expression", format!("/{}/ ({reason})", shown()))
    })?;
    let mut made = String::new();
    if !write_escaped(&parsed, &mut made) {
        let expected = "an expression without what looks behind or ahead, of bounded length";
        return Err(unsupported(expected, format!("/{}/", shown())));
    }
    let plain = !made.contains(r"\\");
    // Nothing between slashes would be a comment.
    let made = if made.is_empty() { "(?:)".to_string() } else { made.replace('/', r"\/") };
    Ok((format!("/{made}/"), plain))
}

/// Writes an expression of the escaped texts of another one; whether it has such a form.
fn write_escaped(node: &Hir, made: &mut String) -> bool {
    if made.len() > LONGEST_ESCAPED {
        return false;
    }
    match node.kind() {
        HirKind::Empty => {}
        HirKind::Literal(bytes) => match std::str::from_utf8(&bytes.0) {
            Ok(text) => *made += &regex_syntax::escape(&escape(text)),
            Err(_) => return false,
        },
        HirKind::Class(Class::Unicode(class)) => write_class(class, made),
        HirKind::Class(Class::Bytes(class)) => match class.to_unicode_class() {
            Some(class) => write_class(&class, made),
            None => return false,
        },
        // Expressions are of whole texts: the anchors at their ends say nothing.
        HirKind::Look(Look::Start) => made.push('^'),
        HirKind::Look(Look::End) => made.push('$'),
        HirKind::Look(_) => return false,
        HirKind::Repetition(repetition) => {
            *made += "(?:";
            let fits = write_escaped(&repetition.sub, made);
            let _ = match (repetition.min, repetition.max) {
                (0, None) => write!(made, ")*"),
                (1, None) => write!(made, ")+"),
                (0, Some(1)) => write!(made, ")?"),
                (least, None) => write!(made, "){{{least},}}"),
                (least, Some(most)) => write!(made, "){{{least},{most}}}"),
            };
            return fits;
        }
        HirKind::Capture(capture) => {
            // llguidance has this name for what lies ahead.
            if capture.name.as_deref() == Some("stop") {
                return false;
            }
            *made += "(?:";
            let fits = write_escaped(&capture.sub, made);
            made.push(')');
            return fits;
        }
        HirKind::Concat(nodes) => return nodes.iter().all(|node| write_escaped(node, made)),
        HirKind::Alternation(nodes) => {
            *made += "(?:";
            for (i, node) in nodes.iter().enumerate() {
                if i > 0 {
                    made.push('|');
                }
                if !write_escaped(node, made) {
                    return false;
                }
            }
            made.push(')');
        }
    }
    true
}

/// Writes a class of characters: those that stand for themselves, those that a letter stands for
/// behind a backslash, and those that a number does.
fn write_class(class: &ClassUnicode, made: &mut String) {
    let special = |c: char| c < ' ' || c == '"' || c == '\\';
    let range = |begin, end| ClassUnicodeRange::new(begin, end);
    let specials = ClassUnicode::new([range('\0', '\u{1f}'), range('"', '"'), range('\\', '\\')]);
    let mut plain = class.clone();
    plain.difference(&specials);
    let within = |c: &char| class.ranges().iter().any(|r| r.start() <= *c && *c <= r.end());
    let all = ('\0'..='\\').filter(|c| special(*c)).filter(within);
    let (letters, numbers): (Vec<char>, Vec<char>) =
        all.partition(|c| escape(&c.to_string()).len() == 2);
    let mut parts = Vec::new();
    if !plain.ranges().is_empty() {
        let mut part = String::from("[");
        // The classes that have names are long.
        let names = ["\\w", "\\d"].iter().find(|name| {
            let named = regex_syntax::parse(name);
            named.is_ok_and(|named| *named.kind() == HirKind::Class(Class::Unicode(plain.clone())))
        });
        match names {
            Some(name) => part += name,
            None => {
                for range in plain.ranges() {
                    let (begin, end) = (u32::from(range.start()), u32::from(range.end()));
                    let _ = match begin == end {
                        true => write!(part, "\\x{{{begin:x}}}"),
                        false => write!(part, "\\x{{{begin:x}}}-\\x{{{end:x}}}"),
                    };
                }
            }
        }
        part.push(']');
        parts.push(part);
    }
    if !letters.is_empty() {
        let escapes = letters.iter().map(|c| regex_syntax::escape(&escape(&c.to_string())[1..]));
        parts.push(format!(r"\\[{}]", escapes.collect::<String>()));
    }
    for row in ['0', '1'] {
        let digits: String = numbers
            .iter()
            .map(|c| format!("{:02x}", u32::from(*c)))
            .filter_map(|digits| digits.strip_prefix(row).map(str::to_string))
            .collect();
        if !digits.is_empty() {
            parts.push(format!(r"\\u00{row}[{digits}]"));
        }
    }
    match &parts[..] {
        // No character at all.
        [] => *made += r"[^\x00-\x{10FFFF}]",
        [part] if part.starts_with('[') => *made += part,
        parts => {
            let _ = write!(made, "(?:{})", parts.join("|"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
    use llguidance::{Matcher, ParserFactory};
    use std::sync::Arc;

    /// Whether a grammar allows the whole of a text, by a vocabulary of bytes.
    fn takes(grammar: &Grammar, text: &str) -> bool {
        let words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([Vec::new()]).collect();
        let trie = TokTrie::from(&TokRxInfo::new(257, 256), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).unwrap();
        factory.quiet();
        let (_, written) = super::super::written(grammar, None).unwrap();
        let parser = factory.create_parser(TopLevelGrammar::from_grammar(written));
        let mut matcher = Matcher::new(parser);
        assert!(!matcher.is_error(), "{grammar:?}: {:?}", matcher.get_error());
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        matcher.try_consume_tokens(&tokens).unwrap() == tokens.len()
            && matcher.is_accepting().unwrap()
    }

    /// A text is taken by a grammar as it is escaped by its escaped one.
    fn agrees(grammar: &Grammar, text: &str) -> bool {
        let plain = takes(grammar, text);
        assert_eq!(
            takes(&grammar.in_json().unwrap(), &escape(text)),
            plain,
            "{grammar:?} {text:?}"
        );
        plain
    }

    #[test]
    fn escaped_texts_are_those_of_the_grammar() {
        let lark = |text: &str| Grammar::Lark(text.to_string());
        // Rules refer back, and nothing is escaped.
        let sum = "start: sum // a sum\nsum: term (SP ADD SP term)* -> add\nterm: INT | \"(\" sum \")\"\nSP: \" \"\nADD: \"+\" | \"-\"\n%import common.INT";
        let lines = r#"
            start: "begin" NL line+ end
            line: KIND TEXT? NL | "\"" NAME "\"" NL -> quoted
            # What ends it.
            !end: "end" NL?
            KIND: "+" | "-" | "\\"
            TEXT: /[^\n]+/
            NAME: /[^"\\\n]+/
            NL: "\n"
        "#;
        let folded = "start: \"select\"i WS \"a\"..\"f\" ~ 2..3 \"\\x41\\u00e9\"\n%import common (WS, DIGIT)";
        let ignored = "start: \"a\" \"b\"\n%ignore /\\s+/";
        let slashes = "start: /a\\/b/ /[\"\\/]/ /./s /x y/x /[^\\d]/";
        let cases = [
            (lark(sum), &["1 + 2", "1 - (2 + 3)"][..], &["1+2", "(1"][..]),
            (
                lark(lines),
                &["begin\n+a \"b\" \\n\n\"é\"\nend", "begin\n-\n\\\\\nend\n"],
                &["begin\nend", "begin\n+a", "begin\n\"a\\\"\nend"],
            ),
            (lark(folded), &["SELect\t\nafAé", "select abcAé"], &["select aAé", "select\u{b}abAé"]),
            (lark(ignored), &["a\n\tb", "ab", "a b"], &["a\\nb", "b"]),
            (lark(slashes), &["a/b\"\nxyz", "a/b//xyé"], &["a/b\"xy1", "a\\/b/"]),
            (lark("start: /(?s:.*)/"), &["", "\u{0}\u{1f}\u{7f}\"\\\u{8}\u{c}"], &[]),
            (lark("start: \"\" /()/ /\\w{2,3}/"), &["ab", "äöü"], &["a", "a-"]),
            (
                Grammar::Regex("^(red|green) \"[0-9]{2}\"\\\\[a-c]$".to_string()),
                &["red \"12\"\\a"],
                &["red", ""],
            ),
            (
                Grammar::Regex("(?=.*[\"0-9])(?!9)[^x]{2,}".to_string()),
                &["a\"b", "a9"],
                &["ab", "9a", "0x"],
            ),
            (Grammar::Gbnf("root ::= \"\\\"\" [a-z\\n]+".to_string()), &["\"a\nb"], &["a"]),
        ];
        for (grammar, good, bad) in cases {
            for text in good {
                assert!(agrees(&grammar, text), "{grammar:?} {text:?}");
            }
            for text in bad {
                assert!(!agrees(&grammar, text), "{grammar:?} {text:?}");
            }
        }
    }

    #[test]
    fn common_terminals_are_those_of_lark() {
        let samples = [
            "7",
            "f",
            "-12",
            "+12.",
            ".5",
            "1.5e3",
            "e+3",
            "1e5",
            "\"a \\\" b\"",
            "\"\"",
            "abc",
            "Ab_1",
            " \t",
            "\n\r\n",
            "\r",
            "\n",
            "# c",
            "// c",
            "/* a * b */",
            "-- c",
            "G",
            "_",
            "x\n",
        ];
        for (name, text) in COMMON {
            let imported = Grammar::Lark(format!("start: {name}\n%import common.{name}"));
            let renamed = Grammar::Lark(format!("start: X\n%import common.{name} -> X"));
            let own = Grammar::Regex(text.to_string());
            let taken: Vec<&str> =
                samples.into_iter().filter(|sample| agrees(&imported, sample)).collect();
            assert!(!taken.is_empty(), "{name}");
            for sample in samples {
                let expected = taken.contains(&sample);
                assert_eq!(takes(&own, sample), expected, "{name} {sample:?}");
                assert_eq!(agrees(&renamed, sample), expected, "{name} {sample:?}");
            }
        }
    }

    #[test]
    fn what_has_no_form_within_a_string_is_refused_in_a_line() {
        let cases = [
            ("start: <|end|>", "<|end|> in line 1"),
            ("start: a\na: @body", "@body in line 2"),
            ("start: %json {\"type\": \"object\"}", "%json in line 1"),
            ("start: A\nA: ~\"x\"", "~, a negated terminal in line 2"),
            ("%llguidance {}\nstart: \"a\"", "%llguidance in line 1"),
            ("%import python.NAME\nstart: NAME", "%import python.NAME in line 1"),
            ("%import common.NOTHING\nstart: NOTHING", "%import common.NOTHING in line 1"),
            ("start: /a(?=b)/", "in line 1"),
            ("start: /a\\b/", "/a\\b/ in line 1"),
            ("start: \"a", "a string without an end in line 1"),
            ("start: /a", "an expression without an end in line 1"),
            ("start: \"a\"..b", "a range without an end in line 1"),
            ("start: a\na[lazy]: /a/", "attributes of a rule in line 2"),
            ("start: \"a\" start? \"\\n\"", "both"),
        ];
        for (text, found) in cases {
            let error = Grammar::Lark(text.to_string()).in_json().unwrap_err();
            assert!(error.found.ends_with(found), "{text}: {error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        let long = Grammar::Lark(format!("start: /{}/", "[\\w-]".repeat(1000)));
        assert!(long.in_json().is_err());
        assert!(Grammar::Json.in_json().is_err());
    }
}
