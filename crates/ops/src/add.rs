//! Addition of equal shapes: the residual stream.

use crate::{Shape, arity};
use formats::{Error, Result};

/// `a, b -> [rows, width]`, both of one shape. Shared by every two-operand elementwise operation.
pub(crate) fn shape(name: &str, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity(name, inputs, 2, weights, &[0])?;
    if inputs[0] != inputs[1] {
        return Err(Error::new(name, format!("{:?}", inputs[0]), format!("{:?}", inputs[1])));
    }
    Ok(vec![inputs[0]])
}

/// `y = a + b`.
pub fn reference(a: &[f32], b: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = a[i] + b[i];
    }
}
