//! Schedule: what runs when, as far as the target's compiler cannot know. Three steps:
//! - on Metal, which has no asynchronous copies, a copy becomes a load and a store (zeros where
//!   `keep` is false);
//! - barriers between which nothing touches memory that the kernel writes become one, and the last
//!   one of a kernel goes if nothing follows it;
//! - loads move up to an earlier load of their block, so that several are under way before the
//!   first is used.
//!
//! Limits: a load passes neither stores to its array, nor waits, nor what computes with an earlier
//! load of its group, and a group has at most [`GROUP`] loads, so that registers suffice. Loads of
//! tiles stay where they were written.

use std::collections::HashSet;

use super::Target;
use super::rewrite::{Effects, Rewrite, Visitor, is_pure, rewrite};
use crate::ir::{Block, Inst, Kernel, Literal, LoadHint, Place, Statement, Value};
use crate::types::Type;

/// The most loads under way together.
const GROUP: usize = 8;
/// The most instructions that a load moves over.
const DISTANCE: usize = 128;

/// The kernel with its copies, barriers and loads in order.
pub(super) fn schedule(kernel: &Kernel, target: Target) -> Kernel {
    let mut kernel = match target {
        Target::Metal => rewrite(kernel, &mut Copies),
        Target::Cuda | Target::Interpreter => kernel.clone(),
    };
    let mut written = HashSet::new();
    kernel.visit(&mut |node| written.extend(node.inst.writes()));
    written.retain(|place| !matches!(place, Place::Register(_)));
    let mut seen = Since { group: false, simd: false };
    barriers(&mut kernel.body, &written, &mut seen);
    last_barrier(&mut kernel.body);
    loads(&mut kernel.body);
    kernel
}

/// Asynchronous copies as loads and stores.
struct Copies;

impl Visitor for Copies {
    fn node(&mut self, r: &mut Rewrite, node: Statement) {
        match node.inst {
            Inst::CopyAsync { to, to_index, from, from_index, lanes, keep } => {
                let ty = match (r.kernel.element(from), lanes) {
                    (ty, 1) => ty,
                    (ty, lanes) => Type::Vector(ty.scalar(), lanes),
                };
                let move_ = |r: &mut Rewrite| {
                    let hint = LoadHint::None;
                    let load = Inst::Load { place: from, index: from_index, lanes, hint };
                    let value = r.define(load, ty);
                    r.push(Inst::Store { place: to, index: to_index, value }, None);
                };
                let Some(cond) = keep else { return move_(r) };
                let then = r.block(move_);
                let otherwise = r.block(|r| {
                    let value = zeros(r, ty);
                    r.push(Inst::Store { place: to, index: to_index, value }, None);
                });
                r.push(Inst::If { cond, then, otherwise }, None);
            }
            Inst::CopyCommit | Inst::CopyWait(_) => {}
            _ => r.keep(node, self),
        }
    }
}

/// Zeros of a scalar or vector type.
fn zeros(r: &mut Rewrite, ty: Type) -> Value {
    let scalar = ty.scalar();
    let zero = match Literal::from_bits(scalar, 0) {
        Some(zero) => r.literal(zero),
        None => {
            let wide = if scalar.is_float() { Literal::float(0.0) } else { Literal::U32(0) };
            let wide = r.literal(wide);
            r.define(Inst::Cast(scalar, wide), Type::Scalar(scalar))
        }
    };
    match ty {
        Type::Vector(_, lanes) => r.define(Inst::Pack(vec![zero; lanes.into()]), ty),
        _ => zero,
    }
}

/// Whether memory that matters was touched since the last barrier of each kind.
#[derive(Clone, Copy)]
struct Since {
    group: bool,
    simd: bool,
}

impl Since {
    const TOUCHED: Since = Since { group: true, simd: true };

    fn or(self, other: Since) -> Since {
        Since { group: self.group || other.group, simd: self.simd || other.simd }
    }
}

/// Drops barriers that nothing needs. Arrays that the kernel never writes need none.
fn barriers(block: &mut Block, written: &HashSet<Place>, since: &mut Since) {
    block.0.retain_mut(|node| match &mut node.inst {
        Inst::Barrier => {
            let needed = since.group;
            *since = Since { group: false, simd: false };
            needed
        }
        Inst::SimdBarrier => std::mem::replace(&mut since.simd, false),
        Inst::For { body, .. } => {
            // The end of one trip comes before the beginning of the next.
            let effects = Effects::of_block(body);
            let touched = effects.waits || written.iter().any(|place| effects.touches(place));
            let mut inside = if touched { Since::TOUCHED } else { *since };
            barriers(body, written, &mut inside);
            *since = since.or(inside);
            true
        }
        Inst::If { then, otherwise, .. } => {
            let mut other = *since;
            barriers(then, written, since);
            barriers(otherwise, written, &mut other);
            *since = since.or(other);
            true
        }
        inst => {
            let orders = matches!(
                inst,
                Inst::Fence
                    | Inst::CopyWait(_)
                    | Inst::WgmmaWait(_)
                    | Inst::AsyncFence
                    | Inst::GridWait
            );
            if orders || inst.reads().chain(inst.writes()).any(|place| written.contains(&place)) {
                *since = Since::TOUCHED;
            }
            true
        }
    });
}

/// Drops barriers after which nothing happens.
fn last_barrier(body: &mut Block) {
    let quiet = |node: &Statement| is_pure(&node.inst);
    while let Some(at) = body.0.iter().rposition(|node| !quiet(node)) {
        if !matches!(body.0[at].inst, Inst::Barrier | Inst::SimdBarrier) {
            break;
        }
        body.0.remove(at);
    }
}

/// Loads of a block that have moved together.
#[derive(Default)]
struct Group {
    /// Where the next goes.
    at: usize,
    count: usize,
    /// The values that depend on them.
    results: HashSet<Value>,
}

/// Moves loads of every block up to an earlier one.
fn loads(block: &mut Block) {
    let mut out: Vec<Statement> = Vec::with_capacity(block.0.len());
    let mut group = Group::default();
    for mut node in std::mem::take(&mut block.0) {
        node.inst.blocks_mut().into_iter().for_each(loads);
        let effects = Effects::of(&node);
        let splits = !node.inst.blocks().is_empty() || effects.waits;
        if splits || matches!(node.inst, Inst::Atomic { .. }) {
            group = Group::default();
            out.push(node);
            continue;
        }
        let is_load =
            matches!(node.inst, Inst::Load { place: Place::Buffer(_) | Place::Shared(_), .. });
        if is_load {
            let slice = (group.count > 0 && group.count < GROUP)
                .then(|| earlier(&out[group.at..], &node, &group))
                .flatten();
            group.results.extend(node.result);
            match slice {
                Some(slice) => {
                    // What its index needs goes along.
                    let mut moved: Vec<Statement> = Vec::with_capacity(slice.len() + 1);
                    for at in slice.iter().rev() {
                        moved.insert(0, out.remove(group.at + at));
                    }
                    moved.push(node);
                    let next = group.at + moved.len();
                    out.splice(group.at..group.at, moved);
                    group.at = next;
                    group.count += 1;
                }
                None => {
                    group.results = node.result.into_iter().collect();
                    out.push(node);
                    group.at = out.len();
                    group.count = 1;
                }
            }
            continue;
        }
        if node.inst.operands().iter().any(|v| group.results.contains(v)) {
            group.results.extend(node.result);
        }
        out.push(node);
    }
    block.0 = out;
}

/// The instructions among `passed` that a load needs, if it may move before the others.
fn earlier(passed: &[Statement], load: &Statement, group: &Group) -> Option<Vec<usize>> {
    if passed.len() > DISTANCE {
        return None;
    }
    let place = load.inst.reads().next();
    let mut needed: HashSet<Value> = load.inst.operands().iter().copied().collect();
    if needed.iter().any(|v| group.results.contains(v)) {
        return None;
    }
    let mut slice = Vec::new();
    for (at, node) in passed.iter().enumerate().rev() {
        if node.inst.writes().is_some() && node.inst.writes() == place {
            return None;
        }
        if !node.result.is_some_and(|v| needed.contains(&v)) {
            continue;
        }
        let operands = node.inst.operands();
        if !is_pure(&node.inst) || operands.iter().any(|v| group.results.contains(v)) {
            return None;
        }
        needed.extend(operands.iter());
        slice.insert(0, at);
    }
    Some(slice)
}
