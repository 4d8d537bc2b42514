//! Elementwise product of equal shapes. The shape rule is that of [`crate::add`].

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::operation::{Call, Operation, Sharding};
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, add};
use formats::Result;

/// `a, b -> a * b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mul;

impl Operation for Mul {
    fn name(&self) -> &'static str {
        "mul"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        add::shape(self.name(), inputs, weights)
    }

    fn reference(&self, call: &mut Call<'_>) {
        reference(call.inputs[0], call.inputs[1], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }
}

/// `y = a * b`.
pub fn reference(a: &[f32], b: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = a[i] * b[i];
    }
}

/// `y = a * b`, on the device: `n` elements.
#[kernel]
pub fn mul(a: In<{ scalar }>, b: In<{ scalar }>, y: Out<{ scalar }>, n: Arg<u32>, scalar: Scalar) {
    map(["a", "b"], [a, b], y, n, |[a, b]| a * b);
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "mul", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        flat(scalar, mul(scalar), &Numbers::new(), 2, 2.0, |x, y| reference(&x[0], &x[1], y))
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        vec![flat_bench(scalar, mul(scalar), Numbers::new(), 2, 1)]
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
