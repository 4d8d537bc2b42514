//! The gated half of a SwiGLU feed-forward (Shazeer 2020), fused: `y = silu(gate(n)) * up(n)`, `n = rms_norm(x)` when
//! a norm is part of it.

use crate::project::Project;
use crate::{Shape, expect};
use formats::Result;

/// The norm and the two projections as a [`Project`], which gives their operands.
pub fn projections(norm: Option<f32>) -> Project {
    Project { norm, biases: vec![false, false] }
}

/// `x; (norm), gate[ff, width], up[ff, width] -> [rows, ff]`.
pub fn shape(norm: Option<f32>, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    let shapes = projections(norm).shape(inputs, weights)?;
    expect("gate_up", "width of up", &[shapes[1].width], &[shapes[0].width])?;
    Ok(vec![shapes[0]])
}
