//! IQ4_XS: 256 weights in 136 bytes; 8 sub-blocks of 32, `w = d * (scales[i] - 32) * number(code)`
//! with the numbers of IQ4_NL.
//!
//! ```text
//! 0..2    d: f16
//! 2..4    the upper two bits of the scales: sub-block i has bits 2 i and 2 i + 1
//! 4..8    the lower four bits: byte j holds sub-blocks 2 j (low nibble) and 2 j + 1 (high nibble)
//! 8..136  codes: byte 16 i + j holds elements j (low nibble) and 16 + j (high nibble) of sub-block i
//! ```

use super::codebook::{IQ4, IQ4_ZERO};
use super::plain::{bits_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, codebook, nibbles, search};

/// 256 weights, 4 bits each, 6-bit scales per 32; codes index a table.
pub struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const NAME: &'static str = "iq4_xs";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 136;
    const AFFINE: Affine = Affine {
        bits: 4,
        sub: 32,
        scale: ScaleKind::Super,
        offset: Offset::Zero(IQ4_ZERO),
        table: Some(IQ4),
    };
    const HALVES: &'static [usize] = &[0];

    fn decode(block: &[u8], weights: &mut [f32]) {
        codebook::decode::<Self>(block, &mut weights[..256]);
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        Self::encode_by(weights, &search::EVEN, block);
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let parts = codebook::together(weights, importance);
        let scale = |i: usize| (i16::from(parts.scales[i]) + 32) as u16;
        put_bits(block, 0, parts.d);
        put_bits(block, 2, (0..8).fold(0, |bits, i| bits | scale(i) >> 4 << (2 * i)));
        for j in 0..4 {
            block[4 + j] = (scale(2 * j) & 15 | (scale(2 * j + 1) & 15) << 4) as u8;
        }
        for (bytes, codes) in block[8..].chunks_exact_mut(16).zip(parts.codes.chunks_exact(32)) {
            nibbles::pack(bytes, |i| codes[i]);
        }
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        let upper = bits_at(block, 2);
        for (i, scale) in parts.scales[..8].iter_mut().enumerate() {
            let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
            let high = (upper >> (2 * i) & 3) as u8;
            *scale = (low | high << 4) as i8 - 32;
        }
        for (bytes, codes) in block[8..].chunks_exact(16).zip(parts.codes.chunks_exact_mut(32)) {
            nibbles::unpack(bytes, codes);
        }
    }
}
