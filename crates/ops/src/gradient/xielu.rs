//! The gradients of [`crate::xielu`] with respect to what it is computed of, and to the numbers `a`
//! and `b` that a layer has learnt.
//!
//! ```text
//! dy/dx = 2 positive x + linear                                   where x > 0
//! dy/dx = negative (e^x - 1) + linear                             where x < BOUND
//! dy/dx = -negative + linear                                      between
//! da = 1 / (1 + e^-a) sum of dy x^2                               over all x > 0
//! db = 1 / (1 + e^-b) sum of dy (e^min(x, BOUND) - 1 - x)         over all others
//! ```

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;

use super::products::numbers;
use crate::math::sigmoid;
use crate::operation::{
    ActivationPrecision, Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y,
};
use crate::sweep::{
    Row, RowThreads, begin, lanes_of_both, load, map_with, require_lengths, require_vectors, when,
};
use crate::trial::{every_float, memory, near, random, rows_of, scaled};
use crate::xielu::{
    BOUND, Coefficients, benches_with, cases_with, check, coefficients, launch_with,
};
use crate::{Shape, Xielu, alike, arity};
use formats::Result;

/// `x, dy; a[1], b[1] -> dx` of [`Xielu`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XieluBackward {
    /// The factor on `x` everywhere.
    pub linear: f32,
}

/// `x, dy; a[1] -> [rows, 1]`: each row's part of the gradient of a number that [`Xielu`] has
/// learnt, `a` or `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XieluSums {
    /// Whether the number is `b`, of what is not positive.
    pub negative: bool,
}

/// `x; a[1], da[1] -> dy`: what a change of `a` or `b` changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XieluTangent {
    /// Whether the number is `b`, of what is not positive.
    pub negative: bool,
}

impl Coefficients {
    /// `dy/dx`, where `power` is `e^x` below [`BOUND`].
    #[inline(always)]
    pub fn slope(self, x: f32, power: f32) -> f32 {
        let Coefficients { positive, negative, linear } = self;
        let bent = match x > 0.0 {
            true => 2.0 * positive * x,
            false => negative * (if x < BOUND { power } else { 0.0 } - 1.0),
        };
        bent + linear
    }
}

impl XieluSums {
    /// What the factor multiplies in `y`, where `power` is `e^min(x, BOUND)`.
    #[inline(always)]
    pub fn of(self, x: f32, power: f32) -> f32 {
        match (x > 0.0, self.negative) {
            (true, false) => x * x,
            (false, true) => power - 1.0 - x,
            _ => 0.0,
        }
    }

    /// How the factor, `softplus(a)`, changes with the number `a` that is stored.
    pub fn slope(a: f32) -> f64 {
        1.0 / (1.0 + (-f64::from(a)).exp())
    }
}

impl Operation for XieluBackward {
    fn name(&self) -> &'static str {
        "xielu_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[2])?;
        alike(self.name(), inputs)?;
        check(self.name(), weights)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let coefficients =
            Xielu { linear: self.linear }.coefficients(&call.weights[0], &call.weights[1]);
        reference(coefficients, call.inputs[0], call.inputs[1], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let of = Xielu { linear: self.linear };
        let kernel = xielu_backward(to.scalar(X));
        launch_with(to, kernel, of, &["x", "dy"])
    }
}

impl Operation for XieluSums {
    fn name(&self) -> &'static str {
        "xielu_sums"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        alike(self.name(), inputs)?;
        check(self.name(), weights)?;
        Ok(vec![Shape { width: 1, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let (width, a) = (call.widths[0], call.weights[0][0]);
        sums(*self, (call.inputs[0], call.inputs[1]), width, a, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let bound = [
            ("x", Bound::Value(X)),
            ("dy", Bound::Value(Operand::Input(1))),
            ("a", Bound::Weight(0)),
            ("y", Bound::Value(Y)),
        ];
        let kernel = xielu_sums(to.scalar(X), self.negative);
        to.push(kernel, numbers(to.rows(X), to.width(X)), &bound)?;
        Ok(true)
    }
}

impl Operation for XieluTangent {
    fn name(&self) -> &'static str {
        "xielu_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[2])?;
        check(self.name(), weights)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let by = XieluSums::slope(call.weights[0][0]) * f64::from(call.weights[1][0]);
        for (y, x) in call.outputs[0].iter_mut().zip(call.inputs[0]) {
            *y = (by * bent(self.negative, *x)) as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

/// What a factor multiplies in `y`, in f64.
fn bent(negative: bool, x: f32) -> f64 {
    let x = f64::from(x);
    match (x > 0.0, negative) {
        (true, false) => x * x,
        (false, true) => x.min(f64::from(BOUND)).exp_m1() - x,
        _ => 0.0,
    }
}

/// Each row's part of a number's gradient, in f64.
fn sums(op: XieluSums, (x, dy): (&[f32], &[f32]), width: usize, a: f32, y: &mut [f32]) {
    let by = XieluSums::slope(a);
    let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
    for (y, (x, dy)) in y.iter_mut().zip(rows) {
        let terms = x.iter().zip(dy).map(|(x, dy)| bent(op.negative, *x) * f64::from(*dy));
        *y = (by * terms.sum::<f64>()) as f32;
    }
}

/// `dx = dy/dx dy`, in f64.
fn reference(coefficients: Coefficients, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let Coefficients { positive, negative, linear } = coefficients;
    let [positive, negative, linear] = [positive, negative, linear].map(f64::from);
    for (dx, (x, dy)) in dx.iter_mut().zip(x.iter().zip(dy)) {
        let x = f64::from(*x);
        let bent = match x {
            x if x > 0.0 => 2.0 * positive * x,
            x if x < f64::from(BOUND) => negative * x.exp_m1(),
            _ => -negative,
        };
        *dx = ((bent + linear) * f64::from(*dy)) as f32;
    }
}

/// `y = dy/dx dy`, on the device: `n` elements. `y` may be `dy`.
#[kernel]
pub fn xielu_backward(
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    y: Out<{ scalar }>,
    a: In<f32>,
    b: In<f32>,
    n: Arg<u32>,
    linear: Arg<f32>,
    scalar: Scalar,
) {
    require_lengths(&[("a", fixed(1)), ("b", fixed(1))]);
    let coefficients = || coefficients(a, b, linear);
    map_with(["x", "dy"], [x, dy], y, n, coefficients, |[positive, negative], [x, dy]| {
        let power = select(x.lt(BOUND), x.min(0.0).exp(), 0.0);
        let bent = select(x.gt(0.0), x * positive * 2.0, (power - 1.0) * negative);
        (bent + linear) * dy
    });
}

/// `y[t]`, each row's part of the gradient of `a`, or where `negative` of `b`, on the device: a sum
/// in f32, in an order that follows from the width alone.
#[kernel]
pub fn xielu_sums(
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    a: In<f32>,
    y: Out<f32>,
    rows: Arg<u32>,
    width: Const<u32>,
    scalar: Scalar,
    negative: bool,
) {
    let team = RowThreads::Simd;
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("dy", size)]);
    require_lengths(&[("a", fixed(1)), ("y", dim("rows"))]);
    begin();
    let own: Vec<Row> = team.rows(rows, width);
    let sums: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
    team.sweep(width, team.lanes(lanes_of_both(scalar, Scalar::F32)), |at, lanes| {
        for (row, sum) in own.iter().zip(&sums) {
            let read = |i: Val<u32>| {
                let (x, dy) = (load(x, row.first + i, lanes), load(dy, row.first + i, lanes));
                x.into_iter().zip(dy)
            };
            for (x, dy) in at.iter().flat_map(|&i| read(i)) {
                let bent = match negative {
                    true => select(x.gt(0.0), 0.0, x.min(BOUND).exp() - 1.0 - x),
                    false => select(x.gt(0.0), x * x, 0.0),
                };
                sum.set(bent.fma(dy, sum.get()));
            }
        }
    });
    let by = sigmoid(a.get(0u32));
    for (row, sum) in own.iter().zip(&sums) {
        let sum = team.sum(sum.get()) * by;
        row.keep(|| when(Order::eq(lane_id(), 0u32), || y.set(row.first / width, sum)));
    }
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "xielu_backward", cases, benches },
    Spec { name: "xielu_sums", cases: sum_cases, benches: sum_benches },
];

fn cases() -> Vec<Case> {
    every_float(|scalar| {
        cases_with(scalar, xielu_backward(scalar), 2, |coefficients, x, dx| {
            reference(coefficients, &x[0], &x[1], dx);
        })
    })
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| benches_with(scalar, xielu_backward(scalar), 2, 10))
}

fn sum_cases() -> Vec<Case> {
    let case = |scalar: Scalar, (rows, width, why): (usize, usize, &str), negative: bool| {
        let x = scaled(scalar, rows as u64 + 5, rows * width, 4.0);
        let dy = random(scalar, rows as u64 + 6, rows * width);
        let (a, mut y) = (0.3, vec![0.0; rows]);
        sums(XieluSums { negative }, (&x.to_f32(), &dy.to_f32()), width, a, &mut y);
        let sign = if negative { "negative" } else { "positive" };
        Case {
            kernel: xielu_sums(scalar, negative).record(),
            label: format!("{rows} x {width} {scalar}, {sign}, {why}"),
            numbers: numbers(rows, width),
            buffers: vec![
                x,
                dy,
                Buffer::floats(Scalar::F32, &[a]),
                Buffer::zeros(Scalar::F32, rows),
            ],
            expected: vec![(3, near(Scalar::F32, &y))],
        }
    };
    let shapes =
        [(1, 9, "one row"), (5, 33, "a width no vector divides"), (129, 264, "a ragged group")];
    let each = shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)]);
    let each: Vec<_> = each.collect();
    every_float(|scalar| {
        each.iter().map(|(shape, negative)| case(scalar, *shape, *negative)).collect()
    })
}

fn sum_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let n = rows * width;
        let buffers = vec![
            Fill::Noise(scalar, n),
            Fill::Noise(scalar, n),
            Fill::Noise(Scalar::F32, 1),
            Fill::Zeros(Scalar::F32, rows),
        ];
        let kernel = xielu_sums(scalar, true);
        let flops = 6 * n as u64;
        vec![memory(kernel, &format!("{rows} x {width}"), numbers(rows, width), buffers, flops)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
