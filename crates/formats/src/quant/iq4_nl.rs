//! IQ4_NL: 32 weights in 18 bytes, `w = d * number(code)` with sixteen numbers that lie closer
//! together around zero.
//!
//! ```text
//! 0..2   d: f16
//! 2..18  codes: byte j holds element j (low nibble) and element 16 + j (high nibble)
//! ```

use super::codebook::{IQ4, IQ4_ZERO};
use super::plain::{bits_at, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, codebook, nibbles, search};

/// 32 weights, 4 bits each, one scale; codes index a table.
pub struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    const NAME: &'static str = "iq4_nl";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const AFFINE: Affine = Affine {
        bits: 4,
        sub: 32,
        scale: ScaleKind::Half,
        offset: Offset::Zero(IQ4_ZERO),
        table: Some(IQ4),
    };
    const HALVES: &'static [usize] = &[0];

    fn decode(block: &[u8], weights: &mut [f32]) {
        codebook::decode::<Self>(block, &mut weights[..32]);
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        Self::encode_by(weights, &search::EVEN, block);
    }

    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let parts = codebook::alone(weights, importance);
        put_bits(block, 0, parts.d);
        nibbles::pack(&mut block[2..18], |i| parts.codes[i]);
    }

    fn split(block: &[u8], parts: &mut Parts) {
        parts.d = bits_at(block, 0);
        nibbles::unpack(&block[2..18], &mut parts.codes[..32]);
    }
}
