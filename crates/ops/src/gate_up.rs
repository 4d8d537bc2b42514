//! The gated half of a feed-forward (Shazeer 2020), fused: `y = f(gate(n)) * up(n)`,
//! `n = rms_norm(x)` when a norm is part of it. SwiGLU's `f` is SiLU, GeGLU's GELU.

use crate::linear::cases::{
    self, Matrix, PROCESSORS, TYPES, activations, norm_scales, numbers, products, shapes,
};
use crate::linear::{
    GemvSchedule, Input, Norm, Sums, Sweep, Task, contract, holds, product_overlapping,
};
use crate::low_rank::kernels::{Low, Sites};
use crate::operation::{ActivationPrecision, Operand, Operation, Product, ReferenceCall, Sharding};
use crate::packed::{Format, PackedWeights};
use crate::project::Project;
use crate::{Shape, Unary, expect, gated, real};
use formats::Result;
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, Spec, noise, tolerance};
use tile::dsl::*;

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "gate_up", cases, benches }];

/// `y[rows, out] = act(gate) * up`, `gate = n gate[out, width]'`, `up = n up[out, width]'`;
/// `n = rms_norm(x)` with the f32 weight `norm`, or `x[rows, width]`. A simdgroup sums rows of both
/// matrices side by side. With `low`, what adapters add to either is added before the gate.
#[kernel]
pub fn gate_up(
    x: In<{ from }>,
    y: Out<{ to }>,
    width: Const<u32>,
    out: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    norm: bool,
    act: Unary,
    rows: u32,
    schedule: GemvSchedule,
    low: Option<Low>,
) {
    let norm = norm.then(Norm::declare);
    let weights = ["gate", "up"].map(|name| PackedWeights::declare(name, format, width)).to_vec();
    contract(&schedule, rows, &[("gate", format, "out"), ("up", format, "out")]);
    holds("y", dim("out") * rows);
    if norm.is_some() {
        holds("norm", dim("width"));
    }
    let outs = [(out, dim("out")), (out, dim("out"))];
    let sites = low.map(|low| Sites::declare(low, &outs, fixed(rows), 2));
    let input = Input::new(x, rows, width, norm, schedule.activations, &[format]);
    let sweep = Sweep::new(weights, out);
    let ahead = |_, output, row| sites.iter().for_each(|sites| sites.ahead(0..2, output, row));
    let (overlap, finisher) = Low::ends(low, &ahead);
    product_overlapping(
        &schedule,
        input,
        &[sweep],
        overlap,
        finisher,
        |Sums { output, row, sums, .. }| {
            let changed = |sites: &Sites| [0, 1].map(|m| sites.change(m, output, row, sums[m]));
            let [a, b] = sites.as_ref().map_or([sums[0], sums[1]], changed);
            y.set(output + out * row, gate(act, a) * b);
        },
    );
}

/// The gate of what its matrix gives.
#[track_caller]
pub(crate) fn gate(act: Unary, x: Val<f32>) -> Val<f32> {
    match act {
        // A quotient costs nothing beside a row of weights, and is exact.
        Unary::Silu => x / ((-x).exp() + 1.0),
        _ => real::unary(act, x),
    }
}

/// `x; (norm), gate[ff, width], up[ff, width] -> [rows, ff]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GateUp {
    /// eps of the norm in front, if it was fused.
    pub norm: Option<f32>,
    /// The function of the gate.
    pub act: Unary,
}

impl GateUp {
    /// The norm and the two projections.
    fn both(&self) -> Project {
        Project { norm: self.norm, biases: vec![false, false] }
    }
}

impl Operation for GateUp {
    fn name(&self) -> &'static str {
        "gate_up"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let shapes = self.both().infer(inputs, weights)?;
        expect("gate_up", "width of up", &[shapes[1].width], &[shapes[0].width])?;
        Ok(vec![shapes[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let both = self.both().outputs(call.inputs[0], call.widths[0], call.weights);
        gated::reference(self.act, &both[0], &both[1], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Product
    }

    fn product(&self, weights: usize) -> Option<Product> {
        self.both().product(weights).map(|product| Product { gated: true, ..product })
    }

    fn shares_type(&self, _: Operand) -> bool {
        false
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }
}

const EPS: f32 = 1e-5;

fn cases() -> Vec<Case> {
    let timed = cases::timed().into_iter().enumerate();
    let silu = timed.clone().map(|(f, format)| (f, format, Unary::Silu));
    let gelu = timed.take(3).map(|(f, format)| (f, format, Unary::GeluTanh));
    silu.chain(gelu)
        .map(|(f, format, act)| {
            let formats = [format];
            let shape = shapes(format)[f % 5];
            let (types, norm) = (TYPES[f % TYPES.len()], f % 4 > 0);
            let (width, out, rows) = (shape.width, shape.out, shape.rows);
            let int8 = f % 3 > 0;
            let decode = Task::decode(&formats, width as u32, out as u32);
            let task = Task { rows: rows as u32, x: types.0, pair: true, int8, ..decode };
            let mut schedule = GemvSchedule::pick(&task);
            schedule.threads = 64;
            let (gate, up) =
                (Matrix::new(format, 3, out, width), Matrix::new(format, 4, out, width));
            let weight = noise(13, width);
            let norm = norm.then_some(&weight[..]);
            let (x, seen) = activations(types.0, rows * width, norm, &schedule);
            let scales = norm.map_or(vec![1.0; rows], |_| norm_scales(&x, width, EPS));
            let gates = products(&seen, &gate, None, &scales, width);
            let ups = products(&seen, &up, None, &scales, width);
            let want = gates.iter().zip(ups).map(|(&gate, up)| act.apply(gate) * up).collect();
            let label = format!("{rows} x {width} -> {out}, {}: {}", schedule.name(), shape.why);
            let mut buffers = vec![x, Buffer::zeros(types.1, rows * out)];
            buffers.extend(norm.map(|weight| Buffer::floats(Scalar::F32, weight)));
            buffers.extend([gate.buffer(), up.buffer()]);
            Case {
                kernel: {
                    let norm = norm.is_some();
                    gate_up(types.0, types.1, format, norm, act, rows as u32, schedule, None)
                        .record()
                },
                label: match act {
                    Unary::Silu => label,
                    _ => format!("{label}, {}", act.name()),
                },
                numbers: numbers(shape.groups, width).with("out", out as u32).with_f32("eps", EPS),
                buffers,
                expected: vec![(1, Expected::Near(want, tolerance(types.1)))],
            }
        })
        .collect()
}

fn benches() -> Vec<Bench> {
    let (width, out) = (4096, 14336);
    let bench = |format: Format| {
        let formats = [format];
        let task = Task::decode(&formats, width as u32, out as u32);
        let schedule = GemvSchedule::pick(&Task { pair: true, x: Scalar::F32, ..task });
        let bytes = cases::matrix_bytes(format, out, width);
        Bench {
            kernel: gate_up(
                Scalar::F32,
                Scalar::BF16,
                format,
                true,
                Unary::Silu,
                1,
                schedule,
                None,
            )
            .record(),
            label: format!("{} {width} -> 2 x {out}", format.name()),
            numbers: numbers(schedule.groups(out as u32, PROCESSORS), width)
                .with("out", out as u32)
                .with_f32("eps", EPS),
            buffers: vec![
                Fill::Noise(Scalar::F32, width),
                Fill::Zeros(Scalar::BF16, out),
                Fill::Noise(Scalar::F32, width),
                Fill::Noise(Scalar::U32, bytes / 4),
                Fill::Noise(Scalar::U32, bytes / 4),
            ],
            bytes: (2 * bytes + 8 * width + 2 * out) as u64,
            flops: 4 * (out * width) as u64,
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
