//! The records of a file: objects of JSON, one on each line or all in one list, or the rows of a
//! table (CSV, or TSV with tabs) whose first line names the columns.

use super::line::{category, kind};
use formats::{Error, Result};
use serde_json::{Map, Value};
use std::iter::once;
use std::path::Path;

/// An object, and where it stands.
pub(super) struct Record {
    /// Its place in the file, as errors tell it.
    pub(super) place: String,
    /// The number of its line, of its first one in a table, or of its item in a list, from 1.
    pub(super) number: usize,
    /// The object, or why there is none.
    pub(super) object: Result<Map<String, Value>>,
}

impl Record {
    fn of_line(number: usize, object: Result<Map<String, Value>>) -> Record {
        Record { place: format!("line {number}"), number, object }
    }
}

type Records<'a> = Box<dyn Iterator<Item = Record> + 'a>;

/// The separator of a table's columns, if a file is one by its name.
pub(super) fn separator(path: &Path) -> Option<char> {
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
    let known = [("csv", ','), ("tsv", '\t')];
    known.into_iter().find(|(name, _)| end.eq_ignore_ascii_case(name)).map(|(_, by)| by)
}

/// The records of a file's text.
pub(super) fn records<'a>(path: &Path, text: &'a str) -> Records<'a> {
    if let Some(separator) = separator(path) {
        return table(Rows { rest: text, line: 1, separator });
    }
    if text.trim_start().starts_with('[') {
        return list(text);
    }
    let filled = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    Box::new(filled.map(|(i, line)| Record::of_line(i + 1, line_object(line))))
}

fn line_object(line: &str) -> Result<Map<String, Value>> {
    let value = serde_json::from_str(line).map_err(|e| {
        // The reader's own line is always the first.
        let found = format!("{} at column {}", category(&e), e.column());
        let error = Error::new("", "a JSON object", found);
        match line.trim_start() {
            text if text.trim_end() == "{" || text.starts_with('[') => {
                error.hint("one object on each line, or all of them in one list")
            }
            _ => error,
        }
    });
    object(value?)
}

fn object(value: Value) -> Result<Map<String, Value>> {
    match value {
        Value::Object(object) => Ok(object),
        other => Err(Error::new("", "an object", kind(&other))),
    }
}

/// The items of a list, which may stand on any number of lines.
fn list(text: &str) -> Records<'_> {
    match serde_json::from_str::<Vec<Value>>(text) {
        Ok(items) => Box::new(items.into_iter().enumerate().map(|(i, item)| Record {
            place: format!("item {}", i + 1),
            number: i + 1,
            object: object(item),
        })),
        Err(e) => {
            let found = format!("{} at column {}", category(&e), e.column());
            let expected = "one list of JSON objects, or one object on each line";
            Box::new(once(Record::of_line(e.line(), Err(Error::new("", expected, found)))))
        }
    }
}

/// The rows of a table as objects of texts.
fn table(mut rows: Rows<'_>) -> Records<'_> {
    let names = match rows.next() {
        None => return Box::new(std::iter::empty()),
        Some((line, Err(e))) => return Box::new(once(Record::of_line(line, Err(e)))),
        Some((_, Ok(names))) => names,
    };
    let object = move |row: Vec<String>| {
        if row.len() != names.len() {
            let expected = format!("{} columns, as the first line names", names.len());
            return Err(Error::new("", expected, row.len()));
        }
        let names = names.iter().map(|name| name.trim().to_owned());
        Ok(names.zip(row.into_iter().map(Value::String)).collect())
    };
    Box::new(rows.map(move |(line, row)| Record::of_line(line, row.and_then(&object))))
}

/// The rows of a table (RFC 4180), and the line that each begins on. A cell in quotes may hold
/// separators, line breaks, and quotes that are doubled.
struct Rows<'a> {
    rest: &'a str,
    line: usize,
    separator: char,
}

impl Rows<'_> {
    fn row(&mut self) -> Result<Vec<String>> {
        let mut row = Vec::new();
        loop {
            row.push(if self.rest.starts_with('"') { self.quoted()? } else { self.plain() });
            if let Some(rest) = self.rest.strip_prefix(self.separator) {
                self.rest = rest;
                continue;
            }
            let rest = self.rest.strip_prefix('\r').unwrap_or(self.rest);
            if !rest.is_empty() && !rest.starts_with('\n') {
                let separator = if self.separator == '\t' { "a tab" } else { "a comma" };
                let expected = format!("{separator} or the end of the line behind a cell's quotes");
                let next: String = rest.chars().take(1).collect();
                let found = format!("{next:?} in column {}", row.len());
                return Err(Error::new("", expected, found));
            }
            self.rest = rest.strip_prefix('\n').unwrap_or(rest);
            self.line += 1;
            return Ok(row);
        }
    }

    /// A cell without quotes around it, up to what ends it.
    fn plain(&mut self) -> String {
        let end = self.rest.find([self.separator, '\n']).unwrap_or(self.rest.len());
        let (cell, rest) = self.rest.split_at(end);
        self.rest = rest;
        let ends_line = !rest.starts_with(self.separator);
        cell.strip_suffix('\r').filter(|_| ends_line).unwrap_or(cell).to_owned()
    }

    /// A cell in quotes.
    fn quoted(&mut self) -> Result<String> {
        let mut cell = String::new();
        let mut rest = &self.rest[1..];
        loop {
            let Some(end) = rest.find('"') else {
                return Err(Error::new("", "a quote that ends the cell", "the end of the file"));
            };
            cell += &rest[..end];
            rest = &rest[end + 1..];
            if !rest.starts_with('"') {
                break;
            }
            cell.push('"');
            rest = &rest[1..];
        }
        self.line += cell.matches('\n').count();
        self.rest = rest;
        Ok(cell)
    }
}

impl Iterator for Rows<'_> {
    type Item = (usize, Result<Vec<String>>);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(rest) = self.rest.strip_prefix("\r\n").or(self.rest.strip_prefix('\n')) {
            (self.rest, self.line) = (rest, self.line + 1);
        }
        if self.rest.is_empty() {
            return None;
        }
        let line = self.line;
        let row = self.row();
        if row.is_err() {
            self.rest = "";
        }
        Some((line, row))
    }
}
