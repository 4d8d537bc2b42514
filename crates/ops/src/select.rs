//! Row selection: keeps the rows whose logits were asked for. The row numbers are step arguments.

use crate::{Rows, Shape, arity};
use formats::{Error, Result};

/// `x[tokens, width] -> [outputs, width]`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("select", inputs, 1, weights, &[0])?;
    if inputs[0].rows != Rows::Tokens {
        return Err(Error::new("select", "a row per token", "rows already selected"));
    }
    Ok(vec![Shape { rows: Rows::Outputs, width: inputs[0].width }])
}

/// `y[i] = x[rows[i]]`.
pub fn reference(x: &[f32], rows: &[u32], width: usize, y: &mut [f32]) {
    crate::embed::reference(rows, x, width, y);
}
