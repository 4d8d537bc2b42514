//! Log-probabilities of generated tokens and of the likeliest ones in their places: for people, and
//! for programs; OpenAI's shapes are the server's.

use delft::Token;
use delft::tokens::Tokenizer;
use serde_json::{Value, json};
use serve::logprobs::{of_chat, with_likeliest};

fn text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    tokenizer.map(|tokenizer| tokenizer.token_text(id)).unwrap_or_default()
}

/// A token with its log-probability and the likeliest ones in its place, by id and text.
pub(crate) fn by_id(tokenizer: Option<&Tokenizer>, token: &Token) -> Value {
    with_likeliest(
        token,
        |id, logprob| json!({ "token": id, "text": text(tokenizer, id), "logprob": logprob }),
    )
}

/// The tokens of an answer, as OpenAI's chat completions have them.
pub(crate) fn chat(tokenizer: Option<&Tokenizer>, tokens: &[Token]) -> Value {
    let content: Vec<Value> = tokens.iter().map(|token| of_chat(tokenizer, token)).collect();
    json!({ "content": content, "refusal": null })
}

/// A token and the likeliest ones in its place, for people: `" cat" -0.31: " cat" -0.31, ..`.
pub(crate) fn line(tokenizer: Option<&Tokenizer>, token: &Token) -> String {
    let one = |id: u32, logprob: f32| format!("{:?} {logprob:.3}", text(tokenizer, id));
    let top = token.top_logprobs.iter().map(|&(id, logprob)| one(id, logprob));
    let top = top.collect::<Vec<_>>().join(", ");
    format!("{}: {top}", one(token.id, token.logprob.unwrap_or(f32::NAN)))
}
