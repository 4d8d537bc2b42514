//! [`Frag`]: 16 x 16 matrices held by a simdgroup, multiplied by its matrix unit.

use super::*;
use crate::ir::ROW;

/// A tile held by the simdgroup. Accumulators and rows take part in element-wise arithmetic.
#[derive(Debug, Clone, Copy)]
pub struct Frag {
    pub(crate) value: Value,
}

/// A register array of tiles: what accumulators in a recorded loop have to be.
#[derive(Debug, Clone, Copy)]
pub struct Frags {
    place: Place,
    ty: Type,
}

impl Frag {
    #[track_caller]
    fn ty(self) -> Tile {
        build::type_of(self.value).tile().expect("a Frag is made of tiles only")
    }

    #[track_caller]
    fn define(inst: Inst, ty: impl Into<Type>) -> Frag {
        Frag { value: define(inst, ty) }
    }

    /// A left operand `[16, 16]` from memory: `(r, c)` at `index + r * stride + c`.
    #[track_caller]
    pub fn left(
        from: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
    ) -> Frag {
        Frag::load(from, index, stride, Role::A, (false, false))
    }

    /// A right operand `[16, 16]` from memory that holds its transpose, as weights `[n, k]` do:
    /// `(k, n)` at `index + n * stride + k`.
    #[track_caller]
    pub fn right_transposed(
        from: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
    ) -> Frag {
        Frag::load(from, index, stride, Role::B, (true, false))
    }

    /// A right operand `[16, 16]` from memory: `(k, n)` at `index + k * stride + n`.
    #[track_caller]
    pub fn right(
        from: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
    ) -> Frag {
        Frag::load(from, index, stride, Role::B, (false, false))
    }

    /// As [`Frag::right_transposed`], from blocks of 64 elements a row whose places
    /// [`crate::ir::swizzle`] tells: the 16 bytes that a product needs of eight rows lie in
    /// different banks, though rows have no room between them.
    #[track_caller]
    pub fn right_transposed_swizzled(from: Shared, index: impl IntoVal<u32>) -> Frag {
        Frag::load(from, index, ROW, Role::B, (true, true))
    }

    /// As [`Frag::right`], from such blocks.
    #[track_caller]
    pub fn right_swizzled(from: Shared, index: impl IntoVal<u32>) -> Frag {
        Frag::load(from, index, ROW, Role::B, (false, true))
    }

    /// An accumulator `[16, 16]` from memory of f32: `(r, c)` at `index + r * stride + c`. With a
    /// stride of 0 all rows are one.
    #[track_caller]
    pub fn accumulator(
        from: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
    ) -> Frag {
        Frag::load(from, index, stride, Role::C, (false, false))
    }

    /// An accumulator `[16, 16]` from memory of f32 that holds its transpose: `(r, c)` at
    /// `index + c * stride + r`. With a stride of 0 all columns are one.
    #[track_caller]
    pub fn accumulator_transposed(
        from: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
    ) -> Frag {
        Frag::load(from, index, stride, Role::C, (true, false))
    }

    #[track_caller]
    fn load(
        from: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
        role: Role,
        (transposed, swizzled): (bool, bool),
    ) -> Frag {
        let ty = Type::Tile(Tile::new(from.scalar(), role));
        let (place, index, stride) = (from.place(), index.val().value, stride.val().value);
        Frag::define(Inst::TileLoad { ty, place, index, stride, transposed, swizzled }, ty)
    }

    /// A left operand `[16, 16]` of the lanes' own words, each two neighbours along its rows: with
    /// `g = lane / 4` and `t = 2 (lane % 4)`, `(g, t)`, `(g + 8, t)`, `(g, t + 8)` and
    /// `(g + 8, t + 8)`.
    #[track_caller]
    pub fn left_of(scalar: Scalar, words: [Val<u32>; 4]) -> Frag {
        Frag::of(Tile::new(scalar, Role::A), words)
    }

    /// A right operand `[16, 16]` likewise, of neighbours along its columns: `(t, g)`,
    /// `(t + 8, g)`, `(t, g + 8)` and `(t + 8, g + 8)`.
    #[track_caller]
    pub fn right_of(scalar: Scalar, words: [Val<u32>; 4]) -> Frag {
        Frag::of(Tile::new(scalar, Role::B), words)
    }

    #[track_caller]
    fn of(tile: Tile, words: [Val<u32>; 4]) -> Frag {
        let ty = Type::Tile(tile);
        Frag::define(Inst::TileOf(ty, words.iter().map(|word| word.value).collect()), ty)
    }

    /// An f32 accumulator with one value everywhere.
    #[track_caller]
    pub fn filled(value: impl IntoVal<f32>) -> Frag {
        Frag::splat(value, Role::C)
    }

    /// An f32 row vector (one value per row) with one value everywhere.
    #[track_caller]
    pub fn rows(value: impl IntoVal<f32>) -> Frag {
        Frag::splat(value, Role::Row)
    }

    #[track_caller]
    fn splat(value: impl IntoVal<f32>, role: Role) -> Frag {
        let ty = Type::Tile(Tile::new(Scalar::F32, role));
        Frag::define(Inst::Splat(ty, value.val().value), ty)
    }

    /// A u32 accumulator-shaped tile with one value everywhere, to compare positions with.
    #[track_caller]
    pub fn filled_u32(value: impl IntoVal<u32>) -> Frag {
        let ty = Type::Tile(Tile::new(Scalar::U32, Role::C));
        Frag::define(Inst::Splat(ty, value.val().value), ty)
    }

    /// Each element's row number, u32.
    #[track_caller]
    pub fn row_numbers() -> Frag {
        let ty = Type::Tile(Tile::new(Scalar::U32, Role::C));
        Frag::define(Inst::TileRow(ty), ty)
    }

    /// Each element's column number, u32.
    #[track_caller]
    pub fn col_numbers() -> Frag {
        let ty = Type::Tile(Tile::new(Scalar::U32, Role::C));
        Frag::define(Inst::TileCol(ty), ty)
    }

    /// `self + a b`.
    #[track_caller]
    pub fn mma(self, a: Frag, b: Frag) -> Frag {
        Frag::define(Inst::Mma { a: a.value, b: b.value, c: self.value }, self.ty())
    }

    /// Writes an accumulator, rounded as `to` stores it: `(r, c)` to `index + r * stride + c`.
    #[track_caller]
    pub fn store(
        self,
        to: impl Elements<f32>,
        index: impl IntoVal<u32>,
        stride: impl IntoVal<u32>,
    ) {
        let value = self.cast(to.scalar()).value;
        let (place, index, stride) = (to.place(), index.val().value, stride.val().value);
        perform(Inst::TileStore { place, index, stride, value });
    }

    /// With another element type.
    #[track_caller]
    pub fn cast(self, scalar: Scalar) -> Frag {
        let ty = self.ty();
        if ty.scalar == scalar {
            return self;
        }
        Frag::define(Inst::Cast(scalar, self.value), ty.with(scalar))
    }

    /// The combination of each row, as a row vector.
    #[track_caller]
    pub fn reduce_rows(self, op: Reduce) -> Frag {
        let ty = self.ty();
        let row = Tile::sized(ty.scalar, Role::Row, ty.rows);
        Frag::define(Inst::RowReduce(op, self.value), row)
    }

    /// A row vector as an accumulator: each row with its value.
    #[track_caller]
    pub fn across(self) -> Frag {
        let ty = self.ty();
        let ty = Type::Tile(Tile::sized(ty.scalar, Role::C, ty.rows));
        Frag::define(Inst::Splat(ty, self.value), ty)
    }

    /// An accumulator as the left operand of another product, rounded to a type.
    #[track_caller]
    pub fn to_left(self, scalar: Scalar) -> Frag {
        let ty = Type::Tile(Tile::sized(scalar, Role::A, self.ty().rows));
        Frag::define(Inst::ToLeft(ty, self.value), ty)
    }

    #[track_caller]
    fn binary(self, op: BinaryOp, other: Frag) -> Frag {
        let ty = self.ty();
        Frag::define(Inst::Binary(op, self.value, other.value), ty.with(op.result(ty.scalar)))
    }

    /// The larger of each pair.
    #[track_caller]
    pub fn max(self, other: Frag) -> Frag {
        self.binary(BinaryOp::Max, other)
    }

    /// `self <= other`, a bool tile.
    #[track_caller]
    pub fn le(self, other: Frag) -> Frag {
        self.binary(BinaryOp::Le, other)
    }

    /// `self < other`, a bool tile.
    #[track_caller]
    pub fn lt(self, other: Frag) -> Frag {
        self.binary(BinaryOp::Lt, other)
    }

    /// Both of two bool tiles.
    #[track_caller]
    pub fn and(self, other: Frag) -> Frag {
        self.binary(BinaryOp::And, other)
    }

    /// An element-wise function of f32 tiles.
    #[track_caller]
    pub fn map(self, op: UnaryOp) -> Frag {
        Frag::define(Inst::Unary(op, self.value), self.ty())
    }

    /// `yes` where this bool tile is true, else `no`.
    #[track_caller]
    pub fn select(self, yes: Frag, no: Frag) -> Frag {
        let inst = Inst::Select { cond: self.value, yes: yes.value, no: no.value };
        Frag::define(inst, yes.ty())
    }
}

macro_rules! tile_operator {
    ($trait:ident, $method:ident, $op:ident) => {
        impl std::ops::$trait for Frag {
            type Output = Frag;
            #[track_caller]
            fn $method(self, other: Frag) -> Frag {
                self.binary(BinaryOp::$op, other)
            }
        }
    };
}
tile_operator!(Add, add, Add);
tile_operator!(Sub, sub, Sub);
tile_operator!(Mul, mul, Mul);
tile_operator!(Div, div, Div);

impl Frags {
    /// `len` f32 accumulators that hold `value`.
    #[track_caller]
    pub fn accumulators(len: u32, value: f32) -> Frags {
        Frags::new(len, Frag::filled(value))
    }

    /// `len` registers that hold a tile.
    #[track_caller]
    pub fn new(len: u32, value: Frag) -> Frags {
        let ty = Type::Tile(value.ty());
        let frags = Frags {
            place: build::register(Array { name: String::new(), ty, len, over: None }),
            ty,
        };
        for i in 0..len {
            frags.set(i, value);
        }
        frags
    }

    /// Registers that hold these tiles, which are of one type.
    ///
    /// # Panics
    /// If there are none.
    #[track_caller]
    pub fn holding(tiles: &[Frag]) -> Frags {
        let ty = Type::Tile(tiles[0].ty());
        let array = Array { name: String::new(), ty, len: tiles.len() as u32, over: None };
        let frags = Frags { place: build::register(array), ty };
        for (i, tile) in tiles.iter().enumerate() {
            frags.set(i as u32, *tile);
        }
        frags
    }

    /// Tile `i`.
    #[track_caller]
    pub fn get(self, i: u32) -> Frag {
        let index = i.val().value;
        let (place, hint) = (self.place, LoadHint::None);
        Frag::define(Inst::Load { place, index, lanes: 1, hint }, self.ty)
    }

    /// Sets tile `i`.
    #[track_caller]
    pub fn set(self, i: u32, value: Frag) {
        let index = i.val().value;
        perform(Inst::Store { place: self.place, index, value: value.value });
    }

    /// Begins the product of a warpgroup, `self += a b'` over 64 terms: see [`Inst::Wgmma`] for
    /// which simdgroup gets which rows, and for how `a` (64 rows from `a_index` on) and `b` (16
    /// rows for each register) lie in shared memory.
    #[track_caller]
    pub fn wgmma(self, (a, a_index): (Shared, Val<u32>), (b, b_index): (Shared, Val<u32>)) {
        let (sum, a_index, b_index) = (self.place, a_index.value, b_index.value);
        perform(Inst::Wgmma { sum, a: a.place(), a_index, b: b.place(), b_index });
    }

    /// As [`Frags::wgmma`], with this simdgroup's rows of `a` in registers: four operands of 16
    /// terms each.
    #[track_caller]
    pub fn wgmma_of(self, left: &[Frag], (b, b_index): (Shared, Val<u32>)) {
        let left = left.iter().map(|tile| tile.value).collect();
        let (sum, b_index) = (self.place, b_index.value);
        perform(Inst::WgmmaOf { sum, left, b: b.place(), b_index });
    }
}

/// Orders earlier work on accumulators before the products of warpgroups that begin after it.
#[track_caller]
pub fn wgmma_fence() {
    perform(Inst::WgmmaFence);
}

/// Closes a batch of the warpgroup's products.
#[track_caller]
pub fn wgmma_commit() {
    perform(Inst::WgmmaCommit);
}

/// Waits until at most `pending` of the warpgroup's latest batches are unfinished.
#[track_caller]
pub fn wgmma_wait(pending: u8) {
    perform(Inst::WgmmaWait(pending));
}

/// This thread's writes to shared memory are seen by products of warpgroups that begin after the
/// next barrier.
#[track_caller]
pub fn async_fence() {
    perform(Inst::AsyncFence);
}
