//! A mixture's work for one row that decodes: each expert has that row alone, so that nothing is
//! sorted or gathered, and every worker chooses experts and quantises what it reads for itself. Two
//! barriers are left, behind each of the two products. The row's bits are those of any step.

use cpu_kernels::matmul::{Activations, Path, ROWS, share};
use cpu_kernels::team::Worker;
use ops::Experts;
use ops::experts::{MOST_USED, Sizes};
use program::Node;
use std::ops::Range;

use super::{PairRows, route};
use crate::cpu::replay::Replay;

impl Replay<'_> {
    /// Chooses experts and multiplies with them.
    pub(super) fn experts_of_one(
        &self,
        op: &Experts,
        node: &Node,
        sizes: Sizes,
        worker: &Worker<'_>,
    ) {
        let Sizes { experts, used, width, ff } = sizes;
        let (place, at) = (&self.class.experts, self.class.mixture);
        let (mut ids, mut weights) = ([0; MOST_USED], [0.0; MOST_USED]);
        let (ids, weights) = (&mut ids[..used], &mut weights[..used]);
        // SAFETY: scores are only read.
        let scores = unsafe { self.floats(self.offset(node.inputs[1]), 0..experts) };
        route(scores, &op.routing, ids, weights);

        let (wide, inner) = (width.next_multiple_of(ROWS), ff.next_multiple_of(ROWS));
        let of = |offset: usize, stride: usize| PairRows { start: at + offset, stride };
        let (gate, up, y) = (of(place.gate, inner), of(place.up, inner), of(place.y, wide));
        let bias = |i: usize| node.weights.get(i).map(|&bias| self.vector(bias));
        let matrix = |i: usize| self.matrix(node.weights[i]);

        let x = self.own_row(self.offset(node.inputs[0]), width, node, 0, worker);
        for (pair, panels) in parts(used, matrix(0).panels() / experts, worker) {
            let (first, own) = (ids[pair] as usize * inner / ROWS, pair..pair + 1);
            for (i, to) in [(0, gate), (1, up)] {
                self.times(matrix(i), bias(i + 3), &x, (&own, to), first, &panels, worker);
            }
            let columns = panels.start * ROWS..(panels.end * ROWS).min(ff);
            let row = pair * inner + columns.start..pair * inner + columns.end;
            // SAFETY: each worker has its own columns of an expert's row.
            let (gate, up) =
                unsafe { (self.floats(gate.start, row.clone()), self.floats(up.start, row)) };
            self.gated(op.gate, gate, up);
        }
        worker.barrier();
        for (pair, panels) in parts(used, matrix(2).panels() / experts, worker) {
            let from = gate.start + pair * inner * size_of::<f32>();
            let x = self.own_row(from, ff, node, 2, worker);
            let (first, own) = (ids[pair] as usize * wide / ROWS, pair..pair + 1);
            self.times(matrix(2), bias(5), &x, (&own, y), first, &panels, worker);
        }
        worker.barrier();
        let columns = worker.split_units(width, ROWS);
        // SAFETY: each worker has its own columns; results are only read.
        let to = unsafe { self.floats(self.offset(node.outputs[0]), columns.clone()) };
        let row = |pair: usize| {
            // SAFETY: as above.
            unsafe { self.floats(y.start, pair * wide + columns.start..pair * wide + columns.end) }
        };
        super::combine(to, weights.iter().enumerate().map(|(pair, weight)| (*weight, &*row(pair))));
    }

    /// A row at an offset of the arena, quantised by this worker for itself, as one of the node's
    /// matrices reads it.
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
        // SAFETY: the row is complete and only read; the storage is this worker's own, which is done
        // with what was there.
        unsafe {
            let lines = self.arena.wrapping_add(own);
            let x = Activations::new(Path::InPlace, row, cols, 1, cols, lines);
            let float = self.loaded.weights[node.weights[weight].0].is_float_matrix();
            x.quantise(self.loaded.isa, 0..x.blocks(), float);
            x
        }
    }
}

/// This worker's share of the panels of so many experts, each of which has as many: which of them,
/// and panels counted from its first.
fn parts(
    count: usize,
    panels: usize,
    worker: &Worker<'_>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mine = share(count * panels, worker.index, worker.count);
    let own = move |at: usize, i: usize| at.clamp(i * panels, (i + 1) * panels) - i * panels;
    let all = (0..count).map(move |i| (i, own(mine.start, i)..own(mine.end, i)));
    all.filter(|(_, part)| !part.is_empty())
}
