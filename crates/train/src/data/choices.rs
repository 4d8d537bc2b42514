//! Questions with choices, of which one is right: JSON lines of `question`, `choices` and `answer`.
//!
//! Choices are a list of texts, or ARC's object of `text` and `label`. The answer (`answer`, or
//! `answerKey`) is one of the texts, a label (A, B, .. where none are given), or a number, from 0.

use super::line::{kind, string};
use super::records::records;
use super::{below, is_lines, text_of};
use formats::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// A question of which one choice is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The question.
    pub question: String,
    /// The possible answers, two texts or more.
    pub choices: Vec<String>,
    /// Which of them is right.
    pub right: usize,
    /// The line of the file, from 1.
    pub line: usize,
}

/// The questions of a file, if its first line has one.
///
/// # Errors
/// A file that cannot be read; a line that is no such question, by file, line and key.
pub fn questions(path: &Path) -> Result<Option<Vec<Question>>> {
    if !is_lines(path) {
        return Ok(None);
    }
    let place = path.display().to_string();
    let text = text_of(path)?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let asks = |object: &Map<String, Value>| object.contains_key("question");
    let first = records(path, text).next();
    if !first.is_some_and(|first| first.object.as_ref().is_ok_and(asks)) {
        return Ok(None);
    }
    let each = records(path, text).map(|record| {
        let of_record = |e: Error| Error {
            place: format!("{place}: {}{}", record.place, below(&e.place)),
            ..e
        };
        record.object.and_then(|object| question(&object, record.number)).map_err(of_record)
    });
    each.collect::<Result<Vec<_>>>().map(Some)
}

fn question(object: &Map<String, Value>, line: usize) -> Result<Question> {
    let question = string(object, "question")?.to_owned();
    let choices = object.get("choices").unwrap_or(&Value::Null);
    let texts = choices.get("text").unwrap_or(choices);
    let choices_of = |value: &Value, key: &str| -> Result<Vec<String>> {
        let list =
            value.as_array().ok_or_else(|| Error::new(key, "a list of texts", kind(value)))?;
        let text = |v: &Value| v.as_str().map(str::to_owned).filter(|text| !text.is_empty());
        let texts: Option<Vec<String>> = list.iter().map(text).collect();
        texts.ok_or_else(|| Error::new(key, "texts that say something", "something else"))
    };
    let labels =
        choices.get("label").map(|labels| choices_of(labels, "choices.label")).transpose()?;
    let texts = choices_of(texts, "choices")?;
    if texts.len() < 2 || labels.as_ref().is_some_and(|labels| labels.len() != texts.len()) {
        let labels =
            labels.map_or(String::new(), |labels| format!(" with {} labels", labels.len()));
        return Err(Error::new("choices", "two or more", format!("{}{labels}", texts.len())));
    }
    let key = if object.contains_key("answer") { "answer" } else { "answerKey" };
    let answer = object.get(key).unwrap_or(&Value::Null);
    let right = which(answer, &texts, labels.as_deref()).ok_or_else(|| {
        Error::new(key, "one of the choices: its text, label or number from 0", answer)
    })?;
    Ok(Question { question, choices: texts, right, line })
}

/// The choice that an answer names.
fn which(answer: &Value, texts: &[String], labels: Option<&[String]>) -> Option<usize> {
    let within = |number: usize| Some(number).filter(|number| *number < texts.len());
    if let Some(number) = answer.as_u64() {
        return usize::try_from(number).ok().and_then(within);
    }
    let answer = answer.as_str()?;
    let among = |of: &[String]| of.iter().position(|own| own == answer);
    let letter = || match answer.as_bytes() {
        [letter @ b'A'..=b'Z'] => within(usize::from(letter - b'A')),
        _ => None,
    };
    let label = labels.map_or_else(letter, among);
    among(texts).or(label).or_else(|| answer.parse().ok().and_then(within))
}
