//! Gradients of elementwise functions, `dx = f'(x) dy`, and of gates; and values that are one
//! number.

use super::{Forward, Reverse};
use crate::gated::GATES;
use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, Y, launch_flat};
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, Unary, alike, arity, math, sweep};
use formats::Result;
use formats::elementwise::erf;
use std::f64::consts::{FRAC_1_SQRT_2, PI};
use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

/// A value of this shape, all of whose elements are `value`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filled {
    /// Its shape.
    pub shape: Shape,
    /// The number.
    pub value: f32,
}

/// `x, dy -> f'(x) dy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapBackward(pub Unary);

/// `gate, up, dy -> f'(gate) up dy`: the gate's gradient of `f(gate) up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedBackward(pub Unary);

/// `f'(x)`; of `relu` at 0 it is 0.
pub(super) fn derivative(f: Unary, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        Unary::GeluTanh => {
            let root = (2.0 / PI).sqrt();
            let t = (root * (x + 0.044715 * x.powi(3))).tanh();
            let inner = root * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        }
        Unary::GeluErf => {
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            0.5 * (1.0 + erf(x * FRAC_1_SQRT_2)) + x * density
        }
        Unary::QuickGelu => {
            let s = sigmoid(f64::from(1.702f32) * x);
            s + f64::from(1.702f32) * x * s * (1.0 - s)
        }
        Unary::Tanh => 1.0 - x.tanh().powi(2),
        Unary::Sigmoid => sigmoid(x) * (1.0 - sigmoid(x)),
        Unary::Exp => x.exp(),
        Unary::Relu => f64::from(u8::from(x > 0.0)),
        Unary::Softplus => sigmoid(x),
        Unary::Square => 2.0 * x,
        Unary::HardTanh => f64::from(u8::from(x.abs() <= 1.0)),
    }
}

impl Operation for Filled {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 0, weights, &[0])?;
        Ok(vec![self.shape])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        call.outputs[0].fill(self.value);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let numbers = Numbers::new().with_f32("value", self.value);
        let kernel = fill(to.scalar(Y));
        launch_flat(to, kernel, numbers, &[])
    }

    fn vjp(&self, _: &mut dyn Reverse) -> Result<()> {
        Ok(())
    }

    fn jvp(&self, _: &mut dyn Forward) -> Result<()> {
        Ok(())
    }
}

impl Operation for MapBackward {
    fn name(&self) -> &'static str {
        "map_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[0])?;
        alike(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(self.0, call.inputs[0], call.inputs[1], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = map_backward(to.scalar(X), self.0);
        launch_flat(to, kernel, Numbers::new(), &["x", "dy"])
    }
}

fn reference(f: Unary, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    for (i, dx) in dx.iter_mut().enumerate() {
        *dx = (derivative(f, f64::from(x[i])) * f64::from(dy[i])) as f32;
    }
}

impl Operation for GatedBackward {
    fn name(&self) -> &'static str {
        "gated_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[0])?;
        alike(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        gated_reference(self.0, [0, 1, 2].map(|i| call.inputs[i]), &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(2)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = gated_backward(to.scalar(X), self.0);
        launch_flat(to, kernel, Numbers::new(), &["gate", "up", "dy"])
    }
}

fn gated_reference(f: Unary, [gate, up, dy]: [&[f32]; 3], dgate: &mut [f32]) {
    for (i, dgate) in dgate.iter_mut().enumerate() {
        let slope = derivative(f, f64::from(gate[i]));
        *dgate = (slope * f64::from(up[i]) * f64::from(dy[i])) as f32;
    }
}

/// `f'(x)` on the device, as [`derivative`].
#[track_caller]
pub(super) fn slope(f: Unary, x: Val<f32>) -> Val<f32> {
    let root = (2.0 / PI).sqrt() as f32;
    match f {
        Unary::Silu => {
            let s = math::sigmoid(x);
            s * (x * (1.0 - s) + 1.0)
        }
        Unary::GeluTanh => {
            let t = ((x * x * x).fma(0.044_715, x) * root).tanh();
            let inner = (x * x).fma(3.0 * 0.044_715, 1.0) * root;
            (t + 1.0) * 0.5 + x * 0.5 * (1.0 - t * t) * inner
        }
        Unary::GeluErf => {
            let density = (x * x * -0.5).exp() * (1.0 / (2.0 * PI).sqrt()) as f32;
            x.fma(density, (math::erf(x * std::f32::consts::FRAC_1_SQRT_2) + 1.0) * 0.5)
        }
        Unary::QuickGelu => {
            let s = math::sigmoid(x * 1.702);
            (x * 1.702 * s).fma(1.0 - s, s)
        }
        Unary::Tanh => {
            let t = x.tanh();
            1.0 - t * t
        }
        Unary::Sigmoid => {
            let s = math::sigmoid(x);
            s * (1.0 - s)
        }
        Unary::Exp => x.exp(),
        Unary::Relu => select(Order::gt(x, 0.0), 1.0, 0.0),
        Unary::Softplus => math::sigmoid(x),
        Unary::Square => x * 2.0,
        Unary::HardTanh => select(Order::le(x.abs(), 1.0), 1.0, 0.0),
    }
}

/// `dx = f'(x) dy`, on the device: `n` elements. `dx` may be `dy`.
#[kernel]
pub fn map_backward(
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    y: Out<{ scalar }>,
    n: Arg<u32>,
    scalar: Scalar,
    f: Unary,
) {
    sweep::map(["x", "dy"], [x, dy], y, n, |[x, dy]| slope(f, x) * dy);
}

/// `y = f'(gate) up dy`, on the device: `n` elements. `y` may be `dy`.
#[kernel]
pub fn gated_backward(
    gate: In<{ scalar }>,
    up: In<{ scalar }>,
    dy: In<{ scalar }>,
    y: Out<{ scalar }>,
    n: Arg<u32>,
    scalar: Scalar,
    f: Unary,
) {
    sweep::map(["gate", "up", "dy"], [gate, up, dy], y, n, |[gate, up, dy]| {
        slope(f, gate) * up * dy
    });
}

/// `n` elements that are one number, on the device.
#[kernel]
pub fn fill(y: Out<{ scalar }>, n: Arg<u32>, value: Const<f32>, scalar: Scalar) {
    sweep::map([], [], y, n, |[]| value);
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "fill", cases: fill_cases, benches: fill_benches },
    Spec { name: "gated_backward", cases: gated_cases, benches: gated_benches },
    Spec { name: "map_backward", cases, benches },
];

fn fill_cases() -> Vec<Case> {
    every_float(|scalar| {
        let numbers = Numbers::new().with_f32("value", 1.5);
        flat(scalar, fill(scalar), &numbers, 0, 1.0, |_, y| y.fill(1.5))
    })
}

fn fill_benches() -> Vec<Bench> {
    every_float(|scalar| {
        vec![flat_bench(scalar, fill(scalar), Numbers::new().with_f32("value", 0.0), 0, 0)]
    })
}

fn gated_cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |(f, _)| {
            let kernel = gated_backward(scalar, f);
            flat(scalar, kernel, &Numbers::new(), 3, 4.0, move |x, dgate| {
                gated_reference(f, [&x[0], &x[1], &x[2]], dgate);
            })
        };
        GATES.into_iter().flat_map(of).collect()
    }
    every_float(of)
}

fn gated_benches() -> Vec<Bench> {
    every_float(|scalar| {
        vec![flat_bench(scalar, gated_backward(scalar, Unary::Silu), Numbers::new(), 3, 9)]
    })
}

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |&f: &Unary| {
            let kernel = map_backward(scalar, f);
            flat(scalar, kernel, &Numbers::new(), 2, f.range().min(4.0), move |x, dx| {
                reference(f, &x[0], &x[1], dx);
            })
        };
        Unary::ALL.iter().flat_map(of).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let kernel = map_backward(scalar, Unary::Silu);
        vec![flat_bench(scalar, kernel, Numbers::new(), 2, 8)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
