//! Memory planning: every activation gets an offset in one arena, and values whose lives do not
//! overlap share bytes.

use crate::{Program, ValueId};
use ops::Shape;

/// Alignment of every activation, a cache line.
const ALIGN: usize = 64;

/// The offset of each activation, for one shape class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaPlan {
    /// Byte offset of each value.
    pub offsets: Vec<usize>,
    /// Size of the arena in bytes.
    pub bytes: usize,
    /// For each node, the input whose bytes its first output reuses.
    pub in_place: Vec<Option<usize>>,
}

/// Lays out the activations of `program` for `tokens` rows, of which `outputs` have logits.
///
/// First fit over live intervals, largest values first; an elementwise operation reuses the bytes
/// of an input that dies.
pub fn plan_memory(program: &Program, tokens: usize, outputs: usize) -> ArenaPlan {
    let size = |v: ValueId| {
        let Shape { rows, width } = program.shape(v);
        rows.count(tokens, outputs) * width * size_of::<f32>()
    };
    plan_sizes(program, &size)
}

/// As [`plan_memory`], with value sizes in bytes.
pub fn plan_sizes(program: &Program, bytes: &dyn Fn(ValueId) -> usize) -> ArenaPlan {
    let count = program.values.len();
    let mut last = vec![0; count];
    let mut first = vec![usize::MAX; count];
    program.input.iter().for_each(|v| first[v.0] = 0);
    for (i, node) in program.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|v| last[v.0] = i);
        for v in &node.outputs {
            first[v.0] = i;
            last[v.0] = last[v.0].max(i);
        }
    }
    for value in &program.results {
        last[value.0] = program.nodes.len();
    }
    // A chain of in-place operations is one region: `root[v]` is the value whose bytes `v` reuses.
    let mut root: Vec<usize> = (0..count).collect();
    let mut in_place = vec![None; program.nodes.len()];
    for (i, node) in program.nodes.iter().enumerate() {
        let Some(input) = node.op.overwrites().filter(|_| !node.outputs.is_empty()) else {
            continue;
        };
        let (from, to) = (node.inputs[input], node.outputs[0]);
        let read_once_here = node.inputs.iter().filter(|v| **v == from).count() == 1;
        if last[from.0] == i && read_once_here && program.shape(from) == program.shape(to) {
            root[to.0] = root[from.0];
            in_place[i] = Some(input);
        }
    }
    for v in 0..count {
        let r = root[v];
        first[r] = first[r].min(first[v]);
        last[r] = last[r].max(last[v]);
    }
    let size = |v: usize| bytes(ValueId(v)).next_multiple_of(ALIGN);
    let mut order: Vec<usize> =
        (0..count).filter(|&v| root[v] == v && first[v] != usize::MAX).collect();
    order.sort_by_key(|&v| (std::cmp::Reverse(size(v)), first[v]));
    let mut offsets = vec![0; count];
    let mut placed: Vec<usize> = Vec::new();
    let mut bytes = 0;
    for v in order {
        let mut busy: Vec<(usize, usize)> = placed
            .iter()
            .filter(|&&p| first[p] <= last[v] && first[v] <= last[p])
            .map(|&p| (offsets[p], offsets[p] + size(p)))
            .collect();
        busy.sort_unstable();
        let mut offset = 0;
        for (begin, end) in busy {
            if offset + size(v) <= begin {
                break;
            }
            offset = offset.max(end);
        }
        offsets[v] = offset;
        bytes = bytes.max(offset + size(v));
        placed.push(v);
    }
    for v in 0..count {
        offsets[v] = offsets[root[v]];
    }
    ArenaPlan { offsets, bytes, in_place }
}
