//! An answer as it appears: exact in a pipe; at a terminal wrapped, in colour, with reasoning
//! dimmed and folded away.

use std::io::{StdoutLock, Write};
use std::time::{Duration, Instant};

use delft::reasoning::{Span, Splitter, TextKind};

use super::conversation::{Role, Turn};
use crate::args::ThinkArg;
use crate::markdown::{Layout, Markdown, Piece};
use crate::terminal::{DIM, Outcome, printable, stdout_is_terminal};
use crate::wrap::Wrap;

/// Rows in which reasoning is shown before it is folded: enough to follow it, few enough to be
/// wiped in any window.
const ROWS: usize = 6;

/// How reasoning is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    /// Its last lines are shown while it lasts.
    Fold,
    /// It stays.
    Show,
    /// Only how long it took.
    Hide,
}

impl View {
    /// The one that the command line asks for.
    pub(super) fn first(think: Option<ThinkArg>) -> View {
        if think == Some(ThinkArg::Hide) { View::Hide } else { View::Fold }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            View::Fold => "folded when done",
            View::Show => "shown",
            View::Hide => "hidden",
        }
    }
}

/// How text is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Byte by byte, for programs.
    Exact,
    /// The same, but for what could steer a terminal.
    Plain,
    /// Laid out; with colours or without, and wiping lines where the terminal can.
    Rendered { colours: bool, wipes: bool },
}

/// Standard output, for answers.
pub(super) struct Screen {
    form: Form,
    pub(super) view: View,
}

impl Screen {
    pub(super) fn new(plain: bool, think: Option<ThinkArg>) -> Screen {
        let colours =
            anstream::AutoStream::choice(&std::io::stdout()) != anstream::ColorChoice::Never;
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let form = match stdout_is_terminal() {
            false => Form::Exact,
            true if plain => Form::Plain,
            true => Form::Rendered { colours, wipes: !dumb },
        };
        Screen { form, view: View::first(think) }
    }

    /// Whether the terminal shows colours.
    pub(super) fn has_colours(&self) -> bool {
        matches!(self.form, Form::Rendered { colours: true, .. })
    }

    /// Begins an answer. Without a splitter the text has no parts.
    pub(super) fn begin(&self, splitter: Option<Splitter>) -> Showing {
        let colours = self.has_colours();
        Showing {
            out: std::io::stdout().lock(),
            form: self.form,
            splitter,
            said: Turn::new(Role::Assistant, ""),
            ends_line: false,
            markdown: Markdown::new(),
            wrap: Wrap::new(colours),
            thoughts: Thoughts::new(self.view, colours),
        }
    }

    /// Shows reasoning that was folded or hidden.
    pub(super) fn show_reasoning(&self, text: &str) -> Outcome {
        let mut showing = self.begin(None);
        let mut wrap = Wrap::new(self.has_colours());
        let text = wrap.push(&dimmed(text), width()) + &wrap.finish(width()) + "\n";
        showing.write(&text)
    }
}

/// The window's columns, as they are now.
fn width() -> Option<usize> {
    window().map(|(width, _)| width)
}

fn window() -> Option<(usize, usize)> {
    let (width, height) = terminal_size::terminal_size_of(std::io::stdout())?;
    Some((usize::from(width.0), usize::from(height.0)))
}

fn dimmed(text: &str) -> Piece {
    Piece { text: printable(text).into_owned(), style: DIM, layout: Layout::Flowing }
}

/// An answer that is being shown.
pub(super) struct Showing {
    out: StdoutLock<'static>,
    form: Form,
    splitter: Option<Splitter>,
    said: Turn,
    /// Whether what was written last was the end of a line.
    ends_line: bool,
    markdown: Markdown,
    wrap: Wrap,
    thoughts: Thoughts,
}

impl Showing {
    /// Takes the text of one token.
    pub(super) fn token(&mut self, text: &str) -> Outcome {
        let spans = match &mut self.splitter {
            Some(splitter) => splitter.push(text),
            None => vec![Span { part: TextKind::Answer, text: text.to_string() }],
        };
        self.thoughts.tokens +=
            usize::from(self.splitter.as_ref().is_some_and(Splitter::is_reasoning));
        spans.iter().try_for_each(|span| self.span(span))
    }

    /// Ends the answer; gives what was said, and the splitter for what may go on.
    pub(super) fn end(mut self) -> Outcome<(Turn, Option<Splitter>)> {
        let rest = self.splitter.as_mut().map(Splitter::finish).unwrap_or_default();
        rest.iter().try_for_each(|span| self.span(span))?;
        if let Form::Rendered { .. } = self.form {
            self.fold()?;
            self.end_line()?;
        } else if !self.ends_line {
            self.write("\n")?;
        }
        Ok((self.said, self.splitter))
    }

    fn span(&mut self, span: &Span) -> Outcome {
        match span.part {
            TextKind::Answer => self.said.text += &span.text,
            TextKind::Reasoning => self.said.reasoning += &span.text,
            TextKind::Mark => {}
        }
        let text = match (self.form, span.part) {
            (Form::Exact | Form::Plain, TextKind::Reasoning | TextKind::Mark)
                if self.thoughts.view == View::Hide =>
            {
                return Ok(());
            }
            (Form::Exact, _) => span.text.clone(),
            (Form::Plain, _) => printable(&span.text).into_owned(),
            (Form::Rendered { .. }, TextKind::Mark) => return self.fold(),
            (Form::Rendered { wipes, .. }, TextKind::Reasoning) => {
                self.end_line()?;
                self.thoughts.push(&span.text, wipes)
            }
            (Form::Rendered { .. }, TextKind::Answer) => {
                self.fold()?;
                let pieces = self.markdown.push(&printable(&span.text));
                pieces.iter().map(|piece| self.wrap.push(piece, width())).collect()
            }
        };
        self.ends_line = span.text.ends_with('\n');
        self.write(&text)
    }

    /// Ends what there is of the answer, and its line.
    fn end_line(&mut self) -> Outcome {
        let pieces = self.markdown.finish();
        let mut text: String = pieces.iter().map(|piece| self.wrap.push(piece, width())).collect();
        text += &self.wrap.finish(width());
        if !self.wrap.at_line_start() {
            self.wrap = Wrap::new(self.thoughts.colours);
            text.push('\n');
        }
        self.write(&text)
    }

    /// Puts a line in the place of reasoning that is done.
    fn fold(&mut self) -> Outcome {
        let Form::Rendered { wipes, .. } = self.form else { return Ok(()) };
        let text = self.thoughts.fold(wipes);
        self.write(&text)
    }

    fn write(&mut self, text: &str) -> Outcome {
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }
}

/// Reasoning as it is shown while it lasts.
struct Thoughts {
    view: View,
    colours: bool,
    began: Option<Instant>,
    tokens: usize,
    wrap: Wrap,
    /// The rows on the screen, the cursor at the end of the last.
    rows: Vec<String>,
}

impl Thoughts {
    fn new(view: View, colours: bool) -> Self {
        Thoughts {
            view,
            colours,
            began: None,
            tokens: 0,
            wrap: Wrap::new(colours),
            rows: Vec::new(),
        }
    }

    /// Takes reasoning; gives what is written for it.
    fn push(&mut self, text: &str, wipes: bool) -> String {
        let first = self.began.is_none();
        self.began.get_or_insert_with(Instant::now);
        match self.view {
            View::Hide if first && wipes => {
                self.rows = vec![String::new()];
                self.dim("thinking ...")
            }
            View::Hide => String::new(),
            View::Show => self.wrap.push(&dimmed(text), width()),
            View::Fold => {
                let text = self.wrap.push(&dimmed(text), width());
                self.scroll(
                    &text,
                    window().map_or(ROWS, |(_, height)| height.saturating_sub(2)),
                    wipes,
                )
            }
        }
    }

    /// Adds laid out text; rows beyond the last few are wiped.
    fn scroll(&mut self, text: &str, height: usize, wipes: bool) -> String {
        let before = self.rows.len();
        for (at, part) in text.split('\n').enumerate() {
            match self.rows.last_mut() {
                Some(row) if at == 0 => *row += part,
                _ => self.rows.push(part.to_string()),
            }
        }
        let most = height.clamp(1, ROWS);
        if !wipes || self.rows.len() <= most {
            return text.to_string();
        }
        self.rows.drain(..self.rows.len() - most);
        wipe(before.min(most)) + &self.rows.join("\n")
    }

    /// Ends the reasoning, if there is any; gives what takes its place.
    fn fold(&mut self, wipes: bool) -> String {
        let Some(began) = self.began.take() else { return String::new() };
        let rest = self.wrap.finish(width());
        let line = match std::mem::take(&mut self.tokens) {
            1 => format!("thought for {}, 1 token", duration(began.elapsed())),
            tokens => format!("thought for {}, {tokens} tokens", duration(began.elapsed())),
        };
        let line = self.dim(&line) + "\n";
        let rows = std::mem::take(&mut self.rows);
        let text = match self.view {
            View::Hide | View::Fold if wipes => wipe(rows.len()) + &line,
            View::Hide => line,
            View::Fold | View::Show if self.wrap.at_line_start() => rest + &line,
            View::Fold | View::Show => rest + "\n" + &line,
        };
        self.wrap = Wrap::new(self.colours);
        text
    }

    fn dim(&self, text: &str) -> String {
        if self.colours { format!("{DIM}{text}{DIM:#}") } else { text.to_string() }
    }
}

/// Clears `rows` rows, of which the cursor is in the last, and goes to the first.
fn wipe(rows: usize) -> String {
    let up = if rows > 1 { format!("\x1b[{}A", rows - 1) } else { String::new() };
    format!("\r{up}\x1b[J")
}

/// A time for people: `3.2 s`, `1 min 12 s`.
fn duration(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_scrolls_in_a_few_rows() {
        let mut thoughts = Thoughts::new(View::Fold, false);
        assert_eq!(thoughts.scroll("a", 2, true), "a");
        assert_eq!(thoughts.scroll("b\nc", 2, true), "b\nc");
        assert_eq!(thoughts.scroll("d\ne\nf", 2, true), "\r\x1b[1A\x1b[Je\nf");
        assert_eq!(thoughts.rows, ["e", "f"]);
        let mut dumb = Thoughts::new(View::Fold, false);
        assert_eq!(dumb.scroll("a\nb\nc", 2, false), "a\nb\nc");
    }

    #[test]
    fn reasoning_is_folded_into_one_line() {
        struct Case {
            view: View,
            wipes: bool,
            shown: &'static str,
        }
        let cases = [
            Case { view: View::Fold, wipes: true, shown: "why \r\x1b[J" },
            Case { view: View::Fold, wipes: false, shown: "why so\n" },
            Case { view: View::Show, wipes: true, shown: "why so\n" },
            Case { view: View::Hide, wipes: true, shown: "thinking ...\r\x1b[J" },
            Case { view: View::Hide, wipes: false, shown: "" },
        ];
        for Case { view, wipes, shown } in cases {
            let mut thoughts = Thoughts::new(view, false);
            let mut text = String::new();
            for word in ["why ", "so"] {
                text += &thoughts.push(word, wipes);
                thoughts.tokens += 1;
            }
            text += &thoughts.fold(wipes);
            let (before, line) = text.split_once("thought for ").expect("the line");
            // Where a word is held back depends on the window, if there is one.
            assert_eq!(before.replace(' ', ""), shown.replace(' ', ""), "{view:?}");
            assert!(line.ends_with(" s, 2 tokens\n"), "{line}");
            assert_eq!(thoughts.fold(wipes), "", "nothing is folded twice");
        }
        assert_eq!(duration(Duration::from_millis(72_300)), "1 min 12 s");
    }
}
