//! The derivative of routing in groups ([`GroupLimit`]), which leaves a part of a router's scores:
//! which experts stay counts as constant.
//!
//! Without a softmax the scores that stay are themselves. With `softmax`, `p` being the softmax of
//! all scores, `y_e = ln(p_e / (1 - p_e))`, so that for the experts `e` that stay
//!
//! ```text
//! dy_e = (ds_e - sum_i p_i ds_i) / (1 - p_e)
//! ds_i = q_i - p_i sum_e q_e,  q_e = dy_e / (1 - p_e), 0 of those that do not stay
//! ```
//!
//! An expert that has all the odds, `1 - p_e` being 0 in f32, has no slope: its share cannot change
//! by as much as rounding tells.
//!
//! [`GroupLimit`]: crate::GroupLimit

use crate::group_limit::Softmax;
use crate::linear::holds;
use crate::operation::{
    ActivationPrecision, Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y,
};
use crate::trial::{memory, near, random, scaled};
use crate::{Shape, alike, arity};
use formats::Result;
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

/// `scores, y, d -> d`, all `[rows, experts]`; `y` is minus infinity for experts that do not stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitSlopes {
    /// Whether what stays is of the softmax of all scores.
    pub softmax: bool,
    /// Whether `d` is a change of the scores, and not a cotangent of what is left.
    pub tangent: bool,
}

const LEFT: Operand = Operand::Input(1);
const SLOPE: Operand = Operand::Input(2);

impl Operation for LimitSlopes {
    fn name(&self) -> &'static str {
        "limit_slopes"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[0])?;
        alike(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let experts = call.widths[0];
        let rows = |i: usize| call.inputs[i].chunks_exact(experts);
        let all = rows(0).zip(rows(1)).zip(rows(2));
        for (((scores, y), d), to) in all.zip(call.outputs[0].chunks_exact_mut(experts)) {
            self.row(scores, y, d, to);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let experts = to.width(X);
        let slots = experts.div_ceil(32) as u32;
        let kernel = limit_slopes(to.scalar(X), to.scalar(SLOPE), slots, self.softmax);
        let bound = [
            ("scores", Bound::Value(X)),
            ("left", Bound::Value(LEFT)),
            ("dy", Bound::Value(SLOPE)),
            ("ds", Bound::Value(Y)),
        ];
        to.push(kernel, numbers(to.rows(X), experts), &bound)?;
        Ok(true)
    }
}

impl LimitSlopes {
    /// One row, in f64 and without an allocation.
    ///
    /// # Panics
    /// When lengths differ.
    pub fn row(&self, scores: &[f32], y: &[f32], d: &[f32], to: &mut [f32]) {
        let stays = |e: usize| y[e] > f32::NEG_INFINITY;
        if !self.softmax {
            for (e, to) in to.iter_mut().enumerate() {
                *to = if stays(e) { d[e] } else { 0.0 };
            }
            return;
        }
        let number = |e: usize| if scores[e].is_nan() { f32::NEG_INFINITY } else { scores[e] };
        let experts = scores.len();
        let peak = (0..experts).map(number).fold(f32::NEG_INFINITY, f32::max);
        let power = |e: usize| (f64::from(number(e)) - f64::from(peak)).exp();
        let all: f64 = (0..experts).map(power).sum();
        let by = |e: usize| if power(e) < all { all / (all - power(e)) } else { 0.0 };
        let d = |e: usize| f64::from(d[e]);
        match self.tangent {
            true => {
                let along = (0..experts).map(|e| power(e) / all * d(e)).sum::<f64>();
                for (e, to) in to.iter_mut().enumerate() {
                    *to = if stays(e) { ((d(e) - along) * by(e)) as f32 } else { 0.0 };
                }
            }
            false => {
                let q = |e: usize| if stays(e) { d(e) * by(e) } else { 0.0 };
                let sum: f64 = (0..experts).map(q).sum();
                for (e, to) in to.iter_mut().enumerate() {
                    *to = (q(e) - power(e) / all * sum) as f32;
                }
            }
        }
    }
}

/// Tokens of a threadgroup: one a simdgroup.
const TOKENS: u32 = 4;

/// The cotangents of scores, on the device. A lane has `slots` experts: there are at most `32
/// slots`. `scores`, `left`, `dy` and `ds` `[tokens, experts]`.
#[kernel]
pub fn limit_slopes(
    scores: In<{ from }>,
    left: In<{ from }>,
    dy: In<{ to }>,
    ds: Out<{ to }>,
    tokens: Arg<u32>,
    experts: Const<u32>,
    from: Scalar,
    to: Scalar,
    slots: u32,
    softmax: bool,
) {
    launch(Mode::Row, [dim("tokens").ceil_div(TOKENS), fixed(1), fixed(1)], 32 * TOKENS);
    require(Requirement::AtMost(dim("experts"), 32 * slots));
    for name in ["scores", "left", "dy", "ds"] {
        holds(name, dim("tokens") * dim("experts"));
    }
    grid_trigger();
    grid_wait();
    let (token, lane) = (group_id() * TOKENS + simd_id(), lane_id());
    if token < tokens {
        let first = token * experts;
        let odds = softmax.then(|| Softmax::of(scores, first, experts, slots, lane));
        // `q` of an expert, and its power.
        let slope = |slot: u32| {
            let expert = lane + 32 * slot;
            let at = first + expert.min(experts - 1u32);
            let stays = left.get(at).f32().gt(f32::NEG_INFINITY) & expert.lt(experts);
            let own = select(stays, dy.get(at).f32(), 0.0f32);
            match odds {
                None => (own, own),
                Some(Softmax { peak, sum }) => {
                    let power = (scores.get(at).f32().max(f32::NEG_INFINITY) - peak).exp();
                    let others = sum - power;
                    let by = select(others.gt(0.0f32), sum / others.max(f32::MIN_POSITIVE), 0.0f32);
                    (own * by, power / sum)
                }
            }
        };
        let all = odds.map(|_| {
            let own = (1..slots).fold(slope(0).0, |all, slot| all + slope(slot).0);
            simd_sum(own)
        });
        for slot in 0..slots {
            let expert = lane + 32 * slot;
            if expert < experts {
                let (own, share) = slope(slot);
                ds[first + expert] = all.map_or(own, |all| own - share * all).cast();
            }
        }
    }
}

fn numbers(tokens: usize, experts: usize) -> Numbers {
    Numbers::new().with("tokens", tokens as u32).with("experts", experts as u32)
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "limit_slopes", cases, benches }];

fn cases() -> Vec<Case> {
    type Sizes = [usize; 3];
    let case = |[tokens, experts, used]: Sizes, to: Scalar, softmax: bool, why: &str| {
        let scores = scaled(Scalar::F32, 5, tokens * experts, 3.0);
        let dy = random(to, 8, tokens * experts);
        // Every so many experts stay.
        let each = experts / used;
        let left = |i: usize| if i % each == 1 % each { 1.0 } else { f32::NEG_INFINITY };
        let left: Vec<f32> = (0..tokens * experts).map(left).collect();
        let mut ds = vec![0.0; tokens * experts];
        let (s, d) = (scores.to_f32(), dy.to_f32());
        let op = LimitSlopes { softmax, tangent: false };
        for (t, ds) in ds.chunks_exact_mut(experts).enumerate() {
            let row = t * experts..(t + 1) * experts;
            op.row(&s[row.clone()], &left[row.clone()], &d[row], ds);
        }
        let name = if softmax { "softmax" } else { "scores" };
        Case {
            kernel: limit_slopes(Scalar::F32, to, experts.div_ceil(32) as u32, softmax).record(),
            label: format!("{tokens} x {experts} {to}, {name}: {why}"),
            numbers: numbers(tokens, experts),
            buffers: vec![
                scores,
                Buffer::floats(Scalar::F32, &left),
                dy,
                Buffer::zeros(to, tokens * experts),
            ],
            expected: vec![(3, near(to, &ds))],
        }
    };
    vec![
        case([5, 8, 2], Scalar::F32, false, "fewer experts than lanes"),
        case([3, 256, 8], Scalar::BF16, false, "DeepSeek-V3's"),
        case([3, 160, 5], Scalar::F32, true, "DeepSeek-V2's"),
        case([3, 160, 5], Scalar::BF16, true, "DeepSeek-V2's"),
        case([2, 6, 6], Scalar::F32, true, "every expert stays"),
        case([5, 64, 1], Scalar::F32, true, "one stays"),
    ]
}

fn benches() -> Vec<Bench> {
    let (tokens, experts) = (4096, 160);
    let noise = || Fill::Noise(Scalar::F32, tokens * experts);
    let buffers = vec![noise(), noise(), noise(), Fill::Zeros(Scalar::F32, tokens * experts)];
    let kernel = limit_slopes(Scalar::F32, Scalar::F32, 5, true);
    vec![memory(kernel, "4096 x 160", numbers(tokens, experts), buffers, 0)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
