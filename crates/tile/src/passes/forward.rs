//! Registers in straight-line code: a load of what was just stored becomes the value itself, and a
//! store that is overwritten before it is read goes. So a `Var` costs nothing but where a loop or a
//! branch carries it.
//!
//! Limits: cells are told apart only by indices that are numbers; an access at any other index
//! concerns them all.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::rewrite::{Effects, Rewrite, Visitor, each, rewrite};
use crate::ir::{Block, Inst, Kernel, Literal, Place, Statement, Value};

/// One register: an array and an index.
type Cell = (Place, u32);

/// The kernel with loads and stores of registers that are not needed removed.
pub(super) fn forward(kernel: &Kernel) -> Kernel {
    let mut kernel = rewrite(kernel, &mut Forward::default());
    let mut numbers = HashMap::new();
    kernel.visit(&mut |node| {
        if let (Inst::Literal(Literal::U32(n)), Some(value)) = (&node.inst, node.result) {
            numbers.insert(value, *n);
        }
    });
    dead_stores(&mut kernel.body, &numbers, &mut Live::default());
    kernel
}

/// The known content of each register.
#[derive(Default)]
struct Forward {
    held: HashMap<Cell, Value>,
}

impl Forward {
    fn forget(&mut self, writes: &BTreeSet<Place>) {
        self.held.retain(|(place, _), _| !writes.contains(place));
    }

    /// An inner block, which starts from what is known here and whose own knowledge ends with it.
    fn inside(&mut self, r: &mut Rewrite, block: Block) -> Block {
        let before = self.held.clone();
        let block = r.inner(block, self);
        self.held = before;
        block
    }
}

impl Visitor for Forward {
    fn node(&mut self, r: &mut Rewrite, node: Statement) {
        let writes = Effects::of(&node).writes;
        match node.inst {
            Inst::Load { place: place @ Place::Register(_), index, .. } => {
                let Some(index) = r.known_u32(index) else { return r.keep(node, self) };
                let Some(result) = node.result else { return };
                if let Some(value) = self.held.get(&(place, index)) {
                    return r.rename(result, *value);
                }
                self.held.insert((place, index), result);
                r.keep(node, self);
            }
            Inst::Store { place: place @ Place::Register(_), index, value } => {
                match r.known_u32(index) {
                    Some(index) => {
                        if self.held.insert((place, index), value) == Some(value) {
                            return;
                        }
                    }
                    None => self.forget(&writes),
                }
                r.keep(node, self);
            }
            Inst::For { index, start, end, step, unroll, body } => {
                // A trip may come after another that wrote.
                self.forget(&writes);
                let body = self.inside(r, body);
                r.push(Inst::For { index, start, end, step, unroll, body }, None);
            }
            Inst::Wgmma { .. } | Inst::WgmmaOf { .. } => {
                self.forget(&writes);
                r.keep(node, self);
            }
            Inst::If { cond, then, otherwise } => {
                let then = self.inside(r, then);
                let otherwise = self.inside(r, otherwise);
                self.forget(&writes);
                r.push(Inst::If { cond, then, otherwise }, None);
            }
            _ => r.keep(node, self),
        }
    }
}

/// Registers that may be read later.
#[derive(Default, Clone)]
struct Live {
    cells: HashSet<Cell>,
    arrays: HashSet<Place>,
}

impl Live {
    /// Notes the registers that a load or a product reads.
    fn read(&mut self, inst: &Inst, numbers: &HashMap<Value, u32>) {
        match inst {
            Inst::Load { place: place @ Place::Register(_), index, .. } => {
                match numbers.get(index) {
                    Some(index) => {
                        self.cells.insert((*place, *index));
                    }
                    None => {
                        self.arrays.insert(*place);
                    }
                }
            }
            Inst::Wgmma { sum, .. } | Inst::WgmmaOf { sum, .. } => {
                self.arrays.insert(*sum);
            }
            _ => {}
        }
    }
}

/// Removes stores to registers that are overwritten or forgotten before they are read, from the end
/// of a block.
fn dead_stores(block: &mut Block, numbers: &HashMap<Value, u32>, live: &mut Live) {
    let mut kept = Vec::with_capacity(block.0.len());
    for mut node in std::mem::take(&mut block.0).into_iter().rev() {
        let mut dead = false;
        match &mut node.inst {
            Inst::Store { place: place @ Place::Register(_), index, .. } => {
                if let Some(index) = numbers.get(index) {
                    let cell = (*place, *index);
                    dead = !live.arrays.contains(place) && !live.cells.remove(&cell);
                }
            }
            inst @ (Inst::Load { .. } | Inst::Wgmma { .. } | Inst::WgmmaOf { .. }) => {
                live.read(inst, numbers)
            }
            Inst::For { body, .. } => {
                // What a trip leaves may be read by the next.
                body.0
                    .iter()
                    .for_each(|node| each(node, &mut |node| live.read(&node.inst, numbers)));
                let mut inside = live.clone();
                dead_stores(body, numbers, &mut inside);
            }
            Inst::If { then, otherwise, .. } => {
                let mut other = live.clone();
                dead_stores(then, numbers, live);
                dead_stores(otherwise, numbers, &mut other);
                live.cells.extend(other.cells);
                live.arrays.extend(other.arrays);
            }
            _ => {}
        }
        if !dead {
            kept.push(node);
        }
    }
    kept.reverse();
    block.0 = kept;
}
