//! The table of instructions. A row has an instruction's name, the pieces of its text, whether it
//! has an effect, who must reach it together, and the rule of its operands. The text form's printer
//! and parser, the operands and arrays that passes rename, the verifier's rules of operands and of
//! uniform control, and purity all follow from it.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::LazyLock;

use crate::instr::{BinaryOp, UnaryOp};
use crate::ir::{
    Access, AtomicOp, Block, Builtin, Inst, Literal, LoadHint, Place, Reduce, SimdOp, Value,
};
use crate::types::{Scalar, Type};
use crate::verify::{Computed, Operands};

/// Who agrees on something: on a value, or on reaching an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// All threads of the group.
    Group,
    /// All lanes of a simdgroup.
    Simd,
    /// One thread alone.
    Thread,
}

/// A piece of an instruction's text after its name. Values, elements and numbers that follow each
/// other have commas between them.
pub(crate) enum Piece<'i> {
    /// `%3`, which the instruction reads.
    Value(&'i mut Value),
    /// A value on which all lanes must agree unless it is a tile, and what errors call it.
    Agreed(&'static str, &'i mut Value),
    /// `%3, %4, ..`: one or more.
    Values(&'i mut Vec<Value>),
    /// A word or sign and a value, or nothing.
    Optional(&'static str, &'i mut Option<Value>),
    /// `x[%3]`: what the instruction does with the array, the array, the index.
    Element(Access, &'i mut Place, &'i mut Value),
    /// An element at which a tile begins: all lanes must agree on the index, which errors call so.
    Tile(Access, &'i mut Place, &'static str, &'i mut Value),
    /// `x`: an array as a whole.
    Array(Access, &'i mut Place),
    /// A word or sign that stands there.
    Word(&'static str),
    /// A word, or nothing.
    Flag(&'static str, &'i mut bool),
    /// A number, and what errors call it; nothing for an operation that has none.
    Number(&'static str, Option<&'i mut u8>),
    /// `lanes 8`, or nothing for one lane.
    Lanes(&'i mut u8),
    /// `stream`, `coherent` or nothing.
    LoadHint(&'i mut LoadHint),
    /// The number itself, in place of the instruction's name; its type is the result's.
    Literal(&'i mut Literal),
    /// The name of a constant.
    Constant(&'i mut u32),
    /// The name of an argument.
    Argument(&'i mut u32),
    /// The type of the result, which stands before the instruction.
    Result(&'i mut Type),
    /// The element type of the result.
    Scalar(&'i mut Scalar),
    /// `%7: u32`: the index that a loop defines.
    Defined(&'i mut Value),
    /// `{`, and a block to its `}`.
    Body(&'i mut Block),
    /// Two blocks with `} else {` between them; the second may be missing.
    Branches(&'i mut Block, &'i mut Block),
}

impl Piece<'_> {
    /// Whether a comma separates it from a piece of this kind after it.
    pub(crate) fn is_listed(&self) -> bool {
        matches!(
            self,
            Piece::Value(_)
                | Piece::Agreed(..)
                | Piece::Values(_)
                | Piece::Element(..)
                | Piece::Tile(..)
                | Piece::Number(_, Some(_))
        )
    }
}

/// What a piece says of operands and arrays. Passes and the verifier ask for them again and again,
/// so that no instruction is copied for it.
enum Read<'i> {
    /// Values that it reads.
    Values(&'i [Value]),
    /// An array, what is done with it, and the index.
    Array(Access, Place, &'i [Value]),
    /// Neither.
    Nothing,
}

/// The kinds of [`Piece`], as what they say of operands and arrays.
#[allow(non_snake_case, reason = "they stand for the pieces in the table")]
mod read {
    use std::slice::from_ref;

    use super::Read;
    use crate::ir::{self, Access, Block, Builtin, Place, SimdOp};
    use crate::types;

    pub(super) fn Value(value: &ir::Value) -> Read<'_> {
        Read::Values(from_ref(value))
    }
    pub(super) fn Agreed<'i>(_: &str, value: &'i ir::Value) -> Read<'i> {
        Read::Values(from_ref(value))
    }
    pub(super) fn Values(values: &[ir::Value]) -> Read<'_> {
        Read::Values(values)
    }
    pub(super) fn Optional<'i>(_: &str, value: &'i Option<ir::Value>) -> Read<'i> {
        Read::Values(value.as_slice())
    }
    pub(super) fn Element<'i>(access: Access, place: &Place, index: &'i ir::Value) -> Read<'i> {
        Read::Array(access, *place, from_ref(index))
    }
    pub(super) fn Tile<'i>(
        access: Access,
        place: &Place,
        _: &str,
        index: &'i ir::Value,
    ) -> Read<'i> {
        Read::Array(access, *place, from_ref(index))
    }
    pub(super) fn Array<'i>(access: Access, place: &Place) -> Read<'i> {
        Read::Array(access, *place, &[])
    }
    pub(super) fn axis(_: &Builtin) -> Option<&u8> {
        None
    }
    pub(super) fn mask(_: &SimdOp) -> Option<&u8> {
        None
    }

    macro_rules! nothing {
        ($($piece:ident($($of:ty),*))*) => {
            $(pub(super) fn $piece<'i>($(_: $of),*) -> Read<'i> {
                Read::Nothing
            })*
        };
    }
    nothing! {
        Word(&str) Flag(&str, &bool) Number(&str, Option<&u8>) Lanes(&u8) LoadHint(&ir::LoadHint)
        Literal(&ir::Literal) Constant(&u32) Argument(&u32) Result(&types::Type)
        Scalar(&types::Scalar) Defined(&ir::Value) Body(&Block) Branches(&Block, &Block)
    }
}

/// The number that an operation has, for its piece.
fn axis(which: &mut Builtin) -> Option<&mut u8> {
    which.axis()
}

fn mask(op: &mut SimdOp) -> Option<&mut u8> {
    op.mask()
}

/// A field of an instruction that is not read yet, for the parser: each operation that gives the
/// instruction another name has a number below [`OPERATIONS`].
trait Blank {
    fn blank(operation: usize) -> Self;
}

/// At least as many as an instruction has names.
const OPERATIONS: usize = 32;

impl Blank for Value {
    fn blank(_: usize) -> Self {
        Value(0)
    }
}

impl Blank for Place {
    fn blank(_: usize) -> Self {
        Place::Buffer(0)
    }
}

impl Blank for Scalar {
    fn blank(_: usize) -> Self {
        Scalar::Bool
    }
}

impl Blank for Type {
    fn blank(_: usize) -> Self {
        Scalar::Bool.into()
    }
}

impl Blank for Literal {
    fn blank(_: usize) -> Self {
        Literal::Bool(false)
    }
}

macro_rules! blank {
    (empty: $($empty:ty),*; operations: $($operations:ty),*) => {
        $(impl Blank for $empty {
            fn blank(_: usize) -> Self {
                Self::default()
            }
        })*
        $(impl Blank for $operations {
            fn blank(operation: usize) -> Self {
                Self::ALL[operation % Self::ALL.len()]
            }
        })*
    };
}

blank!(
    empty: bool, u8, u32, LoadHint, Block, Vec<Value>, Option<Value>;
    operations: UnaryOp, BinaryOp, Builtin, AtomicOp, Reduce, SimdOp
);

/// Makes the functions that follow from the table. `$rules` is the verifier's view of the kernel.
macro_rules! instructions {
    ($rules:ident: $(
        $inst:ident $(($($field:ident),*))? $({$($named:ident),*})? => $name:expr, [$($piece:expr),*], $effect:ident, $level:ident, $rule:expr;
    )*) => {
        #[allow(unused_variables, reason = "a row names all fields of its instruction")]
        impl Inst {
            /// Its name in the text form.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Inst::$inst $(($($field),*))? $({$($named),*})? => $name,)*
                }
            }

            /// Calls `f` with the pieces of its text, in their order.
            pub(crate) fn pieces<'i>(&'i mut self, mut f: impl FnMut(Piece<'i>)) {
                use Piece::*;
                match self {
                    $(Inst::$inst $(($($field),*))? $({$($named),*})? => {
                        $(f($piece);)*
                    })*
                }
            }

            /// Calls `f` with what its pieces say of operands and arrays, in their order.
            fn read<'i>(&'i self, mut f: impl FnMut(Read<'i>)) {
                use read::*;
                match self {
                    $(Inst::$inst $(($($field),*))? $({$($named),*})? => {
                        $(f($piece);)*
                    })*
                }
            }

            /// Whether it does anything besides defining its result from its operands: such an
            /// instruction is neither removed, nor repeated, nor moved over another. Loads have no
            /// effect but depend on stores; see [`Inst::reads`].
            pub fn has_effect(&self) -> bool {
                match self {
                    $(Inst::$inst { .. } => instructions!(@effect $effect),)*
                }
            }

            /// The threads that must reach it together. On tiles it is at least the simdgroup.
            pub(crate) fn together(&self) -> Level {
                match self {
                    $(Inst::$inst { .. } => Level::$level,)*
                }
            }

            /// The type of its result, `None` if it has none; or the rule that its operands break.
            pub(crate) fn computed(&self, $rules: &Operands<'_>) -> Computed {
                match self {
                    $(Inst::$inst $(($($field),*))? $({$($named),*})? => $rule,)*
                }
            }
        }

        /// Each instruction by its name, with nothing in its fields.
        static BLANKS: LazyLock<HashMap<&'static str, Inst>> = LazyLock::new(|| {
            let mut blanks = HashMap::new();
            for operation in 0..OPERATIONS {
                $({
                    $($(let $field = Blank::blank(operation);)*)?
                    $($(let $named = Blank::blank(operation);)*)?
                    let blank = Inst::$inst $(($($field),*))? $({$($named),*})?;
                    blanks.insert(blank.name(), blank);
                })*
            }
            blanks
        });
    };
    (@effect pure) => { false };
    (@effect effect) => { true };
}

instructions! { k:
    // Numbers that the launch or the text gives.
    Literal(literal) => "literal", [Literal(literal)], pure, Thread, Ok(Some(literal.scalar().into()));
    Constant(index) => "constant", [Constant(index)], pure, Thread, k.constant(*index);
    Argument(index) => "argument", [Argument(index)], pure, Thread, k.argument(*index);
    Builtin(which) => which.name(), [Number("an axis", axis(which))], pure, Thread, k.builtin(*which);

    // Arithmetic.
    Unary(op, a) => op.name(), [Value(a)], pure, Thread, k.unary(*op, *a);
    Binary(op, a, b) => op.name(), [Value(a), Value(b)], pure, Thread, k.binary(*op, *a, *b);
    Fma(a, b, c) => "fma", [Value(a), Value(b), Value(c)], pure, Thread, k.fma(*a, *b, *c);
    Select { cond, yes, no } => "select", [Value(cond), Value(yes), Value(no)], pure, Thread,
        k.select(*cond, *yes, *no);
    Cast(to, a) => "cast", [Scalar(to), Value(a)], pure, Thread, k.cast(*to, *a);
    Bitcast(to, a) => "bitcast", [Scalar(to), Value(a)], pure, Thread, k.bitcast(*to, *a);
    Dot4 { a, b, acc } => "dot4", [Value(a), Value(b), Value(acc)], pure, Thread, k.dot4(*a, *b, *acc);
    FmaHalves { a, b, c } => "fma_f16x2", [Value(a), Value(b), Value(c)], pure, Thread,
        k.fma_halves([*a, *b, *c]);
    Lookup { codes, table } => "lookup", [Value(codes), Values(table)], pure, Thread,
        k.lookup(*codes, table);
    Pack(values) => "pack", [Values(values)], pure, Thread, k.pack(values);
    Extract(vector, lane) => "extract", [Value(vector), Number("a lane", Some(lane))], pure, Thread,
        k.extract(*vector, *lane);

    // Memory. An atomic's old value is not listed as a read: the array is among its writes.
    Load { place, index, lanes, hint } => "load",
        [Element(Access::In, place, index), Lanes(lanes), LoadHint(hint)], pure, Thread,
        k.load(*place, *index, *lanes, *hint);
    Store { place, index, value } => "store",
        [Element(Access::Out, place, index), Word("="), Value(value)], effect, Thread,
        k.store(*place, *index, *value);
    Atomic { op, place, index, value } => op.name(),
        [Element(Access::Out, place, index), Value(value)], effect, Thread,
        k.atomic(*op, *place, *index, *value);
    CopyAsync { to, to_index, from, from_index, lanes, keep } => "copy_async",
        [
            Element(Access::Out, to, to_index), Word("="), Element(Access::In, from, from_index),
            Word("lanes"), Number("a number of lanes", Some(lanes)), Optional("keep", keep)
        ],
        effect, Thread, k.copy((*to, *to_index), (*from, *from_index), *lanes, *keep);
    CopyCommit => "copy_commit", [], effect, Thread, Ok(None);
    CopyWait(pending) => "copy_wait", [Number("a number of batches", Some(pending))], effect, Thread,
        Ok(None);

    // Waiting and order.
    Barrier => "barrier", [], effect, Group, Ok(None);
    SimdBarrier => "simd_barrier", [], effect, Simd, Ok(None);
    Fence => "fence", [], effect, Thread, Ok(None);
    GridTrigger => "grid_trigger", [], effect, Group, Ok(None);
    GridWait => "grid_wait", [], effect, Simd, Ok(None);

    // Lanes and tiles.
    Simd(op, value, lane) => op.name(),
        [Value(value), Number("a mask", mask(op)), Optional(",", lane)], effect, Simd,
        k.simd(*op, *value, *lane);
    Splat(ty, value) => "splat", [Result(ty), Agreed("the value", value)], pure, Thread,
        k.splat(*ty, *value);
    TileLoad { ty, place, index, stride, transposed, swizzled } => "tile_load",
        [
            Result(ty), Tile(Access::In, place, "the index", index), Word("stride"),
            Agreed("the stride", stride), Flag("transposed", transposed),
            Flag("swizzled", swizzled)
        ],
        effect, Thread, k.tile_load(*ty, *place, (*index, *stride), *swizzled);
    TileStore { place, index, stride, value } => "tile_store",
        [
            Tile(Access::Out, place, "the index", index), Word("stride"),
            Agreed("the stride", stride), Word("="), Value(value)
        ],
        effect, Thread, k.tile_store(*place, *index, *stride, *value);
    TileOf(ty, words) => "tile_of", [Result(ty), Values(words)], effect, Thread, k.tile_of(*ty, words);
    Mma { a, b, c } => "mma", [Value(a), Value(b), Value(c)], effect, Thread, k.mma(*a, *b, *c);
    RowReduce(how, value) => how.row_name(), [Value(value)], effect, Thread, k.row_reduce(*value);
    TileRow(ty) => "tile_row", [Result(ty)], pure, Thread, k.positions(*ty);
    TileCol(ty) => "tile_col", [Result(ty)], pure, Thread, k.positions(*ty);
    ToLeft(ty, value) => "to_left", [Result(ty), Value(value)], pure, Thread, k.to_left(*ty, *value);

    // Products of warpgroups. Whether a warpgroup agrees is not followed: the whole group must.
    Wgmma { sum, a, a_index, b, b_index } => "wgmma",
        [
            Array(Access::InOut, sum), Word("+="), Tile(Access::In, a, "the left index", a_index),
            Tile(Access::In, b, "the right index", b_index)
        ],
        effect, Group, k.wgmma(*sum, (*a, *a_index), (*b, *b_index));
    WgmmaOf { sum, left, b, b_index } => "wgmma_of",
        [
            Array(Access::InOut, sum), Word("+="), Values(left), Word("by"),
            Tile(Access::In, b, "the right index", b_index)
        ],
        effect, Group, k.wgmma_of(*sum, left, (*b, *b_index));
    WgmmaFence => "wgmma_fence", [], effect, Group, Ok(None);
    WgmmaCommit => "wgmma_commit", [], effect, Group, Ok(None);
    WgmmaWait(pending) => "wgmma_wait", [Number("a number of batches", Some(pending))], effect, Group,
        Ok(None);
    AsyncFence => "async_fence", [], effect, Thread, Ok(None);

    // Control.
    For { index, start, end, step, unroll, body } => "for",
        [
            Defined(index), Word("="), Value(start), Word("to"), Value(end), Word("step"),
            Value(step), Flag("unroll", unroll), Body(body)
        ],
        effect, Thread, k.bounds(*start, *end, *step);
    If { cond, then, otherwise } => "if", [Value(cond), Branches(then, otherwise)], effect, Thread,
        k.condition(*cond);
}

/// The operands of an instruction. Passes ask for them again and again, so that a few, as almost
/// every instruction has, take no memory of their own.
#[derive(Debug, Clone)]
pub struct OperandList {
    few: [Value; OperandList::FEW],
    count: usize,
    /// All of them, once there are more than [`OperandList::FEW`].
    many: Vec<Value>,
}

impl OperandList {
    const FEW: usize = 4;

    fn push(&mut self, value: Value) {
        if self.count < Self::FEW {
            self.few[self.count] = value;
        } else {
            if self.many.is_empty() {
                self.many.extend(self.few);
            }
            self.many.push(value);
        }
        self.count += 1;
    }
}

impl Default for OperandList {
    fn default() -> Self {
        OperandList { few: [Value(0); Self::FEW], count: 0, many: Vec::new() }
    }
}

impl std::ops::Deref for OperandList {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        if self.many.is_empty() { &self.few[..self.count] } else { &self.many }
    }
}

impl PartialEq for OperandList {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for OperandList {}

impl Hash for OperandList {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl Inst {
    /// The instruction of a name, with nothing in its fields yet. A literal has no name in the
    /// text.
    pub(crate) fn named(name: &str) -> Option<Inst> {
        BLANKS.get(name).filter(|blank| !matches!(blank, Inst::Literal(_))).cloned()
    }

    /// The registers to which a warpgroup's product adds.
    pub(crate) fn warpgroup_sum(&self) -> Option<Place> {
        match self {
            Inst::Wgmma { sum, .. } | Inst::WgmmaOf { sum, .. } => Some(*sum),
            _ => None,
        }
    }

    /// The values it reads, in text order, without the operands of inner blocks.
    pub fn operands(&self) -> OperandList {
        let mut found = OperandList::default();
        self.read(|piece| match piece {
            Read::Values(values) | Read::Array(_, _, values) => {
                values.iter().for_each(|value| found.push(*value));
            }
            Read::Nothing => {}
        });
        found
    }

    /// Replaces every value it reads, in text order; the operands of inner blocks stay.
    pub fn map_operands(&mut self, mut f: impl FnMut(Value) -> Value) {
        self.pieces(|piece| match piece {
            Piece::Value(value)
            | Piece::Agreed(_, value)
            | Piece::Element(_, _, value)
            | Piece::Tile(_, _, _, value)
            | Piece::Optional(_, Some(value)) => *value = f(*value),
            Piece::Values(values) => values.iter_mut().for_each(|value| *value = f(*value)),
            _ => {}
        });
    }

    /// Calls `f` with each array that it names and what it does with the array.
    pub(crate) fn map_places(&mut self, mut f: impl FnMut(Access, &mut Place)) {
        self.pieces(|piece| match piece {
            Piece::Element(access, place, _)
            | Piece::Tile(access, place, ..)
            | Piece::Array(access, place) => f(access, place),
            _ => {}
        });
    }

    /// The arrays it reads; not the one that an atomic changes, which [`Inst::writes`] has.
    pub fn reads(&self) -> impl Iterator<Item = Place> + use<> {
        self.places(Access::Out).into_iter()
    }

    /// The array it changes.
    pub fn writes(&self) -> Option<Place> {
        self.places(Access::In).first().copied()
    }

    /// The arrays it names, without those that it only has this access to.
    fn places(&self, without: Access) -> Vec<Place> {
        let mut found = Vec::new();
        self.read(|piece| match piece {
            Read::Array(access, place, _) if access != without => found.push(place),
            _ => {}
        });
        found
    }

    /// The values on which all lanes must agree, and what errors call them.
    pub(crate) fn agreed(&self) -> Vec<(&'static str, Value)> {
        let mut found = Vec::new();
        self.without_blocks().pieces(|piece| match piece {
            Piece::Agreed(what, value) | Piece::Tile(_, _, what, value) => {
                found.push((what, *value))
            }
            _ => {}
        });
        found
    }

    /// The blocks inside it.
    pub fn blocks(&self) -> Vec<&Block> {
        match self {
            Inst::For { body, .. } => vec![body],
            Inst::If { then, otherwise, .. } => vec![then, otherwise],
            _ => vec![],
        }
    }

    /// The blocks inside it, to change.
    pub fn blocks_mut(&mut self) -> Vec<&mut Block> {
        match self {
            Inst::For { body, .. } => vec![body],
            Inst::If { then, otherwise, .. } => vec![then, otherwise],
            _ => vec![],
        }
    }

    /// A copy without the blocks inside it.
    pub(crate) fn without_blocks(&self) -> Inst {
        match self {
            Inst::For { index, start, end, step, unroll, .. } => Inst::For {
                index: *index,
                start: *start,
                end: *end,
                step: *step,
                unroll: *unroll,
                body: Block::default(),
            },
            Inst::If { cond, .. } => {
                Inst::If { cond: *cond, then: Block::default(), otherwise: Block::default() }
            }
            other => other.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_listed_however_many_there_are() {
        for count in [1, 3, 4, 5, 16] {
            let values: Vec<Value> = (0..count).map(Value).collect();
            let listed = Inst::Pack(values.clone()).operands();
            assert_eq!(*listed, values[..]);
            assert_eq!(listed, Inst::TileOf(Scalar::F32.into(), values).operands());
        }
        assert_eq!(*Inst::Barrier.operands(), []);
    }
}
