//! The cost of a schema: microseconds of each token of random texts that follow it.
//!
//! ```sh
//! cargo run --release -p delft-structured --example cost -- FOLDER SCHEMA.json [TOKENS] [TEXTS]
//! ```
//!
//! FOLDER has a tokenizer. Prints what it takes to ask for the schema, to ask for it again as the next
//! request does, and for each question of a [`Constraint`](engine::Constraint): the median, the 99th
//! of 100, the longest, and the mean of a token; `first` is what a text takes until its first token.

use delft_structured::{Grammar, Grammars};
use engine::TokenSet;
use engine::reasoning::Opening;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokens::Tokenizer;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, schema, numbers @ ..] = &args[..] else {
        return Err("expected: FOLDER SCHEMA.json [TOKENS] [TEXTS]".into());
    };
    let mut numbers = numbers.iter().map(|number| number.parse::<usize>());
    let most = numbers.next().transpose()?.unwrap_or(512);
    let texts = numbers.next().transpose()?.unwrap_or(8);
    let tokenizer = Arc::new(Tokenizer::from_folder(folder.as_ref())?);
    let (size, ends) = (tokenizer.vocab_size(), Vec::from_iter(tokenizer.eos().iter().copied()));
    let grammars = Grammars::new(&tokenizer, size, &ends)?;
    let schema = serde_json::from_str(&std::fs::read_to_string(schema)?)?;
    let began = Instant::now();
    let schema = Grammar::Schema(schema);
    grammars.compile(&schema, Opening::Answer)?;
    println!("compiled in {:.1} ms", 1e3 * began.elapsed().as_secs_f64());
    let mut allowed = TokenSet::new(size);
    let [mut again, mut start, mut first, mut forced, mut allow, mut accept]: [Vec<Duration>; 6] =
        Default::default();
    let (mut written, mut state) = (0, 1u64);
    for _ in 0..texts {
        let began = Instant::now();
        let source = grammars.compile(&schema, Opening::Answer)?;
        again.push(began.elapsed());
        let opened = Instant::now();
        let (mut text, mut left) = (source.start()?, most);
        start.push(opened.elapsed());
        while left > 0 {
            let began = Instant::now();
            let ahead = text.forced(left - 1)?;
            forced.push(began.elapsed());
            left -= ahead.len();
            let began = Instant::now();
            allowed.clear();
            text.allow(left, &mut allowed)?;
            allow.push(began.elapsed());
            if first.len() < start.len() {
                first.push(opened.elapsed());
            }
            let all: Vec<u32> = (0..size as u32).filter(|token| allowed.contains(*token)).collect();
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let token = all[(state >> 33) as usize % all.len()];
            (left, written) = (left - 1, written + ahead.len() + 1);
            if ends.contains(&token) {
                break;
            }
            let began = Instant::now();
            let token = text.accept(token)?;
            accept.push(began.elapsed());
            if ends.contains(&token) {
                break;
            }
        }
    }
    println!("{written} tokens of {texts} texts, microseconds:");
    let questions = [("forced", forced), ("allow", allow), ("accept", accept)];
    let asked = [("again", again), ("start", start), ("first", first)];
    for (name, mut times) in asked.into_iter().chain(questions) {
        times.sort_unstable();
        let micros = |time: Duration| 1e6 * time.as_secs_f64();
        let at = |part: f64| micros(times[((times.len() - 1) as f64 * part) as usize]);
        let all = micros(times.iter().sum()) / written as f64;
        println!("{name:8} {:9.1} {:9.1} {:9.1} {all:9.1}", at(0.5), at(0.99), at(1.0));
    }
    Ok(())
}
