//! The part of each row that stands out from it (Gemma Team, Gemma 3n, 2025, after the Spark
//! Transformer, You et al. 2025): the greatest elements, as many as a normal distribution of the
//! row's mean and standard deviation has beyond a cutoff, less that cutoff, and zeros elsewhere.
//!
//! ```text
//! m = mean(x), s = sqrt(mean((x - m)^2))
//! y = max(x - (m + deviations s), 0)
//! ```

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{
    Forward, GaussianTopKBackward, GaussianTopKTangent, Reverse, Wrt, give, one,
};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{RowThreads, begin, lanes, load, require_vectors};
use crate::trial::{every_float, memory, rows_of, scaled};
use crate::{Shape, arity};
use formats::Result;

/// `x[rows, width] -> [rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GaussianTopK {
    /// The cutoff above the mean, in standard deviations of the row.
    pub deviations: f32,
}

impl Operation for GaussianTopK {
    fn name(&self) -> &'static str {
        "gaussian_top_k"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("gaussian_top_k", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        self.rows(call.inputs[0], call.widths[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let bound = [("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        let numbers = self.numbers(to.rows(X), to.width(X));
        to.push(gaussian_top_k(to.scalar(X)), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let (Some(dy), x) = (at.cotangent(0), at.input(0)) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, GaussianTopKBackward(*self), &[x, dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let (Some(dx), x) = (at.tangent(0), at.input(0)) else { return Ok(()) };
        let dy = one(at, GaussianTopKTangent(*self), &[x, dx], &[])?;
        at.add(0, dy)
    }
}

/// A row's mean and standard deviation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Statistics {
    pub(crate) mean: f64,
    pub(crate) deviation: f64,
}

impl GaussianTopK {
    /// The mean and the deviation of a row.
    pub(crate) fn statistics(self, x: &[f32]) -> Statistics {
        let count = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
        let square = |x: &f32| (f64::from(*x) - mean).powi(2);
        let variance = x.iter().map(square).sum::<f64>() / count;
        Statistics { mean, deviation: variance.sqrt() }
    }

    /// The number beyond which elements of a row stand out from it.
    pub(crate) fn cutoff(self, of: Statistics) -> f64 {
        of.mean + f64::from(self.deviations) * of.deviation
    }

    /// One row in place, in f32 but for its sums.
    pub fn row(&self, x: &mut [f32]) {
        let cutoff = self.cutoff(self.statistics(x)) as f32;
        x.iter_mut().for_each(|x| *x = (*x - cutoff).max(0.0));
    }

    /// Rows of `width` elements, in f64.
    fn rows(&self, x: &[f32], width: usize, y: &mut [f32]) {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let cutoff = self.cutoff(self.statistics(x));
            y.iter_mut().zip(x).for_each(|(y, x)| *y = (f64::from(*x) - cutoff).max(0.0) as f32);
        }
    }

    /// The numbers of a launch.
    pub(crate) fn numbers(&self, rows: usize, width: usize) -> Numbers {
        let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
        numbers.with_f32("deviations", self.deviations)
    }
}

/// The mean and the deviation of the team's row, which begins at `first` and has `width` elements.
#[track_caller]
pub(crate) fn statistics(
    team: RowThreads,
    x: In,
    (first, width): (Val<u32>, Val<u32>),
    lanes: u8,
) -> [Val<f32>; 2] {
    let reduce = |f: &dyn Fn(Val<f32>, Val<f32>) -> Val<f32>| {
        let sum = Var::new(0.0);
        team.sweep(width, lanes, |at, lanes| {
            let loaded: Vec<_> = at.iter().map(|&i| load(x, first + i, lanes)).collect();
            for v in loaded.into_iter().flatten() {
                sum.set(f(sum.get(), v));
            }
        });
        team.sum(sum.get()) / width.f32()
    };
    let mean = reduce(&|sum, v| sum + v);
    let variance = reduce(&|sum, v| (v - mean).fma(v - mean, sum));
    [mean, variance.sqrt()]
}

/// What of rows of `width` elements stands out from them, on the device.
#[kernel]
pub fn gaussian_top_k(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    deviations: Const<f32>,
    scalar: Scalar,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("y", size)]);
    begin();
    let first = group_id() * width;
    let lanes = lanes(scalar);
    let [mean, deviation] = statistics(team, x, (first, width), lanes);
    let cutoff = mean + deviation * deviations;
    team.sweep(width, lanes, |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(x, first + i, lanes)).collect();
        for (&i, x) in at.iter().zip(loaded) {
            let values: Vec<Val<f32>> = x.into_iter().map(|x| (x - cutoff).max(0.0)).collect();
            y.set_vec(first + i, &values);
        }
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "gaussian_top_k", cases, benches }];

/// Gemma 3n's: one element of twenty stands out.
pub(crate) const USUAL: GaussianTopK = GaussianTopK { deviations: 1.644_853_6 };

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(rows, width, op, why): (usize, usize, GaussianTopK, &str)| {
            let x = scaled(scalar, width as u64 + 7, rows * width, 3.0);
            let mut y = vec![0.0; rows * width];
            op.rows(&x.to_f32(), width, &mut y);
            // What is left of two numbers that are nearly the same has fewer bits.
            let want = y.into_iter().map(f64::from).collect();
            Case {
                kernel: gaussian_top_k(scalar).record(),
                label: format!("{rows} x {width} {scalar}, {why}"),
                numbers: op.numbers(rows, width),
                buffers: vec![x, Buffer::zeros(scalar, rows * width)],
                expected: vec![(1, Expected::Near(want, tolerance(scalar).max(1e-4)))],
            }
        };
        let below = GaussianTopK { deviations: -0.5 };
        [
            (1, 16, USUAL, "a short row"),
            (3, 129, below, "a width no vector divides, a cutoff below the mean"),
            (2, 2048, USUAL, "a vector or two per thread"),
            (1, 7176, USUAL, "several vectors per thread and a remainder"),
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
        let buffers = vec![Fill::Noise(scalar, n), Fill::Zeros(scalar, n)];
        let label = format!("{rows} x {width}");
        let kernel = gaussian_top_k(scalar);
        vec![memory(kernel, &label, USUAL.numbers(rows, width), buffers, 7 * n as u64)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn what_is_beyond_the_cutoff_stays() {
        // Mean 3, deviation 2.
        let x = [1.0, 5.0, 1.0, 5.0];
        let mut y = [0.0; 4];
        let op = GaussianTopK { deviations: 0.5 };
        op.rows(&x, 4, &mut y);
        assert_eq!(y, [0.0, 1.0, 0.0, 1.0]);
        let mut own = x;
        op.row(&mut own);
        assert_eq!(own, y);
    }
}
