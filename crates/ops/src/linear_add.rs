//! A projection added to the residual stream, fused: `y = residual + linear(x)`.

use crate::{Shape, arity, linear};
use formats::{Error, Result};

/// `x[rows, in], residual[rows, out]; weight[out, in], (bias[out]) -> [rows, out]`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("linear_add", inputs, 2, weights, &[1, 2])?;
    let out = linear::check("linear_add", inputs[0].width, weights[0], weights.get(1).copied())?;
    let y = Shape { width: out, ..inputs[0] };
    if inputs[1] != y {
        return Err(Error::new(
            "linear_add: residual",
            format!("{y:?}"),
            format!("{:?}", inputs[1]),
        ));
    }
    Ok(vec![y])
}
