//! Quantised blocks, one file each: layout, decode, encode, integer codes, dot.
//!
//! A block packs `ELEMENTS` consecutive weights of one row into `BYTES` bytes. Everything
//! downstream (the CPU's packed panels, the GPU kernels, the quantiser) is derived from the items
//! of [`BlockFormat`], so that a new block is one new file here. Byte layouts follow ggml's block
//! structures; each file states its own.

mod codebook;
mod group;
mod iq4_nl;
mod iq4_xs;
mod lanes;
mod mxfp4;
mod nibbles;
pub mod plain;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod scales;
pub(crate) mod search;
mod ternary;
mod tq1_0;
mod tq2_0;

pub use group::GroupBlock;
pub use iq4_nl::Iq4Nl;
pub use iq4_xs::Iq4Xs;
pub use mxfp4::Mxfp4;
pub use q2_k::Q2K;
pub use q3_k::Q3K;
pub use q4_0::Q4_0;
pub use q4_1::Q4_1;
pub use q4_k::Q4K;
pub use q5_0::Q5_0;
pub use q5_1::Q5_1;
pub use q5_k::Q5K;
pub use q6_k::Q6K;
pub use q8_0::Q8_0;
pub use tq1_0::Tq1_0;
pub use tq2_0::Tq2_0;

/// How the integer codes of a block turn back into weights.
///
/// Every sub-block of `sub` elements shares a scale `s` and an offset `m`: `w = s * code + m`,
/// where `m = -zero * s` for a fixed zero point. Where there is a table, a code stands for a number
/// of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affine {
    /// Bits per code: 2, 3, 4, 5, 6 or 8. Codes are unsigned, `0..2^bits`.
    pub bits: u32,
    /// Elements that share a scale: 16 or 32; 64 in affine groups.
    pub sub: usize,
    /// Where the scales come from.
    pub scale: ScaleKind,
    /// Where the offsets come from.
    pub offset: Offset,
    /// The values of 4-bit codes, if they are not the codes themselves.
    pub table: Option<[u8; 16]>,
}

/// Where a sub-block's scale comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    /// One f16 per sub-block: `s = d`.
    Half,
    /// One bf16 per sub-block: `s = d`.
    Brain,
    /// An f16 per block times a small integer per sub-block: `s = d * scales[i]`.
    Super,
}

/// Where a sub-block's offset comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offset {
    /// `m = -zero * s`.
    Zero(u8),
    /// `m = min` (as the scale, one per sub-block) with [`ScaleKind::Half`] and
    /// [`ScaleKind::Brain`]; `m = -min * mins[i]` with [`ScaleKind::Super`].
    Min,
}

impl Affine {
    /// The number that a code stands for, before the zero point is taken off.
    pub fn value(&self, code: u8) -> u8 {
        self.table.map_or(code, |table| table[usize::from(code & 15)])
    }

    /// Bits of the numbers that codes stand for: as many as of the codes, if there is no table.
    pub const fn value_bits(&self) -> u32 {
        let Some(table) = self.table else { return self.bits };
        let (mut all, mut i) = (0, 0);
        while i < table.len() {
            all |= table[i];
            i += 1;
        }
        u8::BITS - all.leading_zeros()
    }

    /// Decodes a block's parts: weight `e` of sub-block `i` is `s_i * (code_e - zero)`, or `s_i *
    /// code_e + m_i`. `weights` holds the block's `ELEMENTS`.
    pub fn apply(&self, parts: &Parts, weights: &mut [f32]) {
        let number =
            if self.scale == ScaleKind::Brain { plain::bf16_to_f32 } else { plain::f16_to_f32 };
        let (d, min) = (number(parts.d), number(parts.min));
        for (i, (w, codes)) in
            weights.chunks_mut(self.sub).zip(parts.codes.chunks(self.sub)).enumerate()
        {
            let s = match self.scale {
                ScaleKind::Half | ScaleKind::Brain => d,
                ScaleKind::Super => d * f32::from(parts.scales[i]),
            };
            let (zero, m) = match (self.offset, self.scale) {
                (Offset::Zero(zero), _) => (f32::from(zero), 0.0),
                (Offset::Min, ScaleKind::Half | ScaleKind::Brain) => (0.0, min),
                (Offset::Min, ScaleKind::Super) => (0.0, -(min * f32::from(parts.mins[i]))),
            };
            for (w, &code) in w.iter_mut().zip(codes) {
                *w = s * (f32::from(self.value(code)) - zero) + m;
            }
        }
    }
}

/// The integer view of one block; what [`BlockFormat::split`] writes. Unused fields stay zero.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Unsigned codes, in element order; the first `ELEMENTS` are meaningful.
    pub codes: [u8; 256],
    /// Bits of the block's scale `d`: f16, or bf16 with [`ScaleKind::Brain`].
    pub d: u16,
    /// Bits of the block's `min` ([`Offset::Min`]): as the scale's.
    pub min: u16,
    /// Sub-block scales ([`ScaleKind::Super`]).
    pub scales: [i8; 16],
    /// Sub-block mins ([`ScaleKind::Super`] with [`Offset::Min`]).
    pub mins: [i8; 16],
}

impl Default for Parts {
    fn default() -> Self {
        Parts { codes: [0; 256], d: 0, min: 0, scales: [0; 16], mins: [0; 16] }
    }
}

/// One quantised block format.
pub trait BlockFormat: 'static {
    /// Its name as ggml spells it in lower case, e.g. `q4_k`.
    const NAME: &'static str;
    /// Weights per block: 32, 64 or 256.
    const ELEMENTS: usize;
    /// Bytes per block.
    const BYTES: usize;
    /// How codes turn into weights.
    const AFFINE: Affine;
    /// The bytes at which its f16 numbers lie: the scale and the `min` of [`Parts`]. Whatever else
    /// a block holds are whole numbers, so that its weights are finite if these are.
    const HALVES: &'static [usize];
    /// The byte at which the exponent of a power of two lies, where a block has one; above
    /// [`LARGEST_POWER`] its weights overflow.
    const POWER: Option<usize> = None;

    /// Block bytes (`BYTES`) to weights (`ELEMENTS`).
    fn decode(block: &[u8], weights: &mut [f32]);

    /// Weights (`ELEMENTS`) to block bytes (`BYTES`), whatever the weights: those that are not
    /// finite give bytes without meaning, but no panic.
    fn encode(weights: &[f32], block: &mut [u8]);

    /// As [`BlockFormat::encode`], where the squared error of each weight counts by its importance
    /// (`ELEMENTS`, positive). Blocks with so many bits that this gains nothing ignore the
    /// importance.
    fn encode_by(weights: &[f32], importance: &[f32], block: &mut [u8]) {
        let _ = importance;
        Self::encode(weights, block);
    }

    /// Block bytes to integer codes and scales, such that [`BlockFormat::AFFINE`] applied to them equals
    /// `decode`.
    fn split(block: &[u8], parts: &mut Parts);

    /// Reference dot product of one block with `ELEMENTS` activations, in f64.
    fn dot(block: &[u8], x: &[f32]) -> f64 {
        let mut weights = [0.0; 256];
        Self::decode(block, &mut weights[..Self::ELEMENTS]);
        crate::dot(&weights[..Self::ELEMENTS], x)
    }
}

/// The largest exponent of [`BlockFormat::POWER`] with which twelve of it is a finite f32.
pub const LARGEST_POWER: u8 = 252;

/// The first weight of largest magnitude, with its sign; 0 for none. A NaN is never it.
fn peak(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0, |peak: f32, &w| if w.abs() > peak.abs() { w } else { peak })
}

/// Smallest and largest weight; NaNs are passed over.
fn range(weights: &[f32]) -> (f32, f32) {
    let (mut min, mut max) = (f32::MAX, f32::MIN);
    for &w in weights {
        if w < min {
            min = w;
        }
        if w > max {
            max = w;
        }
    }
    (min, max)
}

/// `1 / d`, and 0 for 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}
