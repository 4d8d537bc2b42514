//! The gated half of a SwiGLU feed-forward (Shazeer 2020): `y = silu(gate) * up`.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::math;
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};

/// `y = silu(gate) * up`, in f64.
pub fn reference(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        let x = f64::from(gate[i]);
        y[i] = (x / (1.0 + (-x).exp()) * f64::from(up[i])) as f32;
    }
}

/// `y = silu(gate) * up`, on the device: `n` elements.
#[kernel]
pub fn silu_mul(
    gate: In<{ scalar }>,
    up: In<{ scalar }>,
    y: Out<{ scalar }>,
    n: Arg<u32>,
    scalar: Scalar,
) {
    map(["gate", "up"], [gate, up], y, n, |[gate, up]| math::silu(gate) * up);
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "silu_mul", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        flat(scalar, silu_mul(scalar), &Numbers::new(), 2, 10.0, |x, y| reference(&x[0], &x[1], y))
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        vec![flat_bench(scalar, silu_mul(scalar), Numbers::new(), 2, 5)]
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
