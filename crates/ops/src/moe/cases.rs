//! Cases and benchmarks of the mixture's kernels.

use super::{
    Routes, combine, group, moe_combine, moe_factors, moe_gate_up, moe_gemm, moe_gemv, moe_group,
    moe_route,
};
use super::{
    bounded_gate, clamped_gate, moe_bias, moe_gemm_turned, product, product_turned, reference,
};
use crate::experts::{Gate, Odds, Routing};
use crate::linear::cases::{Matrix, PROCESSORS, matrix_bytes};
use crate::linear::gemm::GemmSchedule;
use crate::linear::gemm::GemmTypes;
use crate::linear::gemm::cases::{all, bound, rounded};
use crate::linear::{ActivationStorage, GemvSchedule, Task};
use crate::map::Unary;
use crate::packed::Format;
use crate::trial::{flat_bench, flat_to, memory};
use formats::DType;
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::launch::Numbers;
use tile::types::Scalar;

/// Experts of pairs: uneven, one expert without any and one with most.
fn chosen(pairs: usize, experts: usize) -> Vec<u32> {
    let pick = |v: f32| match v {
        v if v < -0.2 => 1,
        v => (v.abs() * experts as f32) as u32,
    };
    let ids = noise(31, pairs).into_iter().map(pick);
    // The second to last has none.
    ids.map(|id| if id as usize + 2 == experts { 0 } else { id.min(experts as u32 - 1) }).collect()
}

// ---------------------------------------------------------------- routes

fn route_case(
    scalar: Scalar,
    (tokens, experts, k): (usize, usize, usize),
    (odds, normalised): (Odds, bool),
    even: bool,
    why: &str,
) -> Case {
    let scale = if odds == Odds::Sigmoid { 2.5 } else { 1.0 };
    let routing = Routing { used: k, odds, normalised, scale };
    let logits: Vec<f32> = noise(tokens as u64 + 3, tokens * experts)
        .into_iter()
        .map(|v| if even { (v * 2.0).round() } else { v * 6.0 })
        .collect();
    let logits = Buffer::floats(scalar, &logits);
    let Routes { ids, weights } = reference::route(&logits.to_f32(), experts, &routing);
    let ids = ids.into_iter().map(f64::from).collect();
    Case {
        kernel: moe_route(scalar, experts.div_ceil(32) as u32, routing).record(),
        label: format!("{tokens} tokens, {k} of {experts}, {}: {why}", scalar),
        numbers: route_numbers(tokens, experts, k),
        buffers: vec![
            logits,
            Buffer::zeros(Scalar::U32, tokens * k),
            Buffer::zeros(Scalar::F32, tokens * k),
        ],
        expected: vec![
            (1, Expected::Exact(ids)),
            (2, Expected::Near(weights, tolerance(Scalar::F32))),
        ],
    }
}

fn route_numbers(tokens: usize, experts: usize, k: usize) -> Numbers {
    Numbers::new()
        .with("tokens", tokens as u32)
        .with("experts", experts as u32)
        .with("top_k", k as u32)
}

pub(super) fn routes() -> Vec<Case> {
    let (one, all) = ((Odds::Softmax, true), (Odds::Softmax, false));
    let near = (Odds::Near { jitter: 0.1 }, false);
    vec![
        route_case(Scalar::F32, (1, 128, 8), one, false, "one token, lanes with four scores"),
        route_case(Scalar::BF16, (5, 64, 6), all, false, "a group and one token more"),
        route_case(Scalar::F16, (3, 8, 2), one, false, "fewer experts than lanes"),
        route_case(Scalar::F32, (9, 60, 4), all, false, "experts that no simdgroup divides"),
        route_case(Scalar::F32, (6, 40, 7), one, true, "ties go to the lower expert"),
        route_case(Scalar::BF16, (2, 5, 5), one, true, "every expert chosen"),
        route_case(Scalar::F32, (3, 1, 1), one, false, "one expert"),
        route_case(Scalar::F32, (5, 48, 4), (Odds::Sigmoid, true), false, "logistic, scaled"),
        route_case(Scalar::F32, (7, 16, 2), near, false, "only scores near the best"),
        route_case(Scalar::F32, (4, 40, 3), near, true, "near scores that tie"),
    ]
}

pub(super) fn route_benches() -> Vec<Bench> {
    let (tokens, experts, k) = (4096, 128, 8);
    let buffers = vec![
        Fill::Noise(Scalar::BF16, tokens * experts),
        Fill::Zeros(Scalar::U32, tokens * k),
        Fill::Zeros(Scalar::F32, tokens * k),
    ];
    let routing = Routing { used: k, odds: Odds::Softmax, normalised: true, scale: 1.0 };
    let kernel = moe_route(Scalar::BF16, 4, routing);
    let numbers = route_numbers(tokens, experts, k);
    vec![memory(kernel, "4096 tokens, 8 of 128", numbers, buffers, 0)]
}

// ---------------------------------------------------------------- groups

fn group_case(pairs: usize, experts: usize, rows: usize, why: &str) -> Case {
    let ids = chosen(pairs, experts);
    let groups = group(&ids, experts, rows);
    let exact = |v: &[u32]| Expected::Exact(v.iter().map(|v| f64::from(*v)).collect());
    Case {
        kernel: moe_group(64).record(),
        label: format!("{pairs} pairs, {experts} experts, blocks of {rows}: {why}"),
        numbers: group_numbers(pairs, experts, rows),
        buffers: vec![
            Buffer::words(&ids),
            Buffer::zeros(Scalar::U32, groups.offsets.len()),
            Buffer::zeros(Scalar::U32, groups.order.len()),
            Buffer::zeros(Scalar::U32, groups.blocks.len()),
        ],
        expected: vec![
            (1, exact(&groups.offsets)),
            (2, exact(&groups.order)),
            (3, exact(&groups.blocks)),
        ],
    }
}

fn group_numbers(pairs: usize, experts: usize, rows: usize) -> Numbers {
    Numbers::new()
        .with("pairs", pairs as u32)
        .with("experts", experts as u32)
        .with("block_rows", rows as u32)
}

pub(super) fn groups() -> Vec<Case> {
    vec![
        group_case(1, 8, 16, "one pair"),
        group_case(4096, 8, 16, "whole shares"),
        group_case(5000, 40, 64, "two steps a share, the last ragged"),
        group_case(20, 64, 16, "more experts than pairs"),
    ]
}

pub(super) fn group_benches() -> Vec<Bench> {
    let (pairs, experts, rows) = (4096 * 8, 128, 128);
    let ids: Vec<u32> = (0..pairs as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 25).collect();
    let table = 2 * (pairs / rows + experts);
    let buffers = vec![
        Fill::These(Buffer::words(&ids)),
        Fill::Zeros(Scalar::U32, experts + 1),
        Fill::Zeros(Scalar::U32, pairs),
        Fill::Zeros(Scalar::U32, table),
    ];
    let numbers = group_numbers(pairs, experts, rows);
    vec![memory(moe_group(128), "4096 tokens, 8 of 128", numbers, buffers, 0)]
}

// ---------------------------------------------------------------- products

/// Sizes of a product of experts.
#[derive(Clone, Copy)]
struct Shape {
    pairs: usize,
    experts: usize,
    share: usize,
    width: usize,
    out: usize,
}

impl Shape {
    fn numbers(&self) -> Numbers {
        Numbers::new()
            .with("pairs", self.pairs as u32)
            .with("experts", self.experts as u32)
            .with("share", self.share as u32)
            .with("width", self.width as u32)
            .with("out", self.out as u32)
    }

    fn label(&self, why: &str) -> String {
        let Shape { pairs, experts, share, width, out } = self;
        format!("{pairs} pairs, {experts} experts, {share} a row, {width} -> {out}: {why}")
    }

    /// A bias for each output of each expert.
    fn bias(&self, seed: u64) -> Vec<f32> {
        noise(seed, self.experts * self.out)
    }

    /// Sums of pairs with the biases of their experts.
    fn shifted(&self, sums: Vec<f64>, ids: &[u32], bias: Option<&[f32]>) -> Vec<f64> {
        let Some(bias) = bias else { return sums };
        let at = |i: usize| ids[i / self.out] as usize * self.out + i % self.out;
        sums.iter().enumerate().map(|(i, sum)| sum + f64::from(bias[at(i)])).collect()
    }

    /// Activations, the experts' matrix, the experts of pairs, and the products of what `operand`
    /// rounds.
    fn data(&self, types: GemmTypes, format: Format) -> (Buffer, Matrix, Vec<u32>, Vec<f64>) {
        let Shape { pairs, experts, share, width, out } = *self;
        let x = Buffer::floats(types.x, &noise(7, pairs.div_ceil(share) * width));
        let matrix = Matrix::new(format, 3, experts * out, width);
        let ids = chosen(pairs, experts);
        let seen = rounded(&x.to_f32(), types.operand);
        let weights = rounded(&matrix.weights, types.operand);
        let want = product(&seen, &weights, &ids, (width, out, share));
        (x, matrix, ids, want)
    }
}

fn gemv_case(
    (x, y): (Scalar, Scalar),
    format: Format,
    shape: Shape,
    staged: bool,
    why: &str,
) -> Case {
    let types = GemmTypes { x, operand: Scalar::F32, y };
    let (input, matrix, ids, want) = shape.data(types, format);
    let activations = if staged {
        ActivationStorage::Staged(shape.width as u32)
    } else {
        ActivationStorage::Direct
    };
    let schedule = few(activations);
    // Some have biases: those whose activations are staged.
    let bias = staged.then(|| shape.bias(5));
    let want = shape.shifted(want, &ids, bias.as_deref());
    let mut buffers = vec![
        input,
        Buffer::zeros(y, shape.pairs * shape.out),
        Buffer::words(&ids),
        matrix.buffer(),
    ];
    buffers.extend(bias.as_ref().map(|bias| Buffer::floats(Scalar::F32, bias)));
    Case {
        kernel: moe_gemv(x, y, format, bias.is_some(), schedule).record(),
        label: shape.label(why),
        numbers: shape.numbers().with("groups", 2),
        buffers,
        expected: vec![(1, Expected::Near(want, tolerance(y)))],
    }
}

/// A schedule for small cases.
fn few(activations: ActivationStorage) -> GemvSchedule {
    GemvSchedule { outputs: 2, loads: 1, threads: 64, resident: 2, activations, whole: false }
}

fn gate_up_case(
    x: Scalar,
    format: Format,
    shape: Shape,
    gate: Gate,
    biased: bool,
    why: &str,
) -> Case {
    let types = GemmTypes { x, operand: Scalar::F32, y: Scalar::F32 };
    let (input, first, ids, a) = shape.data(types, format);
    let second = Matrix::new(format, 4, shape.experts * shape.out, shape.width);
    let b = product(&input.to_f32(), &second.weights, &ids, (shape.width, shape.out, shape.share));
    let biases = [5, 6].map(|seed| biased.then(|| shape.bias(seed)));
    let halves = [(a, &biases[0]), (b, &biases[1])].map(|(sums, bias)| -> Vec<f32> {
        let sums = shape.shifted(sums, &ids, bias.as_deref());
        sums.into_iter().map(|sum| sum as f32).collect()
    });
    let mut want = vec![0.0; shape.pairs * shape.out];
    gate.apply(&halves[0], &halves[1], &mut want);
    let numbers = shape.numbers().with("groups", 2);
    let (act, numbers) = match gate {
        Gate::Plain(act) => (Some(act), numbers),
        Gate::Clamped { limit, alpha } => {
            (None, numbers.with_f32("limit", limit).with_f32("alpha", alpha))
        }
        Gate::Bounded { .. } => unreachable!("has a kernel of its own alone"),
    };
    let schedule = few(ActivationStorage::Staged(shape.width as u32));
    let mut buffers = vec![
        input,
        Buffer::zeros(Scalar::F32, shape.pairs * shape.out),
        Buffer::words(&ids),
        first.buffer(),
        second.buffer(),
    ];
    buffers.extend(biases.iter().flatten().map(|bias| Buffer::floats(Scalar::F32, bias)));
    let want = want.into_iter().map(f64::from).collect();
    Case {
        kernel: moe_gate_up(x, format, act, biased, schedule).record(),
        label: shape.label(why),
        numbers,
        buffers,
        expected: vec![(1, Expected::Near(want, tolerance(Scalar::F32)))],
    }
}

pub(super) fn gate_ups() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let shape = |pairs, share, width, out| Shape { pairs, experts: 5, share, width, out };
    let (q4_k, silu) = (Format::Block(DType::Q4K), Gate::Plain(Unary::Silu));
    let clamped = Gate::Clamped { limit: 0.5, alpha: 1.702 };
    let mxfp4 = Format::Block(DType::Mxfp4);
    vec![
        gate_up_case(F32, Format::Dense(F32), shape(4, 2, 72, 10), silu, false, "SiLU"),
        gate_up_case(BF16, q4_k, shape(4, 2, 256, 9), silu, false, "blocks"),
        gate_up_case(F32, mxfp4, shape(3, 1, 96, 9), clamped, true, "clamped, with biases"),
        gate_up_case(
            F16,
            Format::Dense(F16),
            shape(6, 3, 40, 7),
            Gate::Plain(Unary::GeluTanh),
            true,
            "GELU, with biases",
        ),
    ]
}

pub(super) fn gemvs() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let shape = |pairs, share, width, out| Shape { pairs, experts: 5, share, width, out };
    let block = Format::Block;
    let mlx = Format::Mlx { bits: 4, group: 64, scale: BF16 };
    vec![
        gemv_case((F32, F32), Format::Dense(F32), shape(4, 2, 72, 10), false, "two pairs a token"),
        gemv_case(
            (BF16, BF16),
            Format::Dense(BF16),
            shape(6, 3, 320, 7),
            true,
            "three pairs a token",
        ),
        gemv_case((F16, F32), Format::Dense(F16), shape(3, 1, 40, 5), true, "a row for each pair"),
        gemv_case((BF16, F32), block(DType::Q4K), shape(4, 2, 256, 9), true, "blocks"),
        gemv_case((F32, BF16), block(DType::Q8_0), shape(4, 1, 96, 9), false, "blocks"),
        gemv_case((BF16, BF16), block(DType::Q6K), shape(2, 2, 256, 9), true, "blocks"),
        gemv_case((F16, F16), mlx, shape(2, 2, 128, 9), true, "groups of MLX"),
    ]
}

pub(super) fn gemv_benches() -> Vec<Bench> {
    // One token through the experts of a model with 30B weights, 3B of them active.
    let shape = Shape { pairs: 8, experts: 128, share: 8, width: 2048, out: 768 };
    let timed =
        [Format::Dense(Scalar::BF16), Format::Block(DType::Q4K), Format::Block(DType::Q8_0)];
    timed.into_iter().map(|format| pairs_bench(shape, format, false)).collect()
}

pub(super) fn gate_up_benches() -> Vec<Bench> {
    let qwen = Shape { pairs: 8, experts: 128, share: 8, width: 2048, out: 768 };
    let gpt_oss = Shape { pairs: 4, experts: 32, share: 4, width: 2880, out: 2880 };
    let mixtral = Shape { pairs: 2, experts: 8, share: 2, width: 4096, out: 14336 };
    vec![
        pairs_bench(qwen, Format::Block(DType::Q4K), true),
        pairs_bench(qwen, Format::Dense(Scalar::BF16), true),
        pairs_bench(gpt_oss, Format::Block(DType::Mxfp4), true),
        pairs_bench(mixtral, Format::Block(DType::Q4K), true),
    ]
}

/// A token's experts, or both halves of them.
fn pairs_bench(shape: Shape, format: Format, halves: bool) -> Bench {
    let formats = [format];
    let (cols, out) = (shape.width as u32, shape.out as u32);
    let processors = PROCESSORS / shape.pairs as u32;
    let decode = Task::decode(&formats, cols, out);
    let schedule =
        GemvSchedule::pick(&Task { pair: halves, x: Scalar::BF16, processors, ..decode });
    let ids: Vec<u32> =
        (0..shape.pairs).map(|i| (i * shape.experts / shape.pairs) as u32).collect();
    let bytes = matrix_bytes(format, shape.experts * shape.out, shape.width);
    let matrices = if halves { 2 } else { 1 };
    let kernel = match halves {
        true => moe_gate_up(Scalar::BF16, format, Some(Unary::Silu), false, schedule),
        false => moe_gemv(Scalar::BF16, Scalar::F32, format, false, schedule),
    };
    let mut buffers = vec![
        Fill::Noise(Scalar::BF16, shape.width),
        Fill::Zeros(Scalar::F32, shape.pairs * shape.out),
        Fill::These(Buffer::words(&ids)),
    ];
    buffers.extend((0..matrices).map(|_| Fill::Noise(Scalar::U32, bytes / 4)));
    Bench {
        kernel: kernel.record(),
        label: shape.label(&format.name()),
        numbers: shape.numbers().with("groups", schedule.groups(out, processors)),
        buffers,
        bytes: (matrices * bytes / shape.experts * shape.pairs) as u64,
        flops: 2 * (matrices * shape.pairs * shape.width * shape.out) as u64,
        roof: Bottleneck::Memory,
    }
}

fn gemm_case(
    types: GemmTypes,
    format: Format,
    shape: Shape,
    schedule: GemmSchedule,
    why: &str,
) -> Case {
    let (x, matrix, ids, want) = shape.data(types, format);
    let groups = group(&ids, shape.experts, schedule.bm as usize);
    Case {
        kernel: moe_gemm(types, format, schedule).record(),
        label: shape.label(why),
        numbers: shape.numbers(),
        buffers: vec![
            x,
            Buffer::zeros(types.y, shape.pairs * shape.out),
            Buffer::words(&groups.order),
            Buffer::words(&groups.offsets),
            Buffer::words(&groups.blocks),
            bound(format, types.operand, &matrix),
        ],
        expected: vec![(1, Expected::Near(want, tolerance(types.y)))],
    }
}

pub(super) fn gemms() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let shape = |pairs, share, width, out| Shape { pairs, experts: 5, share, width, out };
    let mixed = GemmTypes { x: F32, operand: F16, y: F32 };
    let exact = GemmTypes { x: BF16, operand: F32, y: F32 };
    let (narrow, small, plain) = (GemmSchedule::NARROW, GemmSchedule::SMALL, GemmSchedule::EXACT);
    let warpgroup = GemmSchedule { bm: 64, bn: 32, simds_m: 4, stages: 3, ..GemmSchedule::SQUARE };
    let (q4_k, q8_0) = (Format::Block(DType::Q4K), Format::Block(DType::Q8_0));
    vec![
        gemm_case(
            all(BF16),
            Format::Dense(BF16),
            shape(60, 4, 72, 40),
            narrow,
            "several blocks an expert",
        ),
        gemm_case(
            all(F16),
            Format::Dense(F16),
            shape(150, 2, 72, 72),
            small,
            "columns in two blocks",
        ),
        gemm_case(mixed, Format::Dense(F16), shape(40, 1, 136, 24), narrow, "a row for each pair"),
        gemm_case(exact, Format::Dense(F32), shape(30, 3, 72, 40), plain, "f32"),
        gemm_case(all(BF16), q4_k, shape(40, 4, 256, 40), narrow, "blocks"),
        gemm_case(all(F16), q8_0, shape(80, 2, 96, 40), small, "blocks"),
        gemm_case(
            all(BF16),
            Format::Dense(BF16),
            shape(90, 3, 136, 40),
            warpgroup,
            "by a warpgroup",
        ),
        gemm_case(
            all(BF16),
            q4_k,
            shape(90, 3, 512, 40),
            GemmSchedule { stages: 2, ..warpgroup },
            "by a warpgroup, converted",
        ),
    ]
}

pub(super) fn gemm_benches() -> Vec<Bench> {
    let shape = Shape { pairs: 4096 * 8, experts: 128, share: 8, width: 2048, out: 768 };
    let bf16 = all(Scalar::BF16);
    let timed = [
        (Format::Dense(Scalar::BF16), GemmSchedule::WIDE),
        (Format::Dense(Scalar::BF16), GemmSchedule::LARGE),
        (Format::Dense(Scalar::BF16), GemmSchedule::MEDIUM),
        (Format::Block(DType::Q4K), GemmSchedule::MEDIUM),
        (Format::Block(DType::Q4K), crate::tuned::w(128, 128, 2)),
    ];
    let bench = |(format, schedule): (Format, GemmSchedule)| {
        let ids: Vec<u32> =
            (0..shape.pairs as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 25).collect();
        let groups = group(&ids, shape.experts, schedule.bm as usize);
        let bytes = matrix_bytes(format, shape.experts * shape.out, shape.width);
        let weight = match format == Format::Dense(bf16.operand) {
            true => Fill::Noise(bf16.operand, bytes / 2),
            false => Fill::Noise(Scalar::U32, bytes / 4),
        };
        let moved = shape.pairs / shape.share * shape.width + shape.pairs * shape.out;
        Bench {
            kernel: moe_gemm(bf16, format, schedule).record(),
            label: shape.label(&format!("{}, {}", format.name(), schedule.name())),
            numbers: shape.numbers(),
            buffers: vec![
                Fill::Noise(bf16.x, shape.pairs / shape.share * shape.width),
                Fill::Zeros(bf16.y, shape.pairs * shape.out),
                Fill::These(Buffer::words(&groups.order)),
                Fill::These(Buffer::words(&groups.offsets)),
                Fill::These(Buffer::words(&groups.blocks)),
                weight,
            ],
            bytes: (bytes + 2 * moved) as u64,
            flops: 2 * (shape.pairs * shape.width * shape.out) as u64,
            roof: Bottleneck::Matrix,
        }
    };
    timed.into_iter().map(bench).collect()
}

/// The product of `x` `[pairs / share, out]` with matrices that lie turned.
fn turned_case(
    types: GemmTypes,
    format: Format,
    shape: Shape,
    (schedule, adds): (GemmSchedule, bool),
    why: &str,
) -> Case {
    let Shape { pairs, experts, share, width, out } = shape;
    let x = Buffer::floats(types.x, &noise(7, pairs.div_ceil(share) * out));
    let matrix = Matrix::new(format, 3, experts * out, width);
    let ids = chosen(pairs, experts);
    let seen = rounded(&x.to_f32(), types.operand);
    let weights = rounded(&matrix.weights, types.operand);
    let mut want = product_turned(&seen, &weights, &ids, (width, out, share));
    let groups = group(&ids, experts, schedule.bm as usize);
    let mut buffers = vec![
        x,
        Buffer::zeros(types.y, pairs * width),
        Buffer::words(&groups.order),
        Buffer::words(&groups.offsets),
        Buffer::words(&groups.blocks),
        matrix.buffer(),
    ];
    if adds {
        let add = Buffer::floats(types.y, &noise(9, pairs * width));
        want.iter_mut().zip(add.to_f64()).for_each(|(y, add)| *y += add);
        buffers.insert(5, add);
    }
    Case {
        kernel: moe_gemm_turned(types, format, adds, schedule).record(),
        label: shape.label(&format!("{}, {why}", format.name())),
        numbers: shape.numbers(),
        buffers,
        expected: vec![(1, Expected::Near(want, tolerance(types.y)))],
    }
}

pub(super) fn turned() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let shape = |pairs, share, width, out| Shape { pairs, experts: 5, share, width, out };
    let wide = GemmTypes { x: BF16, operand: BF16, y: F32 };
    let mixed = GemmTypes { x: F32, operand: BF16, y: F32 };
    let exact = GemmTypes { x: F32, operand: F32, y: F32 };
    let half = GemmTypes { x: F16, operand: F16, y: F16 };
    let (narrow, small, plain) = (GemmSchedule::NARROW, GemmSchedule::SMALL, GemmSchedule::EXACT);
    let single = GemmSchedule { bm: 32, bk: 32, simds_m: 2, simds_n: 2, stages: 1, ..narrow };
    let dense = Format::Dense;
    let block = Format::Block;
    let mlx = Format::Mlx { bits: 4, group: 64, scale: BF16 };
    vec![
        turned_case(wide, dense(BF16), shape(60, 4, 72, 40), (narrow, false), "blocks of pairs"),
        turned_case(mixed, dense(BF16), shape(40, 1, 136, 24), (small, true), "a sum is added"),
        turned_case(half, dense(F16), shape(150, 2, 40, 72), (small, false), "two steps and more"),
        turned_case(mixed, dense(F32), shape(33, 1, 72, 96), (narrow, false), "weights rounded"),
        turned_case(mixed, dense(F16), shape(20, 1, 64, 40), (single, true), "one stage"),
        turned_case(exact, dense(F32), shape(30, 3, 72, 40), (plain, false), "exact"),
        turned_case(exact, dense(BF16), shape(30, 1, 48, 64), (plain, true), "exact, widened"),
        turned_case(exact, block(DType::Q4K), shape(20, 1, 256, 24), (plain, true), "exact"),
        turned_case(exact, block(DType::Mxfp4), shape(40, 2, 64, 24), (plain, false), "exact"),
        turned_case(mixed, block(DType::Q4K), shape(40, 1, 256, 40), (narrow, true), "blocks"),
        turned_case(wide, block(DType::Q8_0), shape(80, 2, 96, 40), (small, false), "blocks"),
        turned_case(wide, block(DType::Q6K), shape(12, 4, 256, 16), (narrow, false), "blocks"),
        turned_case(mixed, block(DType::Mxfp4), shape(24, 1, 96, 72), (small, true), "blocks"),
        turned_case(wide, mlx, shape(24, 2, 128, 24), (narrow, false), "groups of MLX"),
    ]
}

pub(super) fn turned_benches() -> Vec<Bench> {
    let shape = Shape { pairs: 4096 * 8, experts: 128, share: 1, width: 2048, out: 768 };
    let types = GemmTypes { x: Scalar::F32, operand: Scalar::BF16, y: Scalar::F32 };
    let bench = |format: Format| {
        let schedule = GemmSchedule::MEDIUM;
        let ids: Vec<u32> =
            (0..shape.pairs as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 25).collect();
        let groups = group(&ids, shape.experts, schedule.bm as usize);
        let bytes = matrix_bytes(format, shape.experts * shape.out, shape.width);
        let moved = shape.pairs * (shape.width + shape.out);
        Bench {
            kernel: moe_gemm_turned(types, format, false, schedule).record(),
            label: shape.label(&format!("{}, {}", format.name(), schedule.name())),
            numbers: shape.numbers(),
            buffers: vec![
                Fill::Noise(types.x, shape.pairs * shape.out),
                Fill::Zeros(types.y, shape.pairs * shape.width),
                Fill::These(Buffer::words(&groups.order)),
                Fill::These(Buffer::words(&groups.offsets)),
                Fill::These(Buffer::words(&groups.blocks)),
                Fill::Noise(Scalar::U32, bytes / 4),
            ],
            bytes: (bytes + 4 * moved) as u64,
            flops: 2 * (shape.pairs * shape.width * shape.out) as u64,
            roof: Bottleneck::Matrix,
        }
    };
    [Format::Dense(Scalar::BF16), Format::Block(DType::Q4K)].into_iter().map(bench).collect()
}

// ---------------------------------------------------------------- sums

fn combine_case(
    scalar: Scalar,
    to: Scalar,
    tokens: usize,
    k: usize,
    width: usize,
    adds: bool,
    why: &str,
) -> Case {
    let y = Buffer::floats(scalar, &noise(5, tokens * k * width));
    let weights: Vec<f32> = noise(6, tokens * k).into_iter().map(f32::abs).collect();
    let mut want = combine(&y.to_f32(), &weights, k, width);
    let mut buffers =
        vec![y, Buffer::floats(Scalar::F32, &weights), Buffer::zeros(to, tokens * width)];
    if adds {
        let residual = Buffer::floats(to, &noise(8, tokens * width));
        want.iter_mut().zip(residual.to_f64()).for_each(|(y, more)| *y += more);
        buffers.push(residual);
    }
    Case {
        kernel: moe_combine(scalar, to, k as u32, adds).record(),
        label: format!("{tokens} tokens of {k} x {width}, {} to {}: {why}", scalar, to),
        numbers: Numbers::new().with("tokens", tokens as u32).with("width", width as u32),
        buffers,
        expected: vec![(2, Expected::Near(want, tolerance(to)))],
    }
}

pub(super) fn combines() -> Vec<Case> {
    vec![
        combine_case(Scalar::F32, Scalar::F32, 3, 8, 320, true, "rows longer than a group"),
        combine_case(Scalar::BF16, Scalar::BF16, 2, 2, 72, true, "short rows"),
        combine_case(Scalar::F16, Scalar::F32, 1, 6, 1025, false, "an odd row"),
    ]
}

pub(super) fn combine_benches() -> Vec<Bench> {
    let (tokens, k, width) = (4096, 8, 2048);
    let buffers = vec![
        Fill::Noise(Scalar::BF16, tokens * k * width),
        Fill::Noise(Scalar::F32, tokens * k),
        Fill::Zeros(Scalar::BF16, tokens * width),
    ];
    let numbers = Numbers::new().with("tokens", tokens as u32).with("width", width as u32);
    let flops = 2 * (tokens * k * width) as u64;
    let kernel = moe_combine(Scalar::BF16, Scalar::BF16, k as u32, false);
    vec![memory(kernel, "4096 x 8 x 2048", numbers, buffers, flops)]
}

// ---------------------------------------------------------------- biases, gates

pub(super) fn biases() -> Vec<Case> {
    let case = |pairs: usize, experts: usize, out: usize, why: &str| {
        let (ids, y, bias) =
            (chosen(pairs, experts), noise(5, pairs * out), noise(6, experts * out));
        let sum = |(i, y): (usize, &f32)| {
            f64::from(*y) + f64::from(bias[ids[i / out] as usize * out + i % out])
        };
        let want = y.iter().enumerate().map(sum).collect();
        Case {
            kernel: moe_bias().record(),
            label: format!("{pairs} pairs, {experts} experts, {out} each: {why}"),
            numbers: bias_numbers(pairs, experts, out),
            buffers: vec![
                Buffer::words(&ids),
                Buffer::floats(Scalar::F32, &bias),
                Buffer::floats(Scalar::F32, &y),
            ],
            expected: vec![(2, Expected::Near(want, tolerance(Scalar::F32)))],
        }
    };
    vec![case(1, 4, 7, "one short row"), case(9, 5, 300, "rows longer than a group")]
}

pub(super) fn factors() -> Vec<Case> {
    let case = |pairs: usize, experts: usize, why: &str| {
        let (ids, weights, factors) = (chosen(pairs, experts), noise(7, pairs), noise(8, experts));
        let product =
            |(id, weight): (&u32, &f32)| f64::from(*weight) * f64::from(factors[*id as usize]);
        let want = ids.iter().zip(&weights).map(product).collect();
        Case {
            kernel: moe_factors().record(),
            label: format!("{pairs} pairs, {experts} experts: {why}"),
            numbers: factor_numbers(pairs, experts),
            buffers: vec![
                Buffer::words(&ids),
                Buffer::floats(Scalar::F32, &factors),
                Buffer::floats(Scalar::F32, &weights),
            ],
            expected: vec![(2, Expected::Near(want, tolerance(Scalar::F32)))],
        }
    };
    vec![case(2, 3, "part of a group"), case(600, 8, "groups, the last of them in part")]
}

fn factor_numbers(pairs: usize, experts: usize) -> Numbers {
    Numbers::new().with("pairs", pairs as u32).with("experts", experts as u32)
}

pub(super) fn factor_benches() -> Vec<Bench> {
    let (pairs, experts) = (4096 * 8, 128);
    let ids: Vec<u32> = (0..pairs as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 25).collect();
    let buffers = vec![
        Fill::These(Buffer::words(&ids)),
        Fill::Noise(Scalar::F32, experts),
        Fill::Noise(Scalar::F32, pairs),
    ];
    let numbers = factor_numbers(pairs, experts);
    vec![memory(moe_factors(), "4096 tokens, 8 of 128", numbers, buffers, pairs as u64)]
}

fn bias_numbers(pairs: usize, experts: usize, out: usize) -> Numbers {
    Numbers::new()
        .with("pairs", pairs as u32)
        .with("experts", experts as u32)
        .with("out", out as u32)
}

pub(super) fn bias_benches() -> Vec<Bench> {
    let (pairs, experts, out) = (4096 * 4, 32, 2880);
    let ids: Vec<u32> = (0..pairs as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 27).collect();
    let buffers = vec![
        Fill::These(Buffer::words(&ids)),
        Fill::Noise(Scalar::F32, experts * out),
        Fill::Noise(Scalar::F32, pairs * out),
    ];
    let numbers = bias_numbers(pairs, experts, out);
    vec![memory(moe_bias(), "4096 tokens, 4 of 32", numbers, buffers, (pairs * out) as u64)]
}

/// gpt-oss's.
const CLAMPED: (f32, f32) = (7.0, 1.702);

fn gate_numbers() -> Numbers {
    Numbers::new().with_f32("limit", CLAMPED.0).with_f32("alpha", CLAMPED.1)
}

pub(super) fn gates() -> Vec<Case> {
    let gate = Gate::Clamped { limit: CLAMPED.0, alpha: CLAMPED.1 };
    // So far apart that some lie beyond the limit.
    let of = |to| {
        let kernel = clamped_gate(to);
        flat_to([Scalar::F32, to], kernel, &gate_numbers(), 2, 10.0, |x, y| {
            gate.apply(&x[0], &x[1], y);
        })
    };
    [Scalar::F32, Scalar::F16, Scalar::BF16].into_iter().flat_map(of).collect()
}

/// Step 3.5's.
const BOUND: f32 = 7.0;

pub(super) fn bounded_gates() -> Vec<Case> {
    let gate = Gate::Bounded { limit: BOUND };
    // So far apart that some lie beyond the limit.
    let of = |to| {
        let (kernel, numbers) = (bounded_gate(to), Numbers::new().with_f32("limit", BOUND));
        flat_to([Scalar::F32, to], kernel, &numbers, 2, 10.0, |x, y| gate.apply(&x[0], &x[1], y))
    };
    [Scalar::F32, Scalar::F16, Scalar::BF16].into_iter().flat_map(of).collect()
}

pub(super) fn bounded_benches() -> Vec<Bench> {
    let numbers = Numbers::new().with_f32("limit", BOUND);
    vec![flat_bench(Scalar::F32, bounded_gate(Scalar::F32), numbers, 2, 10)]
}

pub(super) fn gate_benches() -> Vec<Bench> {
    vec![flat_bench(Scalar::F32, clamped_gate(Scalar::F32), gate_numbers(), 2, 10)]
}
