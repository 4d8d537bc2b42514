//! `delft bench --load`: requests that arrive at random, as at a server, computed together as they
//! come.
//!
//! Arrivals are a Poisson process: the gaps between them are `-ln(u) / rate`, `u` uniform in (0,
//! 1].

use std::sync::mpsc;
use std::time::{Duration, Instant};

use delft::hub::LocalModel;
use delft::{Engine, Error, GenerateOptions, Generating, Request, SamplingOptions};
use serde_json::{Value, json};

use super::bench::{Random, random_tokens};
use super::head;
use crate::args::Bench;
use crate::interrupt::{LastWords, SoFar};
use crate::load;
use crate::terminal::{Outcome, aside, print, print_json, stderr_is_terminal, table};

/// Requests that are computed at the same time unless said otherwise.
const AT_A_TIME: u64 = 16;

/// How one request fared, in seconds.
#[derive(Debug, Clone)]
struct Answered {
    /// From its arrival to its first token.
    first: f64,
    /// Between each two tokens.
    gaps: Vec<f64>,
    /// From the first arrival to its last token.
    end: f64,
    tokens: usize,
    reused: usize,
}

pub(crate) fn run(args: &Bench, rate: f64) -> Outcome {
    let [prompt, generate, shared] =
        [args.prompt, args.generate, args.shared.unwrap_or(0)].map(|n| n as usize);
    if prompt == 0 || generate == 0 || shared > prompt {
        let found = format!("-p {prompt}, -n {generate}, --shared {shared}");
        let expected = "a prompt and an answer, and no more shared than the prompt has";
        return Err(Error::new("bench --load", expected, found).into());
    }
    let at_a_time = args.batch.iter().copied().max().unwrap_or(AT_A_TIME) as usize;
    let context = args.load.ctx.map_or(prompt + generate, |n| n as usize);
    if context < prompt + generate {
        let expected = format!("at least {} for these requests", prompt + generate);
        return Err(Error::new("--ctx", expected, context).into());
    }
    let (engine, model) =
        load::engine_with(&args.load, Some(context), Some(at_a_time), load::Embeds::Never, false)?;
    if context > engine.info().trained_context {
        load::beyond(&engine, "speed is all that this measures");
    }
    let answered = SoFar::<Vec<Answered>>::default();
    let report = Report { args: args.clone(), rate, at_a_time, engine: engine.clone(), model };
    let words = {
        let (report, answered) = (report.clone(), answered.clone());
        LastWords::prepare(move || report.print(&answered.get(), true))
    };
    // The first request of a class of steps has it compiled.
    let warm = requests(&engine, args, 2, u64::MAX);
    let warm: Vec<Generating> =
        warm.map(|request| engine.submit(request)).collect::<Result<_, _>>()?;
    for generating in warm {
        generating.collect::<Result<Vec<_>, _>>()?;
    }
    let count = args.requests.unwrap_or(64) as usize;
    arrive(&engine, requests(&engine, args, count, 1), rate, &answered)?;
    let all = answered.get();
    drop(words);
    report.print(&all, false)
}

/// The requests: all begin with the same tokens, and go on with their own.
fn requests(
    engine: &Engine,
    args: &Bench,
    count: usize,
    caller: u64,
) -> impl Iterator<Item = Request> {
    let [prompt, generate, shared] =
        [args.prompt, args.generate, args.shared.unwrap_or(0)].map(|n| n as usize);
    let own = prompt - shared;
    // Requests that warm up share no prefix with those that count.
    let skipped = if caller == u64::MAX { count * prompt } else { 0 };
    let tokens = random_tokens(skipped + shared + count * own, engine.info().vocab);
    let options = GenerateOptions {
        sampling: SamplingOptions::greedy(),
        max_tokens: Some(generate),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    (0..count).map(move |i| {
        let beginning = &tokens[skipped..skipped + shared];
        let rest = &tokens[skipped + shared + i * own..][..own];
        Request { caller, ..Request::new([beginning, rest].concat(), options.clone()) }
    })
}

/// Submits each request at its time, and waits for all answers.
fn arrive(
    engine: &Engine,
    requests: impl Iterator<Item = Request>,
    rate: f64,
    answered: &SoFar<Vec<Answered>>,
) -> Outcome {
    let mut random = Random::new();
    let (report, reported) = mpsc::channel();
    let start = Instant::now();
    let mut due = Duration::ZERO;
    std::thread::scope(|scope| -> Outcome {
        let mut asked = 0;
        for request in requests {
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            let generating = engine.submit(request)?;
            let (arrived, report) = (start + due, report.clone());
            scope.spawn(move || report.send(follow(generating, arrived, start)));
            asked += 1;
            due += Duration::from_secs_f64(gap(&mut random, rate));
        }
        for done in 1..=asked {
            let Ok(one) = reported.recv() else { break };
            let one = one?;
            answered.update(|all| all.push(one));
            if stderr_is_terminal() {
                aside(format_args!("{done} of {asked} answered"));
            }
        }
        Ok(())
    })
}

/// Takes an answer's tokens as they come.
fn follow(mut generating: Generating, arrived: Instant, start: Instant) -> Result<Answered, Error> {
    let (mut last, mut first, mut gaps) = (arrived, None, Vec::new());
    for token in generating.by_ref() {
        token?;
        let now = Instant::now();
        let gap = (now - last).as_secs_f64();
        match first {
            None => first = Some(gap),
            Some(_) => gaps.push(gap),
        }
        last = now;
    }
    let metrics = generating.metrics();
    Ok(Answered {
        first: first.unwrap_or(0.0),
        gaps,
        end: (last - start).as_secs_f64(),
        tokens: metrics.generated_tokens,
        reused: metrics.reused_tokens,
    })
}

/// Seconds from one arrival to the next, `rate` of them a second on average.
fn gap(random: &mut Random, rate: f64) -> f64 {
    let uniform = (random.next() + 1) as f64 / (1u64 << Random::BITS) as f64;
    -uniform.ln() / rate
}

/// The report of a load.
#[derive(Clone)]
struct Report {
    args: Bench,
    rate: f64,
    at_a_time: usize,
    engine: Engine,
    model: LocalModel,
}

/// The median, the parts of ten and of a hundred that are above, and the greatest.
fn spread(mut seconds: Vec<f64>) -> [f64; 4] {
    seconds.sort_by(f64::total_cmp);
    [0.5, 0.9, 0.99, 1.0].map(|part| {
        let at = (part * seconds.len() as f64).ceil() as usize;
        seconds.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
    })
}

impl Report {
    fn print(&self, all: &[Answered], interrupted: bool) -> Outcome {
        let firsts = spread(all.iter().map(|one| one.first).collect());
        let gaps = spread(all.iter().flat_map(|one| one.gaps.iter().copied()).collect());
        let seconds = all.iter().fold(0.0, |end: f64, one| end.max(one.end));
        let tokens: usize = all.iter().map(|one| one.tokens).sum();
        let reused: usize = all.iter().map(|one| one.reused).sum();
        let per_second = |n: usize| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
        let prompts = all.len() * self.args.prompt as usize;
        if self.args.json {
            let named = |[median, p90, p99, max]: [f64; 4]| json!({ "median": median, "p90": p90, "p99": p99, "max": max });
            let mut figures = json!({
                "load": self.rate,
                "at_a_time": self.at_a_time,
                "p": self.args.prompt,
                "n": self.args.generate,
                "shared": self.args.shared.unwrap_or(0),
                "requests": all.len(),
                "seconds": seconds,
                "first_token_s": named(firsts),
                "gap_s": named(gaps),
                "tok_s": per_second(tokens),
                "requests_s": per_second(all.len()),
                "reused_tokens": reused,
                "prompt_tokens": prompts,
            });
            if interrupted {
                figures["interrupted"] = Value::Bool(true);
            }
            return print_json(&head::object(&self.engine, &self.model, figures));
        }
        let row = |name: &str, spread: [f64; 4]| {
            let ms = spread.iter().map(|seconds| format!("{:.1}", 1e3 * seconds));
            std::iter::once(name.to_owned()).chain(ms).collect::<Vec<String>>()
        };
        let rows = [row("first token", firsts), row("between tokens", gaps)];
        let body = table(
            &["MILLISECONDS", "MEDIAN", "90%", "99%", "MOST"],
            &[false, true, true, true, true],
            &rows,
        );
        let mark = if interrupted { "; interrupted" } else { "" };
        print(&format!(
            "{}\n{body}{} requests in {seconds:.1} s ({:.2}/s asked, {} at a time): {:.2} tok/s; {reused} of {prompts} prompt tokens found in the cache{mark}\n",
            head::title(&self.engine),
            all.len(),
            self.rate,
            self.at_a_time,
            per_second(tokens),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_order_statistics() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(spread(hundred), [50.0, 90.0, 99.0, 100.0]);
        assert_eq!(spread(vec![3.0]), [3.0; 4]);
        assert_eq!(spread(vec![]), [0.0; 4]);
    }

    #[test]
    fn gaps_have_the_mean_of_their_rate() {
        let mut random = Random::new();
        let gaps: Vec<f64> = (0..20_000).map(|_| gap(&mut random, 4.0)).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.25).abs() < 0.01 && gaps.iter().all(|gap| *gap >= 0.0), "{mean}");
    }
}
