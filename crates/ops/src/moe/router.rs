//! `moe_router`: a router's scores of a few tokens, with the norm in front in the same launch.
//!
//! A router's matrix is small, so that a norm in front takes as long as the product. Every group
//! norms its token's row for itself, as other products do, and leaves a share of it for the experts,
//! which read it as well.

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

use crate::linear::cases::{Matrix, PROCESSORS, matrix_bytes, norm_scales, products};
use crate::linear::{self, GemvSchedule, Input, Norm, Sums, Sweep, Task, holds};
use crate::packed::{Format, PackedWeights};

/// Threads of a group: enough to have a row staged soon.
const THREADS: u32 = 256;

/// The schedule for any number of tokens, each of which has groups of its own, so that a token's
/// bits do not depend on the others.
pub fn pick_router(task: &Task, shared: u32) -> GemvSchedule {
    let schedule = GemvSchedule::alike(&Task { rows: 1, ..*task }, 1, shared).1;
    GemvSchedule { threads: THREADS, ..schedule }
}

/// `scores[t, e] = sum_i weight[e, i] n[t, i] + bias[e]` and `normed = n`, `n = rms_norm(x)` with
/// the f32 weight `norm`.
///
/// `x` and `normed` `[tokens, width]`, `norm` `[width]`, `scores` `[tokens, experts]`, `weight`
/// `[experts, width]`, `bias` `[experts]`.
#[kernel]
pub fn moe_router(
    x: In<{ from }>,
    normed: Out<{ to }>,
    scores: Out<f32>,
    width: Const<u32>,
    experts: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    bias: bool,
    schedule: GemvSchedule,
) {
    let norm = Norm::declare();
    let weight = PackedWeights::declare("weight", format, width);
    let bias = bias.then(|| <In>::declare("bias"));
    launch(Mode::Vector, [dim("groups"), dim("tokens"), fixed(1)], schedule.threads);
    for name in ["x", "normed"] {
        holds(name, dim("tokens") * dim("width"));
    }
    holds("scores", dim("tokens") * dim("experts"));
    holds("norm", dim("width"));
    holds("weight", format.extent(dim("width")) * dim("experts"));
    if bias.is_some() {
        holds("bias", dim("experts"));
    }
    for name in ["x", "normed", "norm", "weight"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    require(Requirement::Divisible(dim("width"), schedule.step(format)));
    if let Some(capacity) = schedule.activations.capacity() {
        require(Requirement::AtMost(dim("width"), capacity));
    }
    let token = group_id_of(1);
    let input = Input::new(x, 1, width, Some(norm), schedule.activations, &[format]);
    let sweep = Sweep::new(vec![weight], experts);
    linear::product(
        &schedule,
        input.starting_at(token).leaving(normed),
        &[sweep],
        |Sums { output, sums, .. }| {
            let sum = bias.map_or(sums[0], |bias| sums[0] + bias.get(output));
            scores.set(token * experts + output, sum);
        },
    );
}

const EPS: f32 = 1e-5;

fn launch_numbers(tokens: usize, width: usize, experts: usize, groups: u32) -> Numbers {
    Numbers::new()
        .with("tokens", tokens as u32)
        .with("width", width as u32)
        .with("experts", experts as u32)
        .with("groups", groups)
        .with_f32("eps", EPS)
}

fn case(
    (tokens, width, experts): (usize, usize, usize),
    (from, to, element): (Scalar, Scalar, Scalar),
    bias: bool,
    why: &str,
) -> Case {
    let formats = [Format::Dense(element)];
    let x = Buffer::floats(from, &noise(7, tokens * width));
    let (weight, biases) = (noise(13, width), noise(17, experts));
    let matrix = Matrix::new(formats[0], 3, experts, width);
    let scales = norm_scales(&x, width, EPS);
    let weighed: Vec<f32> =
        x.to_f32().iter().zip(weight.iter().cycle()).map(|(x, w)| x * w).collect();
    let scaled = |(i, x): (usize, &f32)| f64::from(*x) * scales[i / width];
    let normed = weighed.iter().enumerate().map(scaled).collect();
    // A copy is kept in the activations' own type.
    let seen = Buffer::floats(from, &weighed).to_f32();
    let scores = products(&seen, &matrix, bias.then_some(&biases), &scales, width);
    let task = Task { x: from, ..Task::decode(&formats, width as u32, experts as u32) };
    let schedule = GemvSchedule { threads: 64, ..pick_router(&task, 227 << 10) };
    let mut buffers = vec![
        x,
        Buffer::zeros(to, tokens * width),
        Buffer::zeros(Scalar::F32, tokens * experts),
        Buffer::floats(Scalar::F32, &weight),
        matrix.buffer(),
    ];
    buffers.extend(bias.then(|| Buffer::floats(Scalar::F32, &biases)));
    Case {
        kernel: moe_router(from, to, formats[0], bias, schedule).record(),
        label: format!("{tokens} x {width} -> {experts}, {from}, {to}, {element}: {why}"),
        numbers: launch_numbers(tokens, width, experts, 3),
        buffers,
        expected: vec![
            (1, Expected::Near(normed, tolerance(to))),
            (2, Expected::Near(scores, tolerance(Scalar::F32))),
        ],
    }
}

pub(super) fn cases() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    vec![
        case((1, 2880, 32), (F32, BF16, F32), true, "one token"),
        case((3, 1024, 60), (F32, F16, BF16), false, "tokens"),
        case((4, 264, 5), (F32, F32, F32), true, "few columns and experts"),
        case((2, 520, 8), (BF16, BF16, F32), false, "rows of 16 bits"),
    ]
}

pub(super) fn benches() -> Vec<Bench> {
    let bench = |width: usize, experts: usize| {
        let formats = [Format::Dense(Scalar::F32)];
        let decode = Task::decode(&formats, width as u32, experts as u32);
        let schedule = pick_router(&Task { x: Scalar::F32, ..decode }, 227 << 10);
        let (groups, bytes) =
            (schedule.groups(experts as u32, PROCESSORS), matrix_bytes(formats[0], experts, width));
        let kernel = moe_router(Scalar::F32, Scalar::BF16, formats[0], false, schedule);
        Bench {
            kernel: kernel.record(),
            label: format!("{width} -> {experts}"),
            numbers: launch_numbers(1, width, experts, groups),
            buffers: vec![
                Fill::Noise(Scalar::F32, width),
                Fill::Zeros(Scalar::BF16, width),
                Fill::Zeros(Scalar::F32, experts),
                Fill::Noise(Scalar::F32, width),
                Fill::Noise(Scalar::U32, bytes / 4),
            ],
            bytes: (bytes + 10 * width) as u64,
            flops: 2 * (width * experts) as u64,
            roof: Bottleneck::Memory,
        }
    };
    vec![bench(2880, 32), bench(2048, 128), bench(4096, 256)]
}
