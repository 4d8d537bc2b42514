//! Mixture of experts: each token goes through the `k` experts of `experts` that its router scores
//! highest (Shazeer et al. 2017; Fedus et al. 2021).
//!
//! ```text
//! ids[t, 0..k] = the largest scores[t, ..], larger first, ties to the lower expert
//! w[t, j] = what the score of ids[t, j] says (`experts::Odds`)  (/ their sum)  * scale
//! y[t] = sum_j w[t, j] expert(ids[t, j], x[t])
//! ```
//!
//! A *pair* is a token and one of its experts: pair `t k + j`. Rows of what experts read and write
//! are in the order of pairs, whatever computes them: [`moe_gemv`] takes pairs one by one, for few
//! tokens, whose results [`moe_down`] adds up as it makes them; [`moe_gemm`] takes them by expert, in
//! the order that [`moe_group`] found, for many. The weights of all experts are one matrix
//! `[experts * out, width]`.

mod cases;
mod down;
mod group;
mod products;
mod reference;
mod router;

use tile::case::Spec;
use tile::dsl::*;
use tile::ir::Reduce;
use tile::launch::{Mode, Requirement};

use crate::experts::{Odds, Routing};
use crate::linear::holds;
use crate::{Unary, math, real, sweep};
pub use down::{DownParts, moe_down, pick_down};
pub use group::{moe_group, tiles};
pub use products::{moe_gate_up, moe_gemm, moe_gemm_turned, moe_gemv, pick_blocks, pick_turned};
pub use reference::{ExpertPairs, Routes, combine, group, product, product_turned, route};
pub use router::{moe_router, pick_router};

/// Tokens that a threadgroup of [`moe_route`] routes: one a simdgroup.
const TOKENS: u32 = 4;
/// No expert.
pub(crate) const NONE: u32 = u32::MAX;

/// The experts of each token and their weights. A simdgroup holds `slots` scores in each lane:
/// there are at most `32 slots` experts, and `slots` at most 32. Scores that are no number come
/// last.
///
/// `logits` `[tokens, experts]`; `ids` and `weights` `[tokens, top_k]`, `top_k` at most 32 and at
/// most `experts`.
#[kernel]
pub fn moe_route(
    logits: In<{ scalar }>,
    ids: Out<u32>,
    weights: Out<f32>,
    tokens: Arg<u32>,
    experts: Const<u32>,
    top_k: Const<u32>,
    scalar: Scalar,
    slots: u32,
    routing: Routing,
) {
    launch(Mode::Row, [dim("tokens").ceil_div(TOKENS), fixed(1), fixed(1)], 32 * TOKENS);
    require(Requirement::AtMost(dim("experts"), 32 * slots));
    require(Requirement::AtMost(dim("top_k"), 32));
    holds("logits", dim("tokens") * dim("experts"));
    holds("ids", dim("tokens") * dim("top_k"));
    holds("weights", dim("tokens") * dim("top_k"));
    grid_trigger();
    grid_wait();
    let (token, lane) = (group_id() * TOKENS + simd_id(), lane_id());
    if token < tokens {
        let scores = Regs::<f32>::uninit(slots);
        // A bit for each of the lane's experts that may still be chosen.
        let mut open = Var::new(0u32);
        let best = Var::new(f32::NEG_INFINITY);
        for slot in 0..slots {
            let expert = lane + 32 * slot;
            let exists = expert.lt(experts);
            let score = logits.get(token * experts + expert.min(experts - 1u32)).f32();
            // Not a number is less than every number.
            let score = select(exists, score.max(f32::NEG_INFINITY), f32::NEG_INFINITY);
            scores.set(slot, score);
            open |= select(exists, 1u32 << slot, 0u32);
            best.set(best.get().max(score));
        }
        let top = simd_max(best.get());
        let sum_of = |f: &dyn Fn(u32) -> Val<f32>| {
            simd_sum((0..slots).map(f).reduce(|a, b| a + b).unwrap_or(0f32.val()))
        };
        // Of weights that are made to sum to one, the sum over all experts would cancel.
        let all = match (routing.odds, routing.normalised) {
            (Odds::Softmax, false) => sum_of(&|slot| (scores.get(slot) - top).exp()),
            _ => 1f32.val(),
        };
        let (chosen, share, mut sum) = (Var::new(0u32), Var::new(0.0f32), Var::new(0.0f32));
        for j in range(0u32, top_k) {
            let (score, expert) = best_open(scores, open.get(), lane);
            let peak = simd_max(score);
            let own = select(score.eq(peak), expert, NONE);
            // Bounded whatever `top_k` is: the experts' products are indexed with it.
            let expert = simd_reduce(Reduce::Min, own).min(experts - 1u32);
            let weight = match routing.odds {
                Odds::Softmax => (peak - top).exp(),
                Odds::Sigmoid => math::sigmoid(peak),
                Odds::Near { jitter } => {
                    let kept = sum_of(&|slot| {
                        let (score, free) =
                            (scores.get(slot), (open.get() >> slot & 1u32).ne(0u32));
                        let apart = (peak - score) / score.abs().max(peak);
                        select(free & apart.le(2.0 * jitter), (score - peak).exp(), 0f32)
                    });
                    1f32.val() / kept
                }
            };
            open &= select(lane.eq(expert % 32u32), !(1u32.val() << (expert / 32u32)), u32::MAX);
            sum += weight;
            chosen.set(select(lane.eq(j), expert, chosen.get()));
            share.set(select(lane.eq(j), weight, share.get()));
        }
        let total = if routing.normalised { sum.get() } else { all };
        if lane < top_k {
            ids[token * top_k + lane] = chosen.get();
            let weight = share.get() / total;
            weights[token * top_k + lane] = scaled(weight, routing.scale);
        }
    }
}

/// `by * weight`, of which most models want no product.
#[track_caller]
fn scaled(weight: Val<f32>, by: f32) -> Val<f32> {
    if by == 1.0 { weight } else { weight * by }
}

/// The largest of a lane's scores that may still be chosen, the first of them, and its expert; or
/// [`NONE`].
#[track_caller]
pub(crate) fn best_open(scores: Regs<f32>, open: Val<u32>, lane: Val<u32>) -> (Val<f32>, Val<u32>) {
    let none = (f32::NEG_INFINITY.val(), NONE.val());
    (0..scores.len()).fold(none, |(score, expert), slot| {
        let (next, free) = (scores.get(slot), (open >> slot & 1u32).ne(0u32));
        let better = free & (expert.eq(NONE) | next.gt(score));
        (select(better, next, score), select(better, lane + 32 * slot, expert))
    })
}

/// Adds each pair's expert's bias: `y[p, o] += bias[ids[p], o]`, `y` `[pairs, out]`, `bias`
/// `[experts, out]`.
#[kernel]
pub fn moe_bias(ids: In<u32>, bias: In<f32>, y: InOut<f32>, out: Const<u32>, experts: Const<u32>) {
    launch(Mode::Row, [dim("pairs"), fixed(1), fixed(1)], 256);
    holds("ids", dim("pairs"));
    holds("bias", dim("experts") * dim("out"));
    holds("y", dim("pairs") * dim("out"));
    sweep::begin();
    let pair = group_id();
    let expert = ids.get(pair).min(experts - 1u32);
    for i in strided(out) {
        y[pair * out + i] = y.get(pair * out + i) + bias.get(expert * out + i);
    }
}

/// Multiplies each pair's weight with its expert's factor: `weights[p] *= factors[ids[p]]`.
#[kernel]
pub fn moe_factors(
    ids: In<u32>,
    factors: In<f32>,
    weights: InOut<f32>,
    pairs: Arg<u32>,
    experts: Const<u32>,
) {
    launch(Mode::Element, [dim("pairs").ceil_div(256u32), fixed(1), fixed(1)], 256);
    holds("ids", dim("pairs") + 0u32);
    holds("factors", dim("experts") + 0u32);
    holds("weights", dim("pairs") + 0u32);
    sweep::begin();
    let pair = group_id() * 256u32 + thread_id();
    if pair < pairs {
        let expert = ids.get(pair).min(experts - 1u32);
        weights[pair] = weights.get(pair) * factors.get(expert);
    }
}

/// gpt-oss's gate of experts, [`Gate::Clamped`](crate::experts::Gate): `n` elements.
#[kernel]
pub fn clamped_gate(
    gate: In<f32>,
    up: In<f32>,
    y: Out<{ to }>,
    n: Arg<u32>,
    limit: Arg<f32>,
    alpha: Arg<f32>,
    to: Scalar,
) {
    sweep::map(["gate", "up"], [gate, up], y, n, |[gate, up]| clamped(gate, up, limit, alpha));
}

/// [`Gate::Clamped`](crate::experts::Gate) of two halves.
#[track_caller]
fn clamped(gate: Val<f32>, up: Val<f32>, limit: Val<f32>, alpha: Val<f32>) -> Val<f32> {
    let (gate, up) = (gate.min(limit), up.min(limit).max(-limit));
    (up + 1.0) * gate * math::sigmoid(gate * alpha)
}

/// Step 3.5's gate of experts, [`Gate::Bounded`](crate::experts::Gate): `n` elements.
#[kernel]
pub fn bounded_gate(
    gate: In<f32>,
    up: In<f32>,
    y: Out<{ to }>,
    n: Arg<u32>,
    limit: Arg<f32>,
    to: Scalar,
) {
    sweep::map(["gate", "up"], [gate, up], y, n, |[gate, up]| {
        real::unary(Unary::Silu, gate).min(limit) * up.min(limit).max(-limit)
    });
}

/// The weighted sum of each token's experts: `out[t] = sum_j weights[t, j] y[t k + j]`, `y`
/// `[tokens * k, width]`. If it `adds`, `residual` `[tokens, width]` is added, which may be `out`.
#[kernel]
pub fn moe_combine(
    y: In<{ scalar }>,
    weights: In<f32>,
    out: Out<{ to }>,
    width: Const<u32>,
    scalar: Scalar,
    to: Scalar,
    k: u32,
    adds: bool,
) {
    launch(Mode::Row, [dim("tokens"), fixed(1), fixed(1)], 256);
    for name in ["y", "out"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    holds("y", dim("tokens") * k * dim("width"));
    holds("weights", dim("tokens") * k);
    holds("out", dim("tokens") * dim("width"));
    let residual = adds.then(|| {
        holds("residual", dim("tokens") * dim("width"));
        <In>::stored("residual", to)
    });
    grid_trigger();
    grid_wait();
    let token = group_id();
    let shares: Vec<Val<f32>> = (0..k).map(|j| weights.get(token * k + j)).collect();
    for i in strided(width) {
        let row = |j: usize| y.get((token * k + j as u32) * width + i).f32();
        let sum = (0..shares.len()).fold(0f32.val(), |sum, j| row(j).fma(shares[j], sum));
        let more = residual.map(|residual| residual.get(token * width + i).f32());
        out[token * width + i] = more.map_or(sum, |more| more + sum).cast();
    }
}

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "moe_route", cases: cases::routes, benches: cases::route_benches },
    Spec { name: "moe_router", cases: router::cases, benches: router::benches },
    Spec { name: "moe_group", cases: cases::groups, benches: cases::group_benches },
    Spec { name: "moe_gemv", cases: cases::gemvs, benches: cases::gemv_benches },
    Spec { name: "moe_gate_up", cases: cases::gate_ups, benches: cases::gate_up_benches },
    Spec { name: "moe_down", cases: down::cases, benches: down::benches },
    Spec { name: "moe_gemm", cases: cases::gemms, benches: cases::gemm_benches },
    Spec { name: "moe_gemm_turned", cases: cases::turned, benches: cases::turned_benches },
    Spec { name: "moe_bias", cases: cases::biases, benches: cases::bias_benches },
    Spec { name: "moe_factors", cases: cases::factors, benches: cases::factor_benches },
    Spec { name: "clamped_gate", cases: cases::gates, benches: cases::gate_benches },
    Spec { name: "bounded_gate", cases: cases::bounded_gates, benches: cases::bounded_benches },
    Spec { name: "moe_combine", cases: cases::combines, benches: cases::combine_benches },
];

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(super::KERNELS);
    }
}
