//! Selective state spaces over packed sequences, and their gradients. As [`crate::selective_scan`],
//! without a cache: a sequence begins with matrices of zeros.
//!
//! A row makes of a head's matrix `h` in front of it `h' = g h + B u`, where `g = exp(decay step)`
//! and `u = step x`, and `y = C h' + skip x`. From the gradient `D` of the matrix after the row
//! follows the gradient of the matrix before it:
//!
//! ```text
//! D += C dy,  dC = h' dy,  dB = D u,  du = B D,  dg = <D, h>,  D = g D
//! dx = step du + skip dy,  dstep = <du, x> + dg g decay,  ddecay = dg g step,  dskip = <x, dy>
//! ```
//!
//! Where each element decays at a rate of its own, see [`by_element`].

pub mod by_element;
pub mod kernels;

pub(crate) mod cases;

use super::{Forward, Reverse, RuleValue, Wrt, one, round_sums, same_widths, zeros};
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Op, Rows, SelectiveScan, Shape, arity, expect};
use formats::{Error, ErrorKind, Result};
use std::ops::Range;

/// `xbc[tokens, width], dt[tokens, heads]; decay[heads], bias[heads], skip[heads] ->
/// y[tokens, heads * head_dim]`; or the operands of [`SelectiveScan`] where each element decays at a
/// rate of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedScan(pub SelectiveScan);

/// `xbc, dt, dy; decay, bias, skip -> dxbc, ddt, ddecay, dbias, dskip`; or
/// `x, step, b, c, dy; decay, skip -> dx, dstep, db, dc, ddecay, dskip`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScanBackward(pub SelectiveScan);

/// `xbc, dt, dxbc, ddt; decay, bias, skip, (ddecay, dbias, dskip) -> dy`; or
/// `x, step, b, c, dx, dstep, db, dc; decay, skip, (ddecay, dskip) -> dy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScanTangent(pub SelectiveScan);

/// One head's numbers.
#[derive(Debug, Clone, Copy)]
pub struct ScanHead {
    /// The rate at which it forgets.
    pub decay: f64,
    /// Added to `dt`.
    pub bias: f64,
    /// The factor on `x` in the result.
    pub skip: f64,
    /// The least and the greatest step.
    pub limit: [f64; 2],
}

/// A position of one head.
#[derive(Debug, Clone, Copy)]
struct ScanStep {
    /// The step, and how it changes with `dt`.
    step: f64,
    slope: f64,
    /// What remains of the matrix.
    gate: f64,
}

/// The gradients of a row's operands that one head gives, `B` and `C` aside.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScanSlopes {
    /// Of `dt`, and of its bias.
    pub dt: f64,
    /// Of the rate.
    pub decay: f64,
    /// Of the factor on `x` in the result.
    pub skip: f64,
}

/// Gradients in the place of a row's `x`, `B` and `C`; those of `B` and `C` are added to.
pub struct ScanRow<'a> {
    /// Of `x`, `[head_dim]`.
    pub x: &'a mut [f32],
    /// Of `B`, `[state]`.
    pub b: &'a mut [f32],
    /// Of `C`, `[state]`.
    pub c: &'a mut [f32],
}

impl ScanHead {
    /// A head of these weights.
    pub fn new(of: &SelectiveScan, weights: [&[f32]; 3], head: usize) -> ScanHead {
        let [decay, bias, skip] = weights.map(|weight| f64::from(weight[head]));
        ScanHead { decay, bias, skip, limit: of.limit.map(f64::from) }
    }

    fn step(&self, dt: f32) -> ScanStep {
        let shifted = f64::from(dt) + self.bias;
        let [least, most] = self.limit;
        let step = shifted.max(0.0) + (-shifted.abs()).exp().ln_1p();
        // A step on a bound counts as one that changes.
        let slope = match (least..=most).contains(&step) {
            true => 1.0 / (1.0 + (-shifted).exp()),
            false => 0.0,
        };
        let step = step.clamp(least, most);
        ScanStep { step, slope, gate: (self.decay * step).exp() }
    }

    /// Moves the matrix `[state, head_dim]` one row on.
    pub fn advance(&self, matrix: &mut [f32], [x, b]: [&[f32]; 2], dt: f32) {
        let ScanStep { step, gate, .. } = self.step(dt);
        let (step, gate) = (step as f32, gate as f32);
        for (row, b) in matrix.chunks_exact_mut(x.len()).zip(b) {
            let b = b * step;
            row.iter_mut().zip(x).for_each(|(h, x)| *h = *h * gate + b * x);
        }
    }

    /// The row's result, of the matrix behind it.
    pub fn answer(&self, matrix: &[f32], [x, c]: [&[f32]; 2], y: &mut [f32]) {
        let skip = self.skip as f32;
        y.iter_mut().zip(x).for_each(|(y, x)| *y = skip * x);
        for (row, c) in matrix.chunks_exact(x.len()).zip(c) {
            y.iter_mut().zip(row).for_each(|(y, h)| *y += c * h);
        }
    }

    /// The gradients of the row's operands, from those of its result and of the matrix `after` it;
    /// `slopes` then holds the gradient of the matrix `before` it. `sums` is memory for a row of
    /// `x`.
    pub fn backward(
        &self,
        [before, after]: [&[f32]; 2],
        slopes: &mut [f32],
        [x, b, c, dy]: [&[f32]; 4],
        dt: f32,
        to: ScanRow<'_>,
        sums: &mut [f32],
    ) -> ScanSlopes {
        let found = self.step(dt);
        let (step, gate) = (found.step as f32, found.gate as f32);
        let n = x.len();
        let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let mut of_gate = 0.0;
        sums.fill(0.0);
        let matrices = before.chunks_exact(n).zip(after.chunks_exact(n));
        for (i, (slopes, (before, after))) in slopes.chunks_exact_mut(n).zip(matrices).enumerate() {
            slopes.iter_mut().zip(dy).for_each(|(slope, dy)| *slope += c[i] * dy);
            to.c[i] += dot(after, dy);
            to.b[i] += step * dot(slopes, x);
            sums.iter_mut().zip(&*slopes).for_each(|(sum, slope)| *sum += b[i] * slope);
            of_gate += f64::from(dot(slopes, before));
            slopes.iter_mut().for_each(|slope| *slope *= gate);
        }
        let skip = self.skip as f32;
        for ((to, of), dy) in to.x.iter_mut().zip(&*sums).zip(dy) {
            *to = step * of + skip * dy;
        }
        let of_power = of_gate * found.gate;
        let of_step = f64::from(dot(sums, x)) + of_power * self.decay;
        ScanSlopes {
            dt: of_step * found.slope,
            decay: of_power * found.step,
            skip: f64::from(dot(x, dy)),
        }
    }
}

/// Where the parts of a head's row lie in a row of `xbc`.
pub fn parts(of: &SelectiveScan, head: usize) -> [Range<usize>; 3] {
    let [x, b, c] = of.starts(head);
    [x..x + of.head_dim, b..b + of.state, c..c + of.state]
}

/// A head's matrices in front of and behind all rows, and its steps, in f64.
fn matrices(
    of: &SelectiveScan,
    head: usize,
    (xbc, dt): (&[f32], &[f32]),
    weights: [&[f32]; 3],
    first: &[u32],
) -> Vec<(Vec<f64>, Vec<f64>, ScanStep)> {
    let own = ScanHead::new(of, weights, head);
    let [x, b, _] = parts(of, head);
    let mut state = vec![0.0; of.state * of.head_dim];
    let mut all = Vec::with_capacity(first.len());
    for (t, first) in first.iter().enumerate() {
        if *first as usize == t {
            state.fill(0.0);
        }
        let before = state.clone();
        let (row, step) = (&xbc[t * of.width()..][..of.width()], own.step(dt[t * of.heads + head]));
        for (i, b) in row[b.clone()].iter().enumerate() {
            for (j, x) in row[x.clone()].iter().enumerate() {
                let at = &mut state[i * of.head_dim + j];
                *at = *at * step.gate + f64::from(*b) * step.step * f64::from(*x);
            }
        }
        all.push((before, state.clone(), step));
    }
    all
}

fn weights_of<'a>(call: &'a ReferenceCall<'_>) -> [&'a [f32]; 3] {
    [0, 1, 2].map(|i| call.weights[i].as_slice())
}

impl Operation for PackedScan {
    fn name(&self) -> &'static str {
        "packed_selective_scan"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        self.0.infer(inputs, weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let of = &self.0;
        if of.by_element {
            return by_element::output(of, call);
        }
        let (width, mut y) = (of.heads * of.head_dim, vec![0f32; call.outputs[0].len()]);
        for h in 0..of.heads {
            let weights = weights_of(call);
            let inputs = (call.inputs[0], call.inputs[1]);
            let skip = f64::from(weights[2][h]);
            let [x, _, c] = parts(of, h);
            let all = matrices(of, h, inputs, weights, call.packed.first);
            for (t, (_, after, _)) in all.iter().enumerate() {
                let row = &call.inputs[0][t * of.width()..][..of.width()];
                for (j, x) in row[x.clone()].iter().enumerate() {
                    let asked = row[c.clone()].iter().enumerate();
                    let asked = asked.map(|(i, c)| f64::from(*c) * after[i * of.head_dim + j]);
                    let sum = skip * f64::from(*x) + asked.sum::<f64>();
                    y[t * width + h * of.head_dim + j] = sum as f32;
                }
            }
        }
        call.outputs[0] = y;
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let (inputs, weights) = (0..self.0.inputs().len(), 0..self.0.weights().len());
        let mut operands: Vec<RuleValue> = inputs.clone().map(|i| at.input(i)).collect();
        operands.push(dy);
        let own: Vec<usize> = weights.clone().collect();
        let found = at.record(Op::from(ScanBackward(self.0)), &operands, &own)?;
        let each = inputs.map(Wrt::Input).chain(weights.map(Wrt::Weight));
        for (of, cotangent) in each.zip(found) {
            if at.wants(of) {
                at.give(of, cotangent)?;
            }
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let (inputs, weights) = (self.0.inputs().len(), self.0.weights().len());
        let mut operands: Vec<RuleValue> = (0..inputs).map(|i| at.input(i)).collect();
        for i in 0..inputs {
            let (x, tangent) = (at.input(i), at.tangent(i));
            operands.push(match tangent {
                Some(tangent) => tangent,
                None => zeros(at, x)?,
            });
        }
        let tangents: Vec<usize> = (0..weights).filter_map(|i| at.weight_tangent(i)).collect();
        if ![0, weights].contains(&tangents.len()) {
            let expected = "tangents of all of its weights";
            let error = Error::new(self.name(), expected, tangents.len());
            return Err(error.of(ErrorKind::Unsupported));
        }
        let weights: Vec<usize> = (0..weights).chain(tangents).collect();
        let dy = one(at, ScanTangent(self.0), &operands, &weights)?;
        at.add(0, dy)
    }
}

impl Operation for ScanBackward {
    fn name(&self) -> &'static str {
        "selective_scan_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let (read, held) = (self.0.inputs().len(), self.0.weights());
        arity(self.name(), inputs, read + 1, weights, &[held.len()])?;
        let y = self.0.infer(&inputs[..read], weights)?;
        expect(self.name(), "width of dy", &[inputs[read].width], &[y[0].width])?;
        let vector = |(_, width)| Shape { rows: Rows::Fixed(1), width };
        Ok(inputs[..read].iter().copied().chain(held.into_iter().map(vector)).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let of = &self.0;
        if of.by_element {
            return by_element::backward(of, call);
        }
        let (width, n) = (of.width(), of.head_dim);
        let first = call.packed.first;
        let mut sums: Vec<Vec<f64>> =
            call.outputs.iter().map(|output| vec![0.0; output.len()]).collect();
        for h in 0..of.heads {
            let weights = weights_of(call);
            let own = ScanHead::new(of, weights, h);
            let [x, b, c] = parts(of, h);
            let all = matrices(of, h, (call.inputs[0], call.inputs[1]), weights, first);
            let mut slopes = vec![0.0; of.state * n];
            for (t, (before, after, step)) in all.iter().enumerate().rev() {
                let row = &call.inputs[0][t * width..][..width];
                let dy = &call.inputs[2][t * of.heads * n + h * n..][..n];
                let (mut of_gate, mut of_step) = (0.0, 0.0);
                for j in 0..n {
                    let (x_at, dy) = (t * width + x.start + j, f64::from(dy[j]));
                    let x = f64::from(row[x.start + j]);
                    let mut of_written = 0.0;
                    for i in 0..of.state {
                        let at = i * n + j;
                        let slope = slopes[at] + f64::from(row[c.start + i]) * dy;
                        sums[0][t * width + c.start + i] += after[at] * dy;
                        sums[0][t * width + b.start + i] += slope * step.step * x;
                        of_written += f64::from(row[b.start + i]) * slope;
                        of_gate += slope * before[at];
                        slopes[at] = slope * step.gate;
                    }
                    sums[0][x_at] += step.step * of_written + own.skip * dy;
                    of_step += of_written * x;
                    sums[4][h] += x * dy;
                }
                let of_power = of_gate * step.gate;
                let of_dt = (of_step + of_power * own.decay) * step.slope;
                sums[1][t * of.heads + h] = of_dt;
                sums[2][h] += of_power * step.step;
                sums[3][h] += of_dt;
                if first[t] as usize == t {
                    slopes.fill(0.0);
                }
            }
        }
        round_sums(&mut call.outputs, sums);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for ScanTangent {
    fn name(&self) -> &'static str {
        "selective_scan_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let (read, held) = (self.0.inputs().len(), self.0.weights().len());
        arity(self.name(), inputs, 2 * read, weights, &[held, 2 * held])?;
        same_widths(self.name(), inputs)?;
        self.0.infer(&inputs[..read], &weights[..held])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let of = &self.0;
        if of.by_element {
            return by_element::tangent(of, call);
        }
        let (width, n) = (of.width(), of.head_dim);
        let mut y = vec![0f32; call.outputs[0].len()];
        for h in 0..of.heads {
            let weights = weights_of(call);
            let change = |i: usize| call.weights.get(3 + i).map_or(0.0, |of| f64::from(of[h]));
            let own = ScanHead::new(of, weights, h);
            let [x, b, c] = parts(of, h);
            let inputs = (call.inputs[0], call.inputs[1]);
            let all = matrices(of, h, inputs, weights, call.packed.first);
            let mut changes = vec![0.0; of.state * n];
            for (t, (before, after, step)) in all.iter().enumerate() {
                if call.packed.first[t] as usize == t {
                    changes.fill(0.0);
                }
                let row = |i: usize, at: usize| f64::from(call.inputs[i][t * width + at]);
                let of_dt = f64::from(call.inputs[3][t * of.heads + h]) + change(1);
                let of_step = step.slope * of_dt;
                let of_gate = step.gate * (change(0) * step.step + own.decay * of_step);
                for j in 0..n {
                    let (x, dx) = (row(0, x.start + j), row(2, x.start + j));
                    let mut sum = change(2) * x + own.skip * dx;
                    for i in 0..of.state {
                        let at = i * n + j;
                        let written = row(2, b.start + i) * step.step * x
                            + row(0, b.start + i) * (of_step * x + step.step * dx);
                        changes[at] = changes[at] * step.gate + before[at] * of_gate + written;
                        sum += row(2, c.start + i) * after[at] + row(0, c.start + i) * changes[at];
                    }
                    y[t * of.heads * n + h * n + j] = sum as f32;
                }
            }
        }
        call.outputs[0] = y;
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
