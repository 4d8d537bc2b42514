//! Loop-invariant code: what a loop computes anew each time from values outside it is computed once
//! before it. Inner loops go first, so that an instruction may leave several.
//!
//! Limits: instructions inside an `if` of the loop stay. Loads leave only a loop that surely runs,
//! of an array that nothing in the loop writes, with nothing in the loop that waits for other
//! threads; divisions and shifts only if they are defined whatever the loop's bounds are.

use std::collections::HashSet;

use super::rewrite::{Effects, Facts, is_pure, is_safe};
use crate::ir::{Access, Block, Inst, Kernel, LoadHint, ParamKind, Place, Statement, Value};

/// The kernel with invariant instructions moved out of loops.
pub(super) fn licm(kernel: &Kernel) -> Kernel {
    let facts = Facts::new(kernel);
    let mut body = kernel.body.clone();
    hoist(kernel, &facts, &mut body);
    Kernel { body, ..kernel.clone() }
}

fn hoist(kernel: &Kernel, facts: &Facts<'_>, block: &mut Block) {
    let mut nodes = Vec::with_capacity(block.0.len());
    for mut node in std::mem::take(&mut block.0) {
        for inner in node.inst.blocks_mut() {
            hoist(kernel, facts, inner);
        }
        if let Inst::For { index, start, end, body, .. } = &mut node.inst {
            let surely = facts.runs(*start, *end);
            nodes.extend(invariant(kernel, facts, *index, body, surely));
        }
        nodes.push(node);
    }
    block.0 = nodes;
}

/// Takes what does not change out of a loop's body.
fn invariant(
    kernel: &Kernel,
    facts: &Facts<'_>,
    index: Value,
    body: &mut Block,
    surely: bool,
) -> Vec<Statement> {
    let effects = Effects::of_block(body);
    let mut inside: HashSet<Value> = HashSet::from([index]);
    inside.extend(body.0.iter().filter_map(|node| node.result));
    let mut moved = Vec::new();
    body.0.retain(|node| {
        let fixed = node.inst.operands().iter().all(|v| !inside.contains(v));
        let may = match &node.inst {
            Inst::Load { place, hint, .. } => {
                let fresh = *hint == LoadHint::Coherent && !reads_only(kernel, *place);
                surely && !effects.waits && !effects.writes(*place) && !fresh
            }
            inst => is_pure(inst) && (surely || is_safe(inst, facts)),
        };
        let goes = fixed && may && node.result.is_some();
        if goes {
            node.result.iter().for_each(|v| {
                inside.remove(v);
            });
            moved.push(node.clone());
        }
        !goes
    });
    moved
}

fn reads_only(kernel: &Kernel, place: Place) -> bool {
    let Place::Buffer(i) = place else { return false };
    matches!(kernel.params[i as usize].kind, ParamKind::Buffer { access: Access::In, .. })
}
