//! Multiplication by one number: `y = by * x`.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, Reverse, Wrt, give, linear_in_x, one};
use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, launch_flat};
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, arity};
use formats::Result;

/// `x -> by * x`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Scale {
    /// The factor.
    pub by: f32,
}

impl Operation for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("scale", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call.inputs[0], self.by, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = scale(to.scalar(X));
        launch_flat(to, kernel, Numbers::new().with_f32("by", self.by), &["x"])
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, *self, &[dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        linear_in_x(at, *self)
    }
}

/// `y = by * x`.
pub fn reference(x: &[f32], by: f32, y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = by * x[i];
    }
}

/// `y = by * x`, on the device: `n` elements.
#[kernel]
pub fn scale(x: In<{ scalar }>, y: Out<{ scalar }>, n: Arg<u32>, by: Arg<f32>, scalar: Scalar) {
    map(["x"], [x], y, n, |[x]| x * by);
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "scale", cases, benches }];

/// Gemma's embedding scale for a width of 2048.
const BY: f32 = 45.254_834;

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let numbers = Numbers::new().with_f32("by", BY);
        flat(scalar, scale(scalar), &numbers, 1, 2.0, |x, y| reference(&x[0], BY, y))
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        vec![flat_bench(scalar, scale(scalar), Numbers::new().with_f32("by", BY), 1, 1)]
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
