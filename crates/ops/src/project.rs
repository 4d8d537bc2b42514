//! A norm and the projections that share its result: `n = rms_norm(x)`, `y_j = linear_j(n)`. The
//! fused form of q/k/v; with no norm, projections that share an input; with one projection, a norm
//! folded into its consumer.

use crate::linear::cases::{
    self, Matrix, PROCESSORS, TYPES, activations, norm_scales, numbers, products,
};
use crate::linear::{
    GemvSchedule, Input, Norm, Sums, Sweep, Task, contract, holds, product_overlapping,
};
use crate::low_rank::kernels::{Low, Sites};
use crate::operation::{Operand, Operation, Product, ReferenceCall, Sharding};
use crate::packed::{Format, PackedWeights};
use crate::{Shape, arity, linear, rms_norm};
use formats::{DType, Result};
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, Spec, noise, tolerance};
use tile::dsl::*;

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "project", cases, benches }];

/// One matrix of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProjectedMatrix {
    /// How it is packed.
    pub format: Format,
    /// Whether a bias follows its weight.
    pub bias: bool,
}

/// `yJ[rows, outJ] = n weightJ[outJ, width]' + biasJ[outJ]` for each of `matrices`;
/// `n = rms_norm(x)` with the f32 weight `norm`, or `x[rows, width]`.
///
/// Buffers: `x`, (`norm`), then for each matrix `yJ`, `weightJ`, (`biasJ`). The matrices' blocks of
/// rows are numbered through, so that a launch is spread as evenly as the launch of one matrix with
/// all rows. With `low`, what adapters add is added.
#[kernel]
pub fn project(
    x: In<{ from }>,
    width: Const<u32>,
    from: Scalar,
    to: Scalar,
    matrices: &[ProjectedMatrix],
    norm: bool,
    rows: u32,
    schedule: GemvSchedule,
    low: Option<Low>,
) {
    let norm = norm.then(Norm::declare);
    let mut weights = Vec::new();
    let (mut sweeps, mut ends) = (Vec::new(), Vec::new());
    for (j, &ProjectedMatrix { format, bias }) in matrices.iter().enumerate() {
        let (weight, out) = (format!("weight{j}"), format!("out{j}"));
        let rows_of = Const::<u32>::declare(&out);
        let y = <Out>::stored(&format!("y{j}"), to);
        let declared = PackedWeights::declare(&weight, format, width);
        sweeps.push(Sweep::new(vec![declared], rows_of));
        let bias = bias.then(|| <In>::declare(&format!("bias{j}")));
        weights.push((weight, format, out));
        ends.push((y, bias, rows_of));
    }
    let named: Vec<_> = weights.iter().map(|(w, f, out)| (w.as_str(), *f, out.as_str())).collect();
    contract(&schedule, rows, &named);
    if norm.is_some() {
        holds("norm", dim("width"));
    }
    for (j, (_, _, out)) in weights.iter().enumerate() {
        holds(&format!("y{j}"), dim(out) * rows);
        if ends[j].1.is_some() {
            holds(&format!("bias{j}"), dim(out));
        }
    }
    let outs: Vec<_> =
        weights.iter().zip(&ends).map(|((.., n), (.., out))| (*out, dim(n))).collect();
    let sites = low.map(|low| Sites::declare(low, &outs, fixed(rows), 1));
    let formats: Vec<Format> = matrices.iter().map(|m| m.format).collect();
    let input = Input::new(x, rows, width, norm, schedule.activations, &formats);
    let ahead = |sweep: usize, output, row| {
        sites.iter().for_each(|sites| sites.ahead(sweep..sweep + 1, output, row));
    };
    let (overlap, finisher) = Low::ends(low, &ahead);
    product_overlapping(
        &schedule,
        input,
        &sweeps,
        overlap,
        finisher,
        |Sums { sweep, output, row, sums }| {
            let (y, bias, out) = ends[sweep];
            let sum = bias.map_or(sums[0], |bias| sums[0] + bias.get(output));
            let changed = |sites: &Sites| sites.change(sweep, output, row, sum);
            y.set(output + out * row, sites.as_ref().map_or(sum, changed));
        },
    );
}

/// `x; (norm), weight, (bias), weight, (bias).. -> y, y..`: which operands there are.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Project {
    /// The norm's eps, when a norm comes first.
    pub norm: Option<f32>,
    /// For each projection, whether a bias follows its weight.
    pub biases: Vec<bool>,
}

/// Operand indices of one projection within the weights of a [`Project`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProjectionOperands {
    /// Index of the weight.
    pub weight: usize,
    /// Index of the bias.
    pub bias: Option<usize>,
}

impl Project {
    /// Where each projection's operands stand among the weights: the norm, if any, is first.
    pub fn projections(&self) -> impl Iterator<Item = ProjectionOperands> + '_ {
        let mut next = usize::from(self.norm.is_some());
        self.biases.iter().map(move |&bias| {
            let weight = next;
            next += 1 + usize::from(bias);
            ProjectionOperands { weight, bias: bias.then_some(weight + 1) }
        })
    }

    /// Each projection of the rows of `x` `[rows, width]`, normed first if there is a norm.
    pub(crate) fn outputs(&self, x: &[f32], width: usize, weights: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut input = x.to_vec();
        if let Some(eps) = self.norm {
            rms_norm::reference(x, &weights[0], eps, &mut input);
        }
        let one = |p: ProjectionOperands| {
            let (weight, bias) = (&weights[p.weight], p.bias.map(|b| weights[b].as_slice()));
            let mut y = vec![0.0; x.len() / width * (weight.len() / width)];
            linear::reference(&input, weight, bias, width, &mut y);
            y
        };
        self.projections().map(one).collect()
    }
}

impl Operation for Project {
    fn name(&self) -> &'static str {
        "project"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let wanted = usize::from(self.norm.is_some())
            + self.biases.iter().map(|&b| 1 + usize::from(b)).sum::<usize>();
        arity("project", inputs, 1, weights, &[wanted])?;
        let width = inputs[0].width;
        if self.norm.is_some() {
            rms_norm::check("project", width, weights[0])?;
        }
        self.projections()
            .map(|p| {
                let out =
                    linear::check("project", width, weights[p.weight], p.bias.map(|b| weights[b]))?;
                Ok(Shape { width: out, ..inputs[0] })
            })
            .collect()
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        call.outputs = self.outputs(call.inputs[0], call.widths[0], call.weights);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Product
    }

    fn product(&self, _: usize) -> Option<Product> {
        let projections = self.projections().collect();
        Some(Product { norm: self.norm, projections, gated: false, residual: None })
    }

    fn shares_type(&self, operand: Operand) -> bool {
        matches!(operand, Operand::Output(_))
    }
}

const EPS: f32 = 1e-6;

/// Formats of a group, the rows of each, columns and why.
type Group = (&'static [DType], &'static [usize], usize, &'static str);

/// Groups of one format and of several whose runs differ in length.
const GROUPS_TESTED: [Group; 8] = [
    (
        &[DType::BF16, DType::BF16, DType::BF16],
        &[17, 5, 5],
        520,
        "dense, blocks of several matrices",
    ),
    (&[DType::F32, DType::F16], &[9, 3], 288, "runs of 4 and 8 elements"),
    (
        &[DType::Q4K, DType::Q4K, DType::Q6K],
        &[12, 4, 4],
        512,
        "the usual mixture, scales per 32 and 16",
    ),
    (&[DType::Q4_0, DType::Q8_0], &[7, 6], 288, "runs of 32 and 16 elements"),
    (&[DType::Q8_0, DType::Q2K, DType::Q5_1], &[3, 3, 3], 768, "runs of 16, 64 and 32 elements"),
    (&[DType::Q8_0], &[33], 1056, "one matrix with a norm"),
    (&[DType::BF16, DType::Q4K], &[5, 5], 512, "dense beside quantised: no bytes"),
    (&[DType::Q3K, DType::Q5K, DType::Q5_0], &[1, 40, 1], 256, "more rows in the middle"),
];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (g, (dtypes, outs, width, why)) in GROUPS_TESTED.into_iter().enumerate() {
        for (rows, int8) in [(1, false), (1, true), (3, g % 2 == 0)] {
            let i = cases.len();
            let (types, norm) = (TYPES[i % TYPES.len()], i % 5 > 0);
            let formats: Vec<Format> = dtypes.iter().filter_map(|d| Format::of(*d)).collect();
            let part =
                |(j, f): (usize, &Format)| ProjectedMatrix { format: *f, bias: (i + j) % 2 == 0 };
            let matrices: Vec<ProjectedMatrix> = formats.iter().enumerate().map(part).collect();
            let decode = Task::decode(&formats, width as u32, outs.iter().sum::<usize>() as u32);
            let task = Task { rows: rows as u32, x: types.0, int8, ..decode };
            let mut schedule = GemvSchedule::pick(&task);
            schedule.threads = 64;
            let weight = noise(13, width);
            let norm = norm.then_some(&weight[..]);
            let (x, seen) = activations(types.0, rows * width, norm, &schedule);
            let scales = norm.map_or(vec![1.0; rows], |_| norm_scales(&x, width, EPS));
            let mut buffers = vec![x];
            buffers.extend(norm.map(|weight| Buffer::floats(Scalar::F32, weight)));
            let mut numbers = numbers(1 + g as u32 % 3, width).with_f32("eps", EPS);
            let mut expected = Vec::new();
            for (j, &ProjectedMatrix { format, bias }) in matrices.iter().enumerate() {
                let matrix = Matrix::new(format, j as u64 + 3, outs[j], width);
                let biases = noise(11, outs[j]);
                let bias = bias.then_some(&biases[..]);
                let want = products(&seen, &matrix, bias, &scales, width);
                expected.push((buffers.len(), Expected::Near(want, tolerance(types.1))));
                buffers.extend([Buffer::zeros(types.1, rows * outs[j]), matrix.buffer()]);
                buffers.extend(bias.map(|bias| Buffer::floats(Scalar::F32, bias)));
                numbers.set(&format!("out{j}"), outs[j] as u32);
            }
            cases.push(Case {
                kernel: project(
                    types.0,
                    types.1,
                    &matrices,
                    norm.is_some(),
                    rows as u32,
                    schedule,
                    None,
                )
                .record(),
                label: format!("{rows} x {width} -> {outs:?}, {}: {why}", schedule.name()),
                numbers,
                buffers,
                expected,
            });
        }
    }
    cases
}

/// Queries, keys and values of an 8B model.
fn benches() -> Vec<Bench> {
    let (width, outs) = (4096, [4096, 1024, 1024]);
    let bench = |format: Format| {
        let rows = outs.iter().sum::<usize>();
        let formats = [format; 3];
        let task = Task::decode(&formats, width as u32, rows as u32);
        let schedule = GemvSchedule::pick(&Task { x: Scalar::F32, ..task });
        let mut numbers =
            numbers(schedule.groups(rows as u32, PROCESSORS), width).with_f32("eps", EPS);
        let mut buffers = vec![Fill::Noise(Scalar::F32, width), Fill::Noise(Scalar::F32, width)];
        let mut bytes = 8 * width;
        for (j, out) in outs.into_iter().enumerate() {
            let matrix = cases::matrix_bytes(format, out, width);
            buffers.extend([Fill::Zeros(Scalar::F16, out), Fill::Noise(Scalar::U32, matrix / 4)]);
            numbers.set(&format!("out{j}"), out as u32);
            bytes += matrix + 2 * out;
        }
        Bench {
            kernel: project(
                Scalar::F32,
                Scalar::F16,
                &[ProjectedMatrix { format, bias: false }; 3],
                true,
                1,
                schedule,
                None,
            )
            .record(),
            label: format!("{} {width} -> {outs:?}", format.name()),
            numbers,
            buffers,
            bytes: bytes as u64,
            flops: 2 * (rows * width) as u64,
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
