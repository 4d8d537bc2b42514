//! Forward-mode kernels: the tangents of norms and of attention, from the tangents of their
//! operands.
//!
//! The tangent of a norm is `weight (dx - n mean(n dx)) / rms` with `n` the normed row before its
//! weight; of a layer norm the mean of `dx` is subtracted as well. The tangent of attention with
//! weights `p` is `sum p (ds - mean) v + p dv`, where `ds` are the scores' changes and
//! `mean = sum p ds`.

use super::attend::{head, score, seen, slope_of};
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Attention, Shape, arity, expect, rms_norm};
use formats::{Result, dot};

/// `x, dx; weight[group] -> dy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormTangent {
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// Whether the mean is subtracted first: a layer norm.
    pub centred: bool,
}

/// `q, k, v, lse, dq, dk, dv; (sinks, dsinks), (slopes) -> dy`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttendTangent(pub Attention);

impl Operation for NormTangent {
    fn name(&self) -> &'static str {
        "norm_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        rms_norm::check(self.name(), inputs[0].width, weights[0])?;
        expect(self.name(), "width of dx", &[inputs[1].width], &[inputs[0].width])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let weight = &call.weights[0];
        let width = weight.len();
        let mean = |x: &[f64]| x.iter().sum::<f64>() / width as f64;
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let rows = call.inputs[0].chunks_exact(width).zip(call.inputs[1].chunks_exact(width));
        for ((x, dx), dy) in rows.zip(call.outputs[0].chunks_exact_mut(width)) {
            let (mut x, mut dx) = (wide(x), wide(dx));
            for x in [&mut x, &mut dx].into_iter().filter(|_| self.centred) {
                let middle = mean(x);
                x.iter_mut().for_each(|x| *x -= middle);
            }
            let square = x.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(self.eps);
            let along = (0..width).map(|i| x[i] * dx[i]).sum::<f64>() / width as f64 / square;
            for i in 0..width {
                let change = (dx[i] - x[i] * along) / square.sqrt();
                dy[i] = (change * f64::from(weight[i])) as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for AttendTangent {
    fn name(&self) -> &'static str {
        "attend_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let vectors = self.0.vectors() + usize::from(self.0.sinks);
        arity(self.name(), inputs, 7, weights, &[vectors])?;
        let [q, k, v] = [0, 1, 2].map(|i| (inputs[i], inputs[i + 4]));
        for (value, tangent) in [q, k, v] {
            expect(self.name(), "width of a tangent", &[tangent.width], &[value.width])?;
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let Attention { heads, kv_heads, head_dim: d, .. } = self.0;
        let [q, k, v, lse, dq, dk, dv] = [0, 1, 2, 3, 4, 5, 6].map(|i| call.inputs[i]);
        for t in 0..q.len() / (heads * d) {
            for h in 0..heads {
                let g = h / (heads / kv_heads);
                let (query, change) = (head(q, t, heads, h, d), head(dq, t, heads, h, d));
                let lse = f64::from(lse[t * heads + h]);
                let rows = seen(&self.0, call.packed.first[t], t);
                let fall = slope_of(&self.0, call.weights, h);
                let each: Vec<(f64, f64)> = rows
                    .clone()
                    .map(|s| {
                        let key = head(k, s, kv_heads, g, d);
                        let (score, slope) = score(&self.0, query, key);
                        let by = dot(change, key) + dot(query, head(dk, s, kv_heads, g, d));
                        ((score - fall * (t - s) as f64 - lse).exp(), slope * by)
                    })
                    .collect();
                let sink = match call.weights {
                    [sinks, dsinks, ..] => (f64::from(sinks[h]) - lse).exp() * f64::from(dsinks[h]),
                    _ => 0.0,
                };
                let mean = each.iter().map(|(p, ds)| p * ds).sum::<f64>() + sink;
                for i in 0..d {
                    let term = |((p, ds), s): (&(f64, f64), usize)| {
                        let at = |x| f64::from(head(x, s, kv_heads, g, d)[i]);
                        p * ((ds - mean) * at(v) + at(dv))
                    };
                    let sum: f64 = each.iter().zip(rows.clone()).map(term).sum();
                    call.outputs[0][(t * heads + h) * d + i] = sum as f32;
                }
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
