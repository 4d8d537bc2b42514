//! The gated RMS norm behind a state space (Dao & Gu 2024): rows are multiplied with `silu(gate)`
//! and normed by groups of neighbouring columns: `y = rms_norm(x silu(gate)) weight`; or normed
//! first, as behind a delta net: `y = rms_norm(x) weight silu(gate)`.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, GatedNormBackward, GatedNormTangent, Reverse, Wrt, one, zeros};
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::rms_norm::team;
use crate::sweep::{Row, RowThreads, begin, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, framed, memory, random, rows_of, scaled};
use crate::{Op, Shape, Unary, alike, arity, expect, real};
use formats::Result;

/// `gate[rows, width], x[rows, width]; weight[width] -> [rows, width]`; or `weight[width / groups]`,
/// which all groups share, and which gradients do not have.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GatedNorm {
    /// Added to the mean square.
    pub eps: f32,
    /// Groups that a row is normed in; divides `width`.
    pub groups: usize,
    /// Whether the norm is in front of the gate.
    pub norm_first: bool,
}

impl Operation for GatedNorm {
    fn name(&self) -> &'static str {
        "gated_norm"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("gated_norm", inputs, 2, weights, &[1])?;
        alike("gated_norm", inputs)?;
        let width = inputs[0].width;
        let rest = if self.groups == 0 { width } else { width % self.groups };
        expect("gated_norm", "width modulo groups", &[rest], &[0])?;
        if weights[0] != [width / self.groups] {
            expect("gated_norm", "norm weight", weights[0], &[width])?;
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [gate, x] = [call.inputs[0], call.inputs[1]];
        reference(self, call.widths[0], [gate, x], &call.weights[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let weights = to.weight(0).map_or(to.width(X), |weight| weight[0]);
        let own = self.own_groups(to.width(X), weights);
        let width = to.width(X) / self.groups;
        let rows = to.rows(X) * self.groups;
        let kernel = gated_norm(to.scalar(X), team(width), self.norm_first);
        let bound = [
            ("gate", Bound::Value(X)),
            ("x", Bound::Value(Operand::Input(1))),
            ("weight", Bound::Weight(0)),
            ("y", Bound::Value(Y)),
        ];
        to.push(kernel, numbers(rows, own, width, self.eps), &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let op = GatedNormBackward { of: *self, weight: at.wants(Wrt::Weight(0)) };
        let operands = [at.input(0), at.input(1), dy];
        let found = at.record(Op::from(op), &operands, &[0])?;
        let all = [Wrt::Input(0), Wrt::Input(1), Wrt::Weight(0)];
        for (of, cotangent) in all.into_iter().zip(found) {
            if at.wants(of) {
                at.give(of, cotangent)?;
            }
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let inputs = [at.input(0), at.input(1)];
        let mut operands = inputs.to_vec();
        for (i, x) in inputs.into_iter().enumerate() {
            let tangent = at.tangent(i);
            operands.push(match tangent {
                Some(tangent) => tangent,
                None => zeros(at, x)?,
            });
        }
        let mut weights = vec![0];
        weights.extend(at.weight_tangent(0));
        let dy = one(at, GatedNormTangent(*self), &operands, &weights)?;
        at.add(0, dy)
    }
}

impl GatedNorm {
    /// Groups that have weights of their own, of rows of `width` elements: all, or 1 if they share
    /// the `weights` elements.
    pub fn own_groups(&self, width: usize, weights: usize) -> usize {
        weights / (width / self.groups)
    }
}

/// The gated norm of rows of `width` elements, in f64.
fn reference(op: &GatedNorm, width: usize, [gate, x]: [&[f32]; 2], weight: &[f32], y: &mut [f32]) {
    let each = width / op.groups;
    let weights = weight.chunks_exact(each).cycle();
    let rows = gate.chunks_exact(each).zip(x.chunks_exact(each)).zip(y.chunks_exact_mut(each));
    for (((gate, x), y), weight) in rows.zip(weights) {
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        let (gate, x) = (wide(gate), wide(x));
        let gated: Vec<f64> =
            gate.iter().zip(&x).map(|(gate, x)| Unary::Silu.apply(*gate) * x).collect();
        let normed = if op.norm_first { &x } else { &gated };
        let mean = normed.iter().map(|x| x * x).sum::<f64>() / each as f64;
        let scale = 1.0 / (mean + f64::from(op.eps)).sqrt();
        for i in 0..each {
            y[i] = (gated[i] * scale * f64::from(weight[i])) as f32;
        }
    }
}

/// The numbers of a launch over `rows` groups of `width` elements, `groups` of which, one behind the
/// other, have weights of their own.
pub fn numbers(rows: usize, groups: usize, width: usize, eps: f32) -> Numbers {
    Numbers::new()
        .with("rows", rows as u32)
        .with("groups", groups as u32)
        .with("width", width as u32)
        .with_f32("eps", eps)
}

/// The gated norm of `rows` groups of `width` elements, on the device; `weight` is
/// `[groups * width]`.
#[kernel]
pub fn gated_norm(
    gate: In<{ scalar }>,
    x: In<{ scalar }>,
    weight: In<f32>,
    y: Out<{ scalar }>,
    rows: Arg<u32>,
    groups: Const<u32>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    team: RowThreads,
    norm_first: bool,
) {
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[
        ("gate", size.clone()),
        ("x", size.clone()),
        ("weight", dim("groups") * dim("width")),
        ("y", size),
    ]);
    begin();
    let lanes = team.lanes(lanes_of_both(scalar, Scalar::F32));
    let own: Vec<Row> = team.rows(rows, width);
    let gated = |at: Val<u32>, lanes: u8| -> Vec<Val<f32>> {
        let (gate, x) = (load(gate, at, lanes), load(x, at, lanes));
        gate.into_iter().zip(x).map(|(gate, x)| real::unary(Unary::Silu, gate) * x).collect()
    };
    let squares: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
    team.sweep(width, lanes, |at, lanes| {
        let read = |row: &Row| -> Vec<Vec<Val<f32>>> {
            let normed = |&i: &Val<u32>| match norm_first {
                true => load(x, row.first + i, lanes),
                false => gated(row.first + i, lanes),
            };
            at.iter().map(normed).collect()
        };
        let loaded: Vec<_> = own.iter().map(read).collect();
        for (squares, row) in squares.iter().zip(loaded) {
            for v in row.into_iter().flatten() {
                squares.set(v.fma(v, squares.get()));
            }
        }
    });
    let scales: Vec<Val<f32>> = squares
        .iter()
        .map(|squares| (team.sum(squares.get()) / width.f32() + eps).rsqrt())
        .collect();
    // The weights of a row's group.
    let weights = |row: &Row| row.first % (groups * width);
    let own: Vec<(Row, Val<u32>)> = own.into_iter().map(|row| (row, weights(&row))).collect();
    team.sweep(width, lanes, |at, lanes| {
        let read = |(row, weights): &(Row, Val<u32>)| -> Vec<_> {
            let one =
                |&i: &Val<u32>| (gated(row.first + i, lanes), load(weight, *weights + i, lanes));
            at.iter().map(one).collect()
        };
        let loaded: Vec<_> = own.iter().map(read).collect();
        for (((row, _), &scale), loaded) in own.iter().zip(&scales).zip(loaded) {
            row.keep(|| {
                for (&i, (gated, weight)) in at.iter().zip(loaded) {
                    let values: Vec<Val<f32>> =
                        gated.into_iter().zip(weight).map(|(v, w)| v * scale * w).collect();
                    y.set_vec(row.first + i, &values);
                }
            });
        }
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "gated_norm", cases, benches }];

const EPS: f32 = 1e-5;

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(rows, groups, width, norm_first, why): (usize, usize, usize, bool, &str)| {
            let own = if why.contains("shared") { 1 } else { groups };
            let op = GatedNorm { eps: EPS, groups, norm_first };
            let n = rows * groups * width;
            let gate = scaled(scalar, n as u64 * 3 + 1, n, 4.0);
            let x = scaled(scalar, n as u64 * 3 + 2, n, 3.0);
            let weight = random(Scalar::F32, n as u64 * 3 + 3, own * width);
            let mut y = vec![0.0; n];
            let inputs = [&gate, &x].map(Buffer::to_f32);
            let inputs = inputs.each_ref().map(Vec::as_slice);
            reference(&op, groups * width, inputs, &weight.to_f32(), &mut y);
            let label = format!("{rows} x {groups} of {width} {scalar}, {why}");
            let kernel = gated_norm(scalar, team(width), norm_first);
            let numbers = numbers(rows * groups, own, width, EPS);
            framed(kernel, label, numbers, vec![gate, x, weight], &[(scalar, &y)])
        };
        [
            (2, 1, 2048, false, "whole rows"),
            (1, 1, 1543, true, "a whole row that no vector divides, the norm first"),
            (3, 8, 128, false, "groups for simdgroups"),
            (5, 3, 20, true, "groups that fill no simdgroup, the norm first"),
            (2, 2, 1024, false, "wide groups"),
            (1, 2, 5, false, "less than two vectors"),
            (3, 4, 128, true, "shared weights, the norm first"),
            (2, 3, 20, false, "shared weights of groups that fill no simdgroup"),
        ]
        .into_iter()
        .map(case)
        .collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let (groups, width) = (8, 1024);
        let rows = rows_of(scalar, groups * width);
        let n = rows * groups * width;
        let noise = |scalar, n| Fill::Noise(scalar, n);
        let mut buffers = vec![noise(scalar, n), noise(scalar, n)];
        buffers.extend([noise(Scalar::F32, groups * width), Fill::Zeros(scalar, n)]);
        let kernel = gated_norm(scalar, team(width), false);
        let numbers = numbers(rows * groups, groups, width, EPS);
        vec![memory(kernel, &format!("{rows} x 8 of 1024"), numbers, buffers, 8 * n as u64)]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
