//! The gated half of a GeGLU feed-forward (Shazeer 2020): `y = gelu(gate) * up`, in either form of [`crate::gelu`].

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gelu::Form;
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};

/// `y = gelu(gate) * up`, in f64.
pub fn reference(form: Form, gate: &[f32], up: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = (form.reference(f64::from(gate[i])) * f64::from(up[i])) as f32;
    }
}

/// `y = gelu(gate) * up`, on the device: `n` elements.
#[kernel]
pub fn gelu_mul(
    gate: In<{ scalar }>,
    up: In<{ scalar }>,
    y: Out<{ scalar }>,
    n: Arg<u32>,
    scalar: Scalar,
    form: Form,
) {
    map(["gate", "up"], [gate, up], y, n, |[gate, up]| form.apply(gate) * up);
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "gelu_mul", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |form| {
            flat(scalar, gelu_mul(scalar, form), &Numbers::new(), 2, 8.0, move |x, y| {
                reference(form, &x[0], &x[1], y);
            })
        };
        Form::ALL.into_iter().flat_map(of).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let of = |form| flat_bench(scalar, gelu_mul(scalar, form), Numbers::new(), 2, 25);
        Form::ALL.map(of).to_vec()
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
