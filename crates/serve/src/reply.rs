//! A model's text as an answer: what is reasoning, what is content, and what is the call of a tool.

use std::time::Instant;

use delft::reasoning::{Part, Splitter};
use delft::tokens::Tokenizer;
use delft::{Finish, Metrics, Token};
use serde_json::{Value, json};

use crate::models::Model;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece {
    Reasoning(String),
    Content(String),
}

/// Takes one text apart as it comes.
pub(crate) struct Reply {
    /// Unset where the text is taken as it is.
    splitter: Option<Splitter>,
}

impl Reply {
    /// The answer to a rendered conversation, whose template may have opened the reasoning.
    pub(crate) fn chat(tokenizer: Option<&Tokenizer>, prompt: &[u32]) -> Self {
        Reply { splitter: Some(Splitter::after_tokens(tokenizer, prompt)) }
    }

    /// The continuation of a text.
    pub(crate) fn plain() -> Self {
        Reply { splitter: None }
    }

    /// Takes the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        match &mut self.splitter {
            Some(splitter) => pieces(splitter.push(text)),
            None if text.is_empty() => Vec::new(),
            None => vec![Piece::Content(text.to_string())],
        }
    }

    /// Gives the text that was held back, at its end.
    pub(crate) fn finish(&mut self) -> Vec<Piece> {
        self.splitter.as_mut().map_or_else(Vec::new, |splitter| pieces(splitter.finish()))
    }
}

fn pieces(spans: Vec<delft::reasoning::Span>) -> Vec<Piece> {
    let piece = |span: delft::reasoning::Span| match span.part {
        _ if span.text.is_empty() => None,
        Part::Answer => Some(Piece::Content(span.text)),
        Part::Reasoning => Some(Piece::Reasoning(span.text)),
        Part::Mark => None,
    };
    spans.into_iter().filter_map(piece).collect()
}

/// A whole answer.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    /// All tokens, the model's end token included.
    pub(crate) tokens: Vec<Token>,
    pub(crate) end: Option<(Finish, Metrics)>,
}

impl Answer {
    pub(crate) fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning += &text,
            Piece::Content(text) => self.content += &text,
        }
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.end.as_ref().map(|(_, metrics)| *metrics).unwrap_or_default()
    }
}

/// A token with its log-probability, and the likeliest ones in its place.
pub(crate) fn token_json(model: &Model, token: &Token) -> Value {
    let tokenizer = model.engine.tokenizer();
    let object = |id: u32, logprob: Option<f32>| {
        json!({
            "token": tokenizer.map(|t| t.token_text(id)),
            "logprob": logprob,
            "bytes": tokenizer.map(|t| t.token_bytes(id)),
        })
    };
    let mut told = object(token.id, token.logprob);
    let top = token.top_logprobs.iter().map(|&(id, logprob)| object(id, Some(logprob)));
    told["top_logprobs"] = top.collect();
    told
}

/// Tokens of prompts and answers together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    /// Those of them that were found in a session's cache.
    pub(crate) cached: usize,
    pub(crate) generated: usize,
}

impl Usage {
    /// Adds a text's tokens. Texts that continue the same prompt count it once.
    pub(crate) fn add(&mut self, metrics: &Metrics, new_prompt: bool) {
        if new_prompt {
            self.prompt += metrics.prompt_tokens;
            self.cached += metrics.reused_tokens;
        }
        self.generated += metrics.generated_tokens;
    }
}

/// When a request began, for what it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Began(pub(crate) Instant);

impl Began {
    pub(crate) fn now() -> Self {
        Began(Instant::now())
    }

    /// Nanoseconds since then.
    pub(crate) fn nanoseconds(self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
