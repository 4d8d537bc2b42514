//! The gated half of a feed-forward (Shazeer 2020): `y = f(gate) * up`. SwiGLU's `f` is SiLU,
//! GeGLU's GELU.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::map::Unary;
use crate::real;
use crate::sweep;
use crate::trial::{every_float, flat, flat_bench};

/// `y = f(gate) * up`, in f64.
pub fn reference(f: Unary, gate: &[f32], up: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = (f.apply(f64::from(gate[i])) * f64::from(up[i])) as f32;
    }
}

/// `y = f(gate) * up`, on the device: `n` elements.
#[kernel]
pub fn gated(
    gate: In<{ scalar }>,
    up: In<{ scalar }>,
    y: Out<{ scalar }>,
    n: Arg<u32>,
    scalar: Scalar,
    f: Unary,
) {
    sweep::map(["gate", "up"], [gate, up], y, n, |[gate, up]| real::unary(f, gate) * up);
}

/// The functions that models have as gates, and operations of an element.
const GATES: [(Unary, u64); 3] = [(Unary::Silu, 5), (Unary::GeluTanh, 25), (Unary::GeluErf, 25)];

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "gated", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |(f, _)| {
            flat(scalar, gated(scalar, f), &Numbers::new(), 2, 8.0, move |x, y| {
                reference(f, &x[0], &x[1], y);
            })
        };
        GATES.into_iter().flat_map(of).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let of = |(f, flops)| flat_bench(scalar, gated(scalar, f), Numbers::new(), 2, flops);
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
