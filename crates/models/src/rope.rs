//! Rotary frequencies from a configuration: plain, `linear`, `llama3`, or stored per-pair factors.

use formats::{Error, Result};
use std::f64::consts::TAU;
use std::sync::Arc;

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
    /// Llama 3.1: wavelengths beyond `original / low` are divided by `factor`, those below `original / high` kept, the
    /// rest interpolated.
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
    /// Every pair divided by its own factor: GGUF's `rope_freqs`.
    Factors(Vec<f32>),
}

/// Radians per position for each of `dims / 2` pairs: `theta^(-2i / dims)`, scaled.
pub(crate) fn frequencies(theta: f64, dims: usize, scaling: &Scaling) -> Result<Arc<[f32]>> {
    let pairs = dims / 2;
    if let Scaling::Factors(factors) = scaling
        && (factors.len() != pairs || factors.iter().any(|f| !f.is_finite() || *f <= 0.0))
    {
        return Err(Error::new(
            "rope_freqs",
            format!("{pairs} positive factors"),
            format!("{} values", factors.len()),
        ));
    }
    // Reference implementations hold the base frequencies in f32; agreeing with them matters at long positions.
    let base = |i: usize| (1.0 / (theta as f32).powf((2 * i) as f32 / dims as f32)) as f64;
    let scaled = |i: usize| {
        let frequency = base(i);
        match scaling {
            Scaling::None => frequency,
            Scaling::Linear { factor } => frequency / factor,
            Scaling::Factors(factors) => frequency / f64::from(factors[i]),
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
    Ok((0..pairs).map(|i| scaled(i) as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let plain = frequencies(500_000.0, 128, &Scaling::None).unwrap();
        let scaled = frequencies(500_000.0, 128, &scaling).unwrap();
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-5);
        assert!(scaled.iter().zip(plain.iter()).all(|(s, p)| s <= p && *s >= p / 8.001));
    }
}
