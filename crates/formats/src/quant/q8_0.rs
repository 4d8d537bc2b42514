//! Q8_0: 32 weights in 34 bytes, `w = d * q` with signed `q`; the unsigned code is `q + 128`.
//!
//! ```text
//! 0..2   d: f16
//! 2..34  q: i8, in element order
//! ```

use super::plain::{bits_at, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind};

/// 32 weights, 8 bits each, one scale.
pub struct Q8_0;

impl BlockFormat for Q8_0 {
    const NAME: &'static str = "q8_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;
    const AFFINE: Affine =
        Affine { bits: 8, sub: 32, scale: ScaleKind::Half, offset: Offset::Zero(128), table: None };
    const HALVES: &'static [usize] = &[0];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let d = half_at(block, 0);
        for (&b, w) in block[2..34].iter().zip(weights) {
            *w = d * f32::from(b as i8);
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        let d = super::peak(weights).abs() / 127.0;
        let inverse = super::inverse(d);
        put_bits(block, 0, f32_to_f16(d));
        for (&w, b) in weights[..32].iter().zip(&mut block[2..34]) {
            *b = (w * inverse).round() as i8 as u8;
        }
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        for (&b, code) in block[2..34].iter().zip(&mut parts.codes) {
            *code = b ^ 0x80;
        }
    }
}
