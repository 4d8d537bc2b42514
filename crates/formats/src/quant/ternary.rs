//! Weights of three numbers, `-d`, 0 and `d`, as BitNet b1.58 (Ma et al. 2024) has them.

use super::{Affine, Offset, Parts, ScaleKind, inverse, peak};
use crate::quant::plain::{f16_to_f32, f32_to_f16};

/// Codes of two bits around 1, and a scale for all 256, which devices have as one of eight
/// sub-blocks with a factor of 1 each: products add up as many elements at once.
pub(super) const AFFINE: Affine =
    Affine { bits: 2, sub: 32, scale: ScaleKind::Super, offset: Offset::Zero(1), table: None };

/// The scale and the factors of a block.
pub(super) fn scale(d: u16, parts: &mut Parts) {
    parts.d = d;
    parts.scales[..8].fill(1);
}

/// Codes, and the scale: the greatest magnitude, so that weights of three numbers stay what they
/// are.
pub(super) fn nearest(weights: &[f32]) -> ([u8; 256], f32) {
    let d = peak(&weights[..256]).abs();
    (codes(weights, inverse(d)), d)
}

/// Codes and scale with the least squared error, weighted by importance. Codes are tried for
/// thresholds at sixteenths of the greatest magnitude, each with its best scale.
pub(super) fn least(weights: &[f32], importance: &[f32]) -> ([u8; 256], f32) {
    let (mut best, greatest) = (nearest(weights), peak(&weights[..256]).abs());
    let error = |codes: &[u8; 256], d: f32| -> f64 {
        let d = f16_to_f32(f32_to_f16(d));
        let one = |((code, w), by): ((&u8, &f32), &f32)| {
            f64::from(*by) * f64::from(w - d * (f32::from(*code) - 1.0)).powi(2)
        };
        codes.iter().zip(weights).zip(importance).map(one).sum()
    };
    let mut lowest = error(&best.0, best.1);
    for part in 1..16 {
        let codes = codes(weights, inverse(greatest * part as f32 / 16.0));
        let (mut product, mut square) = (0.0f64, 0.0f64);
        for ((code, w), by) in codes.iter().zip(weights).zip(importance) {
            let code = f64::from(*code) - 1.0;
            product += f64::from(*by) * code * f64::from(*w);
            square += f64::from(*by) * code * code;
        }
        let d = if square > 0.0 { (product / square) as f32 } else { 0.0 };
        let found = error(&codes, d);
        if found < lowest {
            (best, lowest) = ((codes, d), found);
        }
    }
    best
}

/// The nearest of the three numbers to each weight, halves away from zero.
fn codes(weights: &[f32], inverse: f32) -> [u8; 256] {
    let mut codes = [1; 256];
    for (code, w) in codes.iter_mut().zip(weights) {
        *code = ((w * inverse).round().clamp(-1.0, 1.0) + 1.0) as u8;
    }
    codes
}
