//! The gradient of [`crate::xielu`] with respect to what it is computed of; its numbers count as
//! constants.
//!
//! ```text
//! dy/dx = 2 positive x + linear                                   where x > 0
//! dy/dx = negative (e^x - 1) + linear                             where x < BOUND
//! dy/dx = -negative + linear                                      between
//! ```

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;

use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, launch_flat};
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};
use crate::xielu::{self, BOUND};
use crate::{Shape, Xielu, alike, arity};
use formats::Result;

/// `x, dy -> dx` of [`Xielu`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct XieluBackward(pub Xielu);

impl Xielu {
    /// `dy/dx`, where `power` is `e^x` below [`BOUND`].
    #[inline(always)]
    pub fn slope(self, x: f32, power: f32) -> f32 {
        let Xielu { positive, negative, linear } = self;
        let bent = match x > 0.0 {
            true => 2.0 * positive * x,
            false => negative * (if x < BOUND { power } else { 0.0 } - 1.0),
        };
        bent + linear
    }
}

impl Operation for XieluBackward {
    fn name(&self) -> &'static str {
        "xielu_backward"
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
        let kernel = xielu_backward(to.scalar(X));
        launch_flat(to, kernel, xielu::numbers(self.0), &["x", "dy"])
    }
}

/// `dx = dy/dx dy`, in f64.
fn reference(op: Xielu, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let [positive, negative, linear] = [op.positive, op.negative, op.linear].map(f64::from);
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
    n: Arg<u32>,
    positive: Arg<f32>,
    negative: Arg<f32>,
    linear: Arg<f32>,
    scalar: Scalar,
) {
    map(["x", "dy"], [x, dy], y, n, |[x, dy]| {
        let power = select(x.lt(BOUND), x.min(0.0).exp(), 0.0);
        let bent = select(x.gt(0.0), x * positive * 2.0, (power - 1.0) * negative);
        (bent + linear) * dy
    });
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "xielu_backward", cases, benches }];

/// As a layer begins its training, but for different factors.
const USUAL: Xielu = Xielu { positive: 0.8, negative: 1.1, linear: 0.5 };

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let kernel = xielu_backward(scalar);
        flat(scalar, kernel, &xielu::numbers(USUAL), 2, 4.0, |x, dx| {
            reference(USUAL, &x[0], &x[1], dx);
        })
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        vec![flat_bench(scalar, xielu_backward(scalar), xielu::numbers(USUAL), 2, 10)]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
