//! Layer norm (Ba et al. 2016): `y = (x - mean) / sqrt(variance + eps) * weight + bias`, the bias
//! optional. A weight narrower than the row norms each group of that width by itself: the norms of
//! heads of q and k.
//!
//! The variance is the mean of squared deviations, taken in a second pass over the row: the
//! difference of mean square and squared mean would lose it where the mean is large.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;

use crate::gradient::{Forward, LayerNormBackward, NormTangent, Reverse, Wrt, give, of_bias, one};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::rms_norm::{SHAPES, check, launch_numbers, numbers};
use crate::sweep::{RowThreads, begin, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, memory, near, random, rows_of, scaled};
use crate::{Op, Shape, arity, expect};
use formats::Result;

/// `x[rows, width]; weight[group], (bias[group]) -> [rows, width]`, `group` dividing `width`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

impl Operation for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("layer_norm", inputs, 1, weights, &[1, 2])?;
        check("layer_norm", inputs[0].width, weights[0])?;
        if let Some(bias) = weights.get(1) {
            expect("layer_norm", "bias", bias, weights[0])?;
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let bias = call.weights.get(1).map(Vec::as_slice);
        reference(call.inputs[0], &call.weights[0], bias, self.eps, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = layer_norm(to.scalar(X), Scalar::F32, to.weight(1).is_some());
        let width = to.weight(0).map_or(to.width(X), |weight| weight[0]);
        let rows = to.rows(X) * (to.width(X) / width);
        let numbers = launch_numbers(rows, width, self.eps);
        let mut bound = vec![("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        bound.push(("weight", Bound::Weight(0)));
        bound.extend(to.weight(1).map(|_| ("bias", Bound::Weight(1))));
        to.push(kernel, numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let x = at.input(0);
        let weight = at.wants(Wrt::Weight(0)) || at.wants(Wrt::Weight(1));
        let op = LayerNormBackward { eps: self.eps, weight };
        let found = at.record(Op::from(op), &[x, dy], &[0])?;
        let wrt = [Wrt::Input(0), Wrt::Weight(0), Wrt::Weight(1)];
        for (of, cotangent) in wrt.into_iter().zip(found) {
            give(at, of, |_| Ok(cotangent))?;
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let x = at.input(0);
        if let Some(dx) = at.tangent(0) {
            let op = NormTangent { eps: self.eps, centred: true };
            let dy = one(at, op, &[x, dx], &[0])?;
            at.add(0, dy)?;
        }
        if let Some(weight) = at.weight_tangent(0) {
            let dy = one(at, *self, &[x], &[weight])?;
            at.add(0, dy)?;
        }
        of_bias(at, *self)
    }
}

/// Normalises every group of `weight.len()` elements of `x` into `y`, in f64.
pub fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, y: &mut [f32]) {
    let width = weight.len();
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
        let square = |x: &f32| (f64::from(*x) - mean).powi(2);
        let variance = x.iter().map(square).sum::<f64>() / width as f64;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        for i in 0..width {
            let bias = bias.map_or(0.0, |b| f64::from(b[i]));
            y[i] = ((f64::from(x[i]) - mean) * scale * f64::from(weight[i]) + bias) as f32;
        }
    }
}

/// Normalises rows of `width` elements, on the device; `weight` is `[width]`. Where `biased`, a
/// last buffer `bias` is `[width]` too.
#[kernel]
pub fn layer_norm(
    x: In<{ scalar }>,
    weight: In<{ weights }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    weights: Scalar,
    biased: bool,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("weight", dim("width")), ("y", size)]);
    let bias = biased.then(|| {
        require_vectors(&[("bias", dim("width"))]);
        <In>::stored("bias", weights)
    });
    begin();
    let first = group_id() * width;
    let lanes = lanes_of_both(scalar, weights);
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
    let scale = (variance + eps).rsqrt();
    team.sweep(width, lanes, |at, lanes| {
        let read = |&i: &Val<u32>| {
            let bias = bias.map(|bias| load(bias, i, lanes));
            (load(x, first + i, lanes), load(weight, i, lanes), bias)
        };
        let loaded: Vec<_> = at.iter().map(read).collect();
        for (&i, (x, weight, bias)) in at.iter().zip(loaded) {
            let values = x.into_iter().zip(weight).map(|(x, w)| (x - mean) * scale * w).collect();
            y.set_vec(first + i, &plus(values, bias));
        }
    });
}

/// Adds the bias, if there is one.
#[track_caller]
fn plus(values: Vec<Val<f32>>, bias: Option<Vec<Val<f32>>>) -> Vec<Val<f32>> {
    match bias {
        Some(bias) => values.into_iter().zip(bias).map(|(v, b)| v + b).collect(),
        None => values,
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "layer_norm", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar, weights: Scalar, biased: bool) -> Vec<Case> {
        let case = |(rows, width, _, why): (usize, usize, RowThreads, &str)| {
            let n = rows * width;
            // A mean far from zero: what the second pass is for.
            let shifted: Vec<f32> =
                scaled(scalar, width as u64, n, 0.5).to_f32().iter().map(|v| v + 8.0).collect();
            let x = Buffer::floats(scalar, &shifted);
            let (weight, bias) = (random(weights, 5, width), random(weights, 6, width));
            let mut y = vec![0.0; n];
            let b = bias.to_f32();
            reference(&x.to_f32(), &weight.to_f32(), biased.then_some(&b), 1e-5, &mut y);
            Case {
                kernel: layer_norm(scalar, weights, biased).record(),
                label: format!("{rows} x {width} {scalar}, {why}"),
                numbers: numbers(rows, width),
                buffers: [x, weight, Buffer::zeros(scalar, n)]
                    .into_iter()
                    .chain(biased.then_some(bias))
                    .collect(),
                expected: vec![(2, near(scalar, &y))],
            }
        };
        SHAPES.into_iter().filter(|shape| shape.2 == RowThreads::Group).map(case).collect()
    }
    fn all(scalar: Scalar) -> Vec<Case> {
        let mut all = of(scalar, scalar, true);
        all.extend(of(scalar, Scalar::F32, false));
        all
    }
    every_float(all)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let n = rows * width;
        let weight = Fill::Noise(scalar, width);
        let buffers = vec![Fill::Noise(scalar, n), weight.clone(), Fill::Zeros(scalar, n), weight];
        let kernel = layer_norm(scalar, scalar, true);
        vec![memory(
            kernel,
            &format!("{rows} x {width}"),
            numbers(rows, width),
            buffers,
            8 * n as u64,
        )]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }

    #[test]
    fn rows_have_mean_zero_and_variance_one() {
        let x = [1.0, 2.0, 3.0, 4.0, -7.0, 0.0, 7.0, 0.0];
        let mut y = [0.0; 8];
        reference(&x, &[1.0; 4], None, 0.0, &mut y);
        for row in y.chunks(4) {
            assert!(row.iter().sum::<f32>().abs() < 1e-6);
            assert!((row.iter().map(|v| v * v).sum::<f32>() - 4.0).abs() < 1e-5);
        }
    }
}
