//! Emphasis and code within a line of Markdown.
//!
//! A run of marks opens or closes by what stands before and after it, as in CommonMark, but without
//! looking ahead for the other end.

use anstyle::Style;

use super::{CODE, Styled};
use crate::terminal::DIM;

/// The marks that are open in a line.
#[derive(Debug, Default)]
pub(super) struct Inline {
    bold: bool,
    italic: bool,
    /// The number of backticks that opened the code the text is in.
    code: Option<usize>,
    /// Equal marks, whose meaning depends on what follows them; or a backslash.
    run: String,
    /// The character before the run.
    before: Option<char>,
}

impl Inline {
    fn style(&self, base: Style) -> Style {
        let effects = [(self.bold, Style::new().bold()), (self.italic, Style::new().italic())];
        let on = effects.iter().filter(|(on, _)| *on).map(|(_, style)| style.get_effects());
        let style = on.fold(base, |style, effect| style.effects(style.get_effects() | effect));
        if self.code.is_some() { style.fg_color(CODE.get_fg_color()) } else { style }
    }

    /// Takes a character of text in this style; gives what is certain.
    pub(super) fn push(&mut self, c: char, base: Style) -> Vec<Styled> {
        let mut out = Vec::new();
        if self.run == "\\" {
            // An escaped mark is a character like others.
            self.run.push(c);
            let text = std::mem::take(&mut self.run);
            self.before = Some(c);
            out.push((text, self.style(base)));
            return out;
        }
        if !self.run.is_empty() && !self.run.starts_with(c) {
            out.push(self.resolve(Some(c), base));
        }
        let marks = if self.code.is_some() { &['`'][..] } else { &['`', '*', '_', '\\'] };
        if marks.contains(&c) {
            self.run.push(c);
        } else {
            out.push((c.to_string(), self.style(base)));
            self.before = Some(c);
        }
        out
    }

    /// The end of the line, and of all that was open in it.
    pub(super) fn end(&mut self, base: Style) -> Vec<Styled> {
        let mut rest = Vec::new();
        if !self.run.is_empty() {
            rest.push(self.resolve(None, base));
        }
        *self = Inline::default();
        rest
    }

    /// The meaning of the run of marks before `next`.
    fn resolve(&mut self, next: Option<char>, base: Style) -> Styled {
        let run = std::mem::take(&mut self.run);
        let before = self.before;
        self.before = run.chars().last();
        let plain = self.style(base);
        let dim = base.effects(base.get_effects() | DIM.get_effects());
        let (mark, len) = (run.chars().next().unwrap_or(' '), run.chars().count());
        if mark == '`' {
            self.code = match self.code {
                Some(open) if open == len => None,
                Some(_) => return (run, plain),
                None => Some(len),
            };
            return (run, dim);
        }
        let word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let space = |c: Option<char>| c.is_none_or(char::is_whitespace);
        let inside_word = match mark {
            '_' => word(before),
            // Languages without spaces between words have emphasis anywhere; `2**3` is none.
            _ => before.is_some_and(|c| c.is_ascii_alphanumeric()),
        };
        let opens = !space(next) && !inside_word;
        let closes = !(space(before) || (mark == '_' && word(next)));
        let (italic, bold) = (len == 1 || len == 3, len == 2 || len == 3);
        let open = (italic && self.italic) || (bold && self.bold);
        let fits = if open { closes } else { opens };
        if mark == '\\' || len > 3 || !fits {
            return (run, plain);
        }
        self.italic = if italic { !open } else { self.italic };
        self.bold = if bold { !open } else { self.bold };
        (run, dim)
    }
}
