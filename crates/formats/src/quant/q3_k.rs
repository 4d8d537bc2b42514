//! Q3_K: 256 weights in 110 bytes; 16 sub-blocks of 16, `w = d * scales[i] * (code - 4)`, scales in
//! -32..32.
//!
//! ```text
//! 0..32     high bits: bit i of byte l is bit 2 of element 32 i + l
//! 32..96    low bits: bits 2 j of byte 32 h + l hold element 128 h + 32 j + l
//! 96..108   scales + 32, 6 bits each: byte i < 8 holds the low nibbles of scale i and scale 8 + i,
//!           byte 8 + i holds the high pairs of scales i, 4 + i, 8 + i, 12 + i from bit 0 up
//! 108..110  d: f16
//! ```

use super::plain::{bits_at, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, search};

/// 256 weights, 3 bits each, signed 6-bit scales per 16.
pub struct Q3K;

/// The scale of sub-block `i` (0..16) from the 12 scale bytes.
#[inline]
fn scale(bytes: &[u8], i: usize) -> i8 {
    let low = bytes[i % 8] >> (i / 8 * 4) & 15;
    let high = bytes[8 + i % 4] >> (i / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

impl BlockFormat for Q3K {
    const NAME: &'static str = "q3_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;
    const AFFINE: Affine =
        Affine { bits: 3, sub: 16, scale: ScaleKind::Super, offset: Offset::Zero(4), table: None };
    const HALVES: &'static [usize] = &[108];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let d = half_at(block, 108);
        for (i, w) in weights[..256].chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(scale(&block[96..108], i));
            let shift = i / 2 % 4 * 2;
            let low = &block[32 + i / 8 * 32 + i % 2 * 16..];
            let high = &block[i % 2 * 16..];
            for ((&low, &high), w) in low.iter().zip(high).zip(w) {
                let code = low >> shift & 3 | (high >> (i / 2) & 1) << 2;
                *w = scale * (i32::from(code) - 4) as f32;
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
            &search::Grid { sub: 16, codes: 4.0, scales: 32.0 },
        );
        for (l, b) in block[..32].iter_mut().enumerate() {
            *b = (0..8).fold(0, |bits, i| bits | parts.codes[32 * i + l] >> 2 << i);
        }
        for (i, b) in block[32..96].iter_mut().enumerate() {
            let at = i / 32 * 128 + i % 32;
            *b = (0..4).fold(0, |bits, j| bits | (parts.codes[at + 32 * j] & 3) << (2 * j));
        }
        let scales = parts.scales.map(|s| (s + 32) as u8);
        for i in 0..8 {
            block[96 + i] = scales[i] & 15 | scales[8 + i] << 4;
        }
        for i in 0..4 {
            block[104 + i] = (0..4).fold(0, |bits, j| bits | scales[4 * j + i] >> 4 << (2 * j));
        }
        put_bits(block, 108, parts.d);
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 108);
        for i in 0..16 {
            parts.scales[i] = scale(&block[96..108], i);
        }
        for (i, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
            let low = (&block[32 + i / 4 * 32..], i % 4 * 2, 3);
            nibbles::fields(low, (block, i, 1), 2, codes);
        }
    }
}
