//! Cases and benchmarks of the matrix products.

use super::{GemmSchedule, GemmTypes, Machine, gemm};
use crate::linear::cases::{Matrix, matrix_bytes, products};
use crate::packed::Format;
use formats::DType;
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::launch::Numbers;
use tile::types::Scalar;

/// The same type for all.
pub(crate) const fn all(scalar: Scalar) -> GemmTypes {
    GemmTypes { x: scalar, operand: scalar, y: scalar }
}

/// Numbers as a matrix product sees them: rounded to its operands' type.
pub(crate) fn rounded(values: &[f32], operand: Scalar) -> Vec<f32> {
    Buffer::floats(operand, values).to_f32()
}

/// A dense matrix of the operands' type is bound as such, all others as words.
pub(crate) fn bound(format: Format, operand: Scalar, matrix: &Matrix) -> Buffer {
    let words = matrix.buffer();
    if format == Format::Dense(operand) { Buffer::raw(operand, words.bytes) } else { words }
}

/// One launch to describe.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    out: usize,
    width: usize,
    why: &'static str,
}

fn case(
    types: GemmTypes,
    format: Format,
    shape: Shape,
    bias: bool,
    schedule: GemmSchedule,
) -> Case {
    let Shape { rows, out, width, why } = shape;
    let mut matrix = Matrix::new(format, 5, out, width);
    let x = Buffer::floats(types.x, &noise(9, rows * width));
    let weight = bound(format, types.operand, &matrix);
    matrix.weights = rounded(&matrix.weights, types.operand);
    let seen = rounded(&x.to_f32(), types.operand);
    let biases = noise(11, out);
    let want = products(&seen, &matrix, bias.then_some(&biases), &vec![1.0; rows], width);
    let mut buffers = vec![x, Buffer::zeros(types.y, rows * out), weight];
    if bias {
        buffers.push(Buffer::floats(Scalar::F32, &biases));
    }
    Case {
        kernel: gemm(types, format, bias, schedule).record(),
        label: format!("{rows} x {width} -> {out}, {}: {why}", schedule.name()),
        numbers: numbers(rows, width, out),
        buffers,
        expected: vec![(1, Expected::Near(want, tolerance(types.y)))],
    }
}

fn numbers(rows: usize, width: usize, out: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32).with("out", out as u32)
}

const fn shape(rows: usize, out: usize, width: usize, why: &'static str) -> Shape {
    Shape { rows, out, width, why }
}

/// Dense matrices in every type and schedule, and every quantised format.
pub(super) fn cases() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let mut cases = Vec::new();
    let shapes = [
        shape(1, 16, 32, "one row, one step at most"),
        shape(3, 40, 72, "rows, columns and terms that no block divides"),
        shape(17, 200, 256, "one row more than a fragment"),
        shape(64, 16, 320, "whole rows, several steps"),
        shape(130, 40, 72, "a second block of two rows"),
    ];
    let narrow = [GemmSchedule::NARROW, GemmSchedule::SMALL, GemmSchedule::DEEP];
    let types = [
        all(BF16),
        all(F16),
        GemmTypes { x: F32, operand: BF16, y: F32 },
        GemmTypes { x: F32, operand: F16, y: F16 },
        GemmTypes { x: BF16, operand: F16, y: BF16 },
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        for (t, types) in types.into_iter().enumerate() {
            let schedule = narrow[(i + t) % narrow.len()];
            let format = Format::Dense(types.operand);
            cases.push(case(types, format, shape, (i + t) % 2 == 0, schedule));
        }
        let mixed =
            GemmTypes { x: [F32, BF16, F16][i % 3], operand: F32, y: [F32, F16, BF16][i % 3] };
        let format = Format::Dense([F32, F16, BF16][i % 3]);
        cases.push(case(mixed, format, shape, i % 2 == 0, GemmSchedule::EXACT));
    }
    let why = "a block and its ragged neighbours";
    cases.push(case(
        all(BF16),
        Format::Dense(BF16),
        shape(130, 264, 136, why),
        true,
        GemmSchedule::LARGE,
    ));
    cases.push(case(
        all(F16),
        Format::Dense(F16),
        shape(130, 136, 264, why),
        false,
        GemmSchedule::MEDIUM,
    ));
    let why = "what is picked for batches";
    for (i, schedule) in GemmSchedule::all().into_iter().enumerate() {
        let rows = schedule.bm as usize + 1;
        let small = shape(rows.min(65), 40, 160, why);
        if schedule != GemmSchedule::EXACT {
            cases.push(case(all(BF16), Format::Dense(BF16), small, i % 2 == 0, schedule));
        }
    }
    let why = "a band of blocks and part of another";
    let (bm, bn, bk) = (16, 16, 16);
    let tiny =
        GemmSchedule { bm, bn, bk, simds_m: 1, simds_n: 1, stages: 4, ..GemmSchedule::SMALL };
    cases.push(case(all(F16), Format::Dense(F16), shape(150, 40, 40, why), false, tiny));
    let why = "weights of another type";
    cases.push(case(
        all(BF16),
        Format::Dense(F32),
        shape(3, 40, 72, why),
        true,
        GemmSchedule::SMALL,
    ));
    cases.push(case(
        all(F16),
        Format::Dense(BF16),
        shape(3, 40, 72, why),
        true,
        GemmSchedule::NARROW,
    ));
    for (f, format) in Format::all().into_iter().filter(|f| f.packing().is_some()).enumerate() {
        let step = format.step() as usize;
        let (rows, why) =
            [(17, "two steps at least, converted"), (3, "few rows, converted")][f % 2];
        let shape = shape(rows, 40, (step * 2).max(160).next_multiple_of(step), why);
        let types = types[f % types.len()];
        let packed = if format.run() > 32 { GemmSchedule::DEEP } else { GemmSchedule::SMALL };
        let schedule = if f % 2 == 1 { GemmSchedule::NARROW } else { packed };
        cases.push(case(types, format, shape, f % 3 == 0, schedule));
    }
    let q4_k = Format::Block(DType::Q4K);
    let why = "one step in shared memory";
    let (shared, tuned) = (32 << 10, &crate::tuned::APPLE);
    let apple = Machine { shared, parallel: 8, wgmma: false, tuned };
    for (types, format, shape) in [
        (all(F16), Format::Dense(F16), shape(17, 200, 256, why)),
        (types[2], Format::Dense(BF16), shape(130, 40, 72, why)),
        (types[2], q4_k, shape(65, 72, 512, why)),
        (types[3], Format::Block(DType::Q2K), shape(40, 72, 512, why)),
        (types[2], Format::Block(DType::Q8_0), shape(9, 72, 96, why)),
    ] {
        let size = (shape.rows as u32, shape.out as u32);
        let schedule = GemmSchedule::pick(size, types.operand, format, apple);
        cases.push(case(types, format, shape, shape.rows % 2 == 1, schedule));
    }
    let why = "a whole block and more, converted";
    cases.push(case(all(BF16), q4_k, shape(130, 136, 512, why), false, GemmSchedule::MEDIUM));
    cases.extend(warpgroups());
    let why = "sums that eight simdgroups share";
    let small = GemmSchedule { bk: 128, ..GemmSchedule::SHARED };
    let mixed = GemmTypes { x: F32, operand: BF16, y: F32 };
    for (types, format, shape) in [
        (all(BF16), Format::Dense(BF16), shape(3, 40, 1096, why)),
        (mixed, Format::Dense(BF16), shape(17, 24, 512, why)),
        (mixed, q4_k, shape(5, 40, 1536, why)),
        (all(F16), Format::Block(DType::Q6K), shape(1, 24, 1024, why)),
        (all(BF16), Format::Block(DType::Q8_0), shape(16, 72, 96, why)),
    ] {
        cases.push(case(types, format, shape, shape.rows % 2 == 1, small));
        cases.push(case(types, format, shape, shape.rows % 2 == 0, GemmSchedule::SHARED));
    }
    let exact = GemmSchedule { bm: 32, bk: 32, ..GemmSchedule::EXACT };
    cases.push(case(all(F32), q4_k, shape(5, 40, 512, "exact weights"), true, exact));
    cases
}

/// Products by warpgroups: ragged blocks, one and two of them, copied and converted operands, three
/// stages and more.
fn warpgroups() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let small = GemmSchedule { bm: 64, bn: 32, simds_m: 4, stages: 3, ..GemmSchedule::SQUARE };
    let deep = GemmSchedule { stages: 5, ..small };
    let (q4_k, q8_0) = (Format::Block(DType::Q4K), Format::Block(DType::Q8_0));
    let (bf16, f16) = (Format::Dense(BF16), Format::Dense(F16));
    let mixed = GemmTypes { x: F32, operand: BF16, y: F32 };
    [
        (all(BF16), bf16, shape(3, 40, 72, "one warpgroup, ragged everywhere"), small),
        (all(F16), f16, shape(65, 24, 8, "fewer terms than a row has"), small),
        (all(BF16), bf16, shape(64, 32, 704, "one whole block, many steps"), deep),
        (mixed, bf16, shape(70, 40, 200, "activations that are converted"), small),
        (all(BF16), q4_k, shape(66, 40, 512, "weights that are converted"), small),
        (mixed, q8_0, shape(5, 72, 224, "both converted"), deep),
        (
            all(BF16),
            bf16,
            shape(130, 264, 136, "a block and its ragged neighbours"),
            GemmSchedule::WIDE,
        ),
        (
            all(F16),
            f16,
            shape(130, 136, 264, "a block and its ragged neighbours"),
            GemmSchedule::SQUARE,
        ),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, (types, format, shape, schedule))| case(types, format, shape, i % 2 == 0, schedule))
    .collect()
}

/// Large squares, and the feed-forward shapes of an 8B model in prefill.
pub(super) fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    let mut add = |types: GemmTypes, format: Format, (rows, width, out), schedule: GemmSchedule| {
        benches.push(bench(types, format, rows, width, out, schedule));
    };
    let square = (4096, 4096, 4096);
    let large =
        [GemmSchedule::WIDE, GemmSchedule::SQUARE, GemmSchedule::LARGE, GemmSchedule::MEDIUM];
    for scalar in [Scalar::BF16, Scalar::F16] {
        for schedule in large {
            add(all(scalar), Format::Dense(scalar), square, schedule);
        }
    }
    let dense = Format::Dense(Scalar::BF16);
    let bf16 = all(Scalar::BF16);
    add(bf16, dense, square, GemmSchedule::SMALL);
    for schedule in large {
        add(bf16, dense, (512, 4096, 14336), schedule);
    }
    add(bf16, dense, (512, 4096, 14336), GemmSchedule::SMALL);
    // As activations come where all of a model's are f32.
    let mixed = GemmTypes { x: Scalar::F32, operand: Scalar::BF16, y: Scalar::F32 };
    for schedule in [GemmSchedule::WIDE, GemmSchedule::SQUARE, GemmSchedule::LARGE] {
        add(mixed, dense, (512, 4096, 14336), schedule);
    }
    let picked = |format: Format, (rows, _, out): (usize, usize, usize)| {
        let tuned = &crate::tuned::HOPPER;
        let h200 = Machine { shared: 227 << 10, parallel: 132, wgmma: true, tuned };
        GemmSchedule::pick((rows as u32, out as u32), Scalar::BF16, format, h200)
    };
    for (rows, out) in [(128, 4096), (128, 14336), (256, 4096), (512, 4096)] {
        let shape = (rows, 4096, out);
        add(bf16, dense, shape, picked(dense, shape));
    }
    for rows in [16, 32, 64] {
        let q4_k = Format::Block(DType::Q4K);
        for format in [dense, q4_k] {
            let shape = (rows, 4096, 14336);
            add(bf16, format, shape, picked(format, shape));
        }
    }
    add(all(Scalar::F32), Format::Dense(Scalar::F32), (1024, 4096, 4096), GemmSchedule::EXACT);
    let router = GemmTypes { x: Scalar::F32, operand: Scalar::F32, y: Scalar::F32 };
    for schedule in [GemmSchedule::EXACT, GemmSchedule::EXACT_SMALL] {
        add(router, dense, (2048, 2048, 128), schedule);
    }
    for dtype in [DType::Q4K, DType::Q6K, DType::Q8_0, DType::Q4_0] {
        add(bf16, Format::Block(dtype), (512, 4096, 14336), GemmSchedule::MEDIUM);
    }
    add(bf16, Format::Block(DType::Q4K), square, GemmSchedule::MEDIUM);
    benches
}

fn bench(
    types: GemmTypes,
    format: Format,
    rows: usize,
    width: usize,
    out: usize,
    schedule: GemmSchedule,
) -> Bench {
    let bytes = matrix_bytes(format, out, width);
    let weight = match format == Format::Dense(types.operand) {
        true => Fill::Noise(types.operand, out * width),
        false => Fill::Noise(Scalar::U32, bytes / 4),
    };
    let activations = rows * (width * types.x.bytes() + out * types.y.bytes());
    Bench {
        kernel: gemm(types, format, false, schedule).record(),
        label: format!("{} {rows} x {width} -> {out}, {}", format.name(), schedule.name()),
        numbers: numbers(rows, width, out),
        buffers: vec![Fill::Noise(types.x, rows * width), Fill::Zeros(types.y, rows * out), weight],
        bytes: (bytes + activations) as u64,
        flops: 2 * (rows * width * out) as u64,
        roof: Bottleneck::Matrix,
    }
}
