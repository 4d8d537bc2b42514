//! Adapters of a mixture: the low-rank factors of each pair's expert, as the adapter of the pair's
//! token has them. `t = down x` of all pairs is computed before a product, a worker's share of the
//! places each, or of a single row's pairs a share of the ranks; `up t` is added where a worker has
//! its columns of the product. No barrier is there for adapters alone: `t` is complete with the
//! quantised rows, or, of a single row, once all workers have arrived, for which none waits before
//! it has computed its columns.

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
    /// Numbers of the sites of gate, up and down; none where no adapter changes that matrix.
    sites: [Option<usize>; 3],
    /// Rows that the mixture computes.
    rows: Rows,
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

    /// The factors of a token's pair with an expert.
    pub(super) fn pair_factors(
        &self,
        sites: &Sites,
        matrix: usize,
        token: usize,
        expert: usize,
    ) -> Option<&Factors> {
        self.factors(sites.rows, token, sites.sites[matrix]?, expert)
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
                    let own = self.pair_factors(sites, matrix, all.tokens[at] as usize, expert);
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

    /// Computes this worker's part of `t = down x` of some matrices for the pairs of a step's only
    /// row, with these experts: a share of all ranks. `x` gives each pair's row, which is complete.
    /// Another worker's part is there once [`Worker::wait`] returns.
    pub(super) fn low_down_of_one<'x>(
        &self,
        sites: &Sites,
        matrices: Range<usize>,
        experts: &[u32],
        x: impl Fn(usize) -> &'x [f32],
        worker: &Worker<'_>,
    ) {
        let rank = self.loaded.rank;
        if sites.sites[matrices.clone()].iter().all(Option::is_none) {
            return;
        }
        let all = || {
            let each = |matrix: usize| experts.iter().enumerate().map(move |pair| (matrix, pair));
            matrices.clone().flat_map(each).filter_map(|(matrix, (pair, expert))| {
                let factors = self.pair_factors(sites, matrix, 0, *expert as usize)?;
                Some((matrix, pair, factors))
            })
        };
        let mine = worker.split(all().map(|(_, _, factors)| factors.rank()).sum());
        let mut end = 0;
        for (matrix, pair, factors) in all() {
            let begin = end;
            end += factors.rank();
            let own = mine.start.max(begin)..mine.end.min(end);
            if own.is_empty() {
                continue;
            }
            let ranks = own.start - begin..own.end - begin;
            let start: *mut f32 =
                self.arena.wrapping_add(self.between(matrix, experts.len())).cast();
            let start = start.wrapping_add(pair * rank + ranks.start);
            // SAFETY: each worker has its own ranks; rows are complete, and only read.
            unsafe {
                factors.down(self.loaded.isa, x(pair), ranks, OutRows { start, stride: rank });
            }
        }
        worker.arrive();
    }

    /// Adds `up t` to the row at place `at` of `pairs`, whose factors these are, if it has any: in
    /// the columns of some panels, of `width` that there are. All of the row's `t` is there.
    pub(super) fn low_up(
        &self,
        factors: Option<&Factors>,
        matrix: usize,
        (at, pairs): (usize, usize),
        (panels, width): (&Range<usize>, usize),
        y: PairRows,
    ) {
        let (rank, columns) =
            (self.loaded.rank, panels.start * ROWS..(panels.end * ROWS).min(width));
        let Some(factors) = factors.filter(|_| !columns.is_empty()) else { return };
        let start: *mut f32 = self.arena.wrapping_add(y.start).cast();
        let start = start.wrapping_add(at * y.stride + columns.start);
        // SAFETY: each worker has its own columns of an expert's rows; what is between the factors
        // is complete, and only read.
        unsafe {
            let t = self.floats(self.between(matrix, pairs), at * rank..(at + 1) * rank);
            let to = OutRows { start, stride: y.stride };
            factors.up(self.loaded.isa, (t, rank), columns, None, to);
        }
    }
}
