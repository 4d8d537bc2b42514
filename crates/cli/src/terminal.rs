//! Where output goes: results on stdout, everything else on stderr, colours only on a terminal.
//!
//! Rust programs ignore SIGPIPE, so a reader that goes away shows as an error of `write`; here it
//! becomes [`Stop::Closed`], which ends the program quietly.
//!
//! A model's text is a stranger's: at a terminal it is shown without what could steer the terminal
//! ([`printable`]); a pipe gets its exact bytes ([`Page`]).

use std::borrow::Cow;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};

use anstyle::{AnsiColor, Style};
use delft::formats::text;
use delft::{Error, Setting};

use crate::wrap::laid_out;

/// Why a command ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// An error for the reader; exit status 1.
    Error(Error),
    /// A command line that makes no sense; exit status 2.
    Usage(String),
    /// The reader of the output has gone; exit status 0.
    Closed,
    /// Ctrl-C, and what there was until then has been written; exit status 130.
    Interrupted,
}

/// `Result` of a command.
pub(crate) type Outcome<T = ()> = Result<T, Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Error(error)
    }
}

/// Errors of writing results.
impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        if error.kind() == ErrorKind::BrokenPipe {
            Stop::Closed
        } else {
            Stop::Error(Error::io("standard output", error))
        }
    }
}

impl From<serde_json::Error> for Stop {
    fn from(error: serde_json::Error) -> Self {
        io::Error::from(error).into()
    }
}

/// Titles and names.
pub(crate) const BOLD: Style = Style::new().bold();
/// Notes that can be skipped.
pub(crate) const DIM: Style = Style::new().dimmed();
const RED: Style = AnsiColor::Red.on_default().bold();

/// The error for a text at `place` that is no JSON at all where this was `expected`.
pub(crate) fn no_json(
    place: impl fmt::Display,
    expected: &str,
    error: &serde_json::Error,
) -> Error {
    Error::new(place, expected, format!("no valid JSON: {error}"))
}

/// The flag by which a setting is given.
pub(crate) fn flag(setting: Setting) -> &'static str {
    match setting {
        Setting::Context => "--ctx",
        Setting::Rotate => "--rotate",
        Setting::CacheType => "--cache-type",
        Setting::Place => "--device",
        Setting::GpuLayers => "--gpu-layers",
        Setting::CpuMoe => "--cpu-moe",
        Setting::SplitMode => "--split-mode",
        Setting::Chunk => "--chunk",
        Setting::Dispatch => "--dispatch",
        Setting::AllowNan => "--allow-nan",
        Setting::IgnoreKey => "--ignore-key",
        Setting::AnyBase => "--any-base",
        Setting::Kto => "--kto",
    }
}

/// An error in one line, as the command line's user reads it.
pub(crate) fn line(error: &Error) -> String {
    error.spelled(&flag)
}

/// A line on stderr, with colours where that is a terminal. A closed stderr is ignored.
pub(crate) fn note(line: impl fmt::Display) {
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// A line on stderr that can be skipped.
pub(crate) fn aside(line: impl fmt::Display) {
    let line = laid_out("", &line.to_string());
    note(format_args!("{DIM}{line}{DIM:#}"));
}

/// The line by which an error is reported.
pub(crate) fn report(error: &dyn fmt::Display) {
    let line = laid_out("", &format!("delft: {error}"));
    let line = line.strip_prefix("delft:").unwrap_or_default();
    note(format_args!("{RED}delft:{RED:#}{line}"));
}

/// A table or text on stdout, written at once, with colours where that is a terminal.
pub(crate) fn print(text: &str) -> Outcome {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// One JSON value on stdout: one line for programs, laid out for people at a terminal.
pub(crate) fn print_json(value: &serde_json::Value) -> Outcome {
    let mut out = io::BufWriter::new(io::stdout().lock());
    if stdout_is_terminal() {
        write!(out, "{}", escaped(&serde_json::to_string_pretty(value)?))?
    } else {
        serde_json::to_writer(&mut out, value)?
    }
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// A JSON value on a line of its own, at once.
pub(crate) fn print_json_line(value: &serde_json::Value) -> Outcome {
    let line = value.to_string();
    let line = if stdout_is_terminal() { escaped(&line) } else { line.as_str().into() };
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// JSON whose strings hold nothing that steers a terminal: JSON itself only escapes characters
/// below a blank.
fn escaped(json: &str) -> Cow<'_, str> {
    if !json.contains(steers) {
        return json.into();
    }
    let escape = |c: char| if steers(c) { format!("\\u{:04x}", c as u32) } else { c.to_string() };
    json.chars().map(escape).collect::<String>().into()
}

/// Standard output for a model's text: the exact bytes in a pipe, at a terminal what it can show
/// without harm.
pub(crate) struct Page {
    out: io::StdoutLock<'static>,
    terminal: bool,
    colours: bool,
}

impl Page {
    pub(crate) fn new() -> Page {
        let out = io::stdout();
        let colours = anstream::AutoStream::choice(&out) != anstream::ColorChoice::Never;
        Page { terminal: stdout_is_terminal(), colours, out: out.lock() }
    }

    /// Whether someone watches.
    pub(crate) fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Writes a piece of text at once.
    pub(crate) fn write(&mut self, text: &str) -> Outcome {
        let text = if self.terminal { printable(text) } else { text.into() };
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Writes text that is not the model's answer; a terminal shows it as such.
    pub(crate) fn write_dimmed(&mut self, text: &str) -> Outcome {
        if !self.colours {
            return self.write(text);
        }
        write!(self.out, "{DIM}")?;
        self.write(text)?;
        write!(self.out, "{DIM:#}")?;
        Ok(self.out.flush()?)
    }
}

/// Whether someone watches standard output.
pub(crate) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Whether someone watches stderr.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Whether someone types.
pub(crate) fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}

/// Longest text file, in bytes: devices such as `/dev/zero` have no end.
const LONGEST: u64 = 1 << 30;

/// A text file as a whole.
pub(crate) fn read_file(path: &std::path::Path) -> Outcome<String> {
    Ok(text::read(path, LONGEST)?)
}

/// All the text of standard input.
pub(crate) fn read_stdin(stdin: impl io::Read) -> delft::Result<String> {
    text::of_reader(stdin, "standard input", LONGEST)
}

/// A byte count for people: `1.2 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    // 1023.5 would round to 1024 of the smaller unit.
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A large count for people: `1.24 B`, `14.9 M`.
pub(crate) fn count(value: u64) -> String {
    let value = value as f64;
    let (scaled, unit) = match value {
        v if v >= 1e9 => (v / 1e9, " B"),
        v if v >= 1e6 => (v / 1e6, " M"),
        v if v >= 1e3 => (v / 1e3, " k"),
        v => return format!("{v:.0}"),
    };
    if scaled < 10.0 { format!("{scaled:.2}{unit}") } else { format!("{scaled:.1}{unit}") }
}

/// Rows under a header, in columns as wide as their widest cell; numbers (where `right` says so) to
/// the right.
pub(crate) fn table(header: &[&str], right: &[bool], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[String]| {
        let mut line = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let pad = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            let gap = if column == 0 { "" } else { "  " };
            line += &if right[column] {
                format!("{gap}{pad}{cell}")
            } else {
                format!("{gap}{cell}{pad}")
            };
        }
        line.trim_end().to_string()
    };
    let header: Vec<String> = header.iter().map(|name| name.to_string()).collect();
    let mut text = format!("{BOLD}{}{BOLD:#}\n", line(&header));
    for row in rows {
        text += &line(row);
        text.push('\n');
    }
    text
}

/// Whether a character makes a terminal do something, or show text in another order, instead of
/// being seen.
fn steers(c: char) -> bool {
    let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    reorders || (c.is_control() && !matches!(c, '\n' | '\t'))
}

/// A model's text as a terminal may show it: line breaks and tabs as they are, other control
/// characters as the pictures that Unicode has of them, and those without one as U+FFFD. Every
/// character is judged by itself, so a sequence that is cut into pieces is as harmless as a whole
/// one.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(steers) {
        return text.into();
    }
    let picture = |c: char| match c {
        // Before a line break it says nothing, and alone it would overwrite the line.
        '\r' => None,
        '\0'..='\u{1f}' => char::from_u32(0x2400 + c as u32),
        '\u{7f}' => Some('\u{2421}'),
        _ => Some(char::REPLACEMENT_CHARACTER),
    };
    text.chars()
        .filter_map(|c| if steers(c) { picture(c) } else { Some(c) })
        .collect::<String>()
        .into()
}

/// A name from a model's file, on one line and without what could steer a terminal.
pub(crate) fn harmless(text: &str) -> String {
    let escape = |c: char| {
        let hidden = steers(c) || matches!(c, '\n' | '\t');
        if hidden { c.escape_default().to_string() } else { c.to_string() }
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_048_575, "1.0 MiB"),
            (5 << 30, "5.0 GiB"),
        ];
        for (value, text) in cases {
            assert_eq!(bytes(value), text);
        }
        let cases = [(999, "999"), (14_900_000, "14.9 M"), (1_240_000_000, "1.24 B")];
        for (value, text) in cases {
            assert_eq!(count(value), text);
        }
        assert_eq!(harmless("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
    }

    #[test]
    fn a_terminal_is_shown_nothing_that_steers_it() {
        struct Case {
            text: &'static str,
            shown: &'static str,
            why: &'static str,
        }
        let cases = [
            Case { text: "a\tb\nc", shown: "a\tb\nc", why: "tabs and line breaks are text" },
            Case {
                text: "\u{1b}[2J",
                shown: "\u{241b}[2J",
                why: "a sequence that clears the screen",
            },
            Case { text: "\u{1b}", shown: "\u{241b}", why: "its first piece alone" },
            Case { text: "a\r\nb\rc", shown: "a\nbc", why: "a return would overwrite the line" },
            Case {
                text: "\u{7}\u{8}\u{7f}",
                shown: "\u{2407}\u{2408}\u{2421}",
                why: "bell, backspace, delete",
            },
            Case {
                text: "\u{9b}31m",
                shown: "\u{fffd}31m",
                why: "a sequence that begins with one C1 character",
            },
            Case {
                text: "a\u{202e}b\u{2066}",
                shown: "a\u{fffd}b\u{fffd}",
                why: "text in another order",
            },
            Case {
                text: "\u{5e9}\u{200f}!",
                shown: "\u{5e9}\u{200f}!",
                why: "a mark that Hebrew needs",
            },
            Case {
                text: "na\u{ef}ve \u{1f98a}",
                shown: "na\u{ef}ve \u{1f98a}",
                why: "letters and pictures",
            },
        ];
        for Case { text, shown, why } in cases {
            assert_eq!(printable(text), shown, "{why}");
        }
        assert_eq!(escaped("\"a\u{9b}\u{202e}b\""), "\"a\\u009b\\u202eb\"");
        assert_eq!(harmless("a\u{202e}b\tc"), "a\\u{202e}b\\tc");
    }

    #[test]
    fn columns_line_up() {
        let text = table(
            &["name", "n"],
            &[false, true],
            &[vec!["a".into(), "10".into()], vec!["long".into(), "7".into()]],
        );
        let plain = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(plain, "name   n\na     10\nlong   7\n");
    }
}
