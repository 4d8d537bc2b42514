//! xIELU (Huang & Schlag 2024), the function in Apertus's feed-forward, with numbers that each layer
//! has learnt:
//!
//! ```text
//! y = positive x^2 + linear x                               where x > 0
//! y = negative (e^min(x, -1e-6) - 1 - x) + linear x         elsewhere
//! ```

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, Reverse, Wrt, XieluBackward, give, one};
use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, launch_flat};
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, arity};
use formats::Result;

/// The exponent's bound, as models are trained with it.
pub const BOUND: f32 = -1e-6;

/// `x -> xielu(x)`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Xielu {
    /// The factor on the square of what is positive.
    pub positive: f32,
    /// The factor on the exponential's part where nothing is.
    pub negative: f32,
    /// The factor on `x` everywhere.
    pub linear: f32,
}

impl Xielu {
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
        arity("xielu", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(*self, call.inputs[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = xielu(to.scalar(X));
        launch_flat(to, kernel, numbers(*self), &["x"])
    }

    /// The numbers count as constants.
    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let x = at.input(0);
        give(at, Wrt::Input(0), |at| one(at, XieluBackward(*self), &[x, dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let Some(dx) = at.tangent(0) else { return Ok(()) };
        let x = at.input(0);
        let dy = one(at, XieluBackward(*self), &[x, dx], &[])?;
        at.add(0, dy)
    }
}

pub(crate) fn numbers(op: Xielu) -> Numbers {
    let Xielu { positive, negative, linear } = op;
    Numbers::new()
        .with_f32("positive", positive)
        .with_f32("negative", negative)
        .with_f32("linear", linear)
}

/// `y = xielu(x)`, in f64.
pub fn reference(op: Xielu, x: &[f32], y: &mut [f32]) {
    let Xielu { positive, negative, linear } = op;
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
    n: Arg<u32>,
    positive: Arg<f32>,
    negative: Arg<f32>,
    linear: Arg<f32>,
    scalar: Scalar,
) {
    map(["x"], [x], y, n, |[x]| {
        let below = (x.min(BOUND).exp() - 1.0 - x) * negative;
        select(x.gt(0.0), x * x * positive, below) + x * linear
    });
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "xielu", cases, benches }];

/// As a layer begins its training, but for different factors.
const USUAL: Xielu = Xielu { positive: 0.8, negative: 1.1, linear: 0.5 };

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        flat(scalar, xielu(scalar), &numbers(USUAL), 1, 4.0, |x, y| reference(USUAL, &x[0], y))
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        vec![flat_bench(scalar, xielu(scalar), numbers(USUAL), 1, 8)]
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
}
