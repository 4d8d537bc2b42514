//! Recomputation (Chen et al. 2016): values of the forward pass that only gradients read are
//! computed again where they are read, so that memory holds one segment of them at a time. The
//! results have the same bits.

use program::{Node, Program, ValueId};
use std::collections::HashMap;
use std::ops::Range;

/// The same Program of a loss and its gradients with the forward pass cut into segments, which
/// gradients compute again from what crosses their beginning. Cuts are where a single value
/// crosses: between sublayers of a decoder. Every `every`-th of them is taken, at least the first.
pub fn checkpoint(program: &Program, every: usize) -> Program {
    let writers = program.writers();
    let Some(loss) = program.results.first().and_then(|v| writers[v.0]) else {
        return program.clone();
    };
    let segments = segments(program, loss, every.max(1));
    let segment_of = |value: ValueId| {
        let writer = writers[value.0]?;
        let at = segments.iter().position(|segment| segment.contains(&writer))?;
        (!kept(program, loss, &segments[at], value)).then_some(at)
    };
    let mut again = Program { nodes: Vec::new(), ..program.clone() };
    let mut copies: Vec<Option<HashMap<ValueId, ValueId>>> = vec![None; segments.len()];
    for (index, node) in program.nodes.iter().enumerate() {
        let mut node = node.clone();
        if index > loss {
            for input in &mut node.inputs {
                let Some(at) = segment_of(*input) else { continue };
                if copies[at].is_none() {
                    copies[at] = Some(copied(&mut again, &program.nodes[segments[at].clone()]));
                }
                *input =
                    copies[at].as_ref().and_then(|map| map.get(input)).copied().unwrap_or(*input);
            }
        }
        again.nodes.push(node);
    }
    super::differentiate::sweep(&mut again);
    again
}

/// The segments that are computed again: all between two cuts, but what is behind the last, which
/// gradients read at once.
fn segments(program: &Program, loss: usize, every: usize) -> Vec<Range<usize>> {
    let mut last = vec![0; program.values.len()];
    for (i, node) in program.nodes[..=loss].iter().enumerate() {
        node.inputs.iter().for_each(|v| last[v.0] = i);
    }
    let mut crossing = 0;
    let mut cuts = vec![0];
    let mut found = 0;
    for (i, node) in program.nodes[..loss].iter().enumerate() {
        let mut ended: Vec<ValueId> = node.inputs.clone();
        ended.sort_unstable();
        ended.dedup();
        crossing -= ended.iter().filter(|v| last[v.0] == i).count();
        crossing += node.outputs.iter().filter(|v| last[v.0] > i).count();
        if crossing == 1 && !node.inputs.is_empty() {
            found += 1;
            if found % every == 0 {
                cuts.push(i + 1);
            }
        }
    }
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// Whether a value of a segment is read behind it by the forward pass, and so is there anyway.
fn kept(program: &Program, loss: usize, segment: &Range<usize>, value: ValueId) -> bool {
    program.nodes[segment.end..=loss].iter().any(|node| node.inputs.contains(&value))
}

/// Records nodes once more, with values of their own.
fn copied(program: &mut Program, nodes: &[Node]) -> HashMap<ValueId, ValueId> {
    let mut map = HashMap::new();
    for node in nodes {
        let mut node = node.clone();
        for input in &mut node.inputs {
            *input = map.get(input).copied().unwrap_or(*input);
        }
        for output in &mut node.outputs {
            let shape = program.shape(*output);
            program.values.push(shape);
            let own = ValueId(program.values.len() - 1);
            map.insert(*output, own);
            *output = own;
        }
        program.nodes.push(node);
    }
    map
}
