//! TileLowering: the language's 16 x 16 tiles become tiles that the target's matrix unit has.
//!
//! Metal multiplies 8 x 8 matrices, so a tile becomes its four quarters
//! `q = 2 * (row / 8) + col / 8` and a row tile its two halves; `C = A B` over 16 becomes eight
//! products, summed over `k` in order: `C[i][j] + A[i][0] B[0][j] + A[i][1] B[1][j]`. CUDA's 16 x
//! 16 tile is native (pairs of `mma.sync`), and the interpreter has any size. Indices of register
//! arrays of tiles grow fourfold: element `i` becomes `4 i + q`.
//!
//! Limits: it splits and never joins, so that a kernel lowered for Metal stays so.

use std::collections::HashMap;

use super::Target;
use super::rewrite::{Rewrite, Visitor, rewrite};
use crate::instr::BinaryOp;
use crate::ir::{Inst, Kernel, Literal, Place, Reduce, Statement, Value};
use crate::types::{Role, Scalar, Tile, Type};
use crate::verify::Fault;

/// The rows of a Metal tile.
const EDGE: u8 = 8;

/// The kernel with tiles of the target's size.
pub(super) fn tile_lowering(kernel: &Kernel, target: Target) -> Result<Kernel, Fault> {
    let lowered = match target {
        Target::Metal => split(kernel),
        Target::Cuda | Target::Interpreter => kernel.clone(),
    };
    native(&lowered, target)?;
    Ok(lowered)
}

/// Whether only tiles that the target has are left.
fn native(kernel: &Kernel, target: Target) -> Result<(), Fault> {
    let edge = match target {
        Target::Metal => EDGE,
        Target::Cuda => 16,
        Target::Interpreter => return Ok(()),
    };
    fits(kernel, target)?;
    let foreign = |ty: Type| ty.tile().is_some_and(|tile| tile.rows != edge);
    let fault = |ty: Type, source: &str| Fault {
        kernel: kernel.name.clone(),
        line: 0,
        source: source.to_owned(),
        message: format!("{} has tiles of {edge} rows, found {ty}", target.name()),
    };
    if let Some(array) = kernel.registers.iter().find(|array| foreign(array.ty)) {
        return Err(fault(array.ty, ""));
    }
    let mut found = None;
    kernel.visit(&mut |node| {
        if let Some(ty) = node.result.map(|v| kernel.ty(v)).filter(|ty| foreign(*ty)) {
            found.get_or_insert((ty, node.source));
        }
    });
    found.map_or(Ok(()), |(ty, source)| Err(fault(ty, kernel.source(source))))
}

/// Whether a target has all that a kernel is made of: Metal has no product of four simdgroups.
///
/// # Errors
/// The fault that lowering for the target ends with.
pub fn fits(kernel: &Kernel, target: Target) -> Result<(), Fault> {
    let mut found = None;
    kernel.visit(&mut |node| {
        if target == Target::Metal && node.inst.warpgroup_sum().is_some() {
            found.get_or_insert(node.source);
        }
    });
    let Some(source) = found else { return Ok(()) };
    let name = target.name();
    Err(Fault {
        kernel: kernel.name.clone(),
        line: 0,
        source: kernel.source(source).to_owned(),
        message: format!(
            "{name} has no wgmma; hint: a schedule of simdgroups that multiply by themselves"
        ),
    })
}

/// The parts of a tile: 4, or 2 for a row tile; 1 for what is not split.
fn parts(ty: Type) -> u32 {
    match ty {
        Type::Tile(Tile { rows: 16, role: Role::Row, .. }) => 2,
        Type::Tile(Tile { rows: 16, .. }) => 4,
        _ => 1,
    }
}

/// The type of a part.
fn part(ty: Type) -> Type {
    ty.tile().map_or(ty, |tile| Tile::sized(tile.scalar, tile.role, EDGE).into())
}

fn split(kernel: &Kernel) -> Kernel {
    let counts: Vec<u32> = kernel.registers.iter().map(|array| parts(array.ty)).collect();
    let mut split = Split { counts, values: HashMap::new() };
    let mut lowered = rewrite(kernel, &mut split);
    for array in &mut lowered.registers {
        let count = parts(array.ty);
        if count > 1 {
            array.len = array.len.saturating_mul(count);
            array.ty = part(array.ty);
        }
    }
    lowered
}

struct Split {
    /// The parts of each register array's element.
    counts: Vec<u32>,
    /// The parts of each tile that was split.
    values: HashMap<Value, Vec<Value>>,
}

impl Visitor for Split {
    fn node(&mut self, r: &mut Rewrite, node: Statement) {
        if self.effect(r, &node) {
            return;
        }
        let Some(result) = node.result.filter(|v| parts(r.kernel.ty(*v)) > 1) else {
            return self.whole(r, node);
        };
        let values = self.define(r, &node.inst, r.kernel.ty(result));
        self.values.insert(result, values);
    }
}

impl Split {
    /// Part `q` of a tile; a value that is not split is its own part.
    fn part(&self, value: Value, q: usize) -> Value {
        self.values.get(&value).and_then(|parts| parts.get(q)).copied().unwrap_or(value)
    }

    /// An instruction without a result that concerns tiles; whether it was one.
    fn effect(&mut self, r: &mut Rewrite, node: &Statement) -> bool {
        match &node.inst {
            Inst::Store { place, index, value } => {
                let Some(values) = self.values.get(value).cloned() else { return false };
                for (q, value) in values.iter().enumerate() {
                    let index = self.register_index(r, *place, *index, q as u32);
                    r.push(Inst::Store { place: *place, index, value: *value }, None);
                }
            }
            Inst::TileStore { place, index, stride, value } => {
                let Some(values) = self.values.get(value).cloned() else { return false };
                for (q, value) in values.iter().enumerate() {
                    let index = offset(r, *index, *stride, q, false);
                    let (place, stride, value) = (*place, *stride, *value);
                    r.push(Inst::TileStore { place, index, stride, value }, None);
                }
            }
            _ => return false,
        }
        true
    }

    /// An instruction whose result is no tile, or control.
    fn whole(&mut self, r: &mut Rewrite, node: Statement) {
        r.keep(node, self);
    }

    /// The parts of a tile's definition.
    fn define(&mut self, r: &mut Rewrite, inst: &Inst, ty: Type) -> Vec<Value> {
        let small = part(ty);
        let count = parts(ty) as usize;
        match inst {
            Inst::TileLoad { place, index, stride, transposed, swizzled, .. } => (0..count)
                .map(|q| {
                    let index = offset(r, *index, *stride, q, *transposed);
                    let (ty, place, stride) = (small, *place, *stride);
                    let (transposed, swizzled) = (*transposed, *swizzled);
                    let load = Inst::TileLoad { ty, place, index, stride, transposed, swizzled };
                    r.define(load, ty)
                })
                .collect(),
            Inst::Mma { a, b, c } => (0..count)
                .map(|q| {
                    let (i, j) = (q / 2, q % 2);
                    (0..2).fold(self.part(*c, q), |c, k| {
                        let (a, b) = (self.part(*a, 2 * i + k), self.part(*b, 2 * k + j));
                        r.define(Inst::Mma { a, b, c }, small)
                    })
                })
                .collect(),
            Inst::Splat(_, value) => match r.kernel.ty(*value).tile() {
                // A row tile across its rows: both quarters of a row are the same.
                Some(_) => (0..2)
                    .flat_map(|i| {
                        let quarter = r.define(Inst::Splat(small, self.part(*value, i)), small);
                        [quarter, quarter]
                    })
                    .collect(),
                None => vec![r.define(Inst::Splat(small, *value), small); count],
            },
            Inst::RowReduce(op, c) => {
                let pair = match op {
                    Reduce::Sum => BinaryOp::Add,
                    Reduce::Max => BinaryOp::Max,
                    Reduce::Min => BinaryOp::Min,
                };
                let wide = part(r.kernel.ty(*c));
                (0..2)
                    .map(|i| {
                        let (left, right) = (self.part(*c, 2 * i), self.part(*c, 2 * i + 1));
                        let both = r.define(Inst::Binary(pair, left, right), wide);
                        r.define(Inst::RowReduce(*op, both), small)
                    })
                    .collect()
            }
            Inst::TileRow(_) => {
                let top = r.define(Inst::TileRow(small), small);
                let bottom = eight_more(r, top, small);
                vec![top, top, bottom, bottom]
            }
            Inst::TileCol(_) => {
                let left = r.define(Inst::TileCol(small), small);
                let right = eight_more(r, left, small);
                vec![left, right, left, right]
            }
            Inst::TileOf(_, words) => {
                // Words go down the rows first, quarters along them.
                let word = |q: usize| vec![words[q / 2 + q % 2 * 2]];
                (0..count).map(|q| r.define(Inst::TileOf(small, word(q)), small)).collect()
            }
            Inst::ToLeft(_, c) => {
                let quarter = |q| r.define(Inst::ToLeft(small, self.part(*c, q)), small);
                (0..count).map(quarter).collect()
            }
            Inst::Load { place, index, lanes, hint } => (0..count)
                .map(|q| {
                    let index = self.register_index(r, *place, *index, q as u32);
                    let inst = Inst::Load { place: *place, index, lanes: *lanes, hint: *hint };
                    r.define(inst, small)
                })
                .collect(),
            // Element-wise: part by part.
            other => (0..count)
                .map(|q| {
                    let mut inst = other.clone();
                    inst.map_operands(|v| self.part(v, q));
                    r.define(inst, small)
                })
                .collect(),
        }
    }

    /// The index of part `q` of a register array's element.
    fn register_index(&self, r: &mut Rewrite, place: Place, index: Value, q: u32) -> Value {
        let Place::Register(array) = place else { return index };
        let count = self.counts.get(array as usize).copied().unwrap_or(1);
        if let Some(i) = r.known_u32(index) {
            return r.literal(Literal::U32(i.wrapping_mul(count).wrapping_add(q)));
        }
        let count = r.literal(Literal::U32(count));
        let first = r.define(Inst::Binary(BinaryOp::Mul, index, count), Scalar::U32);
        add(r, first, q)
    }
}

/// The index of quarter `q` of a tile in memory.
fn offset(r: &mut Rewrite, index: Value, stride: Value, q: usize, transposed: bool) -> Value {
    let (row, col) = if transposed { (q % 2, q / 2) } else { (q / 2, q % 2) };
    let mut index = index;
    if row == 1 {
        let edge = r.literal(Literal::U32(EDGE.into()));
        let down = r.define(Inst::Binary(BinaryOp::Mul, stride, edge), Scalar::U32);
        index = r.define(Inst::Binary(BinaryOp::Add, index, down), Scalar::U32);
    }
    if col == 1 { add(r, index, EDGE.into()) } else { index }
}

fn add(r: &mut Rewrite, index: Value, n: u32) -> Value {
    let n = r.literal(Literal::U32(n));
    r.define(Inst::Binary(BinaryOp::Add, index, n), Scalar::U32)
}

/// Positions in the second half.
fn eight_more(r: &mut Rewrite, numbers: Value, ty: Type) -> Value {
    let eight = r.literal(Literal::U32(EDGE.into()));
    let eight = r.define(Inst::Splat(ty, eight), ty);
    r.define(Inst::Binary(BinaryOp::Add, numbers, eight), ty)
}
