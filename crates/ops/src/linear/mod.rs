//! Linear: `y[t, o] = sum_i weight[o, i] * x[t, i] + bias[o]`. Weights of any stored type; x and y
//! are f32.

pub(crate) mod cases;
pub mod gemm;
mod gemv;
mod input;
pub mod stream;

use crate::gradient::{Forward, Reverse, bilinear, linear_vjp};
use crate::operation::{Operand, Operation, Product, ReferenceCall, Sharding};
use crate::packed::{Format, PackedWeights};
use crate::project::ProjectionOperands;
use crate::{Shape, arity, expect};
use formats::Result;
use tile::case::Spec;
use tile::dsl::*;

pub(crate) use gemv::{
    Ahead, Finisher, Mixed, Overlap, Sums, Sweep, contract, holds, product, product_overlapping,
};
pub use gemv::{GemvSchedule, Held, Task, Traits};
pub use input::{ActivationStorage, bytes};
pub(crate) use input::{Input, Norm};

/// `y[rows, out] = x[rows, width] weight[out, width]' + bias[out]`, summed in f32; the bias is f32.
#[kernel]
pub fn gemv(
    x: In<{ from }>,
    y: Out<{ to }>,
    width: Const<u32>,
    out: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    bias: bool,
    rows: u32,
    schedule: GemvSchedule,
) {
    let weight = PackedWeights::declare("weight", format, width);
    let bias = bias.then(|| <In>::declare("bias"));
    contract(&schedule, rows, &[("weight", format, "out")]);
    holds("y", dim("out") * rows);
    if bias.is_some() {
        holds("bias", dim("out"));
    }
    let input = Input::new(x, rows, width, None, schedule.activations, &[format]);
    let sweep = Sweep::new(vec![weight], out);
    product(&schedule, input, &[sweep], |Sums { output, row, sums, .. }| {
        let sum = bias.map_or(sums[0], |bias| sums[0] + bias.get(output));
        y.set(output + out * row, sum);
    });
}

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] =
    &[Spec { name: "gemv", cases: cases::cases, benches: cases::benches }];

/// `x[rows, in]; weight[out, in], (bias[out]) -> [rows, out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Linear;

/// The operands of the one matrix of a product, with or without a bias.
pub(crate) fn projection(weights: usize) -> ProjectionOperands {
    ProjectionOperands { weight: 0, bias: (weights > 1).then_some(1) }
}

impl Operation for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("linear", inputs, 1, weights, &[1, 2])?;
        let out = check("linear", inputs[0].width, weights[0], weights.get(1).copied())?;
        Ok(vec![Shape { width: out, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let bias = call.weights.get(1).map(Vec::as_slice);
        reference(call.inputs[0], &call.weights[0], bias, call.widths[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Product
    }

    fn product(&self, weights: usize) -> Option<Product> {
        let projections = vec![projection(weights)];
        Some(Product { norm: None, projections, gated: false, residual: None })
    }

    fn shares_type(&self, _: Operand) -> bool {
        false
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        match at.cotangent(0) {
            Some(dy) => linear_vjp(at, dy),
            None => Ok(()),
        }
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        bilinear(at, Linear)
    }
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

/// `x` `[rows, in]` times `weight` `[out, in]` transposed, plus `bias`, into `y` `[rows, out]`, in
/// f64.
pub fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, width: usize, y: &mut [f32]) {
    let out = weight.len() / width;
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(out)) {
        for o in 0..out {
            let row = &weight[o * width..][..width];
            y[o] = (formats::dot(row, x) + bias.map_or(0.0, |b| f64::from(b[o]))) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(super::KERNELS);
    }
}
