//! Adapters of a mixture: the low-rank factors of each pair's expert, as the adapter of the pair's
//! token has them. `t = down x` of all pairs is computed before a product, a worker's share of the
//! places each; `up t` is added where a worker has its columns of the product.

use cpu_kernels::low_rank::{Factors, OutRows};
use cpu_kernels::matmul::ROWS;
use cpu_kernels::team::Worker;
use ops::Rows;
use program::Node;
use std::ops::Range;

use super::{PairRows, Pairs};
use crate::cpu::replay::Replay;

/// The sites of a mixture that adapters of the step change.
#[derive(Clone, Copy)]
pub(super) struct Sites {
    /// Of gate, up and down.
    sites: [Option<usize>; 3],
    /// Which rows the mixture has.
    rows: Rows,
}

impl Sites {
    /// Whether no adapter of the step changes the mixture.
    pub(super) fn is_empty(&self) -> bool {
        self.sites.iter().all(Option::is_none)
    }
}

impl Replay<'_> {
    /// The sites of a mixture that adapters of the step change.
    pub(super) fn sites_of(&self, node: &Node) -> Sites {
        let program = &self.loaded.program;
        let site = |i: usize| {
            let own = |site: &program::Site| site.weight == node.weights[i] && !site.gathers;
            program.sites.iter().position(own).filter(|site| self.adapted(*site))
        };
        Sites { sites: [0, 1, 2].map(site), rows: program.shape(node.inputs[0]).rows }
    }

    /// The factors of the pair at a place, whose expert is `expert`.
    fn pair_factors(
        &self,
        sites: &Sites,
        matrix: usize,
        all: &Pairs<'_>,
        (expert, place): (usize, usize),
    ) -> Option<&Factors> {
        let site = sites.sites[matrix]?;
        self.factors(sites.rows, all.tokens[place] as usize, site, expert)
    }

    /// Where the numbers between the factors of one of the matrices begin.
    fn between(&self, matrix: usize, pairs: usize) -> usize {
        let each = pairs * self.loaded.rank * size_of::<f32>();
        self.class.mixture + self.class.experts.low + matrix * each
    }

    /// Computes `t = down x` of some matrices for this worker's places, from rows of `cols` numbers
    /// which this worker has written, or which were complete before the last barrier.
    pub(super) fn low_down(
        &self,
        sites: &Sites,
        matrices: Range<usize>,
        all: &Pairs<'_>,
        (x, cols): (PairRows, usize),
        worker: &Worker<'_>,
    ) {
        let (pairs, rank) = (all.places.len(), self.loaded.rank);
        let mine = worker.split(pairs);
        let matrices = matrices.filter(|matrix| sites.sites[*matrix].is_some());
        for matrix in matrices {
            let start: *mut f32 = self.arena.wrapping_add(self.between(matrix, pairs)).cast();
            for (expert, places) in all.each() {
                for at in places.start.max(mine.start)..places.end.min(mine.end) {
                    let own = self.pair_factors(sites, matrix, all, (expert, at));
                    let Some(factors) = own else { continue };
                    let row = at * x.stride..at * x.stride + cols;
                    let to = OutRows { start: start.wrapping_add(at * rank), stride: rank };
                    // SAFETY: each worker has its own places; rows are complete, and only read.
                    unsafe {
                        let x = self.floats(x.start, row);
                        factors.down(self.loaded.isa, x, 0..factors.rank(), to);
                    }
                }
            }
        }
    }

    /// Adds `up t` to an expert's rows, in the columns of some panels, of `width` that there are.
    pub(super) fn low_up(
        &self,
        sites: &Sites,
        matrix: usize,
        all: &Pairs<'_>,
        (expert, places): (usize, &Range<usize>),
        (panels, width): (&Range<usize>, usize),
        y: PairRows,
    ) {
        let (pairs, rank) = (all.places.len(), self.loaded.rank);
        let columns = panels.start * ROWS..(panels.end * ROWS).min(width);
        if sites.sites[matrix].is_none() || columns.is_empty() {
            return;
        }
        let start: *mut f32 = self.arena.wrapping_add(y.start).cast();
        for at in places.clone() {
            let own = self.pair_factors(sites, matrix, all, (expert, at));
            let Some(factors) = own else { continue };
            let to = OutRows {
                start: start.wrapping_add(at * y.stride + columns.start),
                stride: y.stride,
            };
            // SAFETY: each worker has its own columns of an expert's rows; what is between the
            // factors was complete before the last barrier, and is only read.
            unsafe {
                let t = self.floats(self.between(matrix, pairs), at * rank..(at + 1) * rank);
                factors.up(self.loaded.isa, (t, rank), columns.clone(), None, to);
            }
        }
    }
}
