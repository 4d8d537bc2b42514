//! SiLU: `y = x * sigmoid(x) = x / (1 + exp(-x))` (Elfwing et al. 2017).

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::math;
use crate::operation::{Call, Operation, Sharding};
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, arity};
use formats::Result;

/// `x -> silu(x)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Silu;

impl Operation for Silu {
    fn name(&self) -> &'static str {
        "silu"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("silu", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut Call<'_>) {
        reference(call.inputs[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }
}

/// One element, in f64.
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `y = silu(x)`.
pub fn reference(x: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = silu(x[i]);
    }
}

/// `y = silu(x)`, on the device: `n` elements.
#[kernel]
pub fn silu_kernel(x: In<{ scalar }>, y: Out<{ scalar }>, n: Arg<u32>, scalar: Scalar) {
    map(["x"], [x], y, n, |[x]| math::silu(x));
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "silu", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        flat(scalar, silu_kernel(scalar), &Numbers::new(), 1, 20.0, |x, y| reference(&x[0], y))
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        vec![flat_bench(scalar, silu_kernel(scalar), Numbers::new(), 1, 4)]
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
