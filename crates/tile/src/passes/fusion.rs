//! Fusion, in three steps:
//! - neighbouring strided loops over the same elements become one, if each trip touches elements of
//!   its own;
//! - a product used once, by a sum in the same block, becomes `fma`: f32 and tiles of it. The
//!   result is rounded once instead of twice, so it differs from the original within rounding, the
//!   same way on every target;
//! - loads and stores of registers in straight-line code go: see `forward`.
//!
//! Limits: between the loops stands nothing but pure instructions; an array that one loop writes
//! and the other touches must have, in all its accesses in both, the same index, which the trip's
//! number determines (`i`, or `i` and something fixed). Loops that wait, exchange values between
//! lanes or use atomics stay apart.

use std::collections::HashSet;

use super::forward::forward;
use super::rewrite::{Effects, Facts, Rewrite, Visitor, defined, each, is_pure, rewrite};
use crate::instr::BinaryOp;
use crate::ir::{Block, Builtin, Inst, Kernel, Place, Statement, Value};
use crate::types::{Scalar, Type};

/// The kernel with loops merged, products and sums fused, and registers forwarded.
pub(super) fn fusion(kernel: &Kernel) -> Kernel {
    let facts = Facts::new(kernel);
    let mut body = kernel.body.clone();
    merge(&facts, &mut body);
    let merged = Kernel { body, ..kernel.clone() };
    let mut uses = vec![0; merged.values.len()];
    merged.visit(&mut |node| {
        node.inst.operands().iter().for_each(|v| uses[v.0 as usize] += 1);
    });
    let fused = rewrite(&merged, &mut Products { uses, here: vec![HashSet::new()] });
    forward(&fused)
}

/// Merges loops of a block and of those inside it.
fn merge(facts: &Facts<'_>, block: &mut Block) {
    let mut out: Vec<Statement> = Vec::with_capacity(block.0.len());
    // Where the latest loop is in `out`, if only pure instructions followed.
    let mut last: Option<usize> = None;
    for mut node in std::mem::take(&mut block.0) {
        node.inst.blocks_mut().into_iter().for_each(|inner| merge(facts, inner));
        if !matches!(node.inst, Inst::For { .. }) {
            if !is_pure(&node.inst) {
                last = None;
            }
            out.push(node);
            continue;
        }
        if let Some(at) = last
            && let Some(both) = merged(facts, &out[at], &node)
        {
            // What stood between them goes first.
            out.remove(at);
            out.push(both);
        } else {
            out.push(node);
        }
        last = Some(out.len() - 1);
    }
    block.0 = out;
}

/// Two loops as one, if they may be.
fn merged(facts: &Facts<'_>, first: &Statement, second: &Statement) -> Option<Statement> {
    let (
        Inst::For { index, start, end, step, unroll, body },
        Inst::For {
            index: index2,
            start: start2,
            end: end2,
            step: step2,
            unroll: unroll2,
            body: body2,
        },
    ) = (&first.inst, &second.inst)
    else {
        return None;
    };
    let same = |a: Value, b: Value| a == b || facts.u32(a).is_some_and(|a| facts.u32(b) == Some(a));
    let strided = matches!(facts.inst(*start), Some(Inst::Builtin(Builtin::Thread)))
        && facts.u32(*step) == Some(facts.threads());
    let equal = facts.same(*start, *start2) && same(*end, *end2) && same(*step, *step2);
    if !strided || !equal || unroll != unroll2 {
        return None;
    }
    let (one, two) = (Effects::of(first), Effects::of(second));
    if one.together || two.together {
        return None;
    }
    let (inside, inside2) = (defined(first), defined(second));
    for place in
        one.writes.union(&two.writes).filter(|place| one.touches(place) && two.touches(place))
    {
        let mut indices = accesses(first, *place).map(|v| facts.own(v, *index, &inside));
        let mut indices2 = accesses(second, *place).map(|v| facts.own(v, *index2, &inside2));
        let own = indices.next().flatten()?;
        let alike = |found: Option<Vec<Value>>| found.as_ref() == Some(&own);
        if !indices.all(alike) || !indices2.all(alike) {
            return None;
        }
    }
    let mut all = body.clone();
    let mut rest = body2.clone();
    replace(&mut rest, *index2, *index);
    all.0.extend(rest.0);
    let (index, start, end, step, unroll) = (*index, *start, *end, *step, *unroll);
    let inst = Inst::For { index, start, end, step, unroll, body: all };
    Some(Statement { inst, result: None, source: first.source })
}

/// The indices at which an array is accessed inside an instruction. Tile accesses are none of
/// these: loops that have them do things together.
fn accesses(node: &Statement, place: Place) -> impl Iterator<Item = Value> {
    let mut found = Vec::new();
    each(node, &mut |node| match &node.inst {
        Inst::Load { place: p, index, .. } | Inst::Store { place: p, index, .. } if *p == place => {
            found.push(*index);
        }
        _ => {}
    });
    found.into_iter()
}

fn replace(block: &mut Block, old: Value, new: Value) {
    for node in &mut block.0 {
        node.inst.map_operands(|v| if v == old { new } else { v });
        node.inst.blocks_mut().into_iter().for_each(|inner| replace(inner, old, new));
    }
}

impl Facts<'_> {
    /// Whether two values are surely the same number: one value, or equal instructions on the same
    /// values.
    fn same(&self, a: Value, b: Value) -> bool {
        a == b
            || match (self.inst(a), self.inst(b)) {
                (Some(a), Some(b)) => a == b && is_pure(a),
                _ => false,
            }
    }

    /// The terms added to a loop's index to make `value`, if that is all: sorted, from outside the
    /// loop. Different trips then have different values.
    pub(super) fn own(
        &self,
        value: Value,
        index: Value,
        inside: &HashSet<Value>,
    ) -> Option<Vec<Value>> {
        if value == index {
            return Some(vec![]);
        }
        let Some(Inst::Binary(BinaryOp::Add, a, b)) = self.inst(value) else { return None };
        let (rest, fixed) = match (inside.contains(a), inside.contains(b)) {
            (true, false) => (*a, *b),
            (false, true) => (*b, *a),
            _ => return None,
        };
        let mut terms = self.own(rest, index, inside)?;
        terms.push(fixed);
        terms.sort_unstable();
        Some(terms)
    }
}

/// Products and sums.
struct Products {
    /// How often each value is used.
    uses: Vec<u32>,
    /// Values defined in each open block.
    here: Vec<HashSet<Value>>,
}

impl Visitor for Products {
    fn node(&mut self, r: &mut Rewrite, mut node: Statement) {
        if let Inst::Binary(BinaryOp::Add, a, b) = node.inst
            && let Some(fma) = self.fma(r, a, b)
        {
            node.inst = fma;
        }
        if let (Some(scope), Some(result)) = (self.here.last_mut(), node.result) {
            scope.insert(result);
        }
        r.keep(node, self);
    }

    fn enter(&mut self) {
        self.here.push(HashSet::new());
    }

    fn leave(&mut self) {
        self.here.pop();
    }
}

impl Products {
    fn fma(&self, r: &Rewrite, a: Value, b: Value) -> Option<Inst> {
        let float = match r.kernel.ty(a) {
            Type::Vector(..) => false,
            ty => ty.scalar() == Scalar::F32,
        };
        let product = |v: Value| match r.def(v) {
            Some(Inst::Binary(BinaryOp::Mul, x, y)) => {
                let once = self.uses.get(v.0 as usize) == Some(&1);
                let here = self.here.last().is_some_and(|scope| scope.contains(&v));
                (once && here).then_some((*x, *y))
            }
            _ => None,
        };
        if !float {
            return None;
        }
        let (x, y, sum) = match (product(a), product(b)) {
            (Some((x, y)), _) => (x, y, b),
            (None, Some((x, y))) => (x, y, a),
            (None, None) => return None,
        };
        Some(Inst::Fma(x, y, sum))
    }
}
