//! The least that a node has to read and compute, whatever the device does in addition.

use cpu_kernels::matmul::Unit;
use ops::Rows;
use ops::operation::{CacheUse, Sharding, StateAccess};
use program::{Node, Program, Step, ValueId, WeightId};

use crate::Work;

/// The profile name of the operation that computes the logits, whatever was fused into it.
const HEAD: &str = "head";

/// A node's name in a profile.
pub(crate) fn name(program: &Program, node: &Node) -> &'static str {
    let makes = |value: &ValueId| program.nodes.iter().find(|node| node.outputs.contains(value));
    let mut head = program.results.first().and_then(makes);
    // Ranks compute some of the logits each, and gather them.
    while let Some(gather) = head.filter(|node| node.op.sharding() == Sharding::OfRank) {
        head = gather.inputs.first().and_then(makes);
    }
    if head.is_some_and(|head| head.outputs == node.outputs) { HEAD } else { node.op.name() }
}

/// A weight matrix on a device.
pub(crate) struct Matrix {
    /// Bytes of the whole matrix.
    pub(crate) bytes: usize,
    /// Bytes of one row.
    pub(crate) row_bytes: usize,
    /// Number of elements.
    pub(crate) elements: usize,
    /// The unit that computes products with it.
    pub(crate) unit: Unit,
}

/// The inputs of a node's cost.
pub(crate) struct Costs<'a> {
    /// The Program that is replayed.
    pub(crate) program: &'a Program,
    /// The cache group of each layer.
    pub(crate) groups: &'a [usize],
    /// The matrix of a weight as used for rows of the given kind; `None` if it is not a matrix.
    pub(crate) matrix: &'a dyn Fn(WeightId, Rows) -> Option<Matrix>,
    /// Bytes of a layer's cache per position.
    pub(crate) position: &'a dyn Fn(usize) -> usize,
}

impl Costs<'_> {
    /// The work of a node in a step.
    pub(crate) fn of(&self, step: &Step<'_>, node: &Node) -> Work {
        let tokens = step.tokens.len();
        let shape = |value: &program::ValueId| self.program.values[value.0];
        let rows = |rows: Rows| rows.count(tokens, step.outputs.len());
        let mut work = Work::default();
        let shapes: Vec<ops::Shape> = node.inputs.iter().map(shape).collect();
        let mixture = node.op.experts(&shapes);
        for weight in &node.weights {
            let of = node.inputs.first().map_or(Rows::Tokens, |x| shape(x).rows);
            let Some(matrix) = (self.matrix)(*weight, of) else { continue };
            if node.op.gathers().is_some() {
                work.bytes += (matrix.row_bytes * tokens) as u64;
                continue;
            }
            let (share, each) = mixture.map_or((1.0, 1.0), |(used, count)| {
                let part = used as f64 / count as f64;
                // One row reads the share `used / count` of the experts; each further row adds that
                // share of the experts that are still unread.
                (1.0 - (1.0 - part).powf(rows(of) as f64), part)
            });
            let operations = (2 * rows(of) * matrix.elements) as f64 * each;
            work.bytes += (matrix.bytes as f64 * share) as u64;
            *match matrix.unit {
                Unit::Bytes => &mut work.bytes_dot,
                Unit::Narrow => &mut work.narrow_dot,
                Unit::Tiles => &mut work.tiles,
                Unit::Floats => &mut work.floats,
            } += operations as u64;
        }
        if let Some(CacheUse { layer, access }) = node.op.cache()
            && !matches!(access, StateAccess::Append { .. })
        {
            for sequence in step.sequences {
                let oldest = sequence.tables[self.groups[layer]].oldest;
                let positions: Vec<u32> = (sequence.start..sequence.end()).collect();
                let cached = node.op.cached_work(&positions, oldest);
                work.bytes += match access {
                    // A recurrent state is read once, whatever the number of rows.
                    StateAccess::Carry { elements, .. } => (elements * size_of::<f32>()) as u64,
                    _ => (cached.positions * (self.position)(layer)) as u64,
                };
                work.floats += cached.operations;
            }
        } else if work.bytes == 0 {
            // A selection reads only the rows that it writes.
            let out = node.outputs.first().map(|value| shape(value).rows);
            let read = |value| {
                rows(out.unwrap_or(shape(value).rows)) * shape(value).width * size_of::<f32>()
            };
            work.bytes = node.inputs.iter().map(read).sum::<usize>() as u64;
        }
        work
    }
}
