//! `delft why-slow`: where a prefill's and a decode's time goes, of one sequence or of many together,
//! beside what the machine could do, and what holds it back.
//!
//! An operation's roof is the longer of two times: its bytes at the rate at which this run read the
//! weights, and its operations at the peaks that this run measured. What is concluded from the
//! figures: `verdict`.

mod verdict;

use std::time::Instant;

use delft::{ComputePeaks, Engine, Error, SamplingOptions, Session, TimedStep, Work};
use serde_json::{Value, json};

use super::{bench, head};
use crate::args::{CacheArg, WhySlow};
use crate::interrupt::LastWords;
use crate::load;
use crate::machine::{Counters, cache_bytes, load_average};
use crate::terminal::{BOLD, Outcome, bytes, count, print, print_json, table};
use verdict::Evidence;

/// Prefills measured; the one in the middle is shown.
const PREFILLS: usize = 3;

/// The time of one kind of operation, on average over the steps of a phase.
#[derive(Debug, Clone, Default, PartialEq)]
struct Row {
    name: String,
    /// Operations per step.
    count: f64,
    /// Their work in all steps together.
    work: Work,
    /// Seconds per step.
    seconds: f64,
    /// Seconds per step that a thread computed, on average.
    busy: f64,
}

/// A phase: a whole prefill, or the average step of a decode.
#[derive(Debug, Clone, Default, PartialEq)]
struct Phase {
    steps: usize,
    /// Tokens per step.
    tokens: usize,
    /// By kind of operation, in order.
    kinds: Vec<Row>,
    /// The same by type of the weights; operations without weights are left out.
    formats: Vec<Row>,
    /// Seconds per step: choosing a token, between operations, everything else, and all of it.
    sampling: f64,
    barriers: f64,
    rest: f64,
    seconds: f64,
}

impl Phase {
    /// The phase of steps of `tokens` tokens each. A GPU's take its own clock's time: what the host
    /// does beside them is to place the clocks.
    fn new(tokens: usize, steps: &[TimedStep], gpu: bool) -> Phase {
        let n = steps.len().max(1) as f64;
        let mut phase = Phase { steps: steps.len(), tokens, ..Phase::default() };
        for step in steps {
            if gpu {
                phase.seconds += step.replays.iter().map(|replay| replay.seconds / n).sum::<f64>();
            } else {
                phase.sampling += step.sampling / n;
                phase.seconds += step.seconds / n;
            }
            for replay in &step.replays {
                phase.barriers += replay.barriers / n;
                for timing in &replay.operations {
                    let add = |rows: &mut Vec<Row>, name: &str| {
                        let found = rows.iter().position(|row| row.name == name);
                        let at = found.unwrap_or_else(|| {
                            rows.push(Row { name: name.to_string(), ..Row::default() });
                            rows.len() - 1
                        });
                        let row = &mut rows[at];
                        row.count += 1.0 / n;
                        row.work += timing.work;
                        row.seconds += timing.seconds / n;
                        row.busy += timing.busy / n;
                    };
                    add(&mut phase.kinds, timing.name);
                    if let Some(format) = timing.format {
                        add(&mut phase.formats, &format.to_string());
                    }
                }
            }
        }
        let operations: f64 = phase.kinds.iter().map(|row| row.seconds).sum();
        phase.rest = phase.seconds - operations - phase.barriers - phase.sampling;
        phase
    }

    /// Tokens per second.
    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-12)
    }

    /// A kind of operation, if the model has it.
    fn kind(&self, name: &str) -> Option<&Row> {
        self.kinds.iter().find(|row| row.name == name)
    }
}

/// The machine's rates when it does one thing alone.
#[derive(Debug, Clone, PartialEq)]
struct Ceilings {
    /// Bytes per second.
    reads: f64,
    limits: ComputePeaks,
}

/// The limit that bounds an operation, and the seconds it would take there.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    Memory(f64),
    Arithmetic(f64),
}

impl Bound {
    fn seconds(self) -> f64 {
        let (Bound::Memory(seconds) | Bound::Arithmetic(seconds)) = self;
        seconds
    }

    /// Its name where a token's reads come from the caches, or do not.
    fn name(self, cached: bool) -> &'static str {
        match self {
            Bound::Memory(_) if cached => "cache",
            Bound::Memory(_) => "memory",
            Bound::Arithmetic(_) => "arithmetic",
        }
    }
}

impl Ceilings {
    /// The longer of the times that work would take at the read rate and at the peaks.
    fn bound(&self, work: &Work, steps: usize) -> Bound {
        let peaks = &self.limits.used;
        let units = [
            (work.bytes_dot, peaks.bytes_dot),
            (work.narrow_dot, peaks.narrow_dot),
            (work.tiles, peaks.tiles),
            (work.floats, peaks.floats),
        ];
        let steps = steps.max(1) as f64;
        let arithmetic: f64 = units
            .iter()
            .filter(|(operations, _)| *operations > 0)
            .map(|(operations, peak)| *operations as f64 / peak.max(1.0) / steps)
            .sum();
        let memory = work.bytes as f64 / self.reads.max(1.0) / steps;
        if arithmetic > memory { Bound::Arithmetic(arithmetic) } else { Bound::Memory(memory) }
    }
}

pub(crate) fn run(args: &WhySlow) -> Outcome {
    load::never_full(&args.load, "why-slow")?;
    let [prompt, generate] = [args.prompt, args.generate].map(|n| n as usize);
    let needed = prompt + 2 * generate + 1;
    let context = args.load.ctx.map_or(needed, |n| n as usize);
    if context < needed {
        let expected = format!("at least {needed} for this measurement");
        return Err(Error::new("--ctx", expected, context).into());
    }
    let (load_average, before) = (load_average(), Counters::now());
    let together = args.batch.map(|n| n as usize);
    let (engine, model) = load::engine_with(
        &args.load,
        Some(context),
        together.map(|n| n + 1),
        load::Embeds::Never,
        false,
    )?;
    let loaded = Counters::now();
    if needed > engine.info().trained_context {
        load::beyond(&engine, "speed is all that this measures");
    }
    let words = {
        let (json, engine, model) = (args.json, engine.clone(), model.clone());
        // Half of the figures would lead to half of the causes: there is nothing to tell but that.
        let marked = move || head::object(&engine, &model, json!({ "interrupted": true }));
        LastWords::prepare(move || if json { print_json(&marked()) } else { Ok(()) })
    };
    let mut session = load::session(&engine)?;
    let (tokens, start) = (bench::random_tokens(prompt, engine.info().vocab), Instant::now());
    // The first pass brings in pages, clocks and shape classes; the counters watch it, the figures
    // leave it out.
    evaluate(&mut session, &tokens, generate.min(2))?;
    let cannot = || {
        Error::new(engine.info().device.to_string(), "a device that times its operations", "none")
    };
    let limits = engine.limits().ok_or_else(cannot)?;
    let before_steps = reads(&engine);
    let prefill = prefill(&mut session, &engine, &tokens)?.ok_or_else(cannot)?;
    let (steps, decode) = match together {
        None => (evaluate(&mut session, &tokens, generate)?, vec![session]),
        Some(sequences) => {
            let (steps, sessions) = generate_together(&engine, &tokens, sequences, generate)?;
            drop(session);
            (steps, sessions)
        }
    };
    let decode = measure(decode, &engine, &tokens, generate)?.ok_or_else(cannot)?;
    let reads = before_steps.max(reads(&engine));
    let gpu = on_gpu(&engine);
    let evidence = Evidence {
        gpu,
        threads: engine.info().device.threads,
        depth: prompt + generate / 2,
        single_cache: args.load.cache_type == CacheArg::F32,
        bits: 8.0 * engine.info().file_bytes as f64 / engine.info().parameters.max(1) as f64,
        ceilings: Ceilings { reads, limits },
        cache: if gpu { None } else { cache_bytes() },
        spread: spread(&steps),
        untimed: median(&steps),
        load_average,
        load_seconds: engine.info().load_ms as f64 / 1e3,
        loading: loaded.zip(before).map(|(now, then)| now.since(then)),
        running: Counters::now().zip(loaded).map(|(now, then)| now.since(then)),
        seconds: start.elapsed().as_secs_f64(),
        prefill,
        decode,
    };
    drop(words);
    if args.json {
        return print_json(&head::object(&engine, &model, to_json(&evidence)));
    }
    print(&to_text(&evidence, &engine))
}

/// Whether a GPU computes.
fn on_gpu(engine: &Engine) -> bool {
    engine.info().device.name != "cpu"
}

/// Bytes per second at which the weights can be read: the best of several medians, for a roof is
/// what the machine can do, and a small model is read in less time than a neighbour's turn.
fn reads(engine: &Engine) -> f64 {
    const PATIENCE: f64 = 0.1;
    let (start, mut best) = (Instant::now(), 0f64);
    loop {
        best = best.max(engine.roof().bytes_per_second);
        if start.elapsed().as_secs_f64() > PATIENCE {
            return best;
        }
    }
}

/// A prefill and single-token steps behind it; returns the seconds of each step.
fn evaluate(session: &mut Session, tokens: &[u32], steps: usize) -> Outcome<Vec<f64>> {
    bench::fill(session, tokens)?;
    let mut seconds = Vec::with_capacity(steps);
    for i in 0..steps {
        let start = Instant::now();
        session.evaluate(&[tokens[i % tokens.len()]], 0, &mut |_, _| {})?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

/// Sessions of a prompt each, and the seconds of steps in which they all choose a token, on average.
fn generate_together(
    engine: &Engine,
    tokens: &[u32],
    sequences: usize,
    steps: usize,
) -> Outcome<(Vec<f64>, Vec<Session>)> {
    let mut sessions = bench::filled(engine, tokens, sequences)?;
    let (first, greedy) = (vec![tokens[0]; sequences], SamplingOptions::greedy());
    // A GPU records the first step of a number of rows, in a tenth of a second: it is not timed.
    Session::generate_together(&mut sessions, &first, steps.min(1), &greedy)?;
    let start = Instant::now();
    Session::generate_together(&mut sessions, &first, steps, &greedy)?;
    Ok((vec![start.elapsed().as_secs_f64() / steps.max(1) as f64], sessions))
}

/// The timed prefill in the middle of three.
fn prefill(session: &mut Session, engine: &Engine, tokens: &[u32]) -> Outcome<Option<Phase>> {
    let mut prefills = Vec::new();
    for _ in 0..PREFILLS {
        session.clear();
        match session.profiler(engine.sampling_defaults())?.step(tokens)? {
            Some(step) => prefills.push(step),
            None => return Ok(None),
        }
    }
    prefills.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    Ok(Some(Phase::new(tokens.len(), &prefills[PREFILLS / 2..=PREFILLS / 2], on_gpu(engine))))
}

/// Timed steps of a token of each session behind a prompt.
fn measure(
    mut sessions: Vec<Session>,
    engine: &Engine,
    tokens: &[u32],
    generate: usize,
) -> Outcome<Option<Phase>> {
    sessions.iter_mut().try_for_each(|session| bench::fill(session, tokens))?;
    let (sequences, mut steps) = (sessions.len(), Vec::with_capacity(generate));
    let mut next = vec![tokens[0]; sequences];
    let mut profiler = Session::profiler_together(&mut sessions, engine.sampling_defaults())?;
    // The sampler's first choice makes its tables.
    for measured in std::iter::once(false).chain(std::iter::repeat_n(true, generate)) {
        let Some(step) = profiler.together(&next)? else { return Ok(None) };
        next.clone_from(&step.tokens);
        if measured {
            steps.push(step);
        }
    }
    Ok(Some(Phase::new(sequences, &steps, on_gpu(engine))))
}

/// The one in the middle; 0 of none.
fn median(steps: &[f64]) -> f64 {
    let mut sorted = steps.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// How much longer than the median the slowest tenth of the steps took at least; 1 with too few to
/// tell.
fn spread(steps: &[f64]) -> f64 {
    let mut sorted = steps.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.len() < 8 {
        return 1.0;
    }
    sorted[sorted.len() * 9 / 10] / sorted[sorted.len() / 2].max(1e-12)
}

fn to_text(evidence: &Evidence, engine: &Engine) -> String {
    let peaks = &evidence.ceilings.limits.used;
    let unit = |name: &str, peak: f64| (peak > 0.0).then(|| format!("{name} {}", rate(peak)));
    let tiles = match evidence.gpu {
        true => "of 16 bits",
        // Accelerate's, in f32.
        false if cfg!(target_vendor = "apple") => "of matrices",
        false => "bf16 tiles",
    };
    let units = [
        unit("of bytes", peaks.bytes_dot),
        unit("of narrow codes", peaks.narrow_dot),
        unit(tiles, peaks.tiles),
        unit("of f32", peaks.floats),
    ];
    let units: Vec<String> = units.into_iter().flatten().collect();
    let mut text = wrapped(&head::title(engine), "  ");
    let from = if evidence.cached() { " from the processor's cache" } else { "" };
    let beside = if evidence.disturbed() { "; too low, since other programs ran" } else { "" };
    text += &wrapped(
        &format!(
            "roofs: reads {:.1} GB/s{from}; products {}{beside}",
            evidence.ceilings.reads / 1e9,
            units.join(", ")
        ),
        "  ",
    );
    let (prefill, decode) = (&evidence.prefill, &evidence.decode);
    let together = decode.tokens;
    text += &format!(
        "\n{BOLD}prefill of {} tokens{BOLD:#}: {:.2} ms, {:.1} tok/s\n",
        prefill.tokens,
        prefill.seconds * 1e3,
        prefill.rate()
    );
    text += &phase_table(prefill, evidence);
    text += &format!(
        "\n{BOLD}decode{} at depth {}{BOLD:#}, mean of {} {}: {:.3} ms, {:.1} tok/s\n",
        if together == 1 { String::new() } else { format!(" of {together} sequences") },
        evidence.depth,
        decode.steps,
        if together == 1 { "tokens" } else { "steps" },
        decode.seconds * 1e3,
        decode.rate()
    );
    text += &phase_table(decode, evidence);
    if evidence.gpu {
        // Launches that are timed wait for each other.
        text += &format!(
            "without a clock at each operation: {:.3} ms, {:.1} tok/s\n",
            evidence.untimed * 1e3,
            together as f64 / evidence.untimed.max(1e-12)
        );
    }
    text += &format!("\n{BOLD}what holds it back{BOLD:#}\n");
    for (i, verdict) in evidence.verdicts().iter().enumerate() {
        text += &wrapped(&format!("{}. {}", i + 1, verdict.found), "   ");
        text += &wrapped(&format!("   -> {}", verdict.mend), "      ");
    }
    text
}

/// `4.10 T/s`.
fn rate(operations: f64) -> String {
    if operations >= 1e12 {
        format!("{:.2} Top/s", operations / 1e12)
    } else {
        format!("{:.1} Gop/s", operations / 1e9)
    }
}

/// A paragraph of at most 100 columns, its further lines indented.
fn wrapped(paragraph: &str, indent: &str) -> String {
    let mut text = String::new();
    let first = paragraph.len() - paragraph.trim_start().len();
    let mut line = paragraph[..first].to_string();
    for word in paragraph.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > 100 {
            text += line.trim_end();
            text.push('\n');
            line = indent.to_string();
        }
        if !line.trim().is_empty() {
            line.push(' ');
        }
        line += word;
    }
    text + &line + "\n"
}

fn phase_table(phase: &Phase, evidence: &Evidence) -> String {
    let (ceilings, cached) = (&evidence.ceilings, evidence.cached());
    let share = |seconds: f64| format!("{:.1}%", 100.0 * seconds / phase.seconds.max(1e-12));
    let time = |seconds: f64| format!("{:.3}", seconds * 1e3);
    let steps = phase.steps.max(1) as u64;
    let row = |name: &str, n: f64, work: &Work, seconds: f64, least: f64, bound: &str| {
        vec![
            name.to_string(),
            if n > 0.0 { format!("{n:.0}") } else { String::new() },
            bytes(work.bytes / steps),
            count(work.operations() / steps),
            time(seconds),
            share(seconds),
            format!("{:.0}%", 100.0 * least / seconds.max(1e-12)),
            bound.to_string(),
        ]
    };
    let (mut rows, mut all, mut least, mut number) = (Vec::new(), Work::default(), 0.0, 0.0);
    for kind in &phase.kinds {
        let bound = ceilings.bound(&kind.work, phase.steps);
        rows.push(row(
            &kind.name,
            kind.count,
            &kind.work,
            kind.seconds,
            bound.seconds(),
            bound.name(cached),
        ));
        all += kind.work;
        (least, number) = (least + bound.seconds(), number + kind.count);
    }
    let others = [("sampling", phase.sampling), ("barriers", phase.barriers), ("rest", phase.rest)];
    for (name, seconds) in others {
        let mut cells = vec![String::new(); 8];
        (cells[0], cells[4], cells[5]) = (name.to_string(), time(seconds), share(seconds));
        rows.push(cells);
    }
    rows.push(row("total", number, &all, phase.seconds, least, ""));
    table(
        &["OPERATION", "COUNT", "READ", "OPERATIONS", "TIME MS", "SHARE", "OF ROOF", "BOUND BY"],
        &[false, true, true, true, true, true, true, false],
        &rows,
    )
}

fn to_json(evidence: &Evidence) -> Value {
    let peaks = |peaks: &delft::Peaks| {
        json!({
            "isa": peaks.isa,
            "byte_dots_per_s": peaks.bytes_dot,
            "narrow_dots_per_s": peaks.narrow_dot,
            "tiles_per_s": peaks.tiles,
            "floats_per_s": peaks.floats,
        })
    };
    let counters = |counters: &Option<Counters>| {
        counters.map(|c| {
            json!({
                "major_faults": c.major_faults,
                "involuntary_switches": c.involuntary_switches,
                "waiting_s": c.waiting,
                "stolen_s": c.stolen,
            })
        })
    };
    let verdicts: Vec<Value> = evidence
        .verdicts()
        .into_iter()
        .map(|v| json!({ "cause": v.cause, "found": v.found, "mend": v.mend }))
        .collect();
    json!({
        "cores": evidence.ceilings.limits.cores,
        "read_bytes_per_s": evidence.ceilings.reads,
        "peaks": peaks(&evidence.ceilings.limits.used),
        "best_peaks": peaks(&evidence.ceilings.limits.best),
        "cache_bytes": evidence.cache,
        "disturbed": evidence.disturbed(),
        "prefill": phase_json(&evidence.prefill, evidence),
        "decode": phase_json(&evidence.decode, evidence),
        "depth": evidence.depth,
        "spread": evidence.spread,
        "untimed_s": evidence.untimed,
        "load_average": evidence.load_average,
        "loading": counters(&evidence.loading),
        "running": counters(&evidence.running),
        "measured_s": evidence.seconds,
        "verdicts": verdicts,
    })
}

/// Figures of a whole prefill, or of one step of a decode.
fn phase_json(phase: &Phase, evidence: &Evidence) -> Value {
    let ceilings = &evidence.ceilings;
    let steps = phase.steps.max(1) as f64;
    let row = |row: &Row| {
        let bound = ceilings.bound(&row.work, phase.steps);
        json!({
            "name": row.name,
            "count": row.count.round(),
            "bytes": row.work.bytes as f64 / steps,
            "operations": row.work.operations() as f64 / steps,
            "seconds": row.seconds,
            "busy_s": row.busy,
            "share": row.seconds / phase.seconds.max(1e-12),
            "of_roof": bound.seconds() / row.seconds.max(1e-12),
            "bound_by": bound.name(evidence.cached()),
        })
    };
    json!({
        "tokens": phase.tokens,
        "steps": phase.steps,
        "seconds": phase.seconds,
        "tok_s": phase.rate(),
        "operations": phase.kinds.iter().map(row).collect::<Vec<_>>(),
        "formats": phase.formats.iter().map(row).collect::<Vec<_>>(),
        "sampling_s": phase.sampling,
        "barriers_s": phase.barriers,
        "rest_s": phase.rest,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_fit_the_page() {
        let long = "word ".repeat(60);
        let text = wrapped(&format!("1. {long}"), "   ");
        assert!(text.lines().all(|line| line.chars().count() <= 100) && text.lines().count() > 3);
        assert!(text.lines().skip(1).all(|line| line.starts_with("   word")), "{text}");
        assert_eq!(wrapped("   -> a b", "      "), "   -> a b\n");
    }

    #[test]
    fn the_spread_is_that_of_the_slowest_tenth() {
        let mut steps = vec![1.0; 20];
        assert_eq!(spread(&steps), 1.0);
        steps[3..5].fill(4.0);
        assert_eq!(spread(&steps), 4.0);
        assert_eq!(spread(&[1.0, 9.0]), 1.0);
    }
}
