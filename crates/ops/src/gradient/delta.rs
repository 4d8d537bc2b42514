//! Gated delta nets over packed sequences, and their gradients. As [`crate::delta_net`], without a
//! cache: a sequence begins with a matrix of zeros.
//!
//! A row makes of the matrix `S` in front of it `T = g S + k c`, where `c = beta u` and
//! `u = v - g k S`, and `y = q T`. From the gradient `D` of the matrix after the row
//! follows the gradient of the matrix before it:
//!
//! ```text
//! D += q dy,  dq = T dy,  dc = k D,  dbeta = <dc, u>,  dv = beta dc,  dk = D c - g S dv
//! D -= k dv,  dg = <D, S>,  D = g D
//! ```
//!
//! Where each element of a key forgets at a rate of its own, `g` is a diagonal matrix, and `dg` are
//! the products of each row of `D` with the one of `S`.

pub mod kernels;

pub(crate) mod cases;

use super::{Forward, Reverse, RuleValue, Wrt, one, round_sums, same_widths, zeros};
use crate::delta_net::HeadRow;
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{DeltaNet, Op, Rows, Shape, arity, expect};
use formats::{Error, ErrorKind, Result};

/// `qkv[tokens, width], a[tokens, heads], b[tokens, heads]; decay[heads], dt[heads] ->
/// y[tokens, heads * value_dim]`, or, where each element of a key forgets at a rate of its own,
/// `qkv, a[tokens, heads * key_dim], b -> y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedDelta(pub DeltaNet);

/// `qkv, a, b, dy; (decay, dt) -> dqkv, da, db, (ddecay, ddt)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaBackward(pub DeltaNet);

/// `qkv, a, b, dqkv, da, db; (decay, dt), (ddecay, ddt) -> dy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaTangent(pub DeltaNet);

/// Inputs and weights of a net in the place where a call has them.
fn row<'a>(net: &DeltaNet, call: &'a ReferenceCall<'_>, t: usize) -> [&'a [f32]; 5] {
    let input = |i: usize, width: usize| &call.inputs[i][t * width..][..width];
    let [decay, dt] = [0, 1].map(|i| call.weights.get(i).map_or(&[][..], Vec::as_slice));
    [input(0, net.width()), input(1, net.gates()), input(2, net.heads), decay, dt]
}

impl Operation for PackedDelta {
    fn name(&self) -> &'static str {
        "packed_delta_net"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        self.0.infer(inputs, weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let mut states = vec![0.0; self.0.elements()];
        let width = self.0.heads * self.0.value_dim;
        for (t, first) in call.packed.first.iter().enumerate() {
            if *first as usize == t {
                states.fill(0.0);
            }
            let y = self.0.position(&mut states, row(&self.0, call, t));
            let to = &mut call.outputs[0][t * width..][..width];
            to.iter_mut().zip(y).for_each(|(to, y)| *to = y as f32);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let operands = [at.input(0), at.input(1), at.input(2), dy];
        let weights = &[0, 1][..self.0.weights()];
        let found = at.record(Op::from(DeltaBackward(self.0)), &operands, weights)?;
        let inputs = [0, 1, 2].map(Wrt::Input).into_iter();
        for (of, cotangent) in inputs.chain([0, 1].map(Wrt::Weight)).zip(found) {
            if at.wants(of) {
                at.give(of, cotangent)?;
            }
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let mut operands: Vec<RuleValue> = (0..3).map(|i| at.input(i)).collect();
        for i in 0..3 {
            let (x, tangent) = (at.input(i), at.tangent(i));
            operands.push(match tangent {
                Some(tangent) => tangent,
                None => zeros(at, x)?,
            });
        }
        let weights = match [0, 1].map(|i| at.weight_tangent(i)) {
            [None, None] => (0..self.0.weights()).collect(),
            [Some(decay), Some(dt)] => vec![0, 1, decay, dt],
            _ => {
                let expected = "tangents of both of its weights";
                return Err(Error::new(self.name(), expected, "one").of(ErrorKind::Unsupported));
            }
        };
        let dy = one(at, DeltaTangent(self.0), &operands, &weights)?;
        at.add(0, dy)
    }
}

/// The gradients of a row's operands that one head gives.
struct Slopes {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    /// Of the head's element of `a`, or of all that it has.
    a: Vec<f64>,
    b: f64,
    decay: f64,
}

impl HeadRow {
    /// The gradients of the row's operands, from the gradients of its `y` and of the matrix after
    /// it; `slopes` then holds the gradient of the matrix before it, `before`.
    fn backward(&self, before: &[f64], slopes: &mut [f64], dy: &[f32]) -> Slopes {
        let (n, keys) = (self.v.len(), self.k.len());
        let dy: Vec<f64> = dy.iter().map(|dy| f64::from(*dy) / self.root).collect();
        let kept: Vec<f64> =
            before.iter().enumerate().map(|(at, s)| s * self.gate(at / n)).collect();
        let column =
            |x: &[f64], j: usize| -> f64 { (0..keys).map(|i| x[i * n + j] * self.k[i]).sum() };
        let miss: Vec<f64> = (0..n).map(|j| self.v[j] - column(&kept, j)).collect();
        for (i, slopes) in slopes.chunks_exact_mut(n).enumerate() {
            slopes.iter_mut().zip(&dy).for_each(|(slope, dy)| *slope += self.q[i] * dy);
        }
        let of_change: Vec<f64> = (0..n).map(|j| column(slopes, j)).collect();
        let v: Vec<f64> = of_change.iter().map(|of| of * self.beta).collect();
        let (mut q, mut k) = (vec![0.0; keys], vec![0.0; keys]);
        for i in 0..keys {
            for j in 0..n {
                let (kept, change) = (kept[i * n + j], self.beta * miss[j]);
                q[i] += (kept + self.k[i] * change) * dy[j];
                k[i] += slopes[i * n + j] * change - kept * v[j];
            }
        }
        // Of the logarithms of factors.
        let mut of_steps = vec![0.0; keys];
        for (at, slope) in slopes.iter_mut().enumerate() {
            let gate = self.gate(at / n);
            *slope -= self.k[at / n] * v[at % n];
            of_steps[at / n] += *slope * before[at] * gate;
            *slope *= gate;
        }
        let of_step: f64 = of_steps.iter().sum();
        let of_beta: f64 = of_change.iter().zip(&miss).map(|(of, miss)| of * miss).sum();
        Slopes {
            q: along(&q, &self.q, self.lengths[0]),
            k: along(&k, &self.k, self.lengths[1]),
            v,
            a: match self.gates {
                Some(_) => of_steps,
                None => vec![of_step * self.decay * self.rate],
            },
            b: of_beta * self.beta * (1.0 - self.beta / self.strongest),
            decay: of_step * self.step,
        }
    }

    /// How `y` changes, and the change of the matrix `before` becomes that behind the row.
    fn tangent(&self, before: &[f64], changes: &mut [f64], of: &Slopes) -> Vec<f64> {
        let (n, keys) = (self.v.len(), self.k.len());
        let (dq, dk) =
            (along(&of.q, &self.q, self.lengths[0]), along(&of.k, &self.k, self.lengths[1]));
        let of_step = |i: usize| match self.gates {
            Some(_) => of.a[i],
            None => of.decay * self.step + self.decay * self.rate * of.a[0],
        };
        let of_beta = self.beta * (1.0 - self.beta / self.strongest) * of.b;
        for (at, (change, s)) in changes.iter_mut().zip(before).enumerate() {
            *change = self.gate(at / n) * (of_step(at / n) * s + *change);
        }
        let mut dy = Vec::with_capacity(n);
        for j in 0..n {
            let kept = |i: usize| self.gate(i) * before[i * n + j];
            let said: f64 = (0..keys).map(|i| kept(i) * self.k[i]).sum();
            let of_said: f64 =
                (0..keys).map(|i| changes[i * n + j] * self.k[i] + kept(i) * dk[i]).sum();
            let change = self.beta * (self.v[j] - said);
            let of_change = of_beta * (self.v[j] - said) + self.beta * (of.v[j] - of_said);
            let mut sum = 0.0;
            for i in 0..keys {
                let after = kept(i) + self.k[i] * change;
                let of_after = &mut changes[i * n + j];
                *of_after += dk[i] * change + self.k[i] * of_change;
                sum += dq[i] * after + self.q[i] * *of_after;
            }
            dy.push(sum / self.root);
        }
        dy
    }
}

/// The change of a vector of this length, from the change of its unit vector `unit`; or the other
/// way round.
fn along(change: &[f64], unit: &[f64], length: f64) -> Vec<f64> {
    let along: f64 = change.iter().zip(unit).map(|(change, unit)| change * unit).sum();
    change.iter().zip(unit).map(|(change, unit)| (change - unit * along) / length).collect()
}

impl Operation for DeltaBackward {
    fn name(&self) -> &'static str {
        "delta_net_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 4, weights, &[self.0.weights()])?;
        let y = self.0.infer(&inputs[..3], weights)?;
        expect(self.name(), "width of dy", &[inputs[3].width], &[y[0].width])?;
        let vector = Shape { rows: Rows::Fixed(1), width: self.0.heads };
        Ok(inputs[..3].iter().copied().chain(weights.iter().map(|_| vector)).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let net = &self.0;
        let (width, values) = (net.width(), net.heads * net.value_dim);
        let gates = net.gates() / net.heads;
        let first = call.packed.first;
        let mut sums: Vec<Vec<f64>> =
            call.outputs.iter().map(|output| vec![0.0; output.len()]).collect();
        for h in 0..net.heads {
            let rows: Vec<HeadRow> =
                (0..first.len()).map(|t| net.row(h, row(net, call, t))).collect();
            let mut state = vec![0.0; net.key_dim * net.value_dim];
            let mut before = Vec::with_capacity(rows.len());
            for (t, row) in rows.iter().enumerate() {
                if first[t] as usize == t {
                    state.fill(0.0);
                }
                before.push(state.clone());
                row.advance(&mut state);
            }
            let mut slopes = vec![0.0; net.key_dim * net.value_dim];
            for (t, row) in rows.iter().enumerate().rev() {
                let dy = &call.inputs[3][t * values + h * net.value_dim..][..net.value_dim];
                let of = row.backward(&before[t], &mut slopes, dy);
                for (start, part) in net.starts(h).into_iter().zip([&of.q, &of.k, &of.v]) {
                    let to = &mut sums[0][t * width + start..][..part.len()];
                    to.iter_mut().zip(part).for_each(|(to, of)| *to += of);
                }
                let at = t * net.heads + h;
                sums[1][at * gates..][..gates].copy_from_slice(&of.a);
                sums[2][at] = of.b;
                if let [_, _, _, decay, dt] = &mut sums[..] {
                    decay[h] += of.decay;
                    dt[h] += of.a[0];
                }
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

impl Operation for DeltaTangent {
    fn name(&self) -> &'static str {
        "delta_net_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let own = self.0.weights();
        arity(self.name(), inputs, 6, weights, &[own, 2 * own])?;
        same_widths(self.name(), inputs)?;
        self.0.infer(&inputs[..3], &weights[..own])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let net = &self.0;
        let (width, values) = (net.width(), net.heads * net.value_dim);
        let gates = net.gates() / net.heads;
        let of_weight = |i: usize, h: usize| call.weights.get(i).map_or(0.0, |of| f64::from(of[h]));
        let mut y = vec![0f32; call.outputs[0].len()];
        for h in 0..net.heads {
            let size = net.key_dim * net.value_dim;
            let (mut state, mut changes) = (vec![0.0; size], vec![0.0; size]);
            for (t, first) in call.packed.first.iter().enumerate() {
                if *first as usize == t {
                    state.fill(0.0);
                    changes.fill(0.0);
                }
                let input = |i: usize, at: usize, count: usize| -> Vec<f64> {
                    call.inputs[i][at..][..count].iter().map(|x| f64::from(*x)).collect()
                };
                let [q, k, v] = net.starts(h).map(|start| t * width + start);
                let of = Slopes {
                    q: input(3, q, net.key_dim),
                    k: input(3, k, net.key_dim),
                    v: input(3, v, net.value_dim),
                    a: input(4, (t * net.heads + h) * gates, gates)
                        .into_iter()
                        .map(|a| a + of_weight(3, h))
                        .collect(),
                    b: input(5, t * net.heads + h, 1)[0],
                    decay: of_weight(2, h),
                };
                let row = net.row(h, row(net, call, t));
                let dy = row.tangent(&state, &mut changes, &of);
                row.advance(&mut state);
                let to = &mut y[t * values + h * net.value_dim..][..net.value_dim];
                to.iter_mut().zip(dy).for_each(|(to, dy)| *to = dy as f32);
            }
        }
        call.outputs[0] = y;
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
