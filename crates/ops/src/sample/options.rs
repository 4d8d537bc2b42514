//! Sampling options, checked.

use super::philox;
use formats::{Error, Result};
use std::fmt::Write;
use std::sync::Arc;

/// DRY: a penalty on tokens that would go on with a repetition, growing with the length of what is
/// repeated already.
///
/// p-e-w, "DRY: a modern repetition penalty", text-generation-webui pull request 5677, 2024.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Dry {
    /// The penalty where [`Dry::allowed_length`] tokens are repeated; 0 is off.
    pub multiplier: f32,
    /// Factor of the penalty for each further repeated token.
    pub base: f32,
    /// Repeated tokens that are not penalised yet are fewer than these.
    pub allowed_length: usize,
    /// How many of the latest tokens are looked at.
    pub last_n: usize,
    /// Tokens over which no repetition is followed, ascending.
    pub breakers: Arc<[u32]>,
}

impl Default for Dry {
    fn default() -> Self {
        let breakers = Arc::default();
        Dry { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: usize::MAX, breakers }
    }
}

impl Dry {
    /// Whether it changes anything.
    pub fn is_on(&self) -> bool {
        self.multiplier > 0.0 && self.last_n > 0
    }
}

/// XTC: now and then takes away the likeliest tokens, all that reach a threshold but the least
/// likely of them.
///
/// p-e-w, "Exclude Top Choices", text-generation-webui pull request 6335, 2024. Probabilities are
/// those that the filters before it leave, at the temperature in use.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Xtc {
    /// How often; 0 is off.
    pub probability: f32,
    /// The probability that a token must reach to be taken away. Above 0.5 no two tokens do, and
    /// nothing is.
    pub threshold: f32,
}

impl Default for Xtc {
    fn default() -> Self {
        Xtc { probability: 0.0, threshold: 0.1 }
    }
}

impl Xtc {
    /// Whether it is tried at all.
    pub fn is_on(&self) -> bool {
        self.probability > 0.0 && self.threshold <= 0.5
    }

    /// Whether it takes place at a position.
    pub(super) fn takes_place(&self, seed: u64, position: u64) -> bool {
        // A stream of its own: what is drawn must not depend on it.
        const STREAM: u32 = 1;
        let chance = philox::stream(seed, position, STREAM) >> 32;
        self.is_on() && (chance as f64) < f64::from(self.probability) * (1u64 << 32) as f64
    }

    /// The threshold in units of `2^-32`.
    pub(super) fn share(&self) -> u32 {
        (f64::from(self.threshold) * (1u64 << 32) as f64).round() as u32
    }
}

/// Options of the sampling chain; the default is plain sampling at temperature 1 with everything
/// else off.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Options {
    /// Divides the logits; 0 takes the greatest one.
    pub temperature: f32,
    /// Keeps the `k` most probable tokens; 0 is off.
    pub top_k: usize,
    /// Keeps the most probable tokens until their share reaches it; 1 is off, 0 keeps one token.
    pub top_p: f32,
    /// Keeps tokens at least this many times as probable as the most probable one; 0 is off.
    pub min_p: f32,
    /// Divides positive logits of tokens seen before, and multiplies negative ones (Keskar et al.,
    /// 2019); 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token seen before; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted as often as the token was seen before; 0 is off.
    pub frequency_penalty: f32,
    /// How many of the latest tokens the three penalties look at.
    pub last_n: usize,
    /// Penalises what goes on with a repetition.
    pub dry: Dry,
    /// Takes away the likeliest tokens now and then.
    pub xtc: Xtc,
    /// Added to the logits of tokens; -infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Chooses the random numbers.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            last_n: 64,
            dry: Dry::default(),
            xtc: Xtc::default(),
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Options {
    /// Always the most probable token.
    pub fn greedy() -> Self {
        Options { temperature: 0.0, ..Options::default() }
    }

    /// Whether every number is in its range, for a vocabulary of `vocabulary` tokens.
    ///
    /// # Errors
    /// The first option that is not, with its range.
    pub fn validate(&self, vocabulary: usize) -> Result<()> {
        let range = |name: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            let expected = if high == f32::MAX {
                format!("a number from {low} on")
            } else {
                format!("{low} to {high}")
            };
            Err(Error::new(name, expected, value))
        };
        range("temperature", self.temperature, 0.0, f32::MAX)?;
        range("top_p", self.top_p, 0.0, 1.0)?;
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let error =
                Error::new("repetition_penalty", "a number above 0", self.repetition_penalty);
            return Err(error.hint("1 is off; 1.1 is a mild penalty"));
        }
        range("dry_multiplier", self.dry.multiplier, 0.0, 100.0)?;
        range("dry_base", self.dry.base, 1.0, 100.0)?;
        range("xtc_probability", self.xtc.probability, 0.0, 1.0)?;
        range("xtc_threshold", self.xtc.threshold, 0.0, 1.0)?;
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocabulary {
                return Err(Error::new("logit_bias", format!("a token below {vocabulary}"), token));
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(Error::new(
                    format!("logit_bias of token {token}"),
                    "a number, or -infinity",
                    bias,
                ));
            }
        }
        Ok(())
    }

    /// How many of a sequence's latest tokens the chain looks back on.
    pub fn looks_back(&self) -> usize {
        let penalties = if self.penalises() { self.last_n } else { 0 };
        if self.dry.is_on() { penalties.max(self.dry.last_n) } else { penalties }
    }

    /// Whether any penalty is on.
    pub fn penalises(&self) -> bool {
        self.last_n > 0
            && (self.repetition_penalty != 1.0
                || self.presence_penalty != 0.0
                || self.frequency_penalty != 0.0)
    }

    /// Whether logits are changed before one is chosen.
    pub(super) fn adjusts(&self) -> bool {
        self.penalises() || self.dry.is_on() || !self.logit_bias.is_empty()
    }

    /// Whether only [`Sampler`](super::Sampler) has what they ask for, and not
    /// [`kernels`](super::kernels).
    pub fn needs_host(&self) -> bool {
        self.dry.is_on() || (self.xtc.is_on() && self.per_temperature() != 0.0)
    }

    /// Factor of the differences of logits; 0 where the greatest logit is all that
    /// is wanted.
    pub(super) fn per_temperature(&self) -> f32 {
        if self.temperature == 0.0 || self.top_k == 1 { 0.0 } else { 1.0 / self.temperature }
    }

    /// Top-p in units of `2^-32`; [`u32::MAX`] is off.
    pub(super) fn share(&self) -> u32 {
        if self.top_p >= 1.0 {
            return u32::MAX;
        }
        // The f32 below 1 is 256 units below `2^32`.
        (f64::from(self.top_p) * (1u64 << 32) as f64).round() as u32
    }

    /// The least weight that min-p keeps, in units of `2^-31`; tokens of no weight are never kept.
    pub(super) fn least_weight(&self) -> u32 {
        (f64::from(self.min_p) * f64::from(super::wide::ONE)).ceil().max(1.0) as u32
    }

    /// The steps that are on, in their order: `repetition 1.1 (last 64), temperature 0.7, top-k 40,
    /// draw (seed 1)`.
    pub fn describe(&self) -> String {
        let mut steps: Vec<String> = Vec::new();
        if !self.logit_bias.is_empty() {
            steps.push(format!("bias of {} tokens", self.logit_bias.len()));
        }
        if self.penalises() {
            let mut step = String::new();
            for (name, value, off) in [
                ("repetition", self.repetition_penalty, 1.0),
                ("presence", self.presence_penalty, 0.0),
                ("frequency", self.frequency_penalty, 0.0),
            ] {
                if value != off {
                    // Writing to a string cannot fail.
                    let _ =
                        write!(step, "{}{name} {value}", if step.is_empty() { "" } else { ", " });
                }
            }
            steps.push(format!("{step} (last {})", self.last_n));
        }
        if self.dry.is_on() {
            let Dry { multiplier, base, allowed_length, .. } = self.dry;
            steps.push(format!("DRY {multiplier} x {base}^(length - {allowed_length})"));
        }
        if self.temperature == 0.0 {
            steps.push("greatest logit".to_owned());
        } else {
            steps.push(format!("temperature {}", self.temperature));
            if self.top_k > 0 {
                steps.push(format!("top-k {}", self.top_k));
            }
            if self.top_p < 1.0 {
                steps.push(format!("top-p {}", self.top_p));
            }
            if self.min_p > 0.0 {
                steps.push(format!("min-p {}", self.min_p));
            }
            if self.xtc.is_on() {
                let Xtc { probability, threshold } = self.xtc;
                steps.push(format!("XTC {probability} (threshold {threshold})"));
            }
            steps.push(format!("draw (seed {})", self.seed));
        }
        steps.join(", ")
    }
}
