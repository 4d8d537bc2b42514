//! The positions that attention is to see, chosen by scores of their own: the lightning indexer of
//! DeepSeek-V3.2 (DeepSeek-AI 2025).
//!
//! ```text
//! s[t, p] = sum over heads h of w[t, h] max(q[t, h] . k[p], 0)     p = the positions up to t's own
//! y[t]    = the positions of the `count` greatest s[t], in ascending order
//! ```
//!
//! All heads share the keys `k`, which a cache layer of one head holds. Where there are fewer than
//! `count` positions, `y` begins with as many [`NONE`] as are missing. Ties go to the lower
//! position; a score that is no number counts as minus infinity. Factors that all scores share,
//! which published models have, choose nothing else and are left out. Positions are numbers in
//! f32: exact below [`MOST_POSITIONS`].

pub mod kernels;

use crate::operation::{
    ActivationPrecision, CacheUse, CachedWork, Operation, ReferenceCall, Sharding, StateAccess,
};
use crate::{Shape, expect};
use formats::{Error, Result};

/// `q[tokens, heads * head_dim], w[tokens, heads] -> [tokens, count]`; reads the layer's cache.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Indexer {
    /// Index of the cache layer, whose keys have one head.
    pub layer: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Positions to choose for each token.
    pub count: usize,
    /// How many positions a query chooses from, itself included; `None`: all.
    pub window: Option<usize>,
}

/// Stands where no position is.
pub const NONE: f32 = -1.0;

/// The number of positions, from 0 on, that f32 holds exactly.
pub const MOST_POSITIONS: usize = 1 << 24;

impl Operation for Indexer {
    fn name(&self) -> &'static str {
        "indexer"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        crate::arity("indexer", inputs, 2, weights, &[0])?;
        let Indexer { heads, head_dim, count, .. } = *self;
        if heads == 0 || head_dim == 0 || count == 0 || count > MOST_POSITIONS {
            let found = format!("{count} for {heads} heads of {head_dim}");
            return Err(Error::new("indexer", "some positions, heads and elements", found));
        }
        expect("indexer", "query width", &[inputs[0].width], &[heads * head_dim])?;
        expect("indexer", "weights of heads", &[inputs[1].width], &[heads])?;
        Ok(vec![Shape { width: count, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let Indexer { layer, heads, head_dim, count, .. } = *self;
        let keys = &call.cache[layer].keys;
        for (t, &position) in call.positions.iter().enumerate() {
            let first = self.first(position as usize);
            let score = |p: usize| -> f64 {
                let head = |h: usize| {
                    let q = &call.inputs[0][(t * heads + h) * head_dim..][..head_dim];
                    let product = formats::dot(q, &keys[p * head_dim..][..head_dim]);
                    f64::from(call.inputs[1][t * heads + h]) * product.max(0.0)
                };
                let sum: f64 = (0..heads).map(head).sum();
                if sum.is_nan() { f64::NEG_INFINITY } else { sum }
            };
            let scores: Vec<f64> = (first..=position as usize).map(score).collect();
            let mut order: Vec<usize> = (0..scores.len()).collect();
            // A stable sort leaves equals in the order of their positions.
            order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("no NaN"));
            order.truncate(count);
            order.sort_unstable();
            let y = &mut call.outputs[0][t * count..][..count];
            let (none, chosen) = y.split_at_mut(count - order.len());
            none.fill(NONE);
            chosen.iter_mut().zip(order).for_each(|(y, i)| *y = (first + i) as f32);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn cache(&self) -> Option<CacheUse> {
        let Indexer { layer, head_dim, window, .. } = *self;
        Some(CacheUse { layer, access: StateAccess::Read { kv_heads: 1, head_dim, window } })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn bound(&mut self, positions: usize) {
        self.window = Some(self.window.map_or(positions, |window| window.min(positions)));
    }

    fn cached_work(&self, positions: &[u32], oldest: u32) -> CachedWork {
        let each = 2 * self.heads * (self.head_dim + 1);
        CachedWork::of(positions, oldest, |position| self.first(position), each)
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Exact
    }
}

impl Indexer {
    /// The first position that a query at `position` chooses from.
    pub fn first(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Writes the positions of the greatest scores to `chosen`, as [`Indexer`] gives them. `scores` are
/// those of the positions from `first` on. `aside` is scratch, at least as long. Allocates nothing.
///
/// # Panics
/// If `aside` is shorter than `scores`.
pub fn choose(scores: &[f32], first: usize, aside: &mut [f32], chosen: &mut [f32]) {
    // A zero has one sign.
    let number = |score: f32| if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 };
    let missing = chosen.len().saturating_sub(scores.len());
    let (none, chosen) = chosen.split_at_mut(missing);
    none.fill(NONE);
    let position = |i: usize| (first + i) as f32;
    if missing > 0 || scores.len() == chosen.len() {
        chosen.iter_mut().enumerate().for_each(|(i, to)| *to = position(i));
        return;
    }
    let aside = &mut aside[..scores.len()];
    aside.iter_mut().zip(scores).for_each(|(to, score)| *to = number(*score));
    let (above, least, _) = aside.select_nth_unstable_by(chosen.len() - 1, |a, b| b.total_cmp(a));
    let least = *least;
    // Those that are as great as the least, of which the first are chosen.
    let mut ties = 1 + above.iter().filter(|score| **score == least).count();
    let mut next = 0;
    for (i, score) in scores.iter().map(|score| number(*score)).enumerate() {
        let tie = score == least;
        if score > least || tie && ties > 0 {
            ties -= usize::from(tie);
            chosen[next] = position(i);
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::{CachedLayer, Packed};
    use crate::test::noise;

    fn chosen(scores: &[f32], first: usize, count: usize) -> Vec<f32> {
        let (mut aside, mut to) = (vec![0.0; scores.len()], vec![f32::NAN; count]);
        choose(scores, first, &mut aside, &mut to);
        to
    }

    #[test]
    fn the_greatest_are_chosen_in_the_order_of_their_positions() {
        assert_eq!(chosen(&[1.0, 5.0, -2.0, 4.0], 10, 2), [11.0, 13.0]);
        assert_eq!(chosen(&[1.0, 5.0], 3, 4), [NONE, NONE, 3.0, 4.0]);
        assert_eq!(chosen(&[1.0, 5.0], 3, 2), [3.0, 4.0]);
        // Ties go to the lower position, zeros of both signs included; no number is the least.
        assert_eq!(chosen(&[0.0, -0.0, 1.0, 0.0], 0, 2), [0.0, 2.0]);
        assert_eq!(chosen(&[-0.0, 0.0, 1.0, 0.0], 0, 3), [0.0, 1.0, 2.0]);
        assert_eq!(chosen(&[f32::NAN, -9.0, f32::NEG_INFINITY], 0, 2), [0.0, 1.0]);
    }

    #[test]
    fn the_reference_chooses_alike() {
        let op = Indexer { layer: 0, heads: 3, head_dim: 4, count: 5, window: Some(20) };
        let positions: Vec<u32> = (0..40).collect();
        let (q, w) = (noise(1, 40 * 12), noise(2, 40 * 3));
        let keys = noise(3, 40 * 4);
        let layer = CachedLayer { keys: keys.clone(), ..CachedLayer::default() };
        let mut cache = [layer];
        let mut call = ReferenceCall {
            inputs: vec![&q, &w],
            widths: vec![12, 3],
            weights: &[],
            outputs: vec![vec![0.0; 40 * 5]],
            tokens: &positions,
            positions: &positions,
            picks: &[],
            deltas: vec![None],
            cache: &mut cache,
            packed: Packed::default(),
        };
        op.reference(&mut call);
        let found = call.outputs.swap_remove(0);
        for t in 0..40 {
            let first = op.first(t);
            let score = |p: usize| -> f32 {
                let head = |h: usize| {
                    let q = &q[(t * 3 + h) * 4..][..4];
                    let dot: f32 = q.iter().zip(&keys[p * 4..]).map(|(a, b)| a * b).sum();
                    w[t * 3 + h] * dot.max(0.0)
                };
                (0..3).map(head).sum()
            };
            let scores: Vec<f32> = (first..=t).map(score).collect();
            assert_eq!(found[t * 5..][..5], chosen(&scores, first, 5), "{t}");
        }
    }
}
