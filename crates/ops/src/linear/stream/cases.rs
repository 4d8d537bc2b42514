//! Tests and benchmarks of the products of many sequences.

use super::lay::laid;
use super::{End, Job, Share, StreamTiling, StreamTypes, stream, stream_warpgroups};
use crate::Unary;
use crate::linear::cases::{Matrix, PROCESSORS, matrix_bytes, products};
use crate::linear::gemm::cases::rounded;
use crate::packed::Format;
use crate::project::ProjectedMatrix;
use formats::DType;
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::ir::Kernel;
use tile::launch::Numbers;
use tile::types::Scalar;

/// Shared memory of a group on an H200.
const SHARED: u32 = 227 << 10;

/// How far sums of weights that are converted may be from sums of rounded ones, relatively.
const CONVERTED: f64 = 5e-3;

/// One launch to describe.
struct Shape {
    rows: usize,
    /// Rows of each matrix.
    outs: &'static [usize],
    width: usize,
    groups: u32,
    why: &'static str,
}

const fn shape(
    rows: usize,
    outs: &'static [usize],
    width: usize,
    groups: u32,
    why: &'static str,
) -> Shape {
    Shape { rows, outs, width, groups, why }
}

/// Biases stand beside every other matrix.
fn case(
    types: StreamTypes,
    formats: &[Format],
    shape: &Shape,
    end: End,
    tiling: StreamTiling,
) -> Case {
    let &Shape { rows, outs, width, groups, why } = shape;
    let values = noise(9, rows * width);
    let x = Buffer::floats(types.x, &values);
    let mut numbers =
        Numbers::new().with("rows", rows as u32).with("width", width as u32).with("groups", groups);
    let gate = matches!(end, End::Gate(_));
    let seen = rounded(&x.to_f32(), types.operand);
    // Of sums that threadgroups share, each has the products of some columns.
    let splits = tiling.splits() as usize;
    let terms = tiling.terms(formats[0]) as usize;
    let own = width.div_ceil(terms * splits) * terms;
    let part = |split: usize| -> Vec<f32> {
        let inside = |i: usize| splits == 1 || i % width / own == split;
        let of = |(i, x): (usize, &f32)| if inside(i) { *x } else { 0.0 };
        seen.iter().enumerate().map(of).collect()
    };
    let (mut parts, mut sums, mut weights, mut results) = (vec![], vec![], vec![], vec![]);
    for (j, (&format, &out)) in formats.iter().zip(outs).enumerate() {
        let bias = j % 2 == 0 && splits == 1;
        let mut matrix = Matrix::new(format, 5 + j as u64, out, width);
        weights.push(held(tiling.share, format, matrix.buffer()));
        matrix.weights = rounded(&matrix.weights, types.operand);
        let biases = noise(11 + j as u64, out);
        if bias {
            weights.push(Buffer::floats(Scalar::F32, &biases));
        }
        let (added, ones) = (bias.then_some(&biases[..]), vec![1.0; rows]);
        let sum = |split| products(&part(split), &matrix, added, &ones, width);
        sums.push((0..splits).flat_map(sum).collect::<Vec<f64>>());
        parts.push(ProjectedMatrix { format, bias });
        if !(gate && j % 2 == 1) {
            numbers.set(&format!("out{j}"), out as u32);
            results.push(Buffer::zeros(types.y, splits * rows * out));
        }
    }
    let mut buffers = match (tiling.share, formats[0]) {
        (Share::Warpgroups { .. }, Format::Dense(_)) => vec![x],
        (Share::Warpgroups { .. }, format) => laid(&seen, width, format.run() as usize).into(),
        (Share::Terms | Share::Sums, _) => vec![Buffer::raw(Scalar::U32, x.bytes)],
    };
    match end {
        End::Store => {}
        End::Add => {
            let residual = Buffer::floats(types.y, &noise(21, rows * outs[0]));
            let old = residual.to_f64();
            sums[0].iter_mut().zip(old).for_each(|(sum, old)| *sum += old);
            buffers.push(residual);
        }
        End::Gate(act) => {
            let ups = sums.pop().unwrap_or_default();
            sums[0].iter_mut().zip(ups).for_each(|(gate, up)| *gate = act.apply(*gate) * up);
        }
    }
    // Parameters stand in the order in which they are declared: a result before its matrix.
    let mut weights = weights.into_iter();
    let mut expected = vec![];
    let mut results = results.into_iter().zip(sums);
    for (j, part) in parts.iter().enumerate() {
        if !(gate && j % 2 == 1)
            && let Some((result, want)) = results.next()
        {
            // A packed weight beside the middle of two operands may become either.
            let converted = formats.iter().any(|format| format.packing().is_some());
            let near = tolerance(types.y).max(if converted { CONVERTED } else { 0.0 });
            expected.push((buffers.len(), Expected::Near(want, near)));
            buffers.push(result);
        }
        buffers.extend(weights.by_ref().take(1 + usize::from(part.bias)));
    }
    let names: Vec<String> = formats.iter().map(|format| format.name()).collect();
    Case {
        kernel: recorded(types, &parts, end, tiling),
        label: format!(
            "{rows} x {width} -> {outs:?}, {}, {}: {why}",
            names.join(", "),
            tiling.name()
        ),
        numbers,
        buffers,
        expected,
    }
}

/// A matrix as the kernel reads it: 16-bit weights, which warpgroups multiply as they are, by type.
pub(super) fn held(share: Share, format: Format, matrix: Buffer) -> Buffer {
    match (share, format) {
        (Share::Warpgroups { .. }, Format::Dense(scalar)) => Buffer::raw(scalar, matrix.bytes),
        _ => matrix,
    }
}

/// The kernel of a tiling.
fn recorded(
    types: StreamTypes,
    parts: &[ProjectedMatrix],
    end: End,
    tiling: StreamTiling,
) -> Kernel {
    match tiling.share {
        Share::Warpgroups { .. } => stream_warpgroups(types.y, parts, end, tiling, None).record(),
        Share::Terms | Share::Sums => stream(types, parts, end, tiling, None).record(),
    }
}

/// By warpgroups: every format that they take, in rows and in tiles, with rows and columns that no
/// block divides; several matrices, and pairs.
pub(super) fn warpgroups() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let all = [
        StreamTypes { x: BF16, operand: F16, y: F32 },
        StreamTypes { x: F16, operand: F16, y: F16 },
        StreamTypes { x: BF16, operand: F16, y: BF16 },
    ];
    let tiling = |splits, rows, stages| {
        let (share, resident, tiles, loads) = (Share::Warpgroups { splits }, 1, 1, 2);
        StreamTiling { share, resident, tiles, rows, loads, stages }
    };
    let taken = Format::all().into_iter().filter(|f| f.packing().is_some() && f.run() >= 16);
    let taken: Vec<Format> = taken.flat_map(|f| [Some(f), f.tiled()]).flatten().collect();
    let mut cases = Vec::new();
    for (f, format) in taken.into_iter().enumerate() {
        let step = (format.step() as usize).next_multiple_of(4 * format.run() as usize);
        let width = 320usize.next_multiple_of(step) + step;
        let outs: &[usize] = if format.together() > 1 { &[136] } else { &[150] };
        let shape = shape(1 + 5 * (f % 5), outs, width, 1 + f as u32 % 2, "by warpgroups");
        let end = if f % 2 == 0 { End::Store } else { End::Add };
        let whole = tiling(1, 16 + 16 * (f as u32 % 2), 2 + f as u32 % 3);
        cases.push(case(all[f % 3], &[format], &shape, end, whole));
        let split = StreamTiling { share: Share::Warpgroups { splits: 2 + f as u32 % 2 }, ..whole };
        cases.push(case(all[0], &[format], &shape, End::Store, split));
    }
    let q4_k = Format::Block(DType::Q4K);
    let several = shape(50, &[140, 40, 5], 1280, 2, "several matrices, rows in turns");
    cases.push(case(all[0], &[q4_k; 3], &several, End::Store, tiling(1, 32, 3)));
    cases.push(case(all[0], &[q4_k; 3], &several, End::Store, tiling(2, 32, 2)));
    let gates = shape(20, &[70, 70], 1280, 1, "matrices of a pair between warpgroups");
    for (format, types) in [(q4_k, all[2]), (Format::Block(DType::Q8_0), all[0])] {
        cases.push(case(types, &[format; 2], &gates, End::Gate(Unary::Silu), tiling(1, 32, 2)));
    }
    for (scalar, y) in [(BF16, F32), (F16, F16)] {
        let (format, types) =
            (Format::Dense(scalar), StreamTypes { x: scalar, operand: scalar, y });
        let one = shape(7, &[150], 136, 2, "16-bit weights, columns that no step divides");
        cases.push(case(types, &[format], &one, End::Add, tiling(1, 16, 3)));
        let gates = shape(20, &[70, 70], 320, 1, "a pair of 16-bit weights");
        cases.push(case(types, &[format; 2], &gates, End::Gate(Unary::Silu), tiling(1, 32, 2)));
        let several = shape(40, &[140, 40, 5], 648, 2, "several of 16 bits, rows in turns");
        let types = StreamTypes { y: F32, ..types };
        cases.push(case(types, &[format; 3], &several, End::Store, tiling(3, 32, 3)));
    }
    cases
}

/// By warpgroups, the matrices of an 8B model, for 8 to 128 rows.
pub(super) fn warpgroup_benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    let usual = [DType::BF16, DType::Q8_0, DType::Q6K, DType::Q4K].map(Format::of);
    let usual = usual.into_iter().flatten();
    for format in usual.flat_map(|format| [Some(format), format.tiled()]).flatten() {
        for rows in [8, 32, 64, 128] {
            for (end, outs, width) in [
                (End::Gate(Unary::Silu), &[14336, 14336][..], 4096),
                (End::Store, &[128256], 4096),
                (End::Store, &[4096, 1024, 1024], 4096),
                (End::Add, &[4096], 4096),
                (End::Add, &[4096], 14336),
            ] {
                benches.extend(bench(format, (rows, end, outs, width), None));
            }
        }
    }
    benches
}

/// Every format with rows and columns that no block divides, every end, and tilings of all kinds.
pub(super) fn cases() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let all = [
        StreamTypes { x: BF16, operand: BF16, y: F32 },
        StreamTypes { x: F16, operand: F16, y: F16 },
        StreamTypes { x: F16, operand: BF16, y: F32 },
        StreamTypes { x: BF16, operand: BF16, y: BF16 },
    ];
    let tiling = |tiles, rows| StreamTiling {
        share: Share::Terms,
        resident: 1,
        tiles,
        rows,
        loads: 1 + tiles % 2,
        stages: if tiles + rows == 9 { 3 } else { 2 },
    };
    let two = |tiles, rows| StreamTiling { resident: 2, ..tiling(tiles, rows) };
    let mut cases = Vec::new();
    for (f, format) in
        Format::all().into_iter().filter(|f| StreamTiling::takes(*f, BF16)).enumerate()
    {
        let step = format.step() as usize;
        let width = 320usize.next_multiple_of(step) + step;
        let shapes = [
            shape(5, &[37], width, 2, "rows and columns that no block divides"),
            shape(3, &[16], step, 1, "one block a row"),
        ];
        let end = if f % 2 == 0 { End::Store } else { End::Add };
        cases.push(case(all[f % 4], &[format], &shapes[f % 2], end, tiling(1 + f as u32 % 2, 8)));
    }
    let [bf16, q4_k, q6_k, q8_0] = [
        Format::Dense(BF16),
        Format::Block(DType::Q4K),
        Format::Block(DType::Q6K),
        Format::Block(DType::Q8_0),
    ];
    let several = shape(9, &[40, 17, 5], 2304, 2, "steps ahead across the ends of matrices");
    cases.push(case(all[0], &[q4_k, q4_k, q6_k], &several, End::Store, tiling(2, 16)));
    let one = shape(2, &[24, 8, 8], 1600, 1, "one group for all");
    cases.push(case(all[0], &[bf16, bf16, bf16], &one, End::Store, tiling(1, 8)));
    let gates = shape(8, &[48, 48], 1280, 2, "two matrices side by side");
    for (format, act) in [(bf16, Unary::Silu), (q4_k, Unary::GeluTanh), (q8_0, Unary::Silu)] {
        cases.push(case(all[3], &[format; 2], &gates, End::Gate(act), two(1, 8)));
    }
    for (rows, tiles, most) in [(30, 1, 32), (70, 1, 48), (40, 3, 16), (17, 1, 8)] {
        let many = shape(rows, &[70], 640, 1, "many rows, in turns");
        cases.push(case(all[0], &[bf16], &many, End::Add, tiling(tiles, most)));
        let many = shape(rows, &[70], 768, 2, "many rows, in turns, converted");
        cases.push(case(all[2], &[q4_k], &many, End::Store, tiling(tiles, most.min(32))));
    }
    let sums = |tiles, rows| StreamTiling { share: Share::Sums, ..tiling(tiles, rows) };
    for (f, format) in [bf16, q4_k, q6_k, q8_0].into_iter().enumerate() {
        let width = 768usize.next_multiple_of(format.step() as usize);
        let own = shape(35, &[150], width, 1, "simdgroups with sums of their own");
        let end = if f % 2 == 0 { End::Add } else { End::Store };
        cases.push(case(all[f], &[format], &own, end, sums(1, 48)));
    }
    let several = shape(50, &[40, 140, 5], 1280, 2, "sums of their own, of several matrices");
    cases.push(case(all[0], &[q4_k, q4_k, q6_k], &several, End::Store, sums(2, 32)));
    cases.push(case(all[0], &[bf16, bf16, bf16], &several, End::Store, sums(1, 64)));
    let gates = shape(20, &[70, 70], 1280, 1, "matrices of a pair between simdgroups");
    cases.push(case(all[3], &[bf16; 2], &gates, End::Gate(Unary::Silu), sums(2, 32)));
    cases.push(case(all[0], &[q4_k; 2], &gates, End::Gate(Unary::Silu), sums(1, 32)));
    cases.extend(in_tiles(&all));
    cases
}

/// Matrices in tiles: every format that has them, in tilings of both kinds, side by side, and
/// beside others in rows.
fn in_tiles(all: &[StreamTypes; 4]) -> Vec<Case> {
    let taken = Format::all().into_iter().filter(|f| StreamTiling::takes(*f, Scalar::BF16));
    let formats: Vec<Format> = taken.filter_map(Format::tiled).collect();
    let tiling = |share, tiles, rows| {
        let (resident, loads) = (1, 1 + tiles % 2);
        StreamTiling { share, resident, tiles, rows, loads, stages: 2 }
    };
    let [terms, sums] = [Share::Terms, Share::Sums];
    let mut cases = Vec::new();
    for (f, format) in formats.iter().enumerate() {
        let step = format.step() as usize;
        let width = 320usize.next_multiple_of(step) + step;
        let shape = shape(5, &[40], width, 2, "in tiles");
        let end = if f % 2 == 0 { End::Store } else { End::Add };
        let (one, other) = (1 + f as u32 % 2, 2 - f as u32 % 2);
        cases.push(case(all[f % 4], &[*format], &shape, end, tiling(terms, one, 8)));
        cases.push(case(all[f % 4], &[*format], &shape, end, tiling(sums, other, 16)));
    }
    let [q4_k, q6_k] = [DType::Q4K, DType::Q6K].map(Format::Tiles);
    let gates = shape(20, &[72, 72], 1280, 2, "two matrices in tiles, side by side");
    for share in [terms, sums] {
        let end = End::Gate(Unary::Silu);
        cases.push(case(all[3], &[q4_k; 2], &gates, end, tiling(share, 1, 32)));
    }
    let several = shape(9, &[40, 16, 5], 2304, 2, "matrices in tiles and in rows");
    let formats = [q4_k, q6_k, Format::Block(DType::Q6K)];
    cases.push(case(all[0], &formats, &several, End::Store, tiling(terms, 2, 16)));
    cases
}

/// The matrices of an 8B model, for 8 to 128 rows.
pub(super) fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    let usual = [DType::BF16, DType::Q8_0, DType::Q6K, DType::Q4K].map(Format::of);
    let usual = usual.into_iter().flatten();
    for format in usual.flat_map(|format| [Some(format), format.tiled()]).flatten() {
        for rows in [8, 32, 64, 128] {
            for (end, outs, width) in [
                (End::Store, &[4096, 1024, 1024][..], 4096),
                (End::Add, &[4096], 4096),
                (End::Gate(Unary::Silu), &[14336, 14336], 4096),
                (End::Add, &[4096], 14336),
            ] {
                let shape = (rows, end, outs, width);
                benches.extend(bench(format, shape, Some(1)));
                if rows == 8 {
                    benches.extend(bench(format, shape, Some(2)));
                }
            }
        }
    }
    benches
}

/// With this many groups resident, or by warpgroups.
fn bench(
    format: Format,
    (rows, end, outs, width): (usize, End, &[usize], usize),
    resident: Option<u32>,
) -> Option<Bench> {
    let gate = matches!(end, End::Gate(_));
    let formats = vec![format; outs.len()];
    let all: usize = outs.iter().sum();
    let job = Job {
        formats: &formats,
        out: if gate { outs[0] } else { all } as u32,
        rows: rows as u32,
        pair: gate,
        shared: SHARED,
        processors: PROCESSORS,
        tuned: &crate::tuned::HOPPER.stream,
    };
    let tiling = match resident {
        None => StreamTiling::by_warpgroups(&job, width as u32, true)?,
        Some(resident) => StreamTiling::pick_for(&job, resident)?,
    };
    let y = if gate { Scalar::BF16 } else { Scalar::F32 };
    let end = if tiling.splits() == 1 { end } else { End::Store };
    let types = StreamTypes { x: Scalar::BF16, operand: Scalar::BF16, y };
    let parts = vec![ProjectedMatrix { format, bias: false }; outs.len()];
    let mut numbers = Numbers::new()
        .with("rows", rows as u32)
        .with("width", width as u32)
        .with("groups", tiling.groups(&job));
    let mut buffers = match tiling.share {
        Share::Warpgroups { .. } if format.packing().is_some() => {
            vec![Fill::Noise(Scalar::F16, rows * width), Fill::Noise(Scalar::F32, rows)]
        }
        Share::Warpgroups { .. } => vec![Fill::Noise(Scalar::BF16, rows * width)],
        Share::Terms | Share::Sums => vec![Fill::Noise(Scalar::U32, rows * width / 2)],
    };
    if end == End::Add {
        buffers.push(Fill::Noise(y, rows * outs[0]));
    }
    let mut bytes = 0;
    for (j, &out) in outs.iter().enumerate() {
        if !(gate && j == 1) {
            numbers.set(&format!("out{j}"), out as u32);
            buffers.push(Fill::Zeros(y, tiling.splits() as usize * rows * out));
        }
        bytes += matrix_bytes(format, out, width);
        let elements = matrix_bytes(format, out, width);
        buffers.push(match (tiling.share, format) {
            (Share::Warpgroups { .. }, Format::Dense(scalar)) => Fill::Noise(scalar, elements / 2),
            _ => Fill::Noise(Scalar::U32, elements / 4),
        });
    }
    Some(Bench {
        kernel: recorded(types, &parts, end, tiling),
        label: format!("{} {rows} x {width} -> {outs:?}, {}", format.name(), tiling.name()),
        numbers,
        buffers,
        bytes: (bytes + 2 * rows * width) as u64,
        flops: 2 * (rows * all * width) as u64,
        roof: Bottleneck::Memory,
    })
}
