//! Rotary frequencies from a configuration: plain, `linear`, `llama3`, `yarn`, `dynamic`,
//! `longrope`, `proportional`, or stored per-pair factors.

use crate::stated::Stated;
use formats::Result;
use nn::{Pairing, Rope};
use std::f64::consts::TAU;
use std::sync::Arc;

/// A rotation of q and k as a configuration states it.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    /// The base.
    pub(crate) theta: Stated<f64>,
    /// The elements of each head that turn, if not all.
    pub(crate) rotary: Option<Stated<usize>>,
    /// How frequencies are stretched.
    pub(crate) scaling: Stated<Scaling>,
}

impl Rotation {
    /// Whether nothing says how much of each head turns.
    pub(crate) fn is_open(&self) -> bool {
        self.rotary.is_none() && !matches!(self.scaling.value, Scaling::Proportional { .. })
    }

    /// The rotation of heads of `head_dim` elements that `stated` describes, for a context of
    /// `context` positions.
    ///
    /// # Errors
    /// A part of the head that is no number of pairs, or what [`frequencies`] refuses, by key.
    pub(crate) fn rope(
        &self,
        head_dim: usize,
        stated: &Stated<usize>,
        pairing: Pairing,
        context: usize,
    ) -> Result<Rope> {
        let rotary = match &self.rotary {
            Some(rotary) if !rotary.value.is_multiple_of(2) => {
                return Err(rotary.wrong(format!("an even number up to {head_dim}"), rotary.value));
            }
            Some(rotary) => rotary.within(2..=head_dim)?,
            None if head_dim.is_multiple_of(2) => head_dim,
            None => return Err(stated.wrong("heads of an even size, to be rotated", head_dim)),
        };
        let frequencies = frequencies(self.theta.positive()?, rotary, &self.scaling, context)?;
        Ok(Rope {
            head_dim,
            pairing,
            frequencies,
            magnitude: self.scaling.value.magnitude(context),
        })
    }
}

/// How the frequencies are stretched for contexts longer than the trained one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Scaling {
    /// As trained.
    None,
    /// Every frequency divided by `factor` (Chen et al. 2023).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Llama 3.1: wavelengths beyond `original / low` are divided by `factor`, those below
    /// `original / high` kept, the rest interpolated.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
        /// `original_max_position_embeddings`.
        original: f64,
    },
    /// See [`Yarn`].
    Yarn(Yarn),
    /// Every pair divided by its own factor: GGUF's `rope_freqs`.
    Factors(Vec<f32>),
    /// LongRoPE (Ding et al. 2024): every pair divided by a factor of its own, which is another one
    /// for contexts longer than the one that was trained first.
    Long {
        /// Up to `original` positions.
        short: Vec<f32>,
        /// Beyond them.
        long: Vec<f32>,
        /// `original_max_position_embeddings`.
        original: f64,
        /// The factor on sines and cosines, up to `original` positions and beyond them.
        magnitudes: [f64; 2],
    },
    /// The first pairs of the whole head turn as they would if all did, divided by `factor`; the
    /// others stay.
    Proportional {
        /// The part of the pairs that turns.
        part: f64,
        /// At least 1.
        factor: f64,
    },
    /// A base that grows with the context beyond the trained one, so that the slowest pair is
    /// stretched by as much.
    Dynamic {
        /// At least 1.
        factor: f64,
        /// The trained context.
        original: f64,
    },
}

/// YaRN (Peng et al. 2023): pairs that turn more than `fast` times within the trained context are
/// kept, those that turn less than `slow` times are divided by `factor`, the rest interpolated by
/// their number.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Yarn {
    /// At least 1.
    pub(crate) factor: f64,
    /// Positions of the trained context.
    pub(crate) original: f64,
    /// `beta_fast`: 32 in the paper.
    pub(crate) fast: f64,
    /// `beta_slow`: 1 in the paper.
    pub(crate) slow: f64,
    /// Whether the interpolated pairs are widened to whole numbers.
    pub(crate) truncate: bool,
    /// The factor on sines and cosines.
    pub(crate) magnitude: f64,
}

impl Yarn {
    /// The paper's magnitude for a context `factor` times as long, its logarithm weighted with
    /// `scale`.
    pub(crate) fn magnitude(factor: f64, scale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
    }

    /// Refuses a stretched context of more than `most` positions; `factor` states by how much it is
    /// stretched.
    pub(crate) fn check(&self, factor: &Stated<f64>, most: usize) -> Result<()> {
        let context = self.factor * self.original;
        if context > most as f64 {
            let expected = format!("at most {most} positions of {} each", self.original);
            return Err(factor.wrong(expected, format!("{} times as many", self.factor)));
        }
        Ok(())
    }

    /// How much of pair `i` of `dims / 2` is interpolated, from 0 to 1.
    fn interpolated(&self, i: usize, dims: usize, theta: f64) -> f64 {
        // The pair that turns so many times within the trained context.
        let pair =
            |turns: f64| dims as f64 * (self.original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (low, high) = (pair(self.fast), pair(self.slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        ((i as f64 - low) / width).clamp(0.0, 1.0)
    }
}

impl Scaling {
    /// The factor on sines and cosines, for a context of `context` positions.
    pub(crate) fn magnitude(&self, context: usize) -> f32 {
        match self {
            Scaling::Yarn(yarn) => yarn.magnitude as f32,
            Scaling::Long { magnitudes, original, .. } => {
                magnitudes[usize::from(context as f64 > *original)] as f32
            }
            _ => 1.0,
        }
    }

    /// The context that it is meant for, where that is known.
    pub(crate) fn context(&self) -> Option<usize> {
        match self {
            Scaling::Yarn(yarn) => Some((yarn.factor * yarn.original) as usize),
            _ => None,
        }
    }

    /// Whether the frequencies depend on the context.
    pub(crate) fn by_context(&self) -> bool {
        matches!(self, Scaling::Long { .. } | Scaling::Dynamic { .. })
    }

    /// A remark on the frequencies chosen for a context of `context` positions, where they depend
    /// on it.
    pub(crate) fn remark(&self, context: usize) -> Option<String> {
        let (original, beyond) = match self {
            Scaling::Long { original, .. } => (*original, "the factors for long contexts"),
            Scaling::Dynamic { original, .. } => (*original, "a base for this context"),
            _ => return None,
        };
        let used = if context as f64 > original { beyond } else { "those of the first training" };
        Some(format!("rotary frequencies for {context} positions, of {original} trained: {used}"))
    }
}

/// Radians per position for each of `dims / 2` pairs: `theta^(-2i / dims)`, scaled for a context of
/// `context` positions.
///
/// # Errors
/// Factors that are not one positive number for each pair, or frequencies that are no numbers,
/// where `scaling` is stated.
pub(crate) fn frequencies(
    theta: f64,
    dims: usize,
    stated: &Stated<Scaling>,
    context: usize,
) -> Result<Arc<[f32]>> {
    let (pairs, scaling) = (dims / 2, &stated.value);
    let factors = match scaling {
        Scaling::Factors(factors) => Some(factors),
        Scaling::Long { short, long, original, .. } => {
            check_factors(short, pairs, stated)?;
            Some(if context as f64 > *original { long } else { short })
        }
        _ => None,
    };
    factors.map_or(Ok(()), |factors| check_factors(factors, pairs, stated))?;
    let theta = match scaling {
        Scaling::Dynamic { factor, original } if context as f64 > *original && dims > 2 => {
            let stretched = factor * context as f64 / original - (factor - 1.0);
            theta * stretched.powf(dims as f64 / (dims as f64 - 2.0))
        }
        _ => theta,
    };
    // Reference implementations hold the base frequencies in f32; agreeing with them matters at
    // long positions.
    let base = |i: usize| (1.0 / (theta as f32).powf((2 * i) as f32 / dims as f32)) as f64;
    let scaled = |i: usize| {
        let frequency = base(i);
        match scaling {
            Scaling::None | Scaling::Dynamic { .. } => frequency,
            Scaling::Linear { factor } => frequency / factor,
            Scaling::Proportional { part, factor } => match i < (part * pairs as f64) as usize {
                true => frequency / factor,
                false => 0.0,
            },
            Scaling::Factors(_) | Scaling::Long { .. } => {
                frequency / f64::from(factors.map_or(1.0, |factors| factors[i]))
            }
            Scaling::Yarn(yarn) => {
                let share = yarn.interpolated(i, dims, theta);
                frequency / yarn.factor * share + frequency * (1.0 - share)
            }
            Scaling::Llama3 { factor, low, high, original } => {
                let wavelength = TAU / frequency;
                if wavelength < original / high {
                    frequency
                } else if wavelength > original / low {
                    frequency / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    };
    let frequencies: Arc<[f32]> = (0..pairs).map(|i| scaled(i) as f32).collect();
    let magnitude = scaling.magnitude(context);
    if let Some(odd) = frequencies.iter().chain([&magnitude]).find(|f| !f.is_finite()) {
        return Err(stated.wrong("a scaling with finite frequencies", odd));
    }
    Ok(frequencies)
}

/// Checks that these are one positive number for each pair.
fn check_factors(factors: &[f32], pairs: usize, stated: &Stated<Scaling>) -> Result<()> {
    if let Some(found) = factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
        return Err(stated.wrong("positive factors", found));
    }
    match factors.len() == pairs {
        true => Ok(()),
        false => Err(stated.wrong(format!("{pairs} factors"), factors.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{Asked, Keys};

    fn frequencies(theta: f64, dims: usize, scaling: &Scaling) -> Result<Arc<[f32]>> {
        at(theta, dims, scaling, 1)
    }

    fn at(theta: f64, dims: usize, scaling: &Scaling, context: usize) -> Result<Arc<[f32]>> {
        let (nothing, asked) = (serde_json::json!({}), Asked::default());
        let stated = Keys::json("file", &nothing, &asked).stated("scaling", scaling.clone());
        super::frequencies(theta, dims, &stated, context)
    }

    #[test]
    fn a_longer_context_gets_other_frequencies() {
        let long = Scaling::Long {
            short: vec![1.0, 2.0],
            long: vec![4.0, 8.0],
            original: 100.0,
            magnitudes: [1.5, 2.5],
        };
        assert_eq!([100, 101].map(|context| long.magnitude(context)), [1.5, 2.5]);
        let plain = frequencies(10_000.0, 4, &Scaling::None).unwrap();
        let [short, stretched] = [100, 101].map(|context| at(10_000.0, 4, &long, context).unwrap());
        assert_eq!(*short, [plain[0], plain[1] / 2.0]);
        assert_eq!(*stretched, [plain[0] / 4.0, plain[1] / 8.0]);
        assert!(at(10_000.0, 6, &long, 1).unwrap_err().to_string().contains("3 factors, found 2"));
        let dynamic = Scaling::Dynamic { factor: 2.0, original: 100.0 };
        assert_eq!(*at(10_000.0, 4, &dynamic, 100).unwrap(), *plain);
        // Twice the context with a factor of 2: the slowest pair turns a third as fast.
        let stretched = at(10_000.0, 4, &dynamic, 200).unwrap();
        assert!((plain[1] / stretched[1] - 3.0).abs() < 1e-5, "{stretched:?}");
    }

    #[test]
    fn frequencies_that_are_no_numbers_are_refused_by_key() {
        for (scaling, expected) in [
            (Scaling::Linear { factor: 0.0 }, "file: scaling: expected a scaling with finite"),
            (
                Scaling::Factors(vec![1.0, -1.0]),
                "file: scaling: expected positive factors, found -1",
            ),
            (Scaling::Factors(vec![1.0]), "file: scaling: expected 2 factors, found 1"),
        ] {
            let error = frequencies(10_000.0, 4, &scaling).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_part_of_the_pairs_turns_as_all_would() {
        let plain = frequencies(10_000.0, 16, &Scaling::None).unwrap();
        let scaling = Scaling::Proportional { part: 0.3, factor: 2.0 };
        let found = frequencies(10_000.0, 16, &scaling).unwrap();
        assert_eq!(found[..3], [plain[0] / 2.0, plain[1] / 2.0, 0.0]);
        assert!(found[2..].iter().all(|f| *f == 0.0) && found.len() == 8);
    }

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let plain = frequencies(500_000.0, 128, &Scaling::None).unwrap();
        let scaled = frequencies(500_000.0, 128, &scaling).unwrap();
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-5);
        assert!(scaled.iter().zip(plain.iter()).all(|(s, p)| s <= p && *s >= p / 8.001));
    }

    #[test]
    fn yarn_keeps_what_turns_often_and_stretches_what_does_not() {
        let yarn = Yarn {
            factor: 4.0,
            original: 32_768.0,
            fast: 32.0,
            slow: 1.0,
            truncate: true,
            magnitude: Yarn::magnitude(4.0, 1.0),
        };
        let scaling = Scaling::Yarn(yarn);
        let plain = frequencies(1_000_000.0, 128, &Scaling::None).unwrap();
        let scaled = frequencies(1_000_000.0, 128, &scaling).unwrap();
        // Pair 23 turns 36 times in 32,768 positions, pair 40 less than once.
        assert_eq!(plain[..24], scaled[..24]);
        assert!(scaled[24] < plain[24] && scaled[39] > plain[39] / 4.0);
        assert!((40..64).all(|i| (plain[i] / scaled[i] - 4.0).abs() < 1e-5));
        assert!((scaling.magnitude(1) - 1.138_629_4).abs() < 1e-6);
        assert_eq!(scaling.context(), Some(131_072));
    }
}
