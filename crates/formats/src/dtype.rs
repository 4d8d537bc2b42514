//! The number types Delft stores: names, ids in GGUF, sizes in bytes, and decoding to f32.

use std::fmt;

use crate::quant::{BlockFormat, plain};
use crate::{Error, Result};

/// How a tensor's elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
    /// IEEE double precision.
    F64,
    /// Signed bytes.
    I8,
    /// Signed 16-bit integers.
    I16,
    /// Signed 32-bit integers.
    I32,
    /// Signed 64-bit integers.
    I64,
    /// Unsigned bytes (safetensors only).
    U8,
    /// Unsigned 16-bit integers (safetensors only).
    U16,
    /// Unsigned 32-bit integers (safetensors only).
    U32,
    /// Unsigned 64-bit integers (safetensors only).
    U64,
    /// One byte each, 0 or 1 (safetensors only).
    Bool,
    /// Eight-bit floats, four bits of exponent and three of mantissa, without infinities
    /// (safetensors only).
    F8E4M3,
    /// Powers of two: an exponent in a byte (safetensors only).
    F8E8M0,
    /// [`crate::quant::Q4_0`].
    Q4_0,
    /// [`crate::quant::Q4_1`].
    Q4_1,
    /// [`crate::quant::Q5_0`].
    Q5_0,
    /// [`crate::quant::Q5_1`].
    Q5_1,
    /// [`crate::quant::Q8_0`].
    Q8_0,
    /// [`crate::quant::Q2K`].
    Q2K,
    /// [`crate::quant::Q3K`].
    Q3K,
    /// [`crate::quant::Q4K`].
    Q4K,
    /// [`crate::quant::Q5K`].
    Q5K,
    /// [`crate::quant::Q6K`].
    Q6K,
    /// [`crate::quant::Iq4Nl`].
    Iq4Nl,
    /// [`crate::quant::Iq4Xs`].
    Iq4Xs,
    /// [`crate::quant::Mxfp4`].
    Mxfp4,
    /// [`crate::quant::Tq1_0`].
    Tq1_0,
    /// [`crate::quant::Tq2_0`].
    Tq2_0,
}

/// Runs an expression with `B` bound to the [`BlockFormat`](crate::quant::BlockFormat) type of a
/// [`DType`](crate::DType), or another expression for types that are not blocks.
///
/// ```
/// use delft_formats::{DType, quant::BlockFormat, with_block};
/// fn codes_per_block(dtype: DType) -> Option<usize> {
///     with_block!(dtype, B => Some(B::ELEMENTS), else => None)
/// }
/// assert_eq!(codes_per_block(DType::Q6K), Some(256));
/// assert_eq!(codes_per_block(DType::F32), None);
/// ```
#[macro_export]
macro_rules! with_block {
    ($dtype:expr, $B:ident => $then:expr, else => $else:expr) => {
        match $dtype {
            $crate::DType::Q4_0 => {
                type $B = $crate::quant::Q4_0;
                $then
            }
            $crate::DType::Q4_1 => {
                type $B = $crate::quant::Q4_1;
                $then
            }
            $crate::DType::Q5_0 => {
                type $B = $crate::quant::Q5_0;
                $then
            }
            $crate::DType::Q5_1 => {
                type $B = $crate::quant::Q5_1;
                $then
            }
            $crate::DType::Q8_0 => {
                type $B = $crate::quant::Q8_0;
                $then
            }
            $crate::DType::Q2K => {
                type $B = $crate::quant::Q2K;
                $then
            }
            $crate::DType::Q3K => {
                type $B = $crate::quant::Q3K;
                $then
            }
            $crate::DType::Q4K => {
                type $B = $crate::quant::Q4K;
                $then
            }
            $crate::DType::Q5K => {
                type $B = $crate::quant::Q5K;
                $then
            }
            $crate::DType::Q6K => {
                type $B = $crate::quant::Q6K;
                $then
            }
            $crate::DType::Iq4Nl => {
                type $B = $crate::quant::Iq4Nl;
                $then
            }
            $crate::DType::Iq4Xs => {
                type $B = $crate::quant::Iq4Xs;
                $then
            }
            $crate::DType::Mxfp4 => {
                type $B = $crate::quant::Mxfp4;
                $then
            }
            $crate::DType::Tq1_0 => {
                type $B = $crate::quant::Tq1_0;
                $then
            }
            $crate::DType::Tq2_0 => {
                type $B = $crate::quant::Tq2_0;
                $then
            }
            _ => $else,
        }
    };
}

/// ggml's names for the type ids that Delft does not store; ids that ggml has retired are absent.
const UNSUPPORTED: &[(u32, &str)] = &[
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (29, "IQ1_M"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (42, "Q2_0"),
];

impl DType {
    /// Every type, in the order of the enum.
    pub const ALL: [DType; 30] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F64,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Bool,
        DType::F8E4M3,
        DType::F8E8M0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Iq4Nl,
        DType::Iq4Xs,
        DType::Mxfp4,
        DType::Tq1_0,
        DType::Tq2_0,
    ];

    /// Its name in lower case: `f32`, `q4_k`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F64 => "f64",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::Bool => "bool",
            DType::F8E4M3 => "f8_e4m3",
            DType::F8E8M0 => "f8_e8m0",
            block => with_block!(block, B => B::NAME, else => ""),
        }
    }

    /// The type of that name, in either case.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
    }

    /// The type id that GGUF files use; none for the types only safetensors has.
    pub fn ggml_id(self) -> Option<u32> {
        Some(match self {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q5_0 => 6,
            DType::Q5_1 => 7,
            DType::Q8_0 => 8,
            DType::Q2K => 10,
            DType::Q3K => 11,
            DType::Q4K => 12,
            DType::Q5K => 13,
            DType::Q6K => 14,
            DType::Iq4Nl => 20,
            DType::Iq4Xs => 23,
            DType::Mxfp4 => 39,
            DType::Tq1_0 => 34,
            DType::Tq2_0 => 35,
            DType::I8 => 24,
            DType::I16 => 25,
            DType::I32 => 26,
            DType::I64 => 27,
            DType::F64 => 28,
            DType::BF16 => 30,
            DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::Bool => return None,
            DType::F8E4M3 | DType::F8E8M0 => return None,
        })
    }

    /// The type that a GGUF id stands for; `place` begins the error.
    ///
    /// # Errors
    /// An id that nobody knows, or a type that only ggml has, by its name.
    pub fn from_ggml_id(id: u32, place: impl fmt::Display) -> Result<DType> {
        if let Some(dtype) = DType::ALL.into_iter().find(|dtype| dtype.ggml_id() == Some(id)) {
            return Ok(dtype);
        }
        let found = match UNSUPPORTED.iter().find(|(known, _)| *known == id) {
            Some((_, name)) => format!("{name} ({id}), which is not supported"),
            None => format!("unknown tensor type {id}"),
        };
        let supported: Vec<&str> =
            DType::ALL.into_iter().filter(|d| d.ggml_id().is_some()).map(DType::name).collect();
        Err(Error::new(place, "a supported tensor type", found)
            .hint(format!("supported: {}", supported.join(" "))))
    }

    /// Elements per block: 1 for plain types.
    pub fn block_elements(self) -> usize {
        with_block!(self, B => B::ELEMENTS, else => 1)
    }

    /// Bytes per block; for plain types, bytes per element.
    pub fn block_bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E8M0 => 1,
            block => with_block!(block, B => B::BYTES, else => 1),
        }
    }

    /// Whether elements come in quantised blocks.
    pub fn is_block(self) -> bool {
        self.block_elements() > 1
    }

    /// Whether [`DType::decode`] turns it into numbers: the floats and the blocks.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64) || self.is_block()
    }

    /// Bytes that `elements` take; none where that is no whole number of blocks, or too large.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        let per_block = self.block_elements() as u64;
        if !elements.is_multiple_of(per_block) {
            return None;
        }
        (elements / per_block).checked_mul(self.block_bytes() as u64)
    }

    /// Bytes of any float or block type to f32.
    ///
    /// # Errors
    /// An integer type, or bytes that are not `values.len()` elements.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
        self.check_sizes("decode", bytes.len(), values.len())?;
        match self {
            DType::F32 => plain::decode_f32(bytes, values),
            DType::F16 => plain::decode_f16(bytes, values),
            DType::BF16 => plain::decode_bf16(bytes, values),
            DType::F64 => {
                for (b, v) in bytes.chunks_exact(8).zip(values) {
                    *v =
                        f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32;
                }
            }
            block => with_block!(block, B => {
                for (b, w) in bytes.chunks_exact(B::BYTES).zip(values.chunks_exact_mut(B::ELEMENTS)) {
                    B::decode(b, w);
                }
            }, else => return Err(self.not_float("decode"))),
        }
        Ok(())
    }

    /// f32 to bytes of any float or block type.
    ///
    /// # Errors
    /// As [`DType::decode`].
    pub fn encode(self, values: &[f32], bytes: &mut [u8]) -> Result<()> {
        self.check_sizes("encode", bytes.len(), values.len())?;
        match self {
            DType::F32 => plain::encode_f32(values, bytes),
            DType::F16 => plain::encode_f16(values, bytes),
            DType::BF16 => plain::encode_bf16(values, bytes),
            DType::F64 => {
                for (b, &v) in bytes.chunks_exact_mut(8).zip(values) {
                    b.copy_from_slice(&f64::from(v).to_le_bytes());
                }
            }
            block => with_block!(block, B => {
                for (b, w) in bytes.chunks_exact_mut(B::BYTES).zip(values.chunks_exact(B::ELEMENTS)) {
                    B::encode(w, b);
                }
            }, else => return Err(self.not_float("encode"))),
        }
        Ok(())
    }

    /// As [`DType::encode`], where the squared error of each value counts by its importance: a
    /// positive number for each, as a block type's [`encode_by`](crate::quant::BlockFormat::encode_by)
    /// takes it.
    ///
    /// # Errors
    /// As for [`DType::decode`], and another number of importances than values.
    pub fn encode_by(self, values: &[f32], importance: &[f32], bytes: &mut [u8]) -> Result<()> {
        self.check_sizes("encode", bytes.len(), values.len())?;
        if importance.len() != values.len() {
            let expected = format!("{} importances", values.len());
            return Err(Error::new(format!("encode {self}"), expected, importance.len()));
        }
        with_block!(self, B => {
            let values = values.chunks_exact(B::ELEMENTS).zip(importance.chunks_exact(B::ELEMENTS));
            for (b, (w, by)) in bytes.chunks_exact_mut(B::BYTES).zip(values) {
                B::encode_by(w, by, b);
            }
        }, else => return self.encode(values, bytes));
        Ok(())
    }

    fn check_sizes(self, doing: &str, bytes: usize, elements: usize) -> Result<()> {
        match self.bytes_for(elements as u64) {
            Some(expected) if expected == bytes as u64 => Ok(()),
            Some(expected) => {
                let expected = format!("{expected} bytes for {elements} elements");
                Err(Error::new(format!("{doing} {self}"), expected, format!("{bytes} bytes")))
            }
            None => {
                let expected = format!("a multiple of {} elements", self.block_elements());
                Err(Error::new(format!("{doing} {self}"), expected, elements))
            }
        }
    }

    fn not_float(self, doing: &str) -> Error {
        Error::new(doing, "a float or block type", self)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
