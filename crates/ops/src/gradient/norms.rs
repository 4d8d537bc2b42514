//! Gradients of norms. With `n` the normed row before its weight and `g = dy weight`:
//! `dx = (g - n mean(g n)) / rms` of an RMS norm, `dx = (g - mean(g) - n mean(g n)) / deviation` of
//! a layer norm.

use super::products::{self, sums_of_rows};
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::rms_norm::{launch_numbers, team};
use crate::sweep::{
    Row, RowThreads, begin, lanes_of_both, load, require_lengths, require_vectors, when,
};
use crate::trial::{every_float, memory, near, random, rows_of, scaled};
use crate::{Rows, Shape, arity, expect, rms_norm};
use formats::Result;
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;

/// `x, dy; weight[group] -> dx, (dweight)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormBackward {
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the weight's gradient is an output.
    pub weight: bool,
}

/// `x, dy; weight[group] -> dx, (dweight), (dbias)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormBackward {
    /// Added to the variance.
    pub eps: f32,
    /// Whether the gradients of the weight and of the bias are outputs.
    pub weight: bool,
}

/// Adds a row's part to the gradients of weight and bias, and gives `dx`, all in f64. Where a
/// norm is not `centred`, its mean is taken to be 0.
fn row(
    x: &[f32],
    dy: &[f32],
    weight: &[f32],
    (eps, centred): (f32, bool),
    sums: [&mut [f64]; 2],
) -> Vec<f64> {
    let width = x.len() as f64;
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (x, dy, weight) = (wide(x), wide(dy), wide(weight));
    let mean = if centred { x.iter().sum::<f64>() / width } else { 0.0 };
    let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width;
    let scale = 1.0 / (square + f64::from(eps)).sqrt();
    let normed: Vec<f64> = x.iter().map(|x| (x - mean) * scale).collect();
    let [dweight, dbias] = sums;
    for i in 0..x.len() {
        dweight[i] += dy[i] * normed[i];
        dbias[i] += dy[i];
    }
    let along = (0..x.len()).map(|i| dy[i] * weight[i] * normed[i]).sum::<f64>() / width;
    let level = (0..x.len()).map(|i| dy[i] * weight[i]).sum::<f64>() / width;
    let level = if centred { level } else { 0.0 };
    (0..x.len()).map(|i| (dy[i] * weight[i] - level - normed[i] * along) * scale).collect()
}

fn reference(call: &mut ReferenceCall<'_>, how: (f32, bool)) {
    let weight = &call.weights[0];
    let width = weight.len();
    let (mut dweight, mut dbias) = (vec![0f64; width], vec![0f64; width]);
    let rows = call.inputs[0].chunks_exact(width).zip(call.inputs[1].chunks_exact(width));
    for ((x, dy), dx) in rows.zip(call.outputs[0].chunks_exact_mut(width)) {
        let found = row(x, dy, weight, how, [&mut dweight, &mut dbias]);
        dx.iter_mut().zip(found).for_each(|(to, from)| *to = from as f32);
    }
    for (to, from) in call.outputs[1..].iter_mut().zip([dweight, dbias]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from as f32);
    }
}

impl Operation for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        rms_norm::check(self.name(), inputs[0].width, weights[0])?;
        expect(self.name(), "width of dy", &[inputs[1].width], &[inputs[0].width])?;
        let dweight = Shape { rows: Rows::Fixed(1), width: weights[0][0] };
        Ok([inputs[0]].into_iter().chain(self.weight.then_some(dweight)).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call, (self.eps, false));
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        Ok(!self.weight && launch(to, self.eps, false)?)
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }
}

impl Operation for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        rms_norm::check(self.name(), inputs[0].width, weights[0])?;
        expect(self.name(), "width of dy", &[inputs[1].width], &[inputs[0].width])?;
        let sum = Shape { rows: Rows::Fixed(1), width: weights[0][0] };
        let sums = [sum, sum].into_iter().filter(|_| self.weight);
        Ok([inputs[0]].into_iter().chain(sums).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call, (self.eps, true));
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        Ok(!self.weight && launch(to, self.eps, true)?)
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }
}

fn launch(to: &mut dyn Launches, eps: f32, centred: bool) -> Result<bool> {
    let width = to.weight(0).map_or(to.width(X), |weight| weight[0]);
    let rows = to.rows(X) * (to.width(X) / width);
    let bound = [
        ("x", Bound::Value(X)),
        ("dy", Bound::Value(Operand::Input(1))),
        ("weight", Bound::Weight(0)),
        ("dx", Bound::Value(Y)),
    ];
    let kernel = norm_backward(to.scalar(X), team(width), centred);
    to.push(kernel, launch_numbers(rows, width, eps), &bound)?;
    Ok(true)
}

/// The mean of each row, or 0 where a norm is not `centred`.
#[track_caller]
fn means(
    team: RowThreads,
    rows: &[Row],
    x: In,
    (width, lanes): (Val<u32>, u8),
    centred: bool,
) -> Vec<Val<f32>> {
    let mean = |row: &Row| {
        let sum = Var::new(0.0);
        team.sweep(width, lanes, |at, lanes| {
            for value in at.iter().flat_map(|&i| load(x, row.first + i, lanes)) {
                sum.set(sum.get() + value);
            }
        });
        team.sum(sum.get()) / width.f32()
    };
    let nothing = 0.0f32.val();
    rows.iter().map(|row| if centred { mean(row) } else { nothing }).collect()
}

/// `dx` of norms of rows of `width` elements, on the device; `weight` is `[width]`. `dx` may be
/// `dy`.
#[kernel]
pub fn norm_backward(
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    weight: In<f32>,
    dx: Out<{ scalar }>,
    rows: Arg<u32>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    team: RowThreads,
    centred: bool,
) {
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[
        ("x", size.clone()),
        ("dy", size.clone()),
        ("weight", dim("width")),
        ("dx", size),
    ]);
    begin();
    let lanes = team.lanes(lanes_of_both(scalar, Scalar::F32));
    let own: Vec<Row> = team.rows(rows, width);
    let means = means(team, &own, x, (width, lanes), centred);
    // The row without its mean, and `dy weight`.
    let read = |row: &Row, mean: Val<f32>, i: Val<u32>, lanes: u8| -> Vec<(Val<f32>, Val<f32>)> {
        let (x, dy) = (load(x, row.first + i, lanes), load(dy, row.first + i, lanes));
        let each = x.into_iter().zip(dy).zip(load(weight, i, lanes));
        each.map(|((x, dy), w)| (if centred { x - mean } else { x }, dy * w)).collect()
    };
    let sums: Vec<[Var<f32>; 3]> = own.iter().map(|_| [(); 3].map(|()| Var::new(0.0))).collect();
    team.sweep(width, lanes, |at, lanes| {
        for ((row, mean), [squares, along, level]) in own.iter().zip(&means).zip(&sums) {
            for (x, g) in at.iter().flat_map(|&i| read(row, *mean, i, lanes)) {
                squares.set(x.fma(x, squares.get()));
                along.set(g.fma(x, along.get()));
                if centred {
                    level.set(level.get() + g);
                }
            }
        }
    });
    let shares: Vec<[Val<f32>; 3]> = sums
        .iter()
        .map(|[squares, along, level]| {
            let scale = (team.sum(squares.get()) / width.f32() + eps).rsqrt();
            let along = team.sum(along.get()) * scale * scale / width.f32();
            let level = if centred { team.sum(level.get()) / width.f32() } else { 0.0.val() };
            [scale, along, level]
        })
        .collect();
    team.sweep(width, lanes, |at, lanes| {
        for ((row, mean), [scale, along, level]) in own.iter().zip(&means).zip(&shares) {
            for &i in at {
                let each = read(row, *mean, i, lanes).into_iter();
                let values: Vec<Val<f32>> = each
                    .map(|(x, g)| {
                        let g = if centred { g - *level } else { g };
                        (g - x * *along) * *scale
                    })
                    .collect();
                row.keep(|| dx.set_vec(row.first + i, &values));
            }
        }
    });
}

/// The factors of rows of `width` elements, `1 / rms` of what is left without the row's mean, on
/// the device. Where a norm is not `centred`, its mean is taken to be 0; else a last buffer `means`
/// has them.
#[kernel]
pub fn norm_scales(
    x: In<{ scalar }>,
    scales: Out<f32>,
    rows: Arg<u32>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    centred: bool,
) {
    let team = RowThreads::Simd;
    team.launch(256);
    require_vectors(&[("x", dim("rows") * dim("width"))]);
    require_lengths(&[("scales", dim("rows"))]);
    let kept = centred.then(|| {
        require_lengths(&[("means", dim("rows"))]);
        <Out>::declare("means")
    });
    begin();
    let own: Vec<Row> = team.rows(rows, width);
    let lanes = team.lanes(lanes_of_both(scalar, Scalar::F32));
    let means = means(team, &own, x, (width, lanes), centred);
    let sums: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
    team.sweep(width, lanes, |at, lanes| {
        for ((row, mean), sum) in own.iter().zip(&means).zip(&sums) {
            for x in at.iter().flat_map(|&i| load(x, row.first + i, lanes)) {
                let x = if centred { x - *mean } else { x };
                sum.set(x.fma(x, sum.get()));
            }
        }
    });
    for ((row, mean), sum) in own.iter().zip(&means).zip(&sums) {
        let scale = (team.sum(sum.get()) / width.f32() + eps).rsqrt();
        row.keep(|| {
            when(Order::eq(lane_id(), 0u32), || {
                scales.set(row.first / width, scale);
                if let Some(means) = kept {
                    means.set(row.first / width, *mean);
                }
            });
        });
    }
}

/// The gradient of a norm's weight, `y[i] = sum_t dy[t, i] (x[t, i] - means[t]) scales[t]`, on the
/// device, in an order that follows from the number of rows alone. `means` is a last buffer of
/// norms that are `centred`; see [`norm_scales`].
#[kernel]
pub fn norm_weights(
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    scales: In<f32>,
    y: Out<f32>,
    rows: Arg<u32>,
    width: Arg<u32>,
    scalar: Scalar,
    centred: bool,
) {
    require_lengths(&[("scales", dim("rows"))]);
    let means = centred.then(|| {
        require_lengths(&[("means", dim("rows"))]);
        <In>::declare("means")
    });
    let term = |row: Val<u32>, at: Val<u32>| {
        let x = x.get(at);
        let x = means.map_or(x, |means| x - means.get(row));
        dy.get(at) * x * scales.get(row)
    };
    sums_of_rows(&["x", "dy"], (y, None), [rows, width], term);
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "norm_backward", cases, benches },
    Spec { name: "norm_scales", cases: scale_cases, benches: scale_benches },
    Spec { name: "norm_weights", cases: weight_cases, benches: weight_benches },
];

/// The mean of a row, or 0, and its factor.
fn statistics(row: &[f32], (eps, centred): (f32, bool)) -> (f32, f32) {
    let width = row.len() as f64;
    let sum: f64 = row.iter().map(|x| f64::from(*x)).sum();
    let mean = if centred { sum / width } else { 0.0 };
    let squares: f64 = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
    (mean as f32, (1.0 / (squares / width + f64::from(eps)).sqrt()) as f32)
}

fn scale_cases() -> Vec<Case> {
    const EPS: f32 = 1e-5;
    let case =
        |scalar: Scalar, (rows, width, _, why): (usize, usize, RowThreads, &str), centred| {
            let x = scaled(scalar, (rows + 37 * width) as u64, rows * width, 3.0);
            let each = x.to_f32();
            let each = each.chunks_exact(width).map(|row| statistics(row, (EPS, centred)));
            let (means, scales): (Vec<f32>, Vec<f32>) = each.unzip();
            let zeros = || Buffer::zeros(Scalar::F32, rows);
            let mut buffers = vec![x, zeros()];
            let mut expected = vec![(1, near(Scalar::F32, &scales))];
            if centred {
                buffers.push(zeros());
                expected.push((2, near(Scalar::F32, &means)));
            }
            let centre = if centred { "centred, " } else { "" };
            Case {
                kernel: norm_scales(scalar, centred).record(),
                label: format!("{rows} x {width} {scalar}, {centre}{why}"),
                numbers: launch_numbers(rows, width, EPS),
                buffers,
                expected,
            }
        };
    every_float(|scalar| {
        // A row of one element has nothing left without its mean.
        let each = rms_norm::SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]);
        let each = each.filter(|(shape, centred)| !centred || shape.1 > 1);
        each.map(|(shape, centred)| case(scalar, shape, centred)).collect()
    })
}

fn scale_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let buffers = vec![Fill::Noise(scalar, rows * width), Fill::Zeros(Scalar::F32, rows)];
        let numbers = launch_numbers(rows, width, 1e-5);
        let flops = 2 * (rows * width) as u64;
        vec![memory(
            norm_scales(scalar, false),
            &format!("{rows} x {width}"),
            numbers,
            buffers,
            flops,
        )]
    })
}

fn weight_cases() -> Vec<Case> {
    const EPS: f32 = 1e-5;
    let case = |scalar: Scalar, (rows, width, why): (usize, usize, &str), centred| {
        let x = scaled(scalar, rows as u64 + 3, rows * width, 3.0);
        let dy = random(scalar, width as u64 + 5, rows * width);
        let (all, gradients) = (x.to_f32(), dy.to_f32());
        let (mut sums, mut rest) = (vec![0.0; width], vec![0.0; width]);
        let (mut means, mut scales) = (Vec::new(), Vec::new());
        for (x, dy) in all.chunks_exact(width).zip(gradients.chunks_exact(width)) {
            row(x, dy, &vec![1.0; width], (EPS, centred), [&mut sums, &mut rest]);
            let (mean, scale) = statistics(x, (EPS, centred));
            means.push(mean);
            scales.push(scale);
        }
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        let scales = Buffer::floats(Scalar::F32, &scales);
        let mut buffers = vec![x, dy, scales, Buffer::zeros(Scalar::F32, width)];
        buffers.extend(centred.then(|| Buffer::floats(Scalar::F32, &means)));
        let centre = if centred { "centred, " } else { "" };
        Case {
            kernel: norm_weights(scalar, centred).record(),
            label: format!("{rows} x {width} {scalar}, {centre}{why}"),
            numbers: products::numbers(rows, width),
            buffers,
            expected: vec![(3, near(Scalar::F32, &sums))],
        }
    };
    let shapes =
        [(1, 1, "one element"), (5, 33, "fewer rows than shares"), (129, 64, "a ragged share")];
    every_float(|scalar| {
        let each = shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)]);
        let each = each.filter(|(shape, centred)| !centred || shape.1 > 1);
        each.map(|(shape, centred)| case(scalar, shape, centred)).collect()
    })
}

fn weight_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let noise = || Fill::Noise(scalar, rows * width);
        let scales = Fill::Noise(Scalar::F32, rows);
        let buffers = vec![noise(), noise(), scales, Fill::Zeros(Scalar::F32, width)];
        let (numbers, flops) = (products::numbers(rows, width), 3 * (rows * width) as u64);
        vec![memory(
            norm_weights(scalar, false),
            &format!("{rows} x {width}"),
            numbers,
            buffers,
            flops,
        )]
    })
}

fn cases() -> Vec<Case> {
    const EPS: f32 = 1e-5;
    let case =
        |scalar: Scalar, (rows, width, team, why): (usize, usize, RowThreads, &str), centred| {
            let x = scaled(scalar, rows as u64 * 31 + width as u64, rows * width, 3.0);
            let dy = random(scalar, width as u64 + 7, rows * width);
            let weight = random(Scalar::F32, width as u64 + 1, width);
            let (all, gradients, weights) = (x.to_f32(), dy.to_f32(), weight.to_f32());
            let mut dx = Vec::new();
            let mut unused = [vec![0.0; width], vec![0.0; width]];
            for (x, dy) in all.chunks_exact(width).zip(gradients.chunks_exact(width)) {
                let [a, b] = &mut unused;
                let found = row(x, dy, &weights, (EPS, centred), [a, b]);
                dx.extend(found.into_iter().map(|dx| dx as f32));
            }
            let centre = if centred { "centred, " } else { "" };
            Case {
                kernel: norm_backward(scalar, team, centred).record(),
                label: format!("{rows} x {width} {scalar}, {centre}{why}"),
                numbers: launch_numbers(rows, width, EPS),
                buffers: vec![x, dy, weight, Buffer::zeros(scalar, rows * width)],
                expected: vec![(3, near(scalar, &dx))],
            }
        };
    let of = |scalar: Scalar| {
        // A row of one element has a gradient of nothing but rounding.
        let shapes = rms_norm::SHAPES.into_iter().skip(1);
        let each = shapes.flat_map(|shape| [false, true].map(|centred| (shape, centred)));
        // Nor has one of two elements without their mean.
        let each = each.filter(|(shape, centred)| !centred || shape.1 > 2);
        each.map(|(shape, centred)| case(scalar, shape, centred)).collect()
    };
    every_float(of)
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let n = rows * width;
        let noise = |n| Fill::Noise(scalar, n);
        let buffers =
            vec![noise(n), noise(n), Fill::Noise(Scalar::F32, width), Fill::Zeros(scalar, n)];
        let kernel = norm_backward(scalar, RowThreads::Group, false);
        let numbers = launch_numbers(rows, width, 1e-5);
        vec![memory(kernel, &format!("{rows} x {width}"), numbers, buffers, 8 * n as u64)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
