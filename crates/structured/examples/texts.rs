//! Texts of schemas by random tokens, for a judge that nobody here wrote.
//!
//! ```sh
//! cargo run --release -p delft-structured --example texts -- TOKENIZER.gguf SCHEMAS.jsonl [TOKENS] [TEXTS]
//! ```
//!
//! SCHEMAS.jsonl has a schema in each line. Prints a line of JSON for each text: the schema's number
//! and the text, or why there is none, and the milliseconds that it took.

use delft_structured::{Grammar, Grammars};
use engine::TokenSet;
use engine::reasoning::Opening;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;
use tokens::Tokenizer;

/// One text of a grammar within so many tokens, and whether it came to its end.
fn write(
    grammars: &Grammars,
    (tokenizer, end): (&Tokenizer, u32),
    grammar: &Grammar,
    tokens: usize,
    state: &mut u64,
) -> formats::Result<(String, bool)> {
    let mut text = grammars.compile(grammar, Opening::Answer)?.start()?;
    let (mut ids, mut left) = (Vec::new(), tokens);
    let mut allowed = TokenSet::new(tokenizer.vocab_size());
    while left > 0 {
        let ahead = text.forced(left - 1)?;
        left -= ahead.len();
        ids.extend(ahead);
        allowed.clear();
        text.allow(left, &mut allowed)?;
        let all: Vec<u32> =
            (0..tokenizer.vocab_size() as u32).filter(|token| allowed.contains(*token)).collect();
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let token = all[(*state >> 33) as usize % all.len()];
        left -= 1;
        let token = if token == end { token } else { text.accept(token)? };
        if token == end {
            return Ok((tokenizer.decode(&ids, false), true));
        }
        ids.push(token);
    }
    Ok((tokenizer.decode(&ids, false), false))
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, schemas, numbers @ ..] = &args[..] else {
        return Err("expected: TOKENIZER.gguf SCHEMAS.jsonl [TOKENS] [TEXTS]".into());
    };
    let mut numbers = numbers.iter().map(|number| number.parse::<usize>());
    let tokens = numbers.next().transpose()?.unwrap_or(200);
    let texts = numbers.next().transpose()?.unwrap_or(3);
    let file = formats::Gguf::open(file.as_ref())?;
    let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata())?);
    let ends = Vec::from_iter(tokenizer.eos().iter().copied());
    let end = *ends.first().ok_or("expected a tokenizer with an end token")?;
    let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size(), &ends)?;
    let mut state = 1;
    for (number, line) in std::fs::read_to_string(schemas)?.lines().enumerate() {
        let value: serde_json::Value = serde_json::from_str(line)?;
        let grammar = match value.as_str() {
            Some(text) => Grammar::Regex(text.to_string()),
            None => Grammar::Schema(value),
        };
        for _ in 0..texts {
            let began = Instant::now();
            let own = (&*tokenizer, end);
            let (key, told) = match write(&grammars, own, &grammar, tokens, &mut state) {
                Ok((text, true)) => ("text", text),
                Ok((text, false)) => ("cut", text),
                Err(error) => ("refused", error.to_string()),
            };
            let took = began.elapsed().as_millis() as u64;
            let line = serde_json::json!({ "schema": number, key: told, "ms": took });
            println!("{line}");
        }
    }
    Ok(())
}
