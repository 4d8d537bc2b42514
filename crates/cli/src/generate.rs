//! One generation with its text handed on piece by piece, and what it took.

use std::sync::{Arc, Mutex, PoisonError};

use delft::{Engine, Finish, GenerateOptions, Metrics, Progress, Prompt, Session, Token};
use serde_json::{Value, json};

use crate::interrupt::Generating;
use crate::terminal::{Outcome, bytes};
use crate::waiting::Waiting;

/// A finished generation.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// The generated tokens, the model's end token included.
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Finish,
    pub(crate) metrics: Metrics,
}

/// Generates, giving each piece of text to `sink` as it comes. Ctrl-C ends it early. While a long
/// prompt is read a bar at the terminal tells how far it is, unless the options bring a progress of
/// their own.
pub(crate) fn generate(
    session: &mut Session,
    prompt: Prompt,
    options: &GenerateOptions,
    sink: &mut dyn FnMut(&str) -> Outcome,
) -> Outcome<Answer> {
    generate_tokens(session, prompt, options, &mut |token| {
        if token.text.is_empty() { Ok(()) } else { sink(&token.text) }
    })
}

/// [`generate`], giving each token to `sink`, those too that complete no character.
pub(crate) fn generate_tokens(
    session: &mut Session,
    prompt: Prompt,
    options: &GenerateOptions,
    sink: &mut dyn FnMut(&Token) -> Outcome,
) -> Outcome<Answer> {
    let generating = Generating::begin();
    let mut options = GenerateOptions { cancel: generating.0.clone(), ..options.clone() };
    let reading = Reading::begin();
    options.progress = options.progress.or(Some(reading.progress()));
    let mut generation = session.generate(prompt, &options)?;
    let mut text = String::new();
    let mut tokens = Vec::new();
    for token in &mut generation {
        reading.end();
        let token = token?;
        tokens.push(token.id);
        text += &token.text;
        sink(&token)?;
    }
    reading.end();
    let finish = generation.finish().cloned().unwrap_or(Finish::Cancelled);
    Ok(Answer { text, tokens, finish, metrics: generation.metrics() })
}

/// The bar that tells how far a prompt is read.
struct Reading(Arc<Mutex<Waiting>>);

impl Reading {
    fn begin() -> Reading {
        Reading(Arc::new(Mutex::new(Waiting::begin("reading the prompt"))))
    }

    fn progress(&self) -> Progress {
        let waiting = self.0.clone();
        Progress::new(move |done, all| {
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if done < all { waiting.at(done, Some(all)) } else { waiting.end() }
        })
    }

    fn end(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).end();
    }
}

impl Answer {
    /// Speed, memory and the reason it ended, in one line.
    pub(crate) fn summary(&self, engine: &Engine) -> String {
        let m = &self.metrics;
        let reused = if m.reused_tokens > 0 {
            format!(" ({} reused)", m.reused_tokens)
        } else {
            String::new()
        };
        // Not every system tells.
        let memory =
            if m.peak_rss_bytes > 0 { bytes(m.peak_rss_bytes) } else { "unknown".to_string() };
        let read = m.reused_tokens + m.computed_tokens;
        let of = if read < m.prompt_tokens { format!("{read} of ") } else { String::new() };
        format!(
            "prefill {of}{} tokens{reused}, {:.1} tok/s | decode {} tokens, {:.1} tok/s | memory {memory} | {}",
            m.prompt_tokens,
            m.prefill_rate(),
            m.generated_tokens,
            m.decode_rate(),
            self.reason(engine)
        )
    }

    /// Counts, times in seconds, rates in tokens per second, memory in bytes.
    pub(crate) fn metrics_json(&self) -> Value {
        let m = &self.metrics;
        json!({
            "prompt_tokens": m.prompt_tokens,
            "reused_tokens": m.reused_tokens,
            "computed_tokens": m.computed_tokens,
            "generated_tokens": m.generated_tokens,
            "closing_tokens": m.closing_tokens,
            "prefill_s": m.prefill.as_secs_f64(),
            "decode_s": m.decode.as_secs_f64(),
            "prefill_tok_s": m.prefill_rate(),
            "decode_tok_s": m.decode_rate(),
            "peak_rss_bytes": m.peak_rss_bytes,
        })
    }

    /// Why it ended, for people.
    fn reason(&self, engine: &Engine) -> String {
        let closing = self.metrics.closing_tokens;
        match &self.finish {
            finish if finish.closed_early(&self.metrics) => {
                format!("brought to its end within the limit, by the last {closing} tokens")
            }
            Finish::End(_) => "the model stopped".to_string(),
            Finish::StopString(_) => "stop text met".to_string(),
            Finish::Length => "token limit reached".to_string(),
            Finish::ContextFull => {
                format!("context full ({} tokens; --ctx sets it)", engine.info().context)
            }
            Finish::Cancelled => "interrupted".to_string(),
            Finish::Failed => "failed".to_string(),
        }
    }
}
