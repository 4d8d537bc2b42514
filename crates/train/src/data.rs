//! Examples to learn from: files of JSON lines or plain text, as tokens of which some are to be
//! predicted.
//!
//! A record is `messages` (as OpenAI's interface has them, through the model's chat template),
//! `prompt` with `completion` or with `chosen` and `rejected`, or `text`; or it is in a form of
//! another program, which becomes one of these (`forms.rs`). Of messages the assistant's answers
//! count, of a prompt with its completion the completion, of a text every token. What is made of
//! examples, in which order and how many at a time: [`pack`](crate::pack).

mod chat;
mod choices;
mod forms;
mod line;
mod records;

pub use choices::{Question, questions};

use engine::{Prompt, models};
use formats::{Error, Hint, Location, Result, Setting, Tensors};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use tokens::{ChatTemplate, Special, Tokenizer};

/// The form of the line that an example was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A text of which every token counts.
    Text,
    /// Prompts, and answers that count.
    Answers,
    /// A prompt with two answers, of which the better counts here and the worse in
    /// [`Example::rejected`].
    Preference,
    /// A prompt with an answer that is to be learned (true) or unlearned.
    Judged(bool),
}

/// A sequence to learn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Its tokens, those that are not predicted included.
    pub tokens: Vec<u32>,
    /// Which of them are to be predicted, each from what precedes it: ranges in ascending order,
    /// none of them empty, none with token 0.
    pub counted: Vec<Range<usize>>,
    /// The form of the line it was made from.
    pub form: Form,
    /// The line of the file that it comes from, from 1; the piece of a plain text. What has one
    /// line in common is held out together.
    pub line: usize,
    /// The same with the worse answer, of a [`Form::Preference`].
    pub rejected: Option<Box<Example>>,
}

impl Example {
    /// An example of which one run of tokens counts.
    pub fn of(tokens: Vec<u32>, counted: Range<usize>, form: Form, line: usize) -> Example {
        let counted = std::iter::once(counted).collect();
        Example { tokens, counted, form, line, rejected: None }
    }

    /// How many tokens count.
    pub fn answer_tokens(&self) -> usize {
        let own: usize = self.counted.iter().map(Range::len).sum();
        own + self.rejected.as_ref().map_or(0, |rejected| rejected.answer_tokens())
    }

    /// How many tokens a batch takes for it: beside each judged answer stands another one to the
    /// same prompt.
    pub fn length(&self) -> usize {
        let own =
            self.tokens.len() + self.rejected.as_ref().map_or(0, |rejected| rejected.length());
        if self.desired().is_some() { 2 * own } else { own }
    }

    /// Whether its answer is to be learned, if it is judged.
    pub fn desired(&self) -> Option<bool> {
        match self.form {
            Form::Judged(desired) => Some(desired),
            _ => None,
        }
    }
}

/// The examples of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Data {
    /// In the order of the file.
    pub examples: Vec<Example>,
    /// Changes to the examples that their author may not expect, a sentence each.
    pub notes: Vec<String>,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

impl Data {
    /// Tokens of all examples.
    pub fn tokens(&self) -> usize {
        self.examples.iter().map(Example::length).sum()
    }

    /// Tokens that count.
    pub fn answer_tokens(&self) -> usize {
        self.examples.iter().map(Example::answer_tokens).sum()
    }

    /// Tokens of the longest example.
    pub fn longest(&self) -> usize {
        self.examples.iter().map(Example::length).max().unwrap_or(0)
    }

    /// Whether examples are pairs of answers; none where there are no examples.
    ///
    /// # Errors
    /// Some that are and some that are not.
    pub fn are_pairs(&self) -> Result<Option<bool>> {
        let pair = |example: &Example| example.rejected.is_some();
        let Some(first) = self.examples.first() else { return Ok(None) };
        match self.examples.iter().find(|example| pair(example) != pair(first)) {
            None => Ok(Some(pair(first))),
            Some(odd) => {
                let [own, others] = match pair(odd) {
                    true => ["chosen and rejected answers", "single ones"],
                    false => ["none", "chosen and rejected answers"],
                };
                let expected = format!("{others}, as line {} has", first.line);
                Err(Error::new(format!("line {}", odd.line), expected, own))
            }
        }
    }

    /// Takes a share of the lines away, chosen by `seed`: at least one, and leaves at least one.
    ///
    /// # Errors
    /// A share that is not between 0 and 1, or fewer than two lines.
    pub fn hold_out(&mut self, share: f64, seed: u64) -> Result<Data> {
        if !(share > 0.0 && share < 1.0) {
            return Err(Error::new("held-out examples", "a share between 0 and 1", share));
        }
        let lines: BTreeSet<usize> = self.examples.iter().map(|example| example.line).collect();
        let lines: Vec<usize> = lines.into_iter().collect();
        if lines.len() < 2 {
            let found = format!("{} in all", lines.len());
            return Err(Error::new(
                "held-out examples",
                "two examples or more to choose from",
                found,
            ));
        }
        let wanted = (lines.len() as f64 * share).round() as usize;
        let order = crate::pack::shuffled(lines.len(), seed, HELD_OUT);
        let chosen = order.iter().take(wanted.clamp(1, lines.len() - 1));
        let chosen: BTreeSet<usize> = chosen.map(|i| lines[*i]).collect();
        let all = std::mem::take(&mut self.examples);
        let (held_out, rest) = all.into_iter().partition(|e: &Example| chosen.contains(&e.line));
        self.examples = rest;
        Ok(Data { examples: held_out, notes: Vec::new(), sha256: self.sha256.clone() })
    }
}

/// The stream of random numbers that chooses what is held out; epochs have those from 0 on.
const HELD_OUT: u32 = u32::MAX;

/// The parts of a model that turn text into tokens.
#[derive(Debug)]
pub struct Language {
    /// Its tokenizer, with the tokens that end a generation.
    pub tokenizer: Tokenizer,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
}

impl Language {
    /// The language of a model's files; no weights are read.
    ///
    /// # Errors
    /// No tokenizer beside the weights; one, or a template, that is damaged.
    pub fn open(location: impl Into<Location>) -> Result<Language> {
        let location = location.into();
        let place = location.to_string();
        let tensors = Tensors::open(location)?;
        let tokenizer = engine::read_tokenizer(&tensors)?
            .ok_or_else(|| Error::new(place, "a tokenizer beside the weights", "none"))?;
        Ok(Language { tokenizer, template: engine::read_template(&tensors)? })
    }
}

/// How a file becomes examples.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    /// Text to tokens.
    pub tokenizer: &'a Tokenizer,
    /// Messages to text.
    pub template: Option<&'a ChatTemplate>,
    /// Whether a prompt and its completion are continued text although the model has a chat
    /// template.
    pub raw: bool,
    /// Whether prompts are learned, too: every token counts.
    pub prompts: bool,
    /// Whether a `label` says of each answer if it is to be learned; of pairs the chosen ones are.
    pub judged: bool,
    /// Tokens that an example has at most. Texts are cut there into several.
    pub context: usize,
    /// Whether what is longer and no text loses its end, instead of being refused.
    pub truncate: bool,
}

impl Reader<'_> {
    /// The examples of a file: of JSON where its name ends in `.jsonl`, `.ndjson` or `.json`, one
    /// object on each line or all in a list; of a table where it ends in `.csv` or `.tsv`; else of
    /// plain text.
    ///
    /// # Errors
    /// A file that cannot be read or is no UTF-8; a line that is malformed, by file, line and key;
    /// an example longer than the context; nothing to learn from.
    pub fn read(&self, path: &Path) -> Result<Data> {
        if self.context < 2 {
            return Err(Error::new("context", "at least 2 tokens", self.context));
        }
        let place = path.display().to_string();
        let text = text_of(path)?;
        let sha256 = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let mut remarks = Remarks::default();
        let examples = match is_lines(path) {
            true => self.records(path, text, &mut remarks)?,
            false => {
                let mut pieces = self.text(text, 1, &mut Remarks::default())?;
                pieces.iter_mut().enumerate().for_each(|(i, piece)| piece.line = i + 1);
                pieces
            }
        };
        let data = Data { examples, notes: remarks.sentences(self.context), sha256 };
        if data.answer_tokens() == 0 {
            let error = Error::new(place, "something to learn from", "no token that counts");
            return Err(match remarks.truncated {
                0 => error,
                _ => error.hint("what would count is behind the tokens that were kept"),
            });
        }
        Ok(data)
    }

    fn records(&self, path: &Path, text: &str, remarks: &mut Remarks) -> Result<Vec<Example>> {
        let mut examples = Vec::new();
        for record in records::records(path, text) {
            let of_record = |e: Error| Error {
                place: format!("{}: {}{}", path.display(), record.place, below(&e.place)),
                ..e
            };
            let of = record.object.and_then(|object| self.record(object, record.number, remarks));
            examples.extend(of.map_err(of_record)?);
        }
        Ok(examples)
    }

    /// The pieces of a text.
    fn text(&self, text: &str, line: usize, remarks: &mut Remarks) -> Result<Vec<Example>> {
        let tokens = self.ended(self.tokenizer.encode(text, Special { add: true, parse: false })?);
        if tokens.len() < 2 || text.trim().is_empty() {
            remarks.empty += 1;
            return Ok(Vec::new());
        }
        remarks.split += usize::from(tokens.len() > self.context);
        // Each piece begins with the last token of the one before it, so that every token but the
        // first is predicted once.
        let piece = |start: usize| {
            let tokens = tokens[start..].iter().take(self.context).copied().collect::<Vec<u32>>();
            let count = tokens.len();
            Example::of(tokens, 1..count, Form::Text, line)
        };
        Ok((0..tokens.len() - 1).step_by(self.context - 1).map(piece).collect())
    }

    /// The tokens with the one that ends a text behind them, if the model has one and they do not
    /// end in it.
    fn ended(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        let end = self.tokenizer.eos_token().or(self.tokenizer.eos().first().copied());
        if let Some(end) = end.filter(|end| tokens.last() != Some(end)) {
            tokens.push(end);
        }
        tokens
    }

    /// An example within the context, or none if nothing of it would count.
    fn fitted(&self, mut example: Example, remarks: &mut Remarks) -> Result<Option<Example>> {
        let length = example.tokens.len();
        if length > self.context {
            if !self.truncate {
                let expected = format!("at most {} tokens", self.context);
                let error = Error::new("", expected, length);
                let hint = Hint::set(Setting::Context, length).and(" holds it, if the model does");
                return Err(error.hint(hint));
            }
            remarks.truncated += 1;
            example.tokens.truncate(self.context);
        }
        let end = example.tokens.len();
        if self.prompts {
            example.counted = std::iter::once(1..end).collect();
        }
        let within =
            example.counted.into_iter().map(|range| range.start.max(1)..range.end.min(end));
        example.counted = within.filter(|range| !range.is_empty()).collect();
        remarks.empty += usize::from(example.counted.is_empty());
        Ok((!example.counted.is_empty()).then_some(example))
    }

    /// The text of a conversation, with the beginning of an answer behind it or not.
    fn render(
        &self,
        messages: &[serde_json::Value],
        extra: &serde_json::Map<String, serde_json::Value>,
        opened: bool,
    ) -> Result<String> {
        let mut extra = extra.clone();
        extra.insert("add_generation_prompt".to_owned(), opened.into());
        let prompt = Prompt::Chat { messages: messages.to_vec(), extra };
        prompt.render(Some(self.tokenizer), self.template)
    }
}

/// Longest data that comes from a device or a pipe, which need not end: 1 GiB.
const LONGEST_STREAM: u64 = 1 << 30;

/// The text of a file of examples.
fn text_of(path: &Path) -> Result<String> {
    let regular = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    formats::text::read(path, if regular { u64::MAX } else { LONGEST_STREAM })
}

/// Whether a file has examples by name, and is no text as a whole.
pub fn is_lines(path: &Path) -> bool {
    if records::separator(path).is_some() {
        return true;
    }
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
    ["jsonl", "ndjson", "json"].iter().any(|known| end.eq_ignore_ascii_case(known))
}

/// A place within a line, as the rest of an error's place.
fn below(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(": {place}") }
}

/// How many examples something was done to.
#[derive(Debug, Default)]
struct Remarks {
    split: usize,
    truncated: usize,
    empty: usize,
    apart: usize,
    opening: usize,
}

impl Remarks {
    fn sentences(&self, context: usize) -> Vec<String> {
        let rows = [
            (self.split, format!("longer than {context} tokens: cut into several")),
            (self.truncated, format!("longer than {context} tokens: truncated")),
            (self.empty, "without a token that counts: left out".to_owned()),
            (
                self.apart,
                "whose earlier answers the chat template shows otherwise later on: each answer became an example".to_owned(),
            ),
            (
                self.opening,
                "whose answers do not begin as the chat template opens them: learned as the data have them".to_owned(),
            ),
        ];
        let told = rows.into_iter().filter(|(count, _)| *count > 0);
        told.map(|(count, what)| match count {
            1 => format!("1 example {what}"),
            count => format!("{count} examples {what}"),
        })
        .collect()
    }
}

/// The greatest context of a model that its configuration states.
///
/// # Errors
/// A configuration that cannot be read.
pub fn trained_context(location: impl Into<Location>, ignore_keys: &[String]) -> Result<usize> {
    let tensors = Tensors::open(location)?;
    let read =
        models::ReadOptions { ignore_keys: ignore_keys.to_vec(), ..models::ReadOptions::default() };
    Ok(models::load(&tensors, &read)?.config().context)
}
