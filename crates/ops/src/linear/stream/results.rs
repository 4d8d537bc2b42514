//! What becomes of the sums of [`super::stream`].

use crate::linear::holds;
use crate::low_rank::kernels::Sites;
use crate::{Unary, real};
use tile::dsl::*;
use tile::ir::LoadHint;

/// The use of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Each matrix has results of its own.
    Store,
    /// The residual is added.
    Add,
    /// Two matrices of one format and size: `act(first) * second`.
    Gate(Unary),
}

/// A sum that is complete.
pub(super) struct Total {
    /// The number of its result.
    pub(super) sweep: usize,
    /// The matrix row.
    pub(super) output: Val<u32>,
    /// The activation row.
    pub(super) row: Val<u32>,
    /// One for each matrix of the result.
    pub(super) sums: Vec<Val<f32>>,
}

/// Results of a launch, and what is added to sums.
#[derive(Default)]
pub(super) struct Results {
    /// For each result, its columns and where it goes.
    pub(super) outs: Vec<Val<u32>>,
    results: Vec<Out>,
    /// For each matrix.
    biases: Vec<Option<In>>,
    pub(super) sites: Option<Sites>,
    /// Of activation rows that were divided.
    pub(super) factors: Option<In>,
}

impl Results {
    /// Declares result `j`, `yJ[splits, rows, outJ]`, and returns its columns.
    #[track_caller]
    pub(super) fn declare(&mut self, j: usize, y: Scalar, splits: u32) -> Val<u32> {
        let (out, name) = (format!("out{j}"), format!("y{j}"));
        let columns = Const::<u32>::declare(&out);
        self.outs.push(columns);
        self.results.push(<Out>::stored(&name, y));
        holds(&name, dim(&out) * dim("rows") * splits);
        columns
    }

    /// Declares the bias of matrix `j`, if it has one, of as many elements as `out` says.
    #[track_caller]
    pub(super) fn declare_bias(&mut self, j: usize, bias: bool, out: &str) {
        let name = format!("bias{j}");
        self.biases.push(bias.then(|| {
            holds(&name, dim(out));
            <In>::declare(&name)
        }));
    }

    /// Writes one output; `split`: the rows in front of those of this part of the sums.
    #[track_caller]
    pub(super) fn finish(
        &self,
        end: End,
        residual: Option<In>,
        split: Option<Val<u32>>,
        total: Total,
    ) {
        let Total { sweep, output, row, mut sums } = total;
        if let Some(factors) = self.factors {
            let factor = factors.get(row);
            sums.iter_mut().for_each(|sum| *sum = *sum * factor);
        }
        let shifted = |m: usize| {
            let bias = self.biases[sweep + m];
            let sum = bias.map_or(sums[m], |bias| sums[m] + bias.get(output));
            let changed = |sites: &Sites| sites.change(sweep + m, output, row, sum);
            self.sites.as_ref().map_or(sum, changed)
        };
        let at = output + self.outs[sweep] * split.map_or(row, |split| split + row);
        let value = match (end, residual) {
            (End::Gate(act), _) => {
                let [gate, up] = [0, 1].map(shifted);
                let gate = match act {
                    // A quotient costs nothing beside a row of weights, and is exact.
                    Unary::Silu => gate / ((-gate).exp() + 1.0),
                    _ => real::unary(act, gate),
                };
                gate * up
            }
            (_, Some(residual)) => residual.get_with(at, LoadHint::Coherent) + shifted(0),
            _ => shifted(0),
        };
        self.results[sweep].set(at, value);
    }
}
