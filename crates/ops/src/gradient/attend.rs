//! Causal attention among the rows of packed sequences, and its gradient. As [`crate::attention`],
//! without a cache: a query sees the rows of its own sequence up to itself, as many as its window
//! holds.
//!
//! With `p = exp(s - lse)` the weights and `D = dy . y` (Dao et al., FlashAttention, 2022, appendix
//! B): `dv = p' dy`, `ds = p (dy v' - D)`, `dq = scale ds k`, `dk = scale ds' q`; a sink's own is
//! `-p_sink D`.

pub mod kernels;
pub mod tiles;

pub(crate) mod cases;

use super::{AttendTangent, Forward, Reverse, Wrt, one, zeros};
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Attention, Op, Rows, Shape, arity, expect};
use formats::{Error, ErrorKind, Result, dot};
use std::ops::RangeInclusive;

/// `q, k, v; (sinks[heads]), (slopes[heads]) -> y, lse[tokens, heads]`. `lse` is the logarithm of each softmax's
/// denominator.
#[derive(Debug, Clone, PartialEq)]
pub struct Attend(pub Attention);

/// `q, k, v, y, lse, dy; (sinks), (slopes) -> dq, dk, dv, (dsinks)`. Slopes are no parameters, and
/// have no gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct AttendBackward(pub Attention);

/// Rows that the query of row `t` sees, in a sequence that begins at `first`: the first of its
/// window or of its chunk, or of the sequence, up to itself.
pub fn seen(attention: &Attention, first: u32, t: usize) -> RangeInclusive<usize> {
    let first = first as usize;
    first + attention.first(t - first)..=t
}

/// A head of `x` `[rows, heads * d]` at a row.
pub(super) fn head(x: &[f32], t: usize, heads: usize, h: usize, d: usize) -> &[f32] {
    &x[(t * heads + h) * d..][..d]
}

/// How much a head's scores fall with each position.
pub(super) fn slope_of(of: &Attention, weights: &[Vec<f32>], h: usize) -> f64 {
    let [_, slopes] = of.sinks_and_slopes(weights);
    slopes.map_or(0.0, |slopes| f64::from(slopes[h]))
}

/// A score, and its derivative with respect to `q . k`.
pub(super) fn score(of: &Attention, q: &[f32], k: &[f32]) -> (f64, f64) {
    let scaled = dot(q, k) * f64::from(of.scale);
    match of.cap.map(f64::from) {
        Some(cap) => {
            let tanh = (scaled / cap).tanh();
            (cap * tanh, f64::from(of.scale) * (1.0 - tanh * tanh))
        }
        None => (scaled, f64::from(of.scale)),
    }
}

fn check(of: &Attention, name: &str, inputs: &[Shape], weights: &[&[usize]]) -> Result<()> {
    for vector in weights {
        expect(name, "sinks or slopes", vector, &[of.heads])?;
    }
    expect(name, "heads modulo kv_heads", &[of.heads % of.kv_heads.max(1)], &[0])?;
    let narrow = of.kv_heads * of.head_dim;
    let widths = [inputs[0].width, inputs[1].width, inputs[2].width];
    expect(name, "widths of q, k and v", &widths, &[of.heads * of.head_dim, narrow, narrow])
}

impl Operation for Attend {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[self.0.vectors()])?;
        check(&self.0, self.name(), inputs, weights)?;
        Ok(vec![inputs[0], Shape { width: self.0.heads, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let Attention { heads, kv_heads, head_dim: d, .. } = self.0;
        let (q, k, v) = (call.inputs[0], call.inputs[1], call.inputs[2]);
        for t in 0..q.len() / (heads * d) {
            for h in 0..heads {
                let g = h / (heads / kv_heads);
                let rows = seen(&self.0, call.packed.first[t], t);
                let query = head(q, t, heads, h, d);
                let slope = slope_of(&self.0, call.weights, h);
                let scores: Vec<f64> = rows
                    .clone()
                    .map(|s| {
                        let (score, _) = score(&self.0, query, head(k, s, kv_heads, g, d));
                        score - slope * (t - s) as f64
                    })
                    .collect();
                let [sinks, _] = self.0.sinks_and_slopes(call.weights);
                let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
                let top = scores.iter().copied().fold(sink, f64::max);
                let sum = scores.iter().map(|s| (s - top).exp()).sum::<f64>() + (sink - top).exp();
                let lse = top + sum.ln();
                call.outputs[1][t * heads + h] = lse as f32;
                for i in 0..d {
                    let terms = scores.iter().zip(rows.clone());
                    let terms = terms.map(|(score, s)| {
                        (score - lse).exp() * f64::from(head(v, s, kv_heads, g, d)[i])
                    });
                    call.outputs[0][(t * heads + h) * d + i] = terms.sum::<f64>() as f32;
                }
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let operands = [at.input(0), at.input(1), at.input(2), at.output(0), at.output(1), dy];
        let weights: Vec<usize> = (0..self.0.vectors()).collect();
        let op = Op::from(AttendBackward(self.0.clone()));
        let found = at.record(op, &operands, &weights)?;
        let wrt = [Wrt::Input(0), Wrt::Input(1), Wrt::Input(2), Wrt::Weight(0)];
        for (of, cotangent) in wrt.into_iter().zip(found) {
            if at.wants(of) {
                at.give(of, cotangent)?;
            }
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let mut operands = [0, 1, 2].map(|i| at.input(i)).to_vec();
        operands.push(at.output(1));
        for i in 0..3 {
            let (x, tangent) = (at.input(i), at.tangent(i));
            let tangent = match tangent {
                Some(tangent) => tangent,
                None => zeros(at, x)?,
            };
            operands.push(tangent);
        }
        let mut weights: Vec<usize> = match (self.0.sinks, at.weight_tangent(0)) {
            (false, _) => Vec::new(),
            (true, Some(dsinks)) => vec![0, dsinks],
            (true, None) => {
                let expected = "tangents of all of its weights";
                return Err(Error::new(self.name(), expected, "none").of(ErrorKind::Unsupported));
            }
        };
        weights.extend(self.0.slopes.then(|| self.0.vectors() - 1));
        let dy = one(at, AttendTangent(self.0.clone()), &operands, &weights)?;
        at.add(0, dy)
    }
}

impl Operation for AttendBackward {
    fn name(&self) -> &'static str {
        "attend_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 6, weights, &[self.0.vectors()])?;
        check(&self.0, self.name(), inputs, weights)?;
        let sinks = Shape { rows: Rows::Fixed(1), width: self.0.heads };
        let all = inputs[..3].iter().copied();
        Ok(all.chain(self.0.sinks.then_some(sinks)).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let Attention { heads, kv_heads, head_dim: d, .. } = self.0;
        let [q, k, v, y, lse, dy] = [0, 1, 2, 3, 4, 5].map(|i| call.inputs[i]);
        let mut sums: Vec<Vec<f64>> =
            call.outputs.iter().map(|output| vec![0.0; output.len()]).collect();
        for t in 0..q.len() / (heads * d) {
            for h in 0..heads {
                let g = h / (heads / kv_heads);
                let (query, dy) = (head(q, t, heads, h, d), head(dy, t, heads, h, d));
                let along = dot(dy, head(y, t, heads, h, d));
                let lse = f64::from(lse[t * heads + h]);
                let fall = slope_of(&self.0, call.weights, h);
                for s in seen(&self.0, call.packed.first[t], t) {
                    let (key, value) = (head(k, s, kv_heads, g, d), head(v, s, kv_heads, g, d));
                    let (score, slope) = score(&self.0, query, key);
                    let p = (score - fall * (t - s) as f64 - lse).exp();
                    let ds = p * (dot(dy, value) - along) * slope;
                    for i in 0..d {
                        sums[0][(t * heads + h) * d + i] += ds * f64::from(key[i]);
                        sums[1][(s * kv_heads + g) * d + i] += ds * f64::from(query[i]);
                        sums[2][(s * kv_heads + g) * d + i] += p * f64::from(dy[i]);
                    }
                }
                if let [Some(sinks), _] = self.0.sinks_and_slopes(call.weights) {
                    sums[3][h] -= (f64::from(sinks[h]) - lse).exp() * along;
                }
            }
        }
        for (output, sums) in call.outputs.iter_mut().zip(sums) {
            output.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
