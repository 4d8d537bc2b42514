//! Log-probabilities of generated tokens and of the likeliest ones in their places: for people, for
//! programs, and in the shapes that OpenAI's APIs give them.

use delft::Token;
use delft::tokens::Tokenizer;
use serde_json::{Map, Value, json};

fn text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    tokenizer.map(|tokenizer| tokenizer.token_text(id)).unwrap_or_default()
}

/// A token with its log-probability and the likeliest ones in its place, by id and text.
pub(crate) fn by_id(tokenizer: Option<&Tokenizer>, token: &Token) -> Value {
    let object = |id: u32, logprob: Option<f32>| json!({ "token": id, "text": text(tokenizer, id), "logprob": logprob });
    with_likeliest(token, &object)
}

/// The same as OpenAI's chat completions have it.
fn of_chat(tokenizer: Option<&Tokenizer>, token: &Token) -> Value {
    let object = |id: u32, logprob: Option<f32>| {
        let bytes = tokenizer.map(|tokenizer| tokenizer.token_bytes(id));
        json!({ "token": text(tokenizer, id), "logprob": logprob, "bytes": bytes })
    };
    with_likeliest(token, &object)
}

fn with_likeliest(token: &Token, object: &dyn Fn(u32, Option<f32>) -> Value) -> Value {
    let mut told = object(token.id, token.logprob);
    let top = token.top_logprobs.iter().map(|&(id, logprob)| object(id, Some(logprob)));
    told["top_logprobs"] = top.collect();
    told
}

/// Those of an answer, as OpenAI's chat completions have them.
pub(crate) fn chat(tokenizer: Option<&Tokenizer>, tokens: &[Token]) -> Value {
    let content: Vec<Value> = tokens.iter().map(|token| of_chat(tokenizer, token)).collect();
    json!({ "content": content, "refusal": null })
}

/// Those of an answer, as OpenAI's completions have them: lists with an entry for each token.
pub(crate) fn completion(tokenizer: Option<&Tokenizer>, tokens: &[Token]) -> Value {
    let likeliest = |token: &Token| -> Map<String, Value> {
        let top = token.top_logprobs.iter();
        top.map(|&(id, logprob)| (text(tokenizer, id), logprob.into())).collect()
    };
    let offsets = tokens.iter().scan(0, |length, token| {
        let offset = *length;
        *length += token.text.chars().count();
        Some(offset)
    });
    json!({
        "tokens": tokens.iter().map(|token| text(tokenizer, token.id)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(likeliest).collect::<Vec<_>>(),
        "text_offset": offsets.collect::<Vec<usize>>(),
    })
}

/// A token and the likeliest ones in its place, for people: `" cat" -0.31: " cat" -0.31, ..`.
pub(crate) fn line(tokenizer: Option<&Tokenizer>, token: &Token) -> String {
    let one = |id: u32, logprob: f32| format!("{:?} {logprob:.3}", text(tokenizer, id));
    let top = token.top_logprobs.iter().map(|&(id, logprob)| one(id, logprob));
    let top = top.collect::<Vec<_>>().join(", ");
    format!("{}: {top}", one(token.id, token.logprob.unwrap_or(f32::NAN)))
}
