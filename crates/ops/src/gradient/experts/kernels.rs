//! Kernels of a mixture's gradients, between its products (`moe_gemm` and `moe_gemm_turned`, see
//! [`crate::moe`]): [`gate_backward`] of each pair's gate, [`route_backward`] of each token's
//! shares, [`pair_dots`] of shares that multiply what experts read, [`moe_outer`] of the experts'
//! own matrices. All add up in one order, without atomics.

use tile::dsl::*;
use tile::launch::{Mode, Requirement};

use crate::experts::{Gate, Odds, Routing};
use crate::gradient::elements::slope;
use crate::gradient::matmul::MatmulTiling;
use crate::moe::NONE;
use crate::sweep::{begin, require_lengths, when};
use crate::{Unary, math, real};

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
        Gate::Bounded { limit } => {
            let (whole, u) = (real::unary(Unary::Silu, gate), up.min(limit).max(-limit));
            let value = whole.min(limit);
            let inside = [Order::le(whole, limit), Order::le(up.abs(), limit)];
            let within = |i: usize, slope: Val<f32>| select(inside[i], slope, 0.0);
            (value * u, [within(0, slope(Unary::Silu, gate) * u), within(1, value)])
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

/// Terms of a step of [`moe_outer`].
const STEP: u32 = 16;
/// Its threads: 16 along the rows of a result, 16 along its columns.
const THREADS: u32 = 256;

/// Types of both sides of [`moe_outer`]; the second may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OuterTypes {
    /// Element type of `a`.
    pub a: Scalar,
    /// Element type of `b`; none where all its elements are 1.
    pub b: Option<Scalar>,
}

/// The rows of pairs that one side of an outer product has.
struct Rows {
    /// None where all elements are 1.
    from: Option<In>,
    /// Pairs that read the same row.
    share: Val<u32>,
    /// Elements of a row, the first of this group's block, and how many of them it has.
    width: Val<u32>,
    first: Val<u32>,
    block: u32,
    staged: Shared<f32>,
}

impl Rows {
    /// Brings the block's elements of a step's pairs to shared memory, `[STEP, block]`, multiplied
    /// with what `weight` gives for each pair; zeros beyond the ends.
    fn stage(
        &self,
        (order, first, end): (In<u32>, Val<u32>, Val<u32>),
        weight: impl Fn(Val<u32>) -> Option<Val<f32>>,
    ) {
        for part in 0..STEP * self.block / THREADS {
            let i = thread_id() + part * THREADS;
            let (element, term) = (self.first + i % self.block, i / self.block);
            let place = first + term;
            let inside = Order::lt(element, self.width) & Order::lt(place, end);
            let pair = order.get(select(inside, place, 0u32));
            let at = pair / self.share * self.width + element;
            let read = |from: In| from.get(select(inside, at, 0u32));
            let value = self.from.map_or(1f32.val(), read);
            let value = weight(pair).map_or(value, |weight| value * weight);
            self.staged.set(i, select(inside, value, 0.0));
        }
    }
}

/// The gradients of experts' matrices, `y[e, o, i] = sum_p (weights[p]) a[p / a_share, o]
/// b[p / b_share, i]` over the pairs `p` of expert `e`, on the device; zeros where there is none.
/// Terms are added in the order of pairs. A threadgroup has a block of one expert's results.
///
/// `a` `[pairs / a_share, out]`, `y` `[experts, out, width]`, `order` `[pairs]` and `offsets`
/// `[experts + 1]` as [`moe_group`](crate::moe::moe_group) leaves them; then `b` `[pairs / b_share,
/// width]`, if it is not all 1, and `weights` `[pairs]`, if `weighed`.
#[kernel]
pub fn moe_outer(
    a: In<{ types.a }>,
    y: Out<f32>,
    order: In<u32>,
    offsets: In<u32>,
    out: Const<u32>,
    width: Const<u32>,
    a_share: Const<u32>,
    b_share: Const<u32>,
    types: OuterTypes,
    weighed: bool,
    tiling: MatmulTiling,
) {
    let MatmulTiling { tall, wide } = tiling;
    let (bm, bn) = (16 * tall, 16 * wide);
    let blocks = dim("out").ceil_div(bm) * dim("width").ceil_div(bn);
    launch(Mode::Tile, [blocks, dim("experts"), fixed(1)], THREADS);
    require_lengths(&[
        ("a", dim("pairs").ceil_div(dim("a_share")) * dim("out")),
        ("y", dim("experts") * dim("out") * dim("width")),
        ("order", dim("pairs")),
        ("offsets", dim("experts") + 1),
    ]);
    // Every product of sizes is computed in 32 bits.
    require(Requirement::AtMost(dim("experts"), 1 << 16));
    let b = types.b.map(|scalar| {
        require_lengths(&[("b", dim("pairs").ceil_div(dim("b_share")) * dim("width"))]);
        <In>::stored("b", scalar)
    });
    let weights = weighed.then(|| {
        require_lengths(&[("weights", dim("pairs"))]);
        In::<f32>::declare("weights")
    });
    begin();
    let expert = group_id_of(1);
    let across = (width + (bn - 1)) / bn;
    let (first_row, first_column) = (group_id() / across * bm, group_id() % across * bn);
    let side = |from, share, width, first, block, name: &str| {
        let staged = Shared::named(name, STEP * block);
        Rows { from, share, width, first, block, staged }
    };
    let left = side(Some(a), a_share, out, first_row, bm, "left");
    let right = side(b, b_share, width, first_column, bn, "right");
    let (row, column) = (thread_id() / 16u32, thread_id() % 16u32);
    let sums = Regs::<f32>::new(tall * wide, 0.0);
    let end = offsets.get(expert + 1u32);
    for first in range(offsets.get(expert), end).step(STEP) {
        left.stage((order, first, end), |pair| weights.map(|weights| weights.get(pair)));
        right.stage((order, first, end), |_| None);
        barrier();
        for term in range(0u32, STEP).unroll() {
            let x: Vec<Val<f32>> =
                (0..tall).map(|i| left.staged.get(term * bm + row + 16 * i)).collect();
            let w: Vec<Val<f32>> =
                (0..wide).map(|j| right.staged.get(term * bn + column + 16 * j)).collect();
            for i in 0..tall {
                for j in 0..wide {
                    let at = i * wide + j;
                    sums.set(at, x[i as usize].fma(w[j as usize], sums.get(at)));
                }
            }
        }
        barrier();
    }
    for i in 0..tall {
        for j in 0..wide {
            let (row, column) = (first_row + row + 16 * i, first_column + column + 16 * j);
            when(Order::lt(row, out) & Order::lt(column, width), || {
                y.set((expert * out + row) * width + column, sums.get(i * wide + j));
            });
        }
    }
}

/// The gradients of shares that multiply what experts read, `y[p] = <a[p], b[p / share]>`, on the
/// device: `a` `[pairs, width]`, `b` `[pairs / share, width]`, `y` `[pairs]`.
#[kernel]
pub fn pair_dots(
    a: In<f32>,
    b: In<{ scalar }>,
    y: Out<f32>,
    width: Const<u32>,
    share: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("pairs"), fixed(1), fixed(1)], 256);
    require_lengths(&[
        ("a", dim("pairs") * dim("width")),
        ("b", dim("pairs").ceil_div(dim("share")) * dim("width")),
        ("y", dim("pairs")),
    ]);
    begin();
    let (pair, sum) = (group_id(), Var::new(0.0));
    let row = pair / share;
    strided(width).each(|i| {
        sum.set(a.get(pair * width + i).fma(b.get(row * width + i), sum.get()));
    });
    let sum = group_sum(sum.get());
    when(Order::eq(thread_id(), 0u32), || y.set(pair, sum));
}
