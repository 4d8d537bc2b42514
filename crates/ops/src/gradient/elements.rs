//! Gradients of single elements: `dx = f'(x) dy`, and values that are one number.

use super::{Forward, Reverse};
use crate::operation::{Call, Operation, Sharding};
use crate::{Shape, Unary, alike, arity};
use formats::Result;
use formats::elementwise::erf;
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// A value of this shape, all of whose elements are `value`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fill {
    /// Its shape.
    pub shape: Shape,
    /// The number.
    pub value: f32,
}

/// `x, dy -> f'(x) dy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapBackward(pub Unary);

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
        Unary::Square => 2.0 * x,
    }
}

impl Operation for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 0, weights, &[0])?;
        Ok(vec![self.shape])
    }

    fn reference(&self, call: &mut Call<'_>) {
        call.outputs[0].fill(self.value);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
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

    fn reference(&self, call: &mut Call<'_>) {
        let (x, dy) = (call.inputs[0], call.inputs[1]);
        for (i, dx) in call.outputs[0].iter_mut().enumerate() {
            *dx = (derivative(self.0, f64::from(x[i])) * f64::from(dy[i])) as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }
}
