//! A product with a block-diagonal matrix: each block of columns, such as a head, is multiplied
//! with a matrix of its own.
//!
//! ```text
//! y[t, b * out + o] = sum_i weight[b * out + o, i] * x[t, b * in + i]
//! ```
//!
//! Multi-head latent attention that caches latents (DeepSeek-AI, DeepSeek-V2, 2024, 2.1.2) takes
//! the queries of its heads into the space of latents so, and what they attended to back.

use crate::linear::cases::{Matrix, matrix_bytes, timed};
use crate::linear::gemm::cases::{bound, rounded};
use crate::linear::gemm::multiply::{Results, product, store};
use crate::linear::gemm::stage::{Ring, Rows, Side};
use crate::linear::gemm::{self, GemmSchedule, GemmTypes, Machine};
use crate::linear::{self, GemvSchedule, Input, Sums, Sweep, Task, holds};
use crate::operation::{Operand, Operation, ReferenceCall, Sharding};
use crate::packed::{Format, PackedWeights};
use crate::sweep::begin;
use crate::trial::{near, random};
use crate::tuned::{HOPPER, NVIDIA};
use crate::{Shape, arity, expect};
use formats::{Error, Result};
use tile::case::{Bench, Bottleneck, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

/// `x[rows, blocks * in]; weight[blocks * out, in] -> [rows, blocks * out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BlockLinear {
    /// Blocks on the diagonal.
    pub blocks: usize,
}

impl Operation for BlockLinear {
    fn name(&self) -> &'static str {
        "block_linear"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let name = self.name();
        arity(name, inputs, 1, weights, &[1])?;
        let &[rows, columns] = weights[0] else {
            return Err(Error::new(name, "a matrix", format!("{:?}", weights[0])));
        };
        expect(name, "width modulo blocks", &[inputs[0].width % self.blocks.max(1)], &[0])?;
        expect(name, "columns", &[columns], &[inputs[0].width / self.blocks.max(1)])?;
        expect(name, "rows modulo blocks", &[rows % self.blocks.max(1)], &[0])?;
        Ok(vec![Shape { width: rows, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0] / self.blocks;
        reference(call.inputs[0], &call.weights[0], width, self.blocks, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Heads { weights: true }
    }

    fn divide_heads(&mut self, ranks: usize) {
        self.blocks /= ranks;
    }

    fn shares_type(&self, _: Operand) -> bool {
        false
    }
}

impl BlockLinear {
    /// The numbers of a launch for `x` of `width` columns and `y` of `out`.
    pub fn numbers(&self, rows: usize, width: usize, out: usize) -> Numbers {
        Numbers::new()
            .with("rows", rows as u32)
            .with("blocks", self.blocks as u32)
            .with("width", (width / self.blocks) as u32)
            .with("out", (out / self.blocks) as u32)
    }
}

/// Rows of `x`, of `blocks * width` elements, times the `blocks` matrices `weight` `[blocks * out,
/// width]`, transposed, into `y` `[rows, blocks * out]`, in f64.
fn reference(x: &[f32], weight: &[f32], width: usize, blocks: usize, y: &mut [f32]) {
    let out = weight.len() / (blocks * width);
    let blocks = weight.chunks_exact(out * width).cycle();
    for ((x, y), block) in x.chunks_exact(width).zip(y.chunks_exact_mut(out)).zip(blocks) {
        for (y, w) in y.iter_mut().zip(block.chunks_exact(width)) {
            *y = formats::dot(w, x) as f32;
        }
    }
}

/// `y[t, b * out + o] = sum_i weight[b * out + o, i] * x[t, b * width + i]`, summed in f32, of few
/// rows: a threadgroup stays with one row and block.
#[kernel]
pub fn block_linear(
    x: In<{ from }>,
    y: Out<{ to }>,
    blocks: Const<u32>,
    width: Const<u32>,
    out: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    schedule: GemvSchedule,
) {
    let weight = PackedWeights::declare("weight", format, width);
    linear::contract(&schedule, 1, &[("weight", format, "out")]);
    launch(Mode::Vector, [dim("groups"), dim("blocks"), dim("rows")], schedule.threads);
    holds("x", dim("rows") * dim("blocks") * dim("width"));
    holds("y", dim("rows") * dim("blocks") * dim("out"));
    holds("weight", format.extent(dim("width")) * dim("blocks") * dim("out"));
    let block = group_id_of(1);
    let place = group_id_of(2) * blocks + block;
    let input = Input::new(x, 1, width, None, schedule.activations, &[format]);
    let sweep = Sweep::new(vec![weight.starting_at(block * out)], out);
    linear::product(
        &schedule,
        input.starting_at(place),
        &[sweep],
        |Sums { output, sums, .. }| {
            y.set(place * out + output, sums[0]);
        },
    );
}

/// As [`block_linear`], of many rows: a threadgroup computes a tile of one block's results.
/// Operands are rounded to their type.
#[kernel]
pub fn block_gemm(
    x: In<{ types.x }>,
    y: Out<{ types.y }>,
    rows: Arg<u32>,
    blocks: Const<u32>,
    width: Const<u32>,
    out: Const<u32>,
    types: GemmTypes,
    format: Format,
    schedule: GemmSchedule,
) {
    let GemmSchedule { bm, bn, .. } = schedule;
    let tiles = dim("rows").ceil_div(bm) * dim("out").ceil_div(bn);
    launch(Mode::Tile, [tiles, dim("blocks"), fixed(1)], schedule.threads());
    gemm::contract("rows", types.operand, format, dim("out") * dim("blocks"));
    holds("x", dim("rows") * dim("blocks") * dim("width"));
    holds("y", dim("rows") * dim("blocks") * dim("out"));
    require(Requirement::AtMost(dim("blocks"), 1 << 16));
    begin();
    let across = (out + (bn - 1)) / bn;
    let (tile_m, tile_n) = gemm::block(group_id(), (rows + (bm - 1)) / bm, across);
    let (offset, first_row, first_out) = (group_id_of(1), tile_m * bm, tile_n * bn);
    let own = Rows::Every { begin: first_row, end: rows, apart: blocks, offset };
    let a = Side::activations(types.operand, x, own, width, &schedule);
    let base = offset * out;
    let columns = Rows::Span(base + first_out, base + out);
    let b = Side::weights(types.operand, "weight", format, columns, width, &schedule);
    product(&Ring { schedule, a, b, width }, |Results { row, col, values }| {
        let (row, col) = (first_row + row, first_out + col);
        if row < rows && col < out {
            store(y, row * blocks + offset, col, out, &values);
        }
    });
}

/// The schedule of [`block_gemm`] for `rows` rows and `blocks` blocks of `out` results; `alike`:
/// one under which a row's sums do not depend on how many rows there are.
pub fn pick_tiles(
    (rows, blocks, out): (u32, u32, u32),
    operand: Scalar,
    format: Format,
    machine: Machine,
    alike: bool,
) -> GemmSchedule {
    let parallel = machine.parallel.div_ceil(blocks.max(1));
    let pick = if alike { GemmSchedule::alike } else { GemmSchedule::pick };
    pick((rows, out), operand, format, Machine { parallel, ..machine })
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "block_linear", cases, benches },
    Spec { name: "block_gemm", cases: tile_cases, benches: tile_benches },
];

fn cases() -> Vec<Case> {
    let of = |(f, format): (usize, Format)| {
        let step = format.step() as usize;
        let longer = 288usize.next_multiple_of(step);
        let together = format.together();
        [(1, 3, together.max(7), longer, "one row"), (3, 2, 40, step, "three rows")].map(
            |(rows, blocks, out, width, why)| {
                let types = [(Scalar::F32, Scalar::F32), (Scalar::BF16, Scalar::F32)];
                let (from, to) = types[f % types.len()];
                let matrix = Matrix::new(format, 3, blocks * out, width);
                let x = random(from, 5, rows * blocks * width);
                let mut y = vec![0.0; rows * blocks * out];
                reference(&x.to_f32(), &matrix.weights, width, blocks, &mut y);
                let formats = [format];
                let task = Task {
                    x: from,
                    int8: false,
                    tuned: &NVIDIA,
                    ..Task::decode(&formats, width as u32, out as u32)
                };
                let schedule = GemvSchedule::pick(&task);
                let groups = schedule.groups(out as u32, task.processors);
                let numbers = BlockLinear { blocks }.numbers(rows, blocks * width, blocks * out);
                Case {
                    kernel: block_linear(from, to, format, schedule).record(),
                    label: format!(
                        "{rows} x {blocks} of {width} -> {out}, {} {from} to {to}, {why}",
                        format.name()
                    ),
                    numbers: numbers.with("groups", groups),
                    buffers: vec![x, Buffer::zeros(to, y.len()), matrix.buffer()],
                    expected: vec![(1, near(to, &y))],
                }
            },
        )
    };
    Format::all().into_iter().enumerate().flat_map(of).collect()
}

fn tile_cases() -> Vec<Case> {
    let types = [
        GemmTypes { x: Scalar::F32, operand: Scalar::F32, y: Scalar::F32 },
        GemmTypes { x: Scalar::BF16, operand: Scalar::BF16, y: Scalar::BF16 },
        GemmTypes { x: Scalar::F32, operand: Scalar::F16, y: Scalar::F32 },
    ];
    let of = |(f, format): (usize, Format)| {
        let step = (format.step() as usize).max(8);
        [(17, 3, 40, step, "a row more than a tile"), (5, 2, 72, 2 * step, "few rows")].map(
            |(rows, blocks, out, width, why)| {
                let types = types[f % types.len()];
                let mut matrix = Matrix::new(format, 3, blocks * out, width);
                let x = random(types.x, 5, rows * blocks * width);
                let weight = bound(format, types.operand, &matrix);
                matrix.weights = rounded(&matrix.weights, types.operand);
                let seen = rounded(&x.to_f32(), types.operand);
                let mut y = vec![0.0; rows * blocks * out];
                reference(&seen, &matrix.weights, width, blocks, &mut y);
                let tuned = &NVIDIA;
                let machine = Machine { shared: 32 << 10, parallel: 8, wgmma: false, tuned };
                let sizes = (rows as u32, blocks as u32, out as u32);
                let schedule = pick_tiles(sizes, types.operand, format, machine, f % 2 == 0);
                Case {
                    kernel: block_gemm(types, format, schedule).record(),
                    label: format!(
                        "{rows} x {blocks} of {width} -> {out}, {} {}, {why}",
                        format.name(),
                        schedule.name()
                    ),
                    numbers: BlockLinear { blocks }.numbers(rows, blocks * width, blocks * out),
                    buffers: vec![x, Buffer::zeros(types.y, y.len()), weight],
                    expected: vec![(1, near(types.y, &y))],
                }
            },
        )
    };
    Format::all().into_iter().enumerate().flat_map(of).collect()
}

/// Blocks, their columns and their results: DeepSeek-V2's heads into latents, and GLM-4.7-Flash's
/// into latents and back.
const HEADS: [(usize, usize, usize); 3] = [(128, 128, 512), (20, 192, 512), (20, 512, 256)];

fn bench(
    format: Format,
    kernel: Recipe,
    rows: usize,
    (blocks, width, out): (usize, usize, usize),
) -> Bench {
    let (bytes, scalar) = (matrix_bytes(format, blocks * out, width), Scalar::BF16);
    let (n, m) = (rows * blocks * width, rows * blocks * out);
    Bench {
        kernel: kernel.record(),
        label: format!("{rows} x {blocks} of {width} -> {out}, {}", format.name()),
        numbers: BlockLinear { blocks }.numbers(rows, blocks * width, blocks * out),
        buffers: vec![
            Fill::Noise(scalar, n),
            Fill::Zeros(scalar, m),
            Fill::Noise(Scalar::U32, bytes / 4),
        ],
        bytes: (bytes + 2 * (n + m)) as u64,
        flops: 2 * (n * out) as u64,
        roof: if rows > 128 { Bottleneck::Matrix } else { Bottleneck::Memory },
    }
}

/// Formats that have whole rows of these sizes.
fn fitting(width: usize) -> Vec<Format> {
    timed().into_iter().filter(|format| (width as u32).is_multiple_of(format.step())).collect()
}

fn benches() -> Vec<Bench> {
    let of = |sizes: (usize, usize, usize)| {
        let (blocks, width, out) = sizes;
        fitting(width).into_iter().map(move |format| {
            let formats = [format];
            let task = Task::decode(&formats, width as u32, out as u32);
            let processors = 132u32.div_ceil(blocks as u32);
            let task = Task { x: Scalar::BF16, int8: false, processors, ..task };
            let schedule = GemvSchedule::pick(&task);
            let kernel = block_linear(Scalar::BF16, Scalar::BF16, format, schedule);
            let mut bench = bench(format, kernel, 1, sizes);
            bench.numbers.set("groups", schedule.groups(out as u32, processors));
            bench
        })
    };
    HEADS.into_iter().flat_map(of).collect()
}

fn tile_benches() -> Vec<Bench> {
    let machine = Machine { shared: 227 << 10, parallel: 132, wgmma: true, tuned: &HOPPER };
    let of = |sizes: (usize, usize, usize)| {
        let (blocks, width, out) = sizes;
        let all = fitting(width)
            .into_iter()
            .flat_map(|format| [16, 128, 2048].map(|rows: usize| (format, rows)));
        all.map(move |(format, rows)| {
            let of = (rows as u32, blocks as u32, out as u32);
            let schedule = pick_tiles(of, Scalar::BF16, format, machine, rows < 2048);
            let kernel = block_gemm(gemm::cases::all(Scalar::BF16), format, schedule);
            bench(format, kernel, rows, sizes)
        })
    };
    HEADS.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::trial::check(super::KERNELS);
    }
}
