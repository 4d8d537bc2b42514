//! Q6_K: 256 weights in 210 bytes; 16 sub-blocks of 16, `w = d * scales[i] * (code - 32)`, scales
//! are i8.
//!
//! ```text
//! 0..128    low bits: byte 64 h + 32 k + l holds element 128 h + 32 k + l (low nibble)
//!           and element 128 h + 64 + 32 k + l (high nibble), k in 0..2
//! 128..192  high bits: bits 2 j of byte 32 h + l belong to element 128 h + 32 j + l
//! 192..208  scales: i8
//! 208..210  d: f16
//! ```

use super::plain::{bits_at, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 256 weights, 6 bits each, 8-bit scales per 16.
pub struct Q6K;

impl BlockFormat for Q6K {
    const NAME: &'static str = "q6_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const AFFINE: Affine =
        Affine { bits: 6, sub: 16, scale: ScaleKind::Super, offset: Offset::Zero(32), table: None };
    const HALVES: &'static [usize] = &[208];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let d = half_at(block, 208);
        for (i, w) in weights[..256].chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(block[192 + i] as i8);
            // Sub-block i is half i % 2 of group j = i / 2 % 4 of the 128 elements h = i / 8.
            let (h, j, at) = (i / 8, i / 2 % 4, i % 2 * 16);
            let low = &block[64 * h + j % 2 * 32 + at..];
            let high = &block[128 + 32 * h + at..];
            for ((&low, &high), w) in low.iter().zip(high).zip(w) {
                let code = low >> (j / 2 * 4) & 15 | (high >> (2 * j) & 3) << 4;
                *w = scale * (i32::from(code) - 32) as f32;
            }
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        Self::encode_by(weights, &search::EVEN, block);
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let parts = search::symmetric(
            weights,
            importance,
            &search::Grid { sub: 16, codes: 32.0, scales: 128.0 },
        );
        for (i, b) in block[..128].iter_mut().enumerate() {
            let at = i / 64 * 128 + i % 64;
            *b = parts.codes[at] & 15 | parts.codes[at + 64] << 4;
        }
        for (i, b) in block[128..192].iter_mut().enumerate() {
            let at = i / 32 * 128 + i % 32;
            *b = (0..4).fold(0, |bits, j| bits | parts.codes[at + 32 * j] >> 4 << (2 * j));
        }
        for i in 0..16 {
            block[192 + i] = parts.scales[i] as u8;
        }
        put_bits(block, 208, parts.d);
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 208);
        for i in 0..16 {
            parts.scales[i] = block[192 + i] as i8;
        }
        for (i, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
            let (h, j) = (i / 4, i % 4);
            let low = (&block[64 * h + j % 2 * 32..], j / 2 * 4, 15);
            nibbles::fields(low, (&block[128 + 32 * h..], 2 * j, 3), 4, codes);
        }
    }
}
