//! [`Val`]: one number per thread, with operators.

use super::*;

/// One number per thread: the result of an instruction. Copying it copies the name, not the work.
#[derive(Debug)]
pub struct Val<T> {
    pub(crate) value: Value,
    of: PhantomData<T>,
}

impl<T> Clone for Val<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Val<T> {}

/// A type that can stand where a [`Val`] is wanted: a `Val`, a number, a [`Var`].
#[diagnostic::on_unimplemented(message = "`{Self}` is not a `Val<{T}>`, a `{T}` or a `Var<{T}>`")]
pub trait IntoVal<T> {
    /// The value.
    fn val(self) -> Val<T>;
}

impl<T> IntoVal<T> for Val<T> {
    fn val(self) -> Val<T> {
        self
    }
}

impl<T: Number> IntoVal<T> for T {
    #[track_caller]
    fn val(self) -> Val<T> {
        Val::wrap(literal(self.literal()))
    }
}

impl<T: Number> IntoVal<T> for &Var<T> {
    #[track_caller]
    fn val(self) -> Val<T> {
        self.get()
    }
}

/// A condition of `if`: a `bool` known while building, or a `Val<bool>`.
pub trait Condition {
    /// The truth, or the value to test on the device.
    fn known(self) -> std::result::Result<bool, Val<bool>>;
}

impl Condition for bool {
    fn known(self) -> std::result::Result<bool, Val<bool>> {
        Ok(self)
    }
}

impl Condition for Val<bool> {
    fn known(self) -> std::result::Result<bool, Val<bool>> {
        Err(self)
    }
}

impl<T> Val<T> {
    pub(crate) fn wrap(value: Value) -> Self {
        Val { value, of: PhantomData }
    }
}

impl<T> Val<T> {
    /// Converted to another element type: floats round to nearest even and saturate on the way to
    /// integers.
    #[track_caller]
    pub fn cast<U: Element>(self) -> Val<U> {
        Val::wrap(convert(self.value, U::SCALAR))
    }

    /// Converted to the type in which an array stores it.
    #[track_caller]
    pub fn to(self, scalar: Scalar) -> Val<Raw> {
        Val::wrap(convert(self.value, scalar))
    }

    /// As f32.
    #[track_caller]
    pub fn f32(self) -> Val<f32> {
        self.cast()
    }

    /// As u32.
    #[track_caller]
    pub fn u32(self) -> Val<u32> {
        self.cast()
    }

    /// As i32.
    #[track_caller]
    pub fn i32(self) -> Val<i32> {
        self.cast()
    }

    /// The same bits as another type of the same size.
    #[track_caller]
    pub fn bits<U: Element>(self) -> Val<U> {
        Val::wrap(reinterpret(self.value, U::SCALAR))
    }
}

#[track_caller]
pub(super) fn convert(value: Value, to: Scalar) -> Value {
    match build::type_of(value).scalar() == to {
        true => value,
        false => define(Inst::Cast(to, value), to),
    }
}

#[track_caller]
fn reinterpret(value: Value, to: Scalar) -> Value {
    define(Inst::Bitcast(to, value), to)
}

#[track_caller]
fn unary<T: Element>(op: UnaryOp, a: Val<T>) -> Val<T> {
    Val::wrap(unary_of(op, a.value, T::SCALAR))
}

#[track_caller]
fn unary_of(op: UnaryOp, a: Value, result: Scalar) -> Value {
    define(Inst::Unary(op, a), result)
}

#[track_caller]
fn binary<T: Element>(op: BinaryOp, a: Val<T>, b: Val<T>) -> Val<T> {
    Val::wrap(binary_of(op, a.value, b.value, T::SCALAR))
}

#[track_caller]
fn binary_of(op: BinaryOp, a: Value, b: Value, result: Scalar) -> Value {
    define(Inst::Binary(op, a, b), result)
}

#[track_caller]
fn compare<T: Element>(op: BinaryOp, a: Val<T>, b: Val<T>) -> Val<bool> {
    Val::wrap(binary_of(op, a.value, b.value, Scalar::Bool))
}

impl<T: Number> Val<T> {
    /// The smaller.
    #[track_caller]
    pub fn min(self, other: impl IntoVal<T>) -> Val<T> {
        binary(BinaryOp::Min, self, other.val())
    }

    /// The larger.
    #[track_caller]
    pub fn max(self, other: impl IntoVal<T>) -> Val<T> {
        binary(BinaryOp::Max, self, other.val())
    }
}

/// Comparisons: between [`Val`]s they are recorded; between plain numbers they are Rust's.
pub trait Order<Rhs> {
    /// `bool` or `Val<bool>`.
    type Truth;
    /// `self == other`.
    fn eq(self, other: Rhs) -> Self::Truth;
    /// `self != other`.
    fn ne(self, other: Rhs) -> Self::Truth;
    /// `self < other`.
    fn lt(self, other: Rhs) -> Self::Truth;
    /// `self <= other`.
    fn le(self, other: Rhs) -> Self::Truth;
    /// `self > other`.
    fn gt(self, other: Rhs) -> Self::Truth;
    /// `self >= other`.
    fn ge(self, other: Rhs) -> Self::Truth;
}

/// `&&` and `||` in a kernel: between [`Val`]s both sides are computed; a plain truth on the left
/// decides, as in Rust, whether the right is.
pub trait Truth<Rhs> {
    /// `self && other`.
    fn both(self, other: impl FnOnce() -> Rhs) -> Rhs;
    /// `self || other`.
    fn either(self, other: impl FnOnce() -> Rhs) -> Rhs;
}

impl Truth<bool> for bool {
    fn both(self, other: impl FnOnce() -> bool) -> bool {
        self && other()
    }

    fn either(self, other: impl FnOnce() -> bool) -> bool {
        self || other()
    }
}

impl Truth<Val<bool>> for bool {
    #[track_caller]
    fn both(self, other: impl FnOnce() -> Val<bool>) -> Val<bool> {
        if self { other() } else { false.val() }
    }

    #[track_caller]
    fn either(self, other: impl FnOnce() -> Val<bool>) -> Val<bool> {
        if self { true.val() } else { other() }
    }
}

impl Truth<Val<bool>> for Val<bool> {
    #[track_caller]
    fn both(self, other: impl FnOnce() -> Val<bool>) -> Val<bool> {
        self & other()
    }

    #[track_caller]
    fn either(self, other: impl FnOnce() -> Val<bool>) -> Val<bool> {
        self | other()
    }
}

macro_rules! recorded_order {
    ($(($name:ident, $op:ident)),*) => {
        impl<T: Number, R: IntoVal<T>> Order<R> for Val<T> {
            type Truth = Val<bool>;
            $(#[track_caller]
            fn $name(self, other: R) -> Val<bool> {
                compare(BinaryOp::$op, self, other.val())
            })*
        }
    };
}
recorded_order!((eq, Eq), (ne, Ne), (lt, Lt), (le, Le), (gt, Gt), (ge, Ge));

macro_rules! plain_order {
    ($($t:ty),*) => {
        $(impl Order<$t> for $t {
            type Truth = bool;
            fn eq(self, other: $t) -> bool { self == other }
            fn ne(self, other: $t) -> bool { self != other }
            fn lt(self, other: $t) -> bool { self < other }
            fn le(self, other: $t) -> bool { self <= other }
            fn gt(self, other: $t) -> bool { self > other }
            fn ge(self, other: $t) -> bool { self >= other }
        })*
    };
}
plain_order!(usize, u32, i32, u8, Scalar);

macro_rules! operator {
    ($trait:ident, $method:ident, $op:ident, $($t:ty),*) => {
        $(impl<R: IntoVal<$t>> std::ops::$trait<R> for Val<$t> {
            type Output = Val<$t>;
            #[track_caller]
            fn $method(self, other: R) -> Val<$t> {
                binary(BinaryOp::$op, self, other.val())
            }
        }
        impl std::ops::$trait<Val<$t>> for $t {
            type Output = Val<$t>;
            #[track_caller]
            fn $method(self, other: Val<$t>) -> Val<$t> {
                binary(BinaryOp::$op, self.val(), other)
            }
        })*
    };
}
operator!(Add, add, Add, f32, i32, u32);
operator!(Sub, sub, Sub, f32, i32, u32);
operator!(Mul, mul, Mul, f32, i32, u32);
operator!(Div, div, Div, f32, i32, u32);
operator!(Rem, rem, Rem, i32, u32);
operator!(BitAnd, bitand, And, i32, u32, bool);
operator!(BitOr, bitor, Or, i32, u32, bool);
operator!(BitXor, bitxor, Xor, i32, u32, bool);
operator!(Shl, shl, Shl, i32, u32);
operator!(Shr, shr, Shr, i32, u32);

impl<T: Number> Val<T> {
    /// `self + other`, for helpers that are generic over the number type.
    #[track_caller]
    pub fn plus(self, other: impl IntoVal<T>) -> Val<T> {
        binary(BinaryOp::Add, self, other.val())
    }
}

impl std::ops::Neg for Val<f32> {
    type Output = Val<f32>;
    #[track_caller]
    fn neg(self) -> Val<f32> {
        unary(UnaryOp::Neg, self)
    }
}

impl std::ops::Neg for Val<i32> {
    type Output = Val<i32>;
    #[track_caller]
    fn neg(self) -> Val<i32> {
        unary(UnaryOp::Neg, self)
    }
}

impl std::ops::Not for Val<bool> {
    type Output = Val<bool>;
    #[track_caller]
    fn not(self) -> Val<bool> {
        unary(UnaryOp::Not, self)
    }
}

impl std::ops::Not for Val<u32> {
    type Output = Val<u32>;
    #[track_caller]
    fn not(self) -> Val<u32> {
        unary(UnaryOp::Not, self)
    }
}

macro_rules! functions {
    ($($name:ident, $op:ident, $what:literal;)*) => {
        impl Val<f32> {
            $(#[doc = $what]
            #[track_caller]
            pub fn $name(self) -> Val<f32> {
                unary(UnaryOp::$op, self)
            })*
        }
    };
}
functions! {
    abs, Abs, "`|x|`.";
    exp, Exp, "`e^x`.";
    exp2, Exp2, "`2^x`.";
    ln, Log, "Natural logarithm.";
    log2, Log2, "Binary logarithm.";
    sin, Sin, "Sine of radians.";
    cos, Cos, "Cosine of radians.";
    tanh, Tanh, "Hyperbolic tangent.";
    sqrt, Sqrt, "Square root.";
    rsqrt, Rsqrt, "`1 / sqrt(x)`.";
    floor, Floor, "Largest whole number not above.";
    ceil, Ceil, "Smallest whole number not below.";
    round, Round, "Nearest whole number, ties to even.";
}

#[track_caller]
fn fused(a: Value, b: Value, c: Value) -> Value {
    define(Inst::Fma(a, b, c), Scalar::F32)
}

impl Val<f32> {
    /// `self * b + c`, rounded once.
    #[track_caller]
    pub fn fma(self, b: impl IntoVal<f32>, c: impl IntoVal<f32>) -> Val<f32> {
        Val::wrap(fused(self.value, b.val().value, c.val().value))
    }

    /// This number and the next in one word, rounded to f16 or bf16, this one in the low half.
    ///
    /// # Panics
    /// For other types.
    #[track_caller]
    pub fn pack(self, next: Val<f32>, scalar: Scalar) -> Val<u32> {
        let op = match scalar {
            Scalar::F16 => BinaryOp::PackF16,
            Scalar::BF16 => BinaryOp::PackBf16,
            _ => panic!("f16 or bf16 expected, found {scalar}"),
        };
        Val::wrap(define(Inst::Binary(op, self.value, next.value), Scalar::U32))
    }
}

impl Val<u32> {
    /// How many bits are set.
    #[track_caller]
    pub fn count_ones(self) -> Val<u32> {
        unary(UnaryOp::Popcount, self)
    }

    /// How many leading bits are clear.
    #[track_caller]
    pub fn leading_zeros(self) -> Val<u32> {
        unary(UnaryOp::LeadingZeros, self)
    }

    /// The upper half of the 64-bit product.
    #[track_caller]
    pub fn mul_hi(self, other: impl IntoVal<u32>) -> Val<u32> {
        binary(BinaryOp::MulHi, self, other.val())
    }

    /// `acc` plus the sum of products of the four signed bytes in each.
    #[track_caller]
    pub fn dot4(self, other: Val<u32>, acc: impl IntoVal<i32>) -> Val<i32> {
        let (a, b, acc) = (self.value, other.value, acc.val().value);
        Val::wrap(define(Inst::Dot4 { a, b, acc }, Scalar::I32))
    }

    /// `self * by + add`, rounded once, of both halves of words that are two f16 each.
    #[track_caller]
    pub fn fma_halves(self, by: Val<u32>, add: Val<u32>) -> Val<u32> {
        let (a, b, c) = (self.value, by.value, add.value);
        Val::wrap(define(Inst::FmaHalves { a, b, c }, Scalar::U32))
    }

    /// Four bytes of a table of sixteen: byte `i` is the one that the bits from `4 i` on name.
    #[track_caller]
    pub fn lookup(self, table: [u8; 16]) -> Val<u32> {
        let words = table.as_chunks::<4>().0.iter();
        let table = words.map(|word| u32::from_le_bytes(*word).val().value).collect();
        Val::wrap(define(Inst::Lookup { codes: self.value, table }, Scalar::U32))
    }
}
