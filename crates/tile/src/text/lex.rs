//! Lines and words: the lexical half of the parser.

use crate::types::{Role, Scalar, Tile, Type};

/// A line that holds something, without its comment.
#[derive(Debug)]
pub(super) struct Line<'t> {
    /// From 1.
    pub(super) number: usize,
    /// Words, numbers, `%n` and single signs.
    pub(super) words: Vec<&'t str>,
    /// The `file:line` its comment gives, or nothing.
    pub(super) source: &'t str,
}

/// The result of parsing a part of a line, or what is wrong with the line.
pub(super) type Found<T> = Result<T, String>;

/// Splits a text into lines; an error is a line number and what is wrong there.
pub(super) fn lines(text: &str) -> Result<Vec<Line<'_>>, (usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let (code, comment) = line.split_once(';').unwrap_or((line, ""));
        let words = words(code).map_err(|why| (number, why))?;
        if !words.is_empty() {
            found.push(Line { number, words, source: source(comment) });
        }
    }
    Ok(found)
}

/// The comment, if it is a `file:line`.
fn source(comment: &str) -> &str {
    let comment = comment.trim();
    let (file, line) = comment.rsplit_once(':').unwrap_or_default();
    let number = !line.is_empty() && line.bytes().all(|b| b.is_ascii_digit());
    // A control character would not be printed.
    if number && !file.is_empty() && !file.contains(char::is_control) { comment } else { "" }
}

fn words(code: &str) -> Found<Vec<&str>> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let len = match first {
            'a'..='z' | 'A'..='Z' | '_' => word_len(rest),
            '0'..='9' | '-' | '%' => 1 + number_len(rest.get(1..).unwrap_or("")),
            '{' | '}' | '[' | ']' | '(' | ')' | '<' | '>' | ',' | ':' | '=' | '+' | '*' => 1,
            other => return Err(format!("a word, a number or a sign expected, found {other:?}")),
        };
        let (word, after) = rest.split_at_checked(len).unwrap_or((rest, ""));
        found.push(word);
        rest = after.trim_start();
    }
    Ok(found)
}

fn word_len(text: &str) -> usize {
    text.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count()
}

/// Digits, letters and a point; a sign after `e` is the exponent's.
fn number_len(text: &str) -> usize {
    let mut before = 0;
    let mut inside = |b: &u8| {
        let sign = matches!(b, b'+' | b'-') && matches!(before, b'e' | b'E');
        before = *b;
        sign || b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.')
    };
    text.as_bytes().iter().take_while(|b| inside(b)).count()
}

/// The words of a line that are not read yet.
pub(super) struct Words<'a> {
    rest: &'a [&'a str],
}

impl<'a> Words<'a> {
    pub(super) fn new(line: &'a Line<'_>) -> Self {
        Words { rest: &line.words }
    }

    /// The next word, unread.
    pub(super) fn peek(&self) -> Option<&'a str> {
        self.rest.first().copied()
    }

    /// The next word; `wanted` says what it should be.
    pub(super) fn next(&mut self, wanted: &str) -> Found<&'a str> {
        match self.rest {
            [word, rest @ ..] => {
                self.rest = rest;
                Ok(word)
            }
            [] => Err(format!("{wanted} expected, found the end of the line")),
        }
    }

    /// Reads this word, if it is the next.
    pub(super) fn take(&mut self, word: &str) -> bool {
        let found = self.peek() == Some(word);
        if found {
            self.rest = self.rest.get(1..).unwrap_or(&[]);
        }
        found
    }

    /// Reads this word.
    pub(super) fn expect(&mut self, word: &str) -> Found<()> {
        match self.next(&format!("`{word}`"))? {
            found if found == word => Ok(()),
            found => Err(format!("`{word}` expected, found `{found}`")),
        }
    }

    /// Nothing more may follow.
    pub(super) fn end(&self) -> Found<()> {
        self.peek().map_or(Ok(()), |w| Err(format!("the end of the line expected, found `{w}`")))
    }

    /// A name.
    pub(super) fn name(&mut self, wanted: &str) -> Found<&'a str> {
        let word = self.next(wanted)?;
        if word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            Ok(word)
        } else {
            Err(format!("{wanted} expected, found `{word}`"))
        }
    }

    /// A decimal number that fits.
    pub(super) fn number<T: std::str::FromStr>(&mut self, wanted: &str) -> Found<T> {
        let word = self.next(wanted)?;
        word.parse().map_err(|_| format!("{wanted} expected, found `{word}`"))
    }

    /// `f32`, `f16x8`, `tile<f32, 16x16, c>`.
    pub(super) fn ty(&mut self) -> Found<Type> {
        let word = self.name("a type")?;
        if let Some(scalar) = scalar(word) {
            return Ok(scalar.into());
        }
        if word == "tile" {
            self.expect("<")?;
            let word = self.name("an element type")?;
            let scalar = scalar(word).ok_or_else(|| unknown("element type", word))?;
            self.expect(",")?;
            let size = self.next("a size such as `16x16`")?;
            let (rows, cols) = size
                .split_once('x')
                .and_then(|(r, c)| Some((r.parse().ok()?, c.parse().ok()?)))
                .ok_or_else(|| format!("a size such as `16x16` expected, found `{size}`"))?;
            self.expect(",")?;
            let word = self.name("a role")?;
            let roles = [Role::A, Role::B, Role::C, Role::Row];
            let role = roles.into_iter().find(|r| r.name() == word);
            let role = role.ok_or_else(|| unknown("role", word))?;
            self.expect(">")?;
            return Ok(Type::Tile(Tile { scalar, rows, cols, role }));
        }
        word.rsplit_once('x')
            .and_then(|(s, lanes)| Some(Type::Vector(scalar(s)?, lanes.parse().ok()?)))
            .ok_or_else(|| unknown("type", word))
    }
}

/// The element type of a name.
pub(super) fn scalar(name: &str) -> Option<Scalar> {
    Scalar::ALL.into_iter().find(|s| s.name() == name)
}

pub(super) fn unknown(what: &str, word: &str) -> String {
    format!("no {what} is called `{word}`")
}
