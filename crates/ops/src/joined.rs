//! Results of matrices that are stored one after the other and multiplied as one, so that a row has
//! the columns of each: [`split_columns`] separates them, and [`gated_columns`] combines the
//! columns of a gate and of its operand into one result.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Extent, Mode, Numbers};

use crate::map::Unary;
use crate::real;
use crate::sweep::{begin, require_lengths, when};
use crate::trial::{memory, near, random};

/// Threads of a group.
const THREADS: u32 = 256;
/// Elements that each thread loads before it stores the first.
const EACH: u32 = 8;

/// The columns of a thread, the groups of a row being side by side.
#[track_caller]
fn own() -> Vec<Val<u32>> {
    let start = group_id() * (THREADS * EACH) + thread_id();
    (0..EACH).map(|i| start + i * THREADS).collect()
}

/// `yJ[rows, outJ]` of `x[rows, width]`, for `count` results whose columns are all of `x`'s.
#[kernel]
pub fn split_columns(x: In<f32>, width: Const<u32>, count: u32) {
    launch(Mode::Row, [dim("width").ceil_div(THREADS * EACH), dim("rows"), fixed(1)], THREADS);
    require_lengths(&[("x", dim("rows") * dim("width"))]);
    let result = |j: u32| {
        let (out, name) = (format!("out{j}"), format!("y{j}"));
        let (columns, y) = (Const::<u32>::declare(&out), <Out>::stored(&name, Scalar::F32));
        require_lengths(&[(&name, dim("rows") * dim(&out))]);
        (columns, y)
    };
    let results: Vec<(Val<u32>, Out)> = (0..count).map(result).collect();
    let starts = results
        .iter()
        .scan(0u32.val(), |end, (columns, _)| Some(std::mem::replace(end, *end + *columns)));
    let starts: Vec<Val<u32>> = starts.collect();
    begin();
    let row = group_id_of(1);
    let own = own();
    // Beyond the end the last element is read again, and goes nowhere.
    let load = |column: &Val<u32>| x.get(row * width + (*column).min(width - 1));
    let loaded: Vec<Val<f32>> = own.iter().map(load).collect();
    for (column, value) in own.into_iter().zip(loaded) {
        for (&(columns, y), &start) in results.iter().zip(&starts) {
            // What lies before the first wraps around.
            let at = column - start;
            when(Order::lt(at, columns), || y.set(row * columns + at, value));
        }
    }
}

/// `y[rows, out] = f(gate) * up`, where a row of `x` has the `out` columns of the gate, then
/// the `out` columns of `up`.
#[kernel]
pub fn gated_columns(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    out: Const<u32>,
    scalar: Scalar,
    f: Unary,
) {
    launch(Mode::Row, [dim("out").ceil_div(THREADS * EACH), dim("rows"), fixed(1)], THREADS);
    let size: Extent = dim("rows") * dim("out");
    require_lengths(&[("x", size.clone() * 2u32), ("y", size)]);
    begin();
    let row = group_id_of(1);
    let own = own();
    let load = |column: &Val<u32>| {
        let at = row * (out * 2u32) + (*column).min(out - 1);
        [x.get(at).f32(), x.get(at + out).f32()]
    };
    let loaded: Vec<[Val<f32>; 2]> = own.iter().map(load).collect();
    for (column, [gate, up]) in own.into_iter().zip(loaded) {
        when(Order::lt(column, out), || y.set(row * out + column, real::unary(f, gate) * up));
    }
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "split_columns", cases: split_cases, benches: split_benches },
    Spec { name: "gated_columns", cases: gated_cases, benches: gated_benches },
];

fn split_numbers(rows: usize, outs: &[usize]) -> Numbers {
    let numbers = Numbers::new().with("rows", rows as u32);
    let numbers = numbers.with("width", outs.iter().sum::<usize>() as u32);
    let out = |numbers: Numbers, (j, out): (usize, &usize)| {
        numbers.with(format!("out{j}").as_str(), *out as u32)
    };
    outs.iter().enumerate().fold(numbers, out)
}

fn split_cases() -> Vec<Case> {
    let case = |(rows, outs): (usize, &[usize])| {
        let width: usize = outs.iter().sum();
        let x = random(Scalar::F32, width as u64, rows * width);
        let values = x.to_f32();
        let part = |j: usize| {
            let (first, out) = (outs[..j].iter().sum::<usize>(), outs[j]);
            let row = |row: &[f32]| row[first..first + out].to_vec();
            let part: Vec<f32> = values.chunks(width).flat_map(row).collect();
            (j + 1, Expected::Exact(part.into_iter().map(f64::from).collect()))
        };
        let results = outs.iter().map(|out| Buffer::zeros(Scalar::F32, rows * out));
        Case {
            kernel: split_columns(outs.len() as u32).record(),
            label: format!("{rows} rows of {outs:?}"),
            numbers: split_numbers(rows, outs),
            buffers: std::iter::once(x.clone()).chain(results).collect(),
            expected: (0..outs.len()).map(part).collect(),
        }
    };
    let all: [(usize, &[usize]); 4] =
        [(1, &[64, 16, 16]), (5, &[96, 32, 40]), (3, &[2049, 7]), (2, &[4096, 1024, 1024])];
    all.map(case).into()
}

fn split_benches() -> Vec<Bench> {
    let bench = |rows: usize| {
        let outs = [4096, 1024, 1024];
        let zeros = |out: &usize| Fill::Zeros(Scalar::F32, rows * out);
        let x = Fill::Noise(Scalar::F32, rows * outs.iter().sum::<usize>());
        let buffers = std::iter::once(x).chain(outs.iter().map(zeros)).collect();
        let numbers = split_numbers(rows, &outs);
        memory(split_columns(3), &format!("{rows} x 6144"), numbers, buffers, 0)
    };
    [32, 128].map(bench).into()
}

fn gated_cases() -> Vec<Case> {
    let case = |(rows, out, scalar, f): (usize, usize, Scalar, Unary)| {
        let x = random(scalar, out as u64, 2 * rows * out);
        let values = x.to_f32();
        let mut y = Vec::with_capacity(rows * out);
        for row in values.chunks(2 * out) {
            let (gate, up) = row.split_at(out);
            let mut result = vec![0.0; out];
            crate::gated::reference(f, gate, up, &mut result);
            y.extend(result);
        }
        Case {
            kernel: gated_columns(scalar, f).record(),
            label: format!("{rows} x {out} {scalar} {f:?}"),
            numbers: Numbers::new().with("rows", rows as u32).with("out", out as u32),
            buffers: vec![x, Buffer::zeros(scalar, rows * out)],
            expected: vec![(1, near(scalar, &y))],
        }
    };
    [
        (1, 8, Scalar::F32, Unary::Silu),
        (3, 300, Scalar::BF16, Unary::Silu),
        (2, 2056, Scalar::BF16, Unary::GeluTanh),
        (5, 64, Scalar::F16, Unary::GeluErf),
    ]
    .map(case)
    .into()
}

fn gated_benches() -> Vec<Bench> {
    let bench = |rows: usize| {
        let (out, scalar) = (14_336, Scalar::BF16);
        let x = Fill::Noise(scalar, 2 * rows * out);
        let buffers = vec![x, Fill::Zeros(scalar, rows * out)];
        let numbers = Numbers::new().with("rows", rows as u32).with("out", out as u32);
        let kernel = gated_columns(scalar, Unary::Silu);
        memory(kernel, &format!("{rows} x {out}"), numbers, buffers, 5)
    };
    [32, 128].map(bench).into()
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
