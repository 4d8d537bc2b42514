//! Where a prompt's text comes from: the command line, files, and standard input, joined in this
//! order with a blank line between them.
//!
//! A text that is read loses its last line break, as `$(..)` drops it in shells: the end of a line
//! is no part of a question. `-` means standard input wherever a text or a file is named.

use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use delft::Error;

use crate::terminal::{Outcome, note, read_stdin, stdin_is_terminal};

/// How long standard input that was not asked for may stay silent beside a prompt. Programs, `ssh`
/// and containers often leave one open into which nothing is ever written; to wait for its end
/// would be to wait for ever.
const PATIENCE: Duration = Duration::from_secs(3);

/// Whether a name means standard input.
fn is_stdin(name: &Path) -> bool {
    name.as_os_str() == "-"
}

/// All of a text: standard input for `-`, else a file.
pub(crate) fn read(name: &Path) -> Outcome<String> {
    if is_stdin(name) {
        return Ok(without_last_break(read_stdin(io::stdin().lock())?));
    }
    Ok(without_last_break(crate::terminal::read_file(name)?))
}

fn without_last_break(mut text: String) -> String {
    let end = text
        .strip_suffix('\n')
        .map_or(text.len(), |line| line.strip_suffix('\r').unwrap_or(line).len());
    text.truncate(end);
    text
}

/// The one text of a command that takes one: a word (`-` is standard input), a file, or what is
/// piped in.
pub(crate) fn one(word: Option<&str>, file: Option<&Path>) -> Outcome<String> {
    match (word, file) {
        (Some(word), _) if word != "-" => Ok(word.to_string()),
        (None, Some(file)) => read(file),
        _ => read(Path::new("-")),
    }
}

/// The texts of a command that takes several: words, or the lines of a file or of standard input
/// (the word `-`, too) that are not empty.
pub(crate) fn several(words: &[String], file: Option<&Path>) -> Outcome<Vec<String>> {
    let lines = |name: &Path| -> Outcome<Vec<String>> {
        let text = read(name)?;
        Ok(text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
    };
    let mut texts = Vec::new();
    for word in words {
        match is_stdin(Path::new(word)) {
            true => texts.extend(lines(Path::new(word))?),
            false => texts.push(word.clone()),
        }
    }
    if words.is_empty() {
        texts = lines(file.unwrap_or(Path::new("-")))?;
    }
    match texts.is_empty() {
        false => Ok(texts),
        true => Err(Error::new("TEXT", "a text, or lines of them", "none").into()),
    }
}

/// A prompt of which standard input may still be missing.
pub(crate) struct Gathering {
    parts: Vec<String>,
    /// Whether a prompt was given, be it an empty one.
    given: bool,
    piped: Option<Piped>,
}

/// Reads what the command line names. Without a prompt that is standard input, unless someone types
/// there; beside a prompt, standard input is read meanwhile, and waited for by
/// [`Gathering::finish`].
pub(crate) fn gather(prompt: Option<&str>, files: &[PathBuf]) -> Outcome<Gathering> {
    let names = prompt.iter().filter(|text| **text == "-").map(PathBuf::from);
    let named: Vec<PathBuf> = names.chain(files.iter().cloned()).collect();
    let mut parts: Vec<String> =
        prompt.iter().filter(|text| **text != "-").map(|text| text.to_string()).collect();
    for name in &named {
        parts.push(read(name)?);
    }
    let mut piped = None;
    if !stdin_is_terminal() && !named.iter().any(|name| is_stdin(name)) {
        if parts.is_empty() {
            parts.push(Piped::begin().wait()?);
        } else {
            piped = Some(Piped::begin());
        }
    }
    let given = prompt.is_some_and(|text| text != "-") || parts.iter().any(|text| !text.is_empty());
    Ok(Gathering { parts, given, piped })
}

impl Gathering {
    /// Whether there is no prompt, nor will be.
    pub(crate) fn is_nothing(&self) -> bool {
        !self.given && self.piped.is_none()
    }

    /// The whole prompt.
    pub(crate) fn finish(mut self) -> Outcome<String> {
        if let Some(piped) = self.piped {
            self.parts.extend(piped.finish()?);
        }
        Ok(join(&self.parts))
    }
}

/// The parts that are not empty, with a blank line between them.
fn join(parts: &[String]) -> String {
    let parts: Vec<&str> =
        parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    parts.join("\n\n")
}

/// Standard input, read by a thread of its own.
struct Piped {
    /// Hears when the first bytes are there, or the end.
    begun: Receiver<()>,
    text: JoinHandle<delft::Result<String>>,
    since: Instant,
}

impl Piped {
    fn begin() -> Piped {
        let (tell, begun) = channel();
        let text = std::thread::spawn(move || {
            let mut stdin = io::stdin().lock();
            stdin.fill_buf().map_err(|error| Error::io("standard input", error))?;
            // Nobody hears it who no longer waits.
            let _ = tell.send(());
            read_stdin(stdin)
        });
        Piped { begun, text, since: Instant::now() }
    }

    /// The text, or none from an input that stayed silent.
    fn finish(self) -> Outcome<Option<String>> {
        if self.is_silent() {
            note(format_args!(
                "nothing came on standard input within {} s: going on without it (-f - waits, < /dev/null says that there is none)",
                PATIENCE.as_secs()
            ));
            return Ok(None);
        }
        self.text().map(Some)
    }

    /// The text, however long it takes: nothing else is the prompt.
    fn wait(self) -> Outcome<String> {
        if self.is_silent() {
            note("waiting for the prompt on standard input (< /dev/null says that there is none)");
        }
        self.text()
    }

    fn is_silent(&self) -> bool {
        let left = PATIENCE.saturating_sub(self.since.elapsed());
        self.begun.recv_timeout(left) == Err(RecvTimeoutError::Timeout)
    }

    fn text(self) -> Outcome<String> {
        let failed = || Err(Error::new("standard input", "", "reading it failed"));
        Ok(without_last_break(self.text.join().unwrap_or_else(|_| failed())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_joined_by_a_blank_line() {
        let cases: [(&[&str], &str, &str); 5] = [
            (&["a"], "a", "one"),
            (&["a", "b"], "a\n\nb", "two"),
            (&["a", "", "c"], "a\n\nc", "an empty one leaves no gap"),
            (&["", ""], "", "nothing at all"),
            (&["a\n", "b"], "a\n\n\nb", "what a text says itself is kept"),
        ];
        for (parts, whole, why) in cases {
            let parts: Vec<String> = parts.iter().map(|part| part.to_string()).collect();
            assert_eq!(join(&parts), whole, "{why}");
        }
    }

    #[test]
    fn one_line_break_at_the_end_is_dropped() {
        for (text, kept) in
            [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a", "a"), ("\n", ""), ("a\r", "a\r")]
        {
            assert_eq!(without_last_break(text.to_string()), kept, "{text:?}");
        }
    }
}
