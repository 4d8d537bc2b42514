//! Kernels of a mixture's gradients, between its products (`moe_gemm` and `moe_gemm_turned`, see
//! [`crate::moe`]): [`gate_backward`] of each pair's gate, [`route_backward`] of each token's
//! shares. Both add up in one order, without atomics.

use tile::dsl::*;
use tile::launch::{Mode, Requirement};

use crate::experts::{Gate, Odds, Routing};
use crate::gradient::elements::slope;
use crate::moe::NONE;
use crate::sweep::{begin, require_lengths, when};
use crate::{math, real};

/// Tokens of a threadgroup of [`route_backward`]: one a simdgroup.
const TOKENS: u32 = 4;

/// A gate's value, and how it changes with `gate` and with `up`, as [`Gate::slopes`].
#[track_caller]
fn gated(of: Gate, gate: Val<f32>, up: Val<f32>) -> (Val<f32>, [Val<f32>; 2]) {
    match of {
        Gate::Plain(f) => {
            let value = real::unary(f, gate);
            (value * up, [slope(f, gate) * up, value])
        }
        Gate::Clamped { limit, alpha } => {
            let (g, u) = (gate.min(limit), up.min(limit).max(-limit) + 1.0);
            let s = math::sigmoid(g * alpha);
            let of_gate = u * s * (g * alpha * (1.0 - s) + 1.0);
            let inside = [Order::le(gate, limit), Order::le(up.abs(), limit)];
            let within = |i: usize, slope: Val<f32>| select(inside[i], slope, 0.0);
            (u * g * s, [within(0, of_gate), within(1, g * s)])
        }
    }
}

/// The gradients of each pair's gate, in the place of its operands, and of its share, on the
/// device: with `h` the gate's value and `back` the loss's gradient with respect to it, were its
/// share one, `gate` becomes `back dh/dgate`, `up` becomes `back dh/dup`, and `shares` is
/// `<back, h>`.
///
/// `gate`, `up` and `back` are `[pairs, ff]`, `shares` `[pairs]`. Where `biased`, what the experts
/// give has a bias: the buffers `ids` `[pairs]`, `dy` `[pairs / share, width]` of that type and
/// `bias` `[experts, width]` follow, and `shares` has `<dy, bias>` added.
#[kernel]
pub fn gate_backward(
    gate: InOut<f32>,
    up: InOut<f32>,
    back: In<f32>,
    shares: Out<f32>,
    ff: Const<u32>,
    form: Gate,
    biased: Option<Scalar>,
) {
    launch(Mode::Row, [dim("pairs"), fixed(1), fixed(1)], 256);
    for name in ["gate", "up", "back"] {
        require_lengths(&[(name, dim("pairs") * dim("ff"))]);
    }
    require_lengths(&[("shares", dim("pairs"))]);
    let bias = biased.map(|scalar| {
        let width = || dim("width");
        require_lengths(&[
            ("ids", dim("pairs")),
            ("dy", dim("pairs").ceil_div(dim("share")) * width()),
            ("bias", dim("experts") * width()),
        ]);
        let buffers = (In::<u32>::declare("ids"), <In>::stored("dy", scalar));
        let [width, experts, share] = ["width", "experts", "share"].map(Const::<u32>::declare);
        (buffers, <In>::declare("bias"), [width, experts, share])
    });
    begin();
    let (pair, sum) = (group_id(), Var::new(0.0));
    strided(ff).each(|i| {
        let at = pair * ff + i;
        let own = back.get(at);
        let (value, slopes) = gated(form, gate.get(at), up.get(at));
        sum.set(own.fma(value, sum.get()));
        gate.set(at, own * slopes[0]);
        up.set(at, own * slopes[1]);
    });
    if let Some(((ids, dy), bias, [width, experts, share])) = bias {
        let expert = ids.get(pair).min(experts - 1u32);
        let token = pair / share;
        strided(width).each(|i| {
            let slope = dy.get(token * width + i);
            sum.set(slope.fma(bias.get(expert * width + i), sum.get()));
        });
    }
    let sum = group_sum(sum.get());
    when(Order::eq(thread_id(), 0u32), || shares.set(pair, sum));
}

/// Gradients of all scores, from the gradients of the shares that each token's experts have, as in
/// [`Shares::backward`](super::Shares::backward), on the device. A simdgroup has `slots` scores in
/// each lane, as [`moe_route`](crate::moe::moe_route) has.
///
/// `logits` and `dlogits` `[tokens, experts]`; `ids` and `shares` `[tokens, top_k]`.
#[kernel]
pub fn route_backward(
    logits: In<{ scalar }>,
    ids: In<u32>,
    shares: In<f32>,
    dlogits: Out<{ to }>,
    tokens: Arg<u32>,
    experts: Const<u32>,
    top_k: Const<u32>,
    scalar: Scalar,
    to: Scalar,
    slots: u32,
    routing: Routing,
) {
    launch(Mode::Row, [dim("tokens").ceil_div(TOKENS), fixed(1), fixed(1)], 32 * TOKENS);
    require(Requirement::AtMost(dim("experts"), 32 * slots));
    require(Requirement::AtMost(dim("top_k"), 32));
    require_lengths(&[
        ("logits", dim("tokens") * dim("experts")),
        ("dlogits", dim("tokens") * dim("experts")),
        ("ids", dim("tokens") * dim("top_k")),
        ("shares", dim("tokens") * dim("top_k")),
    ]);
    begin();
    let lane = lane_id();
    let token = group_id() * TOKENS + simd_id();
    // Past the last they repeat it, and keep nothing.
    let (live, token) = (Order::lt(token, tokens), token.min(tokens - 1u32));
    let scores = Regs::<f32>::uninit(slots);
    let best = Var::new(f32::NEG_INFINITY);
    for slot in 0..slots {
        let expert = lane + 32 * slot;
        let score = logits.get(token * experts + expert.min(experts - 1u32));
        let score = select(Order::lt(expert, experts), score, f32::NEG_INFINITY);
        scores.set(slot, score);
        best.set(best.get().max(score));
    }
    let top = simd_max(best.get());
    let sum_of = |f: &dyn Fn(u32) -> Val<f32>| {
        simd_sum((0..slots).map(f).reduce(|a, b| a + b).unwrap_or(0f32.val()))
    };
    // Lane `j` has the token's expert `j`: its number, its score, and its share's gradient.
    let used = Order::lt(lane, top_k);
    let place = token * top_k + lane.min(top_k - 1u32);
    let chosen = select(used, ids.get(place).min(experts - 1u32), NONE);
    let own = logits.get(token * experts + chosen.min(experts - 1u32));
    let change = select(used, shares.get(place), 0.0);
    // Scores near one that was chosen, of those that were still open: a bit for each of the lane's.
    let near = |j: Val<u32>, peak: Val<f32>, jitter: f32, open: Val<u32>| {
        let weight = move |slot: u32| {
            let score = scores.get(slot);
            let free = Order::ne(open >> slot & 1u32, 0u32);
            let apart = (peak - score) / score.abs().max(peak);
            select(free & Order::le(apart, 2.0 * jitter), (score - peak).exp(), 0.0)
        };
        let expert = shuffle(chosen, j);
        let mask = !(1u32.val() << (expert / 32u32));
        (weight, open & select(Order::eq(lane, expert % 32u32), mask, u32::MAX))
    };
    let all = (0..slots).fold(0u32.val(), |open, slot| {
        open | select(Order::lt(lane + 32 * slot, experts), 1u32 << slot, 0u32)
    });
    // The odds of the lane's expert.
    let odds = match routing.odds {
        Odds::Softmax => (own - top).exp(),
        Odds::Sigmoid => math::sigmoid(own),
        Odds::Near { jitter } => {
            let (open, odds) = (Var::new(all), Var::new(0.0f32));
            range(0u32, top_k).each(|j| {
                let (weight, next) = near(j, shuffle(own, j), jitter, open.get());
                let sum = sum_of(&weight);
                odds.set(select(Order::eq(lane, j), 1.0f32 / sum, odds.get()));
                open.set(next);
            });
            odds.get()
        }
    };
    let odds = select(used, odds, 0.0);
    let total = match (routing.normalised, routing.odds) {
        (true, _) => simd_sum(odds),
        (false, Odds::Softmax) => sum_of(&|slot| (scores.get(slot) - top).exp()),
        (false, _) => 1f32.val(),
    };
    let part = odds / total;
    let mean = simd_sum(change * part);
    let excess = if routing.normalised { change - mean } else { change };
    let scale = routing.scale;
    // The gradient of the score of the lane's expert by its own share.
    let gain = match routing.odds {
        Odds::Sigmoid => excess * part * (1.0 - odds) * scale,
        Odds::Softmax | Odds::Near { .. } => excess * part * scale,
    };
    let found = Regs::<f32>::new(slots, 0.0);
    let open = Var::new(all);
    range(0u32, top_k).each(|j| {
        let (expert, gain) = (shuffle(chosen, j), shuffle(gain, j));
        for slot in 0..slots {
            let same = Order::eq(lane + 32 * slot, expert);
            found.set(slot, found.get(slot) + select(same, gain, 0.0));
        }
        if let Odds::Near { jitter } = routing.odds {
            let (weight, next) = near(j, shuffle(own, j), jitter, open.get());
            let odds = shuffle(odds, j);
            for slot in 0..slots {
                found.set(slot, found.get(slot) - gain * odds * weight(slot));
            }
            open.set(next);
        }
    });
    for slot in 0..slots {
        let expert = lane + 32 * slot;
        // Normalised shares sum to one, so that the terms of the others cancel.
        let lost = match (routing.odds, routing.normalised) {
            (Odds::Softmax, false) => (scores.get(slot) - top).exp() / total * mean * scale,
            _ => 0f32.val(),
        };
        when(live & Order::lt(expert, experts), || {
            dlogits.set(token * experts + expert, found.get(slot) - lost);
        });
    }
}
