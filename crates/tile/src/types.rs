//! The types of values: scalars, short vectors, and matrix tiles held by a simdgroup.

use std::fmt;

/// A number as memory or a register holds it.
///
/// Arithmetic is on `Bool`, `I32`, `U32` and `F32` only; the others are storage and are cast after
/// a load and before a store, so that every target rounds in the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scalar {
    /// Truth value; never stored.
    Bool,
    /// Signed byte.
    I8,
    /// Unsigned byte.
    U8,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer: every index is one.
    U32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
    /// IEEE single precision.
    F32,
}

impl Scalar {
    /// All of them.
    pub const ALL: [Scalar; 10] = [
        Scalar::Bool,
        Scalar::I8,
        Scalar::U8,
        Scalar::I16,
        Scalar::U16,
        Scalar::I32,
        Scalar::U32,
        Scalar::F16,
        Scalar::BF16,
        Scalar::F32,
    ];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Scalar::Bool => "bool",
            Scalar::I8 => "i8",
            Scalar::U8 => "u8",
            Scalar::I16 => "i16",
            Scalar::U16 => "u16",
            Scalar::I32 => "i32",
            Scalar::U32 => "u32",
            Scalar::F16 => "f16",
            Scalar::BF16 => "bf16",
            Scalar::F32 => "f32",
        }
    }

    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        match self {
            Scalar::Bool | Scalar::I8 | Scalar::U8 => 1,
            Scalar::I16 | Scalar::U16 | Scalar::F16 | Scalar::BF16 => 2,
            Scalar::I32 | Scalar::U32 | Scalar::F32 => 4,
        }
    }

    /// Whether arithmetic may be done in it.
    pub fn computes(self) -> bool {
        matches!(self, Scalar::Bool | Scalar::I32 | Scalar::U32 | Scalar::F32)
    }

    /// Whether it is one of the floating-point formats.
    pub fn is_float(self) -> bool {
        matches!(self, Scalar::F16 | Scalar::BF16 | Scalar::F32)
    }

    /// Whether it is a signed or unsigned integer.
    pub fn is_integer(self) -> bool {
        !self.is_float() && self != Scalar::Bool
    }
}

/// The role of a tile in a matrix product `C += A B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Left operand, `[m, k]`.
    A,
    /// Right operand, `[k, n]`.
    B,
    /// Accumulator, `[m, n]`; the only tile that takes part in element-wise arithmetic.
    C,
    /// One value per row of an accumulator, `[m, 1]`; element-wise arithmetic too.
    Row,
}

impl Role {
    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Role::A => "a",
            Role::B => "b",
            Role::C => "c",
            Role::Row => "row",
        }
    }
}

/// A matrix spread over the 32 lanes of a simdgroup. Which lane holds which element is the target's
/// business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Element type.
    pub scalar: Scalar,
    /// Rows: 16, or 8 after lowering for Metal.
    pub rows: u8,
    /// Columns: as rows, or 1 for [`Role::Row`].
    pub cols: u8,
    /// Its role in a product.
    pub role: Role,
}

impl Tile {
    /// The 16 x 16 tile of the language (16 x 1 for a row).
    pub fn new(scalar: Scalar, role: Role) -> Self {
        Tile::sized(scalar, role, 16)
    }

    /// A tile of `edge` rows.
    pub fn sized(scalar: Scalar, role: Role, edge: u8) -> Self {
        Tile { scalar, rows: edge, cols: if role == Role::Row { 1 } else { edge }, role }
    }

    /// Elements in all lanes together.
    pub fn elements(self) -> usize {
        usize::from(self.rows) * usize::from(self.cols)
    }

    /// The same tile with another element type.
    pub fn with(self, scalar: Scalar) -> Self {
        Tile { scalar, ..self }
    }
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// One number per thread.
    Scalar(Scalar),
    /// 2, 4, 8 or 16 numbers per thread, moved together (at most 16 bytes); no arithmetic.
    Vector(Scalar, u8),
    /// A matrix per simdgroup.
    Tile(Tile),
}

impl Type {
    /// The element type.
    pub fn scalar(self) -> Scalar {
        match self {
            Type::Scalar(scalar) | Type::Vector(scalar, _) => scalar,
            Type::Tile(tile) => tile.scalar,
        }
    }

    /// The same shape with another element type.
    pub fn with(self, scalar: Scalar) -> Self {
        match self {
            Type::Scalar(_) => Type::Scalar(scalar),
            Type::Vector(_, lanes) => Type::Vector(scalar, lanes),
            Type::Tile(tile) => Type::Tile(tile.with(scalar)),
        }
    }

    /// The tile, if it is one.
    pub fn tile(self) -> Option<Tile> {
        match self {
            Type::Tile(tile) => Some(tile),
            _ => None,
        }
    }
}

impl From<Scalar> for Type {
    fn from(scalar: Scalar) -> Self {
        Type::Scalar(scalar)
    }
}

impl From<Tile> for Type {
    fn from(tile: Tile) -> Self {
        Type::Tile(tile)
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Type {
    /// `f32`, `f16x8`, `tile<f32, 16x16, c>`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Scalar(scalar) => write!(f, "{scalar}"),
            Type::Vector(scalar, lanes) => write!(f, "{scalar}x{lanes}"),
            Type::Tile(t) => {
                write!(f, "tile<{}, {}x{}, {}>", t.scalar, t.rows, t.cols, t.role.name())
            }
        }
    }
}
