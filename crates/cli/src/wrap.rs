//! Lines that end where the window does, between words, while the text streams.
//!
//! A word waits until its end is known or it fills a line. Lines that a wrap begins are indented
//! like the item or the line that they continue. Widths are counted as terminals do: two columns
//! for ideographs, none for combining marks. The window may change its width at any time.

use anstyle::Style;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::markdown::{Layout, Piece};

/// Narrower windows are left to the terminal.
const NARROWEST: usize = 16;
/// A tab goes to the next multiple.
const TAB: usize = 8;
/// Closing punctuation of scripts without spaces, which must not begin a line.
const NOT_FIRST: &str = "、。，．：；！？）」』】〕〉》”’・ー…々";
/// Opening punctuation, which must not end one.
const NOT_LAST: &str = "（「『【〔〈《“‘";
/// They belong to the picture before them.
const SKIN_TONES: std::ops::RangeInclusive<char> = '\u{1f3fb}'..='\u{1f3ff}';

/// Text laid out in lines.
#[derive(Debug)]
pub(crate) struct Wrap {
    colours: bool,
    /// Where the cursor is.
    column: usize,
    /// Where lines begin that a wrap begins.
    hang: usize,
    /// Whether only white space stands in the line so far.
    leading: bool,
    /// Blanks between what is written and the word: they go away with a wrap.
    blanks: Vec<(Style, String)>,
    /// The word so far, in its styles.
    word: Vec<(Style, String)>,
    /// Its columns.
    size: usize,
    out: String,
}

/// A text for stderr beside what it is about, in lines of the window there; as it is where that is
/// no terminal.
pub(crate) fn laid_out(about: &str, text: &str) -> String {
    let width = terminal_size::terminal_size_of(std::io::stderr());
    let width = width.map(|(width, _)| usize::from(width.0));
    let mut wrap = Wrap::new(false);
    let mut lines = String::new();
    for (layout, text) in [(Layout::Marker, about), (Layout::Flowing, text)] {
        lines += &wrap.push(&Piece { text: text.into(), style: Style::new(), layout }, width);
    }
    lines + &wrap.finish(width)
}

impl Wrap {
    pub(crate) fn new(colours: bool) -> Self {
        Wrap {
            colours,
            column: 0,
            hang: 0,
            leading: true,
            blanks: Vec::new(),
            word: Vec::new(),
            size: 0,
            out: String::new(),
        }
    }

    /// Lays out a piece in a window that wide; `None` leaves lines as they are. Gives what can be
    /// written now.
    pub(crate) fn push(&mut self, piece: &Piece, width: Option<usize>) -> String {
        let width = width.filter(|width| *width >= NARROWEST).unwrap_or(usize::MAX);
        if self.column > width {
            // The window became narrower, and the terminal has cut the line.
            self.column %= width;
        }
        if self.hang > width / 2 {
            self.hang = 0;
        }
        match piece.layout {
            Layout::Flowing => piece.text.chars().for_each(|c| self.flow(c, piece.style, width)),
            Layout::Marker | Layout::Verbatim => {
                self.end_word(width);
                self.write_blanks();
                for part in piece.text.split_inclusive('\n') {
                    self.write(piece.style, part);
                    if part.ends_with('\n') {
                        self.begin_line();
                    }
                }
                if piece.layout == Layout::Marker {
                    self.hang = if self.column <= width / 2 { self.column } else { 0 };
                }
            }
        }
        std::mem::take(&mut self.out)
    }

    /// Gives what was held back.
    pub(crate) fn finish(&mut self, width: Option<usize>) -> String {
        self.end_word(width.filter(|width| *width >= NARROWEST).unwrap_or(usize::MAX));
        self.blanks.clear();
        std::mem::take(&mut self.out)
    }

    /// Whether the cursor is at the beginning of a line.
    pub(crate) fn at_line_start(&self) -> bool {
        self.column == 0
    }

    fn flow(&mut self, c: char, style: Style, width: usize) {
        match c {
            '\n' => {
                self.end_word(width);
                self.blanks.clear();
                self.out.push('\n');
                self.begin_line();
            }
            ' ' | '\t' => {
                self.end_word(width);
                if self.leading {
                    self.write(style, c.encode_utf8(&mut [0; 4]));
                    self.hang = if self.column <= width / 2 { self.column } else { 0 };
                } else {
                    push(&mut self.blanks, style, c);
                }
            }
            _ => {
                if self.may_break_before(c) || self.size + columns(c) > width - self.hang {
                    self.end_word(width);
                }
                push(&mut self.word, style, c);
                self.size += columns(c);
            }
        }
    }

    /// Whether a line may end between the word and `c`, without a blank: between ideographs.
    fn may_break_before(&self, c: char) -> bool {
        let Some(last) = self.word.last().and_then(|(_, text)| text.chars().last()) else {
            return false;
        };
        let wide = columns(c) == 2 || columns(last) == 2;
        let joined = columns(c) == 0 || last == '\u{200d}' || SKIN_TONES.contains(&c);
        wide && !joined && !NOT_FIRST.contains(c) && !NOT_LAST.contains(last)
    }

    /// Writes the word, in the next line if this one has no room for it.
    fn end_word(&mut self, width: usize) {
        let word = std::mem::take(&mut self.word);
        if word.is_empty() {
            return;
        }
        let blanks = self.blanks.iter().flat_map(|(_, text)| text.chars());
        let start = blanks.fold(self.column, after);
        let size: usize = word.iter().map(|(_, text)| text.width()).sum();
        self.size = 0;
        if self.column > self.hang && start.saturating_add(size) > width {
            self.blanks.clear();
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', self.hang));
            self.column = self.hang;
        }
        self.write_blanks();
        word.iter().for_each(|(style, text)| self.write(*style, text));
        self.leading = false;
    }

    fn write_blanks(&mut self) {
        for (style, text) in std::mem::take(&mut self.blanks) {
            self.write(style, &text);
        }
    }

    fn write(&mut self, style: Style, text: &str) {
        self.column = text.chars().filter(|c| *c != '\n').fold(self.column, after);
        if self.colours && style != Style::new() {
            self.out += &format!("{style}{text}{style:#}");
        } else {
            self.out += text;
        }
    }

    fn begin_line(&mut self) {
        (self.column, self.hang, self.leading) = (0, 0, true);
    }
}

fn push(parts: &mut Vec<(Style, String)>, style: Style, c: char) {
    match parts.last_mut() {
        Some((last, text)) if *last == style => text.push(c),
        _ => parts.push((style, c.to_string())),
    }
}

fn columns(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// The column after a character.
fn after(column: usize, c: char) -> usize {
    if c == '\t' { column / TAB * TAB + TAB } else { column + columns(c) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markdown::Markdown;

    /// The text in a window that wide, given as it is or letter by letter.
    fn laid_out(text: &str, width: usize, letters: bool) -> String {
        let (mut markdown, mut wrap) = (Markdown::new(), Wrap::new(false));
        let parts: Vec<String> =
            if letters { text.chars().map(String::from).collect() } else { vec![text.into()] };
        let mut pieces: Vec<Piece> = parts.iter().flat_map(|part| markdown.push(part)).collect();
        pieces.extend(markdown.finish());
        let mut shown: String = pieces.iter().map(|piece| wrap.push(piece, Some(width))).collect();
        shown += &wrap.finish(Some(width));
        shown
    }

    #[test]
    fn lines_end_between_words() {
        struct Case {
            text: &'static str,
            shown: &'static str,
            why: &'static str,
        }
        let cases = [
            Case {
                text: "The quick brown fox jumps.",
                shown: "The quick brown fox\njumps.",
                why: "the blank becomes the line's end",
            },
            Case {
                text: "exactly twenty chars\nand more",
                shown: "exactly twenty chars\nand more",
                why: "a full line",
            },
            Case {
                text: "a aVeryLongWordThatNeedsMoreThanOneLine b",
                shown: "a\naVeryLongWordThatNee\ndsMoreThanOneLine b",
                why: "only words longer than a line are cut",
            },
            Case {
                text: "- an item that goes on\n  - and on and on and on",
                shown: "- an item that goes\n  on\n  - and on and on\n    and on",
                why: "items hang below their first word",
            },
            Case {
                text: "    indented by four spaces",
                shown: "    indented by four\n    spaces",
                why: "so do indented lines",
            },
            Case {
                text: "```\nlet this_line_is_longer = than_the_window;\n```\nwords that are wrapped",
                shown: "```\nlet this_line_is_longer = than_the_window;\n```\nwords that are\nwrapped",
                why: "code is not wrapped",
            },
            Case {
                text: "中文没有空格，所以每个字后面都可以换行。",
                shown: "中文没有空格，所以每\n个字后面都可以换行。",
                why: "ideographs take two columns and need no blanks",
            },
            Case {
                text: "一二三四五六七八九十。一",
                shown: "一二三四五六七八九\n十。一",
                why: "a full stop begins no line",
            },
            Case {
                text: "e\u{301}e\u{301}e\u{301}e\u{301} e\u{301}e\u{301}e\u{301}e\u{301} 1234567890 x",
                shown: "e\u{301}e\u{301}e\u{301}e\u{301} e\u{301}e\u{301}e\u{301}e\u{301} 1234567890\nx",
                why: "combining marks take none",
            },
            Case { text: "a  b\n\n  \nc ", shown: "a  b\n\n  \nc", why: "blank lines stay" },
        ];
        for Case { text, shown, why } in cases {
            assert_eq!(laid_out(text, 20, false), shown, "{why}");
            assert_eq!(laid_out(text, 20, true), shown, "{why}, letter by letter");
        }
    }

    #[test]
    fn a_window_may_change_its_width() {
        let piece = |text: &str| Piece {
            text: text.to_string(),
            style: Style::new(),
            layout: Layout::Flowing,
        };
        let mut wrap = Wrap::new(false);
        let text = piece("one two three four five six seven eight ");
        let mut shown = wrap.push(&text, Some(40));
        shown += &wrap.push(&text, Some(20));
        shown += &wrap.push(&text, None);
        assert_eq!(
            shown,
            "one two three four five six seven eight\none two three four\nfive six seven eight one \
             two three four five six seven eight"
        );
    }

    #[test]
    fn styles_end_where_their_text_ends() {
        let mut wrap = Wrap::new(true);
        let bold = Piece {
            text: "bold words wrapped".into(),
            style: Style::new().bold(),
            layout: Layout::Flowing,
        };
        let shown = wrap.push(&bold, Some(16)) + &wrap.finish(Some(16));
        let plain = anstream::adapter::strip_str(&shown).to_string();
        assert_eq!(plain, "bold words\nwrapped");
        assert!(shown.contains("\x1b[1mwords\x1b[0m\n"), "{shown:?}");
    }
}
