//! DoRA's gains (Liu et al. 2024): what the columns of a product are multiplied with, so that the
//! rows of its matrix, with the product of its factors, have lengths that are trained.
//!
//! ```text
//! gain[o] = magnitude[o] / |w[o] + scale up[o] down|
//! ```

use crate::sweep::{begin, require_lengths, when};
use crate::trial::{every_float, near, random, scaled};
use tile::case::{Bench, Bottleneck, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// Rows of a threadgroup, which read `down` together.
const ROWS: u32 = 4;
/// Threads of a threadgroup.
const THREADS: u32 = 256;

/// `weight[rows, width], down[rank, width], up[rows, rank], magnitudes[rows]`, row-major, in f64:
/// the gains, and one by each length.
pub fn reference(
    [weight, down, up, magnitudes]: [&[f32]; 4],
    rank: usize,
    scale: f32,
) -> [Vec<f32>; 2] {
    let width = down.len() / rank;
    let mut found = [const { Vec::new() }; 2];
    for (row, magnitude) in magnitudes.iter().enumerate() {
        let element = |i: usize| {
            let each =
                (0..rank).map(|r| f64::from(up[row * rank + r]) * f64::from(down[r * width + i]));
            f64::from(weight[row * width + i]) + f64::from(scale) * each.sum::<f64>()
        };
        let inverse = 1.0 / (0..width).map(|i| element(i).powi(2)).sum::<f64>().sqrt();
        found[0].push((f64::from(*magnitude) * inverse) as f32);
        found[1].push(inverse as f32);
    }
    found
}

/// The gains of all rows, and one by each length, on the device: see [`reference()`].
#[kernel]
pub fn row_gains(
    weight: In<{ scalar }>,
    down: In<f32>,
    up: In<f32>,
    magnitudes: In<f32>,
    gains: Out<f32>,
    inverses: Out<f32>,
    rows: Arg<u32>,
    width: Arg<u32>,
    rank: Arg<u32>,
    scale: Arg<f32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows").ceil_div(ROWS), fixed(1), fixed(1)], THREADS);
    require_lengths(&[
        ("weight", dim("rows") * dim("width")),
        ("down", dim("rank") * dim("width")),
        ("up", dim("rows") * dim("rank")),
        ("magnitudes", dim("rows")),
        ("gains", dim("rows")),
        ("inverses", dim("rows")),
    ]);
    begin();
    let first = group_id() * ROWS;
    // Past the last row it is repeated, and nothing is kept.
    let own: Vec<Val<u32>> = (0..ROWS).map(|k| (first + k).min(rows - 1u32)).collect();
    let sums: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
    strided(width).each(|i| {
        let changes: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
        range(0u32, rank).each(|r| {
            let low = down.get(r * width + i);
            for (row, change) in own.iter().zip(&changes) {
                change.set(low.fma(up.get(*row * rank + r), change.get()));
            }
        });
        for ((row, change), sum) in own.iter().zip(&changes).zip(&sums) {
            let element = change.get().fma(scale, weight.get(*row * width + i));
            sum.set(element.fma(element, sum.get()));
        }
    });
    for ((k, row), sum) in (0..ROWS).zip(&own).zip(&sums) {
        let inverse = 1.0 / group_sum(sum.get()).sqrt();
        when(Order::eq(thread_id(), 0u32) & Order::lt(first + k, rows), || {
            inverses.set(*row, inverse);
            gains.set(*row, magnitudes.get(*row) * inverse);
        });
    }
}

/// The numbers of a launch.
pub fn numbers([rows, width, rank]: [usize; 3], scale: f32) -> Numbers {
    let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
    numbers.with("rank", rank as u32).with_f32("scale", scale)
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "row_gains", cases, benches }];

fn cases() -> Vec<Case> {
    let case = |scalar: Scalar, (rows, width, rank, why): (usize, usize, usize, &str)| {
        let weight = random(scalar, width as u64, rows * width);
        let of = |seed: u64, count: usize| scaled(Scalar::F32, seed, count, 0.5);
        let (down, up) = (of(3, rank * width), of(4, rows * rank));
        let magnitudes = of(5, rows);
        let floats = [&weight, &down, &up, &magnitudes].map(Buffer::to_f32);
        let [gains, inverses] = reference(floats.each_ref().map(Vec::as_slice), rank, 2.0);
        let zeros = || Buffer::zeros(Scalar::F32, rows);
        Case {
            kernel: row_gains(scalar).record(),
            label: format!("{rows} x {width} of rank {rank} {scalar}, {why}"),
            numbers: numbers([rows, width, rank], 2.0),
            buffers: vec![weight, down, up, magnitudes, zeros(), zeros()],
            expected: vec![(4, near(Scalar::F32, &gains)), (5, near(Scalar::F32, &inverses))],
        }
    };
    let shapes = [
        (1, 1, 1, "one element"),
        (5, 33, 3, "a group that is not full"),
        (8, 300, 16, "some columns of a thread"),
    ];
    every_float(|scalar| shapes.into_iter().map(|shape| case(scalar, shape)).collect())
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let [rows, width, rank] = [8192, 2048, 16];
        let of = |count| Fill::Noise(Scalar::F32, count);
        let zeros = || Fill::Zeros(Scalar::F32, rows);
        let weight = Fill::Noise(scalar, rows * width);
        let buffers = vec![weight, of(rank * width), of(rows * rank), of(rows), zeros(), zeros()];
        vec![Bench {
            kernel: row_gains(scalar).record(),
            label: format!("{rows} x {width} of rank {rank}"),
            numbers: numbers([rows, width, rank], 2.0),
            buffers,
            bytes: (scalar.bytes() * rows * width) as u64,
            flops: (2 * rows * width * (rank + 2)) as u64,
            roof: Bottleneck::Memory,
        }]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
