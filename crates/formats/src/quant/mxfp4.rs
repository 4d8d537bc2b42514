//! MXFP4: 32 weights in 17 bytes, four-bit floats that share a power of two (the Open Compute
//! Project's Microscaling Formats, 1.0): `w = 2^(e - 128) * number(code)`, where the numbers are
//! the floats doubled, whole.
//!
//! ```text
//! 0      e: u8
//! 1..17  codes: byte j holds element j (low nibble) and element 16 + j (high nibble)
//! ```

use super::codebook::{E2M1, E2M1_ZERO};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, codebook, nibbles, plain};

/// 32 weights, 4 bits each, one power of two; codes index a table.
pub struct Mxfp4;

impl Mxfp4 {
    /// The bf16 bits of `2^(e - 128)`; the two smallest are subnormal. As ggml has it, 255 is no
    /// NaN but a power too.
    fn power(e: u8) -> u16 {
        match e {
            0 | 1 => 0x20 << e,
            e => u16::from(e - 1) << 7,
        }
    }

    /// The usual `e` of weights: the largest float is 1.5 * 2^2, so the block's power is two below
    /// the largest weight's.
    fn exponent(weights: &[f32]) -> u8 {
        let peak = super::peak(weights).abs().min(f32::MAX);
        let exponent = (peak.to_bits() >> 23) as i32 - 127;
        if peak == 0.0 { 0 } else { (exponent - 2 + 127).clamp(0, 254) as u8 }
    }
}

/// How far a weight is from what a code stands for.
fn distance(w: f32, code: u8, power: f32) -> f32 {
    let number = f32::from(E2M1[usize::from(code)]) - f32::from(E2M1_ZERO);
    (power * number - w).abs()
}

/// The nearest code; half way goes to the one of smaller size, and zero to the code without a sign.
fn nearest(w: f32, power: f32) -> u8 {
    // Half way from each size to the next, in halves of the smallest.
    const MIDDLES: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];
    let size = w.abs();
    let code: u8 = MIDDLES.iter().map(|middle| u8::from(size > power * middle)).sum();
    if w < 0.0 && code > 0 { code | 8 } else { code }
}

impl BlockFormat for Mxfp4 {
    const NAME: &'static str = "mxfp4";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 17;
    const AFFINE: Affine = Affine {
        bits: 4,
        sub: 32,
        scale: ScaleKind::Brain,
        offset: Offset::Zero(E2M1_ZERO),
        table: Some(E2M1),
    };
    const HALVES: &'static [usize] = &[];
    const POWER: Option<usize> = Some(0);

    fn decode(block: &[u8], weights: &mut [f32]) {
        codebook::decode::<Self>(block, &mut weights[..32]);
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        block[0] = Self::exponent(weights);
        let power = plain::bf16_to_f32(Self::power(block[0]));
        nibbles::pack(&mut block[1..17], |i| nearest(weights[i], power));
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        // A smaller power cuts the largest weights, a larger one is coarser for the others.
        let usual = Self::exponent(weights);
        let near = [usual, usual.saturating_sub(1), usual.saturating_add(1).min(254)];
        let lost = |e: u8| -> f32 {
            let power = plain::bf16_to_f32(Self::power(e));
            let of = |(&w, by): (&f32, &f32)| by * distance(w, nearest(w, power), power).powi(2);
            weights[..32].iter().zip(importance).map(of).sum()
        };
        let all = near.map(|e| (lost(e), e));
        let least = all.into_iter().reduce(|a, b| if b.0 < a.0 { b } else { a });
        block[0] = least.map_or(usual, |(_, e)| e);
        let power = plain::bf16_to_f32(Self::power(block[0]));
        nibbles::pack(&mut block[1..17], |i| nearest(weights[i], power));
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = Self::power(block[0]);
        nibbles::unpack(&block[1..17], &mut parts.codes[..32]);
    }
}
