//! Colours for code: comments, strings, numbers and common keywords.
//!
//! It knows no grammar, only how a language begins comments and strings, since a whole highlighter
//! would be larger than the rest of the command line. Code whose language is not named stays as it
//! is.

use anstyle::{AnsiColor, Style};

use super::Styled;
use crate::terminal::DIM;

const STRING: Style = AnsiColor::Green.on_default();
const NUMBER: Style = AnsiColor::Cyan.on_default();
const KEYWORD: Style = AnsiColor::Magenta.on_default();

/// How a family of languages writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Language {
    /// By these names in a fence.
    names: &'static [&'static str],
    /// The text that begins a comment up to the end of the line.
    comment: &'static str,
    /// Characters that begin and end a string.
    quotes: &'static str,
    /// Whether words such as `if` are keywords.
    keywords: bool,
}

/// The lexical rules of these languages; `'` is no quote where it also begins lifetimes or labels.
const LANGUAGES: [Language; 9] = [
    Language { names: &["rust", "rs", "zig"], comment: "//", quotes: "\"", keywords: true },
    Language {
        names: &[
            "c", "cpp", "c++", "h", "hpp", "java", "cs", "csharp", "swift", "kotlin", "scala",
            "dart", "php",
        ],
        comment: "//",
        quotes: "\"'",
        keywords: true,
    },
    Language {
        names: &["js", "javascript", "ts", "typescript", "jsx", "tsx", "go", "golang"],
        comment: "//",
        quotes: "\"'`",
        keywords: true,
    },
    Language {
        names: &[
            "python", "py", "ruby", "rb", "bash", "sh", "shell", "zsh", "fish", "perl", "r",
            "julia", "elixir", "nix",
        ],
        comment: "#",
        quotes: "\"'",
        keywords: true,
    },
    Language {
        names: &["yaml", "yml", "toml", "ini", "dockerfile", "makefile", "make", "cmake", "conf"],
        comment: "#",
        quotes: "\"'",
        keywords: false,
    },
    Language { names: &["sql", "lua", "ada"], comment: "--", quotes: "\"'", keywords: true },
    Language {
        names: &["lisp", "clojure", "scheme", "asm"],
        comment: ";",
        quotes: "\"",
        keywords: false,
    },
    Language {
        names: &["json", "jsonc", "json5", "css", "scss"],
        comment: "//",
        quotes: "\"'",
        keywords: false,
    },
    Language { names: &["html", "xml", "svg"], comment: "", quotes: "\"", keywords: false },
];

/// Words that mean the same in most languages that have them; in capitals too, for SQL.
const KEYWORDS: &str = "\
    and as async await begin bool break by case catch char class const continue create def \
    default del delete do double done elif else elseif end enum esac except export extends false \
    fi final finally float fn for from func function go group if impl implements import in \
    insert int interface into is join lambda let local long loop match mod mut new nil none not \
    null or order package pass private protected pub public raise return select self static \
    struct switch then this throw true try type update use var void where while with yield";

/// Where in the code the text is.
#[derive(Debug, Clone, PartialEq)]
enum State {
    Plain,
    Comment,
    /// In a string that this character ends; `escaped` after a backslash.
    String {
        quote: char,
        escaped: bool,
    },
}

/// Code that is fed character by character.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Code {
    language: Option<Language>,
    state: State,
    /// A word, or the beginning of a comment.
    held: String,
}

impl Code {
    /// Code in the language that a fence names.
    pub(super) fn of(info: &str) -> Self {
        let end = |c: char| c.is_whitespace() || matches!(c, '{' | ',' | ':');
        let name = info.trim_start().split(end).next().unwrap_or_default().to_lowercase();
        let language = LANGUAGES.into_iter().find(|l| l.names.contains(&name.as_str()));
        Code { language, state: State::Plain, held: String::new() }
    }

    /// Takes a character; gives what is certain of its style.
    pub(super) fn push(&mut self, c: char) -> Vec<Styled> {
        let one = |style| vec![(c.to_string(), style)];
        let Some(language) = self.language else { return one(Style::new()) };
        match &mut self.state {
            State::Comment => one(DIM),
            State::String { quote, escaped } => {
                if c == *quote && !*escaped {
                    self.state = State::Plain;
                } else {
                    *escaped = c == '\\' && !*escaped;
                }
                one(STRING)
            }
            State::Plain => self.plain(c, language),
        }
    }

    fn plain(&mut self, c: char, language: Language) -> Vec<Styled> {
        let word = is_word(c);
        let goes_on = if word {
            self.held.chars().all(is_word)
        } else {
            !self.held.is_empty()
                && language.comment.starts_with(&(self.held.clone() + &c.to_string()))
        };
        let mut out = if goes_on { Vec::new() } else { self.flush() };
        if word || goes_on || language.comment.starts_with(c) {
            self.held.push(c);
        } else if language.quotes.contains(c) {
            self.state = State::String { quote: c, escaped: false };
            out.push((c.to_string(), STRING));
        } else {
            out.push((c.to_string(), Style::new()));
        }
        if !language.comment.is_empty() && self.held == language.comment {
            self.state = State::Comment;
            out.push((std::mem::take(&mut self.held), DIM));
        }
        out
    }

    /// The end of a line: comments end with it, and strings but for those between backticks.
    pub(super) fn line_break(&mut self) -> Vec<Styled> {
        if !matches!(self.state, State::String { quote: '`', .. }) {
            self.state = State::Plain;
        }
        self.flush()
    }

    /// The text that was held back.
    pub(super) fn flush(&mut self) -> Vec<Styled> {
        let held = std::mem::take(&mut self.held);
        let keywords = self.language.is_some_and(|language| language.keywords);
        let style = match held.chars().next() {
            None => return Vec::new(),
            Some('0'..='9') => NUMBER,
            Some(_) if keywords && is_keyword(&held) => KEYWORD,
            Some(_) => Style::new(),
        };
        vec![(held, style)]
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a word is a keyword, as it stands, as in SQL, or as in Python.
fn is_keyword(word: &str) -> bool {
    let shouted = word.chars().all(|c| c.is_ascii_uppercase());
    let word = match word {
        "None" | "True" | "False" => word.to_lowercase(),
        _ if shouted => word.to_lowercase(),
        _ => word.to_string(),
    };
    KEYWORDS.split(' ').any(|keyword| keyword == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code with a letter before each piece that is not plain: k keyword, s string, n number, c
    /// comment.
    fn shown(language: &str, text: &str) -> String {
        let mut code = Code::of(language);
        let mut pieces: Vec<Styled> = Vec::new();
        let mut add = |more: Vec<Styled>| {
            for (text, style) in more {
                match pieces.last_mut() {
                    Some(last) if last.1 == style => last.0 += &text,
                    _ => pieces.push((text, style)),
                }
            }
        };
        for c in text.chars() {
            if c == '\n' {
                add(code.line_break());
                add(vec![("\n".to_string(), Style::new())]);
            } else {
                add(code.push(c));
            }
        }
        add(code.flush());
        let joined: String = pieces.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(joined, text);
        let letter = |style| match style {
            KEYWORD => "k:",
            STRING => "s:",
            NUMBER => "n:",
            DIM => "c:",
            _ => "",
        };
        pieces.iter().map(|(text, style)| format!("{}{text}|", letter(*style))).collect()
    }

    #[test]
    fn code_is_coloured_by_its_language() {
        let cases = [
            (
                "rust",
                "let a: &'a str = \"x\\\"//\"; // if",
                "k:let| a: &'a str = |s:\"x\\\"//\"|; |c:// if|",
            ),
            (
                "python title=x",
                "if x2 == 12: # no\n  None",
                "k:if| x2 == |n:12|: |c:# no|\n  |k:None|",
            ),
            ("js", "a / b; `x\ny` //z", "a / b; |s:`x|\n|s:y`| |c://z|"),
            ("SQL", "SELECT a - 1 -- all\nFROM t", "k:SELECT| a - |n:1| |c:-- all|\n|k:FROM| t|"),
            ("json", "{\"if\": true}", "{|s:\"if\"|: true}|"),
            ("c", "'open\nint x /", "s:'open|\n|k:int| x /|"),
            ("", "if # \"a\"", "if # \"a\"|"),
        ];
        for (language, text, expected) in cases {
            assert_eq!(shown(language, text), expected, "{language}");
        }
    }
}
