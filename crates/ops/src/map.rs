//! Functions of one element: `y[i] = f(x[i])`.
//!
//! A function is one row of the table [`Unary`]: its reference, its kernel and the CPU's loop come
//! of it.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, MapBackward, Reverse, Wrt, give, one};
use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, launch_flat};
use crate::sweep;
use crate::trial::{every_float, flat, flat_bench};
use crate::{Shape, arity, real};
use formats::Result;

pub use formats::elementwise::Unary;

/// `x -> f(x)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Map(pub Unary);

impl Operation for Map {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(self.0, call.inputs[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = map(to.scalar(X), self.0);
        launch_flat(to, kernel, Numbers::new(), &["x"])
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let x = at.input(0);
        give(at, Wrt::Input(0), |at| one(at, MapBackward(self.0), &[x, dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let Some(dx) = at.tangent(0) else { return Ok(()) };
        let x = at.input(0);
        let dy = one(at, MapBackward(self.0), &[x, dx], &[])?;
        at.add(0, dy)
    }
}

/// `y = f(x)`, in f64.
pub fn reference(f: Unary, x: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = f.apply(f64::from(x[i])) as f32;
    }
}

/// `y = f(x)`, on the device: `n` elements.
#[kernel]
pub fn map(x: In<{ scalar }>, y: Out<{ scalar }>, n: Arg<u32>, scalar: Scalar, f: Unary) {
    sweep::map(["x"], [x], y, n, |[x]| real::unary(f, x));
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "map", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |&f: &Unary| {
            let numbers = Numbers::new();
            flat(scalar, map(scalar, f), &numbers, 1, f.range(), move |x, y| {
                reference(f, &x[0], y);
            })
        };
        Unary::ALL.iter().flat_map(of).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    // The cheapest and the dearest, by operations of an element.
    fn of(scalar: Scalar) -> Vec<Bench> {
        let of = |(f, flops)| flat_bench(scalar, map(scalar, f), Numbers::new(), 1, flops);
        [(Unary::Silu, 4), (Unary::GeluErf, 24), (Unary::GeluTanh, 24)].map(of).to_vec()
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
