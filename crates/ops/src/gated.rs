//! The gated half of a feed-forward (Shazeer 2020): `y = f(gate) * up`. SwiGLU's `f` is SiLU,
//! GeGLU's GELU.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, GatedBackward, Reverse, Wrt, give, one};
use crate::map::Unary;
use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, Y, launch_flat};
use crate::trial::{every_float, flat_bench, flat_to};
use crate::{Shape, alike, arity, real, sweep};
use formats::Result;

/// `gate, up -> f(gate) up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Gated(pub Unary);

impl Operation for Gated {
    fn name(&self) -> &'static str {
        "gated"
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
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = gated([to.scalar(X), to.scalar(Y)], self.0);
        launch_flat(to, kernel, Numbers::new(), &["gate", "up"])
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let (gate, up) = (at.input(0), at.input(1));
        give(at, Wrt::Input(0), |at| one(at, GatedBackward(self.0), &[gate, up, dy], &[]))?;
        give(at, Wrt::Input(1), |at| one(at, *self, &[gate, dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let (gate, up) = (at.input(0), at.input(1));
        if let Some(tangent) = at.tangent(0) {
            let dy = one(at, GatedBackward(self.0), &[gate, up, tangent], &[])?;
            at.add(0, dy)?;
        }
        let Some(tangent) = at.tangent(1) else { return Ok(()) };
        let dy = one(at, *self, &[gate, tangent], &[])?;
        at.add(0, dy)
    }
}

/// `y = f(gate) * up`, in f64.
pub fn reference(f: Unary, gate: &[f32], up: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = (f.apply(f64::from(gate[i])) * f64::from(up[i])) as f32;
    }
}

/// `y = f(gate) * up`, on the device: `n` elements, of the type of operands and of that of results,
/// which is not wider.
#[kernel]
pub fn gated(
    gate: In<{ types[0] }>,
    up: In<{ types[0] }>,
    y: Out<{ types[1] }>,
    n: Arg<u32>,
    types: [Scalar; 2],
    f: Unary,
) {
    sweep::map(["gate", "up"], [gate, up], y, n, |[gate, up]| real::unary(f, gate) * up);
}

/// The functions that models have as gates, and operations of an element.
pub(crate) const GATES: [(Unary, u64); 3] =
    [(Unary::Silu, 5), (Unary::GeluTanh, 25), (Unary::GeluErf, 25)];

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "gated", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(types: [Scalar; 2]) -> Vec<Case> {
        let of = |(f, _)| {
            flat_to(types, gated(types, f), &Numbers::new(), 2, 8.0, move |x, y| {
                reference(f, &x[0], &x[1], y);
            })
        };
        GATES.into_iter().flat_map(of).collect()
    }
    let narrower = [Scalar::F16, Scalar::BF16].map(|to| of([Scalar::F32, to]));
    [every_float(|scalar| of([scalar; 2])), narrower.concat()].concat()
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let of = |(f, flops)| flat_bench(scalar, gated([scalar; 2], f), Numbers::new(), 2, flops);
        GATES.map(of).to_vec()
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
