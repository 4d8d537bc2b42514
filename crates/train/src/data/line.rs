//! One record as examples.

use super::forms::{self, PAIR};
use super::{Example, Form, Reader, Remarks};
use formats::{Error, Result};
use serde_json::{Map, Value, json};
use tokens::Special;

/// Keys of a line that go to the chat template as they are.
const FOR_TEMPLATES: &[&str] = &["tools", "documents", "chat_template_kwargs"];

impl Reader<'_> {
    /// The examples of a record, which stands on a line of this number.
    pub(super) fn record(
        &self,
        object: Map<String, Value>,
        number: usize,
        remarks: &mut Remarks,
    ) -> Result<Vec<Example>> {
        let mut object = object;
        let label = if self.judged { label(&mut object)? } else { None };
        let object = forms::settled(object, self.template.is_some() && !self.raw)?;
        if self.judged {
            return self.judged(&object, label, number, remarks);
        }
        if let Some(messages) = object.get("messages") {
            return self.chat(list(messages, "messages")?, &extra(&object)?, number, remarks);
        }
        match object.contains_key("prompt") {
            true => self.completion(&object, number, remarks),
            false => self.text(string(&object, "text")?, number, remarks),
        }
    }

    /// A prompt with an answer and a label, or with a chosen answer and a rejected one.
    fn judged(
        &self,
        object: &Map<String, Value>,
        label: Option<bool>,
        line: usize,
        remarks: &mut Remarks,
    ) -> Result<Vec<Example>> {
        let pair = PAIR.iter().any(|key| object.contains_key(*key));
        let keys: Vec<(&str, bool)> = match (pair, label) {
            (true, None) => PAIR.into_iter().zip([true, false]).collect(),
            (false, Some(label)) => vec![("completion", label)],
            (true, Some(_)) => {
                return Err(Error::new("label", "none beside chosen and rejected", "one"));
            }
            (false, None) => return Err(Error::new("label", "true or false", "nothing")),
        };
        let mut examples = Vec::new();
        for (key, desired) in keys {
            // Where there are messages, their last answer is the judged one.
            let own = match object.get("messages") {
                Some(messages) if !pair => {
                    let messages = list(messages, "messages")?;
                    let last = messages.len().saturating_sub(1);
                    self.chat_counting(messages, &extra(object)?, line, &|i| i == last, remarks)?
                }
                _ if object.contains_key("text") => {
                    return Err(Error::new(
                        "label",
                        "beside a prompt and its completion",
                        "a text",
                    ));
                }
                _ => self.followed(object, key, line, remarks)?,
            };
            if own.len() > 1 || own.iter().any(|example| example.counted.len() != 1) {
                return Err(Error::new(key, "one answer", "several"));
            }
            let judged = |example| Example { form: Form::Judged(desired), ..example };
            examples.extend(own.into_iter().map(judged));
        }
        Ok(examples)
    }

    /// A prompt with what follows it: one completion, or a better and a worse one.
    fn completion(
        &self,
        object: &Map<String, Value>,
        line: usize,
        remarks: &mut Remarks,
    ) -> Result<Vec<Example>> {
        if !PAIR.iter().any(|key| object.contains_key(*key)) {
            return self.followed(object, "completion", line, remarks);
        }
        if object.contains_key("completion") {
            return Err(Error::new("completion", "none beside chosen and rejected", "one"));
        }
        let mut answers = Vec::new();
        for key in PAIR {
            let mut examples = self.followed(object, key, line, remarks)?;
            if examples.len() > 1 {
                let found = format!("{} answers", examples.len());
                return Err(Error::new(key, "one answer", found));
            }
            answers.extend(examples.pop());
        }
        // Where nothing is left of one, there is nothing to compare.
        let Ok([mut chosen, mut rejected]) = <[Example; 2]>::try_from(answers) else {
            return Ok(Vec::new());
        };
        (chosen.form, rejected.form) = (Form::Preference, Form::Preference);
        chosen.rejected = Some(Box::new(rejected));
        Ok(vec![chosen])
    }

    /// A prompt and what `key` has to follow it.
    fn followed(
        &self,
        object: &Map<String, Value>,
        key: &str,
        line: usize,
        remarks: &mut Remarks,
    ) -> Result<Vec<Example>> {
        let completion = object.get(key).ok_or_else(|| Error::new(key, "beside prompt", "none"))?;
        if let (Value::Array(prompt), Value::Array(completion)) = (&object["prompt"], completion) {
            let before = prompt.len();
            let messages: Vec<Value> = prompt.iter().chain(completion).cloned().collect();
            let counts = |i: usize| i >= before;
            return self.chat_counting(&messages, &extra(object)?, line, &counts, remarks);
        }
        let (prompt, completion) = (string(object, "prompt")?, string(object, key)?);
        if self.template.is_some() && !self.raw {
            let message = |role: &str, text: &str| json!({ "role": role, "content": text });
            let messages = [message("user", prompt), message("assistant", completion)];
            return self.chat(&messages, &extra(object)?, line, remarks);
        }
        let add = Special { add: true, parse: false };
        let tokens = self.tokenizer.encode(&format!("{prompt}{completion}"), add)?;
        let start = super::chat::common(&self.tokenizer.encode(prompt, add)?, &tokens);
        let tokens = self.ended(tokens);
        let counted = start.max(1)..tokens.len();
        let example = Example::of(tokens, counted, Form::Answers, line);
        Ok(self.fitted(example, remarks)?.into_iter().collect())
    }
}

/// Takes the label of a line away: whether its answer is to be learned.
fn label(object: &mut Map<String, Value>) -> Result<Option<bool>> {
    let wrong = |found: &str| Err(Error::new("label", "true or false", found));
    match object.remove("label") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(label)) => Ok(Some(label)),
        // Tables have texts alone.
        Some(Value::String(text)) => match text.trim().to_ascii_lowercase().as_str() {
            "true" => Ok(Some(true)),
            "false" => Ok(Some(false)),
            _ => wrong("another text"),
        },
        Some(other) => wrong(kind(&other)),
    }
}

/// The fields of a line, besides messages, for the template.
fn extra(object: &Map<String, Value>) -> Result<Map<String, Value>> {
    let mut extra = Map::new();
    for key in FOR_TEMPLATES {
        match (*key, object.get(*key)) {
            (_, None | Some(Value::Null)) => {}
            ("chat_template_kwargs", Some(Value::Object(more))) => extra.extend(more.clone()),
            ("chat_template_kwargs", Some(other)) => {
                return Err(Error::new(*key, "an object", kind(other)));
            }
            // Tables have texts alone, and so have files of those that hold lists of several
            // shapes.
            (key, Some(Value::String(text))) => {
                let value: Value = serde_json::from_str(text)
                    .map_err(|_| Error::new(key, "a list, or JSON of one", "another text"))?;
                list(&value, key)?;
                extra.insert(key.to_owned(), value);
            }
            (key, Some(value)) => {
                list(value, key)?;
                extra.insert(key.to_owned(), value.clone());
            }
        }
    }
    Ok(extra)
}

pub(super) fn string<'a>(object: &'a Map<String, Value>, key: &str) -> Result<&'a str> {
    let value = object.get(key).unwrap_or(&Value::Null);
    value.as_str().ok_or_else(|| Error::new(key, "a text", kind(value)))
}

pub(super) fn list<'a>(value: &'a Value, key: &str) -> Result<&'a [Value]> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| Error::new(key, "a list", kind(value)))
}

/// JSON's name for the type of a value.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The fault of a text that is no JSON, in the words of its reader but for the place.
pub(super) fn category(error: &serde_json::Error) -> String {
    let words = error.to_string();
    let words = words.rsplit_once(" at line ").map_or(&*words, |(words, _)| words);
    match error.classify() {
        serde_json::error::Category::Eof => "one that breaks off".to_owned(),
        _ => format!("another text ({words})"),
    }
}
