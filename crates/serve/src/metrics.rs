//! Counters for Prometheus, in its text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use delft::{Engine, Finish, Memory, Metrics};

use crate::catalogue::Catalogue;
use crate::library::{PARTS, held_part, planned_part};
use crate::models::Model;
use crate::problem::Api;

/// Upper bounds of the buckets of times, in seconds.
const BOUNDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
];

/// Upper bounds of the buckets of lengths, in tokens.
const LENGTHS: &[f64] = &[
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
    65536.0, 131072.0, 262144.0, 1048576.0,
];

/// Why texts end, in the words of [`Finish::name`].
const FINISHES: [&str; 5] = ["stop", "length", "context_full", "cancelled", "error"];

/// Requests of this server, by interface and status.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<BTreeMap<(&'static str, u16), u64>>);

impl Requests {
    pub(crate) fn count(&self, api: Api, status: u16) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((api.name(), status)).or_default() += 1;
    }
}

/// Texts of one model.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    preemptions: AtomicU64,
    recomputed_tokens: AtomicU64,
    finishes: [AtomicU64; FINISHES.len()],
    queue: Times,
    first_token: Times,
    token: Times,
    whole: Times,
    prompt_lengths: Lengths,
    generated_lengths: Lengths,
}

/// A histogram of times.
#[derive(Debug)]
struct Times(Histogram);

/// A histogram of numbers of tokens.
#[derive(Debug)]
struct Lengths(Histogram);

impl Default for Times {
    fn default() -> Self {
        Times(Histogram::new(BOUNDS, 1e9))
    }
}

impl Default for Lengths {
    fn default() -> Self {
        Lengths(Histogram::new(LENGTHS, 1.0))
    }
}

impl Times {
    fn add(&self, time: Duration, times: u64) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.add(time.as_secs_f64(), nanoseconds, times);
    }
}

impl Lengths {
    fn add(&self, tokens: usize) {
        self.0.add(tokens as f64, tokens as u64, 1);
    }
}

/// Counts of values by upper bounds, and their sum in whole parts of a unit.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<AtomicU64>,
    count: AtomicU64,
    sum: AtomicU64,
    parts: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64], parts: f64) -> Histogram {
        let counts = bounds.iter().map(|_| AtomicU64::new(0)).collect();
        let (count, sum) = Default::default();
        Histogram { bounds, counts, count, sum, parts }
    }

    fn add(&self, value: f64, parts: u64, times: u64) {
        for (count, bound) in self.counts.iter().zip(self.bounds) {
            if value <= *bound {
                count.fetch_add(times, Ordering::Relaxed);
            }
        }
        self.count.fetch_add(times, Ordering::Relaxed);
        self.sum.fetch_add(parts.saturating_mul(times), Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, label: &str) {
        for (count, bound) in self.counts.iter().zip(self.bounds) {
            line(out, name, "_bucket", &format!("{label},le=\"{bound}\""), get(count));
        }
        line(out, name, "_bucket", &format!("{label},le=\"+Inf\""), get(&self.count));
        line(out, name, "_sum", label, get(&self.sum) as f64 / self.parts);
        line(out, name, "_count", label, get(&self.count));
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Texts {
    /// Counts a text that has ended, or was given up: `queued` is how long it waited for its turn,
    /// `whole` all that it took, waiting included.
    pub(crate) fn count(
        &self,
        metrics: &Metrics,
        finish: &Finish,
        queued: Duration,
        whole: Duration,
    ) {
        let ends = FINISHES.iter().zip(&self.finishes);
        ends.filter(|(name, _)| **name == finish.name()).for_each(|(_, count)| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        self.queue.add(queued, 1);
        self.whole.add(whole, 1);
        self.prompt_lengths.add(metrics.prompt_tokens);
        self.generated_lengths.add(metrics.generated_tokens);
        let add = |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
        add(&self.prompt_tokens, metrics.prompt_tokens);
        add(&self.cached_tokens, metrics.reused_tokens);
        add(&self.generated_tokens, metrics.generated_tokens);
        add(&self.preemptions, metrics.preemptions);
        add(&self.recomputed_tokens, metrics.recomputed_tokens);
        if metrics.generated_tokens > 0 {
            self.first_token.add(queued + metrics.prefill, 1);
        }
        let later = metrics.generated_tokens.saturating_sub(1);
        if let Ok(n @ 1..) = u32::try_from(later) {
            self.token.add(metrics.decode / n, u64::from(n));
        }
    }
}

fn line(out: &mut String, name: &str, suffix: &str, labels: &str, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{name}{suffix}{{{labels}}} {value}");
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All of it.
pub(crate) fn text(requests: &Requests, models: &Catalogue) -> String {
    let (texts, residents) = (models.texts(), models.residents());
    let mut out = String::new();
    family(&mut out, "delft_requests_total", "counter", "Requests, by interface and status.");
    for ((api, status), count) in &*requests.0.lock().unwrap_or_else(PoisonError::into_inner) {
        let labels = format!("api=\"{api}\",status=\"{status}\"");
        line(&mut out, "delft_requests_total", "", &labels, count);
    }
    type Read = fn(&Texts) -> u64;
    let counters: [(&str, &str, Read); 5] = [
        ("delft_prompt_tokens_total", "Tokens of prompts.", |t| get(&t.prompt_tokens)),
        (
            "delft_cached_prompt_tokens_total",
            "Of those, tokens found computed in the prefix cache.",
            |t| get(&t.cached_tokens),
        ),
        ("delft_generated_tokens_total", "Tokens generated.", |t| get(&t.generated_tokens)),
        (
            "delft_preemptions_total",
            "Times that a text made room in the cache for those before it, and waited again.",
            |t| get(&t.preemptions),
        ),
        (
            "delft_recomputed_tokens_total",
            "Tokens computed again since the cache had lost them after a preemption.",
            |t| get(&t.recomputed_tokens),
        ),
    ];
    let label = |name: &str| format!("model=\"{}\"", escaped(name));
    for (name, help, read) in counters {
        family(&mut out, name, "counter", help);
        for (model, texts) in &texts {
            line(&mut out, name, "", &label(model), read(texts));
        }
    }
    let finished = "delft_request_finished_total";
    family(&mut out, finished, "counter", "Texts, by why they ended.");
    for (model, texts) in &texts {
        for (name, count) in FINISHES.iter().zip(&texts.finishes) {
            let labels = format!("{},finished_reason=\"{name}\"", label(model));
            line(&mut out, finished, "", &labels, get(count));
        }
    }
    family(&mut out, "delft_build_info", "gauge", "The build that runs.");
    let build = format!("version=\"{}\"", env!("CARGO_PKG_VERSION"));
    line(&mut out, "delft_build_info", "", &build, 1);
    family(&mut out, "delft_model_load_seconds", "gauge", "What loading a model's files took.");
    for resident in residents.iter().filter(|resident| resident.model.parent.is_none()) {
        let Model { name, engines, .. } = &*resident.model;
        let ms: u64 = engines.iter().map(|engine| engine.info().load_ms).sum();
        line(&mut out, "delft_model_load_seconds", "", &label(name), ms as f64 / 1e3);
    }
    /// Picks one of how many requests run and wait.
    type Gauge = fn((usize, usize)) -> usize;
    let gauges: [(&str, &str, Gauge); 2] = [
        ("delft_requests_running", "Requests whose turn it is.", |(running, _)| running),
        ("delft_requests_waiting", "Requests in the queue.", |(_, waiting)| waiting),
    ];
    for (name, help, read) in gauges {
        family(&mut out, name, "gauge", help);
        for resident in &residents {
            let Model { name: model, generator, .. } = &*resident.model;
            line(&mut out, name, "", &label(model), read(generator.load()));
        }
    }
    // Adapters share their model's memory.
    let own = residents.iter().map(|resident| &*resident.model);
    let own: Vec<&Model> = own.filter(|model| model.parent.is_none()).collect();
    let planned = "delft_memory_planned_bytes";
    family(&mut out, planned, "gauge", "Memory planned for a loaded model, before it was loaded.");
    for model in &own {
        for (part, plan, _) in PARTS {
            let bytes = planned_part(&model.engines, plan);
            let labels = format!("{},part=\"{part}\"", label(&model.name));
            line(&mut out, planned, "", &labels, bytes);
        }
    }
    let held = "delft_memory_held_bytes";
    family(&mut out, held, "gauge", "Memory that a loaded model holds.");
    for model in &own {
        let memory: Vec<Memory> = model.engines.iter().map(Engine::memory).collect();
        for (part, _, read) in PARTS {
            let Some(read) = read else { continue };
            let labels = format!("{},part=\"{part}\"", label(&model.name));
            line(&mut out, held, "", &labels, held_part(&memory, read));
        }
    }
    /// Picks one of the histograms that are kept.
    type Kept = fn(&Texts) -> &Histogram;
    let times: [(&str, &str, Kept); 6] = [
        (
            "delft_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            |t| &t.first_token.0,
        ),
        ("delft_time_per_token_seconds", "Each token after the first.", |t| &t.token.0),
        ("delft_request_queue_seconds", "What texts waited for their turn.", |t| &t.queue.0),
        ("delft_request_seconds", "All that texts took, waiting included.", |t| &t.whole.0),
        ("delft_request_prompt_tokens", "Tokens of each prompt.", |t| &t.prompt_lengths.0),
        ("delft_request_generated_tokens", "Tokens of each text.", |t| &t.generated_lengths.0),
    ];
    for (name, help, read) in times {
        family(&mut out, name, "histogram", help);
        for (model, texts) in &texts {
            read(texts).write(&mut out, name, &label(model));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_to_the_first_token_have_the_queue_in_them() {
        let texts = Texts::default();
        let metrics = Metrics {
            prompt_tokens: 100,
            reused_tokens: 40,
            generated_tokens: 5,
            preemptions: 2,
            recomputed_tokens: 30,
            prefill: Duration::from_millis(500),
            decode: Duration::from_millis(100),
            ..Metrics::default()
        };
        let (queued, whole) = (Duration::from_secs(2), Duration::from_secs(3));
        texts.count(&metrics, &Finish::Length, queued, whole);
        let written = |histogram: &Histogram| {
            let mut out = String::new();
            histogram.write(&mut out, "x", "m=\"1\"");
            out
        };
        let first = written(&texts.first_token.0);
        assert!(first.contains("x_bucket{m=\"1\",le=\"2\"} 0\nx_bucket{m=\"1\",le=\"3\"} 1\n"));
        assert!(first.ends_with("x_sum{m=\"1\"} 2.5\nx_count{m=\"1\"} 1\n"), "{first}");
        let lengths = written(&texts.prompt_lengths.0);
        assert!(lengths.contains("le=\"64\"} 0\nx_bucket{m=\"1\",le=\"128\"} 1\n"), "{lengths}");
        assert!(written(&texts.token.0).ends_with("x_sum{m=\"1\"} 0.1\nx_count{m=\"1\"} 4\n"));
        assert_eq!((get(&texts.preemptions), get(&texts.recomputed_tokens)), (2, 30));
        let ends: Vec<u64> = texts.finishes.iter().map(get).collect();
        assert_eq!(ends, [0, 1, 0, 0, 0]);
    }
}
