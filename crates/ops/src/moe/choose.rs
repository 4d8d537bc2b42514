//! A token's experts and their shares, as every simdgroup chooses them that needs them: it takes
//! less time than to launch a kernel for it.

use tile::dsl::*;
use tile::ir::{LoadHint, Reduce};

use super::{NONE, best_open};
use crate::experts::{Odds, Routing};
use crate::math;
use crate::sample::kernels::arith::{key_of, logit_of};

/// The `j`-th expert, and its share, in lane `j`; in the other lanes the first expert and 0.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    pub(super) expert: Val<u32>,
    pub(super) share: Val<f32>,
    /// The expert that was chosen last, in all lanes.
    pub(super) last: Val<u32>,
}

/// Where scores are, and how they are read. A simdgroup holds `slots` scores in each lane: there
/// are at most `32 slots` experts, and `slots` at most 32.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub(super) logits: In,
    pub(super) experts: Val<u32>,
    pub(super) slots: u32,
    pub(super) routing: Routing,
    /// A factor for each expert, on its share.
    pub(super) factors: Option<In>,
}

/// The first `count` experts of a token. Scores that are no number come last. Shares are
/// complete if all experts are asked for.
#[device]
pub(super) fn choose(of: Scores, token: Val<u32>, count: Val<u32>) -> Chosen {
    let Scores { logits, experts, slots, routing, factors } = of;
    let lane = lane_id();
    let scores = Regs::<f32>::uninit(slots);
    // A bit for each of the lane's experts that may still be chosen.
    let mut open = Var::new(0u32);
    let best = Var::new(f32::NEG_INFINITY);
    for slot in 0..slots {
        let expert = lane + 32 * slot;
        let exists = expert.lt(experts);
        let at = token * experts + expert.min(experts - 1u32);
        // Not a number is less than every number.
        let score = logits.get_with(at, LoadHint::Coherent).max(f32::NEG_INFINITY);
        let score = select(exists, score, f32::NEG_INFINITY);
        scores.set(slot, score);
        open |= select(exists, 1u32 << slot, 0u32);
        best.set(best.get().max(score));
    }
    let top = logit_of(simd_max(key_of(best.get())));
    let sum_of = |f: &dyn Fn(u32) -> Val<f32>| {
        simd_sum((0..slots).map(f).reduce(|a, b| a + b).unwrap_or(0f32.val()))
    };
    // Of weights that are made to sum to one, the sum over all experts would cancel.
    let all = match (routing.odds, routing.normalised) {
        (Odds::Softmax, false) => sum_of(&|slot| (scores.get(slot) - top).exp()),
        _ => 1f32.val(),
    };
    let (chosen, share, mut sum) = (Var::new(0u32), Var::new(0.0f32), Var::new(0.0f32));
    let last = Var::new(0u32);
    for j in range(0u32, count) {
        let (score, expert) = best_open(scores, open.get(), lane);
        // Whole numbers are compared by all lanes in one instruction.
        let key = key_of(score);
        let most = simd_max(key);
        let peak = logit_of(most);
        let own = select(key.eq(most), expert, NONE);
        // Bounded whatever `count` is: the experts' products are indexed with it.
        let expert = simd_reduce(Reduce::Min, own).min(experts - 1u32);
        let weight = match routing.odds {
            Odds::Softmax => (peak - top).exp(),
            Odds::Sigmoid => math::sigmoid(peak),
            Odds::Near { jitter } => {
                let kept = sum_of(&|slot| {
                    let (score, free) = (scores.get(slot), (open.get() >> slot & 1u32).ne(0u32));
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
        last.set(expert);
    }
    let total = if routing.normalised { sum.get() } else { all };
    let share = scaled(share.get() / total, routing.scale);
    let share = factors.map_or(share, |factors| share * factors.get(chosen.get()));
    Chosen { expert: chosen.get(), share, last: last.get() }
}

/// `by * weight`, of which most models want no product.
#[track_caller]
fn scaled(weight: Val<f32>, by: f32) -> Val<f32> {
    if by == 1.0 { weight } else { weight * by }
}
