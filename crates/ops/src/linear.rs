//! Linear: `y[t, o] = sum_i weight[o, i] * x[t, i] + bias[o]`. Weights of any stored type; x and y are f32.

use crate::{Shape, arity, expect};
use formats::Result;

/// `x[rows, in]; weight[out, in], (bias[out]) -> [rows, out]`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("linear", inputs, 1, weights, &[1, 2])?;
    let out = check("linear", inputs[0].width, weights[0], weights.get(1).copied())?;
    Ok(vec![Shape { width: out, ..inputs[0] }])
}

/// The output width of a projection from `width`, if its weight and bias fit.
pub(crate) fn check(
    name: &str,
    width: usize,
    weight: &[usize],
    bias: Option<&[usize]>,
) -> Result<usize> {
    let out = weight.first().copied().unwrap_or(0);
    expect(name, "weight", weight, &[out, width])?;
    if let Some(bias) = bias {
        expect(name, "bias", bias, &[out])?;
    }
    Ok(out)
}

/// `x` `[rows, in]` times `weight` `[out, in]` transposed, plus `bias`, into `y` `[rows, out]`, in f64.
pub fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, width: usize, y: &mut [f32]) {
    let out = weight.len() / width;
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(out)) {
        for o in 0..out {
            let row = &weight[o * width..][..width];
            let dot: f64 = row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            y[o] = (dot + bias.map_or(0.0, |b| f64::from(b[o]))) as f32;
        }
    }
}
