//! Sampling: from the logits of one position to a token.
//!
//! The chain, in this order: mask, logit bias, repetition, presence and frequency penalties, DRY;
//! then at temperature 0 the greatest logit, else temperature, top-k, top-p, min-p, XTC and a draw.
//! Each of the first three filters keeps a prefix of the tokens in order of descending logit (lower
//! id first among equals), and never nothing; [`Xtc`] then takes the beginning away.
//!
//! A draw takes its randomness from a counter generator keyed by (seed, position). A token's weight
//! is a whole number, `floor(2^31 e^((logit - greatest) / temperature))` by arithmetic that every
//! machine does alike (`wide`), so that sums are exact in any order: the
//! same logits give the same token on every machine, in every batch, and from [`kernels`], the same
//! chain on a device.

mod dry;
pub mod kernels;
mod options;
pub mod philox;
mod wide;

pub use options::{Dry, Options, Xtc};

use wide::{BLOCK, any_broken, block_sums, forbid, prefix_floor, sum_exp, tops, weigh, weight};

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability under the model itself: of the logits as they came, at
    /// temperature 1. NaN if one of those is NaN or infinity.
    pub logprob: f32,
}

/// The first logit of a row from which nothing may be chosen, with its token: NaN or infinity, or
/// minus infinity where no logit is more. Single ones of minus infinity are tokens that a model
/// rules out.
///
/// The chain itself passes over NaN, so that it gives a token whatever comes: who runs a model asks
/// here first.
pub fn broken(logits: &[f32]) -> Option<(u32, f32)> {
    let find = |odd: fn(&f32) -> bool| logits.iter().position(odd);
    let first = match any_broken(logits) {
        true => find(|x| x.is_nan() || *x == f32::INFINITY),
        false if logits.iter().all(|x| *x == f32::NEG_INFINITY) => Some(0),
        false => None,
    };
    first.and_then(|token| Some((token as u32, *logits.get(token)?)))
}

/// A token that the filters have kept so far.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    /// Its logit after bias and penalties.
    logit: f32,
    /// `e^((logit - greatest) / temperature)` in units of `2^-31`.
    weight: u32,
}

/// The chain with its scratch: after the first call of a vocabulary's size nothing is allocated.
#[derive(Debug, Clone, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    /// Occurrences of each token in the window; zero between calls.
    counts: Vec<u32>,
    /// The greatest logit of every block.
    tops: Vec<f32>,
    /// The blocks' greatest logits, for selection.
    blocks: Vec<f32>,
    /// The blocks' sums of weights, for a draw.
    sums: Vec<u64>,
    /// In order of token ids.
    candidates: Vec<Candidate>,
    /// The same in another order, for selection.
    heavy: Vec<Candidate>,
    /// How far the history repeats what it ends with.
    repeats: dry::Repeats,
}

impl Sampler {
    /// A sampler without scratch yet.
    pub fn new() -> Sampler {
        Sampler::default()
    }

    /// Samples the token at `position` (the index it will have in the sequence). `logits` is
    /// `[vocabulary]`; `history` is the sequence so far, which penalties look back on. `mask` has a
    /// bit for each token, the lowest of the first word for token 0: those that may be chosen.
    ///
    /// NaN counts as impossible. None if every token is impossible, or there is none.
    pub fn token(
        &mut self,
        logits: &[f32],
        history: &[u32],
        position: u64,
        options: &Options,
        mask: Option<&[u32]>,
    ) -> Option<u32> {
        if !options.adjusts() && mask.is_none() {
            return self.choose(logits, position, options);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        if let Some(mask) = mask {
            forbid(&mut adjusted, mask);
        }
        self.adjust(&mut adjusted, history, options);
        let token = self.choose(&adjusted, position, options);
        self.adjusted = adjusted;
        token
    }

    /// As [`Sampler::token`], and its log-probability, for which every logit is read once more; NaN
    /// of logits that are [`broken`].
    pub fn sample(
        &mut self,
        logits: &[f32],
        history: &[u32],
        position: u64,
        options: &Options,
        mask: Option<&[u32]>,
    ) -> Option<Choice> {
        let token = self.token(logits, history, position, options, mask)?;
        if any_broken(logits) {
            return Some(Choice { token, logprob: f32::NAN });
        }
        if options.adjusts() || mask.is_some() {
            tops(logits, &mut self.tops);
        }
        let greatest = self.tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let logit = logits[token as usize];
        let gap = if logit == greatest { 0.0 } else { f64::from(logit) - f64::from(greatest) };
        let logprob = (gap - sum_exp(logits, greatest, 1.0).ln()) as f32;
        Some(Choice { token, logprob })
    }

    /// Bias, then penalties, then DRY, of a copy of the logits.
    fn adjust(&mut self, logits: &mut [f32], history: &[u32], options: &Options) {
        for &(token, bias) in &options.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if options.penalises() {
            self.penalise(logits, history, options);
        }
        if options.dry.is_on() {
            self.repeats.penalise(logits, history, &options.dry);
        }
    }

    /// Repetition, presence and frequency penalties.
    fn penalise(&mut self, logits: &mut [f32], history: &[u32], options: &Options) {
        if self.counts.len() < logits.len() {
            self.counts.resize(logits.len(), 0);
        }
        let window = &history[history.len().saturating_sub(options.last_n)..];
        for &token in window {
            if let Some(count) = self.counts.get_mut(token as usize) {
                *count += 1;
            }
        }
        for &token in window {
            let (Some(count), Some(logit)) =
                (self.counts.get_mut(token as usize), logits.get_mut(token as usize))
            else {
                continue;
            };
            // Taking the count leaves zero: a token that comes again is not penalised again.
            let count = std::mem::take(count);
            if count > 0 {
                let r = options.repetition_penalty;
                let factor = if *logit > 0.0 { 1.0 / r } else { r };
                let less =
                    options.frequency_penalty.mul_add(count as f32, options.presence_penalty);
                *logit = logit.mul_add(factor, -less);
            }
        }
    }

    /// The rest of the chain, which leaves the blocks' greatest logits behind.
    fn choose(&mut self, logits: &[f32], position: u64, options: &Options) -> Option<u32> {
        tops(logits, &mut self.tops);
        let greatest = self.tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if greatest == f32::NEG_INFINITY {
            return None;
        }
        let per_temperature = options.per_temperature();
        if per_temperature == 0.0 {
            return self.collect(logits, greatest).first().map(|candidate| candidate.token);
        }
        let random = philox::bits(options.seed, position);
        let excludes = options.xtc.takes_place(options.seed, position);
        if options.top_k == 0 && options.top_p >= 1.0 && options.min_p <= 0.0 && !excludes {
            return Some(self.draw_from_all(logits, greatest, per_temperature, random));
        }
        let total = self.candidates(logits, greatest, per_temperature, options);
        weigh(&mut self.candidates, greatest, per_temperature);
        self.top_k(options.top_k);
        self.top_p(options.share(), total);
        let least = options.least_weight();
        self.candidates.retain(|candidate| candidate.weight >= least);
        if excludes {
            self.exclude(&options.xtc);
        }
        let total = self.candidates.iter().map(|candidate| u64::from(candidate.weight)).sum();
        let kept = self.candidates.iter().map(|candidate| (candidate.token, candidate.weight));
        Some(draw(kept, fraction(total, random)))
    }

    /// Collects the tokens whose logit is at least `floor`, in order of ids.
    fn collect(&mut self, logits: &[f32], floor: f32) -> &[Candidate] {
        self.candidates.clear();
        for (index, (&top, block)) in self.tops.iter().zip(logits.chunks(BLOCK)).enumerate() {
            if top >= floor {
                for (i, &logit) in block.iter().enumerate() {
                    if logit >= floor {
                        self.candidates.push(Candidate {
                            token: (index * BLOCK + i) as u32,
                            logit,
                            weight: 0,
                        });
                    }
                }
            }
        }
        &self.candidates
    }

    /// Collects what can survive the filters: cheaply, without sorting the vocabulary, and never
    /// too little. Returns the weight of the whole vocabulary where top-p had to know it.
    fn candidates(
        &mut self,
        logits: &[f32],
        greatest: f32,
        per_temperature: f32,
        options: &Options,
    ) -> Option<u64> {
        let (mut floor, mut total) = (f32::MIN, None);
        // Of the k-th greatest among the blocks' tops it is known that k logits reach it.
        if (1..self.tops.len()).contains(&options.top_k) {
            self.blocks.clear();
            self.blocks.extend_from_slice(&self.tops);
            floor = *self.blocks.select_nth_unstable_by(options.top_k - 1, |a, b| b.total_cmp(a)).1;
        } else if options.top_k == 0 && options.top_p < 1.0 && greatest.is_finite() {
            let (lower, sum) =
                prefix_floor(logits, greatest, per_temperature, share_of, options.share());
            floor = lower;
            total = Some(sum);
        }
        if options.min_p > 0.0 && options.top_p >= 1.0 && greatest.is_finite() {
            let least = f64::from(options.min_p) * 0.999;
            let lowest = f64::from(greatest) + least.ln() * f64::from(options.temperature);
            // A little below, against the rounding of differences between large logits.
            floor = floor.max((lowest - 1e-6 * f64::from(greatest).abs()) as f32);
        }
        self.collect(logits, floor.min(greatest));
        total
    }

    /// Keeps the `k` greatest; all for 0.
    fn top_k(&mut self, k: usize) {
        if k == 0 || k >= self.candidates.len() {
            return;
        }
        self.heavy.clone_from(&self.candidates);
        let last = *self.heavy.select_nth_unstable_by(k - 1, descending).1;
        self.candidates.retain(|candidate| descending(candidate, &last).is_le());
    }

    /// Keeps the smallest prefix whose weight reaches `share` (in units of `2^-32`): of `total`, or
    /// of the candidates.
    fn top_p(&mut self, share: u32, total: Option<u64>) {
        if share == u32::MAX {
            return;
        }
        let weight = |kept: &[Candidate]| kept.iter().map(|c| u64::from(c.weight)).sum::<u64>();
        let mut wanted = share_of(total.unwrap_or_else(|| weight(&self.candidates)), share);
        self.heavy.clone_from(&self.candidates);
        // Halve the range in which the prefix ends, until it is one token: linear time, without a
        // full sort.
        let mut range = &mut self.heavy[..];
        while range.len() > 1 {
            let middle = range.len() / 2;
            range.select_nth_unstable_by(middle, descending);
            let (left, right) = range.split_at_mut(middle);
            let sum = weight(left);
            if sum >= wanted {
                range = left;
            } else {
                wanted -= sum;
                range = right;
            }
        }
        if let Some(&last) = range.first() {
            self.candidates.retain(|candidate| descending(candidate, &last).is_le());
        }
    }

    /// XTC: of the candidates whose share reaches the threshold, keeps the least.
    fn exclude(&mut self, xtc: &Xtc) {
        let total = self.candidates.iter().map(|candidate| u64::from(candidate.weight)).sum();
        let least = share_of(total, xtc.share());
        let reaches = |candidate: &&Candidate| u64::from(candidate.weight) >= least;
        let last = self.candidates.iter().filter(reaches).max_by(|a, b| descending(a, b)).copied();
        if let Some(last) = last {
            self.candidates.retain(|candidate| descending(candidate, &last).is_ge());
        }
    }

    /// A draw from the whole vocabulary: first the block, then the token in it.
    fn draw_from_all(
        &mut self,
        logits: &[f32],
        greatest: f32,
        per_temperature: f32,
        random: u64,
    ) -> u32 {
        block_sums(logits, greatest, per_temperature, &mut self.sums);
        let mut left = fraction(self.sums.iter().sum(), random);
        for ((index, block), &sum) in logits.chunks(BLOCK).enumerate().zip(&self.sums) {
            if left < sum {
                let weights = block.iter().map(|&logit| weight(logit, greatest, per_temperature));
                return draw(((index * BLOCK) as u32..).zip(weights), left);
            }
            left -= sum;
        }
        // The fraction is below the sum.
        0
    }
}

/// `random / 2^64` of a total, rounded down: below the total.
fn fraction(total: u64, random: u64) -> u64 {
    ((u128::from(total) * u128::from(random)) >> 64) as u64
}

/// `share / 2^32` of a total, rounded up, and never nothing.
fn share_of(total: u64, share: u32) -> u64 {
    (u128::from(total) * u128::from(share)).div_ceil(1 << 32).max(1) as u64
}

/// The first token, in order of ids, up to which the weights are more than `left`.
fn draw(weights: impl Iterator<Item = (u32, u32)>, mut left: u64) -> u32 {
    let mut last = 0;
    for (token, weight) in weights {
        last = token;
        if left < u64::from(weight) {
            break;
        }
        left -= u64::from(weight);
    }
    last
}

/// The greater logit first; the lower token first among equals.
fn descending(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    // Candidates are never NaN. Zeros of both signs are equal here, as they are in every other
    // comparison.
    let logits = b.logit.partial_cmp(&a.logit).unwrap_or(std::cmp::Ordering::Equal);
    logits.then(a.token.cmp(&b.token))
}

#[cfg(test)]
mod tests;
