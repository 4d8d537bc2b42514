//! Counters for Prometheus, in its text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use delft::{Engine, Memory, Metrics, Plan};

use crate::catalogue::Catalogue;
use crate::models::Model;
use crate::problem::Api;

/// Upper bounds of the buckets of times, in seconds.
const BOUNDS: [f64; 10] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

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
    first_token: Times,
    token: Times,
}

/// A histogram of times.
#[derive(Debug, Default)]
struct Times {
    counts: [AtomicU64; BOUNDS.len()],
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Times {
    fn add(&self, time: Duration, times: u64) {
        for (count, bound) in self.counts.iter().zip(BOUNDS) {
            if time.as_secs_f64() <= bound {
                count.fetch_add(times, Ordering::Relaxed);
            }
        }
        self.count.fetch_add(times, Ordering::Relaxed);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(times);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, label: &str) {
        for (count, bound) in self.counts.iter().zip(BOUNDS) {
            line(out, name, "_bucket", &format!("{label},le=\"{bound}\""), get(count));
        }
        line(out, name, "_bucket", &format!("{label},le=\"+Inf\""), get(&self.count));
        line(out, name, "_sum", label, get(&self.nanoseconds) as f64 / 1e9);
        line(out, name, "_count", label, get(&self.count));
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Texts {
    /// Counts a text that has ended.
    pub(crate) fn count(&self, metrics: &Metrics) {
        let add = |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
        add(&self.prompt_tokens, metrics.prompt_tokens);
        add(&self.cached_tokens, metrics.reused_tokens);
        add(&self.generated_tokens, metrics.generated_tokens);
        if metrics.generated_tokens > 0 {
            self.first_token.add(metrics.prefill, 1);
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
    let counters: [(&str, &str, Read); 3] = [
        ("delft_prompt_tokens_total", "Tokens of prompts.", |t| get(&t.prompt_tokens)),
        ("delft_cached_prompt_tokens_total", "Of those, tokens found computed.", |t| {
            get(&t.cached_tokens)
        }),
        ("delft_generated_tokens_total", "Tokens generated.", |t| get(&t.generated_tokens)),
    ];
    let label = |name: &str| format!("model=\"{}\"", escaped(name));
    for (name, help, read) in counters {
        family(&mut out, name, "counter", help);
        for (model, texts) in &texts {
            line(&mut out, name, "", &label(model), read(texts));
        }
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
    /// Picks what a part of memory was planned to take, and what it takes.
    type Part = (&'static str, fn(&Plan) -> usize, Option<fn(&Memory) -> usize>);
    let parts: [Part; 4] = [
        ("weights", |plan| plan.weights, Some(|memory| memory.weights)),
        ("cache", |plan| plan.cache, Some(|memory| memory.cache)),
        ("activations", |plan| plan.arena, Some(|memory| memory.arena)),
        ("working", |plan| plan.working, None),
    ];
    // Adapters share their model's memory.
    let own: Vec<&Model> = residents.iter().map(|resident| &*resident.model).collect();
    let own: Vec<&Model> = own.into_iter().filter(|model| model.parent.is_none()).collect();
    let planned = "delft_memory_planned_bytes";
    family(&mut out, planned, "gauge", "Memory planned for a loaded model, before it was loaded.");
    for model in &own {
        for (part, plan, _) in parts {
            let bytes: usize = model.engines.iter().flat_map(Engine::plan).map(plan).sum();
            let labels = format!("{},part=\"{part}\"", label(&model.name));
            line(&mut out, planned, "", &labels, bytes);
        }
    }
    let held = "delft_memory_held_bytes";
    family(&mut out, held, "gauge", "Memory that a loaded model holds.");
    for model in &own {
        let memory: Vec<Memory> = model.engines.iter().map(Engine::memory).collect();
        for (part, _, read) in parts {
            let Some(read) = read else { continue };
            let labels = format!("{},part=\"{part}\"", label(&model.name));
            line(&mut out, held, "", &labels, memory.iter().map(read).sum::<usize>());
        }
    }
    /// Picks one of the times that are kept.
    type Kept = fn(&Texts) -> &Times;
    let times: [(&str, &str, Kept); 2] = [
        ("delft_time_to_first_token_seconds", "From a request's turn to its first token.", |t| {
            &t.first_token
        }),
        ("delft_time_per_token_seconds", "Each token after the first.", |t| &t.token),
    ];
    for (name, help, read) in times {
        family(&mut out, name, "histogram", help);
        for (model, texts) in &texts {
            read(texts).write(&mut out, name, &label(model));
        }
    }
    out
}
