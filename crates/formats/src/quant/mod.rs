//! Quantised blocks, one file each: layout, decode, encode, integer codes, dot.
//!
//! A block packs `ELEMENTS` consecutive weights of one row into `BYTES` bytes. Everything downstream (the CPU's
//! packed panels, the GPU kernels, the quantiser) is derived from the items of [`Block`], so that a new block is one
//! new file here. Byte layouts follow ggml's block structures; each file states its own.

/// How the integer codes of a block turn back into weights.
///
/// Every sub-block of `sub` elements shares a scale `s` and an offset `m`: `w = s * code + m`, where `m = -zero * s`
/// for a fixed zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affine {
    /// Bits per code: 2, 3, 4, 5, 6 or 8. Codes are unsigned, `0..2^bits`.
    pub bits: u32,
    /// Elements that share a scale: 16 or 32.
    pub sub: usize,
    /// Where the scales come from.
    pub scale: Scale,
    /// Where the offsets come from.
    pub offset: Offset,
}

/// Where a sub-block's scale comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// One f16 per sub-block: `s = d`.
    Half,
    /// An f16 per block times a small integer per sub-block: `s = d * scales[i]`.
    Super,
}

/// Where a sub-block's offset comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offset {
    /// `m = -zero * s`.
    Zero(u8),
    /// `m = min` (f16 per sub-block) with [`Scale::Half`]; `m = -min * mins[i]` with [`Scale::Super`].
    Min,
}

/// The integer view of one block; what [`Block::split`] writes. Unused fields stay zero.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Unsigned codes, in element order; the first `ELEMENTS` are meaningful.
    pub codes: [u8; 256],
    /// f16 bits of the block's scale `d`.
    pub d: u16,
    /// f16 bits of the block's `min` ([`Offset::Min`]).
    pub min: u16,
    /// Sub-block scales ([`Scale::Super`]).
    pub scales: [i8; 16],
    /// Sub-block mins ([`Scale::Super`] with [`Offset::Min`]).
    pub mins: [i8; 16],
}

impl Default for Parts {
    fn default() -> Self {
        Parts { codes: [0; 256], d: 0, min: 0, scales: [0; 16], mins: [0; 16] }
    }
}

/// One quantised block format.
pub trait Block: 'static {
    /// Its name as ggml spells it in lower case, e.g. `q4_k`.
    const NAME: &'static str;
    /// Weights per block: 32 or 256.
    const ELEMENTS: usize;
    /// Bytes per block.
    const BYTES: usize;
    /// How codes turn into weights.
    const AFFINE: Affine;

    /// Block bytes (`BYTES`) to weights (`ELEMENTS`).
    fn decode(block: &[u8], weights: &mut [f32]);

    /// Weights (`ELEMENTS`) to block bytes (`BYTES`).
    fn encode(weights: &[f32], block: &mut [u8]);

    /// Block bytes to integer codes and scales, such that [`Block::AFFINE`] applied to them equals `decode`.
    fn split(block: &[u8], parts: &mut Parts);

    /// Reference dot product of one block with `ELEMENTS` activations, in f64.
    fn dot(block: &[u8], x: &[f32]) -> f64 {
        let mut weights = [0.0; 256];
        Self::decode(block, &mut weights[..Self::ELEMENTS]);
        weights[..Self::ELEMENTS].iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
    }
}
