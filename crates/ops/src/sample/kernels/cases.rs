//! Logits and options worth testing, with what the chain on the CPU makes of them.

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::arith::IMPOSSIBLE;
use super::{BINS, BLOCK, CutSchedule, NOTHING, PART, PER_BIN, settings};
use crate::sample::wide::{forbid, weight};
use crate::sample::{Options, Sampler, share_of};

/// Rows of logits with the options of each, and what the kernels are to make of them.
pub(super) struct Trial {
    pub(super) rows: usize,
    pub(super) vocab: usize,
    pub(super) logits: Buffer,
    pub(super) settings: Vec<u32>,
    pub(super) history: Vec<u32>,
    pub(super) biases: Vec<u32>,
    pub(super) masks: Vec<u32>,
    keys: Vec<u32>,
    peaks: Vec<u32>,
    bins: Vec<u32>,
    /// The last token that top-k and top-p keep: zeros for rows without.
    cuts: Vec<u32>,
    pub(super) tokens: Vec<u32>,
}

/// In the place of keys that are not written: the greatest of all, were they read.
const UNREAD: u32 = u32::MAX;

/// The key of a logit: bits that order as the number does, NaN lowest.
fn key(x: f32) -> u32 {
    if x.is_nan() {
        return 0;
    }
    // Zero of either sign.
    let bits = if x == 0.0 { 0 } else { x.to_bits() };
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// A token that weighs anything; the greatest logit has the lowest rank.
#[derive(Clone, Copy)]
struct Ranked {
    rank: u32,
    token: u32,
    weight: u64,
}

/// The last token that top-k and top-p leave, by sorting: as much of its rank and then of its id as
/// tells it from all others, digit by digit, and ones; zeros where there are no tokens.
fn last_kept(mut tokens: Vec<Ranked>, options: &Options) -> [u32; 2] {
    tokens.sort_by_key(|t| (t.rank, t.token));
    let all = tokens.clone();
    if options.top_k > 0 {
        tokens.truncate(options.top_k);
    }
    if options.share() != u32::MAX {
        let wanted = share_of(tokens.iter().map(|t| t.weight).sum(), options.share());
        let mut sum = 0;
        let reached = tokens.iter().position(|t| {
            sum += t.weight;
            sum >= wanted
        });
        tokens.truncate(reached.map_or(0, |last| last + 1));
    }
    let Some(last) = tokens.last() else { return [0; 2] };
    let wide = |t: &Ranked| u64::from(t.rank) << 32 | u64::from(t.token);
    // Of a token's id the upper ten bits are always zero.
    let lengths = [11, 22, 32, 53];
    let alone = |bits: &u32| {
        let upper = |t: &Ranked| wide(t) >> (64 - bits);
        all.iter().filter(|t| upper(t) == upper(last)).count() == 1
    };
    let known = lengths.iter().find(|bits| alone(bits)).map_or(0, |bits| u64::MAX >> bits);
    let cut = wide(last) | known;
    [(cut >> 32) as u32, cut as u32]
}

impl Trial {
    /// Every row with the next of the options, at the next position, and no masks.
    pub(super) fn new(
        scalar: Scalar,
        vocab: usize,
        logits: &[f32],
        history: &[u32],
        all: &[Options],
        position: u64,
    ) -> Trial {
        Trial::masked(scalar, vocab, logits, history, all, position, |_| None)
    }

    /// As [`Trial::new`], with the masks of some rows.
    fn masked(
        scalar: Scalar,
        vocab: usize,
        logits: &[f32],
        history: &[u32],
        all: &[Options],
        position: u64,
        mask: impl Fn(usize) -> Option<Vec<u32>>,
    ) -> Trial {
        let logits = Buffer::floats(scalar, logits);
        let values = logits.to_f32();
        let rows = values.len() / vocab;
        let mut trial = Trial {
            rows,
            vocab,
            logits,
            settings: vec![],
            history: history.to_vec(),
            biases: vec![],
            masks: vec![],
            keys: vec![],
            peaks: vec![],
            bins: vec![],
            cuts: vec![],
            tokens: vec![],
        };
        let mut sampler = Sampler::new();
        for (row, x) in values.chunks_exact(vocab).enumerate() {
            let options = &all[row % all.len()];
            let mask = mask(row);
            let plain = mask.is_none()
                && options.logit_bias.is_empty()
                && (history.is_empty() || !options.penalises());
            let position = position + row as u64;
            let choice = sampler.sample(x, history, position, options, mask.as_deref());
            trial.tokens.push(choice.map_or(NOTHING, |choice| choice.token));
            let mut adjusted = x.to_vec();
            mask.iter().for_each(|mask| forbid(&mut adjusted, mask));
            sampler.adjust(&mut adjusted, history, options);
            let start = (trial.biases.len() / 2) as u32;
            let pairs = options.logit_bias.iter().flat_map(|(t, b)| [*t, b.to_bits()]);
            trial.biases.extend(pairs);
            let end = (trial.biases.len() / 2) as u32;
            let window = history.len().saturating_sub(options.last_n) as u32..history.len() as u32;
            let first = mask.as_ref().map(|_| trial.masks.len() as u32);
            trial.masks.extend(mask.into_iter().flatten());
            trial.settings.extend(settings(options, position, window, start..end, first));
            trial.take(&adjusted, options, plain);
        }
        // A buffer without elements cannot be bound everywhere.
        if trial.biases.is_empty() {
            trial.biases = vec![0; 2];
        }
        for words in [&mut trial.history, &mut trial.masks] {
            if words.is_empty() {
                words.push(0);
            }
        }
        trial
    }

    /// Adds a row's keys, peaks and bins, from its logits after mask, bias and penalties; of a row
    /// that is `plain`, which has none of them, numbers that nobody may read stand in the place of
    /// keys.
    fn take(&mut self, adjusted: &[f32], options: &Options, plain: bool) {
        let keys: Vec<u32> = adjusted.iter().map(|&x| key(x)).collect();
        for (part, keys) in keys.chunks(PART as usize).enumerate() {
            let top = keys.iter().copied().max().unwrap_or(0);
            let at = keys.iter().position(|&key| key == top).unwrap_or(0);
            self.peaks.extend([top, (part * PART as usize + at) as u32]);
        }
        let mut bins = vec![0; (BINS * PER_BIN) as usize];
        let top = keys.iter().copied().max().unwrap_or(0);
        let filters = options.top_k > 1 || (options.top_k == 0 && options.top_p < 1.0);
        let mut weighty = vec![];
        if options.temperature > 0.0 && filters && top > IMPOSSIBLE {
            let greatest = adjusted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for (token, (&x, key)) in (0..).zip(adjusted.iter().zip(&keys)) {
                let weight = u64::from(weight(x, greatest, options.per_temperature()));
                if weight > 0 {
                    weighty.push(Ranked { rank: !key, token, weight });
                    let bin = &mut bins[(!key >> 21) as usize * PER_BIN as usize..];
                    bin[0] += 1;
                    let sum = (u64::from(bin[1]) << 32 | u64::from(bin[2])) + weight;
                    (bin[1], bin[2]) = ((sum >> 32) as u32, sum as u32);
                }
            }
        }
        self.keys.extend(keys.into_iter().map(|key| if plain { UNREAD } else { key }));
        self.bins.extend(bins);
        self.cuts.extend(last_kept(weighty, options));
    }

    fn numbers(&self) -> Numbers {
        Numbers::new().with("rows", self.rows as u32).with("vocab", self.vocab as u32)
    }

    fn zeros(len: usize) -> Buffer {
        Buffer::zeros(Scalar::U32, len)
    }

    pub(super) fn adjust(&self, scalar: Scalar, label: &str) -> Case {
        let exact = |words: &[u32]| Expected::Exact(Buffer::words(words).to_f64());
        Case {
            kernel: super::adjust(scalar).record(),
            label: format!("{} x {} {}, {label}", self.rows, self.vocab, scalar),
            numbers: self.numbers(),
            buffers: vec![
                self.logits.clone(),
                Buffer::words(&self.settings),
                Buffer::words(&self.history),
                Buffer::words(&self.biases),
                Buffer::words(&self.masks),
                Buffer::words(&vec![UNREAD; self.keys.len()]),
                Trial::zeros(self.peaks.len()),
                Buffer::words(&vec![7; self.bins.len()]),
            ],
            expected: vec![
                (5, exact(&self.keys)),
                (6, exact(&self.peaks)),
                (7, exact(&vec![0; self.bins.len()])),
            ],
        }
    }

    /// A case of a kernel that reads logits or keys, their peaks and the settings, and has these
    /// buffers besides.
    fn of_keys(
        &self,
        kernel: Recipe,
        label: &str,
        more: Vec<Buffer>,
        expected: Vec<(usize, &[u32])>,
    ) -> Case {
        let mut buffers = vec![self.logits.clone()];
        buffers.extend([&self.keys, &self.peaks, &self.settings].map(|w| Buffer::words(w)));
        buffers.extend(more);
        let exact = |(at, words)| (at, Expected::Exact(Buffer::words(words).to_f64()));
        Case {
            kernel: kernel.record(),
            label: format!("{} x {}, {label}", self.rows, self.vocab),
            numbers: self.numbers(),
            buffers,
            expected: expected.into_iter().map(exact).collect(),
        }
    }

    pub(super) fn weigh(&self, label: &str) -> Case {
        let more = vec![Trial::zeros(self.bins.len())];
        self.of_keys(super::weigh(), label, more, vec![(4, &self.bins)])
    }

    pub(super) fn cut(&self, schedule: CutSchedule, label: &str) -> Case {
        let scratch = Trial::zeros(2 * self.keys.len());
        let more = vec![Buffer::words(&self.bins), scratch, Trial::zeros(2 * self.rows)];
        self.of_keys(super::cut(schedule), label, more, vec![(6, &self.cuts)])
    }

    pub(super) fn draw(&self, label: &str) -> Case {
        let totals = Trial::zeros(2 * self.rows * self.vocab.div_ceil(BLOCK as usize));
        let arrived = Trial::zeros(self.rows);
        let tokens = Buffer::words(&vec![7; self.rows]);
        let more = vec![Buffer::words(&self.cuts), totals, arrived, tokens];
        let none = vec![0; self.rows];
        self.of_keys(super::draw(), label, more, vec![(6, &none), (7, &self.tokens)])
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
            ..plain.clone()
        },
    ];
    all.iter_mut().for_each(|o| o.logit_bias.retain(|(token, _)| (*token as usize) < vocab));
    all
}

/// A change of a noisy row, and its reason.
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

/// Trials of all options: every kind of row at 31 and 1000 tokens, noise at the sizes between which
/// kernels change their way.
fn trials(scalar: Scalar) -> Vec<(Trial, &'static str)> {
    let trial = |vocab: usize, (change, why): Change, masks: bool| {
        let all = options(vocab);
        let mut logits = noise(vocab as u64, vocab * all.len());
        logits.iter_mut().for_each(|x| *x *= 6.0);
        logits.chunks_exact_mut(vocab).for_each(change);
        // A history in which tokens come again, one of them unknown to the vocabulary.
        let history: Vec<u32> = (0..90).map(|i| (i * i + 3) % 57).collect();
        let mask = |row| masks.then(|| mask(row, vocab)).flatten();
        (Trial::masked(scalar, vocab, &logits, &history, &all, 100, mask), why)
    };
    let noise = |&vocab: &usize| trial(vocab, CHANGES[0], false);
    let mut found: Vec<_> = [1, 2, 1025, 4097].iter().map(noise).collect();
    found.extend(CHANGES.iter().map(|&change| trial(31, change, false)));
    found.extend(CHANGES[..5].iter().map(|&change| trial(1000, change, false)));
    let masked = |vocab| trial(vocab, (CHANGES[0].0, "masks"), true);
    found.extend([33, 1000, 4097].map(masked));
    found.push(trial(31, (CHANGES[4].0, "masks beside NaN"), true));
    found
}

/// The masks of rows: of every other token or so, of a few, of the last alone, of none, of all; and
/// every sixth row has none.
fn mask(row: usize, vocab: usize) -> Option<Vec<u32>> {
    let bits = |allowed: &dyn Fn(usize) -> bool| {
        let mut words = vec![0; vocab.div_ceil(32)];
        let tokens = (0..vocab).filter(|token| allowed(*token));
        tokens.for_each(|token| words[token / 32] |= 1 << (token % 32));
        words
    };
    match row % 6 {
        0 => Some(bits(&|token| (token * token + row) % 7 < 3)),
        1 => Some(bits(&|token| (token + 11 * row) % 97 == 5)),
        2 => Some(bits(&|token| token + 1 == vocab)),
        3 => Some(bits(&|_| false)),
        4 => Some(vec![u32::MAX; vocab.div_ceil(32)]),
        _ => None,
    }
}

/// A few rows of a real vocabulary's size.
fn large() -> Trial {
    let vocab = 32_000;
    let mut logits = noise(5, 2 * vocab);
    logits.iter_mut().for_each(|x| *x *= 9.0);
    logits[vocab..].iter_mut().for_each(|x| *x = (*x / 9.0).round());
    let top_p = Options { top_p: 0.9, seed: 1, ..Options::default() };
    Trial::new(
        Scalar::F32,
        vocab,
        &logits,
        &[5, 9, 9],
        &[top_p.clone(), Options { top_k: 40, ..top_p }],
        7,
    )
}

/// A row of more blocks than [`super::draw`] has threads.
fn crowded() -> Trial {
    let vocab = 257 * BLOCK as usize;
    let logits = noise(6, vocab);
    Trial::new(Scalar::F32, vocab, &logits, &[], &[Options { seed: 4, ..Options::default() }], 7)
}

pub(super) fn adjust() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        trials(scalar).iter().map(|(trial, why)| trial.adjust(scalar, why)).collect()
    }
    crate::trial::every_float(of)
}

pub(super) fn weigh() -> Vec<Case> {
    let mut all: Vec<Case> =
        trials(Scalar::F32).iter().map(|(trial, why)| trial.weigh(why)).collect();
    all.push(large().weigh("a large vocabulary"));
    all
}

pub(super) fn cut() -> Vec<Case> {
    let case = |(trial, why): &(Trial, &'static str)| trial.cut(super::NARROW, why);
    let mut all: Vec<Case> = trials(Scalar::F32).iter().map(case).collect();
    all.push(large().cut(super::WIDE, "a large vocabulary"));
    all
}

pub(super) fn draw() -> Vec<Case> {
    let mut all: Vec<Case> =
        trials(Scalar::F32).iter().map(|(trial, why)| trial.draw(why)).collect();
    all.push(large().draw("a large vocabulary"));
    all.push(crowded().draw("more blocks than threads"));
    all
}

/// A vocabulary of today's models.
const BENCH: usize = 151_936;

/// A row of logits as models make them, with the filters that most users ask for.
fn bench() -> [(Trial, &'static str); 4] {
    let base = Options { seed: 1, ..Options::default() };
    [
        ("plain", base.clone(), false),
        ("top-p 0.9", Options { top_p: 0.9, ..base.clone() }, false),
        (
            "top-k 40, top-p 0.95",
            Options { top_k: 40, top_p: 0.95, repetition_penalty: 1.1, ..base.clone() },
            false,
        ),
        ("a mask, top-p 0.9", Options { top_p: 0.9, ..base }, true),
    ]
    .map(|(why, options, masked)| {
        // Sums of four are nearly normal.
        let noise = noise(3, 4 * BENCH);
        let logits: Vec<f32> = noise.chunks_exact(4).map(|x| x.iter().sum::<f32>() * 2.5).collect();
        let history: Vec<u32> = (0..64).map(|i| i * 997).collect();
        let mask = |_| masked.then(|| mask(0, BENCH)).flatten();
        (Trial::masked(Scalar::F32, BENCH, &logits, &history, &[options], 1, mask), why)
    })
}

/// The case of one row as benchmarks, of it and of 128 alike, that must move so many bytes per
/// token of the vocabulary.
fn timed(case: Case, bytes: usize) -> Vec<Bench> {
    let bench = |rows: usize| {
        let many = |buffer: &Buffer| {
            Fill::These(Buffer { bytes: buffer.bytes.repeat(rows), ..buffer.clone() })
        };
        Bench {
            kernel: case.kernel.clone(),
            label: format!("{rows} of {}", case.label),
            numbers: case.numbers.clone().with("rows", rows as u32),
            buffers: case.buffers.iter().map(many).collect(),
            bytes: (rows * BENCH * bytes) as u64,
            flops: 0,
            roof: Bottleneck::Memory,
        }
    };
    [1, 128].map(bench).into()
}

pub(super) fn adjust_benches() -> Vec<Bench> {
    let each = |(trial, why): (Trial, &str)| timed(trial.adjust(Scalar::F32, why), 4);
    bench().into_iter().flat_map(each).collect()
}

pub(super) fn weigh_benches() -> Vec<Bench> {
    let each = |(trial, why): (Trial, &str)| timed(trial.weigh(why), 4);
    bench().into_iter().flat_map(each).collect()
}

pub(super) fn cut_benches() -> Vec<Bench> {
    let each = |(trial, why): (Trial, &str)| timed(trial.cut(super::WIDE, why), 4);
    bench().into_iter().skip(1).flat_map(each).collect()
}

pub(super) fn draw_benches() -> Vec<Bench> {
    let each = |(trial, why): (Trial, &str)| timed(trial.draw(why), 4);
    bench().into_iter().flat_map(each).collect()
}
