//! Adapters: the low-rank factors of each row's sequence, added at the sites that they change.

use super::class::EVEN;
use super::replay::Replay;
use cpu_kernels::low_rank::{Factors, OutRows};
use cpu_kernels::matmul::ROWS;
use cpu_kernels::team::Worker;
use ops::{LowRank, Rows};
use program::Node;
use std::ops::Range;

impl Replay<'_> {
    /// Whether an adapter of the step changes this site.
    pub(super) fn adapted(&self, site: usize) -> bool {
        self.step.sequences.iter().any(|sequence| !self.seated(sequence.adapter, site).is_empty())
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

    /// Adds each row's adapter at a site, in runs of rows that have the same. With few rows,
    /// workers split ranks and then columns; with many, rows.
    pub(super) fn low_rank(&self, index: usize, op: &LowRank, node: &Node, worker: &Worker<'_>) {
        let (isa, y, x) = (self.loaded.isa, node.inputs[0], node.inputs.get(1).copied());
        let (rows, width, rank) = (self.rows(node), self.width(y), self.loaded.rank);
        let of = self.loaded.program.values[y.0].rows;
        let factors = |row: usize| self.factors(of, row, op.site, 0);
        let few = rows <= EVEN;
        let mine = if few { 0..rows } else { worker.split(rows) };
        let low: *mut f32 = self.arena.wrapping_add(self.class.low_rank).cast();
        for (run, factors) in runs(mine.clone(), &factors) {
            let ranks = match few {
                true => worker.split(factors.rank()),
                false => 0..factors.rank(),
            };
            let Some(x) = x else {
                for row in run {
                    let own = row * rank + ranks.start..row * rank + ranks.end;
                    // SAFETY: each worker has its own rows, or its own ranks of each.
                    let t = unsafe { self.floats(self.class.low_rank, own) };
                    factors.pick(self.tokens[row] as usize, ranks.clone(), t);
                }
                continue;
            };
            let wide = self.width(x);
            // SAFETY: each worker has its own rows, or its own ranks of each; inputs are only read.
            unsafe {
                let x = self.floats(self.offset(x), run.start * wide..run.end * wide);
                let start = low.wrapping_add(run.start * rank + ranks.start);
                factors.down(isa, x, ranks, OutRows { start, stride: rank });
            }
        }
        worker.barrier();
        let columns = if few { worker.split_units(width, ROWS) } else { 0..width };
        for row in mine.clone() {
            let range = row * width + columns.start..row * width + columns.end;
            self.copy_unless_in_place(index, node, 0, range);
        }
        for (run, factors) in runs(mine, &factors).filter(|_| !columns.is_empty()) {
            let first = run.start * width + columns.start;
            let end = (run.end - 1) * width + columns.end;
            // SAFETY: each worker has its own rows, or its own columns of each; what was computed
            // before the barrier, and the residual, are only read.
            unsafe {
                let t = self.floats(self.class.low_rank, run.start * rank..run.end * rank);
                let start = self.start(node.outputs[0]).wrapping_add(first);
                let residual = node.inputs.get(2);
                let residual = residual.map(|v| &*self.floats(self.offset(*v), first..end));
                let y = OutRows { start, stride: width };
                factors.up(isa, (t, rank), columns.clone(), residual, y);
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
