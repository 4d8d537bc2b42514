//! Which values stand inside the expression that uses them, and so need no name.
//!
//! Pure values used once, in the same block; and loads, if nothing that may change what they find
//! separates them from the statement they end up in.

use crate::ir::{Block, Inst, Kernel, Place, Statement, Value};
use crate::types::Type;

/// For each instruction of a block, whether it may stand where it is used. `uses` counts each
/// value's uses in the kernel.
pub(super) fn choose(kernel: &Kernel, uses: &[u32], block: &Block) -> Vec<bool> {
    let nodes = &block.0;
    // For each value, the instruction of this block that uses it.
    let mut user = vec![None; kernel.values.len()];
    for (at, node) in nodes.iter().enumerate() {
        for operand in node.inst.operands().iter() {
            user[operand.0 as usize] = Some(at);
        }
    }
    let mut inline = vec![false; nodes.len()];
    // The statement that each instruction ends up in: itself, or that of its user.
    let mut ends: Vec<usize> = (0..nodes.len()).collect();
    for (at, node) in nodes.iter().enumerate().rev() {
        let Some(result) = node.result else { continue };
        let Some(user) = user[result.0 as usize] else { continue };
        let end = ends[user];
        let moves = match node.inst {
            Inst::Load { place, .. } => {
                let between = nodes.get(at + 1..end).unwrap_or(&[]);
                !between.iter().any(|n| may_change(&n.inst, place))
            }
            _ => true,
        };
        if moves && uses[result.0 as usize] == 1 && may_stand_in(kernel, node, result, &nodes[user])
        {
            inline[at] = true;
            ends[at] = end;
        }
    }
    inline
}

fn may_stand_in(kernel: &Kernel, node: &Statement, result: Value, user: &Statement) -> bool {
    // A product may move down its block to the register that it becomes: all lanes get there
    // together.
    if matches!(node.inst, Inst::Mma { .. }) {
        return matches!(&user.inst, Inst::Store { place: Place::Register(_), .. });
    }
    if node.inst.has_effect() {
        return false;
    }
    match &user.inst {
        // The end and the step are looked at in every turn of the loop.
        Inst::For { start, .. } => result == *start,
        // A vector's elements are taken from its name.
        Inst::Cast(..) if matches!(kernel.ty(result), Type::Vector(..)) => false,
        inst => match kernel.ty(result).tile() {
            None => true,
            Some(_) if matches!(node.inst, Inst::Load { .. }) => true,
            // Only element by element does a tile have an expression.
            Some(_) => element_wise(inst),
        },
    }
}

/// Whether an instruction acts on the elements of tiles one by one, given their elements.
fn element_wise(inst: &Inst) -> bool {
    matches!(
        inst,
        Inst::Unary(..)
            | Inst::Binary(..)
            | Inst::Fma(..)
            | Inst::Select { .. }
            | Inst::Cast(..)
            | Inst::Bitcast(..)
    )
}

/// Whether an instruction may change what a load of `place` finds.
fn may_change(inst: &Inst, place: Place) -> bool {
    let blocks = matches!(inst, Inst::For { .. } | Inst::If { .. });
    let signal = matches!(
        inst,
        Inst::Barrier
            | Inst::SimdBarrier
            | Inst::Fence
            | Inst::CopyWait(_)
            | Inst::WgmmaWait(_)
            | Inst::AsyncFence
            | Inst::GridWait
            | Inst::Atomic { .. }
    );
    blocks
        || match place {
            Place::Register(_) => inst.writes() == Some(place),
            Place::Shared(_) => signal || inst.writes() == Some(place),
            // Two buffers may be one.
            Place::Buffer(_) => signal || matches!(inst.writes(), Some(Place::Buffer(_))),
        }
}
