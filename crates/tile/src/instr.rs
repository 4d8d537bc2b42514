//! Arithmetic: one table in which each operation has its name, its meaning and its spelling per
//! target.
//!
//! The meaning works on the 32 bits that a register holds. `None` is an undefined result (division
//! by zero, a shift by 32 or more): the interpreter reports it, and constant folding leaves it
//! alone.

use crate::types::Scalar;

/// Operations on one operand; the result has its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnaryOp {
    /// `-x`: f32, i32.
    Neg,
    /// Logical for `bool`, every bit for integers.
    Not,
    /// `|x|`: f32.
    Abs,
    /// `e^x`.
    Exp,
    /// `2^x`.
    Exp2,
    /// Natural logarithm.
    Log,
    /// Binary logarithm.
    Log2,
    /// Sine of radians, exact for large arguments too.
    Sin,
    /// Cosine of radians.
    Cos,
    /// Hyperbolic tangent.
    Tanh,
    /// Square root.
    Sqrt,
    /// `1 / sqrt(x)`.
    Rsqrt,
    /// Largest whole number not above.
    Floor,
    /// Smallest whole number not below.
    Ceil,
    /// Nearest whole number, ties to even.
    Round,
    /// How many bits are set: u32.
    Popcount,
    /// How many leading bits are clear: u32.
    LeadingZeros,
}

/// Operations on two operands of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BinaryOp {
    /// `a + b`; integers wrap.
    Add,
    /// `a - b`; integers wrap.
    Sub,
    /// `a * b`; integers wrap.
    Mul,
    /// `a / b`; integers truncate, undefined for zero.
    Div,
    /// The remainder of `Div`: integers.
    Rem,
    /// The smaller; a number rather than a NaN.
    Min,
    /// The larger; a number rather than a NaN.
    Max,
    /// Bits or truth values in both.
    And,
    /// Bits or truth values in either.
    Or,
    /// Bits or truth values in one.
    Xor,
    /// Bits moved up; undefined from 32 on.
    Shl,
    /// Bits moved down, the sign kept for i32; undefined from 32 on.
    Shr,
    /// The upper 32 bits of a product: u32.
    MulHi,
    /// Both as f16, rounded to nearest even, in a word: `a` in the low half. f32.
    PackF16,
    /// The same as bf16.
    PackBf16,
    /// `a == b` to bool.
    Eq,
    /// `a != b` to bool.
    Ne,
    /// `a < b` to bool.
    Lt,
    /// `a <= b` to bool.
    Le,
    /// `a > b` to bool.
    Gt,
    /// `a >= b` to bool.
    Ge,
}

/// How a target writes an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spelling {
    /// Between its operands, or before its only one.
    Sign(&'static str),
    /// As a call.
    Call(&'static str),
}

impl UnaryOp {
    /// All of them, in the order of the table.
    pub const ALL: [UnaryOp; 17] = [
        UnaryOp::Neg,
        UnaryOp::Not,
        UnaryOp::Abs,
        UnaryOp::Exp,
        UnaryOp::Exp2,
        UnaryOp::Log,
        UnaryOp::Log2,
        UnaryOp::Sin,
        UnaryOp::Cos,
        UnaryOp::Tanh,
        UnaryOp::Sqrt,
        UnaryOp::Rsqrt,
        UnaryOp::Floor,
        UnaryOp::Ceil,
        UnaryOp::Round,
        UnaryOp::Popcount,
        UnaryOp::LeadingZeros,
    ];

    /// Name in the text form, spelling in Metal, spelling in CUDA.
    pub fn row(self) -> (&'static str, Spelling, Spelling) {
        use Spelling::{Call, Sign};
        let call = |name, metal, cuda| (name, Call(metal), Call(cuda));
        match self {
            UnaryOp::Neg => ("neg", Sign("-"), Sign("-")),
            UnaryOp::Not => ("not", Sign("~"), Sign("~")),
            UnaryOp::Abs => call("abs", "fabs", "fabsf"),
            UnaryOp::Exp => call("exp", "precise::exp", "expf"),
            UnaryOp::Exp2 => call("exp2", "precise::exp2", "exp2f"),
            UnaryOp::Log => call("log", "precise::log", "logf"),
            UnaryOp::Log2 => call("log2", "precise::log2", "log2f"),
            UnaryOp::Sin => call("sin", "precise::sin", "sinf"),
            UnaryOp::Cos => call("cos", "precise::cos", "cosf"),
            UnaryOp::Tanh => call("tanh", "precise::tanh", "tanhf"),
            UnaryOp::Sqrt => call("sqrt", "precise::sqrt", "sqrtf"),
            UnaryOp::Rsqrt => call("rsqrt", "precise::rsqrt", "rsqrtf"),
            UnaryOp::Floor => call("floor", "floor", "floorf"),
            UnaryOp::Ceil => call("ceil", "ceil", "ceilf"),
            UnaryOp::Round => call("round", "rint", "rintf"),
            UnaryOp::Popcount => call("popcount", "popcount", "__popc"),
            UnaryOp::LeadingZeros => call("clz", "clz", "__clz"),
        }
    }

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Whether it takes this element type.
    pub fn takes(self, scalar: Scalar) -> bool {
        match self {
            UnaryOp::Neg => matches!(scalar, Scalar::F32 | Scalar::I32),
            UnaryOp::Not => matches!(scalar, Scalar::Bool | Scalar::U32 | Scalar::I32),
            UnaryOp::Popcount | UnaryOp::LeadingZeros => scalar == Scalar::U32,
            _ => scalar == Scalar::F32,
        }
    }

    /// Its meaning.
    #[inline(always)]
    pub fn eval(self, scalar: Scalar, a: u32) -> Option<u32> {
        let x = f32::from_bits(a);
        let float = |y: f32| Some(y.to_bits());
        match self {
            UnaryOp::Neg if scalar == Scalar::I32 => Some(a.wrapping_neg()),
            UnaryOp::Neg => float(-x),
            UnaryOp::Not if scalar == Scalar::Bool => Some(u32::from(a == 0)),
            UnaryOp::Not => Some(!a),
            UnaryOp::Abs => float(x.abs()),
            UnaryOp::Exp => float(x.exp()),
            UnaryOp::Exp2 => float(x.exp2()),
            UnaryOp::Log => float(x.ln()),
            UnaryOp::Log2 => float(x.log2()),
            UnaryOp::Sin => float(x.sin()),
            UnaryOp::Cos => float(x.cos()),
            UnaryOp::Tanh => float(x.tanh()),
            UnaryOp::Sqrt => float(x.sqrt()),
            UnaryOp::Rsqrt => float(1.0 / x.sqrt()),
            UnaryOp::Floor => float(x.floor()),
            UnaryOp::Ceil => float(x.ceil()),
            UnaryOp::Round => float(x.round_ties_even()),
            UnaryOp::Popcount => Some(a.count_ones()),
            UnaryOp::LeadingZeros => Some(a.leading_zeros()),
        }
    }
}

impl BinaryOp {
    /// All of them, in the order of the table.
    pub const ALL: [BinaryOp; 21] = [
        BinaryOp::Add,
        BinaryOp::Sub,
        BinaryOp::Mul,
        BinaryOp::Div,
        BinaryOp::Rem,
        BinaryOp::Min,
        BinaryOp::Max,
        BinaryOp::And,
        BinaryOp::Or,
        BinaryOp::Xor,
        BinaryOp::Shl,
        BinaryOp::Shr,
        BinaryOp::MulHi,
        BinaryOp::PackF16,
        BinaryOp::PackBf16,
        BinaryOp::Eq,
        BinaryOp::Ne,
        BinaryOp::Lt,
        BinaryOp::Le,
        BinaryOp::Gt,
        BinaryOp::Ge,
    ];

    /// Name in the text form, spelling in Metal, spelling in CUDA.
    pub fn row(self) -> (&'static str, Spelling, Spelling) {
        use Spelling::{Call, Sign};
        let sign = |name, sign| (name, Sign(sign), Sign(sign));
        match self {
            BinaryOp::Add => sign("add", "+"),
            BinaryOp::Sub => sign("sub", "-"),
            BinaryOp::Mul => sign("mul", "*"),
            BinaryOp::Div => sign("div", "/"),
            BinaryOp::Rem => sign("rem", "%"),
            BinaryOp::Min => ("min", Call("min"), Call("min")),
            BinaryOp::Max => ("max", Call("max"), Call("max")),
            BinaryOp::And => sign("and", "&"),
            BinaryOp::Or => sign("or", "|"),
            BinaryOp::Xor => sign("xor", "^"),
            BinaryOp::Shl => sign("shl", "<<"),
            BinaryOp::Shr => sign("shr", ">>"),
            BinaryOp::MulHi => ("mulhi", Call("mulhi"), Call("__umulhi")),
            BinaryOp::PackF16 => ("pack_f16", Call("tk_f16x2_from"), Call("tk_f16x2_from")),
            BinaryOp::PackBf16 => ("pack_bf16", Call("tk_bf16x2_from"), Call("tk_bf16x2_from")),
            BinaryOp::Eq => sign("eq", "=="),
            BinaryOp::Ne => sign("ne", "!="),
            BinaryOp::Lt => sign("lt", "<"),
            BinaryOp::Le => sign("le", "<="),
            BinaryOp::Gt => sign("gt", ">"),
            BinaryOp::Ge => sign("ge", ">="),
        }
    }

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Whether it takes this element type.
    pub fn takes(self, scalar: Scalar) -> bool {
        let integer = matches!(scalar, Scalar::I32 | Scalar::U32);
        match self {
            BinaryOp::Add
            | BinaryOp::Sub
            | BinaryOp::Mul
            | BinaryOp::Div
            | BinaryOp::Min
            | BinaryOp::Max => integer || scalar == Scalar::F32,
            BinaryOp::Rem | BinaryOp::Shl | BinaryOp::Shr => integer,
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => integer || scalar == Scalar::Bool,
            BinaryOp::MulHi => scalar == Scalar::U32,
            BinaryOp::PackF16 | BinaryOp::PackBf16 => scalar == Scalar::F32,
            BinaryOp::Eq | BinaryOp::Ne => scalar.computes(),
            BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge => {
                integer || scalar == Scalar::F32
            }
        }
    }

    /// Whether the result is a truth value.
    pub fn compares(self) -> bool {
        matches!(
            self,
            BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge
        )
    }

    /// The element type of the result.
    pub fn result(self, operand: Scalar) -> Scalar {
        match self {
            BinaryOp::PackF16 | BinaryOp::PackBf16 => Scalar::U32,
            _ if self.compares() => Scalar::Bool,
            _ => operand,
        }
    }

    /// Its meaning for operands of a type.
    #[inline(always)]
    pub fn eval(self, scalar: Scalar, a: u32, b: u32) -> Option<u32> {
        match scalar {
            Scalar::F32 => self.eval_f32(f32::from_bits(a), f32::from_bits(b)),
            Scalar::I32 => self.eval_i32(a as i32, b as i32),
            _ => self.eval_u32(a, b),
        }
    }

    #[inline(always)]
    fn eval_f32(self, a: f32, b: f32) -> Option<u32> {
        let value = match self {
            BinaryOp::Add => a + b,
            BinaryOp::Sub => a - b,
            BinaryOp::Mul => a * b,
            BinaryOp::Div => a / b,
            BinaryOp::Min => a.min(b),
            BinaryOp::Max => a.max(b),
            BinaryOp::PackF16 => return Some(halves(Scalar::F16, a, b)),
            BinaryOp::PackBf16 => return Some(halves(Scalar::BF16, a, b)),
            _ => return self.compare(a.partial_cmp(&b)),
        };
        Some(value.to_bits())
    }

    #[inline(always)]
    fn eval_i32(self, a: i32, b: i32) -> Option<u32> {
        let value = match self {
            BinaryOp::Add => a.wrapping_add(b),
            BinaryOp::Sub => a.wrapping_sub(b),
            BinaryOp::Mul => a.wrapping_mul(b),
            BinaryOp::Div => a.checked_div(b)?,
            BinaryOp::Rem => a.checked_rem(b)?,
            BinaryOp::Min => a.min(b),
            BinaryOp::Max => a.max(b),
            BinaryOp::And => a & b,
            BinaryOp::Or => a | b,
            BinaryOp::Xor => a ^ b,
            BinaryOp::Shl => a.checked_shl(b as u32)?,
            BinaryOp::Shr => a.checked_shr(b as u32)?,
            _ => return self.compare(Some(a.cmp(&b))),
        };
        Some(value as u32)
    }

    #[inline(always)]
    fn eval_u32(self, a: u32, b: u32) -> Option<u32> {
        Some(match self {
            BinaryOp::Add => a.wrapping_add(b),
            BinaryOp::Sub => a.wrapping_sub(b),
            BinaryOp::Mul => a.wrapping_mul(b),
            BinaryOp::Div => a.checked_div(b)?,
            BinaryOp::Rem => a.checked_rem(b)?,
            BinaryOp::Min => a.min(b),
            BinaryOp::Max => a.max(b),
            BinaryOp::And => a & b,
            BinaryOp::Or => a | b,
            BinaryOp::Xor => a ^ b,
            BinaryOp::Shl => a.checked_shl(b)?,
            BinaryOp::Shr => a.checked_shr(b)?,
            BinaryOp::MulHi => ((u64::from(a) * u64::from(b)) >> 32) as u32,
            _ => return self.compare(Some(a.cmp(&b))),
        })
    }

    /// Comparisons; an unordered pair (a NaN) is only unequal.
    #[inline(always)]
    fn compare(self, order: Option<std::cmp::Ordering>) -> Option<u32> {
        let truth = match self {
            BinaryOp::Eq => order.is_some_and(|o| o.is_eq()),
            BinaryOp::Ne => order.is_none_or(|o| o.is_ne()),
            BinaryOp::Lt => order.is_some_and(|o| o.is_lt()),
            BinaryOp::Le => order.is_some_and(|o| o.is_le()),
            BinaryOp::Gt => order.is_some_and(|o| o.is_gt()),
            BinaryOp::Ge => order.is_some_and(|o| o.is_ge()),
            _ => return None,
        };
        Some(u32::from(truth))
    }
}

/// Two numbers in 16 bits each, the first in the low half.
fn halves(to: Scalar, a: f32, b: f32) -> u32 {
    cast(Scalar::F32, to, a.to_bits()) | cast(Scalar::F32, to, b.to_bits()) << 16
}

/// The meaning of a cast: converts register bits from one type to another. Storage types keep their
/// bits in the low end, signed ones extended.
#[inline(always)]
pub fn cast(from: Scalar, to: Scalar, bits: u32) -> u32 {
    use Scalar::{BF16, Bool, F16, F32, I8, I16, I32, U8, U16, U32};
    let float = match from {
        F32 => Some(f32::from_bits(bits)),
        F16 => Some(half::f16::from_bits(bits as u16).to_f32()),
        BF16 => Some(half::bf16::from_bits(bits as u16).to_f32()),
        _ => None,
    };
    if let Some(x) = float {
        return match to {
            F32 => x.to_bits(),
            F16 => u32::from(half::f16::from_f32(x).to_bits()),
            BF16 => u32::from(half::bf16::from_f32(x).to_bits()),
            Bool => u32::from(x != 0.0),
            I8 => x as i8 as u32,
            U8 => u32::from(x as u8),
            I16 => x as i16 as u32,
            U16 => u32::from(x as u16),
            I32 => x as i32 as u32,
            U32 => x as u32,
        };
    }
    let signed = matches!(from, I8 | I16 | I32);
    let widened = if signed { bits as i32 as f32 } else { bits as f32 };
    match to {
        F32 => widened.to_bits(),
        F16 => u32::from(half::f16::from_f32(widened).to_bits()),
        BF16 => u32::from(half::bf16::from_f32(widened).to_bits()),
        Bool => u32::from(bits != 0),
        I8 => bits as i8 as u32,
        U8 => u32::from(bits as u8),
        I16 => bits as i16 as u32,
        U16 => u32::from(bits as u16),
        I32 | U32 => bits,
    }
}

/// `acc` plus the products of four signed bytes.
#[inline(always)]
pub fn dot4(a: u32, b: u32, acc: u32) -> u32 {
    let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    products
        .fold(acc as i32, |sum, (a, b)| sum.wrapping_add(i32::from(a as i8) * i32::from(b as i8)))
        as u32
}

/// `a b + c` of both halves of words that are two f16 each: a product is exact in f64, and so are
/// most sums.
#[inline(always)]
pub fn fma_halves(a: u32, b: u32, c: u32) -> u32 {
    let half = |word: u32, i: u32| half::f16::from_bits((word >> (16 * i)) as u16).to_f64();
    let of = |i: u32| half::f16::from_f64(half(a, i) * half(b, i) + half(c, i)).to_bits();
    u32::from(of(0)) | u32::from(of(1)) << 16
}

/// Bytes of a table of sixteen: byte `i` is the one that the bits from `4 i` on of `codes` name.
#[inline(always)]
pub fn lookup(codes: u32, table: [u32; 4]) -> u32 {
    let byte = |i: u32| {
        let code = codes >> (4 * i) & 15;
        (table[code as usize / 4] >> (code % 4 * 8) & 255) << (8 * i)
    };
    byte(0) | byte(1) | byte(2) | byte(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct() {
        let mut names: Vec<&str> = UnaryOp::ALL.iter().map(|u| u.name()).collect();
        names.extend(BinaryOp::ALL.iter().map(|b| b.name()));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn undefined_results_are_none() {
        for (op, b) in
            [(BinaryOp::Div, 0), (BinaryOp::Rem, 0), (BinaryOp::Shl, 32), (BinaryOp::Shr, 40)]
        {
            assert_eq!(op.eval(Scalar::U32, 7, b), None);
            assert_eq!(op.eval(Scalar::I32, 7, b), None);
        }
        assert_eq!(BinaryOp::Div.eval(Scalar::I32, i32::MIN as u32, u32::MAX), None);
    }

    #[test]
    fn casts_round_saturate_and_extend() {
        use Scalar::{BF16, F16, F32, I8, I32, U8};
        assert_eq!(cast(F32, U8, 300.7f32.to_bits()), 255);
        assert_eq!(cast(F32, I8, (-200f32).to_bits()) as i32, -128);
        assert_eq!(cast(I8, I32, 0xFFFF_FFFE) as i32, -2);
        assert_eq!(cast(I32, I8, 0x180) as i32, -128);
        assert_eq!(cast(F32, BF16, 1.0f32.to_bits()), 0x3F80);
        assert_eq!(cast(F16, F32, 0x3C00), 1.0f32.to_bits());
        assert_eq!(lookup(0xF0C4, [0x0302_0100, 0x0706_0504, 0, 0xFF00_0000]), 0xFF00_0004);
        assert_eq!(dot4(0xFF02_0301, 0x0101_0201, 10) as i32, 10 + 1 + 6 + 2 - 1);
    }
}
