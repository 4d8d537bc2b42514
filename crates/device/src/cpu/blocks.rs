//! Products with block-diagonal matrices. Workers split panels of weights where rows are few, and
//! blocks and rows where they are many; each quantises what it multiplies for itself.

use super::class::EVEN;
use super::experts::parts;
use super::products::{Product, path};
use super::replay::Replay;
use cpu_kernels::matmul::{Activations, Path, ROWS};
use cpu_kernels::team::Worker;
use ops::{BlockLinear, Op};
use program::{Node, Program};
use std::ops::Range;

/// Rows that are quantised together.
const NEAR: usize = 64;

/// A worker's scratch in bytes: quantised rows of a block, then its results where a block's rows do
/// not fill panels.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Layout {
    quantised: usize,
    /// All of it.
    pub(super) bytes: usize,
}

impl Layout {
    /// The largest that a node of a Program needs in steps of up to `tokens` rows.
    pub(super) fn new(program: &Program, tokens: usize) -> Layout {
        let (mut quantised, mut results) = (0, 0);
        for (node, op) in each(program) {
            let [width, out] = [node.inputs[0], node.outputs[0]]
                .map(|value| program.shape(value).width / op.blocks);
            for path in [Path::InPlace, Path::Expanded] {
                let bytes = |rows| Activations::bytes(path, rows, width);
                let most = (1..=tokens.min(NEAR)).map(bytes).max().unwrap_or(0);
                quantised = quantised.max(most.next_multiple_of(64));
            }
            results = results.max(tokens.min(NEAR) * out.next_multiple_of(ROWS));
        }
        // A page apart, which avoids false sharing.
        let bytes = (quantised + results * size_of::<f32>()).next_multiple_of(4096);
        Layout { quantised, bytes }
    }
}

/// The products with block-diagonal matrices.
pub(super) fn each(program: &Program) -> impl Iterator<Item = (&Node, BlockLinear)> {
    program.nodes.iter().filter_map(|node| match node.op {
        Op::BlockLinear(op) => Some((node, op)),
        _ => None,
    })
}

impl Replay<'_> {
    pub(super) fn block_linear(&self, op: BlockLinear, node: &Node, worker: &Worker<'_>) {
        let rows = self.rows(node);
        let panels = self.matrix(node.weights[0]).panels() / op.blocks;
        if rows <= EVEN {
            for (block, part) in parts(0..op.blocks, op.blocks, panels, worker) {
                self.block(op, node, (block, part), 0..rows, worker);
            }
            return;
        }
        let chunks = rows.div_ceil(NEAR);
        for item in worker.split(op.blocks * chunks) {
            let (block, first) = (item / chunks, item % chunks * NEAR);
            self.block(op, node, (block, 0..panels), first..rows.min(first + NEAR), worker);
        }
    }

    /// Multiplies some rows of a block with some panels of its matrix.
    fn block(
        &self,
        op: BlockLinear,
        node: &Node,
        (block, panels): (usize, Range<usize>),
        rows: Range<usize>,
        worker: &Worker<'_>,
    ) {
        let (x, y) = (node.inputs[0], node.outputs[0]);
        let [wide, stride] = [self.width(x), self.width(y)];
        let [width, out] = [wide / op.blocks, stride / op.blocks];
        let matrix = self.matrix(node.weights[0]);
        let path = path(self.step.kind, self.loaded.program.shape(x).rows);
        let layout = &self.class.block;
        let own = self.class.blocks + worker.index * layout.bytes;
        let from = self.start(x).wrapping_add(rows.start * wide + block * width);
        let storage = self.arena.wrapping_add(own);
        // SAFETY: the input is only read, and the scratch is this worker's own.
        let input =
            unsafe { Activations::new(path, from.cast_const(), wide, rows.len(), width, storage) };
        let float = self.loaded.weights[node.weights[0].0].is_float_matrix();
        // SAFETY: as above.
        unsafe { input.quantise(self.loaded.isa, 0..input.blocks(), float) };
        let first = block * out.div_ceil(ROWS);
        let all = first + panels.start..first + panels.end;
        let to = self.start(y).wrapping_add(rows.start * stride + block * out);
        // `multiply` counts columns from the whole matrix's first.
        let start = |out: *mut f32| out.wrapping_sub(first * ROWS);
        let product = |out, stride| Product { matrix, bias: None, out, stride, accumulate: false };
        if out.is_multiple_of(ROWS) {
            return self.multiply(&product(start(to), stride), &input, all, worker);
        }
        let (padded, results) = (out.next_multiple_of(ROWS), own + layout.quantised);
        let aside = self.arena.wrapping_add(results).cast::<f32>();
        self.multiply(&product(start(aside), padded), &input, all, worker);
        let columns = panels.start * ROWS..out.min(panels.end * ROWS);
        for t in 0..rows.len() {
            let at = (rows.start + t) * stride + block * out;
            // SAFETY: results are this worker's own, and so are these columns of the rows.
            let (from, to) = unsafe {
                let from = self.floats(results, t * padded..(t + 1) * padded);
                let to = at + columns.start..at + columns.end;
                (from, self.floats(self.offset(y), to))
            };
            to.copy_from_slice(&from[columns.clone()]);
        }
    }
}
