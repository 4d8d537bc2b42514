//! Cases and benchmarks of the matrix-vector kernels: matrices of every format, and launches of
//! [`gemv`].

use super::{ActivationStorage, GemvSchedule, Task, bytes, gemv, reference};
use crate::packed::{Format, Mlx, Planes, pack_as, pack_mlx};
use formats::{DType, quant::plain};
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::launch::Numbers;
use tile::types::Scalar;

/// An H200's multiprocessors: of benchmarks.
pub(crate) const PROCESSORS: u32 = 132;

/// A seeded matrix, packed, and its weights as they are after quantisation.
pub(crate) struct Matrix {
    planes: Planes,
    /// `[out, width]`.
    pub(crate) weights: Vec<f32>,
}

impl Matrix {
    /// Noise in a format.
    pub(crate) fn new(format: Format, seed: u64, out: usize, width: usize) -> Matrix {
        let values = noise(seed, out * width);
        let dtype = match format {
            Format::Dense(Scalar::F16) => DType::F16,
            Format::Dense(Scalar::BF16) => DType::BF16,
            Format::Dense(_) => DType::F32,
            Format::Block(dtype) | Format::Tiles(dtype) => dtype,
            Format::Mlx { .. } => DType::F32,
        };
        let planes = match format {
            Format::Mlx { bits, group, scale } => {
                let byte = |v: &f32| ((v + 1.0) * 127.5) as u8;
                let codes: Vec<u8> =
                    values[..values.len() * bits as usize / 8].iter().map(byte).collect();
                let half = |v: f32| match scale {
                    Scalar::BF16 => plain::f32_to_bf16(v).to_le_bytes(),
                    _ => plain::f32_to_f16(v).to_le_bytes(),
                };
                let steps = (1 << bits) as f32;
                let groups = values.len() / group as usize;
                let scales: Vec<u8> =
                    noise(seed + 1, groups).iter().flat_map(|v| half(v / steps)).collect();
                let biases: Vec<u8> =
                    noise(seed + 2, groups).iter().flat_map(|v| half(v / 2.0)).collect();
                let from = Mlx { codes: &codes, scales: &scales, biases: &biases };
                pack_mlx(format, &from, out, width)
            }
            _ => {
                let size = dtype.bytes_for(values.len() as u64).unwrap_or(0) as usize;
                let mut source = vec![0; size];
                dtype.encode(&values, &mut source).expect("the sizes are a whole number of blocks");
                pack_as(format, dtype.into(), &source, out, width)
            }
        };
        let planes = planes.expect("cases are of shapes that the format has");
        let mut weights = vec![0.0; out * width];
        for (r, row) in weights.chunks_mut(width).enumerate() {
            planes.row(r, row);
        }
        Matrix { planes, weights }
    }

    /// For binding.
    pub(crate) fn buffer(&self) -> Buffer {
        Buffer::raw(Scalar::U32, self.planes.bytes.clone())
    }
}

/// Activations of `[rows, width]` in a type, and what a kernel with this schedule multiplies: after
/// a norm's weight, and after quantisation.
pub(crate) fn activations(
    scalar: Scalar,
    len: usize,
    norm: Option<&[f32]>,
    schedule: &GemvSchedule,
) -> (Buffer, Vec<f32>) {
    let x = Buffer::floats(scalar, &noise(7, len));
    let mut seen = x.to_f32();
    if let Some(norm) = norm {
        seen.iter_mut().zip(norm.iter().cycle()).for_each(|(x, w)| *x *= w);
        if let ActivationStorage::Staged(_) = schedule.activations {
            // A copy is kept in the activations' own type.
            seen = Buffer::floats(scalar, &seen).to_f32();
        }
    }
    if let ActivationStorage::Bytes(_) = schedule.activations {
        seen = bytes(&seen);
    }
    (x, seen)
}

/// The scale by which a norm multiplies each row of activations: `1 / sqrt(mean square + eps)`.
pub(crate) fn norm_scales(x: &Buffer, width: usize, eps: f32) -> Vec<f64> {
    let mean = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>() / width as f64;
    x.to_f64().chunks(width).map(|row| 1.0 / (mean(row) + f64::from(eps)).sqrt()).collect()
}

/// `[rows, out]` products in f64, each row times its scale.
pub(crate) fn products(
    seen: &[f32],
    matrix: &Matrix,
    bias: Option<&[f32]>,
    scales: &[f64],
    width: usize,
) -> Vec<f64> {
    let out = matrix.weights.len() / width;
    let mut y = vec![0.0; seen.len() / width * out];
    reference(seen, &matrix.weights, None, width, &mut y);
    let bias = |i: usize| bias.map_or(0.0, |b| f64::from(b[i % out]));
    y.iter().enumerate().map(|(i, y)| f64::from(*y) * scales[i / out] + bias(i)).collect()
}

/// One launch to describe.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) out: usize,
    pub(crate) width: usize,
    /// Groups.
    pub(crate) groups: u32,
    pub(crate) why: &'static str,
}

/// The shapes that a format is tested with: every count of rows and of outputs that takes another
/// way.
pub(crate) fn shapes(format: Format) -> Vec<Shape> {
    let step = format.step() as usize;
    let ragged = (288usize).next_multiple_of(step) + step;
    let shape = |rows, out, width, groups, why| Shape { rows, out, width, groups, why };
    vec![
        shape(1, 33, ragged, 2, "lanes and simdgroups without work"),
        shape(1, 7, step, 1, "one block a row"),
        shape(2, 7, 3 * step, 1, "two activation rows"),
        shape(3, 1, ragged, 1, "three activation rows, one output"),
        shape(8, 5, step, 2, "eight activation rows"),
    ]
}

/// Pairs of types for activations and results, one for each shape in turn.
pub(crate) const TYPES: [(Scalar, Scalar); 7] = [
    (Scalar::BF16, Scalar::BF16),
    (Scalar::F32, Scalar::F32),
    (Scalar::F16, Scalar::F16),
    (Scalar::F32, Scalar::BF16),
    (Scalar::BF16, Scalar::F32),
    (Scalar::F16, Scalar::F32),
    (Scalar::F32, Scalar::F16),
];

fn case(
    format: Format,
    types: (Scalar, Scalar),
    shape: Shape,
    bias: bool,
    schedule: GemvSchedule,
) -> Case {
    let Shape { rows, out, width, groups, why } = shape;
    let matrix = Matrix::new(format, 3, out, width);
    let (x, seen) = activations(types.0, rows * width, None, &schedule);
    let biases = noise(11, out);
    let want = products(&seen, &matrix, bias.then_some(&biases), &vec![1.0; rows], width);
    let mut buffers = vec![x, Buffer::zeros(types.1, rows * out), matrix.buffer()];
    if bias {
        buffers.push(Buffer::floats(Scalar::F32, &biases));
    }
    Case {
        kernel: gemv(types.0, types.1, format, bias, rows as u32, schedule).record(),
        label: format!("{rows} x {width} -> {out}, {}: {why}", schedule.name()),
        numbers: numbers(groups, width).with("out", out as u32),
        buffers,
        expected: vec![(1, Expected::Near(want, tolerance(types.1)))],
    }
}

/// The numbers that all these kernels have.
pub(crate) fn numbers(groups: u32, width: usize) -> Numbers {
    Numbers::new().with("groups", groups).with("width", width as u32)
}

/// Every format with every treatment of the activations, and schedules apart from the usual.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (f, format) in Format::all().into_iter().enumerate() {
        for int8 in [false, true] {
            if int8 && format.packing().is_none() {
                continue;
            }
            for (i, shape) in shapes(format).into_iter().enumerate() {
                // Twelve formats that differ in little share the shapes between them.
                if matches!(format, Format::Mlx { .. }) && (f + i + usize::from(int8)) % 5 > 1 {
                    continue;
                }
                let types = TYPES[(f + i + 2 * usize::from(int8)) % TYPES.len()];
                let formats = [format];
                let decode = Task::decode(&formats, shape.width as u32, shape.out as u32);
                let task = Task { rows: shape.rows as u32, x: types.0, int8, ..decode };
                let mut schedule = GemvSchedule::pick(&task);
                schedule.threads = [64, 32, 128][i % 3];
                cases.push(case(format, types, shape, i % 2 == 1, schedule));
            }
        }
    }
    cases.extend(wide());
    cases.extend(small_groups());
    cases.extend(short());
    cases
}

/// A router's rows, whole and ragged, as many as experts.
fn short() -> Vec<Case> {
    let mut cases = Vec::new();
    for (format, width) in [(Format::Dense(Scalar::F32), 2880), (Format::Dense(Scalar::BF16), 2048)]
    {
        for rows in [1, 3] {
            let formats = [format];
            let decode = Task::decode(&formats, width as u32, 32);
            let schedule = GemvSchedule::pick(&Task { rows: rows as u32, ..decode });
            let groups = schedule.groups(32, PROCESSORS);
            let shape = Shape { rows, out: 32, width, groups, why: "a router" };
            cases.push(case(format, TYPES[0], shape, rows == 1, schedule));
        }
    }
    cases
}

/// Every kind of format in many small groups: whole and ragged rows of several steps.
pub(crate) fn small_groups() -> Vec<Case> {
    let mut cases = Vec::new();
    for (f, format) in timed().into_iter().enumerate() {
        let formats = [format];
        for (rows, ragged) in [(1, false), (2, true), (4, false)] {
            let whole = (3 * 32 * format.run() as usize).next_multiple_of(format.step() as usize);
            let width = if ragged { whole - format.step() as usize } else { whole };
            let decode = Task::decode(&formats, width as u32, 19);
            let (x, tuned) = (TYPES[f % TYPES.len()].0, &crate::tuned::APPLE);
            let task = Task { rows: rows as u32, x, int8: false, tuned, ..decode };
            let schedule = GemvSchedule::pick(&task);
            let groups = schedule.groups(19, 8);
            let shape = Shape { rows, out: 19, width, groups, why: "many small groups" };
            cases.push(case(format, TYPES[f % TYPES.len()], shape, f % 2 == 1, schedule));
        }
    }
    cases
}

/// Several steps a row, each schedule whole and ragged, activations read in place.
fn wide() -> Vec<Case> {
    let mut cases = Vec::new();
    let why = "several steps a row, one ahead of the sums";
    for format in
        [Format::Dense(Scalar::BF16), Format::Block(DType::Q8_0), Format::Block(DType::Q4K)]
    {
        for (outputs, loads) in [(1, 1), (2, 2), (1, 2), (4, 1)] {
            let tile = 32 * format.run();
            let width = tile * loads * 3;
            for whole in [true, false] {
                let packed = format.packing().is_some();
                let width = if whole { width } else { width - format.step().max(32) };
                let shape = Shape { rows: 1, out: 9, width: width as usize, groups: 1, why };
                let activations = match (packed, outputs) {
                    (_, 4) => ActivationStorage::Direct,
                    (true, 1) => ActivationStorage::Bytes(width),
                    _ => ActivationStorage::Staged(width),
                };
                let schedule =
                    GemvSchedule { outputs, loads, threads: 64, resident: 2, activations, whole };
                cases.push(case(format, TYPES[0], shape, false, schedule));
            }
        }
    }
    cases
}

/// Formats worth timing: all that have their own way through the kernel.
pub(crate) fn timed() -> Vec<Format> {
    let usual = |f: &Format| match f {
        Format::Dense(scalar) => *scalar != Scalar::F32,
        Format::Block(_) | Format::Tiles(_) => true,
        Format::Mlx { group, scale, .. } => *group == 64 && *scale == Scalar::BF16,
    };
    Format::all().into_iter().filter(usual).collect()
}

/// Bytes of a matrix of a format.
pub(crate) fn matrix_bytes(format: Format, out: usize, width: usize) -> usize {
    crate::packed::Layout::new(format, out, width).map_or(0, |layout| layout.bytes())
}

/// Two shapes of an 8B model, in and out of its feed-forward network, and the routers of two mixtures,
/// one row, activations in bf16.
pub(super) fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    for format in timed() {
        for (out, width) in [(4096, 14336), (14336, 4096)] {
            for int8 in [false, true] {
                if !int8 || format.packing().is_some() {
                    benches.push(bench(format, out, width, int8));
                }
            }
        }
    }
    for (out, width) in [(128, 2048), (32, 2880)] {
        benches.push(bench(Format::Dense(Scalar::F32), out, width, false));
    }
    benches
}

fn bench(format: Format, out: usize, width: usize, int8: bool) -> Bench {
    let formats = [format];
    let decode = Task::decode(&formats, width as u32, out as u32);
    let schedule = GemvSchedule::pick(&Task { int8, ..decode });
    let bytes = matrix_bytes(format, out, width);
    let treatment = if int8 { "int8" } else { "float" };
    Bench {
        kernel: gemv(Scalar::BF16, Scalar::BF16, format, false, 1, schedule).record(),
        label: format!("{} {width} -> {out}, {treatment}", format.name()),
        numbers: numbers(schedule.groups(out as u32, PROCESSORS), width).with("out", out as u32),
        buffers: vec![
            Fill::Noise(Scalar::BF16, width),
            Fill::Zeros(Scalar::BF16, out),
            Fill::Noise(Scalar::U32, bytes / 4),
        ],
        bytes: (bytes + 2 * (width + out)) as u64,
        flops: 2 * (out * width) as u64,
        roof: Bottleneck::Memory,
    }
}

/// Proves every case of some kernels on the interpreter and prints how many there are.
#[cfg(test)]
pub(crate) fn prove(specs: &[tile::case::Spec]) {
    for spec in specs {
        let cases = (spec.cases)();
        let mut worst: f64 = 0.0;
        for case in &cases {
            let error = tile::interp::check(case);
            worst = worst.max(error.unwrap_or_else(|e| panic!("{}: {e}", case.label)));
        }
        for bench in (spec.benches)() {
            if let Err(fault) = tile::verify::verify(&bench.kernel) {
                panic!("{}: {fault}", bench.label);
            }
        }
        println!("{}: {} cases, relative error {worst:.1e}", spec.name, cases.len());
    }
}
