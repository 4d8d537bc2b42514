//! Dead code: removes unused values, stores to registers that are never read, empty blocks, and
//! arrays without accesses. The rest is numbered densely, in the order of the text.
//!
//! Limits: stores to buffers and shared arrays always count as used.

use std::collections::{HashMap, HashSet};

use super::rewrite::is_removable;
use crate::ir::{Array, Block, Inst, Kernel, Place, Statement, Value};

/// The kernel without what has no consequence.
pub(super) fn dce(kernel: &Kernel) -> Kernel {
    let mut kernel = kernel.clone();
    loop {
        let mut read = HashSet::new();
        kernel.visit(&mut |node| {
            read.extend(node.inst.reads());
        });
        let mut used = vec![false; kernel.values.len()];
        if !sweep(&mut kernel.body, &mut used, &read) {
            break;
        }
    }
    drop_arrays(&mut kernel);
    renumber(&mut kernel);
    kernel
}

/// Goes through a block from its end; whether a store to a register went, which may make others
/// dead.
fn sweep(block: &mut Block, used: &mut [bool], read: &HashSet<Place>) -> bool {
    let mut again = false;
    let mut kept = Vec::with_capacity(block.0.len());
    for mut node in std::mem::take(&mut block.0).into_iter().rev() {
        for inner in node.inst.blocks_mut() {
            again |= sweep(inner, used, read);
        }
        let dead = match &node.inst {
            Inst::Store { place: place @ Place::Register(_), .. } => {
                let dead = !read.contains(place);
                again |= dead;
                dead
            }
            Inst::For { body, .. } => body.0.is_empty(),
            Inst::If { then, otherwise, .. } => then.0.is_empty() && otherwise.0.is_empty(),
            inst => is_removable(inst) && node.result.is_some_and(|v| !used[v.0 as usize]),
        };
        if dead {
            continue;
        }
        node.inst.operands().iter().for_each(|v| used[v.0 as usize] = true);
        kept.push(node);
    }
    kept.reverse();
    block.0 = kept;
    again
}

/// Removes shared and register arrays that no instruction names.
fn drop_arrays(kernel: &mut Kernel) {
    let mut named = HashSet::new();
    kernel.visit(&mut |node| {
        named.extend(node.inst.reads());
        named.extend(node.inst.writes());
    });
    // Memory that another array takes over is needed as long as that one is.
    let over = |array: &Array| array.over.map(Place::Shared);
    let taken = (0..).zip(&kernel.shared).filter(|(i, _)| named.contains(&Place::Shared(*i)));
    let taken: Vec<Place> = taken.filter_map(|(_, array)| over(array)).collect();
    named.extend(taken);
    let mut moved = HashMap::new();
    let mut keep = |arrays: &mut Vec<Array>, place: fn(u32) -> Place| {
        let all = std::mem::take(arrays);
        for (i, array) in all.into_iter().enumerate() {
            let old = place(i as u32);
            if named.contains(&old) {
                moved.insert(old, place(arrays.len() as u32));
                arrays.push(array);
            }
        }
    };
    keep(&mut kernel.shared, Place::Shared);
    keep(&mut kernel.registers, Place::Register);
    for array in &mut kernel.shared {
        let new = array.over.and_then(|i| moved.get(&Place::Shared(i)));
        array.over = new.and_then(|place| match place {
            Place::Shared(i) => Some(*i),
            _ => None,
        });
    }
    let mut body = std::mem::take(&mut kernel.body);
    change(&mut body, &mut |node| {
        node.inst.map_places(|_, place| {
            if let Some(new) = moved.get(place) {
                *place = *new;
            }
        });
    });
    kernel.body = body;
}

/// Calls `f` on every instruction, outer before inner.
fn change(block: &mut Block, f: &mut impl FnMut(&mut Statement)) {
    for node in &mut block.0 {
        f(node);
        node.inst.blocks_mut().into_iter().for_each(|inner| change(inner, f));
    }
}

/// Numbers values in the order of their definitions.
fn renumber(kernel: &mut Kernel) {
    let old = std::mem::take(&mut kernel.values);
    let mut numbers: HashMap<Value, Value> = HashMap::new();
    let mut values = Vec::new();
    let mut number = |v: &mut Value| {
        let new = *numbers.entry(*v).or_insert_with(|| {
            values.push(old[v.0 as usize]);
            Value(values.len() as u32 - 1)
        });
        *v = new;
    };
    let mut body = std::mem::take(&mut kernel.body);
    change(&mut body, &mut |node| {
        node.inst.map_operands(|mut v| {
            number(&mut v);
            v
        });
        if let Inst::For { index, .. } = &mut node.inst {
            number(index);
        }
        if let Some(result) = &mut node.result {
            number(result);
        }
    });
    kernel.body = body;
    kernel.values = values;
}
