//! From figures to causes. A verdict follows from a measured number and carries it; what was not
//! measured is not said.

use super::{Bound, Ceilings, Phase, Row};
use crate::machine::Counters;
use crate::terminal::bytes;

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Evidence {
    /// Whether a GPU computes: what is said of this process's threads and of the processor is then
    /// not its matter.
    pub(super) gpu: bool,
    pub(super) threads: usize,
    /// Cached positions half-way through the decode.
    pub(super) depth: usize,
    /// Whether keys and values are cached in f32.
    pub(super) single_cache: bool,
    /// Bits per weight of the file.
    pub(super) bits: f64,
    pub(super) ceilings: Ceilings,
    /// Bytes of the processor's last caches, where the system tells.
    pub(super) cache: Option<u64>,
    /// The slowest tenth of untimed decode steps against the median one, and that in seconds.
    pub(super) spread: f64,
    pub(super) untimed: f64,
    /// The load average of the last minute before the model was loaded.
    pub(super) load_average: Option<f64>,
    pub(super) load_seconds: f64,
    /// While the model was loaded, and from then to the end.
    pub(super) loading: Option<Counters>,
    pub(super) running: Option<Counters>,
    /// Seconds from loaded to the end.
    pub(super) seconds: f64,
    pub(super) prefill: Phase,
    pub(super) decode: Phase,
}

/// Something that holds the machine back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    /// One word for programs.
    pub(super) cause: &'static str,
    /// The finding, with the figures that show it.
    pub(super) found: String,
    /// The remedy.
    pub(super) mend: String,
}

/// Shares of the time from which on something counts as a cause: the noise of a quiet machine stays
/// below them.
const WAITING: f64 = 0.03;
const STOLEN: f64 = 0.02;
const SPREAD: f64 = 1.3;
const BARRIERS: f64 = 0.15;
const IMBALANCE: f64 = 0.15;
const ATTENTION: f64 = 0.25;
const SAMPLING: f64 = 0.10;
/// The share of its roof from which on memory or arithmetic is the limit.
const NEAR: f64 = 0.6;
/// Page faults that a start causes anyway.
const FAULTS: u64 = 16;
/// A format below this part of another's rate is slow.
const SLOW: f64 = 0.6;
/// Bytes per operation below which its start and end hide its rate.
const LARGE: f64 = 1e6;

impl Evidence {
    /// All causes found, those that spoil other figures first; never empty.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let mut found: Vec<Verdict> = [
            // Too many threads keep each other waiting, which looks like a busy machine.
            self.threads().filter(|_| self.too_many()),
            self.busy(),
            self.threads().filter(|_| !self.too_many()),
            self.paging(),
            self.loading(),
            self.instructions(),
            self.format(),
            self.attention(),
            self.sampling(),
            self.imbalance(),
            self.barriers(),
            self.memory(),
            self.arithmetic(),
        ]
        .into_iter()
        .flatten()
        .collect();
        if found.is_empty() {
            found.extend(self.largest());
        }
        found
    }

    /// Whether threads outnumber cores.
    fn too_many(&self) -> bool {
        self.threads > self.ceilings.limits.cores
    }

    /// Whether what a token reads lies in the processor's caches.
    pub(super) fn cached(&self) -> bool {
        self.cache.is_some_and(|cache| self.token_bytes() < cache)
    }

    fn token_bytes(&self) -> u64 {
        let bytes: u64 = self.decode.kinds.iter().map(|row| row.work.bytes).sum();
        bytes / self.decode.steps.max(1) as u64
    }

    /// Whether other programs took part of the machine, so that its roofs were measured too low.
    pub(super) fn disturbed(&self) -> bool {
        self.busy().is_some()
    }

    fn busy(&self) -> Option<Verdict> {
        if self.gpu {
            return None;
        }
        let cores = self.ceilings.limits.cores;
        let load = self.load_average.unwrap_or(0.0);
        let running = self.running.unwrap_or_default();
        let waiting = running.waiting / (self.seconds * self.threads as f64).max(1e-9);
        let stolen = running.stolen / (self.seconds * cores as f64).max(1e-9);
        // Half a core of others is more than what a terminal and a desktop take.
        let crowd = load > 0.5 && load + self.threads.min(cores) as f64 > cores as f64 + 0.5;
        let own = (1.0 - cores as f64 / self.threads.max(1) as f64).max(0.0);
        let waited = waiting - own >= WAITING;
        let uneven = self.spread >= SPREAD && !self.too_many();
        if !waited && stolen < STOLEN && !uneven && !crowd {
            return None;
        }
        Some(Verdict {
            cause: "busy",
            found: format!(
                "The machine is busy: threads waited {} of the time for a core ({} involuntary switches), a \
                 host took {} of it, the slowest tenth of decode steps took {:.2} times the median or more, \
                 and {load:.1} programs wanted {} in the minute before.",
                percent(waiting),
                running.involuntary_switches,
                percent(stolen),
                self.spread,
                plural(cores, "core"),
            ),
            mend: "end other programs (top shows them), then measure again".into(),
        })
    }

    fn threads(&self) -> Option<Verdict> {
        let (threads, cores) = (self.threads, self.ceilings.limits.cores);
        let found = match threads.cmp(&cores) {
            std::cmp::Ordering::Equal => return None,
            std::cmp::Ordering::Less => format!(
                "Fewer threads than cores: {threads} of the {} that this process may use.",
                plural(cores, "physical core")
            ),
            std::cmp::Ordering::Greater => format!(
                "More threads than cores: {threads} on {}; waiting for each other takes {} of a decode step.",
                plural(cores, "core"),
                percent(self.waits(&self.decode))
            ),
        };
        let mend = format!("--threads {cores}, which is what is taken when it is left out");
        Some(Verdict { cause: "threads", found, mend })
    }

    fn paging(&self) -> Option<Verdict> {
        let faults = self.running.map_or(0, |c| c.major_faults);
        (faults > FAULTS).then(|| Verdict {
            cause: "paging",
            found: format!(
                "Memory is short: {faults} pages were fetched from the disk during the run."
            ),
            mend: "end other programs, or take a smaller quantisation or a smaller --ctx".into(),
        })
    }

    fn loading(&self) -> Option<Verdict> {
        let faults = self.loading.map_or(0, |c| c.major_faults);
        (faults > FAULTS).then(|| Verdict {
            cause: "cold_file",
            found: format!(
                "The file was not in memory: loading it took {:.2} s and {faults} reads of the disk.",
                self.load_seconds
            ),
            mend: "nothing: the next start finds it there, unless memory runs short in between".into(),
        })
    }

    fn instructions(&self) -> Option<Verdict> {
        let (used, best) = (&self.ceilings.limits.used, &self.ceilings.limits.best);
        if used.isa != best.isa {
            return Some(Verdict {
                cause: "instructions",
                found: format!(
                    "The instruction set {} was asked for, and this processor has {}: {} against {} in dot products \
                     of bytes, {} against {} at best.",
                    used.isa,
                    best.isa,
                    super::rate(used.bytes_dot),
                    super::rate(best.bytes_dot),
                    super::rate(used.greatest()),
                    super::rate(best.greatest()),
                ),
                mend: "leave the environment variable DELFT_ISA unset".into(),
            });
        }
        let (share, _) = self.near(&self.prefill, false);
        (matches!(used.isa, "scalar" | "avx2" | "avxvnni" | "neon" | "neon-dotprod") && share > 0.3).then(|| Verdict {
            cause: "instructions",
            found: format!(
                "This processor has {} and nothing wider (no AVX-512 VNNI, AMX or i8mm): at most {} in dot products of \
                 bytes, which prefill uses to {}.",
                used.isa,
                super::rate(used.greatest()),
                percent(share)
            ),
            mend: "nothing on this processor; a smaller model needs fewer operations".into(),
        })
    }

    /// A type of weights that is read or multiplied far slower than another, or than memory and
    /// peaks allow.
    fn format(&self) -> Option<Verdict> {
        let peaks = &self.ceilings.limits.used;
        let best = peaks.greatest();
        for row in &self.prefill.formats {
            let share = row.seconds / self.prefill.seconds;
            let only_floats = row.work.floats > 0 && row.work.operations() == row.work.floats;
            if only_floats && share > 0.3 && peaks.floats < SLOW * best {
                return Some(Verdict {
                    cause: "format",
                    found: format!(
                        "{} weights multiply in f32, at {} of at most {}, in {} of the prefill; other types reach up to \
                         {} here.",
                        row.name,
                        super::rate(
                            row.work.operations() as f64 / row.seconds / self.prefill.steps as f64
                        ),
                        super::rate(peaks.floats),
                        percent(share),
                        super::rate(best),
                    ),
                    mend: "a bf16 or quantised file of this model".into(),
                });
            }
        }
        let steps = self.decode.steps.max(1) as f64;
        let rate = |row: &Row| row.work.bytes as f64 / steps / row.seconds.max(1e-12);
        let large = |row: &&Row| {
            row.work.bytes as f64 / steps / row.count.max(1.0) > LARGE
                && row.seconds > 0.1 * self.decode.seconds
        };
        let formats: Vec<&Row> = self.decode.formats.iter().filter(large).collect();
        // Numbers are not unpacked.
        let packed = |row: &&&Row| !["f32", "f16", "bf16"].contains(&row.name.as_str());
        let slowest = formats.iter().filter(packed).min_by(|a, b| rate(a).total_cmp(&rate(b)))?;
        let (others, what) = formats
            .iter()
            .max_by(|a, b| rate(a).total_cmp(&rate(b)))
            .filter(|fastest| fastest.name != slowest.name)
            .map(|fastest| (rate(fastest), format!("{} weights are", fastest.name)))
            .filter(|(fastest, _)| rate(slowest) < SLOW * fastest)
            .unwrap_or((self.ceilings.reads, "plain reads are".to_string()));
        (rate(slowest) < SLOW * others).then(|| Verdict {
            cause: "format",
            found: format!(
                "{} weights are read at {:.1} GB/s in decode, where {what} at {:.1}: unpacking them is the work.",
                slowest.name,
                rate(slowest) / 1e9,
                others / 1e9
            ),
            mend: "a file in another type (q8_0 and q4_0 unpack fastest), if memory allows".into(),
        })
    }

    fn attention(&self) -> Option<Verdict> {
        let row = self.decode.kind("attention")?;
        let share = row.seconds / self.decode.seconds.max(1e-12);
        let each = row.work.bytes / self.decode.steps.max(1) as u64;
        let bound = self.ceilings.bound(&row.work, self.decode.steps).seconds();
        (share > ATTENTION).then(|| Verdict {
            cause: "attention",
            found: format!(
                "Attention takes {} of a decode step at depth {}: it reads {} of cached keys and values, at {} of its \
                 roof.",
                percent(share),
                self.depth,
                bytes(each),
                percent(bound / row.seconds.max(1e-12))
            ),
            mend: if self.single_cache {
                "--cache-type f16 halves what is read".into()
            } else {
                "a shorter prompt, or a bound on what is kept: --ctx N --rotate".into()
            },
        })
    }

    fn sampling(&self) -> Option<Verdict> {
        let share = self.decode.sampling / self.decode.seconds.max(1e-12);
        (share > SAMPLING).then(|| Verdict {
            cause: "sampling",
            found: format!(
                "Choosing the token takes {} of a decode step ({:.3} ms).",
                percent(share),
                self.decode.sampling * 1e3
            ),
            mend: "--temp 0, or --top-k 40, which leaves less to sort".into(),
        })
    }

    fn imbalance(&self) -> Option<Verdict> {
        let idle = |phase: &Phase| {
            let seconds: f64 = phase.kinds.iter().map(|row| row.seconds - row.busy).sum();
            seconds / phase.seconds.max(1e-12)
        };
        let (prefill, decode) = (idle(&self.prefill), idle(&self.decode));
        let worse = prefill.max(decode);
        (self.threads > 1 && !self.too_many() && worse > IMBALANCE).then(|| Verdict {
            cause: "imbalance",
            found: format!(
                "Threads wait for the slowest of them inside operations: {} of the prefill, {} of a decode step.",
                percent(prefill),
                percent(decode)
            ),
            mend: if self.disturbed() {
                "what other programs cause of it ends with them".into()
            } else {
                format!(
                    "one core is slower than the others, or the operations are too small to share: try --threads {}",
                    self.threads - 1
                )
            },
        })
    }

    /// Share of a phase that lies between operations.
    fn waits(&self, phase: &Phase) -> f64 {
        (phase.barriers + phase.rest) / phase.seconds.max(1e-12)
    }

    fn barriers(&self) -> Option<Verdict> {
        let share = self.waits(&self.decode);
        let operations: f64 = self.decode.kinds.iter().map(|row| row.count).sum();
        let seconds: f64 = self.decode.kinds.iter().map(|row| row.seconds).sum();
        (share > BARRIERS && !self.gpu && !self.too_many() && !self.disturbed()).then(|| Verdict {
            cause: "barriers",
            found: format!(
                "The model is small for this machine: {operations:.0} operations of {:.1} us in a decode step, and {} of \
                 the step outside of them.",
                1e6 * seconds / operations.max(1.0),
                percent(share)
            ),
            mend: if self.threads > 1 {
                format!("fewer threads meet faster: try --threads {}", self.threads.div_ceil(2))
            } else {
                "nothing: this is what starting an operation costs".into()
            },
        })
    }

    /// How close to its roof a phase is in operations bound by memory (or by arithmetic), and their
    /// share of it.
    fn near(&self, phase: &Phase, memory: bool) -> (f64, f64) {
        let (mut least, mut seconds) = (0.0, 0.0);
        for row in &phase.kinds {
            let bound = self.ceilings.bound(&row.work, phase.steps);
            if matches!(bound, Bound::Memory(_)) == memory {
                least += bound.seconds();
                seconds += row.seconds;
            }
        }
        let all = phase.seconds.max(1e-12);
        (least / all, seconds / all)
    }

    fn memory(&self) -> Option<Verdict> {
        let (reached, share) = self.near(&self.decode, true);
        let read = self.token_bytes();
        let (limit, lies) = match self.cache.filter(|_| self.cached()) {
            Some(cache) => (
                "The processor's cache is",
                format!(", which lie in its {}, not in memory", bytes(cache)),
            ),
            None => ("Memory is", String::new()),
        };
        (reached > NEAR).then(|| Verdict {
            cause: if self.cached() { "cache" } else { "memory" },
            found: format!(
                "{limit} the limit of decode: a token reads {}{lies}, at {:.1} GB/s, {} of the {:.1} GB/s that plain \
                 reads reach{} ({} of the step is bound by them).",
                bytes(read),
                read as f64 / self.decode.seconds / 1e9,
                percent(reached),
                self.ceilings.reads / 1e9,
                self.doubt(reached),
                percent(share)
            ),
            mend: format!(
                "only a smaller quantisation or a smaller model reads less: this one has {:.1} bits per weight",
                self.bits
            ),
        })
    }

    /// A caveat for a roof that was measured beside other programs, or that was exceeded.
    fn doubt(&self, reached: f64) -> &'static str {
        match (self.disturbed(), reached > 1.0) {
            (true, true) => " beside other programs, which is too low a figure",
            (true, false) => " beside other programs",
            (false, true) => " on the same data, which is too low a figure",
            (false, false) => "",
        }
    }

    fn arithmetic(&self) -> Option<Verdict> {
        let (reached, share) = self.near(&self.prefill, false);
        (reached > NEAR).then(|| Verdict {
            cause: "arithmetic",
            found: format!(
                "Arithmetic is the limit of prefill: {} of the peaks measured{} ({} of the time is bound by them).",
                percent(reached),
                self.doubt(reached).replace(" on the same data", ""),
                percent(share)
            ),
            mend: "shorter prompts, or a chat, which does not compute again what it shares with the last turn".into(),
        })
    }

    /// Where there is most to gain, when nothing else stands out.
    fn largest(&self) -> Option<Verdict> {
        let lost =
            |row: &Row| row.seconds - self.ceilings.bound(&row.work, self.decode.steps).seconds();
        let row = self.decode.kinds.iter().max_by(|a, b| lost(a).total_cmp(&lost(b)))?;
        Some(Verdict {
            cause: "none",
            found: format!(
                "Nothing stands out. Most of what decode loses against its roofs it loses in {}: {:.3} of {:.3} ms.",
                row.name,
                lost(row).max(0.0) * 1e3,
                self.decode.seconds * 1e3
            ),
            mend: "no flag mends that".into(),
        })
    }
}

/// `1 core`, `2 cores`.
fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// `3.4%`.
fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent < 9.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use delft::{ComputePeaks, Peaks, Work};

    fn row(name: &str, bytes: u64, floats: u64, seconds: f64) -> Row {
        let work = Work { bytes, floats, ..Work::default() };
        Row { name: name.into(), count: 1.0, work, seconds, busy: seconds }
    }

    /// A quiet machine on which everything runs at half of its roof: 10 GB/s, 100 Gop/s in f32.
    fn quiet() -> Evidence {
        let peaks =
            Peaks { isa: "amx", bytes_dot: 2e12, narrow_dot: 0.0, tiles: 4e12, floats: 1e11 };
        let phase = |bytes, floats| Phase {
            steps: 1,
            tokens: 1,
            kinds: vec![row("linear", bytes, floats, 1.0), row("attention", bytes / 100, 0, 0.01)],
            formats: vec![row("q8_0", bytes, 0, 0.65)],
            sampling: 0.001,
            barriers: 0.01,
            rest: 0.001,
            seconds: 1.022,
        };
        Evidence {
            gpu: false,
            threads: 4,
            depth: 100,
            single_cache: false,
            bits: 8.5,
            cache: Some(32 << 20),
            ceilings: Ceilings {
                reads: 1e10,
                limits: ComputePeaks { cores: 4, used: peaks, best: peaks },
            },
            spread: 1.05,
            untimed: 1.0,
            load_average: Some(0.1),
            load_seconds: 0.1,
            loading: Some(Counters::default()),
            running: Some(Counters::default()),
            seconds: 10.0,
            prefill: phase(1_000_000, 50_000_000_000),
            decode: phase(5_000_000_000, 1_000_000),
        }
    }

    #[test]
    fn each_cause_is_found_by_its_number_and_no_other_is() {
        type Spoil = fn(&mut Evidence);
        let cases: &[(&str, &str, &str, Spoil)] = &[
            ("none", "linear", "no flag", |_| {}),
            ("busy", "25%", "top shows them", |e| {
                e.running = Some(Counters { waiting: 10.0, ..Counters::default() });
                e.load_average = Some(2.0);
            }),
            ("busy", "10%", "top", |e| {
                e.running = Some(Counters { stolen: 4.0, ..Counters::default() });
            }),
            ("busy", "1.60 times", "top", |e| e.spread = 1.6),
            ("busy", "2.5 programs wanted 4 cores", "top", |e| e.load_average = Some(2.5)),
            ("threads", "2 of the 4", "--threads 4", |e| e.threads = 2),
            ("threads", "9 on 4 cores", "--threads 4", |e| e.threads = 9),
            ("threads", "3 on 1 core;", "--threads 1,", |e| {
                (e.threads, e.ceilings.limits.cores) = (3, 1);
            }),
            ("threads", "8 on 4 cores", "--threads 4", |e| {
                // What they do to each other: half of the time without a core, and steps of all
                // lengths.
                e.threads = 8;
                e.running = Some(Counters { waiting: 41.0, ..Counters::default() });
                (e.spread, e.decode.barriers, e.decode.kinds[0].busy) = (2.0, 0.4, 0.5);
            }),
            ("paging", "500 pages", "--ctx", |e| {
                e.running = Some(Counters { major_faults: 500, ..Counters::default() });
            }),
            ("cold_file", "300 reads", "next start", |e| {
                e.loading = Some(Counters { major_faults: 300, ..Counters::default() });
            }),
            ("instructions", "scalar was asked for", "DELFT_ISA", |e| {
                e.ceilings.limits.used.isa = "scalar";
            }),
            ("instructions", "avx2 and nothing wider", "smaller model", |e| {
                (e.ceilings.limits.used.isa, e.ceilings.limits.best.isa) = ("avx2", "avx2");
            }),
            ("format", "q3_k weights are read at 2.0 GB/s", "another type", |e| {
                e.decode.formats.push(row("q3_k", 1_000_000_000, 0, 0.5));
            }),
            ("format", "f32 weights multiply in f32", "bf16 or quantised", |e| {
                e.prefill.formats = vec![row("f32", 1_000_000, 50_000_000_000, 1.0)];
            }),
            ("attention", "depth 100", "--rotate", |e| {
                e.decode.kinds[1].seconds = 0.5;
                e.decode.kinds[1].busy = 0.5;
                e.decode.seconds = 1.5;
            }),
            ("sampling", "of a decode step", "--temp 0", |e| e.decode.sampling = 0.2),
            ("imbalance", "of the prefill", "--threads 3", |e| e.decode.kinds[0].busy = 0.6),
            ("barriers", "2 operations", "--threads 2", |e| e.decode.barriers = 0.3),
            ("memory", "of the 10.0 GB/s", "8.5 bits", |e| {
                e.decode.kinds[0].work.bytes = 9_000_000_000;
            }),
            ("cache", "lie in its 32.0 MiB, not in memory", "8.5 bits", |e| {
                e.decode.kinds[0].work.bytes = 9_000_000;
                e.decode.kinds[1].work.bytes = 90_000;
                e.ceilings.reads = 1e7;
            }),
        ];
        for &(cause, figure, mend, spoil) in cases {
            let mut evidence = quiet();
            spoil(&mut evidence);
            let found = evidence.verdicts();
            assert_eq!(found.iter().map(|v| v.cause).collect::<Vec<_>>(), [cause], "{found:?}");
            assert!(found[0].found.contains(figure), "{figure}: {found:?}");
            assert!(found[0].mend.contains(mend), "{mend}: {found:?}");
        }
        let mut evidence = quiet();
        evidence.prefill.kinds[0].work.floats = 90_000_000_000;
        assert_eq!(evidence.verdicts()[0].cause, "arithmetic");
        assert!(evidence.verdicts()[0].found.contains("88% of the peaks measured (98%"));
        evidence.single_cache = true;
        evidence.decode.kinds[1].seconds = 0.9;
        evidence.decode.kinds[1].busy = 0.9;
        assert!(evidence.verdicts().iter().any(|v| v.mend.contains("--cache-type f16")));
    }

    #[test]
    fn a_roof_that_was_measured_beside_others_is_no_fact() {
        let mut evidence = quiet();
        evidence.prefill.kinds[0].work.floats = 150_000_000_000;
        evidence.decode.kinds[0].work.bytes = 15_000_000_000;
        evidence.decode.kinds[0].busy = 0.5;
        evidence.running = Some(Counters { waiting: 10.0, ..Counters::default() });
        let found = evidence.verdicts();
        let causes: Vec<_> = found.iter().map(|v| v.cause).collect();
        assert_eq!(causes, ["busy", "imbalance", "memory", "arithmetic"]);
        for roof in &found[2..] {
            let doubt = "beside other programs, which is too low a figure";
            assert!(roof.found.contains(doubt), "{found:?}");
        }
        // One piece of advice on threads at most.
        assert!(!found.iter().any(|v| v.mend.contains("--threads")), "{found:?}");
    }

    #[test]
    fn too_many_threads_come_first_and_other_programs_only_with_evidence_of_their_own() {
        let mut evidence = quiet();
        evidence.threads = 8;
        evidence.running = Some(Counters { waiting: 60.0, ..Counters::default() });
        let causes: Vec<_> = evidence.verdicts().iter().map(|v| v.cause).collect();
        assert_eq!(causes, ["threads", "busy"]);
    }
}
