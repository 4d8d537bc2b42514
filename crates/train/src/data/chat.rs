//! Conversations: which of a chat template's tokens are answers.
//!
//! The conversation up to an answer is rendered twice: without it, opened for it, and with it. What
//! the second adds to the first is the answer, with what ends it. This needs no marks in the
//! template.

use super::line::{kind, string};
use super::{Example, Form, Reader, Remarks};
use formats::{Error, Result};
use serde_json::{Map, Value, json};
use std::ops::Range;

/// The end of the beginning that two sequences have in common.
pub(super) fn common<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// A conversation up to one of its answers, that included.
struct Turn {
    /// Its tokens.
    tokens: Vec<u32>,
    /// Which of them are the answer.
    answer: Range<usize>,
    counts: bool,
}

impl Reader<'_> {
    /// The examples of a conversation whose answers all count.
    pub(super) fn chat(
        &self,
        messages: &[Value],
        extra: &Map<String, Value>,
        line: usize,
        remarks: &mut Remarks,
    ) -> Result<Vec<Example>> {
        self.chat_counting(messages, extra, line, &|_| true, remarks)
    }

    /// The examples of a conversation: one, or one for each answer where the template shows an
    /// answer otherwise once the conversation has gone on. Answers count that `counts` says so of,
    /// by the number of their message, unless their `weight` is 0.
    pub(super) fn chat_counting(
        &self,
        messages: &[Value],
        extra: &Map<String, Value>,
        line: usize,
        counts: &dyn Fn(usize) -> bool,
        remarks: &mut Remarks,
    ) -> Result<Vec<Example>> {
        let mut turns = Vec::new();
        let (mut odd, mut plain) = (false, Vec::with_capacity(messages.len()));
        for (i, message) in messages.iter().enumerate() {
            let (is_answer, weight) = check(message, i)?;
            plain.push(shown(message, i)?);
            if is_answer {
                let (mut turn, opens) = self.turn(&plain, extra)?;
                odd |= !opens;
                turn.counts = weight && counts(i);
                turns.push(turn);
            }
        }
        if !turns.iter().any(|turn| turn.counts) {
            let found = if turns.is_empty() { "none" } else { "none that counts" };
            return Err(Error::new(
                "messages",
                "an answer: a message whose role is assistant",
                found,
            ));
        }
        remarks.opening += usize::from(odd);
        let whole = &turns[turns.len() - 1];
        // What is behind the last turn alone, such as the end of a text, is no part of it.
        let special = |id: &u32| self.tokenizer.is_special(*id);
        let stays = |turn: &Turn| {
            let all = common(&turn.tokens, &whole.tokens);
            all > turn.answer.start && turn.tokens[all..].iter().all(special)
        };
        let one = turns.iter().all(stays);
        remarks.apart += usize::from(!one);
        let examples = match one {
            true => {
                let tokens = whole.tokens.clone();
                // What was tokenised by itself may end otherwise than within the whole.
                let within = |turn: &Turn| {
                    let all = common(&turn.tokens, &tokens);
                    turn.answer.start.min(all)..turn.answer.end.min(all)
                };
                let counted = turns.iter().filter(|turn| turn.counts).map(within).collect();
                vec![Example { tokens, counted, form: Form::Answers, line, rejected: None }]
            }
            false => {
                let each = turns.into_iter().filter(|turn| turn.counts);
                let example =
                    |turn: Turn| Example::of(turn.tokens, turn.answer, Form::Answers, line);
                each.map(example).collect()
            }
        };
        let fitted = examples.into_iter().map(|example| self.fitted(example, remarks));
        fitted.filter_map(Result::transpose).collect()
    }

    /// A conversation that ends in an answer, and whether the answer begins as the template opens
    /// it.
    fn turn(&self, messages: &[Value], extra: &Map<String, Value>) -> Result<(Turn, bool)> {
        let (last, before) = messages.split_last().unwrap_or((&Value::Null, &[]));
        let closed = self.render(messages, extra, false)?;
        // A template may refuse a conversation that nobody has said anything in.
        let opened = match before {
            [] => self.render(before, extra, true).unwrap_or_default(),
            _ => self.render(before, extra, true)?,
        };
        let shared = common(opened.as_bytes(), closed.as_bytes());
        let shared = (0..=shared).rev().find(|at| closed.is_char_boundary(*at)).unwrap_or(0);
        let mut tokens = self.tokenizer.encode_chat(&closed)?;
        let start = self.token_at(&closed, &tokens, shared)?;
        let said = last["content"].as_str().map(str::trim_end).unwrap_or_default();
        if !said.is_empty() && closed.trim_end().ends_with(said) {
            tokens = self.answered(messages, extra, (&closed, tokens), start);
        }
        let answer = start..tokens.len();
        // Reasoning and calls of tools are shown in the template's own way.
        let content = last["content"].as_str().map(str::trim).unwrap_or_default();
        let own_way = content.contains("</think>") || last.get("tool_calls").is_some();
        if !own_way && !closed.contains(content) {
            let found = "one that it leaves out";
            return Err(Error::new("messages", "answers that the chat template shows", found));
        }
        Ok((Turn { tokens, answer, counts: true }, shared == opened.len()))
    }

    /// The tokens of a conversation whose template writes nothing behind its last answer (GLM-4.5's,
    /// Apertus'), with one that ends it, which would not be learned otherwise: what stands there
    /// once the user goes on, if that ends a generation, else the token that ends a text.
    fn answered(
        &self,
        messages: &[Value],
        extra: &Map<String, Value>,
        (closed, mut tokens): (&str, Vec<u32>),
        start: usize,
    ) -> Vec<u32> {
        let ends = |id: &u32| self.tokenizer.eos().contains(id);
        if tokens[start.min(tokens.len())..].iter().any(ends) {
            return tokens;
        }
        let further = json!({ "role": "user", "content": "x" });
        let further: Vec<Value> = messages.iter().cloned().chain([further]).collect();
        // A template may refuse it.
        let further = self.render(&further, extra, false).unwrap_or_default();
        let further = match further.starts_with(closed) {
            true => self.tokenizer.encode_chat(&further).unwrap_or_default(),
            false => Vec::new(),
        };
        let next = further.get(tokens.len()).filter(|_| further.starts_with(&tokens));
        match next.filter(|next| ends(next)) {
            Some(next) => {
                tokens.push(*next);
                tokens
            }
            None => self.ended(tokens),
        }
    }

    /// The token of a text that holds the byte `at`, or begins there.
    fn token_at(&self, text: &str, tokens: &[u32], at: usize) -> Result<usize> {
        let said = |id: &u32| self.tokenizer.token_bytes(*id);
        let all: Vec<u8> = tokens.iter().flat_map(said).copied().collect();
        if !all.ends_with(text.as_bytes()) {
            // Tokens that do not say the text byte for byte: those of its beginning by itself tell.
            return Ok(common(&self.tokenizer.encode_chat(&text[..at])?, tokens));
        }
        // A beginning of text that the template did not write stands in front.
        let mut end = 0;
        let behind = |id: &u32| {
            end += said(id).len();
            end > all.len() - text.len() + at
        };
        Ok(tokens.iter().position(behind).unwrap_or(tokens.len()))
    }
}

/// Whether a message is an answer, and whether it counts; refuses what is no message.
fn check(message: &Value, i: usize) -> Result<(bool, bool)> {
    let at = |key: &str| format!("messages[{i}]{key}");
    let object = message
        .as_object()
        .ok_or_else(|| Error::new(at(""), "an object with role and content", kind(message)))?;
    let role = string(object, "role").map_err(|e| Error { place: at(".role"), ..e })?;
    if let Some(other) =
        [("human", "user"), ("gpt", "assistant")].iter().find(|(own, _)| role == *own)
    {
        return Err(Error::new(at(".role"), other.1, other.0));
    }
    let calls = object.get("tool_calls").is_some_and(|calls| !calls.is_null());
    match object.get("content") {
        Some(Value::String(_) | Value::Array(_)) => {}
        Some(Value::Null) | None if calls => {}
        content => {
            let found = kind(content.unwrap_or(&Value::Null));
            return Err(Error::new(at(".content"), "a text", found));
        }
    }
    let weight = match object.get("weight") {
        None | Some(Value::Null) => true,
        Some(weight) => match weight.as_f64() {
            Some(0.0) => false,
            Some(1.0) => true,
            _ => return Err(Error::new(at(".weight"), "0 or 1", weight)),
        },
    };
    Ok((role == "assistant", weight))
}

/// A message as templates take it: without its weight, and with a text for a list of parts, which
/// some would show as a list.
fn shown(message: &Value, i: usize) -> Result<Value> {
    let mut message = message.clone();
    let Some(object) = message.as_object_mut() else { return Ok(message) };
    object.shift_remove("weight");
    if let Some(Value::Array(parts)) = object.get("content") {
        let mut text = String::new();
        for (j, part) in parts.iter().enumerate() {
            let at = |key: &str| format!("messages[{i}].content[{j}]{key}");
            let part = part
                .as_object()
                .ok_or_else(|| Error::new(at(""), "an object with type and text", kind(part)))?;
            let of = |key: &str| {
                string(part, key).map_err(|e| Error { place: at(&format!(".{key}")), ..e })
            };
            let name = of("type")?;
            if name != "text" {
                let found: String = name.chars().take(40).collect();
                return Err(Error::new(at(".type"), "text, which alone is learned", found));
            }
            text += of("text")?;
        }
        object.insert("content".to_owned(), text.into());
    }
    Ok(message)
}
