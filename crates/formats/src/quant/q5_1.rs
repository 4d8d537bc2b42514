//! Q5_1: 32 weights in 24 bytes, `w = d * code + m`.
//!
//! ```text
//! 0..2   d: f16
//! 2..4   m: f16
//! 4..8   high bits: u32, bit i is bit 4 of element i's code
//! 8..24  low bits: byte j holds element j (low nibble) and element 16 + j (high nibble)
//! ```

use super::plain::{bits_at, f16_to_f32, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 32 weights, 5 bits each, one scale and one min.
pub struct Q5_1;

impl BlockFormat for Q5_1 {
    const NAME: &'static str = "q5_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;
    const AFFINE: Affine =
        Affine { bits: 5, sub: 32, scale: ScaleKind::Half, offset: Offset::Min, table: None };
    const HALVES: &'static [usize] = &[0, 2];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        let high_bits = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        for (i, w) in weights[..32].iter_mut().enumerate() {
            let low = block[8 + i % 16] >> (i / 16 * 4) & 15;
            let code = u32::from(low) | (high_bits >> i & 1) << 4;
            *w = d * code as f32 + m;
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        let (min, max) = super::range(weights);
        let d = (max - min) / 31.0;
        let inverse = super::inverse(d);
        put_bits(block, 0, f32_to_f16(d));
        put_bits(block, 2, f32_to_f16(min));
        nibbles::pack_5(&mut block[4..24], |i| {
            (((weights[i] - min) * inverse + 0.5) as u8).min(31)
        });
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let (d, min) = search::alone_affine(weights, importance, 31.0);
        let (inverse, m) = (super::inverse(f16_to_f32(d)), f16_to_f32(min));
        put_bits(block, 0, d);
        put_bits(block, 2, min);
        nibbles::pack_5(&mut block[4..24], |i| (((weights[i] - m) * inverse + 0.5) as u8).min(31));
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        parts.min = bits_at(block, 2);
        nibbles::unpack_5(&block[4..24], &mut parts.codes[..32]);
    }
}
