//! What is written where: results on stdout, everything else on stderr, colours only on a terminal.
//!
//! Rust programs ignore SIGPIPE, so a reader that goes away shows as an error of `write`; here it becomes
//! [`Stop::Closed`], which ends the program quietly.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};

use anstyle::{AnsiColor, Style};
use delft::Error;

/// Why a command ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// An error for the reader; exit status 1.
    Error(Error),
    /// What was asked makes no sense on the command line; exit status 2.
    Usage(String),
    /// Nobody reads our output any more; exit status 0.
    Closed,
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
/// What can be skipped.
pub(crate) const DIM: Style = Style::new().dimmed();
const RED: Style = AnsiColor::Red.on_default().bold();

/// A line on stderr, with colours where that is a terminal. A closed stderr is nobody's loss.
pub(crate) fn note(line: impl fmt::Display) {
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// A line on stderr that can be skipped.
pub(crate) fn aside(line: impl fmt::Display) {
    note(format_args!("{DIM}{line}{DIM:#}"));
}

/// The line by which an error is reported.
pub(crate) fn report(error: &dyn fmt::Display) {
    note(format_args!("{RED}delft:{RED:#} {error}"));
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
    let pretty = io::stdout().is_terminal();
    let mut out = io::BufWriter::new(io::stdout().lock());
    if pretty {
        serde_json::to_writer_pretty(&mut out, value)?
    } else {
        serde_json::to_writer(&mut out, value)?
    }
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// Whether someone watches stderr.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Whether someone types.
pub(crate) fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}

/// All of standard input, as text, without its last line break.
pub(crate) fn read_stdin() -> Outcome<String> {
    let mut text = String::new();
    io::Read::read_to_string(&mut io::stdin().lock(), &mut text)
        .map_err(|error| Error::io("standard input", error))?;
    let end = text
        .strip_suffix('\n')
        .map_or(text.len(), |line| line.strip_suffix('\r').unwrap_or(line).len());
    text.truncate(end);
    Ok(text)
}

/// A text file as a whole.
pub(crate) fn read_file(path: &std::path::Path) -> Outcome<String> {
    std::fs::read_to_string(path).map_err(|error| Error::io(path.display(), error).into())
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

/// Rows under a header, in columns as wide as their widest cell; numbers (where `right` says so) to the right.
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

/// Text from a model's file without what could steer a terminal.
pub(crate) fn harmless(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            if c.is_control() { c.escape_default().to_string() } else { c.to_string() }
                .chars()
                .collect::<Vec<_>>()
        })
        .collect()
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
