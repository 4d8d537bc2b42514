//! TQ1_0: 256 weights of three numbers in 54 bytes, `w = d * (code - 1)`, five to a byte.
//!
//! ```text
//! 0..32   byte l holds elements 32 j + l, j from 0 to 4
//! 32..48  byte 32 + l holds elements 160 + 16 j + l, j from 0 to 4
//! 48..52  byte 48 + l holds elements 240 + 4 j + l, j from 0 to 3
//! 52..54  d: f16
//! ```
//!
//! A byte `b` is a fraction `b / 256` whose digits to base 3 are the codes, the first in front:
//! digit `j` is `3 (3^j b mod 256) / 256`, rounded down.

use super::plain::{bits_at, f32_to_f16, half_at, put_bits};
use super::{Affine, BlockFormat, Parts, ternary};

/// 256 weights, one of three numbers each, five to a byte; one scale.
pub struct Tq1_0;

/// The parts of a block: its first byte, how many bytes, the first element, and digits of a byte.
const PARTS: [(usize, usize, usize, usize); 3] = [(0, 32, 0, 5), (32, 16, 160, 5), (48, 4, 240, 4)];

/// Calls `visit` with a block's bytes, a byte's elements from the first digit on, and the distance
/// of these.
fn each(mut visit: impl FnMut(usize, usize, usize, usize)) {
    for (first, bytes, element, digits) in PARTS {
        (0..bytes).for_each(|l| visit(first + l, element + l, bytes, digits));
    }
}

/// The codes of a block, in order.
fn codes(block: &[u8], codes: &mut [u8]) {
    each(|byte, element, apart, digits| {
        let mut rest = block[byte];
        for j in 0..digits {
            codes[element + apart * j] = ((u16::from(rest) * 3) >> 8) as u8;
            rest = rest.wrapping_mul(3);
        }
    });
}

impl BlockFormat for Tq1_0 {
    const NAME: &'static str = "tq1_0";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 54;
    const AFFINE: Affine = ternary::AFFINE;
    const HALVES: &'static [usize] = &[52];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let (d, mut all) = (half_at(block, 52), [0; 256]);
        codes(block, &mut all);
        for (w, code) in weights.iter_mut().zip(all) {
            *w = d * (i32::from(code) - 1) as f32;
        }
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        Self::put(&ternary::nearest(weights), block);
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        Self::put(&ternary::least(weights, importance), block);
    }

    fn split(block: &[u8], parts: &mut Parts) {
        codes(block, &mut parts.codes);
        ternary::scale(bits_at(block, 52), parts);
    }
}

impl Tq1_0 {
    /// Codes of 0 to 2, and a scale.
    fn put((codes, d): &([u8; 256], f32), block: &mut [u8]) {
        each(|byte, element, apart, digits| {
            let digit = |j: usize| if j < digits { codes[element + apart * j] } else { 0 };
            let number = (0..5).fold(0, |number, j| 3 * number + u16::from(digit(j)));
            // The least fraction that begins with these digits.
            block[byte] = (number * 256).div_ceil(243) as u8;
        });
        put_bits(block, 52, f32_to_f16(*d));
    }
}
