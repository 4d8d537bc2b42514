//! Gradients of norms. With `n` the normed row before its weight and `g = dy weight`:
//! `dx = (g - n mean(g n)) / rms` of an RMS norm, `dx = (g - mean(g) - n mean(g n)) / deviation` of a layer norm.

use crate::operation::{Call, Operation, Sharding};
use crate::{Rows, Shape, arity, expect, rms_norm};
use formats::Result;

/// `x, dy; weight[group] -> dx, (dweight)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormBackward {
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the weight's gradient is an output.
    pub weight: bool,
}

/// `x, dy; weight[width] -> dx, (dweight), (dbias)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormBackward {
    /// Added to the variance.
    pub eps: f32,
    /// Whether the gradients of the weight and of the bias are outputs.
    pub weight: bool,
}

/// Adds a row's gradients to those of the weight and the bias, and gives `dx`, all in f64. Where a norm is not `centred`, its mean
/// is taken to be 0.
fn row(
    x: &[f32],
    dy: &[f32],
    weight: &[f32],
    (eps, centred): (f32, bool),
    sums: [&mut [f64]; 2],
) -> Vec<f64> {
    let width = x.len() as f64;
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (x, dy, weight) = (wide(x), wide(dy), wide(weight));
    let mean = if centred { x.iter().sum::<f64>() / width } else { 0.0 };
    let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width;
    let scale = 1.0 / (square + f64::from(eps)).sqrt();
    let normed: Vec<f64> = x.iter().map(|x| (x - mean) * scale).collect();
    let [dweight, dbias] = sums;
    for i in 0..x.len() {
        dweight[i] += dy[i] * normed[i];
        dbias[i] += dy[i];
    }
    let along = (0..x.len()).map(|i| dy[i] * weight[i] * normed[i]).sum::<f64>() / width;
    let level = (0..x.len()).map(|i| dy[i] * weight[i]).sum::<f64>() / width;
    let level = if centred { level } else { 0.0 };
    (0..x.len()).map(|i| (dy[i] * weight[i] - level - normed[i] * along) * scale).collect()
}

fn reference(call: &mut Call<'_>, how: (f32, bool)) {
    let weight = &call.weights[0];
    let width = weight.len();
    let (mut dweight, mut dbias) = (vec![0f64; width], vec![0f64; width]);
    let rows = call.inputs[0].chunks_exact(width).zip(call.inputs[1].chunks_exact(width));
    for ((x, dy), dx) in rows.zip(call.outputs[0].chunks_exact_mut(width)) {
        let found = row(x, dy, weight, how, [&mut dweight, &mut dbias]);
        dx.iter_mut().zip(found).for_each(|(to, from)| *to = from as f32);
    }
    for (to, from) in call.outputs[1..].iter_mut().zip([dweight, dbias]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from as f32);
    }
}

impl Operation for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        rms_norm::check(self.name(), inputs[0].width, weights[0])?;
        expect(self.name(), "width of dy", &[inputs[1].width], &[inputs[0].width])?;
        let dweight = Shape { rows: Rows::Fixed(1), width: weights[0][0] };
        Ok([inputs[0]].into_iter().chain(self.weight.then_some(dweight)).collect())
    }

    fn reference(&self, call: &mut Call<'_>) {
        reference(call, (self.eps, false));
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }
}

impl Operation for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        expect(self.name(), "weight", weights[0], &[inputs[0].width])?;
        expect(self.name(), "width of dy", &[inputs[1].width], &[inputs[0].width])?;
        let sum = Shape { rows: Rows::Fixed(1), width: weights[0][0] };
        let sums = [sum, sum].into_iter().filter(|_| self.weight);
        Ok([inputs[0]].into_iter().chain(sums).collect())
    }

    fn reference(&self, call: &mut Call<'_>) {
        reference(call, (self.eps, true));
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }
}
