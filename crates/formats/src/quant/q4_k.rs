//! Q4_K: 256 weights in 144 bytes; 8 sub-blocks of 32, `w = d * scales[i] * code - min * mins[i]`.
//!
//! ```text
//! 0..2     d: f16
//! 2..4     min: f16
//! 4..16    scales and mins, 6 bits each (see `scales.rs`)
//! 16..144  codes: byte 32 c + l holds element 64 c + l (low nibble) and element 64 c + 32 + l (high nibble)
//! ```

use super::plain::{half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, nibbles, scales, search};

/// 256 weights, 4 bits each, 6-bit scales and mins per 32.
pub struct Q4K;

impl BlockFormat for Q4K {
    const NAME: &'static str = "q4_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const AFFINE: Affine =
        Affine { bits: 4, sub: 32, scale: ScaleKind::Super, offset: Offset::Min, table: None };
    const HALVES: &'static [usize] = &[0, 2];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let (d, min) = (half_at(block, 0), half_at(block, 2));
        for (i, w) in weights[..256].chunks_exact_mut(32).enumerate() {
            let (scale, m) = scales::get(&block[4..16], i);
            let (scale, m) = (d * f32::from(scale), min * f32::from(m));
            let shift = i % 2 * 4;
            for (&b, w) in block[16 + i / 2 * 32..].iter().zip(w) {
                *w = scale * f32::from(b >> shift & 15) - m;
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
            &search::Grid { sub: 32, codes: 15.0, scales: 63.0 },
        );
        put_bits(block, 0, parts.d);
        put_bits(block, 2, parts.min);
        scales::put(&parts.scales, &parts.mins, &mut block[4..16]);
        for (i, b) in block[16..144].iter_mut().enumerate() {
            let at = i / 32 * 64 + i % 32;
            *b = parts.codes[at] | parts.codes[at + 32] << 4;
        }
    }

    fn split(block: &[u8], parts: &mut Parts) {
        scales::split(block, parts);
        for (i, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
            nibbles::field(&block[16 + i / 2 * 32..], i % 2 * 4, 15, codes);
        }
    }
}
