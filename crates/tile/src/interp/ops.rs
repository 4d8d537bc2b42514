//! The flat program: a kernel's block tree as one list of operations on numbered columns and tile
//! slots.
//!
//! A column holds one 32-bit register of every thread; a slot one matrix of every simdgroup.

use super::products::{Left, Product};
use crate::instr::{BinaryOp, UnaryOp};
use crate::ir::{AtomicOp, Reduce, SimdOp, SourceId};
use crate::types::{Scalar, Tile};

/// A column's number.
pub(super) type Col = u32;
/// A tile slot's number.
pub(super) type Slot = u32;

/// An array in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Array {
    /// A parameter, by its index among all parameters.
    Buffer(u32),
    /// A shared array.
    Shared(u32),
}

/// An index into a register array: most are literals.
#[derive(Debug, Clone, Copy)]
pub(super) enum Index {
    /// Known, and below the array's length.
    Known(u32),
    /// One per thread.
    Each(Col),
}

/// One step of the program. `d` is what it defines.
#[derive(Debug)]
pub(super) enum Op {
    Unary {
        op: UnaryOp,
        scalar: Scalar,
        d: Col,
        a: Col,
    },
    Binary {
        op: BinaryOp,
        scalar: Scalar,
        d: Col,
        a: Col,
        b: Col,
    },
    Fma {
        d: Col,
        a: Col,
        b: Col,
        c: Col,
    },
    Select {
        d: Col,
        cond: Col,
        yes: Col,
        no: Col,
    },
    Cast {
        from: Scalar,
        to: Scalar,
        d: Col,
        a: Col,
    },
    FmaHalves {
        d: Col,
        a: Col,
        b: Col,
        c: Col,
    },
    Dot4 {
        d: Col,
        a: Col,
        b: Col,
        acc: Col,
    },
    Lookup {
        d: Col,
        codes: Col,
        table: Box<[Col]>,
    },
    Load {
        from: Array,
        index: Col,
        d: Box<[Col]>,
    },
    Store {
        to: Array,
        index: Col,
        v: Box<[Col]>,
    },
    RegisterLoad {
        array: u32,
        index: Index,
        d: Box<[Col]>,
    },
    RegisterStore {
        array: u32,
        index: Index,
        v: Box<[Col]>,
    },
    Atomic {
        op: AtomicOp,
        on: Array,
        index: Col,
        v: Col,
        d: Col,
    },
    Barrier,
    SimdBarrier,
    Fence,
    Simd {
        op: SimdOp,
        scalar: Scalar,
        d: Col,
        a: Col,
        lane: Option<Col>,
    },
    CopyAsync {
        to: u32,
        to_index: Col,
        from: u32,
        from_index: Col,
        lanes: u32,
        keep: Option<Col>,
    },
    CopyCommit,
    CopyWait(u8),
    Wgmma(Product),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u8),
    AsyncFence,
    TileUnary {
        op: UnaryOp,
        scalar: Scalar,
        tile: Tile,
        d: Slot,
        a: Slot,
    },
    TileBinary {
        op: BinaryOp,
        scalar: Scalar,
        tile: Tile,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    TileFma {
        tile: Tile,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    TileSelect {
        tile: Tile,
        d: Slot,
        cond: Slot,
        yes: Slot,
        no: Slot,
    },
    TileCast {
        from: Scalar,
        to: Scalar,
        tile: Tile,
        d: Slot,
        a: Slot,
    },
    Splat {
        tile: Tile,
        d: Slot,
        a: Col,
    },
    Across {
        tile: Tile,
        d: Slot,
        a: Slot,
    },
    Position {
        tile: Tile,
        column: bool,
        d: Slot,
    },
    TileLoad {
        tile: Tile,
        from: Array,
        index: Col,
        stride: Col,
        transposed: bool,
        swizzled: bool,
        d: Slot,
    },
    /// A tile of four words; tiles of 8 rows have the first alone.
    TileOf {
        tile: Tile,
        words: [Col; 4],
        d: Slot,
    },
    TileStore {
        tile: Tile,
        to: Array,
        index: Col,
        stride: Col,
        v: Slot,
    },
    Mma {
        left: Tile,
        right: Tile,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    RowReduce {
        op: Reduce,
        tile: Tile,
        d: Slot,
        a: Slot,
    },
    TileRegisterLoad {
        array: u32,
        index: Index,
        d: Slot,
    },
    TileRegisterStore {
        array: u32,
        index: Index,
        v: Slot,
    },
    /// The body is the operations up to `end`.
    For {
        index: Col,
        start: Col,
        stop: Col,
        step: Col,
        end: usize,
    },
    /// The first block is the operations up to `otherwise`, the second those from there to `end`.
    If {
        cond: Col,
        otherwise: usize,
        end: usize,
    },
}

/// The thing that a slot number names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Column,
    Tile,
}

impl Op {
    /// Calls `f` on every column and slot it mentions.
    pub(super) fn slots(&mut self, f: &mut dyn FnMut(&mut u32, Kind)) {
        use Kind::{Column, Tile};
        let indexed = |index: &mut Index, f: &mut dyn FnMut(&mut u32, Kind)| {
            if let Index::Each(col) = index {
                f(col, Column);
            }
        };
        match self {
            Op::Unary { d, a, .. } | Op::Cast { d, a, .. } => {
                [a, d].into_iter().for_each(|c| f(c, Column));
            }
            Op::Binary { d, a, b, .. } => [a, b, d].into_iter().for_each(|c| f(c, Column)),
            Op::Fma { d, a, b, c }
            | Op::FmaHalves { d, a, b, c }
            | Op::Dot4 { d, a, b, acc: c } => {
                [a, b, c, d].into_iter().for_each(|c| f(c, Column));
            }
            Op::Lookup { d, codes, table } => {
                f(codes, Column);
                table.iter_mut().for_each(|c| f(c, Column));
                f(d, Column);
            }
            Op::Select { d, cond, yes, no } => {
                [cond, yes, no, d].into_iter().for_each(|c| f(c, Column));
            }
            Op::Load { index, d: v, .. } | Op::Store { index, v, .. } => {
                f(index, Column);
                v.iter_mut().for_each(|c| f(c, Column));
            }
            Op::RegisterLoad { index, d: v, .. } | Op::RegisterStore { index, v, .. } => {
                indexed(index, f);
                v.iter_mut().for_each(|c| f(c, Column));
            }
            Op::Atomic { index, v, d, .. } => {
                [index, v, d].into_iter().for_each(|c| f(c, Column));
            }
            Op::Simd { d, a, lane, .. } => {
                [Some(a), lane.as_mut(), Some(d)].into_iter().flatten().for_each(|c| f(c, Column));
            }
            Op::CopyAsync { to_index, from_index, keep, .. } => {
                [Some(to_index), Some(from_index), keep.as_mut()]
                    .into_iter()
                    .flatten()
                    .for_each(|c| f(c, Column))
            }
            Op::Wgmma(Product { left, b, .. }) => {
                match left {
                    Left::Block(a) => f(&mut a.1, Column),
                    Left::Tiles(tiles) => tiles.iter_mut().for_each(|t| f(t, Tile)),
                }
                f(&mut b.1, Column);
            }
            Op::Barrier | Op::SimdBarrier | Op::Fence | Op::CopyCommit | Op::CopyWait(_) => {}
            Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait(_) | Op::AsyncFence => {}
            Op::TileUnary { d, a, .. }
            | Op::TileCast { d, a, .. }
            | Op::Across { d, a, .. }
            | Op::RowReduce { d, a, .. } => [a, d].into_iter().for_each(|t| f(t, Tile)),
            Op::TileBinary { d, a, b, .. } => [a, b, d].into_iter().for_each(|t| f(t, Tile)),
            Op::TileFma { d, a, b, c, .. } | Op::Mma { d, a, b, c, .. } => {
                [a, b, c, d].into_iter().for_each(|t| f(t, Tile));
            }
            Op::TileSelect { d, cond, yes, no, .. } => {
                [cond, yes, no, d].into_iter().for_each(|t| f(t, Tile));
            }
            Op::Splat { d, a, .. } => {
                f(a, Column);
                f(d, Tile);
            }
            Op::Position { d, .. } => f(d, Tile),
            Op::TileOf { words, d, .. } => {
                words.iter_mut().for_each(|word| f(word, Column));
                f(d, Tile);
            }
            Op::TileLoad { index, stride, d: t, .. }
            | Op::TileStore { index, stride, v: t, .. } => {
                f(index, Column);
                f(stride, Column);
                f(t, Tile);
            }
            Op::TileRegisterLoad { index, d: t, .. }
            | Op::TileRegisterStore { index, v: t, .. } => {
                indexed(index, f);
                f(t, Tile);
            }
            Op::For { index, start, stop, step, .. } => {
                [index, start, stop, step].into_iter().for_each(|c| f(c, Column));
            }
            Op::If { cond, .. } => f(cond, Column),
        }
    }
}

/// A column whose content is known before the body runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fixed {
    /// The same bits in every thread.
    Bits(u32),
    /// A constant, by index.
    Constant(u32),
    /// An argument, by parameter index.
    Argument(u32),
    /// The group's index along an axis.
    Group(u8),
    /// The number of groups along an axis.
    Groups(u8),
    /// The thread's index.
    Thread,
    /// The lane.
    Lane,
    /// The simdgroup.
    Simd,
}

/// A kernel ready to run.
#[derive(Debug)]
pub(super) struct Program {
    /// The body.
    pub(super) ops: Vec<Op>,
    /// For each operation, its instruction's number in the order of `Kernel::visit`, and its Rust
    /// source.
    pub(super) places: Vec<(usize, SourceId)>,
    /// Columns filled in advance; all others come after them.
    pub(super) fixed: Vec<Fixed>,
    /// All columns.
    pub(super) columns: u32,
    /// All tile slots.
    pub(super) tiles: u32,
    /// By parameter: whether an atomic touches it.
    pub(super) atomic_buffers: Vec<bool>,
    /// By shared array: whether an atomic touches it.
    pub(super) atomic_shared: Vec<bool>,
}
