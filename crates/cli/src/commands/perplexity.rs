//! `delft perplexity`: `exp` of the mean negative log-likelihood of a text's tokens, chunk by
//! chunk.

use delft::tokens::Special;
use delft::{Error, Session, check_logits, log_sum_exp};
use serde_json::{Value, json};

use crate::args::Perplexity;
use crate::interrupt::{LastWords, SoFar};
use crate::terminal::{Outcome, aside, print, print_json, stderr_is_terminal};
use crate::words::needed;
use crate::{load, prompt};

/// Tokens of a chunk unless said otherwise, as llama.cpp has it.
const CONTEXT: usize = 512;

/// Running sums over the scored tokens: their number, and the sums of their negative
/// log-likelihoods and of the squares.
#[derive(Debug, Default, Clone, Copy)]
struct Score {
    count: usize,
    sum: f64,
    squares: f64,
}

impl Score {
    fn perplexity(&self) -> f64 {
        (self.sum / self.count as f64).exp()
    }

    /// The standard error of the mean, carried through `exp`.
    fn error(&self) -> f64 {
        let mean = self.sum / self.count as f64;
        let variance = (self.squares / self.count as f64 - mean * mean).max(0.0);
        if self.count < 2 {
            0.0
        } else {
            (variance / (self.count - 1) as f64).sqrt() * self.perplexity()
        }
    }
}

/// The windows that are evaluated: `length` tokens every `step`, scored from window index `from`
/// on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    length: usize,
    step: usize,
    from: usize,
    count: usize,
}

impl Plan {
    /// The windows over `tokens` tokens; a window must fit whole.
    fn new(tokens: usize, length: usize, stride: Option<usize>, limit: Option<usize>) -> Plan {
        let step = stride.map_or(length, |stride| stride.min(length));
        let from = stride.map_or(length / 2, |stride| length.saturating_sub(stride + 1));
        let count = if tokens < length { 0 } else { (tokens - length) / step + 1 };
        Plan { length, step, from, count: limit.map_or(count, |limit| count.min(limit)) }
    }
}

pub(crate) fn run(args: &Perplexity) -> Outcome {
    let file = needed(&args.file, "perplexity", "a text file")?;
    load::never_full(&args.load, "perplexity")?;
    let text = prompt::read(file)?;
    let context = args.load.ctx.map_or(CONTEXT, |n| n as usize);
    if context < 4 {
        return Err(Error::new("--ctx", "at least 4 tokens", context).into());
    }
    let (engine, _) =
        load::engine_with(&args.load, Some(context), None, load::Embeds::Never, false)?;
    let tokenizer = load::need_tokenizer(&engine)?;
    let tokens = tokenizer.encode(&text, Special { add: true, parse: false })?;
    let bos = if tokenizer.adds_bos() { tokenizer.bos() } else { None };
    let plan = Plan::new(
        tokens.len(),
        context,
        args.stride.map(|n| n as usize),
        args.chunks.map(|n| n as usize),
    );
    if plan.count == 0 {
        let found = format!("{} tokens", tokens.len());
        return Err(Error::new(file.display(), format!("at least {context} tokens"), found)
            .hint("take a longer text or a smaller --ctx")
            .into());
    }
    let head = json!({
        "model": engine.info().name,
        "file": file.display().to_string(),
        "tokens": tokens.len(),
        "ctx": context,
        "stride": args.stride,
    });
    let report = Report { head, json: args.json };
    let found = SoFar::<(usize, Score)>::default();
    let words = {
        let (report, found) = (report.clone(), found.clone());
        LastWords::prepare(move || report.print(found.get(), true))
    };
    let mut session = load::session(&engine)?;
    let mut score = Score::default();
    for chunk in 0..plan.count {
        let mut window = tokens[chunk * plan.step..][..plan.length].to_vec();
        if let Some(bos) = bos {
            window[0] = bos;
        }
        evaluate(&mut session, &window, plan.from, &mut score)?;
        found.update(|found| *found = (chunk + 1, score));
        if stderr_is_terminal() {
            aside(format_args!("chunk {}/{}: {:.4}", chunk + 1, plan.count, score.perplexity()));
        }
    }
    drop(words);
    report.print(found.get(), false)
}

/// How the result is told, whole or as far as it got.
#[derive(Debug, Clone)]
struct Report {
    head: Value,
    json: bool,
}

impl Report {
    fn print(mut self, (chunks, score): (usize, Score), interrupted: bool) -> Outcome {
        let (perplexity, error) = (score.perplexity(), score.error());
        if !self.json {
            if interrupted && score.count == 0 {
                return Ok(());
            }
            let mark = if interrupted { ", then interrupted" } else { "" };
            return print(&format!(
                "perplexity {perplexity:.4} +/- {error:.4} ({} tokens scored in {chunks} chunks{mark})\n",
                score.count
            ));
        }
        self.head["chunks"] = chunks.into();
        self.head["scored"] = score.count.into();
        self.head["nll"] = (score.sum / score.count as f64).into();
        self.head["perplexity"] = perplexity.into();
        self.head["error"] = error.into();
        if interrupted {
            self.head["interrupted"] = true.into();
        }
        print_json(&self.head)
    }
}

/// Adds the likelihoods of `window[from + 1..]`, each given what precedes it in the window.
fn evaluate(session: &mut Session, window: &[u32], from: usize, score: &mut Score) -> Outcome {
    session.clear();
    // The last token has no successor to be scored by.
    let inputs = &window[..window.len() - 1];
    let mut found = Ok(());
    session.evaluate(inputs, from, &mut |row, logits| {
        if found.is_ok() {
            found = check_logits(logits, row);
        }
        let nll = negative_log_likelihood(logits, window[row + 1]);
        score.count += 1;
        score.sum += nll;
        score.squares += nll * nll;
    })?;
    found?;
    if score.sum.is_finite() {
        return Ok(());
    }
    let error =
        Error::new("perplexity", "tokens that the model holds possible", "one that it rules out");
    Err(error.into())
}

/// `ln(sum(exp(logits))) - logits[token]`.
fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    log_sum_exp(logits)
        - logits.get(token as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_what_they_should() {
        // llama.cpp: chunks of 512, rows 256..511 scored, that is 255 of each.
        assert_eq!(
            Plan::new(1500, 512, None, None),
            Plan { length: 512, step: 512, from: 256, count: 2 }
        );
        // Windows overlap so that every token after the first window's head is scored once.
        assert_eq!(
            Plan::new(512 + 3 * 128, 512, Some(128), None),
            Plan { length: 512, step: 128, from: 383, count: 4 }
        );
        assert_eq!(Plan::new(511, 512, None, None).count, 0);
        assert_eq!(Plan::new(9000, 512, None, Some(3)).count, 3);
    }

    #[test]
    fn likelihoods_are_those_of_the_softmax() {
        let uniform = negative_log_likelihood(&[5.0; 8], 3);
        assert!((uniform - 8f64.ln()).abs() < 1e-12);
        let logits = [1000.0, 0.0, -1000.0];
        assert!(negative_log_likelihood(&logits, 0).abs() < 1e-12);
        assert!((negative_log_likelihood(&logits, 2) - 2000.0).abs() < 1e-9);
        let score = Score { count: 4, sum: 8.0, squares: 16.0 };
        assert_eq!((score.perplexity(), score.error()), (2f64.exp(), 0.0));
    }
}
