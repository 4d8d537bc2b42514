//! Gradients of the gated RMS norm behind a state space ([`crate::gated_norm`]). With `s` the gate's
//! function, `v` what is normed, `n = v / rms(v)` and `g` the gradient of `n`:
//!
//! ```text
//! dv = (g - n mean(g n)) / rms(v)
//! y = n weight, v = x s:     g = dy weight,    dx = dv s,  ds = dv x,           dweight = dy n
//! y = n weight s, v = x:     g = dy weight s,  dx = dv,    ds = dy weight n,    dweight = dy n s
//! ```

use super::products::{self, sums_of_rows};
use super::round_sums;
use crate::gated_norm::numbers;
use crate::math::sigmoid;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::rms_norm::team;
use crate::sweep::{
    Row, RowThreads, begin, lanes_of_both, load, require_lengths, require_vectors, when,
};
use crate::trial::{every_float, memory, near, random, rows_of, scaled};
use crate::{GatedNorm, Rows, Shape, alike, arity, expect};
use formats::Result;
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

/// `gate, x, dy; weight -> dgate, dx, (dweight)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedNormBackward {
    /// The norm.
    pub of: GatedNorm,
    /// Whether the weight's gradient is an output.
    pub weight: bool,
}

/// `gate, x, dgate, dx; weight, (dweight) -> dy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedNormTangent(pub GatedNorm);

/// A group of a row, in f64: the gate's function and its slope, `x`, what is normed over its root
/// mean square, and the factor that makes it so.
struct Normed {
    s: Vec<f64>,
    slope: Vec<f64>,
    x: Vec<f64>,
    n: Vec<f64>,
    scale: f64,
}

fn normed(of: &GatedNorm, gate: &[f32], x: &[f32]) -> Normed {
    let logistic = |z: f64| 1.0 / (1.0 + (-z).exp());
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
    let (gate, x) = (wide(gate), wide(x));
    let s: Vec<f64> = gate.iter().map(|z| z * logistic(*z)).collect();
    let slope = |z: &f64| logistic(*z) * (1.0 + z * (1.0 - logistic(*z)));
    let slope = gate.iter().map(slope).collect();
    let v: Vec<f64> = match of.norm_first {
        true => x.clone(),
        false => x.iter().zip(&s).map(|(x, s)| x * s).collect(),
    };
    let mean = v.iter().map(|v| v * v).sum::<f64>() / v.len() as f64;
    let scale = 1.0 / (mean + f64::from(of.eps)).sqrt();
    Normed { n: v.iter().map(|v| v * scale).collect(), s, slope, x, scale }
}

impl Normed {
    /// The change of what is normed from that of `n`, or the other way round.
    fn across(&self, change: &[f64]) -> Vec<f64> {
        let along: f64 = change.iter().zip(&self.n).map(|(change, n)| change * n).sum();
        let mean = along / self.n.len() as f64;
        change.iter().zip(&self.n).map(|(change, n)| (change - n * mean) * self.scale).collect()
    }
}

impl GatedNormBackward {
    /// The gradients of one row's `gate` and `x`; the weight's are added to `sums`, if there are
    /// any.
    pub fn row(
        &self,
        [gate, x, dy, weight]: [&[f32]; 4],
        [dgate, dx]: [&mut [f32]; 2],
        mut sums: Option<&mut [f64]>,
    ) {
        let each = gate.len() / self.of.groups;
        for start in (0..gate.len()).step_by(each) {
            let own = start..start + each;
            let of = normed(&self.of, &gate[own.clone()], &x[own.clone()]);
            let first = self.of.norm_first;
            let dy: Vec<f64> = dy[own.clone()].iter().map(|dy| f64::from(*dy)).collect();
            let weight = weight[own.clone()].iter().map(|w| f64::from(*w));
            // `dy weight`.
            let g: Vec<f64> = dy.iter().zip(weight).map(|(dy, w)| dy * w).collect();
            let gated =
                |g: &[f64]| -> Vec<f64> { g.iter().zip(&of.s).map(|(g, s)| g * s).collect() };
            let dv = of.across(&if first { gated(&g) } else { g.clone() });
            for i in 0..each {
                let (of_x, of_s) = match first {
                    true => (dv[i], g[i] * of.n[i]),
                    false => (dv[i] * of.s[i], dv[i] * of.x[i]),
                };
                dx[start + i] = of_x as f32;
                dgate[start + i] = (of_s * of.slope[i]) as f32;
                if let Some(sums) = &mut sums {
                    sums[start + i] += dy[i] * of.n[i] * if first { of.s[i] } else { 1.0 };
                }
            }
        }
    }
}

impl Operation for GatedNormBackward {
    fn name(&self) -> &'static str {
        "gated_norm_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[1])?;
        expect(self.name(), "norm weight", weights[0], &[inputs[0].width])?;
        let y = self.of.infer(&inputs[..2], weights)?;
        alike(self.name(), &[y[0], inputs[2]])?;
        let dweight = Shape { rows: Rows::Fixed(1), width: y[0].width };
        Ok([y[0], y[0]].into_iter().chain(self.weight.then_some(dweight)).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        let mut sums = vec![0.0; width];
        let [mut dgate, mut dx] = [0, 1].map(|i| vec![0f32; call.outputs[i].len()]);
        for t in 0..dx.len() / width {
            let row = t * width..(t + 1) * width;
            let [gate, x, dy] = [0, 1, 2].map(|i| &call.inputs[i][row.clone()]);
            let to = [&mut dgate[row.clone()], &mut dx[row]];
            self.row([gate, x, dy, &call.weights[0]], to, Some(&mut sums));
        }
        (call.outputs[0], call.outputs[1]) = (dgate, dx);
        round_sums(&mut call.outputs[2..], [sums]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        if self.weight {
            // Its sums over rows need what rows are multiplied with in between.
            return Ok(false);
        }
        let width = to.width(X) / self.of.groups;
        let rows = to.rows(X) * self.of.groups;
        let kernel = gated_norm_backward(to.scalar(X), team(width), self.of.norm_first, false);
        let bound = [
            ("gate", Bound::Value(X)),
            ("x", Bound::Value(Operand::Input(1))),
            ("dy", Bound::Value(Operand::Input(2))),
            ("weight", Bound::Weight(0)),
            ("dgate", Bound::Value(Y)),
            ("dx", Bound::Value(Operand::Output(1))),
        ];
        to.push(kernel, numbers(rows, self.of.groups, width, self.of.eps), &bound)?;
        Ok(true)
    }
}

impl Operation for GatedNormTangent {
    fn name(&self) -> &'static str {
        "gated_norm_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 4, weights, &[1, 2])?;
        alike(self.name(), inputs)?;
        for weight in weights {
            expect(self.name(), "norm weight", weight, &[inputs[0].width])?;
        }
        self.0.infer(&inputs[..2], &weights[..1])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let each = call.widths[0] / self.0.groups;
        let weights: Vec<&[f32]> = call.weights.iter().map(Vec::as_slice).collect();
        for (at, y) in call.outputs[0].chunks_exact_mut(each).enumerate() {
            let [gate, x, dgate, dx] = [0, 1, 2, 3].map(|i| &call.inputs[i][at * each..][..each]);
            let of = normed(&self.0, gate, x);
            let first = at % self.0.groups * each;
            let ds: Vec<f64> = (0..each).map(|i| of.slope[i] * f64::from(dgate[i])).collect();
            let dv: Vec<f64> = match self.0.norm_first {
                true => dx.iter().map(|dx| f64::from(*dx)).collect(),
                false => (0..each).map(|i| f64::from(dx[i]) * of.s[i] + of.x[i] * ds[i]).collect(),
            };
            let dn = of.across(&dv);
            for (i, y) in y.iter_mut().enumerate() {
                let w = f64::from(weights[0][first + i]);
                let dw = weights.get(1).map_or(0.0, |dw| f64::from(dw[first + i]));
                let change = dn[i] * w + of.n[i] * dw;
                *y = match self.0.norm_first {
                    true => change * of.s[i] + of.n[i] * w * ds[i],
                    false => change,
                } as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

/// An element of a group, as [`gated_norm_backward`] reads it.
struct Element {
    x: Val<f32>,
    /// The gate's function and its slope.
    s: Val<f32>,
    slope: Val<f32>,
    /// What is normed, and the gradient of that over its root mean square.
    v: Val<f32>,
    g: Val<f32>,
    /// `dy weight`.
    dy: Val<f32>,
}

impl Element {
    #[track_caller]
    fn new(z: Val<f32>, x: Val<f32>, dy: Val<f32>, norm_first: bool) -> Element {
        let logistic = sigmoid(z);
        let s = z * logistic;
        let slope = logistic * (z * (1.0 - logistic) + 1.0);
        let (v, g) = if norm_first { (x, dy * s) } else { (x * s, dy) };
        Element { x, s, slope, v, g, dy }
    }
}

/// `dgate` and `dx` of gated norms of groups of `width` elements, of which `groups` are a row, on
/// the device; `weight` is `[groups * width]`. If `keeps`, a last buffer `scales` gets the factor
/// of each group, one over its root mean square.
#[kernel]
pub fn gated_norm_backward(
    gate: In<{ scalar }>,
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    weight: In<f32>,
    dgate: Out<{ scalar }>,
    dx: Out<{ scalar }>,
    rows: Arg<u32>,
    groups: Const<u32>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    team: RowThreads,
    norm_first: bool,
    keeps: bool,
) {
    team.launch(256);
    let size = || dim("rows") * dim("width");
    require_vectors(&["gate", "x", "dy", "dgate", "dx"].map(|name| (name, size())));
    require_vectors(&[("weight", dim("groups") * dim("width"))]);
    let scales = keeps.then(|| {
        require_lengths(&[("scales", dim("rows"))]);
        <Out>::declare("scales")
    });
    begin();
    let lanes = team.lanes(lanes_of_both(scalar, Scalar::F32));
    let own: Vec<Row> = team.rows(rows, width);
    let read = |row: &Row, i: Val<u32>, lanes: u8| -> Vec<Element> {
        let [gate, x, dy] = [gate, x, dy].map(|from| load(from, row.first + i, lanes));
        let weight = load(weight, row.first % (groups * width) + i, lanes);
        let each = gate.into_iter().zip(x).zip(dy.into_iter().zip(weight));
        each.map(|((z, x), (dy, w))| Element::new(z, x, dy * w, norm_first)).collect()
    };
    let sums: Vec<[Var<f32>; 2]> = own.iter().map(|_| [(); 2].map(|()| Var::new(0.0))).collect();
    team.sweep(width, lanes, |at, lanes| {
        for (row, [squares, along]) in own.iter().zip(&sums) {
            for Element { v, g, .. } in at.iter().flat_map(|&i| read(row, i, lanes)) {
                squares.set(v.fma(v, squares.get()));
                along.set(g.fma(v, along.get()));
            }
        }
    });
    let shares: Vec<[Val<f32>; 2]> = sums
        .iter()
        .map(|[squares, along]| {
            let scale = (team.sum(squares.get()) / width.f32() + eps).rsqrt();
            [scale, team.sum(along.get()) * scale * scale / width.f32()]
        })
        .collect();
    team.sweep(width, lanes, |at, lanes| {
        for (row, &[scale, along]) in own.iter().zip(&shares) {
            for &i in at {
                let (of_gate, of_x): (Vec<_>, Vec<_>) = read(row, i, lanes)
                    .into_iter()
                    .map(|Element { x, s, slope, v, g, dy }| {
                        let dv = (g - v * along) * scale;
                        let (of_x, of_s) =
                            if norm_first { (dv, dy * (v * scale)) } else { (dv * s, dv * x) };
                        (of_s * slope, of_x)
                    })
                    .unzip();
                row.keep(|| {
                    dgate.set_vec(row.first + i, &of_gate);
                    dx.set_vec(row.first + i, &of_x);
                });
            }
        }
    });
    let member = match team {
        RowThreads::Group => thread_id(),
        RowThreads::Simd => lane_id(),
    };
    if let Some(scales) = scales {
        for (row, &[scale, _]) in own.iter().zip(&shares) {
            row.keep(|| when(Order::eq(member, 0u32), || scales.set(row.first / width, scale)));
        }
    }
}

/// The gradient of a gated norm's weight, `y[i] = sum_t dy[t, i] x[t, i] silu(gate[t, i])
/// scales[t, group]`, on the device, in an order that follows from the number of rows alone; see
/// [`gated_norm_backward`]. `width` are all columns of all `groups`.
#[kernel]
pub fn gated_norm_weights(
    gate: In<{ scalar }>,
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    scales: In<f32>,
    y: Out<f32>,
    rows: Arg<u32>,
    width: Arg<u32>,
    groups: Const<u32>,
    scalar: Scalar,
) {
    require_lengths(&[("scales", dim("rows") * dim("groups"))]);
    let each = width / groups;
    let term = |row: Val<u32>, at: Val<u32>| {
        let group = (at - row * width) / each;
        let z = gate.get(at);
        dy.get(at) * x.get(at) * (z * sigmoid(z)) * scales.get(row * groups + group)
    };
    sums_of_rows(&["gate", "x", "dy"], (y, None), [rows, width], term);
}

/// The numbers of a launch of [`gated_norm_weights`] over rows of `width` elements.
pub fn weight_numbers(rows: usize, groups: usize, width: usize) -> Numbers {
    products::numbers(rows, width).with("groups", groups as u32)
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "gated_norm_backward", cases, benches },
    Spec { name: "gated_norm_weights", cases: weight_cases, benches: weight_benches },
];

const EPS: f32 = 1e-5;

/// Operands of rows of `groups` of `width` elements: `gate`, `x`, `dy` and the weight; and by the
/// definition `dgate`, `dx` and the weight's gradient.
fn worked(
    scalar: Scalar,
    of: GatedNorm,
    [rows, width]: [usize; 2],
) -> ([Buffer; 4], [Vec<f32>; 3]) {
    let (n, row) = (rows * of.groups * width, of.groups * width);
    let gate = scaled(scalar, n as u64 * 3 + 1, n, 4.0);
    let x = scaled(scalar, n as u64 * 3 + 2, n, 3.0);
    let dy = random(scalar, n as u64 * 3 + 3, n);
    let weight = random(Scalar::F32, n as u64 * 3 + 4, row);
    let operands = [gate, x, dy, weight];
    let [gate, x, dy, weight] = operands.each_ref().map(Buffer::to_f32);
    let (mut dgate, mut dx, mut sums) = (vec![0.0; n], vec![0.0; n], vec![0.0; row]);
    for own in (0..n).step_by(row).map(|start| start..start + row) {
        let inputs = [&gate[own.clone()], &x[own.clone()], &dy[own.clone()], &weight];
        let to = [&mut dgate[own.clone()], &mut dx[own]];
        GatedNormBackward { of, weight: true }.row(inputs, to, Some(&mut sums));
    }
    let mut dweight = [vec![0.0; row]];
    round_sums(&mut dweight, [sums]);
    let [dweight] = dweight;
    (operands, [dgate, dx, dweight])
}

/// One over the root mean square of each group of what is normed, by the definition.
fn scales_of(of: &GatedNorm, gate: &[f32], x: &[f32], width: usize) -> Vec<f32> {
    let groups = gate.chunks_exact(width).zip(x.chunks_exact(width));
    groups.map(|(gate, x)| normed(of, gate, x).scale as f32).collect()
}

/// Rows, groups, elements of a group, and whether the norm is in front of the gate.
const SHAPES: [(usize, usize, usize, bool, &str); 6] = [
    (2, 1, 2048, false, "whole rows"),
    (1, 1, 1543, true, "a whole row that no vector divides, the norm first"),
    (3, 8, 128, false, "groups for simdgroups"),
    (5, 3, 20, true, "groups that fill no simdgroup, the norm first"),
    (2, 2, 1024, true, "wide groups, the norm first"),
    (9, 2, 5, false, "less than two vectors"),
];

fn cases() -> Vec<Case> {
    let case =
        |scalar, (rows, groups, width, norm_first, why): (usize, usize, usize, bool, &str)| {
            let of = GatedNorm { eps: EPS, groups, norm_first };
            let (operands, [dgate, dx, _]) = worked(scalar, of, [rows, width]);
            let scales = scales_of(&of, &operands[0].to_f32(), &operands[1].to_f32(), width);
            // Groups of a simdgroup keep them, and some of a threadgroup.
            let keeps = rows > 1;
            let mut buffers = operands.to_vec();
            buffers.extend([dgate.len(), dx.len()].map(|len| Buffer::zeros(scalar, len)));
            let mut expected = vec![(4, near(scalar, &dgate)), (5, near(scalar, &dx))];
            if keeps {
                buffers.push(Buffer::zeros(Scalar::F32, scales.len()));
                expected.push((6, near(Scalar::F32, &scales)));
            }
            Case {
                kernel: gated_norm_backward(scalar, team(width), norm_first, keeps).record(),
                label: format!("{rows} x {groups} of {width} {scalar}, {why}"),
                numbers: numbers(rows * groups, groups, width, EPS),
                buffers,
                expected,
            }
        };
    every_float(|scalar| SHAPES.into_iter().map(|shape| case(scalar, shape)).collect())
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (groups, width) = (8, 1024);
        let rows = rows_of(scalar, groups * width);
        let n = rows * groups * width;
        let mut buffers = [(); 3].map(|()| Fill::Noise(scalar, n)).to_vec();
        buffers.push(Fill::Noise(Scalar::F32, groups * width));
        buffers.extend([(); 2].map(|()| Fill::Zeros(scalar, n)));
        let kernel = gated_norm_backward(scalar, team(width), false, false);
        let numbers = numbers(rows * groups, groups, width, EPS);
        vec![memory(kernel, &format!("{rows} x 8 of 1024"), numbers, buffers, 16 * n as u64)]
    })
}

fn weight_cases() -> Vec<Case> {
    let case =
        |scalar, (rows, groups, width, norm_first, why): (usize, usize, usize, bool, &str)| {
            let of = GatedNorm { eps: EPS, groups, norm_first };
            let ([gate, x, dy, _], [_, _, dweight]) = worked(scalar, of, [rows, width]);
            let scales = scales_of(&of, &gate.to_f32(), &x.to_f32(), width);
            let y = Buffer::zeros(Scalar::F32, dweight.len());
            Case {
                kernel: gated_norm_weights(scalar).record(),
                label: format!("{rows} x {groups} of {width} {scalar}, {why}"),
                numbers: weight_numbers(rows, groups, groups * width),
                buffers: vec![gate, x, dy, Buffer::floats(Scalar::F32, &scales), y],
                expected: vec![(4, near(Scalar::F32, &dweight))],
            }
        };
    let shapes = [
        (1, 1, 7, true, "one row, the norm first"),
        (5, 3, 11, false, "fewer rows than shares"),
        (129, 2, 32, true, "a ragged share, the norm first"),
    ];
    every_float(|scalar| shapes.into_iter().map(|shape| case(scalar, shape)).collect())
}

fn weight_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (groups, width) = (8, 8192);
        let rows = rows_of(scalar, width);
        let n = rows * width;
        let mut buffers = [(); 3].map(|()| Fill::Noise(scalar, n)).to_vec();
        buffers.push(Fill::Noise(Scalar::F32, rows * groups));
        buffers.push(Fill::Zeros(Scalar::F32, width));
        let (kernel, numbers) = (gated_norm_weights(scalar), weight_numbers(rows, groups, width));
        vec![memory(kernel, &format!("{rows} x 8192 by 8"), numbers, buffers, 10 * n as u64)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
