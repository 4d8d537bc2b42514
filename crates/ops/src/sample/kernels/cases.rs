//! Logits and options worth testing, with what the chain on the CPU makes of them.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Roof, noise};
use tile::dsl::Float;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::arith::IMPOSSIBLE;
use super::{BINS, PART, PER_BIN, Schedule, settings};
use crate::sample::wide::weight;
use crate::sample::{Options, Sampler};

/// Rows of logits with the options of each, and what the kernels are to make of them.
pub(super) struct Trial {
    pub(super) rows: usize,
    pub(super) vocab: usize,
    pub(super) logits: Buffer,
    pub(super) settings: Vec<u32>,
    pub(super) history: Vec<u32>,
    pub(super) biases: Vec<u32>,
    keys: Vec<u32>,
    peaks: Vec<u32>,
    bins: Vec<u32>,
    pub(super) tokens: Vec<u32>,
}

/// The key of a logit: bits that order as the number does, NaN lowest.
fn key(x: f32) -> u32 {
    if x.is_nan() {
        return 0;
    }
    // Zero of either sign.
    let bits = if x == 0.0 { 0 } else { x.to_bits() };
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

impl Trial {
    /// Every row with the next of the options, at the next position.
    pub(super) fn new<T: Float>(
        vocab: usize,
        logits: &[f32],
        history: &[u32],
        all: &[Options],
        position: u64,
    ) -> Trial {
        let logits = Buffer::floats(T::SCALAR, logits);
        let values = logits.to_f32();
        let rows = values.len() / vocab;
        let mut trial = Trial {
            rows,
            vocab,
            logits,
            settings: vec![],
            history: history.to_vec(),
            biases: vec![],
            keys: vec![],
            peaks: vec![],
            bins: vec![],
            tokens: vec![],
        };
        let mut sampler = Sampler::new();
        for (row, x) in values.chunks_exact(vocab).enumerate() {
            let options = &all[row % all.len()];
            let position = position + row as u64;
            trial.tokens.push(sampler.sample(x, history, position, options).token);
            let mut adjusted = x.to_vec();
            sampler.adjust(&mut adjusted, history, options);
            let start = (trial.biases.len() / 2) as u32;
            let pairs = options.logit_bias.iter().flat_map(|(t, b)| [*t, b.to_bits()]);
            trial.biases.extend(pairs);
            let end = (trial.biases.len() / 2) as u32;
            let window = history.len().saturating_sub(options.last_n) as u32..history.len() as u32;
            trial.settings.extend(settings(options, position, window, start..end));
            trial.take(&adjusted, options);
        }
        // A buffer without elements cannot be bound everywhere.
        if trial.biases.is_empty() {
            trial.biases = vec![0; 2];
        }
        if trial.history.is_empty() {
            trial.history = vec![0];
        }
        trial
    }

    /// Adds a row's keys, peaks and bins, from its logits after bias and penalties.
    fn take(&mut self, adjusted: &[f32], options: &Options) {
        let keys: Vec<u32> = adjusted.iter().map(|&x| key(x)).collect();
        for (part, keys) in keys.chunks(PART as usize).enumerate() {
            let top = keys.iter().copied().max().unwrap_or(0);
            let at = keys.iter().position(|&key| key == top).unwrap_or(0);
            self.peaks.extend([top, (part * PART as usize + at) as u32]);
        }
        let mut bins = vec![0; (BINS * PER_BIN) as usize];
        let top = keys.iter().copied().max().unwrap_or(0);
        let filters = options.top_k > 1 || (options.top_k == 0 && options.top_p < 1.0);
        if options.temperature > 0.0 && filters && top > IMPOSSIBLE {
            let greatest = adjusted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for (&x, key) in adjusted.iter().zip(&keys) {
                let weight = u64::from(weight(x, greatest, options.per_temperature()));
                if weight > 0 {
                    let bin = &mut bins[(!key >> 21) as usize * PER_BIN as usize..];
                    bin[0] += 1;
                    let sum = (u64::from(bin[1]) << 32 | u64::from(bin[2])) + weight;
                    (bin[1], bin[2]) = ((sum >> 32) as u32, sum as u32);
                }
            }
        }
        self.keys.extend(keys);
        self.bins.extend(bins);
    }

    fn numbers(&self) -> Numbers {
        Numbers::new().with("rows", self.rows as u32).with("vocab", self.vocab as u32)
    }

    fn zeros(len: usize) -> Buffer {
        Buffer::zeros(Scalar::U32, len)
    }

    pub(super) fn adjust<T: Float>(&self, label: &str) -> Case {
        let exact = |words: &[u32]| Expected::Exact(Buffer::words(words).to_f64());
        Case {
            kernel: super::adjust::<T>(),
            label: format!("{} x {} {}, {label}", self.rows, self.vocab, T::NAME),
            numbers: self.numbers(),
            buffers: vec![
                self.logits.clone(),
                Buffer::words(&self.settings),
                Buffer::words(&self.history),
                Buffer::words(&self.biases),
                Trial::zeros(self.keys.len()),
                Trial::zeros(self.peaks.len()),
                Buffer::words(&vec![7; self.bins.len()]),
            ],
            expected: vec![
                (4, exact(&self.keys)),
                (5, exact(&self.peaks)),
                (6, exact(&vec![0; self.bins.len()])),
            ],
        }
    }

    pub(super) fn weigh(&self, label: &str) -> Case {
        Case {
            kernel: super::weigh(),
            label: format!("{} x {}, {label}", self.rows, self.vocab),
            numbers: self.numbers(),
            buffers: vec![
                Buffer::words(&self.keys),
                Buffer::words(&self.peaks),
                Buffer::words(&self.settings),
                Trial::zeros(self.bins.len()),
            ],
            expected: vec![(3, Expected::Exact(Buffer::words(&self.bins).to_f64()))],
        }
    }

    pub(super) fn pick(&self, schedule: Schedule, label: &str) -> Case {
        Case {
            kernel: super::pick(schedule),
            label: format!("{} x {}, {label}", self.rows, self.vocab),
            numbers: self.numbers(),
            buffers: vec![
                Buffer::words(&self.keys),
                Buffer::words(&self.peaks),
                Buffer::words(&self.settings),
                Buffer::words(&self.bins),
                Trial::zeros(2 * self.keys.len()),
                Trial::zeros(self.rows),
            ],
            expected: vec![(5, Expected::Exact(Buffer::words(&self.tokens).to_f64()))],
        }
    }
}

/// Options that use every step, alone and together.
pub(super) fn options(vocab: usize) -> Vec<Options> {
    let plain = Options { seed: 0x1234_5678_9ABC_DEF0, ..Options::default() };
    let least = f32::NEG_INFINITY;
    let mut all = vec![
        Options { temperature: 0.0, ..plain.clone() },
        plain.clone(),
        Options { temperature: 0.3, ..plain.clone() },
        Options { top_k: 1, ..plain.clone() },
        Options { top_k: 2, ..plain.clone() },
        Options { top_k: 40, ..plain.clone() },
        Options { top_k: 5000, ..plain.clone() },
        Options { top_p: 0.9, ..plain.clone() },
        Options { top_p: 0.0, ..plain.clone() },
        Options { temperature: 2.0, top_p: 0.999, ..plain.clone() },
        Options { min_p: 0.05, ..plain.clone() },
        Options { temperature: 1.5, top_k: 50, top_p: 0.9, min_p: 0.02, ..plain.clone() },
        Options { repetition_penalty: 1.3, ..Options::greedy() },
        Options { presence_penalty: 1.5, frequency_penalty: 0.3, last_n: 20, ..plain.clone() },
        Options {
            temperature: 0.8,
            top_k: 30,
            top_p: 0.95,
            min_p: 0.02,
            repetition_penalty: 1.2,
            presence_penalty: 0.2,
            frequency_penalty: 0.1,
            last_n: 16,
            logit_bias: vec![(7, 1.0), (3, least), (7, 0.3), (0, -2.5), (30, 4.0)],
            seed: 3,
        },
    ];
    all.iter_mut().for_each(|o| o.logit_bias.retain(|(token, _)| (*token as usize) < vocab));
    all
}

/// What changes a noisy row, and why.
type Change = (fn(&mut [f32]), &'static str);

/// Rows whose answers depend on how equals, infinities and NaN are treated.
const CHANGES: [Change; 7] = [
    (|_| (), "noise"),
    (|x| x.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0), "many equals"),
    (|x| x.fill(-3.0), "all equal"),
    (|x| x.iter_mut().skip(1).step_by(3).for_each(|x| *x = f32::NEG_INFINITY), "some impossible"),
    (|x| x.iter_mut().step_by(2).for_each(|x| *x = f32::NAN), "some NaN"),
    (|x| x.fill(f32::NEG_INFINITY), "nothing possible"),
    (|x| x[x.len() / 2] = f32::INFINITY, "an infinite one"),
];

/// Trials of all options: every kind of row at 31 and 1000 tokens, noise at the sizes between which kernels change their way.
fn trials<T: Float>() -> Vec<(Trial, &'static str)> {
    let trial = |vocab: usize, (change, why): Change| {
        let all = options(vocab);
        let mut logits = noise(vocab as u64, vocab * all.len());
        logits.iter_mut().for_each(|x| *x *= 6.0);
        logits.chunks_exact_mut(vocab).for_each(change);
        // A history in which tokens come again, one of them unknown to the vocabulary.
        let history: Vec<u32> = (0..90).map(|i| (i * i + 3) % 57).collect();
        (Trial::new::<T>(vocab, &logits, &history, &all, 100), why)
    };
    let mut found: Vec<_> = [1, 2, 1025].iter().map(|&vocab| trial(vocab, CHANGES[0])).collect();
    found.extend(CHANGES.iter().map(|&change| trial(31, change)));
    found.extend(CHANGES[..5].iter().map(|&change| trial(1000, change)));
    found
}

/// A few rows of a real vocabulary's size.
fn large() -> Trial {
    let vocab = 32_000;
    let mut logits = noise(5, 2 * vocab);
    logits.iter_mut().for_each(|x| *x *= 9.0);
    logits[vocab..].iter_mut().for_each(|x| *x = (*x / 9.0).round());
    let top_p = Options { top_p: 0.9, seed: 1, ..Options::default() };
    Trial::new::<f32>(
        vocab,
        &logits,
        &[5, 9, 9],
        &[top_p.clone(), Options { top_k: 40, ..top_p }],
        7,
    )
}

pub(super) fn adjust() -> Vec<Case> {
    fn of<T: Float>() -> Vec<Case> {
        trials::<T>().iter().map(|(trial, why)| trial.adjust::<T>(why)).collect()
    }
    crate::trial::every_float!(of)
}

pub(super) fn weigh() -> Vec<Case> {
    let mut all: Vec<Case> = trials::<f32>().iter().map(|(trial, why)| trial.weigh(why)).collect();
    all.push(large().weigh("a large vocabulary"));
    all
}

pub(super) fn pick() -> Vec<Case> {
    let case = |(trial, why): &(Trial, &'static str)| trial.pick(super::NARROW, why);
    let mut all: Vec<Case> = trials::<f32>().iter().map(case).collect();
    all.push(large().pick(super::WIDE, "a large vocabulary"));
    all
}

/// A vocabulary of today's models.
const BENCH: usize = 151_936;

/// Rows of logits as models make them, with the filters that most users ask for.
fn bench(rows: usize) -> [(Trial, &'static str); 3] {
    let base = Options { seed: 1, ..Options::default() };
    [
        ("plain", base.clone()),
        ("top-p 0.9", Options { top_p: 0.9, ..base.clone() }),
        (
            "top-k 40, top-p 0.95",
            Options { top_k: 40, top_p: 0.95, repetition_penalty: 1.1, ..base },
        ),
    ]
    .map(|(why, options)| {
        // Sums of four are nearly normal.
        let n = rows * BENCH;
        let noise = noise(3, 4 * n);
        let logits: Vec<f32> = noise.chunks_exact(4).map(|x| x.iter().sum::<f32>() * 2.5).collect();
        let history: Vec<u32> = (0..64).map(|i| i * 997).collect();
        (Trial::new::<f32>(BENCH, &logits, &history, &[options], 1), why)
    })
}

/// The case as a benchmark that must move so many bytes per token of the vocabulary.
fn timed(case: Case, elements: usize, bytes: u64) -> Bench {
    Bench {
        kernel: case.kernel,
        label: case.label,
        numbers: case.numbers,
        buffers: case.buffers.into_iter().map(Fill::These).collect(),
        bytes: elements as u64 * bytes,
        flops: 0,
        roof: Roof::Memory,
    }
}

pub(super) fn adjust_benches() -> Vec<Bench> {
    let each = |(trial, why): (Trial, &str)| timed(trial.adjust::<f32>(why), trial.keys.len(), 8);
    bench(1).into_iter().map(each).collect()
}

pub(super) fn weigh_benches() -> Vec<Bench> {
    let each = |(trial, why): (Trial, &str)| timed(trial.weigh(why), trial.keys.len(), 4);
    bench(1).into_iter().map(each).collect()
}

pub(super) fn pick_benches() -> Vec<Bench> {
    let each =
        |(trial, why): (Trial, &str)| timed(trial.pick(super::WIDE, why), trial.keys.len(), 4);
    bench(1).into_iter().map(each).collect()
}
