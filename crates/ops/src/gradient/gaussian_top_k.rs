//! Gradients of what stands out from rows ([`crate::gaussian_top_k`]). The cutoff moves with the
//! row's mean `m` and deviation `s`, so that all `n` elements have a part in it:
//!
//! ```text
//! g = dy where x is above the cutoff, else 0
//! dx = g - sum(g) (1 + deviations (x - m) / s) / n
//! ```
//!
//! A row whose elements are all alike has no deviation, which then has no slope.

use tile::case::{Bench, Case, Fill, Spec};
use tile::dsl::*;

use crate::gaussian_top_k::{Statistics, USUAL, statistics};
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{RowThreads, begin, lanes, load, require_vectors};
use crate::trial::{every_float, framed, memory, random, rows_of, scaled};
use crate::{GaussianTopK, Shape, alike, arity};
use formats::Result;

/// `x, dy -> dx` of [`GaussianTopK`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GaussianTopKBackward(pub GaussianTopK);

/// `x, dx -> dy` of [`GaussianTopK`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GaussianTopKTangent(pub GaussianTopK);

impl Statistics {
    /// `deviations / s`; 0 of a row that has no deviation.
    fn slope(self, of: &GaussianTopK) -> f64 {
        if self.deviation > 0.0 { f64::from(of.deviations) / self.deviation } else { 0.0 }
    }
}

impl GaussianTopKBackward {
    /// One row, in f64 and without an allocation: `dy` becomes `dx`. Those elements count that
    /// [`GaussianTopK::row`] lets pass.
    ///
    /// # Panics
    /// When lengths differ.
    pub fn row(&self, x: &[f32], dy: &mut [f32]) {
        let found = self.0.statistics(x);
        let (cutoff, slope, n) =
            (self.0.cutoff(found) as f32, found.slope(&self.0), x.len() as f64);
        dy.iter_mut().zip(x).filter(|(_, x)| **x <= cutoff).for_each(|(dy, _)| *dy = 0.0);
        let share = dy.iter().map(|dy| f64::from(*dy)).sum::<f64>() / n;
        for (dy, x) in dy.iter_mut().zip(x) {
            let moved = 1.0 + slope * (f64::from(*x) - found.mean);
            *dy = (f64::from(*dy) - share * moved) as f32;
        }
    }
}

impl Operation for GaussianTopKBackward {
    fn name(&self) -> &'static str {
        "gaussian_top_k_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[0])?;
        alike(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        call.outputs[0].copy_from_slice(call.inputs[1]);
        let rows = call.inputs[0].chunks_exact(width);
        rows.zip(call.outputs[0].chunks_exact_mut(width)).for_each(|(x, dy)| self.row(x, dy));
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let dy = Operand::Input(1);
        let bound = [("x", Bound::Value(X)), ("dy", Bound::Value(dy)), ("dx", Bound::Value(Y))];
        let numbers = self.0.numbers(to.rows(X), to.width(X));
        to.push(gaussian_top_k_backward(to.scalar(X)), numbers, &bound)?;
        Ok(true)
    }
}

impl Operation for GaussianTopKTangent {
    fn name(&self) -> &'static str {
        "gaussian_top_k_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[0])?;
        alike(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        let rows = call.inputs[0].chunks_exact(width).zip(call.inputs[1].chunks_exact(width));
        for ((x, dx), y) in rows.zip(call.outputs[0].chunks_exact_mut(width)) {
            let found = self.0.statistics(x);
            let (cutoff, slope) = (self.0.cutoff(found) as f32, found.slope(&self.0));
            let moved = |(x, dx): (&f32, &f32)| {
                f64::from(*dx) * (1.0 + slope * (f64::from(*x) - found.mean))
            };
            let change = x.iter().zip(dx).map(moved).sum::<f64>() / width as f64;
            for (y, (x, dx)) in y.iter_mut().zip(x.iter().zip(dx)) {
                *y = if *x > cutoff { (f64::from(*dx) - change) as f32 } else { 0.0 };
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

/// `dx` of rows of `width` elements, on the device. `dx` may be `dy`.
#[kernel]
pub fn gaussian_top_k_backward(
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    dx: Out<{ scalar }>,
    width: Const<u32>,
    deviations: Const<f32>,
    scalar: Scalar,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("dy", size.clone()), ("dx", size)]);
    begin();
    let first = group_id() * width;
    let lanes = lanes(scalar);
    let [mean, deviation] = statistics(team, x, (first, width), lanes);
    let cutoff = mean + deviation * deviations;
    // Each element less the mean, and what is left of its `dy`.
    let read = |i: Val<u32>, lanes: u8| -> Vec<(Val<f32>, Val<f32>)> {
        let each = load(x, first + i, lanes).into_iter().zip(load(dy, first + i, lanes));
        each.map(|(x, dy)| (x - mean, select(Order::gt(x, cutoff), dy, 0.0))).collect()
    };
    let sum = Var::new(0.0);
    team.sweep(width, lanes, |at, lanes| {
        for (_, g) in at.iter().flat_map(|&i| read(i, lanes)) {
            sum.set(sum.get() + g);
        }
    });
    let share = team.sum(sum.get()) / width.f32();
    let slope = select(Order::gt(deviation, 0.0), share * deviations / deviation, 0.0);
    team.sweep(width, lanes, |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| read(i, lanes)).collect();
        for (&i, each) in at.iter().zip(loaded) {
            let values: Vec<Val<f32>> =
                each.into_iter().map(|(x, g)| g - share - x * slope).collect();
            dx.set_vec(first + i, &values);
        }
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "gaussian_top_k_backward", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(rows, width, op, by, why): (usize, usize, GaussianTopK, f32, &str)| {
            let x = scaled(scalar, width as u64 + 7, rows * width, by);
            let dy = random(scalar, width as u64 + 8, rows * width);
            let mut dx = dy.to_f32();
            for (x, dx) in x.to_f32().chunks_exact(width).zip(dx.chunks_exact_mut(width)) {
                GaussianTopKBackward(op).row(x, dx);
            }
            let (kernel, numbers) = (gaussian_top_k_backward(scalar), op.numbers(rows, width));
            let label = format!("{rows} x {width} {scalar}, {why}");
            framed(kernel, label, numbers, vec![x, dy], &[(scalar, &dx)])
        };
        let below = GaussianTopK { deviations: -0.5 };
        [
            (1, 16, USUAL, 3.0, "a short row"),
            (3, 129, below, 3.0, "a width no vector divides, a cutoff below the mean"),
            (2, 64, below, 0.0, "no deviation"),
            (2, 2048, USUAL, 3.0, "a vector or two per thread"),
            (1, 7176, USUAL, 3.0, "several vectors per thread and a remainder"),
        ]
        .map(case)
        .to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 8192), 8192);
        let n = rows * width;
        let buffers = vec![Fill::Noise(scalar, n), Fill::Noise(scalar, n), Fill::Zeros(scalar, n)];
        let label = format!("{rows} x {width}");
        let kernel = gaussian_top_k_backward(scalar);
        vec![memory(kernel, &label, USUAL.numbers(rows, width), buffers, 10 * n as u64)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
