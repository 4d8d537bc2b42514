//! xIELU (Huang & Schlag 2024), the function in Apertus's feed-forward, with two numbers that each
//! layer has learnt and files store:
//!
//! ```text
//! positive = softplus(a),  negative = softplus(b) + linear,  softplus(a) = ln(1 + e^a)
//! y = positive x^2 + linear x                               where x > 0
//! y = negative (e^min(x, -1e-6) - 1 - x) + linear x         elsewhere
//! ```

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, Reverse, SumRows, Wrt, give, one};
use crate::gradient::{XieluBackward, XieluSums, XieluTangent};
use crate::math::softplus;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{map_with, require_lengths};
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, arity, expect};
use formats::Result;

/// The exponent's bound, as models are trained with it.
pub const BOUND: f32 = -1e-6;

/// `x; a[1], b[1] -> xielu(x)`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Xielu {
    /// The factor on `x` everywhere.
    pub linear: f32,
}

/// The coefficients of a layer's function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coefficients {
    /// On the square of what is positive.
    pub positive: f32,
    /// On the exponential's part where nothing is.
    pub negative: f32,
    /// On `x` everywhere.
    pub linear: f32,
}

impl Xielu {
    /// The coefficients that the stored numbers `a` and `b` make.
    ///
    /// # Panics
    /// When a weight has no element.
    pub fn coefficients(self, a: &[f32], b: &[f32]) -> Coefficients {
        let softplus = |x: f32| {
            let x = f64::from(x);
            (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
        };
        let linear = self.linear;
        Coefficients { positive: softplus(a[0]), negative: linear + softplus(b[0]), linear }
    }
}

impl Coefficients {
    /// `xielu(x)`, where `power` is `e^min(x, BOUND)`.
    #[inline(always)]
    pub fn of(self, x: f32, power: f32) -> f32 {
        let bent = if x > 0.0 { self.positive * x * x } else { self.negative * (power - 1.0 - x) };
        bent + self.linear * x
    }
}

impl Operation for Xielu {
    fn name(&self) -> &'static str {
        "xielu"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("xielu", inputs, 1, weights, &[2])?;
        check("xielu", weights)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let coefficients = self.coefficients(&call.weights[0], &call.weights[1]);
        reference(coefficients, call.inputs[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = xielu(to.scalar(X));
        launch_with(to, kernel, *self, &["x"])
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let (x, linear) = (at.input(0), self.linear);
        give(at, Wrt::Input(0), |at| one(at, XieluBackward { linear }, &[x, dy], &[0, 1]))?;
        for (weight, negative) in [(0, false), (1, true)] {
            give(at, Wrt::Weight(weight), |at| {
                let sums = one(at, XieluSums { negative }, &[x, dy], &[weight])?;
                one(at, SumRows, &[sums], &[])
            })?;
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let (x, linear) = (at.input(0), self.linear);
        if let Some(dx) = at.tangent(0) {
            let dy = one(at, XieluBackward { linear }, &[x, dx], &[0, 1])?;
            at.add(0, dy)?;
        }
        for (weight, negative) in [(0, false), (1, true)] {
            if let Some(change) = at.weight_tangent(weight) {
                let dy = one(at, XieluTangent { negative }, &[x], &[weight, change])?;
                at.add(0, dy)?;
            }
        }
        Ok(())
    }
}

/// Whether each weight is one number.
pub(crate) fn check(name: &str, weights: &[&[usize]]) -> Result<()> {
    weights.iter().try_for_each(|weight| expect(name, "a learnt number", weight, &[1]))
}

/// Launches an element-wise kernel with the function's numbers.
pub(crate) fn launch_with(
    to: &mut dyn Launches,
    kernel: Recipe<'static>,
    op: Xielu,
    inputs: &[&str],
) -> Result<bool> {
    let n = to.rows(Y) * to.width(Y);
    let inputs = inputs.iter().enumerate();
    let mut bound: Vec<(&str, Bound)> =
        inputs.map(|(i, name)| (*name, Bound::Value(Operand::Input(i)))).collect();
    bound.extend([("y", Bound::Value(Y)), ("a", Bound::Weight(0)), ("b", Bound::Weight(1))]);
    to.push(kernel, numbers(op).with("n", n as u32), &bound)?;
    Ok(true)
}

pub(crate) fn numbers(op: Xielu) -> Numbers {
    Numbers::new().with_f32("linear", op.linear)
}

/// The coefficients `[positive, negative]` on the device, of the stored numbers.
#[track_caller]
pub(crate) fn coefficients(a: In, b: In, linear: Val<f32>) -> [Val<f32>; 2] {
    [softplus(a.get(0u32)), softplus(b.get(0u32)) + linear]
}

/// `y = xielu(x)`, in f64.
pub fn reference(coefficients: Coefficients, x: &[f32], y: &mut [f32]) {
    let Coefficients { positive, negative, linear } = coefficients;
    let [positive, negative, linear] = [positive, negative, linear].map(f64::from);
    for (y, x) in y.iter_mut().zip(x) {
        let x = f64::from(*x);
        let bent = match x > 0.0 {
            true => positive * x * x,
            false => negative * (x.min(f64::from(BOUND)).exp_m1() - x),
        };
        *y = (bent + linear * x) as f32;
    }
}

/// `y = xielu(x)`, on the device: `n` elements.
#[kernel]
pub fn xielu(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    a: In<f32>,
    b: In<f32>,
    n: Arg<u32>,
    linear: Arg<f32>,
    scalar: Scalar,
) {
    require_lengths(&[("a", fixed(1)), ("b", fixed(1))]);
    let coefficients = || coefficients(a, b, linear);
    map_with(["x"], [x], y, n, coefficients, |[positive, negative], [x]| {
        let below = (x.min(BOUND).exp() - 1.0 - x) * negative;
        select(x.gt(0.0), x * x * positive, below) + x * linear
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "xielu", cases, benches }];

/// As a layer begins its training, but for different numbers.
pub(crate) const USUAL: (Xielu, [f32; 2]) = (Xielu { linear: 0.5 }, [0.2, -0.7]);

/// Cases of an element-wise kernel with the usual numbers, by their reference.
pub(crate) fn cases_with(
    scalar: Scalar,
    kernel: Recipe,
    inputs: usize,
    reference: impl Fn(Coefficients, &[Vec<f32>], &mut [f32]),
) -> Vec<Case> {
    let (op, [a, b]) = USUAL;
    let coefficients = op.coefficients(&[a], &[b]);
    let all = flat(scalar, kernel, &numbers(op), inputs, 4.0, |x, y| reference(coefficients, x, y))
        .into_iter();
    all.map(|mut case| {
        case.buffers.extend([a, b].map(|number| Buffer::floats(Scalar::F32, &[number])));
        case
    })
    .collect()
}

/// The benchmark of such a kernel.
pub(crate) fn benches_with(
    scalar: Scalar,
    kernel: Recipe,
    inputs: usize,
    flops: u64,
) -> Vec<Bench> {
    let mut bench = flat_bench(scalar, kernel, numbers(USUAL.0), inputs, flops);
    bench.buffers.extend([Fill::Noise(Scalar::F32, 1), Fill::Noise(Scalar::F32, 1)]);
    vec![bench]
}

fn cases() -> Vec<Case> {
    every_float(|scalar| {
        cases_with(scalar, xielu(scalar), 1, |coefficients, x, y| reference(coefficients, &x[0], y))
    })
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| benches_with(scalar, xielu(scalar), 1, 8))
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
