//! Log-probabilities of generated tokens and of the likeliest ones in their places, in the shapes
//! that OpenAI's APIs give them.

use delft::Token;
use delft::tokens::Tokenizer;
use serde_json::{Map, Value, json};

/// A token's object, which `object` makes of an id and a log-probability, and the objects of the
/// likeliest tokens at its place.
pub fn with_likeliest(token: &Token, object: impl Fn(u32, Option<f32>) -> Value) -> Value {
    let mut told = object(token.id, token.logprob);
    let top = token.top_logprobs.iter().map(|&(id, logprob)| object(id, Some(logprob)));
    told["top_logprobs"] = top.collect();
    told
}

/// A token as chat completions have it. Where a constraint put it in the place of a likelier one,
/// its log-probability is what OpenAI documents for tokens that are none of the likeliest.
pub fn of_chat(tokenizer: Option<&Tokenizer>, token: &Token) -> Value {
    with_likeliest(token, |id, logprob| {
        json!({
            "token": tokenizer.map(|t| t.token_text(id)),
            "logprob": logprob.unwrap_or(-9999.0),
            "bytes": tokenizer.map(|t| t.token_bytes(id)),
        })
    })
}

/// The tokens of a text as completions have them.
pub fn of_completion(tokenizer: Option<&Tokenizer>, tokens: &[Token]) -> Value {
    let mut lists = Lists::default();
    tokens.iter().for_each(|token| lists.add(tokenizer, token));
    lists.take()
}

/// Log-probabilities of a text's tokens, as completions tell them: lists of equal length, an entry
/// for each token.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    tokens: Vec<String>,
    logprobs: Vec<Option<f32>>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    /// Characters of the text so far.
    length: usize,
}

impl Lists {
    /// Adds the next token of the text.
    pub(crate) fn add(&mut self, tokenizer: Option<&Tokenizer>, token: &Token) {
        let text = |id| tokenizer.map(|t| t.token_text(id)).unwrap_or_default();
        let mut top = Map::new();
        for &(id, logprob) in &token.top_logprobs {
            // Tokens that are parts of characters share a text, which is the likeliest one's.
            top.entry(text(id)).or_insert_with(|| logprob.into());
        }
        // The first token of a prompt stands behind nothing.
        let nothing = token.logprob.is_none() && top.is_empty();
        self.tokens.push(text(token.id));
        self.logprobs.push(token.logprob);
        self.top.push(if nothing { Value::Null } else { top.into() });
        self.offsets.push(self.length);
        self.length += token.text.chars().count();
    }

    /// The entries so far, which are then forgotten.
    pub(crate) fn take(&mut self) -> Value {
        let Lists { tokens, logprobs, top, offsets, length } = std::mem::take(self);
        self.length = length;
        json!({
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        })
    }
}
