//! A mixture of experts of which each has low-rank factors beside its matrices, and its gradients.
//!
//! ```text
//! y = the mixture whose matrices are W + scale up down, one expert's factors each
//! dup = scale dW down',  ddown = scale up' dW     dW as of the mixture itself
//! ```
//!
//! Gates and ups, which read the same rows, share one `down`. `up` is stored the other way round,
//! `[rank, out]` for each expert, so that one axis of both factors is the rank.

use super::ExpertsBackward;
use crate::experts::Experts;
use crate::gradient::{Reverse, Wrt, give};
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Shape, expect};
use formats::{Error, Result};

/// Which matrices of a mixture have factors, and how much these count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertFactors {
    /// The factor on the factors' product.
    pub scale: f32,
    /// Whether gates and ups have some: `down[experts * rank, width]`, then the ups of both halves,
    /// `[experts * rank, ff]` each.
    pub halves: bool,
    /// Whether the second matrices have some: `down[experts * rank, ff], up[experts * rank, width]`.
    pub outer: bool,
}

/// `x, scores, (residual); (the mixture's weights), (factors) -> y`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaptedExperts {
    /// The mixture.
    pub of: Experts,
    /// Its factors.
    pub factors: ExpertFactors,
}

/// `x, scores, dy; (the mixture's weights), (factors) -> dx, dscores, (a gradient of each factor)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaptedExpertsBackward {
    /// The mixture.
    pub of: Experts,
    /// Its factors.
    pub factors: ExpertFactors,
}

impl ExpertFactors {
    /// How many weights they are.
    pub fn count(&self) -> usize {
        3 * usize::from(self.halves) + 2 * usize::from(self.outer)
    }

    /// The weights of an operation: the mixture's, and the factors.
    pub fn split<'a, T>(&self, weights: &'a [T]) -> (&'a [T], &'a [T]) {
        weights.split_at(weights.len().saturating_sub(self.count()))
    }

    /// Of gates, ups and second matrices, `down` and `up` among the factors.
    pub fn places(&self) -> [Option<[usize; 2]>; 3] {
        let halves = |up| self.halves.then_some([0, up]);
        let first = if self.halves { 3 } else { 0 };
        [halves(1), halves(2), self.outer.then_some([first, first + 1])]
    }

    fn check(&self, of: &Experts, inputs: &[Shape], weights: &[&[usize]]) -> Result<()> {
        let (own, factors) = self.split(weights);
        if own.len() < 3 {
            return Err(Error::new("experts", "the weights of a mixture", own.len()));
        }
        let sizes = of.sizes([inputs[0].width, inputs[1].width], own)?;
        for (matrix, places) in self.places().into_iter().enumerate() {
            let Some(places) = places else { continue };
            let (width, ff) = (sizes.width, sizes.ff);
            let columns = if matrix == 2 { [ff, width] } else { [width, ff] };
            let rows = factors[places[0]].first().copied().unwrap_or(0);
            expect("experts", "ranks modulo experts", &[rows % sizes.experts], &[0])?;
            for (place, columns) in places.into_iter().zip(columns) {
                expect("experts", "factors", factors[place], &[rows, columns])?;
            }
        }
        Ok(())
    }

    /// The mixture's weights with the factors' products added.
    fn merged(&self, weights: &[Vec<f32>], widths: [usize; 2]) -> Vec<Vec<f32>> {
        let (own, factors) = self.split(weights);
        let (mut all, columns) = (own.to_vec(), columns(own, widths));
        for ((matrix, places), columns) in all.iter_mut().zip(self.places()).zip(columns) {
            let Some([down, up]) = places.map(|places| places.map(|at| &factors[at])) else {
                continue;
            };
            each(matrix, [down, up], [widths[1], columns], |matrix, [down, up], out| {
                for (low, high) in down.chunks_exact(columns).zip(up.chunks_exact(out)) {
                    for (row, high) in matrix.chunks_exact_mut(columns).zip(high) {
                        let by = self.scale * high;
                        row.iter_mut().zip(low).for_each(|(to, low)| *to += by * low);
                    }
                }
            });
        }
        all
    }
}

/// Columns of gates, ups and second matrices, where rows have `width` elements and there are so
/// many experts.
fn columns(own: &[Vec<f32>], [width, experts]: [usize; 2]) -> [usize; 3] {
    [width, width, own[0].len() / (experts * width).max(1)]
}

/// Calls `f` with each expert's matrix, both of its factors, and the matrix's rows.
fn each(
    matrix: &mut [f32],
    [down, up]: [&[f32]; 2],
    [experts, columns]: [usize; 2],
    mut f: impl FnMut(&mut [f32], [&[f32]; 2], usize),
) {
    let [area, low, high] = [matrix.len(), down.len(), up.len()].map(|n| n / experts);
    let parts = matrix.chunks_exact_mut(area).zip(down.chunks_exact(low));
    for ((matrix, down), up) in parts.zip(up.chunks_exact(high)) {
        f(matrix, [down, up], area / columns);
    }
}

impl Operation for AdaptedExperts {
    fn name(&self) -> &'static str {
        "adapted_experts"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let shapes = self.of.infer(inputs, self.factors.split(weights).0)?;
        self.factors.check(&self.of, inputs, weights)?;
        Ok(shapes)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let merged = self.factors.merged(call.weights, [call.widths[0], call.widths[1]]);
        let outputs = std::mem::take(&mut call.outputs);
        let mut own = with(call, &merged, outputs);
        self.of.reference(&mut own);
        let outputs = own.outputs;
        call.outputs = outputs;
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let weights: Vec<usize> = (0..12).take_while(|i| at.weight(*i).is_some()).collect();
        let (own, _) = self.factors.split(&weights);
        if own.iter().any(|i| at.wants(Wrt::Weight(*i))) {
            let expected = "factors that are trained, or the matrices beside them";
            return Err(Error::new("adapted_experts", expected, "both"));
        }
        give(at, Wrt::Input(2), |_| Ok(dy))?;
        let inputs = [at.input(0), at.input(1), dy];
        let op = AdaptedExpertsBackward { of: self.of, factors: self.factors };
        let cotangents = at.record(op.into(), &inputs, &weights)?;
        let (_, trained) = self.factors.split(&weights);
        let operands = [0, 1].map(Wrt::Input).into_iter();
        let operands = operands.chain(trained.iter().map(|i| Wrt::Weight(*i)));
        for (operand, cotangent) in operands.zip(cotangents) {
            if at.wants(operand) {
                at.give(operand, cotangent)?;
            }
        }
        Ok(())
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

/// The same call with other weights.
fn with<'a>(
    call: &'a mut ReferenceCall<'_>,
    weights: &'a [Vec<f32>],
    outputs: Vec<Vec<f32>>,
) -> ReferenceCall<'a> {
    ReferenceCall {
        inputs: call.inputs.clone(),
        widths: call.widths.clone(),
        weights,
        outputs,
        tokens: call.tokens,
        positions: call.positions,
        picks: call.picks,
        deltas: call.deltas.clone(),
        cache: &mut *call.cache,
        packed: call.packed,
    }
}

impl Operation for AdaptedExpertsBackward {
    fn name(&self) -> &'static str {
        "adapted_experts_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let (own, factors) = self.factors.split(weights);
        let of = ExpertsBackward { of: self.of, weights: false };
        let shapes = of.infer(inputs, own)?;
        self.factors.check(&self.of, inputs, weights)?;
        let factors = factors.iter().map(|factor| Shape::of_weight(factor));
        Ok(shapes.into_iter().chain(factors).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let widths = [call.widths[0], call.widths[1]];
        let merged = self.factors.merged(call.weights, widths);
        let sizes = call.outputs.iter().take(2).chain(&merged).map(Vec::len);
        let outputs = sizes.map(|n| vec![0.0; n]).collect();
        let mut own = with(call, &merged, outputs);
        ExpertsBackward { of: self.of, weights: true }.reference(&mut own);
        let mut found = own.outputs;
        let mut of_matrices = found.split_off(2);
        let factors = self.factors.split(call.weights).1;
        let mut of_factors: Vec<Vec<f32>> = factors.iter().map(|f| vec![0.0; f.len()]).collect();
        let columns = columns(&merged, widths);
        let parts = of_matrices.iter_mut().zip(self.factors.places()).zip(columns);
        for ((gradient, places), columns) in parts {
            let Some(places) = places else { continue };
            let factors = places.map(|at| factors[at].as_slice());
            let (mut lows, mut highs) = (Vec::new(), Vec::new());
            each(gradient, factors, [widths[1], columns], |gradient, [down, up], out| {
                for (low, high) in down.chunks_exact(columns).zip(up.chunks_exact(out)) {
                    let sum = |of: &mut dyn Iterator<Item = (f32, f32)>| {
                        let sum: f64 = of.map(|(a, b)| f64::from(a) * f64::from(b)).sum();
                        (f64::from(self.factors.scale) * sum) as f32
                    };
                    lows.extend(
                        (0..columns).map(|c| {
                            sum(&mut (0..out).map(|o| (gradient[o * columns + c], high[o])))
                        }),
                    );
                    highs.extend((0..out).map(|o| {
                        sum(&mut (0..columns).map(|c| (gradient[o * columns + c], low[c])))
                    }));
                }
            });
            for (to, own) in places.into_iter().zip([lows, highs]) {
                of_factors[to].iter_mut().zip(own).for_each(|(to, own)| *to += own);
            }
        }
        call.outputs = found.into_iter().chain(of_factors).collect();
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
