//! A residual addition and the norm after it: `r' = r + x`, `y = rms_norm(r') * weight`. See [`crate::rms_norm`].
//!
//! The norm sees `r'` rounded as it is stored, so that fusing the two changes no bit.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;

use crate::rms_norm::{SHAPES, normalise, numbers};
use crate::sweep::{Row, Team, begin, lanes_of_both, load, require_vectors, store};
use crate::trial::{every_float, exact, memory, near, random, rows_of, scaled};

/// `sum = residual + x`, rounded by `round`; then every row of `weight.len()` elements of it normalised into `y`, in f64.
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

/// `sum = residual + x`, `y = rms_norm(sum) * weight` on rows of `width` elements, on the device. `sum` may be the same buffer
/// as `residual`.
#[kernel]
pub fn add_norm<T: Float, W: Float>(
    residual: In<T>,
    x: In<T>,
    weight: In<W>,
    sum: Out<T>,
    y: Out<T>,
    width: Const<u32>,
    eps: Const<f32>,
) {
    let team = Team::Group;
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
    let lanes = lanes_of_both::<T, W>();
    let squares = Var::new(0.0);
    team.sweep(width, lanes, |at, lanes| {
        let loaded: Vec<_> = at
            .iter()
            .map(|&i| (load(residual, first + i, lanes), load(x, first + i, lanes)))
            .collect();
        for (&i, (residual, x)) in at.iter().zip(loaded) {
            let sums: Vec<Val<f32>> =
                residual.into_iter().zip(x).map(|(r, x)| (r + x).cast::<T>().f32()).collect();
            store(sum, first + i, &sums);
            for v in sums {
                squares.set(v.fma(v, squares.get()));
            }
        }
    });
    let scale = (team.sum(squares.get()) / width.f32() + eps).rsqrt();
    // Each thread reads back what it wrote itself.
    normalise(team, width, lanes, |i, lanes| load(sum, i, lanes), &[(row, scale)], weight, y);
}

/// The kernel, its cases and benchmarks.
pub const KERNELS: &[Spec] = &[Spec { name: "add_norm", cases, benches }];

const EPS: f32 = 1e-5;

fn cases() -> Vec<Case> {
    fn of<T: Float, W: Float>() -> Vec<Case> {
        let case = |(rows, width, _, why): (usize, usize, Team, &str)| {
            let n = rows * width;
            let residual = scaled::<T>(width as u64 + 7, n, 4.0);
            let x = random::<T>(width as u64 + 8, n);
            let weight = random::<W>(width as u64 + 9, width);
            let (mut sum, mut y) = (vec![0.0; n], vec![0.0; n]);
            let round = |v: f32| Buffer::floats(T::SCALAR, &[v]).to_f32()[0];
            let (r, a, w) = (residual.to_f32(), x.to_f32(), weight.to_f32());
            reference(&r, &a, &w, EPS, round, &mut sum, &mut y);
            let zeros = || Buffer::zeros(T::SCALAR, n);
            Case {
                kernel: add_norm::<T, W>(),
                label: format!("{rows} x {width} {}, {why}", T::NAME),
                numbers: numbers(rows, width),
                buffers: vec![residual, x, weight, zeros(), zeros()],
                expected: vec![(3, exact::<T>(&sum)), (4, near::<T>(&y))],
            }
        };
        SHAPES.into_iter().filter(|shape| shape.2 == Team::Group).map(case).collect()
    }
    fn both<T: Float>() -> Vec<Case> {
        let mut all = of::<T, T>();
        if T::NAME != "f32" {
            all.extend(of::<T, f32>());
        }
        all
    }
    every_float!(both)
}

fn benches() -> Vec<Bench> {
    fn of<T: Float>() -> Vec<Bench> {
        let (rows, width) = (rows_of::<T>(4096), 4096);
        let n = rows * width;
        let (noise, zeros) = (Fill::Noise(T::SCALAR, n), Fill::Zeros(T::SCALAR, n));
        let weight = Fill::Noise(T::SCALAR, width);
        let buffers = vec![noise.clone(), noise, weight, zeros.clone(), zeros];
        let kernel = add_norm::<T, T>();
        vec![memory(
            kernel,
            &format!("{rows} x {width}"),
            numbers(rows, width),
            buffers,
            5 * n as u64,
        )]
    }
    every_float!(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
