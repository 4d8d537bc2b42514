//! SiLU: `y = x * sigmoid(x) = x / (1 + exp(-x))` (Elfwing et al. 2017).

use crate::{Shape, arity};
use formats::Result;

/// `x -> [rows, width]`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("silu", inputs, 1, weights, &[0])?;
    Ok(vec![inputs[0]])
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
