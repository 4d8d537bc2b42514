//! Affine groups as blocks: what the CPU's panels hold of
//! [`Encoding::Groups`](crate::Encoding::Groups).
//!
//! ```text
//! 0..n      codes of 4 or 8 bits, the first lowest
//! n..n + 2  scale: f16 or bf16
//! n + 2..   offset: the same
//! ```

use super::plain::{bf16_to_f32, bits_at, f16_to_f32, f32_to_bf16, f32_to_f16, put_bits};
use super::{Affine, BlockFormat, Offset, Parts, ScaleKind, range};

/// `ELEMENTS` weights `scale * code + offset` with codes of `BITS` bits; scale and offset in bf16
/// or in f16.
pub struct GroupBlock<const BITS: usize, const ELEMENTS: usize, const BF16: bool>;

impl<const BITS: usize, const ELEMENTS: usize, const BF16: bool> GroupBlock<BITS, ELEMENTS, BF16> {
    /// Bytes of the codes.
    const CODES: usize = ELEMENTS * BITS / 8;

    fn number(bits: u16) -> f32 {
        if BF16 { bf16_to_f32(bits) } else { f16_to_f32(bits) }
    }

    fn bits(number: f32) -> u16 {
        if BF16 { f32_to_bf16(number) } else { f32_to_f16(number) }
    }
}

impl<const BITS: usize, const ELEMENTS: usize, const BF16: bool> BlockFormat
    for GroupBlock<BITS, ELEMENTS, BF16>
{
    const NAME: &'static str = "affine";
    const ELEMENTS: usize = ELEMENTS;
    const BYTES: usize = Self::CODES + 4;
    const AFFINE: Affine = Affine {
        bits: BITS as u32,
        sub: ELEMENTS,
        scale: if BF16 { ScaleKind::Brain } else { ScaleKind::Half },
        offset: Offset::Min,
        table: None,
    };
    const HALVES: &'static [usize] = &[ELEMENTS * BITS / 8, ELEMENTS * BITS / 8 + 2];

    fn decode(block: &[u8], weights: &mut [f32]) {
        let mut parts = Parts::default();
        Self::split(block, &mut parts);
        Self::AFFINE.apply(&parts, &mut weights[..ELEMENTS]);
    }

    fn encode(weights: &[f32], block: &mut [u8]) {
        let (least, most) = range(weights);
        let steps = ((1usize << BITS) - 1) as f32;
        let (scale, offset) = (Self::bits((most - least) / steps), Self::bits(least));
        put_bits(block, Self::CODES, scale);
        put_bits(block, Self::CODES + 2, offset);
        let inverse = super::inverse(Self::number(scale));
        block[..Self::CODES].fill(0);
        for (i, w) in weights.iter().enumerate() {
            let code = ((w - Self::number(offset)) * inverse).round().clamp(0.0, steps) as u8;
            block[i * BITS / 8] |= code << (i * BITS % 8);
        }
    }

    fn split(block: &[u8], parts: &mut Parts) {
        let mask = (0xff >> (8 - BITS)) as u8;
        for (i, code) in parts.codes[..ELEMENTS].iter_mut().enumerate() {
            *code = block[i * BITS / 8] >> (i * BITS % 8) & mask;
        }
        (parts.d, parts.min) = (bits_at(block, Self::CODES), bits_at(block, Self::CODES + 2));
    }
}
