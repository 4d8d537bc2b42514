//! Expressions as C text with their precedence, and the arithmetic that Metal and CUDA write alike.

use crate::instr::{BinaryOp, Spelling, UnaryOp};
use crate::ir::{AtomicOp, Builtin, Inst, Kernel, LoadHint, Place, Reduce, SimdOp};
use crate::types::{Scalar, Tile, Type};

use super::names::Names;

/// How tightly C's operators bind, in steps that matter here.
pub(super) mod binds {
    /// Names, calls, subscripts.
    pub(in crate::emit) const PRIMARY: u8 = 16;
    /// Signs, casts, dereferences.
    pub(in crate::emit) const UNARY: u8 = 15;
    /// `*`, `/`, `%`.
    pub(in crate::emit) const PRODUCT: u8 = 13;
    /// `+`, `-`.
    pub(in crate::emit) const SUM: u8 = 12;
    /// `<<`, `>>`.
    pub(in crate::emit) const SHIFT: u8 = 11;
    /// `<` and its kin.
    pub(in crate::emit) const ORDER: u8 = 10;
    /// `==`, `!=`.
    pub(in crate::emit) const EQUAL: u8 = 9;
    /// `&`, `^`, `|`.
    pub(in crate::emit) const BITS: u8 = 6;
    /// `&&`, `||`.
    pub(in crate::emit) const LOGIC: u8 = 4;
    /// `? :`.
    pub(in crate::emit) const CHOICE: u8 = 3;
}

/// An expression.
#[derive(Debug, Clone)]
pub(super) struct Text {
    pub(super) text: String,
    binds: u8,
}

impl Text {
    pub(super) fn new(text: impl Into<String>, binds: u8) -> Self {
        Text { text: text.into(), binds }
    }

    /// A name, a call or a subscript.
    pub(super) fn primary(text: impl Into<String>) -> Self {
        Text::new(text, binds::PRIMARY)
    }

    /// As an operand of something that binds this tightly.
    pub(super) fn within(&self, binds: u8) -> String {
        if self.binds >= binds { self.text.clone() } else { format!("({})", self.text) }
    }
}

/// A call of a function.
pub(super) fn call(name: &str, arguments: &[&Text]) -> Text {
    let arguments: Vec<&str> = arguments.iter().map(|a| a.text.as_str()).collect();
    Text::primary(format!("{name}({})", arguments.join(", ")))
}

/// The differences between the languages. Messages of errors say what was expected and what was
/// found.
pub(super) trait Language {
    /// Words that nothing may be called.
    fn reserved(&self) -> &'static [&'static str];
    /// The most shared memory a kernel may declare, in bytes.
    fn shared_limit(&self) -> u32;
    /// Everything up to the body's first instruction; the closing brace is the printer's.
    fn open(&self, kernel: &Kernel, names: &Names, builtins: &[Builtin], out: &mut String);
    /// The declaration of a shared array by its number, and of which other's name it takes over
    /// the memory.
    fn shared(
        &self,
        kernel: &Kernel,
        index: u32,
        name: &str,
        ty: &str,
        over: Option<&str>,
    ) -> String;

    /// The name of an element type.
    fn scalar(&self, scalar: Scalar) -> &'static str;
    /// The name of a vector type that fits 16 bytes.
    fn vector(&self, scalar: Scalar, lanes: u8) -> String;
    /// One element of a vector.
    fn extract(&self, vector: &Text, scalar: Scalar, lanes: u8, at: u8) -> Text;
    /// A vector from its elements.
    fn pack(&self, scalar: Scalar, elements: &[Text]) -> Text;

    /// An operation's name in this language.
    fn unary(&self, op: UnaryOp) -> Spelling;
    /// An operation's name in this language.
    fn binary(&self, op: BinaryOp) -> Spelling;
    /// `a * b + c`, rounded once.
    fn fma(&self) -> &'static str;
    /// A float that is not finite, by its bits.
    fn special(&self, bits: u32) -> Text;
    /// A half or bfloat as f32.
    fn widen(&self, value: &Text) -> Text;
    /// The same bits as another type.
    fn bits(&self, to: Scalar, value: &Text) -> Text;

    /// The thread's place.
    fn builtin(&self, builtin: Builtin) -> String;
    /// The type of a pointer into an array, to be cast to.
    fn pointer(&self, kernel: &Kernel, place: Place, ty: &str, write: bool) -> String;
    /// A load through a pointer with a hint other than `None`; nothing if the language has no such
    /// load.
    fn hinted(&self, hint: LoadHint, pointer: &str) -> Option<Text>;
    /// A read-modify-write at an address.
    fn atomic(&self, op: AtomicOp, place: Place, scalar: Scalar, at: &str, value: &Text) -> Text;
    /// An exchange between lanes.
    fn simd(&self, op: SimdOp, scalar: Scalar, value: &Text, lane: Option<&Text>) -> Text;
    /// A barrier, a fence, a batch boundary: what has neither operands nor result. Empty if there
    /// is nothing to do.
    fn signal(&self, inst: &Inst) -> String;
    /// A copy from buffer to shared memory.
    fn copy(&self, bytes: u32, to: &str, from: &str, keep: Option<&Text>) -> String;

    /// The type of a tile's part in one lane.
    fn tile(&self, tile: Tile) -> Result<String, String>;
    /// How many elements of an accumulator or a row a lane holds.
    fn lanes(&self, tile: Tile) -> u32;
    /// Which element of a row tile belongs to element `e` of an accumulator.
    fn row_of_element(&self) -> &'static str;
    /// The row number of element `e`.
    fn tile_row(&self) -> Text;
    /// The column number of element `e`.
    fn tile_col(&self) -> Text;
    /// A tile from memory.
    fn tile_load(&self, access: &Access<'_>) -> Result<Text, String>;
    /// An accumulator to memory.
    fn tile_store(&self, access: &Access<'_>, value: &str) -> Result<String, String>;
    /// `c + a b`.
    fn mma(&self, a: (Tile, &str), b: &str, c: &str) -> Result<Text, String>;
    /// The beginning of a warpgroup's product: the registers' name and the blocks' element type and
    /// addresses.
    fn wgmma(&self, sum: &str, scalar: Scalar, a: &str, b: &str) -> Result<String, String>;
    /// Likewise, with the left side's four operands in place of a block.
    fn wgmma_of(
        &self,
        sum: &str,
        scalar: Scalar,
        left: &[String],
        b: &str,
    ) -> Result<String, String>;
    /// Keeps the compiler from moving accumulators past a fence or a wait for products.
    fn hold(&self, sum: &str) -> String;
    /// Each row combined.
    fn row_reduce(&self, op: Reduce, value: &str) -> Text;
    /// An operand from the lanes' own words.
    fn tile_of(&self, to: Tile, words: &[Text]) -> Result<Text, String>;
    /// An accumulator as a left operand.
    fn to_left(&self, to: Tile, value: &str) -> Text;
}

/// How a tile lies in memory.
pub(super) struct Access<'a> {
    /// The tile.
    pub(super) tile: Tile,
    /// The address of its first element.
    pub(super) at: String,
    /// Elements from row to row.
    pub(super) stride: &'a Text,
    /// Whether rows and columns change places.
    pub(super) transposed: bool,
    /// Whether it lies in shared memory.
    pub(super) shared: bool,
    /// The alignment of every row's first address, in bytes.
    pub(super) align: u32,
    /// If it is swizzled, the array and the index of its first element.
    pub(super) swizzled: Option<(&'a str, Text)>,
}

/// A type's name, for values.
pub(super) fn type_name(language: &dyn Language, ty: Type) -> Result<String, String> {
    match ty {
        Type::Scalar(scalar) => Ok(language.scalar(scalar).to_owned()),
        Type::Vector(scalar, lanes) if scalar.bytes() * usize::from(lanes) <= 16 => {
            Ok(language.vector(scalar, lanes))
        }
        Type::Vector(..) => Err(format!("expected a vector of at most 16 bytes, found {ty}")),
        Type::Tile(tile) => language.tile(tile),
    }
}

/// An i32 as the u32 of the same bits, as an operand of any operator.
fn unsigned(value: &Text) -> String {
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    match value.text.as_str() {
        number if digits(number) => format!("{number}u"),
        text => format!("uint({text})"),
    }
}

/// One operand.
pub(super) fn unary(language: &dyn Language, op: UnaryOp, scalar: Scalar, a: &Text) -> Text {
    match (op, scalar, language.unary(op)) {
        (UnaryOp::Neg, Scalar::I32, _) => {
            // Through unsigned numbers: the negation of the smallest i32 is undefined in C.
            Text::primary(format!("int(0u - {})", unsigned(a)))
        }
        (UnaryOp::Not, Scalar::Bool, _) => {
            Text::new(format!("!{}", a.within(binds::UNARY)), binds::UNARY)
        }
        (_, _, Spelling::Sign(sign)) => {
            // `- -x` must not become `--x`.
            let operand = a.within(binds::UNARY);
            let space = if operand.starts_with(sign) { " " } else { "" };
            Text::new(format!("{sign}{space}{operand}"), binds::UNARY)
        }
        (UnaryOp::Popcount | UnaryOp::LeadingZeros, _, Spelling::Call(name)) => {
            // The result is an int in CUDA, and would make comparisons signed.
            Text::primary(format!("uint({name}({}))", a.text))
        }
        (_, _, Spelling::Call(name)) => call(name, &[a]),
    }
}

/// Two operands of one type.
pub(super) fn binary(
    language: &dyn Language,
    op: BinaryOp,
    scalar: Scalar,
    a: &Text,
    b: &Text,
) -> Text {
    let sign = match language.binary(op) {
        Spelling::Call(name) => return call(name, &[a, b]),
        Spelling::Sign(sign) => sign,
    };
    let between = |sign: &str, left: u8, right: u8, own: u8| {
        Text::new(format!("{} {sign} {}", a.within(left), b.within(right)), own)
    };
    let signed = scalar == Scalar::I32;
    match op {
        // Through unsigned numbers: signed overflow is undefined in C, here it wraps.
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul if signed => {
            Text::primary(format!("int({} {sign} {})", unsigned(a), unsigned(b)))
        }
        BinaryOp::Shl if signed => {
            Text::primary(format!("int({} << {})", unsigned(a), b.within(binds::UNARY)))
        }
        BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem => {
            between(sign, binds::PRODUCT, binds::UNARY, binds::PRODUCT)
        }
        BinaryOp::Add | BinaryOp::Sub => between(sign, binds::SUM, binds::PRODUCT, binds::SUM),
        BinaryOp::Shl | BinaryOp::Shr => between(sign, binds::UNARY, binds::UNARY, binds::SHIFT),
        BinaryOp::And if scalar == Scalar::Bool => {
            between("&&", binds::EQUAL, binds::EQUAL, binds::LOGIC)
        }
        BinaryOp::Or if scalar == Scalar::Bool => {
            between("||", binds::EQUAL, binds::EQUAL, binds::LOGIC)
        }
        BinaryOp::Xor if scalar == Scalar::Bool => {
            between("!=", binds::UNARY, binds::UNARY, binds::EQUAL)
        }
        BinaryOp::Eq | BinaryOp::Ne => between(sign, binds::SHIFT, binds::SHIFT, binds::EQUAL),
        BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge => {
            between(sign, binds::SHIFT, binds::SHIFT, binds::ORDER)
        }
        // Bitwise operators bind more loosely than readers expect: operands keep their parentheses.
        _ => between(sign, binds::UNARY, binds::UNARY, binds::BITS),
    }
}

/// One or the other.
pub(super) fn select(cond: &Text, yes: &Text, no: &Text) -> Text {
    let [cond, yes, no] = [cond, yes, no].map(|t| t.within(binds::CHOICE + 1));
    Text::new(format!("{cond} ? {yes} : {no}"), binds::CHOICE)
}

/// A number converted: see [`crate::instr::cast`].
pub(super) fn cast(language: &dyn Language, from: Scalar, to: Scalar, value: &Text) -> Text {
    use Scalar::{BF16, Bool, F16, F32, I8, I16, I32, U8, U16, U32};
    let function = |name: &str, value: &Text| Text::primary(format!("{name}({})", value.text));
    let narrow = |value: &Text| match to {
        F32 => value.clone(),
        _ => function(language.scalar(to), value),
    };
    if from == to {
        return value.clone();
    }
    if from.is_float() {
        let wide = if from == F32 { value.clone() } else { language.widen(value) };
        return match to {
            F16 | BF16 | F32 => narrow(&wide),
            Bool => Text::new(format!("{} != 0.0f", wide.within(binds::SHIFT)), binds::EQUAL),
            I8 => function("tk_i8", &wide),
            U8 => function("tk_u8", &wide),
            I16 => function("tk_i16", &wide),
            U16 => function("tk_u16", &wide),
            I32 => function("tk_i32", &wide),
            U32 => function("tk_u32", &wide),
        };
    }
    match to {
        F16 | BF16 => narrow(&function("float", value)),
        Bool => Text::new(format!("{} != 0", value.within(binds::SHIFT)), binds::EQUAL),
        _ => function(language.scalar(to), value),
    }
}
