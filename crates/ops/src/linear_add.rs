//! A projection added to the residual stream, fused: `y = residual + linear(x)`.

use crate::gradient::{Forward, Reverse, Wrt, bilinear, give, linear_vjp};
use crate::linear::cases::{
    self, Matrix, PROCESSORS, TYPES, activations, numbers, products, shapes,
};
use crate::linear::{GemvSchedule, Input, Sums, Sweep, Task, contract, holds, product_overlapping};
use crate::low_rank::kernels::{Low, Sites};
use crate::operation::{ActivationPrecision, Operand, Operation, Product, ReferenceCall, Sharding};
use crate::packed::{Format, PackedWeights};
use crate::zip::{self, Binary};
use crate::{Shape, arity, linear};
use formats::{Error, Result};
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, Spec, noise, tolerance};
use tile::dsl::*;
use tile::ir::LoadHint;

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "linear_add", cases, benches }];

/// `y[rows, out] = residual[rows, out] + x[rows, width] weight[out, width]' + bias[out]`, summed in
/// f32; the bias is f32. With `low`, what adapters add is added.
#[kernel]
pub fn linear_add(
    x: In<{ from }>,
    residual: In<{ to }>,
    y: Out<{ to }>,
    width: Const<u32>,
    out: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    bias: bool,
    rows: u32,
    schedule: GemvSchedule,
    low: Option<Low>,
) {
    let weight = PackedWeights::declare("weight", format, width);
    let bias = bias.then(|| <In>::declare("bias"));
    contract(&schedule, rows, &[("weight", format, "out")]);
    holds("residual", dim("out") * rows);
    holds("y", dim("out") * rows);
    if bias.is_some() {
        holds("bias", dim("out"));
    }
    let sites = low.map(|low| Sites::declare(low, &[(out, dim("out"))], fixed(rows), 1));
    let input = Input::new(x, rows, width, None, schedule.activations, &[format]);
    let sweep = Sweep::new(vec![weight], out);
    let ahead = |_, output, row| sites.iter().for_each(|sites| sites.ahead(0..1, output, row));
    let (overlap, finisher) = Low::ends(low, &ahead);
    product_overlapping(
        &schedule,
        input,
        &[sweep],
        overlap,
        finisher,
        |Sums { output, row, sums, .. }| {
            let sum = bias.map_or(sums[0], |bias| sums[0] + bias.get(output));
            let sum = sites.as_ref().map_or(sum, |sites| sites.change(0, output, row, sum));
            let at = output + out * row;
            y.set(at, residual.get_with(at, LoadHint::Coherent) + sum);
        },
    );
}

/// `x[rows, in], residual[rows, out]; weight[out, in], (bias[out]) -> [rows, out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LinearAdd;

impl Operation for LinearAdd {
    fn name(&self) -> &'static str {
        "linear_add"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("linear_add", inputs, 2, weights, &[1, 2])?;
        let bias = weights.get(1).copied();
        let out = linear::check("linear_add", inputs[0].width, weights[0], bias)?;
        let y = Shape { width: out, ..inputs[0] };
        if inputs[1] != y {
            let (expected, found) = (format!("{y:?}"), format!("{:?}", inputs[1]));
            return Err(Error::new("linear_add: residual", expected, found));
        }
        Ok(vec![y])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let (bias, mut sum) = (call.weights.get(1).map(Vec::as_slice), call.outputs[0].clone());
        linear::reference(call.inputs[0], &call.weights[0], bias, call.widths[0], &mut sum);
        zip::reference(Binary::Add, call.inputs[1], &sum, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Product
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }

    fn product(&self, weights: usize) -> Option<Product> {
        let projections = vec![linear::projection(weights)];
        Some(Product { norm: None, projections, gated: false, residual: Some(1) })
    }

    fn shares_type(&self, operand: Operand) -> bool {
        operand != Operand::Input(0)
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        linear_vjp(at, dy)?;
        give(at, Wrt::Input(1), |_| Ok(dy))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        bilinear(at, crate::Linear)?;
        match at.tangent(1) {
            Some(residual) => at.add(0, residual),
            None => Ok(()),
        }
    }
}

fn cases() -> Vec<Case> {
    let timed = cases::timed().into_iter().enumerate();
    timed
        .map(|(f, format)| {
            let formats = [format];
            let shape = shapes(format)[f % 4];
            let (types, bias) = (TYPES[f % TYPES.len()], f % 2 == 0);
            let (width, out, rows) = (shape.width, shape.out, shape.rows);
            let int8 = f % 3 > 0;
            let decode = Task::decode(&formats, width as u32, out as u32);
            let task = Task { rows: rows as u32, x: types.0, int8, ..decode };
            let mut schedule = GemvSchedule::pick(&task);
            schedule.threads = 64;
            let matrix = Matrix::new(format, 3, out, width);
            let (x, seen) = activations(types.0, rows * width, None, &schedule);
            let residual = Buffer::floats(types.1, &noise(5, rows * out));
            let biases = noise(11, out);
            let sums = products(&seen, &matrix, bias.then_some(&biases), &vec![1.0; rows], width);
            let want = residual.to_f64().iter().zip(sums).map(|(r, sum)| r + sum).collect();
            let mut buffers =
                vec![x, residual, Buffer::zeros(types.1, rows * out), matrix.buffer()];
            if bias {
                buffers.push(Buffer::floats(Scalar::F32, &biases));
            }
            Case {
                kernel: linear_add(types.0, types.1, format, bias, rows as u32, schedule, None)
                    .record(),
                label: format!("{rows} x {width} -> {out}, {}: {}", schedule.name(), shape.why),
                numbers: numbers(shape.groups, width).with("out", out as u32),
                buffers,
                expected: vec![(2, Expected::Near(want, tolerance(types.1)))],
            }
        })
        .collect()
}

fn benches() -> Vec<Bench> {
    let (width, out) = (14336, 4096);
    let bench = |format: Format| {
        let schedule = GemvSchedule::pick(&Task::decode(&[format], width as u32, out as u32));
        let bytes = cases::matrix_bytes(format, out, width);
        Bench {
            kernel: linear_add(Scalar::BF16, Scalar::F32, format, false, 1, schedule, None)
                .record(),
            label: format!("{} {width} -> {out}", format.name()),
            numbers: numbers(schedule.groups(out as u32, PROCESSORS), width)
                .with("out", out as u32),
            buffers: vec![
                Fill::Noise(Scalar::BF16, width),
                Fill::Noise(Scalar::F32, out),
                Fill::Zeros(Scalar::F32, out),
                Fill::Noise(Scalar::U32, bytes / 4),
            ],
            bytes: (bytes + 2 * width + 8 * out) as u64,
            flops: 2 * (out * width) as u64,
            roof: Bottleneck::Memory,
        }
    };
    cases::timed().into_iter().map(bench).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(super::KERNELS);
    }
}
