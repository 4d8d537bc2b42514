//! TQ2_0: 256 weights of three numbers in 66 bytes, `w = d * (code - 1)`.
//!
//! ```text
//! 0..64   codes: bits 2 j of byte 32 h + l hold element 128 h + 32 j + l
//! 64..66  d: f16
//! ```
//!
//! No encoder writes the code 3, which stands for `2 d`.

use super::plain::{bits_at, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Parts, nibbles, ternary};

/// 256 weights, one of three numbers each, in 2 bits; one scale.
pub struct Tq2_0;

impl BlockFormat for Tq2_0 {
    const NAME: &'static str = "tq2_0";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 66;
    const AFFINE: Affine = ternary::AFFINE;
    const HALVES: &'static [usize] = &[64];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let d = half_at(block, 64);
        for (i, w) in weights[..256].chunks_exact_mut(32).enumerate() {
            for (&b, w) in block[i / 4 * 32..].iter().zip(w) {
                *w = d * (i32::from(b >> (i % 4 * 2) & 3) - 1) as f32;
            }
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        Self::put(&ternary::nearest(weights), block);
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        Self::put(&ternary::least(weights, importance), block);
    }

    fn split(block: &[u8], parts: &mut Parts) {
        for (i, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
            nibbles::field(&block[i / 4 * 32..], i % 4 * 2, 3, codes);
        }
        ternary::scale(bits_at(block, 64), parts);
    }
}

impl Tq2_0 {
    /// Codes of 0 to 2, and a scale.
    fn put((codes, d): &([u8; 256], f32), block: &mut [u8]) {
        for (i, b) in block[..64].iter_mut().enumerate() {
            let at = i / 32 * 128 + i % 32;
            *b = (0..4).fold(0, |bits, j| bits | codes[at + 32 * j] << (2 * j));
        }
        put_bits(block, 64, f32_to_f16(*d));
    }
}
