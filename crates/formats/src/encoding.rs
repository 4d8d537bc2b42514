//! How the elements of a weight are encoded: what a recipe ([`Source`](crate::Source)) gives and
//! devices pack.
//!
//! ```text
//! Stored   rows as files hold them: numbers, or one of ggml's blocks after another
//! Groups   affine groups, one after another: the codes as a little-endian stream of bits, then the scale, then the offset
//! ```

use crate::quant::{plain, search};
use crate::{DType, Error, NotFinite, Result};
use std::fmt;

/// How the elements of a weight are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// As a file's type says.
    Stored(DType),
    /// Affine groups, as MLX quantises.
    Groups(Groups),
}

/// Affine groups: `w = scale * code + offset`, with a scale and an offset for every `group`
/// elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Bits per code, 2 to 8; codes are unsigned.
    pub bits: usize,
    /// Elements that share a scale: their codes fill whole bytes.
    pub group: usize,
    /// Element type of scales and offsets: f16 or bf16.
    pub scale: DType,
}

impl Groups {
    /// Groups of these properties, if they are groups as above.
    pub fn new(bits: usize, group: usize, scale: DType) -> Option<Groups> {
        let whole = (1..=1 << 16).contains(&group) && (group * bits).is_multiple_of(8);
        let halves = matches!(scale, DType::F16 | DType::BF16);
        ((2..=8).contains(&bits) && whole && halves).then_some(Groups { bits, group, scale })
    }

    /// Bytes of a group.
    pub fn bytes(&self) -> usize {
        self.code_bytes() + 4
    }

    /// Bytes of a group's codes, which its scale and its offset follow.
    pub fn code_bytes(&self) -> usize {
        self.group * self.bits / 8
    }

    /// Code `i` of a group's bytes.
    pub fn code(&self, bytes: &[u8], i: usize) -> u8 {
        let (byte, shift) = (i * self.bits / 8, i * self.bits % 8);
        let low = u16::from(bytes[byte]);
        let high = if shift + self.bits > 8 { u16::from(bytes[byte + 1]) } else { 0 };
        ((low | high << 8) >> shift & ((1 << self.bits) - 1)) as u8
    }

    /// The bits of a group's scale and offset.
    pub fn halves(&self, bytes: &[u8]) -> [u16; 2] {
        let at = self.code_bytes();
        [at, at + 2].map(|at| u16::from_le_bytes([bytes[at], bytes[at + 1]]))
    }

    /// The number that the bits of a scale or an offset are.
    pub fn number(&self, bits: u16) -> f32 {
        match self.scale {
            DType::BF16 => plain::bf16_to_f32(bits),
            _ => plain::f16_to_f32(bits),
        }
    }

    /// A group's bytes of its weights: the scale and the offset by which their squared error is
    /// least.
    fn encode(&self, weights: &[f32], bytes: &mut [u8]) {
        let bits = |number: f32| match self.scale {
            DType::BF16 => plain::f32_to_bf16(number),
            _ => plain::f32_to_f16(number),
        };
        let most = ((1u32 << self.bits) - 1) as f32;
        let (scale, offset) = search::group(weights, most, |number| self.number(bits(number)));
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        bytes.fill(0);
        for (i, w) in weights.iter().enumerate() {
            let code = ((w - offset) * inverse).round_ties_even().clamp(0.0, most) as u16;
            let (byte, shift) = (i * self.bits / 8, i * self.bits % 8);
            let [low, high] = (code << shift).to_le_bytes();
            bytes[byte] |= low;
            if shift + self.bits > 8 {
                bytes[byte + 1] |= high;
            }
        }
        let at = self.code_bytes();
        for (at, number) in [(at, scale), (at + 2, offset)] {
            bytes[at..at + 2].copy_from_slice(&bits(number).to_le_bytes());
        }
    }

    /// A group's weights.
    fn decode(&self, bytes: &[u8], weights: &mut [f32]) {
        let [scale, offset] = self.halves(bytes).map(|bits| self.number(bits));
        for (i, w) in weights.iter_mut().enumerate() {
            *w = scale * f32::from(self.code(bytes, i)) + offset;
        }
    }

    /// The first group whose scale or offset is not finite.
    fn not_finite(&self, bytes: &[u8]) -> Option<NotFinite> {
        let odd = |group: &[u8]| {
            let numbers = self.halves(group).map(|bits| self.number(bits));
            numbers.into_iter().find(|number| !number.is_finite())
        };
        let mut groups = bytes.chunks_exact(self.bytes()).enumerate();
        let (index, value) = groups.find_map(|(i, group)| Some((i, odd(group)?)))?;
        Some(NotFinite { element: index * self.group, shared: self.group, value })
    }
}

impl From<DType> for Encoding {
    fn from(dtype: DType) -> Encoding {
        Encoding::Stored(dtype)
    }
}

impl Encoding {
    /// Elements per block, of which rows have a whole number: 1 for numbers.
    pub fn block_elements(self) -> usize {
        match self {
            Encoding::Stored(dtype) => dtype.block_elements(),
            Encoding::Groups(groups) => groups.group,
        }
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            Encoding::Stored(dtype) => dtype.block_bytes(),
            Encoding::Groups(groups) => groups.bytes(),
        }
    }

    /// Bytes of this many elements; `None` if they are no whole blocks, or too many.
    pub fn bytes_for(self, elements: usize) -> Option<usize> {
        let whole = elements.is_multiple_of(self.block_elements());
        whole.then(|| (elements / self.block_elements()).checked_mul(self.block_bytes())).flatten()
    }

    /// Whether elements are codes that share scales.
    pub fn is_quantised(self) -> bool {
        match self {
            Encoding::Stored(dtype) => dtype.is_block(),
            Encoding::Groups(_) => true,
        }
    }

    /// Whether [`Encoding::decode`] turns it into numbers: floats, blocks and groups.
    pub fn is_float(self) -> bool {
        match self {
            Encoding::Stored(dtype) => dtype.is_float(),
            Encoding::Groups(_) => true,
        }
    }

    /// Bytes of whole blocks to f32.
    ///
    /// # Errors
    /// Integers, or bytes that are not as many as the values take.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
        let Encoding::Groups(groups) = self else {
            let Encoding::Stored(dtype) = self else { return Ok(()) };
            return dtype.decode(bytes, values);
        };
        if self.bytes_for(values.len()) != Some(bytes.len()) {
            let expected = format!("the bytes of {} elements", values.len());
            return Err(Error::new(format!("decode {self}"), expected, bytes.len()));
        }
        let blocks = bytes.chunks_exact(groups.bytes());
        blocks.zip(values.chunks_exact_mut(groups.group)).for_each(|(b, w)| groups.decode(b, w));
        Ok(())
    }

    /// f32 to bytes of whole blocks.
    ///
    /// # Errors
    /// As for [`Encoding::decode`], and groups of a length that is no multiple of 8.
    pub fn encode(self, values: &[f32], bytes: &mut [u8]) -> Result<()> {
        let groups = match self {
            Encoding::Stored(dtype) => return dtype.encode(values, bytes),
            Encoding::Groups(groups) => groups,
        };
        if self.bytes_for(values.len()) != Some(bytes.len()) || !groups.group.is_multiple_of(8) {
            let expected = format!("the bytes of {} elements", values.len());
            return Err(Error::new(format!("encode {self}"), expected, bytes.len()));
        }
        let blocks = bytes.chunks_exact_mut(groups.bytes());
        blocks.zip(values.chunks_exact(groups.group)).for_each(|(b, w)| groups.encode(w, b));
        Ok(())
    }

    /// The first weight of these bytes that is not finite; see [`DType::not_finite`].
    pub fn not_finite(self, bytes: &[u8]) -> Option<NotFinite> {
        match self {
            Encoding::Stored(dtype) => dtype.not_finite(bytes),
            Encoding::Groups(groups) => groups.not_finite(bytes),
        }
    }
}

impl fmt::Display for Encoding {
    /// `q4_k`, `bf16`, `affine4_64_bf16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Encoding::Stored(dtype) => fmt::Display::fmt(dtype, f),
            Encoding::Groups(Groups { bits, group, scale }) => {
                f.pad(&format!("affine{bits}_{group}_{scale}"))
            }
        }
    }
}
