//! Q2_K: 256 weights in 84 bytes; 16 sub-blocks of 16, `w = d * scales[i] * code - min * mins[i]`.
//!
//! ```text
//! 0..16   scales (low nibble) and mins (high nibble), one byte per sub-block
//! 16..80  codes: bits 2 j of byte 32 h + l hold element 128 h + 32 j + l
//! 80..82  d: f16
//! 82..84  min: f16
//! ```

use super::plain::{bits_at, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 256 weights, 2 bits each, 4-bit scales and mins per 16.
pub struct Q2K;

impl BlockFormat for Q2K {
    const NAME: &'static str = "q2_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;
    const AFFINE: Affine =
        Affine { bits: 2, sub: 16, scale: ScaleKind::Super, offset: Offset::Min, table: None };
    const HALVES: &'static [usize] = &[80, 82];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let (d, min) = (half_at(block, 80), half_at(block, 82));
        for (i, w) in weights[..256].chunks_exact_mut(16).enumerate() {
            let (scale, m) = (d * f32::from(block[i] & 15), min * f32::from(block[i] >> 4));
            // Sub-block i is half i % 2 of plane j = i / 2 % 4 of the 32 bytes h = i / 8.
            let shift = i / 2 % 4 * 2;
            for (&b, w) in block[16 + i / 8 * 32 + i % 2 * 16..].iter().zip(w) {
                *w = scale * f32::from(b >> shift & 3) - m;
            }
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        Self::encode_by(weights, &search::EVEN, block);
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let parts = search::affine(
            weights,
            importance,
            &search::Grid { sub: 16, codes: 3.0, scales: 15.0 },
        );
        for i in 0..16 {
            block[i] = parts.scales[i] as u8 | (parts.mins[i] as u8) << 4;
        }
        for (i, b) in block[16..80].iter_mut().enumerate() {
            let at = i / 32 * 128 + i % 32;
            *b = (0..4).fold(0, |bits, j| bits | parts.codes[at + 32 * j] << (2 * j));
        }
        put_bits(block, 80, parts.d);
        put_bits(block, 82, parts.min);
    }

    fn split(block: &[u8], parts: &mut Parts) {
        for (i, &b) in block[..16].iter().enumerate() {
            (parts.scales[i], parts.mins[i]) = ((b & 15) as i8, (b >> 4) as i8);
        }
        for (i, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
            nibbles::field(&block[16 + i / 4 * 32..], i % 4 * 2, 3, codes);
        }
        parts.d = bits_at(block, 80);
        parts.min = bits_at(block, 82);
    }
}
