//! Root-mean-square norm: `y = x / sqrt(mean(x^2) + eps) * weight` (Zhang & Sennrich 2019).
//!
//! A weight narrower than the row normalises each group of that width by itself: the per-head q/k
//! norm.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, NormTangent, Reverse, RmsNormBackward, Wrt, give, one};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{Row, RowThreads, begin, lanes, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, memory, near, random, rows_of, scaled};
use crate::{Op, Shape, arity, expect};
use formats::Result;

/// `x[rows, width]; weight[group] -> [rows, width]`, `group` dividing `width`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

impl Operation for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("rms_norm", inputs, 1, weights, &[1])?;
        check("rms_norm", inputs[0].width, weights[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call.inputs[0], &call.weights[0], self.eps, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let width = to.weight(0).map_or(to.width(X), |weight| weight[0]);
        let rows = to.rows(X) * (to.width(X) / width);
        let scalar = to.scalar(X);
        let types = NormTypes { x: scalar, weight: Scalar::F32, y: scalar };
        let bound = [("x", Bound::Value(X)), ("weight", Bound::Weight(0)), ("y", Bound::Value(Y))];
        to.push(rms_norm(types, team(width)), launch_numbers(rows, width, self.eps), &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let (x, weight) = (at.input(0), at.wants(Wrt::Weight(0)));
        let op = RmsNormBackward { eps: self.eps, weight };
        let found = at.record(Op::from(op), &[x, dy], &[0])?;
        for (of, cotangent) in [Wrt::Input(0), Wrt::Weight(0)].into_iter().zip(found) {
            give(at, of, |_| Ok(cotangent))?;
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        if let Some(dx) = at.tangent(0) {
            let (x, op) = (at.input(0), NormTangent { eps: self.eps, centred: false });
            let dy = one(at, op, &[x, dx], &[0])?;
            at.add(0, dy)?;
        }
        let Some(weight) = at.weight_tangent(0) else { return Ok(()) };
        let x = at.input(0);
        let dy = one(at, *self, &[x], &[weight])?;
        at.add(0, dy)
    }
}

/// A norm weight for rows of `width`: rank one, and its length divides `width`.
pub(crate) fn check(name: &str, width: usize, weight: &[usize]) -> Result<()> {
    let group = match weight {
        [group] if *group > 0 => *group,
        _ => width,
    };
    expect(name, "norm weight", weight, &[group])?;
    expect(name, "width modulo norm weight", &[width % group], &[0])
}

/// Normalises every group of `weight.len()` elements of `x` into `y`, in f64.
pub fn reference(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len())) {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        for i in 0..x.len() {
            y[i] = (f64::from(x[i]) * scale * f64::from(weight[i])) as f32;
        }
    }
}

/// The types of a norm's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NormTypes {
    /// Element type of the input.
    pub x: Scalar,
    /// Element type of the norm's weight.
    pub weight: Scalar,
    /// Element type of the result.
    pub y: Scalar,
}

/// The threads that norm a row of `width` elements.
pub fn team(width: usize) -> RowThreads {
    if width <= 512 { RowThreads::Simd } else { RowThreads::Group }
}

/// The numbers of a norm's launch.
pub fn launch_numbers(rows: usize, width: usize, eps: f32) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32).with_f32("eps", eps)
}

/// Normalises rows of `width` elements, on the device; `weight` is `[width]`. Per-head norms are
/// rows too.
#[kernel]
pub fn rms_norm(
    x: In<{ types.x }>,
    weight: In<{ types.weight }>,
    y: Out<{ types.y }>,
    rows: Arg<u32>,
    width: Const<u32>,
    eps: Const<f32>,
    types: NormTypes,
    team: RowThreads,
) {
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("weight", dim("width")), ("y", size)]);
    begin();
    let lanes = team.lanes(lanes_of_both(types.x, types.weight).min(lanes(types.y)));
    let own = scales(team, team.rows(rows, width), (width, lanes), eps, x);
    normalise(team, (width, lanes), |i, lanes| load(x, i, lanes), &own, weight, None, y);
}

/// Rows, each with the inverse of the root of its mean square.
#[track_caller]
pub(crate) fn scales(
    team: RowThreads,
    own: Vec<Row>,
    (width, lanes): (Val<u32>, u8),
    eps: Val<f32>,
    x: In,
) -> Vec<(Row, Val<f32>)> {
    let squares: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
    team.sweep(width, lanes, |at, lanes| {
        let read =
            |row: &Row| -> Vec<_> { at.iter().map(|&i| load(x, row.first + i, lanes)).collect() };
        let loaded: Vec<_> = own.iter().map(read).collect();
        for (squares, row) in squares.iter().zip(loaded) {
            for v in row.into_iter().flatten() {
                squares.set(v.fma(v, squares.get()));
            }
        }
    });
    own.into_iter()
        .zip(&squares)
        .map(|(row, squares)| (row, (team.sum(squares.get()) / width.f32() + eps).rsqrt()))
        .collect()
}

/// `y = x * scale * weight` along rows, each with its scale, and a residual's row if there is one.
#[track_caller]
pub(crate) fn normalise(
    team: RowThreads,
    (width, lanes): (Val<u32>, u8),
    x: impl Fn(Val<u32>, u8) -> Vec<Val<f32>>,
    rows: &[(Row, Val<f32>)],
    weight: In,
    residual: Option<In>,
    y: Out,
) {
    team.sweep(width, lanes, |at, lanes| {
        let weights: Vec<_> = at.iter().map(|&i| load(weight, i, lanes)).collect();
        let read = |(row, _): &(Row, _)| -> Vec<_> {
            let one = |&i: &Val<u32>| {
                let more = residual.map(|residual| load(residual, row.first + i, lanes));
                (x(row.first + i, lanes), more)
            };
            at.iter().map(one).collect()
        };
        let loaded: Vec<_> = rows.iter().map(read).collect();
        for ((row, scale), loaded) in rows.iter().zip(loaded) {
            row.keep(|| {
                for ((&i, (x, more)), weight) in at.iter().zip(loaded).zip(&weights) {
                    let normed = x.into_iter().zip(weight).map(|(x, w)| x * *scale * *w);
                    let values: Vec<Val<f32>> = match more {
                        Some(more) => normed.zip(more).map(|(y, more)| more + y).collect(),
                        None => normed.collect(),
                    };
                    y.set_vec(row.first + i, &values);
                }
            });
        }
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "rms_norm", cases, benches }];

/// Rows, width, who works on a row, and why.
pub(crate) const SHAPES: [(usize, usize, RowThreads, &str); 10] = [
    (1, 1, RowThreads::Group, "one element"),
    (2, 5, RowThreads::Group, "less than a vector"),
    (3, 129, RowThreads::Group, "a width no vector divides"),
    (2, 2048, RowThreads::Group, "a vector or two per thread"),
    (1, 7176, RowThreads::Group, "several vectors per thread and a remainder"),
    (1, 7171, RowThreads::Group, "a wide row of single elements"),
    (1, 128, RowThreads::Simd, "one head, seven idle simdgroups"),
    (19, 128, RowThreads::Simd, "heads that do not fill the last group"),
    (9, 100, RowThreads::Simd, "heads that fill neither lanes nor group"),
    (8, 2, RowThreads::Simd, "the smallest pair"),
];

fn cases() -> Vec<Case> {
    fn of(types: NormTypes) -> Vec<Case> {
        let case = |(rows, width, team, why): (usize, usize, RowThreads, &str)| {
            let x = scaled(types.x, rows as u64 * 31 + width as u64, rows * width, 3.0);
            let weight = random(types.weight, width as u64 + 1, width);
            let mut y = vec![0.0; rows * width];
            reference(&x.to_f32(), &weight.to_f32(), EPS, &mut y);
            Case {
                kernel: rms_norm(types, team).record(),
                label: format!("{rows} x {width} {}, {why}", types.x),
                numbers: numbers(rows, width),
                buffers: vec![x, weight, Buffer::zeros(types.y, rows * width)],
                expected: vec![(2, near(types.y, &y))],
            }
        };
        SHAPES.into_iter().map(case).collect()
    }
    fn both(scalar: Scalar) -> Vec<Case> {
        // Weights are f32 in many files whatever the activations are.
        let same = NormTypes { x: scalar, weight: scalar, y: scalar };
        let mut all = of(same);
        if scalar != Scalar::F32 {
            all.extend(of(NormTypes { weight: Scalar::F32, ..same }));
            let narrowed = NormTypes { x: Scalar::F32, weight: Scalar::F32, y: scalar };
            all.extend(of(narrowed).into_iter().step_by(2));
        }
        all
    }
    every_float(both)
}

const EPS: f32 = 1e-5;

/// The numbers of a launch, here and in other norms.
pub(crate) fn numbers(rows: usize, width: usize) -> Numbers {
    launch_numbers(rows, width, EPS)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let types = NormTypes { x: scalar, weight: scalar, y: scalar };
        let bench = |rows: usize, width: usize, team: RowThreads| {
            let n = rows * width;
            let buffers =
                vec![Fill::Noise(scalar, n), Fill::Noise(scalar, width), Fill::Zeros(scalar, n)];
            let kernel = rms_norm(types, team);
            let label = format!("{rows} x {width}");
            memory(kernel, &label, numbers(rows, width), buffers, 4 * n as u64)
        };
        vec![
            bench(rows_of(scalar, 4096), 4096, RowThreads::Group),
            bench(rows_of(scalar, 128), 128, RowThreads::Simd),
        ]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_its_own_mean() {
        let x = [3.0, 4.0, 0.0, 2.0];
        let mut y = [0.0; 4];
        reference(&x, &[1.0, 2.0], 0.0, &mut y);
        let (a, b) = (12.5f32.sqrt(), 2f32.sqrt());
        for (y, want) in y.iter().zip([3.0 / a, 8.0 / a, 0.0, 4.0 / b]) {
            assert!((y - want).abs() < 1e-6, "{y} {want}");
        }
        let norm = RmsNorm { eps: 0.0 };
        assert!(norm.infer(&[Shape::tokens(10)], &[&[4]]).is_err());
        assert!(norm.infer(&[Shape::tokens(10)], &[&[0]]).is_err());
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
