//! A mixture's work for a single decode row. Each selected expert has this one row, so that nothing
//! is sorted or gathered; every worker routes and quantises for itself. Two barriers remain, one
//! after each product. Adapters of the experts have none of their own: see `low`. The row has the
//! same bits as in any other step.

use cpu_kernels::matmul::{Activations, Path, ROWS};
use cpu_kernels::team::Worker;
use ops::Experts;
use ops::experts::{MOST_USED, Sizes};
use program::Node;
use std::ops::Range;

use super::low::Sites;
use super::{PairRows, parts};
use crate::cpu::replay::Replay;

impl Replay<'_> {
    /// Routes the row and computes its experts.
    pub(super) fn experts_of_one(
        &self,
        (op, node, sizes): (&Experts, &Node, Sizes),
        sites: &Sites,
        worker: &Worker<'_>,
    ) {
        let Sizes { experts, used, width, ff } = sizes;
        let (mut ids, mut weights) = ([0; MOST_USED], [0.0; MOST_USED]);
        let (ids, weights) = (&mut ids[..used], &mut weights[..used]);
        // SAFETY: scores are only read.
        let scores = unsafe { self.floats(self.offset(node.inputs[1]), 0..experts) };
        self.route(op, node, scores, (&mut *ids, &mut *weights));

        let [gate, _, y] = self.pair_rows(sizes);
        let panels = |i: usize| self.matrix(node.weights[i]).panels() / experts;
        // Adds what adapters change in some panels of one of a pair's products.
        let change = |matrix: usize, pair: usize, of: (&Range<usize>, usize), to: PairRows| {
            let factors = self.pair_factors(sites, matrix, 0, ids[pair] as usize);
            if factors.is_some() {
                worker.wait();
            }
            self.low_up(factors, matrix, (pair, used), of, to);
        };
        let input = self.offset(node.inputs[0]);
        // SAFETY: the row is complete, and only read.
        let row = |_| unsafe { &*self.floats(input, 0..width) };
        self.low_down_of_one(sites, 0..2, ids, row, worker);
        let x = self.own_row(input, width, node, 0, worker);
        for (pair, panels) in parts(0..used, used, panels(0), worker) {
            let of = (ids[pair] as usize, &(pair..pair + 1));
            let change = |matrix, to| change(matrix, pair, (&panels, ff), to);
            self.gate_and_up((op, node, sizes), &x, of, &panels, worker, change);
        }
        worker.barrier();
        let start = |pair: usize| gate.start + pair * gate.stride * size_of::<f32>();
        // SAFETY: the rows are complete, and only read.
        let row = |pair| unsafe { &*self.floats(start(pair), 0..ff) };
        self.low_down_of_one(sites, 2..3, ids, row, worker);
        for (pair, panels) in parts(0..used, used, panels(2), worker) {
            let x = self.own_row(start(pair), ff, node, 2, worker);
            let (expert, places) = (ids[pair] as usize, pair..pair + 1);
            self.times(node, 2, &x, (&places, y), expert, &panels, worker);
            change(2, pair, (&panels, width), y);
        }
        worker.barrier();
        let columns = worker.split_units(width, ROWS);
        // SAFETY: each worker has its own columns; results are only read.
        let to = unsafe { self.floats(self.offset(node.outputs[0]), columns.clone()) };
        let row = |pair: usize| {
            let row = pair * y.stride + columns.start..pair * y.stride + columns.end;
            // SAFETY: as above.
            unsafe { self.floats(y.start, row) }
        };
        let results = weights.iter().enumerate().map(|(pair, weight)| (*weight, &*row(pair)));
        // SAFETY: the residual is only read.
        let residual = node
            .inputs
            .get(2)
            .map(|residual| unsafe { &*self.floats(self.offset(*residual), columns.clone()) });
        super::combine(to, results, residual);
    }

    /// A row at an offset of the arena, quantised by this worker into its own scratch for one of
    /// the node's matrices.
    fn own_row(
        &self,
        start: usize,
        cols: usize,
        node: &Node,
        weight: usize,
        worker: &Worker<'_>,
    ) -> Activations<'_> {
        let place = &self.class.experts;
        let own = self.class.mixture + place.own + worker.index * place.own_bytes;
        let row = self.arena.wrapping_add(start).cast::<f32>().cast_const();
        // SAFETY: the row is complete and only read; the storage is this worker's own, and its
        // previous contents are no longer needed.
        unsafe {
            let quantised = self.arena.wrapping_add(own);
            let x = Activations::new(Path::InPlace, row, cols, 1, cols, quantised);
            let float = self.loaded.weights[node.weights[weight].0].is_float_matrix();
            x.quantise(self.loaded.isa, 0..x.blocks(), float);
            x
        }
    }
}
