//! Q4_0: 32 weights in 18 bytes, `w = d * (code - 8)`.
//!
//! ```text
//! 0..2   d: f16
//! 2..18  codes: byte j holds element j (low nibble) and element 16 + j (high nibble)
//! ```

use super::plain::{bits_at, f16_to_f32, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 32 weights, 4 bits each, one scale.
pub struct Q4_0;

impl BlockFormat for Q4_0 {
    const NAME: &'static str = "q4_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const AFFINE: Affine =
        Affine { bits: 4, sub: 32, scale: ScaleKind::Half, offset: Offset::Zero(8), table: None };
    const HALVES: &'static [usize] = &[0];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let d = half_at(block, 0);
        let (low, high) = weights.split_at_mut(16);
        for ((&b, low), high) in block[2..18].iter().zip(low).zip(high) {
            *low = d * (i32::from(b & 15) - 8) as f32;
            *high = d * (i32::from(b >> 4) - 8) as f32;
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        // The weight of largest magnitude becomes code 0, the only code at distance 8 from zero.
        let d = super::peak(weights) / -8.0;
        let inverse = super::inverse(d);
        put_bits(block, 0, f32_to_f16(d));
        nibbles::pack(&mut block[2..18], |i| ((weights[i] * inverse + 8.5) as u8).min(15));
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let d = search::alone_symmetric(weights, importance, 8.0);
        let inverse = super::inverse(f16_to_f32(d));
        put_bits(block, 0, d);
        nibbles::pack(&mut block[2..18], |i| ((weights[i] * inverse + 8.5) as u8).min(15));
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        nibbles::unpack(&block[2..18], &mut parts.codes[..32]);
    }
}
