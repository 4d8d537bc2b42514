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
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::packed::{Format, PackedWeights};
use crate::sweep::{begin, lanes, load, when};
use crate::trial::{near, random};
use crate::{Shape, arity, expect};
use formats::{Error, Result};
use tile::case::{Bench, Bottleneck, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

/// Output rows of a block that a threadgroup computes.
const ROWS: u32 = 32;
/// Simdgroups that share them.
const SIMDS: u32 = 8;

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

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = block_linear(to.scalar(X), to.scalar(Y), to.format(0)?);
        let numbers = self.numbers(to.rows(Y), to.width(X), to.width(Y));
        let bound = [("x", Bound::Value(X)), ("weight", Bound::Weight(0)), ("y", Bound::Value(Y))];
        to.push(kernel, numbers, &bound)?;
        Ok(true)
    }
}

impl BlockLinear {
    /// The numbers of a launch for `x` of `width` columns and `y` of `out`.
    fn numbers(&self, rows: usize, width: usize, out: usize) -> Numbers {
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

/// `y[t, b * out + o] = sum_i weight[b * out + o, i] * x[t, b * width + i]`, summed in f32, on the
/// device: a threadgroup has `ROWS` rows of a block's matrix, and a simdgroup one at a time.
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
) {
    let weight = PackedWeights::declare("weight", format, width);
    launch(Mode::Tile, [dim("blocks"), dim("out").ceil_div(ROWS), dim("rows")], 32 * SIMDS);
    holds("x", dim("rows") * dim("blocks") * dim("width"));
    holds("y", dim("rows") * dim("blocks") * dim("out"));
    holds("weight", format.extent(dim("width")) * dim("blocks") * dim("out"));
    require(Requirement::Divisible(dim("width"), format.step()));
    for aligned in ["x", "weight"] {
        require(Requirement::Aligned(aligned.to_owned(), 16));
    }
    begin();
    let (block, row) = (group_id(), group_id_of(2));
    let run = format.run();
    let wide = u32::from(lanes(from)).min(run);
    let source = (row * blocks + block) * width;
    let first = group_id_of(1) * ROWS;
    range(first + simd_id(), (first + ROWS).min(out)).step(SIMDS).each(|o| {
        let start = weight.row(block * out + o);
        let sum = Var::new(0.0f32);
        range(lane_id(), width / run).step(32u32).each(|r| {
            let weights = weight.read(start, r).floats();
            for (i, weights) in weights.chunks(wide as usize).enumerate() {
                let inputs = load(x, source + r * run + i as u32 * wide, wide as u8);
                for (w, x) in weights.iter().zip(inputs) {
                    sum.set(w.fma(x, sum.get()));
                }
            }
        });
        let total = simd_sum(sum.get());
        when(Order::eq(lane_id(), 0u32), || {
            y.set((row * blocks + block) * out + o, total.cast());
        });
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "block_linear", cases, benches }];

fn cases() -> Vec<Case> {
    let of = |(f, format): (usize, Format)| {
        let step = format.step() as usize;
        let longer = 288usize.next_multiple_of(step);
        let together = format.together();
        [(1, 3, together.max(7), longer, "one row"), (3, 2, 40, step, "rows of two groups")].map(
            |(rows, blocks, out, width, why)| {
                let types = [(Scalar::F32, Scalar::F32), (Scalar::BF16, Scalar::F32)];
                let (from, to) = types[f % types.len()];
                let matrix = Matrix::new(format, 3, blocks * out, width);
                let x = random(from, 5, rows * blocks * width);
                let mut y = vec![0.0; rows * blocks * out];
                reference(&x.to_f32(), &matrix.weights, width, blocks, &mut y);
                Case {
                    kernel: block_linear(from, to, format).record(),
                    label: format!(
                        "{rows} x {blocks} of {width} -> {out}, {} {from} to {to}, {why}",
                        format.name()
                    ),
                    numbers: BlockLinear { blocks }.numbers(rows, blocks * width, blocks * out),
                    buffers: vec![x, Buffer::zeros(to, y.len()), matrix.buffer()],
                    expected: vec![(1, near(to, &y))],
                }
            },
        )
    };
    Format::all().into_iter().enumerate().flat_map(of).collect()
}

/// DeepSeek-V2's 128 heads, from 128 elements to latents of 512.
fn benches() -> Vec<Bench> {
    let (blocks, width, out) = (128, 128, 512);
    let of = |format: Format| {
        let bytes = matrix_bytes(format, blocks * out, width);
        let scalar = Scalar::BF16;
        Bench {
            kernel: block_linear(scalar, scalar, format).record(),
            label: format!("{blocks} of {width} -> {out}, {}", format.name()),
            numbers: BlockLinear { blocks }.numbers(1, blocks * width, blocks * out),
            buffers: vec![
                Fill::Noise(scalar, blocks * width),
                Fill::Zeros(scalar, blocks * out),
                Fill::Noise(Scalar::U32, bytes / 4),
            ],
            bytes: (bytes + 2 * blocks * (width + out)) as u64,
            flops: 2 * (blocks * out * width) as u64,
            roof: Bottleneck::Memory,
        }
    };
    timed()
        .into_iter()
        .filter(|format| (width as u32).is_multiple_of(format.step()))
        .map(of)
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::trial::check(super::KERNELS);
    }
}
