//! `delft compare`: how far a model's predictions are from a reference's over a text, token by
//! token.
//!
//! ```text
//! KL(p || q) = sum over the vocabulary of p (ln p - ln q)     p: the reference's probabilities, q: the model's
//! ```

mod figure;

use std::path::PathBuf;

use delft::formats::Aside;
use delft::tokens::Special;
use delft::{Engine, Error, Session, check_logits, log_sum_exp};
use serde_json::{Value, json};

use crate::args::Compare;
use crate::interrupt::{LastWords, SoFar};
use crate::terminal::{
    Outcome, Stop, aside, harmless, line, print, print_json, stderr_is_terminal, table,
};
use crate::{load, prompt};

/// Tokens of a window unless said otherwise, of which the second half is scored, as by `delft
/// perplexity`.
const CONTEXT: usize = 512;
/// Tokens whose logits of both models are held at a time.
const PIECE: usize = 32;
/// Tokens before a bad one that are shown.
const SHOWN: usize = 12;

/// One token of the text as both models foresee it.
#[derive(Debug, Clone)]
struct Scored {
    /// Where it is in the text, in tokens.
    at: usize,
    divergence: f64,
    /// Negative log-likelihood of the text's token: the reference's, the model's.
    nll: [f64; 2],
    /// The likeliest token: the reference's, the model's.
    first: [u32; 2],
}

pub(crate) fn run(args: &Compare) -> Outcome {
    let (Some(named), Some(file)) = (&args.reference, &args.file) else {
        let missing = if args.reference.is_none() { "REFERENCE" } else { "FILE" };
        let hint = "delft compare MODEL REFERENCE FILE";
        let error = Error::new(missing, "two models and a text", "fewer words").hint(hint);
        return Err(Stop::Usage(line(&error)));
    };
    load::never_full(&args.load, "compare")?;
    let text = prompt::read(file)?;
    let context = args.load.ctx.map_or(CONTEXT, |n| n as usize);
    if context < 4 {
        return Err(Error::new("--ctx", "at least 4 tokens", context).into());
    }
    let (model, _) =
        load::engine_with(&args.load, Some(context), None, load::Embeds::Never, false)?;
    let mut other = args.load.clone();
    other.model.model = Some(named.clone());
    other.adapter.clear();
    let (reference, _) =
        load::engine_with(&other, Some(context), None, load::Embeds::Never, false)?;
    let tokens = tokens(&text, &model, &reference)?;
    let count = tokens.len() / context;
    let count = args.chunks.map_or(count, |most| count.min(most as usize));
    if count == 0 {
        let found = format!("{} tokens", tokens.len());
        return Err(Error::new(file.display(), format!("at least {context} tokens"), found)
            .hint("take a longer text or a smaller --ctx")
            .into());
    }
    let head = json!({
        "model": model.info().name,
        "reference": reference.info().name,
        "file": file.display().to_string(),
        "ctx": context,
    });
    let shown = Shown { tokens: tokens.clone(), engine: model.clone() };
    let (svg, worst) = (args.svg.clone(), args.worst as usize);
    let report = Report { head, json: args.json, svg, worst, shown };
    let found = SoFar::<Vec<Scored>>::default();
    let words = {
        let (report, found) = (report.clone(), found.clone());
        LastWords::prepare(move || report.print(&found.get(), true))
    };
    let tokenizer = load::need_tokenizer(&model)?;
    let bos = if tokenizer.adds_bos() { tokenizer.bos() } else { None };
    let mut sessions = [load::session(&reference)?, load::session(&model)?];
    for chunk in 0..count {
        let start = chunk * context;
        let mut window = tokens[start..start + context].to_vec();
        if let Some(bos) = bos {
            window[0] = bos;
        }
        window_of(&mut sessions, &window, start, &found)?;
        if stderr_is_terminal() {
            let mean = mean(found.get().iter().map(|scored| scored.divergence));
            aside(format_args!("chunk {}/{count}: {mean:.6}", chunk + 1));
        }
    }
    drop(words);
    report.print(&found.get(), false)
}

/// The text's tokens, which must be the same for both.
fn tokens(text: &str, model: &Engine, reference: &Engine) -> Outcome<Vec<u32>> {
    let encode = |engine: &Engine| -> Outcome<Vec<u32>> {
        let special = Special { add: true, parse: false };
        Ok(load::need_tokenizer(engine)?.encode(text, special)?)
    };
    let (ours, theirs) = (encode(model)?, encode(reference)?);
    let sizes = [model.info().vocab, reference.info().vocab];
    if ours != theirs || sizes[0] != sizes[1] {
        let found = format!("{} of {} and {} of {}", ours.len(), sizes[0], theirs.len(), sizes[1]);
        return Err(Error::new("compare", "two models with the same tokens", found).into());
    }
    Ok(ours)
}

/// Scores the second half of a window that begins at token `start` of the text.
fn window_of(
    sessions: &mut [Session; 2],
    window: &[u32],
    start: usize,
    found: &SoFar<Vec<Scored>>,
) -> Outcome {
    sessions.iter_mut().for_each(Session::clear);
    let (inputs, from) = (&window[..window.len() - 1], window.len() / 2);
    for session in sessions.iter_mut() {
        session.evaluate(&inputs[..from], from, &mut |_, _| {})?;
    }
    for (i, piece) in inputs[from..].chunks(PIECE).enumerate() {
        let first = from + i * PIECE;
        let mut rows: [Vec<Vec<f32>>; 2] = [Vec::new(), Vec::new()];
        for (session, rows) in sessions.iter_mut().zip(&mut rows) {
            session.evaluate(piece, 0, &mut |_, logits| rows.push(logits.to_vec()))?;
        }
        let [reference, model] = &rows;
        for (k, (p, q)) in reference.iter().zip(model).enumerate() {
            check_logits(p, first + k)?;
            check_logits(q, first + k)?;
            let next = window[first + k + 1];
            let scored = scored(p, q, next, start + first + k + 1);
            found.update(|found| found.push(scored));
        }
    }
    Ok(())
}

/// Scores a token by both models' logits in front of it.
fn scored(p: &[f32], q: &[f32], token: u32, at: usize) -> Scored {
    let likeliest = |logits: &[f32]| {
        let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
        (0..logits.len()).fold(0, better) as u32
    };
    let (p_norm, q_norm) = (log_sum_exp(p), log_sum_exp(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let (p, q) = (f64::from(p) - p_norm, f64::from(q) - q_norm);
        // A token that the reference rules out counts for nothing.
        if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }
    };
    let divergence: f64 = p.iter().zip(q).map(term).sum();
    let of = |logits: &[f32], norm: f64| norm - f64::from(logits[token as usize]);
    Scored {
        at,
        // Rounding alone takes it below zero.
        divergence: divergence.max(0.0),
        nll: [of(p, p_norm), of(q, q_norm)],
        first: [likeliest(p), likeliest(q)],
    }
}

fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = numbers.fold((0, 0.0), |(count, sum), x| (count + 1, sum + x));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

/// The text, for showing tokens in it.
#[derive(Clone)]
struct Shown {
    tokens: Vec<u32>,
    engine: Engine,
}

impl Shown {
    fn text(&self, ids: &[u32]) -> String {
        self.engine.tokenizer().map_or(String::new(), |t| harmless(&t.decode(ids, false)))
    }
}

/// How the result is told, whole or as far as it got.
#[derive(Clone)]
struct Report {
    head: Value,
    json: bool,
    /// Where the divergences are drawn.
    svg: Option<PathBuf>,
    worst: usize,
    shown: Shown,
}

impl Report {
    fn print(mut self, all: &[Scored], interrupted: bool) -> Outcome {
        if all.is_empty() && !self.json {
            return Ok(());
        }
        let mut sorted: Vec<&Scored> = all.iter().collect();
        sorted.sort_by(|a, b| b.divergence.total_cmp(&a.divergence));
        let quantile = |part: f64| {
            let at = ((1.0 - part) * sorted.len() as f64) as usize;
            sorted.get(at.min(sorted.len().saturating_sub(1))).map_or(0.0, |s| s.divergence)
        };
        let average = mean(all.iter().map(|s| s.divergence));
        let squares = mean(all.iter().map(|s| (s.divergence - average).powi(2)));
        let error = (squares / (all.len().max(2) - 1) as f64).sqrt();
        let agree = mean(all.iter().map(|s| f64::from(u8::from(s.first[0] == s.first[1]))));
        let perplexity = |i: usize| mean(all.iter().map(|s| s.nll[i])).exp();
        let worst = &sorted[..self.worst.min(sorted.len())];
        if let Some(path) = &self.svg {
            let named = |key: &str| self.head[key].as_str().unwrap_or_default().to_owned();
            let title = format!("{} beside {}", named("model"), named("reference"));
            let marks = [("mean", average), ("median", quantile(0.5)), ("99%", quantile(0.99))];
            Aside::whole(path, figure::svg(all, &title, &marks).as_bytes())?;
        }
        if self.json {
            let one = |s: &&Scored| {
                json!({ "token": s.at, "kl": s.divergence, "context": self.before(s.at),
                    "next": self.shown.text(&self.shown.tokens[s.at..][..1]),
                    "reference": { "nll": s.nll[0], "likeliest": self.shown.text(&[s.first[0]]) },
                    "model": { "nll": s.nll[1], "likeliest": self.shown.text(&[s.first[1]]) } })
            };
            let worst: Vec<Value> = worst.iter().map(one).collect();
            self.head["scored"] = all.len().into();
            self.head["kl"] = json!({ "mean": average, "error": error, "median": quantile(0.5),
                "p90": quantile(0.9), "p99": quantile(0.99), "max": quantile(1.0) });
            self.head["top1_agreement"] = agree.into();
            self.head["perplexity"] = json!({ "reference": perplexity(0), "model": perplexity(1) });
            self.head["worst"] = worst.into();
            if interrupted {
                self.head["interrupted"] = true.into();
            }
            return print_json(&self.head);
        }
        let mark = if interrupted { ", then interrupted" } else { "" };
        let mut page = format!(
            "KL divergence {average:.6} +/- {error:.6}, median {:.6}, 99% {:.6}, largest {:.6}\n\
             same likeliest token {:.2}%\n\
             perplexity {:.4}, reference {:.4}\n\
             {} tokens scored{mark}\n",
            quantile(0.5),
            quantile(0.99),
            quantile(1.0),
            100.0 * agree,
            perplexity(1),
            perplexity(0),
            all.len(),
        );
        if !worst.is_empty() {
            let row = |s: &&Scored| {
                let next = self.shown.text(&self.shown.tokens[s.at..][..1]);
                let [theirs, ours] = s.first.map(|id| self.shown.text(&[id]));
                let probability = |i: usize| format!("{:.4}", (-s.nll[i]).exp());
                let kl = format!("{:.4}", s.divergence);
                vec![kl, self.before(s.at), next, probability(0), probability(1), theirs, ours]
            };
            let rows: Vec<Vec<String>> = worst.iter().map(row).collect();
            let head = ["KL", "AFTER", "TOKEN", "P REF", "P", "LIKELIEST REF", "LIKELIEST"];
            page += &table(&head, &[true, false, false, true, true, false, false], &rows);
        }
        print(&page)
    }

    /// The text in front of a token.
    fn before(&self, at: usize) -> String {
        self.shown.text(&self.shown.tokens[at.saturating_sub(SHOWN)..at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_zero_of_itself_and_as_its_definition_says() {
        let p = [1.0f32, 2.0, 0.5];
        let shifted = p.map(|x| x + 3.0);
        assert!(scored(&p, &shifted, 0, 0).divergence < 1e-12);
        // p = (1/2, 1/2), q = (3/4, 1/4)
        let found = scored(&[0.0, 0.0], &[3f32.ln(), 0.0], 1, 7);
        let expected = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        assert!((found.divergence - expected).abs() < 1e-6, "{found:?}");
        assert!((found.nll[0] - 2f64.ln()).abs() < 1e-6 && (found.nll[1] - 4f64.ln()).abs() < 1e-6);
        assert_eq!((found.first, found.at), ([0, 0], 7));
    }
}
