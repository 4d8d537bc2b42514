//! Markdown in colour, while it streams.
//!
//! Every character is kept where it stands: marks such as `**` are dimmed, not taken away, so what
//! is on the screen can be copied as the model wrote it. A mark that is never closed changes
//! nothing beyond its line. Layout (wrapping, hanging indents) is [`crate::wrap`]'s, which is told
//! what each piece is.

mod code;
mod inline;

use anstyle::{AnsiColor, Style};

use crate::terminal::DIM;
use code::Code;
use inline::Inline;

/// Text with its style.
type Styled = (String, Style);

/// How a piece of text is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Words that may go on in the next line.
    Flowing,
    /// The marker before an item's text: the lines of the item begin below its end.
    Marker,
    /// As it is: code and tables.
    Verbatim,
}

/// Text of one style.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) style: Style,
    pub(crate) layout: Layout,
}

const HEADING: Style = AnsiColor::Cyan.on_default().bold();
const MARKER: Style = AnsiColor::Cyan.on_default();
const CODE: Style = AnsiColor::Yellow.on_default();

/// Where in the structure of lines the text is.
#[derive(Debug, Clone, PartialEq)]
enum Block {
    /// At the beginning of a line, or of an item's text.
    Begin,
    /// In a line of words; headings have a style of their own.
    Words(Style),
    /// In a row of a table.
    Row,
    /// In fenced code, at the beginning of a line or not.
    Code { fence: Fence, code: Code, begin: bool },
}

/// The fence that opened a block of code: the character, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fence {
    mark: char,
    len: usize,
}

/// How a line begins.
#[derive(Debug, PartialEq)]
enum Opening {
    /// More text is needed to tell.
    Open,
    Words,
    Heading,
    Row,
    /// The whole line, in the style of marks: a rule.
    Rule,
    /// A marker, this many bytes before an item's text.
    Marker(usize),
    Fence(Fence, Code),
}

/// Longest line that is held back while it may be a fence; longer ones are words.
const LONGEST_FENCE: usize = 200;

/// Markdown that is fed piece by piece.
#[derive(Debug)]
pub(crate) struct Markdown {
    block: Block,
    inline: Inline,
    /// The beginning of a line that is not understood yet.
    held: String,
    pieces: Vec<Piece>,
}

impl Markdown {
    pub(crate) fn new() -> Self {
        Markdown {
            block: Block::Begin,
            inline: Inline::default(),
            held: String::new(),
            pieces: Vec::new(),
        }
    }

    /// Takes text; gives what is certain of its style.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        text.chars().for_each(|c| self.feed(c));
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text; gives the rest.
    pub(crate) fn finish(&mut self) -> Vec<Piece> {
        self.settle(true);
        self.end_line();
        if let Block::Code { code, .. } = &mut self.block {
            let rest = code.flush();
            add(&mut self.pieces, rest, Layout::Verbatim);
        }
        self.block = Block::Begin;
        std::mem::take(&mut self.pieces)
    }

    fn feed(&mut self, c: char) {
        let begins = matches!(self.block, Block::Begin | Block::Code { begin: true, .. });
        if c == '\n' {
            self.settle(true);
            self.end_line();
            return self.line_break();
        }
        if begins {
            self.held.push(c);
            return self.settle(false);
        }
        self.inside(c);
    }

    /// A character whose line is understood.
    fn inside(&mut self, c: char) {
        match &mut self.block {
            Block::Code { code, .. } => {
                let pieces = code.push(c);
                add(&mut self.pieces, pieces, Layout::Verbatim);
            }
            Block::Row => add(&mut self.pieces, [(c.to_string(), Style::new())], Layout::Verbatim),
            Block::Words(base) => {
                let pieces = self.inline.push(c, *base);
                add(&mut self.pieces, pieces, Layout::Flowing);
            }
            Block::Begin => self.held.push(c),
        }
    }

    /// Decides what the held beginning of a line is, as soon as that is certain or `complete`.
    fn settle(&mut self, complete: bool) {
        match &self.block {
            Block::Begin => {}
            Block::Code { fence, begin: true, .. } => {
                let fence = *fence;
                return self.settle_code(fence, complete);
            }
            _ => return,
        }
        let held = std::mem::take(&mut self.held);
        match opening(&held, complete) {
            Opening::Open => self.held = held,
            Opening::Words => self.go_on(Block::Words(Style::new()), &held),
            Opening::Heading => self.go_on(Block::Words(HEADING), &held),
            Opening::Row => self.go_on(Block::Row, &held),
            Opening::Rule => add(&mut self.pieces, [(held, DIM)], Layout::Verbatim),
            Opening::Marker(len) => {
                let (marker, rest) = held.split_at(len);
                add(&mut self.pieces, [(marker.to_string(), MARKER)], Layout::Marker);
                // What an item begins with may be a block itself.
                rest.chars().for_each(|c| self.feed(c));
                if complete {
                    self.settle(true);
                }
            }
            Opening::Fence(fence, code) => {
                add(&mut self.pieces, [(held, DIM)], Layout::Verbatim);
                self.block = Block::Code { fence, code, begin: false };
            }
        }
    }

    fn go_on(&mut self, block: Block, held: &str) {
        self.block = block;
        held.chars().for_each(|c| self.inside(c));
    }

    /// A line of code may be the closing fence.
    fn settle_code(&mut self, fence: Fence, complete: bool) {
        let trimmed = self.held.trim();
        let closes = trimmed.chars().all(|c| c == fence.mark);
        if closes && !complete {
            return;
        }
        let held = std::mem::take(&mut self.held);
        if closes && held.trim().len() >= fence.len {
            add(&mut self.pieces, [(held, DIM)], Layout::Verbatim);
            self.block = Block::Row;
            return;
        }
        if let Block::Code { begin, .. } = &mut self.block {
            *begin = false;
        }
        held.chars().for_each(|c| self.inside(c));
    }

    /// Gives what a line's inline marks held back.
    fn end_line(&mut self) {
        if let Block::Words(base) = self.block {
            let pieces = self.inline.end(base);
            add(&mut self.pieces, pieces, Layout::Flowing);
        }
    }

    fn line_break(&mut self) {
        if let Block::Code { code, begin, .. } = &mut self.block {
            let rest = code.line_break();
            add(&mut self.pieces, rest, Layout::Verbatim);
            *begin = true;
        } else {
            self.block = Block::Begin;
        }
        add(&mut self.pieces, [("\n".to_string(), Style::new())], Layout::Flowing);
    }
}

/// Adds text; neighbours that look alike become one.
fn add(pieces: &mut Vec<Piece>, more: impl IntoIterator<Item = Styled>, layout: Layout) {
    for (text, style) in more {
        match pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if (last.style, last.layout) == (style, layout) => last.text += &text,
            _ => pieces.push(Piece { text, style, layout }),
        }
    }
}

/// The opening of `line`, which is all of the line if `complete`.
fn opening(line: &str, complete: bool) -> Opening {
    let text = line.trim_start_matches([' ', '\t']);
    let indent = line.len() - text.len();
    let Some(first) = text.chars().next() else {
        return if complete { Opening::Words } else { Opening::Open };
    };
    let open_or = |otherwise| if complete { otherwise } else { Opening::Open };
    let run = text.chars().take_while(|c| *c == first).count();
    let alone = text.len() == run * first.len_utf8();
    let behind = text[run * first.len_utf8()..].chars().next();
    match first {
        '#' if run > 6 => Opening::Words,
        '#' if alone => open_or(Opening::Heading),
        '#' if behind == Some(' ') => Opening::Heading,
        '`' | '~' if alone && run < 3 => open_or(Opening::Words),
        '`' | '~' if run >= 3 => {
            let info = &text[run..];
            if info.contains('`') || text.len() > LONGEST_FENCE {
                Opening::Words
            } else {
                open_or(Opening::Fence(Fence { mark: first, len: run }, Code::of(info)))
            }
        }
        '-' | '*' | '_' if alone => open_or(if run >= 3 { Opening::Rule } else { Opening::Words }),
        '-' | '*' | '+' if run == 1 && behind == Some(' ') => Opening::Marker(indent + 2),
        '+' if alone => open_or(Opening::Words),
        '>' => match text[1..].chars().next() {
            None => open_or(Opening::Marker(indent + 1)),
            Some(' ') => Opening::Marker(indent + 2),
            Some(_) => Opening::Marker(indent + 1),
        },
        '|' => Opening::Row,
        '0'..='9' => numbered(text, indent, complete),
        _ => Opening::Words,
    }
}

/// Whether a line that begins with a digit is an item of a numbered list.
fn numbered(text: &str, indent: usize, complete: bool) -> Opening {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let mut rest = text[digits..].chars();
    match (rest.next(), rest.next()) {
        _ if digits > 9 => Opening::Words,
        (None, _) | (Some('.' | ')'), None) if !complete => Opening::Open,
        (Some('.' | ')'), Some(' ')) => Opening::Marker(indent + digits + 2),
        _ => Opening::Words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text with `[` and `]` around what is not plain: b bold, i italic, c code, d dimmed, h
    /// heading, m marker, v verbatim.
    fn shown(pieces: &[Piece]) -> String {
        let letters = |piece: &Piece| {
            let effects = piece.style.get_effects();
            let mut letters = String::new();
            let heading = piece.style.get_fg_color() == HEADING.get_fg_color();
            for (on, letter) in [
                (piece.layout == Layout::Marker, 'm'),
                (piece.layout == Layout::Verbatim, 'v'),
                (heading && piece.layout == Layout::Flowing, 'h'),
                (effects.contains(anstyle::Effects::BOLD) && !heading, 'b'),
                (effects.contains(anstyle::Effects::ITALIC), 'i'),
                (effects.contains(anstyle::Effects::DIMMED), 'd'),
                (piece.style.get_fg_color() == CODE.get_fg_color(), 'c'),
            ] {
                letters.extend(on.then_some(letter));
            }
            letters
        };
        let one = |piece: &Piece| match letters(piece) {
            letters if letters.is_empty() => piece.text.clone(),
            letters => format!("[{letters} {}]", piece.text),
        };
        pieces.iter().map(one).collect()
    }

    fn joined(text: &str, pieces: impl Iterator<Item = String>) -> Vec<Piece> {
        let mut markdown = Markdown::new();
        let mut parts: Vec<Piece> = pieces.flat_map(|piece| markdown.push(&piece)).collect();
        parts.extend(markdown.finish());
        let mut all = Vec::new();
        for Piece { text, style, layout } in parts {
            add(&mut all, [(text, style)], layout);
        }
        let whole: String = all.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(whole, text);
        all
    }

    #[test]
    fn marks_are_dimmed_and_words_are_styled() {
        struct Case {
            text: &'static str,
            shown: &'static str,
            why: &'static str,
        }
        let cases = [
            Case { text: "plain\ntext", shown: "plain\ntext", why: "words" },
            Case { text: "a **b c** d", shown: "a [d **][b b c][d **] d", why: "bold" },
            Case { text: "*a* _b_", shown: "[d *][i a][d *] [d _][i b][d _]", why: "italics" },
            Case { text: "***a*** b", shown: "[d ***][bi a][d ***] b", why: "both" },
            Case {
                text: "**a *b* c**",
                shown: "[d **][b a ][d *][bi b][d *][b  c][d **]",
                why: "nested",
            },
            Case { text: "2 * 3 * 4, 2**3", shown: "2 * 3 * 4, 2**3", why: "products" },
            Case { text: "snake_case_name", shown: "snake_case_name", why: "names" },
            Case {
                text: "这是**重点**内容",
                shown: "这是[d **][b 重点][d **]内容",
                why: "no spaces",
            },
            Case {
                text: "**open\nplain",
                shown: "[d **][b open]\nplain",
                why: "ends with its line",
            },
            Case { text: "a `b*c*` d", shown: "a [d `][c b*c*][d `] d", why: "code" },
            Case { text: "``a`b`` c", shown: "[d ``][c a`b][d ``] c", why: "two backticks" },
            Case { text: "\\*a\\* \\", shown: "\\*a\\* \\", why: "escapes" },
            Case {
                text: "## A **b**\nc",
                shown: "[h ## A ][hd **][h b][hd **]\nc",
                why: "heading",
            },
            Case { text: "#hash ####### x", shown: "#hash ####### x", why: "no heading" },
            Case { text: "- a\n  * b", shown: "[m - ]a\n[m   * ]b", why: "lists" },
            Case { text: "10. a\n1984 b\n3.5", shown: "[m 10. ]a\n1984 b\n3.5", why: "numbered" },
            Case {
                text: "- **a**: b",
                shown: "[m - ][d **][b a][d **]: b",
                why: "bold in an item",
            },
            Case { text: "> - a\n>b", shown: "[m > - ]a\n[m >]b", why: "quotes" },
            Case { text: "---\n*** \n--", shown: "[vd ---]\n*** \n--", why: "rules" },
            Case { text: "| a | **b** |\n", shown: "[v | a | **b** |]\n", why: "tables" },
            Case {
                text: "~~~\n# a\n~~~\n# b",
                shown: "[vd ~~~]\n[v # a]\n[vd ~~~]\n[h # b]",
                why: "fences",
            },
            Case {
                text: "````md\n```\n````\nb",
                shown: "[vd ````md]\n[v ```]\n[vd ````]\nb",
                why: "a longer fence",
            },
            Case {
                text: "- ```\n  x\n  ```\nb",
                shown: "[m - ][vd ```]\n[v   x]\n[vd   ```]\nb",
                why: "code in an item",
            },
            Case { text: "```a``` b", shown: "[d ```][c a][d ```] b", why: "not a fence" },
            Case { text: "```\nopen", shown: "[vd ```]\n[v open]", why: "cut in code" },
            Case { text: "```py", shown: "[vd ```py]", why: "cut in a fence" },
        ];
        for Case { text, shown: expected, why } in cases {
            assert_eq!(shown(&joined(text, [text.to_string()].into_iter())), expected, "{why}");
            let letters = joined(text, text.chars().map(String::from));
            assert_eq!(shown(&letters), expected, "{why}, letter by letter");
        }
    }

    #[test]
    fn no_character_is_lost_or_added() {
        let pieces = ["*", "_", "`", "\n", "a", " ", "#", "- ", "```", "1.", "|", ">", "\\", "é"];
        let n = pieces.len();
        for number in 0..n.pow(4) {
            let word = |place: u32| pieces[number / n.pow(place) % n];
            let text: Vec<&str> = (0..4).map(word).collect();
            joined(&text.concat(), text.iter().map(|t| t.to_string()));
        }
    }
}
