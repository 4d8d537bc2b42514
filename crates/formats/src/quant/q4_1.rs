//! Q4_1: 32 weights in 20 bytes, `w = d * code + m`.
//!
//! ```text
//! 0..2   d: f16
//! 2..4   m: f16
//! 4..20  codes: byte j holds element j (low nibble) and element 16 + j (high nibble)
//! ```

use super::plain::{bits_at, f16_to_f32, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 32 weights, 4 bits each, one scale and one min.
pub struct Q4_1;

impl BlockFormat for Q4_1 {
    const NAME: &'static str = "q4_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;
    const AFFINE: Affine =
        Affine { bits: 4, sub: 32, scale: ScaleKind::Half, offset: Offset::Min, table: None };
    const HALVES: &'static [usize] = &[0, 2];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        let (low, high) = weights.split_at_mut(16);
        for ((&b, low), high) in block[4..20].iter().zip(low).zip(high) {
            *low = d * f32::from(b & 15) + m;
            *high = d * f32::from(b >> 4) + m;
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        let (min, max) = super::range(weights);
        let d = (max - min) / 15.0;
        let inverse = super::inverse(d);
        put_bits(block, 0, f32_to_f16(d));
        put_bits(block, 2, f32_to_f16(min));
        nibbles::pack(&mut block[4..20], |i| (((weights[i] - min) * inverse + 0.5) as u8).min(15));
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let (d, min) = search::alone_affine(weights, importance, 15.0);
        let (inverse, m) = (super::inverse(f16_to_f32(d)), f16_to_f32(min));
        put_bits(block, 0, d);
        put_bits(block, 2, min);
        nibbles::pack(&mut block[4..20], |i| (((weights[i] - m) * inverse + 0.5) as u8).min(15));
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        parts.min = bits_at(block, 2);
        nibbles::unpack(&block[4..20], &mut parts.codes[..32]);
    }
}
