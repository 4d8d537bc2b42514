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
mod choose;
mod down;
mod group;
mod products;
mod reference;

use tile::case::Spec;
use tile::dsl::*;
use tile::launch::{Mode, Requirement};

use crate::experts::Routing;
use crate::linear::holds;
use crate::{math, sweep};
use choose::{Scores, choose};
pub use down::{DownParts, moe_down, pick_down};
pub use group::{moe_group, tiles};
pub use products::{
    Halves, moe_gate_up, moe_gemm, moe_gemm_turned, moe_gemv, pick_blocks, pick_turned,
};
pub use reference::{ExpertPairs, Routes, combine, group, product, product_turned, route};

/// Tokens that a threadgroup of [`moe_route`] routes: one a simdgroup.
const TOKENS: u32 = 4;
/// No expert.
pub(crate) const NONE: u32 = u32::MAX;

/// The experts of each token and their weights, for the kernels that do not choose themselves. A
/// simdgroup holds `slots` scores in each lane: there are at most `32 slots` experts, and `slots` at
/// most 32. Scores that are no number come last. With `factors`, each weight is multiplied with its
/// expert's.
///
/// `logits` `[tokens, experts]`, `factors` `[experts]`; `ids` and `weights` `[tokens, used]`, as
/// many as `routing` says, at most 32 and at most `experts`.
#[kernel]
pub fn moe_route(
    logits: In<{ scalar }>,
    ids: Out<u32>,
    weights: Out<f32>,
    tokens: Arg<u32>,
    experts: Const<u32>,
    scalar: Scalar,
    slots: u32,
    routing: Routing,
    factors: bool,
) {
    let used = routing.used as u32;
    let factors = factors.then(|| <In>::declare("factors"));
    launch(Mode::Row, [dim("tokens").ceil_div(TOKENS), fixed(1), fixed(1)], 32 * TOKENS);
    require(Requirement::AtMost(dim("experts"), 32 * slots));
    holds("logits", dim("tokens") * dim("experts"));
    holds("ids", dim("tokens") * used);
    holds("weights", dim("tokens") * used);
    if factors.is_some() {
        holds("factors", dim("experts") + 0u32);
    }
    grid_trigger();
    grid_wait();
    let (token, lane) = (group_id() * TOKENS + simd_id(), lane_id());
    if token < tokens {
        let scores = Scores { logits, experts, slots, routing, factors };
        let chosen = choose(scores, token, used.val());
        if lane < used {
            ids[token * used + lane] = chosen.expert;
            weights[token * used + lane] = chosen.share;
        }
    }
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

/// gpt-oss's gate of experts, [`Gate::Clamped`](crate::experts::Gate): `n` elements.
#[kernel]
pub fn clamped_gate(
    gate: In<f32>,
    up: In<f32>,
    y: Out<f32>,
    n: Arg<u32>,
    limit: Arg<f32>,
    alpha: Arg<f32>,
) {
    sweep::map(["gate", "up"], [gate, up], y, n, |[gate, up]| clamped(gate, up, limit, alpha));
}

/// [`Gate::Clamped`](crate::experts::Gate) of two halves.
#[track_caller]
fn clamped(gate: Val<f32>, up: Val<f32>, limit: Val<f32>, alpha: Val<f32>) -> Val<f32> {
    let (gate, up) = (gate.min(limit), up.min(limit).max(-limit));
    (up + 1.0) * gate * math::sigmoid(gate * alpha)
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
pub const KERNELS: &[Spec] = &[
    Spec { name: "moe_route", cases: cases::routes, benches: cases::route_benches },
    Spec { name: "moe_group", cases: cases::groups, benches: cases::group_benches },
    Spec { name: "moe_gemv", cases: cases::gemvs, benches: cases::gemv_benches },
    Spec { name: "moe_gate_up", cases: cases::gate_ups, benches: cases::gate_up_benches },
    Spec { name: "moe_down", cases: down::cases, benches: down::benches },
    Spec { name: "moe_gemm", cases: cases::gemms, benches: cases::gemm_benches },
    Spec { name: "moe_gemm_turned", cases: cases::turned, benches: cases::turned_benches },
    Spec { name: "moe_bias", cases: cases::biases, benches: cases::bias_benches },
    Spec { name: "clamped_gate", cases: cases::gates, benches: cases::gate_benches },
    Spec { name: "moe_combine", cases: cases::combines, benches: cases::combine_benches },
];

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(super::KERNELS);
    }
}
