//! Weights that are no numbers: where a tensor's bytes hold their first NaN or infinity.
//!
//! Such a weight is a mark of damage, or of training that overflowed, and nothing behind it says
//! so: a product of quantised activations may even swallow it. So it is looked for where weights
//! are read, in the stored bytes: every number of a float type, and the f16 numbers and powers of
//! two of every block.

use std::fmt;

use crate::quant::{LARGEST_POWER, plain};
use crate::{DType, with_block};

/// The first weights of some bytes that are not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NotFinite {
    /// The first of them, counted from the first element of the bytes.
    pub element: usize,
    /// How many share the number: 1, or all of a block.
    pub shared: usize,
    /// The number: NaN or an infinity.
    pub value: f32,
}

impl NotFinite {
    /// The first of these that is not finite.
    pub fn among(values: &[f32]) -> Option<NotFinite> {
        let element = values.iter().position(|value| !value.is_finite())?;
        Some(NotFinite { element, shared: 1, value: values[element] })
    }
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = if self.shared > 1 { "a scale of " } else { "" };
        match self.value {
            value if value.is_nan() => write!(f, "{scale}NaN"),
            value if value < 0.0 => write!(f, "{scale}-infinity"),
            _ => write!(f, "{scale}infinity"),
        }
    }
}

impl DType {
    /// The first weight of these bytes that is not finite; `None` if all are, or the type has whole
    /// numbers only. What is left at the end and makes no whole element or block is not looked at.
    pub fn not_finite(self, bytes: &[u8]) -> Option<NotFinite> {
        match self {
            DType::F32 => plain_numbers::<4>(
                bytes,
                |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000,
                f32::from_le_bytes,
            ),
            DType::F16 => plain_numbers::<2>(
                bytes,
                |b| odd_half(u16::from_le_bytes(b)),
                |b| plain::f16_to_f32(u16::from_le_bytes(b)),
            ),
            DType::BF16 => plain_numbers::<2>(
                bytes,
                |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80,
                |b| plain::bf16_to_f32(u16::from_le_bytes(b)),
            ),
            DType::F64 => plain_numbers::<8>(
                bytes,
                |b| !f64::from_le_bytes(b).is_finite(),
                |b| f64::from_le_bytes(b) as f32,
            ),
            DType::I8 | DType::I16 | DType::I32 | DType::I64 => None,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::Bool => None,
            DType::F8E4M3 | DType::F8E8M0 => None,
            block => with_block!(block, B => blocks::<B>(bytes), else => None),
        }
    }
}

/// Whether f16 bits are NaN or an infinity: all bits of the exponent are set.
fn odd_half(bits: u16) -> bool {
    bits & 0x7c00 == 0x7c00
}

/// As many bytes as are looked at before anything is decided, so that the compiler can make vectors
/// of the loop.
const RUN: usize = 4096;

/// Numbers of `N` bytes each.
fn plain_numbers<const N: usize>(
    bytes: &[u8],
    odd: impl Fn([u8; N]) -> bool,
    value: impl Fn([u8; N]) -> f32,
) -> Option<NotFinite> {
    let numbers =
        |bytes: &[u8]| bytes.as_chunks::<N>().0.iter().fold(false, |any, &b| any | odd(b));
    let run = bytes.chunks(RUN).position(numbers)?;
    let at = bytes[run * RUN..].as_chunks::<N>().0.iter().position(|&b| odd(b))?;
    let element = run * (RUN / N) + at;
    let number = bytes[element * N..].first_chunk::<N>()?;
    Some(NotFinite { element, shared: 1, value: value(*number) })
}

/// Blocks of a quantised type.
fn blocks<B: crate::quant::BlockFormat>(bytes: &[u8]) -> Option<NotFinite> {
    let half = |block: &[u8], at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    let overflows = |block: &[u8]| B::POWER.is_some_and(|at| block[at] > LARGEST_POWER);
    let odd = |block: &[u8]| {
        B::HALVES.iter().fold(overflows(block), |any, &at| any | odd_half(half(block, at)))
    };
    let index = bytes.chunks_exact(B::BYTES).position(odd)?;
    let block = &bytes[index * B::BYTES..][..B::BYTES];
    let bits = B::HALVES.iter().map(|&at| half(block, at)).find(|&bits| odd_half(bits));
    let value = bits.map_or(f32::INFINITY, plain::f16_to_f32);
    Some(NotFinite { element: index * B::ELEMENTS, shared: B::ELEMENTS, value })
}
