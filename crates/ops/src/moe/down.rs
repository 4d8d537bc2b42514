//! `moe_down`: what the second matrices of a token's experts give, added up as it is made.
//!
//! A row of the result is one long product: the row of the token's first expert with what that
//! expert's halves became, then the row of the next, each weighed by its share. So lanes go through
//! as many columns as all of a token's experts have, one expert behind the other in the order in
//! which they were chosen, and nothing of a pair is written to memory.

use formats::DType;
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::dsl::*;
use tile::ir::LoadHint;
use tile::launch::{Mode, Numbers, Requirement};

use super::reference::{combine, product};
use crate::linear::cases::{Matrix, PROCESSORS, matrix_bytes};
use crate::linear::{
    self, ActivationStorage, GemvSchedule, Input, Mixed, Sums, Sweep, Task, holds,
};
use crate::packed::{Format, PackedWeights};

/// What [`moe_down`] adds up, beside products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DownParts {
    /// Experts of a token.
    pub used: u32,
    /// Whether experts have biases.
    pub bias: bool,
    /// Whether there is a residual.
    pub adds: bool,
    /// Whether the kernel in front lets this one start when all that it reads itself is there,
    /// experts and their shares among it, as [`super::moe_gate_up`] does: matrices are then read
    /// before that kernel is waited for.
    pub early: bool,
}

/// The schedule for tokens of `used` experts, for a task of one expert's columns: whatever the
/// number of tokens, so that a token's bits do not depend on it.
pub fn pick_down(task: &Task, used: u32, shared: u32) -> GemvSchedule {
    let task = Task { cols: task.cols * used, rows: 1, ..*task };
    GemvSchedule::alike(&task, 1, shared).1
}

/// `y[t, o] = sum_j shares[t, j] (sum_i weight[ids[t, j], o, i] x[t used + j, i] + bias[ids[t, j],
/// o]) + residual[t, o]`.
///
/// `x` `[tokens * used, width]`, `y` and `residual` `[tokens, out]`, `weight` `[experts * out,
/// width]`, `ids` and `shares` `[tokens, used]`, `bias` `[experts, out]` in f32. `residual` may be
/// `y`.
#[kernel]
pub fn moe_down(
    x: In<{ from }>,
    y: Out<{ to }>,
    ids: In<u32>,
    shares: In<f32>,
    width: Const<u32>,
    out: Const<u32>,
    experts: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    parts: DownParts,
    schedule: GemvSchedule,
) {
    let DownParts { used, bias, adds, early } = parts;
    let weight = PackedWeights::declare("weight", format, width);
    let bias = bias.then(|| <In>::declare("bias"));
    let residual = adds.then(|| <In>::stored("residual", to));
    launch(Mode::Vector, [dim("groups"), dim("tokens"), fixed(1)], schedule.threads);
    holds("x", dim("tokens") * used * dim("width"));
    holds("y", dim("tokens") * dim("out"));
    holds("ids", dim("tokens") * used);
    holds("shares", dim("tokens") * used);
    holds("weight", format.extent(dim("width")) * dim("out") * dim("experts"));
    if bias.is_some() {
        holds("bias", dim("experts") * dim("out"));
    }
    if residual.is_some() {
        holds("residual", dim("tokens") * dim("out"));
    }
    for name in ["x", "weight"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    require(Requirement::Divisible(dim("width"), format.step()));
    require(Requirement::Divisible(dim("width") * used, schedule.step(format)));
    if let Some(capacity) = schedule.activations.capacity() {
        require(Requirement::AtMost(dim("width") * used, capacity));
    }
    if !early {
        grid_wait();
    }
    let token = group_id_of(1);
    let own = token * used + lane_id().min(used - 1);
    let expert = ids.get_with(own, LoadHint::Coherent).min(experts - 1u32);
    let (first, factor) = (expert * out, shares.get_with(own, LoadHint::Coherent));
    let mixed = Mixed { count: used, width, first, factor, bias };
    let input = Input::new(x, 1, width * used, None, schedule.activations, &[format]);
    let sweep = Sweep { mixed: Some(mixed), ..Sweep::new(vec![weight], out) };
    linear::product(
        &schedule,
        input.starting_at(token),
        &[sweep],
        |Sums { output, sums, .. }| {
            let at = token * out + output;
            let more = residual.map(|residual| residual.get_with(at, LoadHint::Coherent));
            y.set(at, more.map_or(sums[0], |more| more + sums[0]));
        },
    );
}

/// Sizes of a mixture's last products.
#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    used: usize,
    experts: usize,
    width: usize,
    out: usize,
}

impl Shape {
    fn numbers(&self, groups: u32) -> Numbers {
        Numbers::new()
            .with("tokens", self.tokens as u32)
            .with("experts", self.experts as u32)
            .with("width", self.width as u32)
            .with("out", self.out as u32)
            .with("groups", groups)
    }

    fn label(&self, rest: &str) -> String {
        let Shape { tokens, used, experts, width, out } = self;
        format!("{tokens} tokens, {used} of {experts}, {width} -> {out}: {rest}")
    }
}

fn case(
    (from, to): (Scalar, Scalar),
    format: Format,
    shape: Shape,
    schedule: GemvSchedule,
    [bias, adds, early]: [bool; 3],
    why: &str,
) -> Case {
    let Shape { tokens, used, experts, width, out } = shape;
    let pairs = tokens * used;
    let x = Buffer::floats(from, &noise(7, pairs * width));
    let seen = match schedule.activations {
        ActivationStorage::Bytes(_) => linear::bytes(&x.to_f32()),
        _ => x.to_f32(),
    };
    let matrix = Matrix::new(format, 3, experts * out, width);
    // Neighbouring tokens have some experts in common.
    let ids: Vec<u32> = (0..pairs).map(|p| ((p / used + p % used * 2) % experts) as u32).collect();
    let shares: Vec<f32> = noise(6, pairs).into_iter().map(f32::abs).collect();
    let biases = bias.then(|| noise(5, experts * out));
    let mut outer = product(&seen, &matrix.weights, &ids, (width, out, 1));
    if let Some(biases) = &biases {
        for (i, outer) in outer.iter_mut().enumerate() {
            *outer += f64::from(biases[ids[i / out] as usize * out + i % out]);
        }
    }
    let outer: Vec<f32> = outer.into_iter().map(|v| v as f32).collect();
    let mut want = combine(&outer, &shares, used, out);
    let mut buffers = vec![
        x,
        Buffer::zeros(to, tokens * out),
        Buffer::words(&ids),
        Buffer::floats(Scalar::F32, &shares),
        matrix.buffer(),
    ];
    buffers.extend(biases.map(|biases| Buffer::floats(Scalar::F32, &biases)));
    if adds {
        let residual = Buffer::floats(to, &noise(8, tokens * out));
        want.iter_mut().zip(residual.to_f64()).for_each(|(y, more)| *y += more);
        buffers.push(residual);
    }
    let parts = DownParts { used: used as u32, bias, adds, early };
    Case {
        kernel: moe_down(from, to, format, parts, schedule).record(),
        label: shape.label(&format!("{}, {}: {why}", format.name(), schedule.name())),
        numbers: shape.numbers(2),
        buffers,
        expected: vec![(1, Expected::Near(want, tolerance(to)))],
    }
}

pub(super) fn cases() -> Vec<Case> {
    use ActivationStorage::{Bytes, Direct, Staged};
    use Scalar::{BF16, F16, F32};
    let shape = |tokens, used, experts, width, out| Shape { tokens, used, experts, width, out };
    let with = |outputs, loads, activations, whole| GemvSchedule {
        outputs,
        loads,
        threads: 64,
        resident: 2,
        activations,
        whole,
    };
    let (dense, block) = (Format::Dense, Format::Block);
    let mlx = Format::Mlx { bits: 4, group: 64, scale: BF16 };
    let mut cases = vec![
        case(
            (F32, F32),
            dense(F32),
            shape(2, 2, 5, 72, 10),
            with(2, 1, Direct, false),
            [false, true, false],
            "steps of two experts",
        ),
        case(
            (F32, F32),
            dense(BF16),
            shape(1, 8, 9, 64, 7),
            with(1, 2, Staged(512), true),
            [false, true, true],
            "whole steps",
        ),
        case(
            (BF16, F32),
            dense(F16),
            shape(3, 1, 4, 40, 5),
            with(4, 1, Staged(256), false),
            [true, false, true],
            "one expert",
        ),
        case(
            (F32, F32),
            block(DType::Q4K),
            shape(1, 8, 20, 768, 9),
            with(1, 2, Bytes(6144), true),
            [false, true, true],
            "bytes, whole steps",
        ),
        case(
            (F32, F32),
            block(DType::Mxfp4),
            shape(2, 4, 6, 96, 9),
            with(2, 1, Bytes(512), false),
            [true, true, true],
            "bytes, with biases",
        ),
        case(
            (F32, F32),
            block(DType::Q4K),
            shape(2, 2, 4, 256, 9),
            with(4, 1, Direct, false),
            [true, false, false],
            "read in place, with biases",
        ),
        case(
            (F16, F16),
            mlx,
            shape(2, 3, 4, 128, 6),
            with(2, 1, Staged(512), false),
            [false, true, false],
            "groups of MLX",
        ),
        case(
            (F32, BF16),
            block(DType::Q8_0),
            shape(1, 32, 33, 32, 5),
            with(1, 1, Bytes(1024), true),
            [true, true, true],
            "as many experts as there may be",
        ),
    ];
    // Every format, as it is read on both kinds of GPU.
    for (i, format) in Format::all().into_iter().enumerate() {
        let width = format.step().max(32) as usize * (1 + i % 2);
        let shape = shape(1 + i % 2, 3, 4, width, 5);
        let tuned = [&crate::tuned::HOPPER, &crate::tuned::APPLE][i % 2];
        let formats = [format];
        let int8 = i % 4 < 2;
        let task =
            Task { x: F32, int8, tuned, ..Task::decode(&formats, width as u32, shape.out as u32) };
        let schedule = GemvSchedule { threads: 64, ..pick_down(&task, 3, 227 << 10) };
        let parts = [i % 3 == 0, i % 2 == 0, i % 2 == 1];
        cases.push(case((F32, F32), format, shape, schedule, parts, "as picked"));
    }
    cases
}

pub(super) fn benches() -> Vec<Bench> {
    let shape = |used, experts, width, out| Shape { tokens: 1, used, experts, width, out };
    let (qwen, gpt_oss) = (shape(8, 128, 768, 2048), shape(4, 32, 2880, 2880));
    let mixtral = shape(2, 8, 14336, 4096);
    let block = Format::Block;
    let mut benches = Vec::new();
    for (shape, format) in [
        (qwen, block(DType::Q4K)),
        (qwen, block(DType::Q6K)),
        (qwen, Format::Dense(Scalar::BF16)),
        (gpt_oss, block(DType::Mxfp4)),
        (mixtral, block(DType::Q4K)),
    ] {
        let formats = [format];
        let task = Task::decode(&formats, shape.width as u32, shape.out as u32);
        let picked = pick_down(&Task { x: Scalar::F32, ..task }, shape.used as u32, 227 << 10);
        benches.push(bench(shape, format, picked));
    }
    benches
}

/// One token's experts.
fn bench(shape: Shape, format: Format, schedule: GemvSchedule) -> Bench {
    let Shape { tokens, used, experts, width, out } = shape;
    let ids: Vec<u32> = (0..used).map(|i| (i * experts / used) as u32).collect();
    let bytes = matrix_bytes(format, experts * out, width);
    let (bias, adds) = (format == Format::Block(DType::Mxfp4), true);
    let parts = DownParts { used: used as u32, bias, adds, early: true };
    let mut buffers = vec![
        Fill::Noise(Scalar::F32, used * width),
        Fill::Zeros(Scalar::F32, tokens * out),
        Fill::These(Buffer::words(&ids)),
        Fill::Noise(Scalar::F32, used),
        Fill::Noise(Scalar::U32, bytes / 4),
    ];
    buffers.extend(bias.then(|| Fill::Noise(Scalar::F32, experts * out)));
    buffers.push(Fill::Noise(Scalar::F32, out));
    Bench {
        kernel: moe_down(Scalar::F32, Scalar::F32, format, parts, schedule).record(),
        label: shape.label(&format!("{}, {}", format.name(), schedule.name())),
        numbers: shape.numbers(schedule.groups(out as u32, PROCESSORS)),
        buffers,
        bytes: (bytes / experts * used + 4 * (used * width + 2 * out)) as u64,
        flops: 2 * (used * width * out) as u64,
        roof: Bottleneck::Memory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where a schedule is picked for another number of tokens.
    #[test]
    fn tokens_have_the_same_bits_among_any_others() {
        let (used, experts, width, out, most) = (3, 5, 256, 21, 4);
        let (values, residual) = (noise(9, most * used * width), noise(4, most * out));
        let ids: Vec<u32> = (0..most * used).map(|p| (p * p % 7 % experts) as u32).collect();
        let shares: Vec<f32> = noise(6, most * used);
        for format in [Format::Dense(Scalar::BF16), Format::Block(DType::Q4K)] {
            let matrix = Matrix::new(format, 5, experts * out, width);
            let run = |tokens: usize| {
                let (formats, bias) = ([format], noise(2, experts * out));
                let decode = Task::decode(&formats, width as u32, out as u32);
                let task = Task { x: Scalar::F32, rows: tokens as u32, ..decode };
                let schedule = pick_down(&task, used as u32, 227 << 10);
                let parts = DownParts { used: used as u32, bias: true, adds: true, early: true };
                let shape = Shape { tokens, used, experts, width, out };
                let pairs = tokens * used;
                let mut buffers = [
                    Buffer::floats(Scalar::F32, &values[..pairs * width]),
                    Buffer::zeros(Scalar::F32, tokens * out),
                    Buffer::words(&ids[..pairs]),
                    Buffer::floats(Scalar::F32, &shares[..pairs]),
                    matrix.buffer(),
                    Buffer::floats(Scalar::F32, &bias),
                    Buffer::floats(Scalar::F32, &residual[..tokens * out]),
                ];
                let kernel = moe_down(Scalar::F32, Scalar::F32, format, parts, schedule).record();
                let groups = schedule.groups(out as u32, tokens as u32);
                tile::interp::run(&kernel, &shape.numbers(groups), &mut buffers).unwrap();
                let [_, y, ..] = buffers;
                y.bytes
            };
            let alone = run(1);
            for tokens in [2, most] {
                assert_eq!(run(tokens)[..alone.len()], alone, "{tokens} tokens");
            }
        }
    }
}
