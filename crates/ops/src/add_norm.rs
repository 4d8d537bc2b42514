//! A residual addition and the norm after it: `r' = r + x`, `y = rms_norm(r') * weight`. See
//! [`crate::rms_norm`].
//!
//! The norm sees `r'` rounded as it is stored, so that fusing the two changes no bit.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;

use crate::rms_norm::{SHAPES, normalise, numbers};
use crate::sweep::{Row, RowThreads, begin, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, exact, memory, near, random, rows_of, scaled};

/// `sum = residual + x`, rounded by `round`; then every row of `weight.len()` elements of it
/// normalised into `y`, in f64.
pub fn reference(
    residual: &[f32],
    x: &[f32],
    weight: &[f32],
    eps: f32,
    round: impl Fn(f32) -> f32,
    sum: &mut [f32],
    y: &mut [f32],
) {
    for i in 0..sum.len() {
        sum[i] = round(residual[i] + x[i]);
    }
    crate::rms_norm::reference(sum, weight, eps, y);
}

/// `sum = residual + x`, `y = rms_norm(sum) * weight` on rows of `width` elements, on the device.
/// `sum` may be the same buffer as `residual`.
#[kernel]
pub fn add_norm(
    residual: In<{ scalar }>,
    x: In<{ scalar }>,
    weight: In<{ weights }>,
    sum: Out<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    weights: Scalar,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = || dim("rows") * dim("width");
    require_vectors(&[
        ("residual", size()),
        ("x", size()),
        ("weight", dim("width")),
        ("sum", size()),
        ("y", size()),
    ]);
    begin();
    let row = Row::of_group(width);
    let first = row.first;
    let lanes = lanes_of_both(scalar, weights);
    let squares = Var::new(0.0);
    team.sweep(width, lanes, |at, lanes| {
        let loaded: Vec<_> = at
            .iter()
            .map(|&i| (load(residual, first + i, lanes), load(x, first + i, lanes)))
            .collect();
        for (&i, (residual, x)) in at.iter().zip(loaded) {
            let sums: Vec<Val<f32>> =
                residual.into_iter().zip(x).map(|(r, x)| (r + x).to(scalar).f32()).collect();
            sum.set_vec(first + i, &sums);
            for v in sums {
                squares.set(v.fma(v, squares.get()));
            }
        }
    });
    let scale = (team.sum(squares.get()) / width.f32() + eps).rsqrt();
    // Each thread reads back what it wrote itself.
    let x = |i, lanes| load(sum, i, lanes);
    normalise(team, (width, lanes), x, &[(row, scale)], weight, None, y);
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "add_norm", cases, benches }];

const EPS: f32 = 1e-5;

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar, weights: Scalar) -> Vec<Case> {
        let case = |(rows, width, _, why): (usize, usize, RowThreads, &str)| {
            let n = rows * width;
            let residual = scaled(scalar, width as u64 + 7, n, 4.0);
            let x = random(scalar, width as u64 + 8, n);
            let weight = random(weights, width as u64 + 9, width);
            let (mut sum, mut y) = (vec![0.0; n], vec![0.0; n]);
            let round = |v: f32| Buffer::floats(scalar, &[v]).to_f32()[0];
            let (r, a, w) = (residual.to_f32(), x.to_f32(), weight.to_f32());
            reference(&r, &a, &w, EPS, round, &mut sum, &mut y);
            let zeros = || Buffer::zeros(scalar, n);
            Case {
                kernel: add_norm(scalar, weights).record(),
                label: format!("{rows} x {width} {scalar}, {why}"),
                numbers: numbers(rows, width),
                buffers: vec![residual, x, weight, zeros(), zeros()],
                expected: vec![(3, exact(scalar, &sum)), (4, near(scalar, &y))],
            }
        };
        SHAPES.into_iter().filter(|shape| shape.2 == RowThreads::Group).map(case).collect()
    }
    fn both(scalar: Scalar) -> Vec<Case> {
        let mut all = of(scalar, scalar);
        if scalar != Scalar::F32 {
            all.extend(of(scalar, Scalar::F32));
        }
        all
    }
    every_float(both)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let n = rows * width;
        let (noise, zeros) = (Fill::Noise(scalar, n), Fill::Zeros(scalar, n));
        let weight = Fill::Noise(scalar, width);
        let buffers = vec![noise.clone(), noise, weight, zeros.clone(), zeros];
        let kernel = add_norm(scalar, scalar);
        vec![memory(
            kernel,
            &format!("{rows} x {width}"),
            numbers(rows, width),
            buffers,
            5 * n as u64,
        )]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
