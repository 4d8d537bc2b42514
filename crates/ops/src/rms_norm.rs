//! Root-mean-square norm: `y = x / sqrt(mean(x^2) + eps) * weight` (Zhang & Sennrich 2019).
//!
//! A weight narrower than the row normalises each group of that width by itself: the per-head q/k norm.

use crate::{Shape, arity, expect};
use formats::Result;

/// `x[rows, width]; weight[group] -> [rows, width]`, `group` dividing `width`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("rms_norm", inputs, 1, weights, &[1])?;
    check("rms_norm", inputs[0].width, weights[0])?;
    Ok(vec![inputs[0]])
}

/// A norm weight for rows of `width`: rank one, and its length divides `width`.
pub(crate) fn check(name: &str, width: usize, weight: &[usize]) -> Result<()> {
    let group = match weight {
        [group] if *group > 0 => *group,
        _ => width,
    };
    expect(name, "norm weight", weight, &[group])?;
    expect(name, "width modulo norm weight", &[width % group], &[0])
}

/// Normalises every group of `weight.len()` elements of `x` into `y`, in f64.
pub fn reference(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len())) {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        for i in 0..x.len() {
            y[i] = (f64::from(x[i]) * scale * f64::from(weight[i])) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_its_own_mean() {
        let x = [3.0, 4.0, 0.0, 2.0];
        let mut y = [0.0; 4];
        reference(&x, &[1.0, 2.0], 0.0, &mut y);
        let (a, b) = (12.5f32.sqrt(), 2f32.sqrt());
        for (y, want) in y.iter().zip([3.0 / a, 8.0 / a, 0.0, 4.0 / b]) {
            assert!((y - want).abs() < 1e-6, "{y} {want}");
        }
        assert!(shape(&[Shape::tokens(10)], &[&[4]]).is_err());
        assert!(shape(&[Shape::tokens(10)], &[&[0]]).is_err());
    }
}
