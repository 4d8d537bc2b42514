//! `delft bench`: prompt processing (pp) and generation (tg) speed, in llama-bench's sense of both.

use std::time::Instant;

use delft::hub::LocalModel;
use delft::{Engine, Error, GenerateOptions, Memory, Plan, SamplingOptions, Session};
use serde_json::{Value, json};

use super::head;
use crate::args::Bench;
use crate::interrupt::{LastWords, SoFar};
use crate::load;
use crate::terminal::{Outcome, aside, bytes, print, print_json, stderr_is_terminal, table};

/// Tokens per second of each measured run.
#[derive(Debug, Default, Clone)]
struct Runs(Vec<f64>);

/// The measurements so far.
#[derive(Debug, Default, Clone)]
struct Measured {
    pp: Runs,
    tg: Runs,
    /// Runs of several sequences at a time, one for each number asked for, in that order.
    batches: Vec<Runs>,
}

impl Runs {
    fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => 0.0,
            n if n % 2 == 1 => sorted[middle],
            _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
        }
    }

    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }

    /// The sample's standard deviation.
    fn deviation(&self) -> f64 {
        let mean = self.mean();
        let squares: f64 = self.0.iter().map(|rate| (rate - mean).powi(2)).sum();
        if self.0.len() < 2 { 0.0 } else { (squares / (self.0.len() - 1) as f64).sqrt() }
    }
}

pub(crate) fn run(args: &Bench) -> Outcome {
    load::never_full(&args.load, "bench")?;
    if let Some(rate) = args.arrivals {
        return super::bench_load::run(args, rate);
    }
    let given = [("--requests", args.requests), ("--shared", args.shared)];
    if let Some((flag, _)) = given.iter().find(|(_, given)| given.is_some()) {
        return Err(Error::new(*flag, "requests that arrive: --load R", "none").into());
    }
    let [prompt, generate, depth] = [args.prompt, args.generate, args.depth].map(|n| n as usize);
    if prompt == 0 && generate == 0 {
        return Err(Error::new("-p and -n", "at least one of them above 0", "0 and 0").into());
    }
    if args.sampled && generate == 0 {
        return Err(Error::new("--sampled", "tokens to generate", "-n 0").into());
    }
    // The cache is sized for the measurement, which may go beyond what the model was trained for.
    let needed = depth + prompt.max(generate + 2);
    let context = args.load.ctx.map_or(needed, |n| n as usize);
    if context < needed {
        return Err(Error::new(
            "--ctx",
            format!("at least {needed} for this measurement"),
            context,
        )
        .into());
    }
    let sessions = args.batch.iter().max().map(|most| 1 + *most as usize);
    let (engine, model) =
        load::engine_with(&args.load, Some(context), sessions, load::Embeds::Never, false)?;
    if needed > engine.info().trained_context {
        load::beyond(&engine, "speed is all that this measures");
    }
    let measured = SoFar::<Measured>::default();
    let report = Report { args: args.clone(), engine: engine.clone(), model };
    let words = {
        let (report, measured) = (report.clone(), measured.clone());
        // The device computes on meanwhile, so that nothing can be asked of it.
        LastWords::prepare(move || report.print(&measured.get(), None))
    };
    let mut session = load::session(&engine)?;
    let tokens = random_tokens(needed, engine.info().vocab);
    // pp and tg take turns, so that a neighbour's load meets both; the first round only warms up.
    for round in 0..=args.repeat {
        if prompt > 0 {
            let seconds = process(&mut session, &tokens, depth, prompt)?;
            measured.update(|m| record(&mut m.pp, "pp", round, prompt, seconds));
        }
        for (i, sequences) in args.batch.iter().map(|n| *n as usize).enumerate() {
            let seconds = together(&engine, &tokens, sequences, depth, generate)?;
            measured.update(|m| {
                m.batches.resize(args.batch.len(), Runs::default());
                let name = format!("tg of {sequences}");
                record(&mut m.batches[i], &name, round, sequences * generate, seconds);
            });
        }
        if generate > 0 && args.batch.is_empty() {
            let seconds = if args.sampled {
                choose(&mut session, &tokens, depth, generate)?
            } else {
                step(&mut session, &tokens, depth, generate)?
            };
            measured.update(|m| record(&mut m.tg, "tg", round, generate, seconds));
        }
    }
    let measured = measured.get();
    // Before the roof is measured, which takes memory of its own.
    let memory = engine.memory();
    let roof = share_of_roof(&engine, args, &measured.tg);
    drop(words);
    report.print(&measured, Some((memory, roof)))
}

/// The report of a measurement.
#[derive(Clone)]
struct Report {
    args: Bench,
    engine: Engine,
    model: LocalModel,
}

impl Report {
    /// With what the device holds and could do, unless Ctrl-C came before that was known.
    fn print(&self, measured: &Measured, end: Option<(Memory, Share)>) -> Outcome {
        if self.args.json {
            let figures = to_json(&self.args, &self.engine, measured, end);
            return print_json(&head::object(&self.engine, &self.model, figures));
        }
        print(&self.text(measured, end))
    }

    fn text(&self, measured: &Measured, end: Option<(Memory, Share)>) -> String {
        let (args, info) = (&self.args, self.engine.info());
        let at = if args.depth > 0 { format!(" @ d{}", args.depth) } else { String::new() };
        let row = |name: String, runs: &Runs, share: String| {
            vec![
                name,
                format!("{:.2}", runs.median()),
                format!("{:.2} +/- {:.2}", runs.mean(), runs.deviation()),
                share,
            ]
        };
        let share = end.map_or(String::new(), |(_, roof)| format!("{:.0}%", 100.0 * roof.share));
        let rows = [
            (args.prompt, format!("pp{}{at}", args.prompt), &measured.pp, String::new()),
            (args.generate, format!("tg{}{at}", args.generate), &measured.tg, share),
        ];
        let batches = args.batch.iter().zip(&measured.batches);
        let batches = batches.map(|(sequences, runs)| {
            let name = format!("tg{}{at} of {sequences}", args.generate);
            (args.generate, name, runs, String::new())
        });
        let rows: Vec<Vec<String>> = rows
            .into_iter()
            .chain(batches)
            .filter(|(tokens, _, runs, _)| *tokens > 0 && !runs.0.is_empty())
            .map(|(_, name, runs, share)| row(name, runs, share))
            .collect();
        let head = head::title(&self.engine) + "\n";
        let body = table(
            &["TEST", "TOK/S (MEDIAN)", "MEAN", "OF ROOF"],
            &[false, true, true, true],
            &rows,
        );
        let loaded = format!(
            "loaded in {:.2} s, peak memory {}",
            info.load_ms as f64 / 1000.0,
            bytes(delft::peak_rss_bytes()),
        );
        let tail = match end {
            None => {
                let all = [&measured.pp, &measured.tg].into_iter().chain(&measured.batches);
                let runs = all.map(|runs| runs.0.len()).max().unwrap_or(0);
                format!("{loaded}; interrupted after {runs} of {} runs", args.repeat)
            }
            Some((memory, roof)) => format!(
                "{loaded}{}; roof: {} per token at {:.1} GB/s read",
                memory.device.map_or(String::new(), |usage| format!(
                    " and {} of the device",
                    bytes(usage.peak as u64)
                )),
                bytes(roof.bytes as u64),
                roof.rate / 1e9
            ),
        };
        format!("{head}{body}{tail}\n")
    }
}

/// The roof that decoding is measured against: bytes per token over the rate at which this run read
/// them.
#[derive(Clone, Copy)]
struct Share {
    /// Weights, and the cached keys and values at the depth half-way through the measurement.
    bytes: f64,
    /// Bytes per second.
    rate: f64,
    /// The share of the roof that decoding reached.
    share: f64,
}

fn share_of_roof(engine: &Engine, args: &Bench, tg: &Runs) -> Share {
    let roof = engine.roof();
    let depth = args.depth as f64 + args.generate as f64 / 2.0;
    let bytes = roof.token_bytes as f64 + depth * roof.position_bytes as f64;
    let rate = roof.bytes_per_second;
    Share { bytes, rate, share: tg.median() * bytes / rate }
}

fn record(runs: &mut Runs, name: &str, round: u64, tokens: usize, seconds: f64) {
    let rate = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    if stderr_is_terminal() {
        let run = if round == 0 { "warm-up".to_string() } else { format!("run {round}") };
        aside(format_args!("{name} {run}: {rate:.2} tok/s"));
    }
    if round > 0 {
        runs.0.push(rate);
    }
}

/// Fills the cache with these tokens, and waits until it has them: a device may still be at work on
/// a step whose logits were not requested.
pub(super) fn fill(session: &mut Session, tokens: &[u32]) -> Outcome {
    session.clear();
    Ok(session.evaluate(tokens, tokens.len().saturating_sub(1), &mut |_, _| {})?)
}

/// Seconds to process a prompt behind `depth` cached tokens, with the logits of its last token.
fn process(session: &mut Session, tokens: &[u32], depth: usize, prompt: usize) -> Outcome<f64> {
    fill(session, &tokens[..depth])?;
    let start = Instant::now();
    session.evaluate(&tokens[depth..depth + prompt], prompt - 1, &mut |_, _| {})?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds for single-token steps behind `depth` cached tokens, each with its logits.
fn step(session: &mut Session, tokens: &[u32], depth: usize, generate: usize) -> Outcome<f64> {
    fill(session, &tokens[..depth])?;
    let start = Instant::now();
    for token in tokens[depth..depth + generate].chunks(1) {
        session.evaluate(token, 0, &mut |_, _| {})?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// New sessions, each with these tokens in its cache.
pub(super) fn filled(engine: &Engine, tokens: &[u32], sequences: usize) -> Outcome<Vec<Session>> {
    let sessions = (0..sequences).map(|_| load::session(engine));
    let mut sessions = sessions.collect::<Outcome<Vec<Session>>>()?;
    sessions.iter_mut().try_for_each(|session| fill(session, tokens))?;
    Ok(sessions)
}

/// Seconds for steps of one token of each of several sequences, behind `depth` cached ones each, in
/// which each chooses the next, greedily.
fn together(
    engine: &Engine,
    tokens: &[u32],
    sequences: usize,
    depth: usize,
    generate: usize,
) -> Outcome<f64> {
    let mut sessions = filled(engine, &tokens[..depth], sequences)?;
    let start = Instant::now();
    let each = vec![tokens[depth]; sequences];
    Session::generate_together(&mut sessions, &each, generate, &SamplingOptions::greedy())?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds to generate tokens behind `depth` cached ones, each chosen (greedily) from the logits of
/// the one before.
fn choose(session: &mut Session, tokens: &[u32], depth: usize, generate: usize) -> Outcome<f64> {
    session.clear();
    let options = GenerateOptions {
        sampling: SamplingOptions::greedy(),
        max_tokens: Some(generate + 1),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    let mut generation = session.generate(tokens[..=depth].to_vec(), &options)?;
    // The first comes with the prompt.
    generation.next().transpose()?;
    let start = Instant::now();
    for token in generation {
        token?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Numbers that are the same on every machine: a 64-bit linear congruential generator (Knuth's MMIX
/// constants), of whose states the upper 31 bits count.
pub(super) struct Random(u64);

impl Random {
    /// Bits of a number.
    pub(super) const BITS: u32 = 31;

    pub(super) fn new() -> Random {
        Random(1)
    }

    pub(super) fn next(&mut self) -> u64 {
        let next = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = next.wrapping_add(1_442_695_040_888_963_407);
        self.0 >> (u64::BITS - Random::BITS)
    }
}

/// The same tokens on every machine.
pub(super) fn random_tokens(length: usize, vocab: usize) -> Vec<u32> {
    let mut random = Random::new();
    (0..length).map(|_| (random.next() % vocab.max(1) as u64) as u32).collect()
}

fn to_json(
    args: &Bench,
    engine: &Engine,
    Measured { pp, tg, batches }: &Measured,
    end: Option<(Memory, Share)>,
) -> Value {
    let rate = |runs: &Runs| if runs.0.is_empty() { Value::Null } else { runs.median().into() };
    let batch = |(sequences, runs): (&u64, &Runs)| json!({ "sequences": sequences, "tg_tok_s": rate(runs), "tg_runs_tok_s": runs.0 });
    let mut figures = json!({
        "isa": engine.info().device.isa,
        "p": args.prompt,
        "n": args.generate,
        "depth": args.depth,
        "sampled": args.sampled,
        "repeat": args.repeat,
        "pp_tok_s": rate(pp),
        "tg_tok_s": rate(tg),
        "pp_runs_tok_s": pp.0,
        "tg_runs_tok_s": tg.0,
        "batches": args.batch.iter().zip(batches).map(batch).collect::<Vec<_>>(),
        "device_planned_bytes": peak(engine.plan()),
    });
    let Some((memory, roof)) = end else {
        figures["interrupted"] = true.into();
        return figures;
    };
    let more = json!({
        "read_bytes_per_s": roof.rate,
        "token_bytes": roof.bytes,
        "tg_of_roof": if tg.0.is_empty() { Value::Null } else { roof.share.into() },
        "weights_bytes": memory.weights,
        "cache_bytes": memory.cache,
        "activation_bytes": memory.arena,
        "device_peak_bytes": memory.device.map(|usage| usage.peak),
        "device_limit_bytes": memory.device.map(|usage| usage.limit),
    });
    head::joined(figures, more)
}

/// The planned memory of all devices with memory of their own together.
fn peak(plans: &[Plan]) -> Option<usize> {
    let own = || plans.iter().filter(|plan| !plan.host);
    own().next().is_some().then(|| own().map(Plan::peak).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_deviations() {
        let runs = Runs(vec![1.0, 9.0, 2.0]);
        assert_eq!((runs.median(), runs.mean()), (2.0, 4.0));
        assert_eq!(Runs(vec![1.0, 3.0]).median(), 2.0);
        assert!((Runs(vec![2.0, 4.0]).deviation() - 2f64.sqrt()).abs() < 1e-12);
        assert_eq!(Runs(vec![]).median(), 0.0);
    }

    #[test]
    fn tokens_stay_inside_the_vocabulary() {
        let tokens = random_tokens(1000, 7);
        assert!(tokens.iter().all(|t| *t < 7) && (0..7).all(|id| tokens.contains(&id)));
    }
}
