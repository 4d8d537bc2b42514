//! Where input comes from: an edited line at a terminal, a plain one elsewhere.

use std::cell::Cell;
use std::io::{BufRead, Read};
use std::path::PathBuf;

use delft::Error;
use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::{DefaultHistory, History};
use rustyline::validate::Validator;
use rustyline::{CompletionType, Context, Editor};

use super::complete::{self, Hint};
use super::conversation::LARGEST;
use crate::terminal::{DIM, Outcome, aside};

/// Longest line of a pipe. Whoever has more to say has it in a file.
const LONGEST_LINE: u64 = 1 << 20;
/// Longest input that is remembered.
const LONGEST_REMEMBERED: usize = 64 << 10;

pub(super) enum Lines {
    Edited { editor: Box<Editor<Help, DefaultHistory>>, history: Option<PathBuf>, leaving: bool },
    Plain,
}

/// The result of asking for a line.
enum Line {
    Text(String),
    /// Ctrl-C: what was typed is dropped, as shells do.
    Dropped,
    End,
}

impl Lines {
    pub(super) fn new(interactive: bool, colours: bool) -> Outcome<Lines> {
        if !interactive {
            return Ok(Lines::Plain);
        }
        let config = rustyline::Config::builder()
            .auto_add_history(false)
            .completion_type(CompletionType::List)
            .max_history_size(1000);
        let editor = config.and_then(|config| Editor::with_config(config.build()));
        let mut editor =
            editor.map_err(|error| Error::new("the terminal", "line editing", error))?;
        editor.set_helper(Some(Help { empty: Cell::new(true), colours }));
        let history = data_folder().map(|folder| folder.join("history"));
        if let Some(path) = &history
            // There is none the first time, and one that is not ours may be anything.
            && std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= LARGEST as u64)
        {
            let _ = editor.load_history(path);
        }
        Ok(Lines::Edited { editor: Box::new(editor), history, leaving: false })
    }

    /// The next input, its lines joined; None at the end.
    pub(super) fn input(&mut self) -> Outcome<Option<String>> {
        loop {
            let text = match self.line("> ")? {
                Line::Text(first) => match self.whole(first)? {
                    Some(text) => text,
                    None => continue,
                },
                Line::Dropped if self.leaves() => return Ok(None),
                Line::Dropped => continue,
                Line::End => return Ok(None),
            };
            if let Lines::Edited { editor, leaving, .. } = self {
                *leaving = false;
                if text.len() <= LONGEST_REMEMBERED {
                    let _ = editor.add_history_entry(text.trim_end());
                }
            }
            return Ok(Some(text));
        }
    }

    /// An input by its first line: a block, or lines that end with `\`. None if it was dropped.
    fn whole(&mut self, first: String) -> Outcome<Option<String>> {
        let mut text = String::new();
        let block = first.trim_start().strip_prefix("\"\"\"").map(str::to_string);
        let in_block = block.is_some();
        let mut line = block.unwrap_or(first);
        loop {
            let end = if in_block { line.trim_end().strip_suffix("\"\"\"") } else { None };
            let more = if in_block { Some(line.as_str()) } else { line.strip_suffix('\\') };
            match (end, more) {
                (Some(end), _) => return Ok(Some(text + end)),
                (None, None) => return Ok(Some(text + &line)),
                (None, Some(more)) => {
                    text += more;
                    text.push('\n');
                }
            }
            if text.len() > LARGEST {
                let expected = format!("a message of at most {} MiB", LARGEST >> 20);
                return Err(Error::new("standard input", expected, "a longer one").into());
            }
            match self.line(". ")? {
                Line::Text(next) => line = next,
                Line::Dropped => return Ok(None),
                Line::End => return Ok(Some(text)),
            }
        }
    }

    fn line(&mut self, prompt: &str) -> Outcome<Line> {
        match self {
            Lines::Edited { editor, .. } => {
                if let Some(help) = editor.helper() {
                    help.empty.set(true);
                }
                match editor.readline(prompt) {
                    Ok(line) => Ok(Line::Text(line)),
                    Err(ReadlineError::Interrupted) => Ok(Line::Dropped),
                    Err(ReadlineError::Eof) => Ok(Line::End),
                    Err(error) => Err(Error::new("the terminal", "a line", error).into()),
                }
            }
            Lines::Plain => {
                let line = bounded_line(&mut std::io::stdin().lock(), LONGEST_LINE)?;
                Ok(line.map_or(Line::End, Line::Text))
            }
        }
    }

    /// Whether Ctrl-C means to leave: at an empty line, for the second time. The first time says
    /// so.
    fn leaves(&mut self) -> bool {
        let Lines::Edited { editor, leaving, .. } = self else { return true };
        let empty = editor.helper().is_none_or(|help| help.empty.get());
        if empty && !*leaving {
            aside("Ctrl-C once more leaves, as do Ctrl-D and /exit");
        }
        std::mem::replace(leaving, empty) && empty
    }

    /// Whether the user agrees; `None` where no user can be asked.
    pub(super) fn confirm(&mut self, question: &str) -> Outcome<Option<bool>> {
        let Lines::Edited { .. } = self else { return Ok(None) };
        let agreed = match self.line(&format!("{question} [y/N] "))? {
            Line::Text(answer) => matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"),
            Line::Dropped | Line::End => false,
        };
        Ok(Some(agreed))
    }

    /// Keeps the history for the next time. Whoever has no data folder has no history.
    pub(super) fn save(&mut self) {
        if let Lines::Edited { editor, history: Some(path), .. } = self
            && !editor.history().is_empty()
            && path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok())
            && let Err(error) = editor.save_history(path)
        {
            aside(format_args!("{}: the history was not saved: {error}", path.display()));
        }
    }
}

/// A line without its end; None at the end of the input. One that never ends is refused before it
/// fills the memory.
fn bounded_line(input: &mut impl BufRead, longest: u64) -> Outcome<Option<String>> {
    let mut bytes = Vec::new();
    let read = input.take(longest + 1).read_until(b'\n', &mut bytes);
    if read.map_err(|error| Error::io("standard input", error))? == 0 {
        return Ok(None);
    }
    if bytes.len() as u64 > longest && bytes.last() != Some(&b'\n') {
        let expected = format!("lines of at most {} KiB", longest >> 10);
        return Err(Error::new("standard input", expected, "a longer one")
            .hint("/file PATH puts a file's text into a message")
            .into());
    }
    let mut line = String::from_utf8(bytes)
        .map_err(|_| Error::new("standard input", "text in UTF-8", "other bytes"))?;
    line.truncate(line.trim_end_matches(['\n', '\r']).len());
    Ok(Some(line))
}

/// Completion and hints at the prompt.
pub(super) struct Help {
    /// Whether nothing is typed: the editor asks for a hint after every change.
    empty: Cell<bool>,
    colours: bool,
}

impl rustyline::Helper for Help {}
impl Validator for Help {}

impl Completer for Help {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let (start, candidates) = complete::complete(&line[..at]);
        let pair = |(display, replacement)| Pair { display, replacement };
        Ok((start, candidates.into_iter().map(pair).collect()))
    }
}

impl Hinter for Help {
    type Hint = Hint;

    fn hint(&self, line: &str, at: usize, _: &Context<'_>) -> Option<Hint> {
        self.empty.set(line.is_empty());
        if at == line.len() { complete::hint(line) } else { None }
    }
}

impl Highlighter for Help {
    fn highlight_hint<'h>(&self, hint: &'h str) -> std::borrow::Cow<'h, str> {
        if self.colours { format!("{DIM}{hint}{DIM:#}").into() } else { hint.into() }
    }
}

/// The folder for data that belongs to the user, by each system's custom.
fn data_folder() -> Option<PathBuf> {
    let set =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = if cfg!(windows) {
        set("APPDATA")
    } else if cfg!(target_os = "macos") {
        set("HOME").map(|home| home.join("Library").join("Application Support"))
    } else {
        set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local").join("share")))
    };
    base.map(|base| base.join("delft"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded() {
        let all = |text: &[u8]| {
            let mut input = text;
            let mut lines = Vec::new();
            loop {
                match bounded_line(&mut input, 4) {
                    Ok(Some(line)) => lines.push(line),
                    Ok(None) => return Ok(lines),
                    Err(_) => return Err(lines),
                }
            }
        };
        let lines = ["abc", "", "abcd", "ab"].map(String::from).to_vec();
        assert_eq!(all(b"abc\r\n\nabcd\nab"), Ok(lines));
        assert_eq!(all(b"a\nabcde\nb"), Err(vec!["a".to_string()]));
        assert_eq!(all(b"\xff\n"), Err(vec![]));
    }
}
