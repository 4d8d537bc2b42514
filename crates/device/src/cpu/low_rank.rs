//! Adapters: the low-rank factors of each row's sequence, added at the sites that they change.
//!
//! A product computes its own sites. Workers share out `t = down x` in front of it, and each adds
//! `up t` to its own columns behind them. All of `t` must be there by then; no worker waits for it
//! at once, since the product lies between the two halves of that barrier
//! ([`Worker::arrive`], [`Worker::wait`]).

use super::class::EVEN;
use super::products::{Product, columns};
use super::replay::Replay;
use cpu_kernels::low_rank::{Factors, OutRows};
use cpu_kernels::matmul::Activations;
use cpu_kernels::team::Worker;
use ops::Rows;
use program::Node;
use std::ops::Range;

impl Replay<'_> {
    /// Whether an adapter of the step changes this site.
    pub(super) fn adapted(&self, site: usize) -> bool {
        self.step.sequences.iter().any(|sequence| !self.seated(sequence.adapter, site).is_empty())
    }

    /// Whether an adapter of the step changes one of a node's matrices.
    pub(super) fn is_adapted(&self, index: usize) -> bool {
        self.loaded.sites[index].iter().flatten().any(|site| self.adapted(*site))
    }

    /// The low-rank factors of the adapter on a seat at a site, one pair for each of its matrices.
    fn seated(&self, seat: u32, site: usize) -> &[Factors] {
        let seat = (seat as usize).checked_sub(1).and_then(|seat| self.loaded.seats.get(seat));
        let sites = seat.and_then(Option::as_ref);
        sites.and_then(|sites| sites.get(site)).map_or(&[], Vec::as_slice)
    }

    /// The low-rank factors at one of a site's matrices for a row among those of `rows`.
    pub(super) fn factors(
        &self,
        rows: Rows,
        row: usize,
        site: usize,
        matrix: usize,
    ) -> Option<&Factors> {
        let token = match rows {
            Rows::Outputs => self.step.outputs[row] as usize,
            _ => row,
        };
        let sequence = self.rows[token].sequence;
        self.seated(self.step.sequences[sequence].adapter, site).get(matrix)
    }

    /// The factors at one of the matrices of node `index` for some rows of its input, in runs of
    /// rows that have the same.
    fn factor_runs(
        &self,
        (index, matrix): (usize, usize),
        rows: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &Factors)> {
        let node = &self.loaded.program.nodes[index];
        let of = node.inputs.first().map_or(Rows::Tokens, |x| self.loaded.program.shape(*x).rows);
        let site = self.loaded.sites[index][matrix].filter(|site| self.adapted(*site));
        let rows = if site.is_some() { rows } else { 0..0 };
        runs(rows, move |row| self.factors(of, row, site?, 0))
    }

    /// Byte offset of `t` `[rows, rank]` of one of the matrices of a product with `rows` rows.
    fn between_factors(&self, matrix: usize, rows: usize) -> usize {
        self.class.low_rank + matrix * rows * self.loaded.rank * size_of::<f32>()
    }

    /// Begins what adapters change in the products of a node, whose input `x` is complete and lies
    /// at this offset: computes this worker's part of `t = scale down x`. Workers share out the
    /// ranks of all matrices if rows are few, else the rows.
    pub(super) fn low_rank_down(&self, index: usize, node: &Node, x: usize, worker: &Worker<'_>) {
        let (wide, rank) = (self.width(node.inputs[0]), self.loaded.rank);
        let rows = self.count(self.loaded.program.shape(node.inputs[0]).rows);
        let few = rows <= EVEN;
        let mine = if few { 0..rows } else { worker.split(rows) };
        let all = || {
            let matrices = 0..self.loaded.sites[index].len();
            matrices.flat_map(|i| self.factor_runs((index, i), mine.clone()).map(move |of| (i, of)))
        };
        let total = all().map(|(_, (_, factors))| factors.rank()).sum();
        let share = if few { worker.split(total) } else { 0..total };
        let mut end = 0;
        for (matrix, (run, factors)) in all() {
            let begin = end;
            end += factors.rank();
            let own = share.start.max(begin)..share.end.min(end);
            if own.is_empty() {
                continue;
            }
            let ranks = own.start - begin..own.end - begin;
            let low: *mut f32 = self.arena.wrapping_add(self.between_factors(matrix, rows)).cast();
            let start = low.wrapping_add(run.start * rank + ranks.start);
            // SAFETY: each worker has its own rows, or its own ranks of each; inputs are only read.
            unsafe {
                let x = self.floats(x, run.start * wide..run.end * wide);
                factors.down(self.loaded.isa, x, ranks, OutRows { start, stride: rank });
            }
        }
        worker.arrive();
    }

    /// Changes this worker's panels of a product of node `index` as each row's adapter does.
    /// `residual` is the offset of what the product added to.
    pub(super) fn low_rank_up(
        &self,
        at: (usize, usize),
        product: &Product<'_>,
        x: &Activations<'_>,
        panels: Range<usize>,
        residual: Option<usize>,
        worker: &Worker<'_>,
    ) {
        let (rows, rank, stride) = (x.tokens(), self.loaded.rank, product.stride);
        let columns = columns(0, product.matrix.rows(), &panels);
        if columns.is_empty() {
            return;
        }
        for (run, factors) in self.factor_runs(at, 0..rows) {
            worker.wait();
            let first = run.start * stride + columns.start;
            let residual = residual.map(|at| {
                self.arena.wrapping_add(at).cast::<f32>().wrapping_add(first).cast_const()
            });
            // SAFETY: each worker has its own columns; what was computed before all workers
            // arrived, and the residual, are only read.
            unsafe {
                let t =
                    self.floats(self.between_factors(at.1, rows), run.start * rank..run.end * rank);
                let y = OutRows { start: product.out.wrapping_add(first), stride };
                factors.up(self.loaded.isa, (t, rank), columns.clone(), residual, y);
            }
        }
    }

    /// The offset of a product's residual in this worker's panels, once the product is computed. If
    /// the product overwrites it and an adapter's gains need it, this copies it first.
    pub(super) fn kept_residual(&self, index: usize, node: &Node, panels: &Range<usize>) -> usize {
        let (own, copy) = (self.offset(node.inputs[1]), self.class.residual);
        if self.class.plan.in_place[index] != Some(1) {
            return own;
        }
        let (rows, width) = (self.rows(node), self.width(node.inputs[1]));
        let gains = self.factor_runs((index, 0), 0..rows).filter(|(_, factors)| factors.has_gain());
        for row in gains.flat_map(|(run, _)| run) {
            let range = columns(row, width, panels);
            // SAFETY: each worker has its own columns of both.
            unsafe { self.floats(copy, range.clone()).copy_from_slice(self.floats(own, range)) };
        }
        copy
    }

    /// Changes the row of a table of embeddings that a token picked.
    pub(super) fn low_rank_embedded(&self, index: usize, token: usize, y: &mut [f32]) {
        let rank = self.loaded.rank;
        for (_, factors) in self.factor_runs((index, 0), token..token + 1) {
            // SAFETY: each worker has its own tokens.
            unsafe {
                let t = self.floats(self.class.low_rank, token * rank..(token + 1) * rank);
                factors.pick(self.tokens[token] as usize, &mut t[..factors.rank()]);
                let to = OutRows { start: y.as_mut_ptr(), stride: y.len() };
                factors.up(self.loaded.isa, (t, rank), 0..y.len(), None, to);
            }
        }
    }
}

/// The rows that have factors, as runs of those that have the same.
fn runs<'a>(
    rows: Range<usize>,
    factors: impl Fn(usize) -> Option<&'a Factors>,
) -> impl Iterator<Item = (Range<usize>, &'a Factors)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        while row < rows.end {
            let (first, own) = (row, factors(row));
            let same = |row: &usize| match (factors(*row), own) {
                (Some(a), Some(b)) => std::ptr::eq(a, b),
                (a, b) => a.is_none() && b.is_none(),
            };
            row = (first + 1..rows.end).find(|row| !same(row)).unwrap_or(rows.end);
            if let Some(own) = own {
                return Some((first..row, own));
            }
        }
        None
    })
}
