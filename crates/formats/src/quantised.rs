//! Matrices as quantising programs store them in safetensors, in several tensors each, and what
//! devices get of them.
//!
//! ```text
//! MXFP4   codes [.., out, in / 32, 16] or [.., out, in / 2] u8 or [.., out, in / 8] u32, the first lowest; scales
//!         [.., out, in / 32] u8
//!         -> mxfp4
//! FP8     weights [.., out, in] e4m3, or [.., out, in / 4] u32, the first lowest; scales for the matrix, for a row, or for a block of
//!         both axes, floats or exponents u8 -> bf16, rounded once
//! GPTQ    codes [in b / 32, out] i32, a stream of bits down each column; zeros [groups, out b / 32]; scales [groups, out];
//!         the group of each input [in] i32
//! AWQ     codes [in, out / 8] i32, eight outputs a word in the order 0 2 4 6 1 3 5 7; zeros [groups, out / 8], the same way;
//!         scales [groups, out]
//! packed  codes [out, in b / 32] i32; scales [out, groups]; zeros [out b / 32, groups], or bytes [out, groups]; the group of
//!         each input [in] i32: compressed-tensors
//! ternary codes [out / 4, in] u8, of rows a quarter of the matrix apart, the first lowest; one scale: BitNet
//!         -> TQ2_0 of rows of whole blocks; else numbers in the type of the scale
//! rounded weights [out, in], which become one of three as they are read: BitNet's before it is packed -> f32
//! bytes   weights [out, in] i8; scales and zeros [out, groups]; the group of each input [in] i32: compressed-tensors
//! ```
//!
//! A weight of integers is `scale * (code - zero)`. Where all zeros are the middle of the codes, it
//! becomes affine groups `scale * code - middle * scale`, whose offset is exact, the middle being a
//! power of two. Other zeros move into the codes, which take a bit more. Either way no weight
//! changes. Only inputs whose groups are out of order (GPTQ's `desc_act`) give numbers, rounded to
//! the type of the scales, since no block has that many scales.

use crate::quant::plain;
use crate::{DType, Described, Encoding, Error, Groups, Result, TensorView, Tensors, shape};

/// How a program stores a quantised matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Scheme {
    /// Four-bit floats in blocks of 32 that share a power of two. Tensors: codes, scales.
    Mxfp4,
    /// Eight-bit floats (e4m3). Tensors: weights, scales. With one scale for each block of these
    /// rows and columns, if stated.
    Fp8 {
        /// Rows and columns of a block.
        block: Option<[usize; 2]>,
    },
    /// GPTQ. Tensors: codes, zeros, scales, and the groups of inputs if there are any.
    Gptq {
        /// The properties that all integers have.
        integers: Integers,
        /// Added to stored zeros, in their bits: 1 in the first version of the format, 0 in the
        /// second.
        plus: u8,
    },
    /// AWQ in its matrix form, of 4 bits. Tensors: codes, zeros, scales.
    Awq {
        /// Inputs that share a scale; none: all.
        group: Option<usize>,
    },
    /// Packed integers of compressed-tensors. Tensors: codes, scales, then zeros where codes are
    /// asymmetric, then the groups of inputs where they are ordered.
    Packed(Integers),
    /// Integers of compressed-tensors in signed bytes, whatever their bits. Tensors: as of packed
    /// ones.
    Bytes(Integers),
    /// BitNet's codes 0, 1 and 2 of -1, 0 and 1, times one scale. Tensors: codes, the scale.
    Ternary,
    /// Numbers that become -1, 0 and 1 times the mean of their magnitudes, as BitNet rounds them at
    /// every use. Tensors: the matrix.
    Rounded,
}

/// The properties that quantised integers have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Integers {
    /// Bits per code.
    pub bits: usize,
    /// Inputs that share a scale; none: all.
    pub group: Option<usize>,
    /// Whether all zeros are the middle of the codes.
    pub symmetric: bool,
    /// Whether inputs name their groups, in any order.
    pub ordered: bool,
}

/// A quantised matrix: its scheme, and its tensors in the order of the scheme.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Quantised {
    /// How it is stored.
    pub scheme: Scheme,
    /// The names of its tensors.
    pub tensors: Vec<String>,
}

/// Where the parts of integer weights are.
struct Parts<'a> {
    scheme: Scheme,
    integers: Integers,
    out: usize,
    cols: usize,
    group: usize,
    codes: TensorView<'a>,
    scales: TensorView<'a>,
    zeros: Option<TensorView<'a>>,
    order: Option<TensorView<'a>>,
}

/// The positions at which AWQ's word holds the outputs 0 to 7.
const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// An error about a tensor that does not fit.
fn wrong<T>(tensor: &TensorView<'_>, expected: impl std::fmt::Display) -> Result<T> {
    let found = format!("{} of {}", shape(tensor.shape), tensor.dtype);
    Err(Error::new(tensor.name, expected, found))
}

/// Word `i` of a tensor of i32 or u32, whose size was checked.
fn word(tensor: &TensorView<'_>, i: usize) -> u32 {
    let b = &tensor.bytes[4 * i..4 * i + 4];
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// The code of `bits` bits number `i` of a stream whose words `word` gives.
fn stream(bits: usize, i: usize, word: impl Fn(usize) -> u32) -> u8 {
    let (at, shift) = (i * bits / 32, i * bits % 32);
    let mut code = word(at) >> shift;
    if shift + bits > 32 {
        code |= word(at + 1) << (32 - shift);
    }
    (code & ((1 << bits) - 1)) as u8
}

/// Whether scales are exponents of two in a byte each.
fn is_exponents(scales: &TensorView<'_>) -> bool {
    matches!(scales.dtype, DType::U8 | DType::F8E8M0)
}

/// The power of two that a byte is the exponent of; 255 is no number.
fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        255 => f32::NAN,
        exponent => (f32::from(exponent) - 127.0).exp2(),
    }
}

/// The groups that devices keep of `cols` inputs of which `group` share a scale.
fn kept(group: usize) -> Option<usize> {
    [128, 64, 32].into_iter().find(|kept| group.is_multiple_of(*kept))
}

impl Quantised {
    fn tensor<'a>(&self, tensors: &'a Tensors, i: usize) -> Result<TensorView<'a>> {
        let name = self.tensors.get(i).map_or("a quantised weight", String::as_str);
        tensors.get(name).ok_or_else(|| Error::new(name, "a tensor", "none in the file"))
    }

    /// Describes the weight, from headers alone.
    ///
    /// # Errors
    /// Tensors that are missing or of another shape or type than the scheme's.
    pub fn describe(&self, tensors: &Tensors) -> Result<Described> {
        let all: Result<Vec<TensorView<'_>>> =
            (0..self.tensors.len()).map(|i| self.tensor(tensors, i)).collect();
        let stored = all?.iter().map(|tensor| tensor.bytes.len() as u64).sum();
        let (encoding, shape) = match self.scheme {
            Scheme::Mxfp4 => (DType::Mxfp4.into(), self.mxfp4(tensors)?.0),
            Scheme::Fp8 { block } => (DType::BF16.into(), self.fp8(tensors, block)?.2),
            Scheme::Ternary => {
                let of = self.ternary(tensors)?;
                (of.dtype().into(), vec![of.out, of.cols])
            }
            Scheme::Rounded => {
                let weights = self.tensor(tensors, 0)?;
                if weights.shape.len() != 2 || !weights.dtype.is_float() || weights.dtype.is_block()
                {
                    return wrong(&weights, "a matrix in f32, f16 or bf16");
                }
                (DType::F32.into(), weights.shape.to_vec())
            }
            _ => {
                let parts = self.parts(tensors)?;
                (parts.encoding(), vec![parts.out, parts.cols])
            }
        };
        Ok(Described { encoding, shape, stored })
    }

    /// Its bytes, encoded as [`Quantised::describe`] says.
    ///
    /// # Errors
    /// As [`Quantised::describe`]; zeros and groups of inputs that are not as the scheme says.
    pub fn read(&self, tensors: &Tensors) -> Result<Vec<u8>> {
        match self.scheme {
            Scheme::Mxfp4 => {
                let (_, codes, scales) = self.mxfp4(tensors)?;
                let mut bytes = Vec::with_capacity(17 * scales.bytes.len());
                for (codes, &scale) in codes.bytes.as_chunks::<16>().0.iter().zip(scales.bytes) {
                    bytes.push(scale);
                    // Neighbours share a byte here, and elements 16 apart in a block.
                    let code = |i: usize| codes[i / 2] >> (i % 2 * 4) & 15;
                    bytes.extend((0..16).map(|j| code(j) | code(16 + j) << 4));
                }
                Ok(bytes)
            }
            Scheme::Fp8 { block } => {
                let (weights, scales, shape, block) = self.fp8(tensors, block)?;
                let cols = shape.last().copied().unwrap_or(0);
                let out = shape.iter().rev().skip(1).product();
                let factors = match is_exponents(&scales) {
                    true => scales.bytes.iter().map(|&e| power_of_two(e)).collect(),
                    false => scales.to_f32()?,
                };
                let across = cols.div_ceil(block[1]);
                rows(out, 2 * cols, |r, bytes| {
                    let mut values = vec![0.0; cols];
                    plain::decode_f8_e4m3(&weights.bytes[r * cols..][..cols], &mut values);
                    let factors = &factors[r / block[0] * across..][..across];
                    let blocks = values.chunks_mut(block[1]).zip(factors);
                    blocks.for_each(|(v, factor)| v.iter_mut().for_each(|v| *v *= factor));
                    plain::encode_bf16(&values, bytes);
                    Ok(())
                })
            }
            Scheme::Ternary => self.ternary(tensors)?.read(),
            Scheme::Rounded => {
                let mut values = self.tensor(tensors, 0)?.to_f32()?;
                let sum: f64 = values.iter().map(|value| f64::from(value.abs())).sum();
                let scale = (sum / values.len().max(1) as f64).max(1e-5);
                let round = |x: f32| (f64::from(x) / scale).round_ties_even().clamp(-1.0, 1.0);
                values.iter_mut().for_each(|value| *value = (round(*value) * scale) as f32);
                Ok(values.into_iter().flat_map(f32::to_le_bytes).collect())
            }
            _ => self.parts(tensors)?.read(),
        }
    }

    /// Codes of three numbers, and their scale.
    fn ternary<'a>(&self, tensors: &'a Tensors) -> Result<Ternary<'a>> {
        let (codes, scale) = (self.tensor(tensors, 0)?, self.tensor(tensors, 1)?);
        let &[quarter, cols] = codes.shape else { return wrong(&codes, "a matrix of codes") };
        let Some(out) = quarter.checked_mul(4).filter(|_| codes.dtype == DType::U8) else {
            return wrong(&codes, "codes of 2 bits in u8");
        };
        if scale.elements() != 1 || !scale.dtype.is_float() || scale.dtype.is_block() {
            return wrong(&scale, "one scale in f32, f16 or bf16");
        }
        Ok(Ternary { codes, scale, out, cols })
    }

    /// The shape, codes and scales of four-bit floats.
    fn mxfp4<'a>(
        &self,
        tensors: &'a Tensors,
    ) -> Result<(Vec<usize>, TensorView<'a>, TensorView<'a>)> {
        let (codes, scales) = (self.tensor(tensors, 0)?, self.tensor(tensors, 1)?);
        let Some((blocks, outer)) = scales.shape.split_last() else {
            return wrong(&scales, "scales for blocks of 32");
        };
        if !is_exponents(&scales) || outer.is_empty() {
            return wrong(&scales, "scales in u8 for blocks of 32 of each row");
        }
        let expected: Vec<usize> = match codes.dtype {
            DType::U8 if codes.shape.len() == scales.shape.len() => {
                [outer, &[blocks.saturating_mul(16)]].concat()
            }
            DType::U8 => [scales.shape, &[16]].concat(),
            _ => [outer, &[blocks.saturating_mul(4)]].concat(),
        };
        if codes.shape != expected || !matches!(codes.dtype, DType::U8 | DType::U32) {
            return wrong(&codes, format!("codes {} in u8 or u32", shape(&expected)));
        }
        Ok(([outer, &[blocks.saturating_mul(32)]].concat(), codes, scales))
    }

    /// Eight-bit floats, their scales, the shape of the weight, and the rows and columns that share
    /// a scale.
    fn fp8<'a>(
        &self,
        tensors: &'a Tensors,
        block: Option<[usize; 2]>,
    ) -> Result<(TensorView<'a>, TensorView<'a>, Vec<usize>, [usize; 2])> {
        let (weights, scales) = (self.tensor(tensors, 0)?, self.tensor(tensors, 1)?);
        let (outer, cols) = match (weights.shape.split_last(), weights.dtype) {
            (Some((&cols, outer)), DType::F8E4M3) if !outer.is_empty() => (outer, cols),
            (Some((&words, outer)), DType::U32) if !outer.is_empty() => {
                (outer, words.saturating_mul(4))
            }
            _ => return wrong(&weights, "a matrix in f8_e4m3"),
        };
        let floats = scales.dtype.is_float() && !scales.dtype.is_block();
        if !floats && !is_exponents(&scales) {
            return wrong(&scales, "scales in f32, f16 or bf16, or exponents in u8");
        }
        let out: usize = outer.iter().product();
        let found = match scales.shape.split_last() {
            None => [1, 1],
            Some((&rows, [])) => [rows, 1],
            Some((&across, above)) if above.len() == outer.len() => {
                [above.iter().product(), across]
            }
            Some(_) => return wrong(&scales, "scales for a matrix"),
        };
        let one = |n: usize| n.max(1);
        let mut choices = vec![[one(out), one(cols)], [1, one(cols)]];
        // In a stack, no block reaches into the next matrix.
        let apart = |block: &[usize; 2]| {
            outer.len() == 1 || outer.last().is_some_and(|rows| rows.is_multiple_of(block[0]))
        };
        choices.splice(0..0, block.filter(apart));
        let fits = |b: &&[usize; 2]| [out.div_ceil(b[0]), cols.div_ceil(b[1])] == found;
        match choices.iter().find(fits) {
            Some(block) => Ok((weights, scales, [outer, &[cols]].concat(), *block)),
            None => wrong(
                &scales,
                format!("a scale for the matrix, for each of {out} rows, or for each block"),
            ),
        }
    }

    /// Integer weights, their shapes and types checked.
    fn parts<'a>(&self, tensors: &'a Tensors) -> Result<Parts<'a>> {
        let get = |i| self.tensor(tensors, i);
        let codes = get(0)?;
        let &[rows, words] = codes.shape else { return wrong(&codes, "a matrix of codes") };
        let is_words = matches!(codes.dtype, DType::I32 | DType::U32);
        // Outputs and inputs, and where scales, zeros and groups are.
        let (integers, zeros, scales, order) = match self.scheme {
            Scheme::Gptq { integers, .. } => (integers, Some(1), 2, integers.ordered.then_some(3)),
            Scheme::Awq { group } => {
                (Integers { bits: 4, group, symmetric: false, ordered: false }, Some(1), 2, None)
            }
            Scheme::Packed(mut integers) | Scheme::Bytes(mut integers) => {
                let zeros = (!integers.symmetric).then_some(2);
                let order = integers.ordered.then_some(2 + usize::from(!integers.symmetric));
                if let Scheme::Bytes(_) = self.scheme {
                    integers.bits = 8;
                }
                (integers, zeros, 1, order)
            }
            Scheme::Mxfp4 | Scheme::Fp8 { .. } | Scheme::Ternary | Scheme::Rounded => {
                return wrong(&codes, "integers");
            }
        };
        let Integers { bits, .. } = integers;
        let spread = |words: usize| words.checked_mul(32).map(|all| all / bits);
        let (out, cols) = match self.scheme {
            Scheme::Gptq { .. } => (Some(words), spread(rows)),
            Scheme::Awq { .. } => (spread(words), Some(rows)),
            Scheme::Packed(_) => (Some(rows), spread(words)),
            _ => (Some(rows), Some(words)),
        };
        let fits = match self.scheme {
            Scheme::Bytes(_) => codes.dtype == DType::I8,
            _ => is_words && matches!(bits, 2 | 3 | 4 | 8),
        };
        let (Some(out), Some(cols), true) = (out, cols, fits) else {
            return wrong(&codes, format!("codes of {bits} bits (2, 3, 4 or 8)"));
        };
        let group = integers.group.unwrap_or(cols).max(1);
        let groups = cols.div_ceil(group);
        let (scales, zeros) = (get(scales)?, zeros.map(get).transpose()?);
        let order = order.map(get).transpose()?;
        let down = matches!(self.scheme, Scheme::Gptq { .. } | Scheme::Awq { .. });
        let expected = if down { [groups, out] } else { [out, groups] };
        // A vector for rows, or one number for the matrix.
        let flat = |tensor: &TensorView<'_>| {
            groups == 1 && (tensor.elements() == out || !down && tensor.elements() == 1)
        };
        if scales.shape != expected && !flat(&scales)
            || !matches!(scales.dtype, DType::F16 | DType::BF16 | DType::F32)
        {
            return wrong(&scales, format!("scales {} in f16 or bf16", shape(&expected)));
        }
        if let Some(zeros) = &zeros {
            let packed = out.saturating_mul(bits).div_ceil(32);
            let in_words = if down { [groups, packed] } else { [packed, groups] };
            let words = matches!(zeros.dtype, DType::I32 | DType::U32) && zeros.shape == in_words;
            let bytes = zeros.dtype == DType::I8 && (zeros.shape == expected || flat(zeros));
            let (fits, named) = match self.scheme {
                Scheme::Bytes(_) => (bytes, format!("zeros {} in i8", shape(&expected))),
                Scheme::Packed(_) => (words || bytes, format!("zeros {} in i32", shape(&in_words))),
                _ => (words, format!("zeros {} in i32", shape(&in_words))),
            };
            if !fits {
                return wrong(zeros, named);
            }
        }
        if let Some(order) = &order
            && (order.shape != [cols] || order.dtype != DType::I32)
        {
            return wrong(order, format!("the groups of {cols} inputs in i32"));
        }
        Ok(Parts { scheme: self.scheme, integers, out, cols, group, codes, scales, zeros, order })
    }
}

/// A matrix of three numbers.
struct Ternary<'a> {
    codes: TensorView<'a>,
    scale: TensorView<'a>,
    out: usize,
    cols: usize,
}

impl Ternary<'_> {
    /// Blocks of such numbers, where rows are whole blocks and their scales, which have 16 bits, can
    /// have this one; else numbers of its type.
    fn dtype(&self) -> DType {
        let halves = matches!(self.scale.dtype, DType::F16 | DType::BF16);
        let whole = self.cols.is_multiple_of(DType::Tq2_0.block_elements());
        if halves && whole { DType::Tq2_0 } else { self.scale.dtype }
    }

    fn read(&self) -> Result<Vec<u8>> {
        let (dtype, scale) = (self.dtype(), self.scale.to_f32()?[0]);
        let half = plain::f16_to_f32(plain::f32_to_f16(scale));
        if dtype == DType::Tq2_0 && (half != scale || scale < 0.0) {
            return Err(Error::new(self.scale.name, "a positive scale that f16 can hold", scale));
        }
        let quarter = self.out / 4;
        let code = |r: usize, c: usize| {
            let byte = self.codes.bytes[r % quarter * self.cols + c];
            match byte >> (r / quarter * 2) & 3 {
                3 => wrong(&self.codes, "codes 0, 1 and 2"),
                code => Ok(code),
            }
        };
        let size = self.cols / dtype.block_elements() * dtype.block_bytes();
        rows(self.out, size, |r, bytes| {
            let value = |c: usize| Ok(scale * (f32::from(code(r, c)?) - 1.0));
            let values = (0..self.cols).map(value).collect::<Result<Vec<f32>>>()?;
            dtype.encode(&values, bytes)
        })
    }
}

impl Parts<'_> {
    /// The encoding of the weights.
    fn encoding(&self) -> Encoding {
        let Integers { bits, symmetric, ordered, .. } = self.integers;
        let scale = self.scales.dtype;
        // Numbers, where no block has such scales, groups or codes.
        let numbers = if scale == DType::F16 { scale } else { DType::BF16 }.into();
        let whole = kept(self.group).filter(|kept| self.cols.is_multiple_of(*kept));
        let Some(kept) = whole.filter(|_| !ordered && scale != DType::F32) else {
            return numbers;
        };
        if !symmetric && bits == 4 && scale == DType::F16 {
            return DType::Q5_0.into();
        }
        let bits = bits + usize::from(!symmetric);
        Groups::new(bits, kept, scale).map_or(numbers, Encoding::Groups)
    }

    /// Code `c` of output `r`.
    fn code(&self, r: usize, c: usize) -> u8 {
        let bits = self.integers.bits;
        match self.scheme {
            Scheme::Gptq { .. } => stream(bits, c, |i| word(&self.codes, i * self.out + r)),
            Scheme::Awq { .. } => {
                (word(&self.codes, c * (self.out / 8) + r / 8) >> (4 * AWQ_ORDER[r % 8]) & 15) as u8
            }
            Scheme::Packed(_) => {
                let row = self.cols * bits / 32;
                stream(bits, c, |i| word(&self.codes, r * row + i))
            }
            _ => self.codes.bytes[r * self.cols + c] ^ 0x80,
        }
    }

    /// The zero of a group of output `r`.
    fn zero(&self, r: usize, g: usize) -> u16 {
        let Integers { bits, .. } = self.integers;
        let Some(zeros) = &self.zeros else { return 1 << (bits - 1) };
        let groups = self.cols.div_ceil(self.group);
        match self.scheme {
            Scheme::Gptq { plus, .. } => {
                let row = (self.out * bits).div_ceil(32);
                let stored = u16::from(stream(bits, r, |i| word(zeros, g * row + i)));
                (stored + u16::from(plus)) & ((1 << bits) - 1)
            }
            Scheme::Awq { .. } => {
                (word(zeros, g * (self.out / 8) + r / 8) >> (4 * AWQ_ORDER[r % 8]) & 15) as u16
            }
            _ if zeros.dtype == DType::I8 => {
                let at = if zeros.elements() == 1 { 0 } else { r * groups + g };
                // A zero below all codes wraps round to one above them.
                i16::from(zeros.bytes[at] as i8).wrapping_add(1 << (bits - 1)) as u16
            }
            _ => u16::from(stream(bits, r, |i| word(zeros, i * groups + g))),
        }
    }

    /// The bits of the scale of a group of output `r`, of two bytes or four.
    fn scale(&self, r: usize, g: usize) -> u32 {
        let groups = self.cols.div_ceil(self.group);
        let at = match self.scheme {
            _ if self.scales.elements() == 1 => 0,
            Scheme::Gptq { .. } | Scheme::Awq { .. } => g * self.out + r,
            _ => r * groups + g,
        };
        let size = self.scales.dtype.block_bytes();
        let bytes = &self.scales.bytes[at * size..][..size];
        bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte))
    }

    /// A scale as a number.
    fn number(&self, bits: u32) -> f32 {
        match self.scales.dtype {
            DType::F16 => plain::f16_to_f32(bits as u16),
            DType::BF16 => plain::bf16_to_f32(bits as u16),
            _ => f32::from_bits(bits),
        }
    }

    /// The group of each input, checked; none where they are in order.
    fn order(&self) -> Result<Option<Vec<usize>>> {
        let (Some(order), groups) = (&self.order, self.cols.div_ceil(self.group)) else {
            return Ok(None);
        };
        let all: Option<Vec<usize>> =
            (0..self.cols).map(|i| Some(word(order, i) as usize).filter(|g| *g < groups)).collect();
        match all {
            Some(all) => Ok(Some(all)),
            None => wrong(order, format!("groups of inputs below {groups}")),
        }
    }

    fn read(&self) -> Result<Vec<u8>> {
        let encoding = self.encoding();
        let order = self.order()?;
        let Integers { bits, symmetric, .. } = self.integers;
        let middle = 1u16 << (bits - 1);
        let row_bytes = encoding.bytes_for(self.cols).unwrap_or(0);
        let checked_zero = |r: usize, g: usize| match self.zero(r, g) {
            zero if zero >> bits != 0 => {
                let place = self.zeros.map_or(self.codes.name, |zeros| zeros.name);
                let found = format!("{} for output {r}", zero as i16 - middle as i16);
                Err(Error::new(place, format!("zeros of {bits} bits"), found))
            }
            zero if symmetric && zero != middle => {
                let place = self.zeros.map_or(self.codes.name, |zeros| zeros.name);
                let expected = format!("{middle} for every zero, as symmetric settings have it");
                Err(Error::new(place, expected, format!("{zero} for output {r}")))
            }
            zero => Ok(zero),
        };
        rows(self.out, row_bytes, |r, bytes| match encoding {
            Encoding::Groups(groups) => {
                // Asymmetric zeros move into codes with a bit more, whose middle no zero exceeds.
                let fixed = if symmetric { middle } else { 2 * middle };
                for (i, bytes) in bytes.chunks_exact_mut(groups.bytes()).enumerate() {
                    let first = i * groups.group;
                    let g = first / self.group;
                    let (zero, scale) = (checked_zero(r, g)?, self.scale(r, g));
                    for k in 0..groups.group {
                        let code = u16::from(self.code(r, first + k)) + fixed - zero;
                        let (at, shift) = (k * groups.bits / 8, k * groups.bits % 8);
                        let shifted = code << shift;
                        bytes[at] |= shifted as u8;
                        if shift + groups.bits > 8 {
                            bytes[at + 1] |= (shifted >> 8) as u8;
                        }
                    }
                    let offset = -f32::from(fixed) * self.number(scale);
                    let offset = match groups.scale {
                        DType::F16 => plain::f32_to_f16(offset),
                        _ => plain::f32_to_bf16(offset),
                    };
                    let at = groups.code_bytes();
                    bytes[at..at + 2].copy_from_slice(&(scale as u16).to_le_bytes());
                    bytes[at + 2..at + 4].copy_from_slice(&offset.to_le_bytes());
                }
                Ok(())
            }
            Encoding::Stored(DType::Q5_0) => {
                for (i, bytes) in bytes.chunks_exact_mut(22).enumerate() {
                    let g = i * 32 / self.group;
                    let zero = checked_zero(r, g)?;
                    let code = |k: usize| u16::from(self.code(r, i * 32 + k)) + 16 - zero;
                    let high = (0..32).fold(0u32, |bits, k| bits | u32::from(code(k) >> 4) << k);
                    bytes[..2].copy_from_slice(&(self.scale(r, g) as u16).to_le_bytes());
                    bytes[2..6].copy_from_slice(&high.to_le_bytes());
                    for (k, byte) in bytes[6..].iter_mut().enumerate() {
                        *byte = (code(k) & 15 | (code(16 + k) & 15) << 4) as u8;
                    }
                }
                Ok(())
            }
            Encoding::Stored(dtype) => {
                let group = |c: usize| order.as_ref().map_or(c / self.group, |order| order[c]);
                let groups = 0..self.cols.div_ceil(self.group);
                let zeros: Result<Vec<u16>> = groups.map(|g| checked_zero(r, g)).collect();
                let zeros = zeros?;
                let value = |c: usize| {
                    let (g, code) = (group(c), i32::from(self.code(r, c)));
                    self.number(self.scale(r, g)) * (code - i32::from(zeros[g])) as f32
                };
                let values: Vec<f32> = (0..self.cols).map(value).collect();
                dtype.encode(&values, bytes)
            }
        })
    }
}

/// Makes rows of `row_bytes` bytes on all cores; the first error ends it.
fn rows(
    count: usize,
    row_bytes: usize,
    row: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; count * row_bytes];
    if bytes.is_empty() {
        return Ok(bytes);
    }
    let share = count.div_ceil(std::thread::available_parallelism().map_or(1, usize::from)).max(16);
    let row = &row;
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let parts = bytes.chunks_mut(share * row_bytes).enumerate();
        let threads: Vec<_> = parts
            .map(|(i, part)| {
                scope.spawn(move || {
                    let mut rows = part.chunks_exact_mut(row_bytes).enumerate();
                    rows.try_for_each(|(r, bytes)| row(i * share + r, bytes))
                })
            })
            .collect();
        let lost = || Error::new("a quantised weight", "its rows", "a thread that ended early");
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(lost()))).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    Ok(bytes)
}
