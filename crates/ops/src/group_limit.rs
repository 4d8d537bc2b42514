//! Which experts a router's scores leave, where experts stand in groups: group-limited routing
//! (DeepSeek-AI, DeepSeek-V2 and V3, 2024), with the correction of balance without a loss (Wang et
//! al. 2024).
//!
//! ```text
//! c[t, e] = sigmoid(s[t, e]) + correction[e], or with `softmax` softmax(s[t])[e] + correction[e]
//! g[t, i] = the sum of the two greatest c of the group's experts, or with `softmax` the greatest;
//!           the best `groups_used` groups stay
//! y[t, e] = s[t, e] if e is among the `used` greatest c of the groups that stay, else -infinity
//! ```
//!
//! With `softmax`, what stays of `s[t, e]` is `s[t, e] - ln(sum of exp(s[t, i]) over i other than
//! e)`, whose logistic function is the softmax over all experts, those that do not stay included.
//!
//! The correction chooses experts and is not part of their weights: [`Experts`](crate::Experts)
//! makes the weights of the scores that are left. Ties go to the lower group and the lower expert;
//! a score that is no number counts as minus infinity.

use formats::{Error, Result};
use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::ir::Reduce;
use tile::launch::{Mode, Numbers, Requirement};

use crate::experts::{MOST_EXPERTS, MOST_USED};
use crate::gradient::{Filled, Forward, LimitSlopes, Reverse, Wrt, give, one};
use crate::linear::holds;
use crate::moe::{NONE, best_open};
use crate::operation::{
    ActivationPrecision, Bound, Launches, Operation, ReferenceCall, Sharding, X, Y,
};
use crate::trial::{memory, random, scaled};
use crate::{Shape, arity, expect, math};

/// `scores[rows, experts]; correction[experts] -> [rows, experts]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct GroupLimit {
    /// Experts that stay, at most 32.
    pub used: usize,
    /// Groups, at most 32, of as many experts each; one of all is no limit.
    pub groups: usize,
    /// Groups whose experts may stay.
    pub groups_used: usize,
    /// Whether odds are the softmax over all scores (DeepSeek-V2), and not the logistic function of
    /// each.
    pub softmax: bool,
}

/// Most groups: a lane holds one.
pub const MOST_GROUPS: usize = 32;

impl Operation for GroupLimit {
    fn name(&self) -> &'static str {
        "group_limit"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("group_limit", inputs, 1, weights, &[1])?;
        let experts = inputs[0].width;
        expect("group_limit", "correction", weights[0], &[experts])?;
        let GroupLimit { used, groups, groups_used, .. } = *self;
        let wrong =
            |expected: String, found: usize| Err(Error::new("group_limit", expected, found));
        if experts == 0 || experts > MOST_EXPERTS {
            return wrong(format!("1 to {MOST_EXPERTS} experts"), experts);
        }
        if groups == 0 || groups > MOST_GROUPS || !experts.is_multiple_of(groups) {
            return wrong(
                format!("1 to {MOST_GROUPS} groups that divide {experts} experts"),
                groups,
            );
        }
        if groups > 1 && experts / groups < 2 && !self.softmax {
            return wrong("groups of two experts or more".to_owned(), experts / groups);
        }
        if groups_used == 0 || groups_used > groups {
            return wrong(format!("1 to {groups} groups that stay"), groups_used);
        }
        let most = (groups_used * (experts / groups)).min(MOST_USED);
        if used == 0 || used > most {
            return wrong(format!("1 to {most} experts for each token"), used);
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let experts = call.widths[0];
        let rows = call.inputs[0].chunks_exact(experts);
        for (scores, y) in rows.zip(call.outputs[0].chunks_exact_mut(experts)) {
            self.row(scores, &call.weights[0], y);
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
        let numbers =
            Numbers::new().with("tokens", to.rows(X) as u32).with("experts", experts as u32);
        let kernel = group_limit(to.scalar(X), experts.div_ceil(32) as u32, *self);
        let bound =
            [("scores", Bound::Value(X)), ("correction", Bound::Weight(0)), ("y", Bound::Value(Y))];
        to.push(kernel, numbers, &bound)?;
        Ok(true)
    }

    /// Which experts stay counts as constant, and so does the correction.
    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        if at.wants(Wrt::Weight(0)) {
            let experts = at.shape(dy).width;
            let shape = Shape::of_weight(&[experts]);
            give(at, Wrt::Weight(0), |at| one(at, Filled { shape, value: 0.0 }, &[], &[]))?;
        }
        let slopes = LimitSlopes { softmax: self.softmax, tangent: false };
        let (scores, y) = (at.input(0), at.output(0));
        give(at, Wrt::Input(0), |at| one(at, slopes, &[scores, y, dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let Some(dx) = at.tangent(0) else { return Ok(()) };
        let slopes = LimitSlopes { softmax: self.softmax, tangent: true };
        let (scores, y) = (at.input(0), at.output(0));
        let dy = one(at, slopes, &[scores, y, dx], &[])?;
        at.add(0, dy)
    }
}

impl GroupLimit {
    /// One row, whose length the groups divide, in f32 and without an allocation.
    ///
    /// # Panics
    /// When lengths differ.
    pub fn row(&self, scores: &[f32], correction: &[f32], y: &mut [f32]) {
        let size = scores.len() / self.groups;
        let number = |score: &f32| if score.is_nan() { f32::NEG_INFINITY } else { *score };
        let peak = scores.iter().map(number).fold(f32::NEG_INFINITY, f32::max);
        let all: f32 = match self.softmax {
            true => scores.iter().map(|score| (number(score) - peak).exp()).sum(),
            false => 0.0,
        };
        for ((y, score), correction) in y.iter_mut().zip(scores).zip(correction) {
            let odds = match self.softmax {
                true => (number(score) - peak).exp() / all,
                false => 1.0 / (1.0 + (-score).exp()),
            };
            let choice = odds + correction;
            *y = if choice.is_nan() { f32::NEG_INFINITY } else { choice };
        }
        let mut open = [0u32; MOST_EXPERTS / 32];
        for group in best(self.groups_used, self.groups, |group| {
            let [first, second] = greatest(&y[group * size..][..size]);
            match self.groups > 1 {
                true if self.softmax => first,
                true => first + second,
                false => 0.0,
            }
        }) {
            (group * size..(group + 1) * size).for_each(|e| open[e / 32] |= 1 << (e % 32));
        }
        let choice = |e: usize| if open[e / 32] >> (e % 32) & 1 == 1 { Some(y[e]) } else { None };
        let mut stays = [0u32; MOST_EXPERTS / 32];
        for _ in 0..self.used {
            let left = |e: &usize| choice(*e).is_some() && stays[e / 32] >> (e % 32) & 1 == 0;
            let better = |a: usize, b: usize| if choice(b) > choice(a) { b } else { a };
            let next = (0..scores.len()).filter(left).reduce(better);
            next.into_iter().for_each(|e| stays[e / 32] |= 1 << (e % 32));
        }
        for (e, (y, score)) in y.iter_mut().zip(scores).enumerate() {
            let stays = stays[e / 32] >> (e % 32) & 1 == 1;
            let left = match self.softmax {
                true => {
                    let below = number(score) - peak;
                    below - (all - below.exp()).max(0.0).ln()
                }
                false => *score,
            };
            *y = if stays { left } else { f32::NEG_INFINITY };
        }
    }
}

/// The two greatest.
fn greatest(choices: &[f32]) -> [f32; 2] {
    let mut best = [f32::NEG_INFINITY; 2];
    for &choice in choices {
        if choice > best[0] {
            best = [choice, best[0]];
        } else if choice > best[1] {
            best[1] = choice;
        }
    }
    best
}

/// The `count` of `all` whose scores are greatest, the lower first among equals, in any order.
fn best(count: usize, all: usize, score: impl Fn(usize) -> f32) -> impl Iterator<Item = usize> {
    let mut scores = [f32::NEG_INFINITY; MOST_GROUPS];
    (0..all).for_each(|i| scores[i] = score(i));
    (0..all).filter(move |&i| {
        let before = |&j: &usize| scores[j] > scores[i] || scores[j] == scores[i] && j < i;
        (0..all).filter(before).count() < count
    })
}

/// Tokens of a threadgroup: one a simdgroup.
const TOKENS: u32 = 4;

/// The scores that stay, on the device. A simdgroup holds `slots` scores in each lane: there are at
/// most `32 slots` experts, and `slots` at most 32. `scores` and `y` `[tokens, experts]`.
#[kernel]
pub fn group_limit(
    scores: In<{ scalar }>,
    correction: In<f32>,
    y: Out<{ scalar }>,
    tokens: Arg<u32>,
    experts: Const<u32>,
    scalar: Scalar,
    slots: u32,
    limit: GroupLimit,
) {
    launch(Mode::Row, [dim("tokens").ceil_div(TOKENS), fixed(1), fixed(1)], 32 * TOKENS);
    require(Requirement::AtMost(dim("experts"), 32 * slots));
    holds("scores", dim("tokens") * dim("experts"));
    holds("correction", dim("experts"));
    holds("y", dim("tokens") * dim("experts"));
    grid_trigger();
    grid_wait();
    let (token, lane) = (group_id() * TOKENS + simd_id(), lane_id());
    if token < tokens {
        let odds =
            limit.softmax.then(|| Softmax::of(scores, token * experts, experts, slots, lane));
        let choices = Regs::<f32>::uninit(slots);
        // A bit for each of the lane's experts that may still be chosen.
        let mut open = Var::new(0u32);
        for slot in 0..slots {
            let expert = lane + 32 * slot;
            let (exists, within) = (expert.lt(experts), expert.min(experts - 1u32));
            let score = scores.get(token * experts + within).f32();
            let odds = odds.map_or_else(|| math::sigmoid(score), |odds| odds.of_score(score));
            let choice = odds + correction.get(within);
            // Not a number is less than every number.
            let choice = select(exists, choice.max(f32::NEG_INFINITY), f32::NEG_INFINITY);
            choices.set(slot, choice);
            open |= select(exists, 1u32 << slot, 0u32);
        }
        if limit.groups > 1 {
            let size = experts / limit.groups as u32;
            let mine = |slot: u32| (lane + 32 * slot) / size;
            // Lane `i` has the sum of group `i`'s two greatest.
            let sums = Var::new(f32::NEG_INFINITY);
            for group in range(0u32, limit.groups as u32) {
                let bits = (0..slots).map(|slot| select(mine(slot).eq(group), 1u32 << slot, 0u32));
                let within = Var::new(open.get() & bits.reduce(|a, b| a | b).unwrap_or(0u32.val()));
                let (first, expert) = take(choices, within.get(), lane);
                let own = select(lane.eq(expert % 32u32), 1u32.val() << (expert / 32u32), 0u32);
                let sum = match limit.softmax {
                    true => first,
                    false => first + take(choices, within.get() & !own, lane).0,
                };
                sums.set(select(lane.eq(group), sum, sums.get()));
            }
            let kept = Var::new(0u32);
            let left = Var::new(select(lane.lt(limit.groups as u32), 1u32, 0u32));
            for _ in range(0u32, limit.groups_used as u32) {
                let sum = select(left.get().ne(0u32), sums.get(), f32::NEG_INFINITY);
                let peak = simd_max(sum);
                let own = select(left.get().ne(0u32) & sum.eq(peak), lane, NONE);
                let group = simd_reduce(Reduce::Min, own).min(31u32);
                kept.set(kept.get() | 1u32.val() << group);
                left.set(select(lane.eq(group), 0u32, left.get()));
            }
            for slot in 0..slots {
                let stays = (kept.get() >> mine(slot).min(31u32) & 1u32).ne(0u32);
                open &= select(stays, u32::MAX, !(1u32 << slot));
            }
        }
        let chosen = Var::new(0u32);
        for _ in range(0u32, limit.used as u32) {
            let (_, expert) = take(choices, open.get(), lane);
            let own = select(lane.eq(expert % 32u32), 1u32.val() << (expert / 32u32), 0u32);
            chosen.set(chosen.get() | own);
            open &= !own;
        }
        for slot in 0..slots {
            let expert = lane + 32 * slot;
            if expert < experts {
                let at = token * experts + expert;
                let stays = (chosen.get() >> slot & 1u32).ne(0u32);
                let score = scores.get(at).f32();
                let left = odds.map_or(score, |odds| odds.logit(score));
                y[at] = select(stays, left, f32::NEG_INFINITY).cast();
            }
        }
    }
}

/// The maximum and the sum of the softmax over a row of scores, in every lane.
#[derive(Clone, Copy)]
pub(crate) struct Softmax {
    /// The greatest score.
    pub(crate) peak: Val<f32>,
    /// The sum of the exponentials of all scores less that.
    pub(crate) sum: Val<f32>,
}

impl Softmax {
    /// That of `experts` scores from `first` on, of which a lane of the simdgroup has `slots`.
    #[track_caller]
    pub(crate) fn of(
        scores: In,
        first: Val<u32>,
        experts: Val<u32>,
        slots: u32,
        lane: Val<u32>,
    ) -> Softmax {
        let each = |slot: u32| {
            let expert = lane + 32 * slot;
            let score = scores.get(first + expert.min(experts - 1u32)).f32();
            select(expert.lt(experts), score.max(f32::NEG_INFINITY), f32::NEG_INFINITY)
        };
        let greatest = (1..slots).fold(each(0), |greatest, slot| greatest.max(each(slot)));
        let peak = simd_max(greatest);
        let own =
            (1..slots).fold((each(0) - peak).exp(), |sum, slot| sum + (each(slot) - peak).exp());
        Softmax { peak, sum: simd_sum(own) }
    }

    /// The softmax of a score.
    #[track_caller]
    fn of_score(self, score: Val<f32>) -> Val<f32> {
        (score - self.peak).exp() / self.sum
    }

    /// The number whose logistic function is the softmax of a score.
    #[track_caller]
    fn logit(self, score: Val<f32>) -> Val<f32> {
        let below = score - self.peak;
        below - (self.sum - below.exp()).max(0.0).ln()
    }
}

/// The greatest of a simdgroup's open choices, and its expert, the lowest among equals.
#[track_caller]
fn take(choices: Regs<f32>, open: Val<u32>, lane: Val<u32>) -> (Val<f32>, Val<u32>) {
    let (choice, expert) = best_open(choices, open, lane);
    let peak = simd_max(choice);
    let own = select(choice.eq(peak), expert, NONE);
    // Bounded whatever is open: bits are shifted by it.
    (peak, simd_reduce(Reduce::Min, own).min(MOST_EXPERTS as u32 - 1))
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "group_limit", cases, benches }];

fn numbers(tokens: usize, experts: usize) -> Numbers {
    Numbers::new().with("tokens", tokens as u32).with("experts", experts as u32)
}

fn cases() -> Vec<Case> {
    let case = |tokens: usize,
                experts: usize,
                [used, groups, groups_used]: [usize; 3],
                why: &str| {
        let limit = GroupLimit { used, groups, groups_used, softmax: false };
        let scores = scaled(Scalar::F32, 5, tokens * experts, 3.0);
        let correction = random(Scalar::F32, 6, experts);
        let mut y = vec![0.0; tokens * experts];
        for (scores, y) in scores.to_f32().chunks_exact(experts).zip(y.chunks_exact_mut(experts)) {
            limit.row(scores, &correction.to_f32(), y);
        }
        Case {
            kernel: group_limit(Scalar::F32, experts.div_ceil(32) as u32, limit).record(),
            label: format!("{tokens} x {experts}, {groups_used} of {groups} groups: {why}"),
            numbers: numbers(tokens, experts),
            buffers: vec![scores, correction, Buffer::zeros(Scalar::F32, tokens * experts)],
            expected: vec![(2, Expected::Exact(y.into_iter().map(f64::from).collect()))],
        }
    };
    let v2 = GroupLimit { used: 6, groups: 8, groups_used: 3, softmax: true };
    let small = GroupLimit { used: 2, groups: 3, groups_used: 2, softmax: true };
    vec![
        case(5, 8, [2, 1, 1], "no limit, fewer experts than lanes"),
        case(3, 256, [8, 8, 4], "DeepSeek-V3's"),
        case(4, 60, [3, 10, 2], "groups that lanes share"),
        case(1, 160, [6, 8, 8], "every group"),
        case(2, 6, [6, 3, 3], "every expert"),
        softmax_case(3, 160, v2, "DeepSeek-V2's"),
        softmax_case(2, 6, small, "groups of two"),
        softmax_case(4, 64, GroupLimit { groups: 1, groups_used: 1, ..v2 }, "one group"),
    ]
}

/// A case of a limit whose odds are a softmax: what stays is computed in f64.
fn softmax_case(tokens: usize, experts: usize, limit: GroupLimit, why: &str) -> Case {
    let scores = scaled(Scalar::F32, 5, tokens * experts, 3.0);
    let correction = scaled(Scalar::F32, 6, experts, 0.01);
    let mut y = vec![0.0; tokens * experts];
    let all = scores.to_f32();
    let mut want = Vec::new();
    for (scores, y) in all.chunks_exact(experts).zip(y.chunks_exact_mut(experts)) {
        limit.row(scores, &correction.to_f32(), y);
        let exp = |e: usize| f64::from(scores[e]).exp();
        want.extend((0..experts).map(|e| {
            let others: f64 = (0..experts).filter(|i| *i != e).map(exp).sum();
            let stays = y[e] > f32::NEG_INFINITY;
            if stays { f64::from(scores[e]) - others.ln() } else { f64::NEG_INFINITY }
        }));
    }
    Case {
        kernel: group_limit(Scalar::F32, experts.div_ceil(32) as u32, limit).record(),
        label: format!("{tokens} x {experts}, softmax, {} groups: {why}", limit.groups),
        numbers: numbers(tokens, experts),
        buffers: vec![scores, correction, Buffer::zeros(Scalar::F32, tokens * experts)],
        expected: vec![(2, Expected::Near(want, tile::case::tolerance(Scalar::F32)))],
    }
}

fn benches() -> Vec<Bench> {
    let (tokens, experts) = (4096, 256);
    let limit = GroupLimit { used: 8, groups: 8, groups_used: 4, softmax: false };
    let buffers = vec![
        Fill::Noise(Scalar::F32, tokens * experts),
        Fill::Noise(Scalar::F32, experts),
        Fill::Zeros(Scalar::F32, tokens * experts),
    ];
    let kernel = group_limit(Scalar::F32, 8, limit);
    vec![memory(kernel, "4096 x 256", numbers(tokens, experts), buffers, (tokens * experts) as u64)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    /// The definition, by sorting.
    #[test]
    fn the_best_of_the_best_groups_stay() {
        let limit = GroupLimit { used: 3, groups: 4, groups_used: 2, softmax: false };
        let scores: Vec<f32> = (0..12).map(|i| ((i * 29 + 7) % 31) as f32 / 8.0 - 2.0).collect();
        let correction: Vec<f32> = (0..12).map(|i| ((i * 17 + 3) % 13) as f32 / 16.0).collect();
        let choice = |e: usize| 1.0 / (1.0 + (-scores[e]).exp()) + correction[e];
        let sorted = |mut of: Vec<usize>, by: &dyn Fn(usize) -> f32| {
            of.sort_by(|a, b| by(*b).total_cmp(&by(*a)));
            of
        };
        let sum = |group: usize| {
            let own = sorted((group * 3..group * 3 + 3).collect(), &choice);
            choice(own[0]) + choice(own[1])
        };
        let groups = sorted((0..4).collect(), &sum);
        let open = groups[..2].iter().flat_map(|group| group * 3..group * 3 + 3).collect();
        let chosen = sorted(open, &choice);
        let mut y = vec![0.0; 12];
        limit.row(&scores, &correction, &mut y);
        for (e, y) in y.into_iter().enumerate() {
            let expected = if chosen[..3].contains(&e) { scores[e] } else { f32::NEG_INFINITY };
            assert_eq!(y, expected, "{e}");
        }
    }

    /// DeepSeek-V2's: the groups with the greatest scores stay, and weights are the softmax over
    /// all.
    #[test]
    fn a_softmax_is_over_all_experts() {
        let limit = GroupLimit { used: 2, groups: 3, groups_used: 2, softmax: true };
        let scores = [1.0f32, -2.0, 0.5, 0.25, -1.0, 3.0];
        let mut y = [0.0; 6];
        limit.row(&scores, &[0.0; 6], &mut y);
        let all: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
        for (e, y) in y.into_iter().enumerate() {
            match e {
                0 | 5 => {
                    let odds = 1.0 / (1.0 + (-f64::from(y)).exp());
                    assert!((odds - f64::from(scores[e]).exp() / all).abs() < 1e-6, "{e}: {odds}");
                }
                _ => assert_eq!(y, f32::NEG_INFINITY, "{e}"),
            }
        }
        let one = GroupLimit { used: 1, groups: 1, groups_used: 1, softmax: true };
        let mut y = [0.0];
        one.row(&[-3.0], &[0.0], &mut y);
        assert_eq!(y, [f32::INFINITY], "odds of one");
    }

    #[test]
    fn nonsense_is_an_error() {
        let shape = Shape::tokens(12);
        let of = |used, groups, groups_used| {
            GroupLimit { used, groups, groups_used, softmax: false }.infer(&[shape], &[&[12]])
        };
        assert!(of(3, 4, 2).is_ok() && of(12, 1, 1).is_ok());
        for wrong in [of(0, 1, 1), of(7, 4, 2), of(1, 5, 1), of(1, 12, 1), of(1, 4, 5), of(1, 4, 0)]
        {
            assert!(wrong.is_err());
        }
    }
}
