//! GELU (Hendrycks & Gimpel 2016): `y = x * P(X <= x)` for a normal `X`, in two forms.
//!
//! `erf` is the definition, `y = x / 2 (1 + erf(x / sqrt(2)))`; `tanh` the authors' approximation, which differs from it by up to
//! 5e-4 and is what Gemma and GPT-2 were trained with.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::math;
use crate::sweep::map;
use crate::trial::{every_float, flat, flat_bench};

/// Which of the two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// The definition, by the error function.
    Erf,
    /// The approximation by the hyperbolic tangent.
    Tanh,
}

impl Form {
    /// Both.
    pub const ALL: [Form; 2] = [Form::Erf, Form::Tanh];

    /// One element, in f64.
    pub fn reference(self, x: f64) -> f64 {
        match self {
            Form::Erf => 0.5 * x * (1.0 + math::erf_reference(x / 2f64.sqrt())),
            Form::Tanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }

    /// One element, on the device.
    #[track_caller]
    pub fn apply(self, x: Val<f32>) -> Val<f32> {
        match self {
            Form::Erf => math::gelu_erf(x),
            Form::Tanh => math::gelu_tanh(x),
        }
    }
}

/// `y = gelu(x)`.
pub fn reference(form: Form, x: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = form.reference(f64::from(x[i])) as f32;
    }
}

/// `y = gelu(x)`, on the device: `n` elements.
#[kernel]
pub fn gelu(x: In<{ scalar }>, y: Out<{ scalar }>, n: Arg<u32>, scalar: Scalar, form: Form) {
    map(["x"], [x], y, n, |[x]| form.apply(x));
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "gelu", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |form| {
            flat(scalar, gelu(scalar, form), &Numbers::new(), 1, 8.0, move |x, y| {
                reference(form, &x[0], y);
            })
        };
        Form::ALL.into_iter().flat_map(of).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let of = |form| flat_bench(scalar, gelu(scalar, form), Numbers::new(), 1, 24);
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

    /// Values from the error function and hyperbolic tangent of the C library, through Python.
    #[test]
    fn references_agree_with_published_values() {
        for (x, erf, tanh) in [
            (-1.0, -0.158_655_253_9, -0.158_808_009_4),
            (1.0, 0.841_344_746_1, 0.841_191_990_6),
            (2.0, 1.954_499_736_1, 1.954_597_694_1),
        ] {
            assert!((Form::Erf.reference(x) - erf).abs() < 1e-9, "{x}");
            assert!((Form::Tanh.reference(x) - tanh).abs() < 1e-9, "{x}");
        }
    }
}
