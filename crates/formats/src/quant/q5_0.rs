//! Q5_0: 32 weights in 22 bytes, `w = d * (code - 16)`.
//!
//! ```text
//! 0..2   d: f16
//! 2..6   high bits: u32, bit i is bit 4 of element i's code
//! 6..22  low bits: byte j holds element j (low nibble) and element 16 + j (high nibble)
//! ```

use super::plain::{bits_at, f16_to_f32, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 32 weights, 5 bits each, one scale.
pub struct Q5_0;

impl BlockFormat for Q5_0 {
    const NAME: &'static str = "q5_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;
    const AFFINE: Affine =
        Affine { bits: 5, sub: 32, scale: ScaleKind::Half, offset: Offset::Zero(16), table: None };
    const HALVES: &'static [usize] = &[0];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let d = half_at(block, 0);
        let high_bits = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        for (i, w) in weights[..32].iter_mut().enumerate() {
            let low = block[6 + i % 16] >> (i / 16 * 4) & 15;
            let code = u32::from(low) | (high_bits >> i & 1) << 4;
            *w = d * (code as i32 - 16) as f32;
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        // The weight of largest magnitude becomes code 0, the only code at distance 16 from zero.
        let d = super::peak(weights) / -16.0;
        let inverse = super::inverse(d);
        put_bits(block, 0, f32_to_f16(d));
        nibbles::pack_5(&mut block[2..22], |i| ((weights[i] * inverse + 16.5) as u8).min(31));
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let d = search::alone_symmetric(weights, importance, 16.0);
        let inverse = super::inverse(f16_to_f32(d));
        put_bits(block, 0, d);
        nibbles::pack_5(&mut block[2..22], |i| ((weights[i] * inverse + 16.5) as u8).min(31));
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        nibbles::unpack_5(&block[2..22], &mut parts.codes[..32]);
    }
}
