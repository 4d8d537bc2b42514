//! The mixture's mathematics in f64: slow, obvious loops.

use crate::experts::{Odds, Routing};

/// The router's decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    /// `[tokens, k]` experts.
    pub ids: Vec<u32>,
    /// `[tokens, k]`.
    pub weights: Vec<f64>,
}

impl Routes {
    /// Multiplies each weight with its expert's factor, if experts have some.
    pub fn factored(mut self, factors: Option<&[f32]>) -> Routes {
        if let Some(factors) = factors {
            let each = self.weights.iter_mut().zip(&self.ids);
            each.for_each(|(weight, id)| *weight *= f64::from(factors[*id as usize]));
        }
        self
    }
}

/// The experts with each token's highest scores, larger first, ties to the lower, and their
/// weights.
pub fn route(scores: &[f32], experts: usize, routing: &Routing) -> Routes {
    let mut routes = Routes { ids: vec![], weights: vec![] };
    for scores in scores.chunks_exact(experts) {
        let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let odds = |e: usize| f64::from(scores[e] - top).exp();
        let mut ranks: Vec<usize> = (0..experts).collect();
        // A stable sort: what is equal stays in order.
        ranks.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let near = |j: usize, jitter: f32| {
            let best = f64::from(scores[ranks[j]]);
            let open = ranks[j..].iter().map(|e| f64::from(scores[*e]));
            let kept = open.filter(|s| (best - s) / s.abs().max(best) <= 2.0 * f64::from(jitter));
            1.0 / kept.map(|s| (s - best).exp()).sum::<f64>()
        };
        let weight = |j: usize| match routing.odds {
            Odds::Softmax => odds(ranks[j]) / (0..experts).map(odds).sum::<f64>(),
            Odds::Sigmoid => 1.0 / (1.0 + (-f64::from(scores[ranks[j]])).exp()),
            Odds::Near { jitter } => near(j, jitter),
        };
        let weights: Vec<f64> = (0..routing.used).map(weight).collect();
        let total = if routing.normalised { weights.iter().sum() } else { 1.0 };
        let scale = f64::from(routing.scale) / total;
        routes.weights.extend(weights.iter().map(|weight| weight * scale));
        routes.ids.extend(ranks[..routing.used].iter().map(|e| *e as u32));
    }
    routes
}

/// Pairs by expert.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertPairs {
    /// `[experts + 1]`: where each expert's pairs begin.
    pub offsets: Vec<u32>,
    /// `[pairs]`: the numbers of pairs, by expert, then in order.
    pub order: Vec<u32>,
    /// `[tiles, 2]`: expert and first place of each block of rows.
    pub blocks: Vec<u32>,
}

/// Sorts pairs by expert and cuts each expert's into blocks of `rows`; the table is as long as it
/// may ever have to be.
pub fn group(ids: &[u32], experts: usize, rows: usize) -> ExpertPairs {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|pair| ids[*pair as usize]);
    let (mut offsets, mut blocks) = (vec![0], vec![]);
    for expert in 0..experts as u32 {
        let begin = offsets[expert as usize];
        let end = begin + ids.iter().filter(|id| **id == expert).count() as u32;
        blocks.extend((begin..end).step_by(rows).flat_map(|first| [expert, first]));
        offsets.push(end);
    }
    while blocks.len() < 2 * (ids.len().div_ceil(rows) + experts) {
        blocks.extend([experts as u32, ids.len() as u32]);
    }
    ExpertPairs { offsets, order, blocks }
}

/// `[pairs, out]`: row `p` of the result is row `p / share` of `x` `[.., width]` times the matrix
/// of expert `ids[p]`, `[out, width]` each in `weight`.
pub fn product(
    x: &[f32],
    weight: &[f32],
    ids: &[u32],
    (width, out, share): (usize, usize, usize),
) -> Vec<f64> {
    let mut y = Vec::with_capacity(ids.len() * out);
    for (pair, id) in ids.iter().enumerate() {
        let x = &x[pair / share * width..][..width];
        for o in 0..out {
            let row = &weight[(*id as usize * out + o) * width..][..width];
            y.push(formats::dot(row, x));
        }
    }
    y
}

/// `[pairs, width]`: row `p` of the result is row `p / share` of `x` `[.., out]` times the other
/// side of the matrix of expert `ids[p]`, `[out, width]` each in `weight`.
pub fn product_turned(
    x: &[f32],
    weight: &[f32],
    ids: &[u32],
    (width, out, share): (usize, usize, usize),
) -> Vec<f64> {
    let mut y = vec![0.0; ids.len() * width];
    for (pair, (id, y)) in ids.iter().zip(y.chunks_exact_mut(width)).enumerate() {
        for (o, x) in x[pair / share * out..][..out].iter().enumerate() {
            let row = &weight[(*id as usize * out + o) * width..][..width];
            y.iter_mut().zip(row).for_each(|(y, w)| *y += f64::from(*x) * f64::from(*w));
        }
    }
    y
}

/// `[tokens, width]`: the weighted sums of rows `[tokens * k, width]`.
pub fn combine(y: &[f32], weights: &[f32], k: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; y.len() / k];
    for (pair, row) in y.chunks_exact(width).enumerate() {
        for (i, y) in row.iter().enumerate() {
            out[pair / k * width + i] += f64::from(weights[pair]) * f64::from(*y);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_expert() {
        let routing = Routing { used: 3, odds: Odds::Softmax, normalised: true, scale: 1.0 };
        let routes = route(&[1.0, 2.0, 2.0, 1.0], 4, &routing);
        assert_eq!(routes.ids, [1, 2, 0]);
        assert!((routes.weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert_eq!(routes.weights[0], routes.weights[1]);
    }

    #[test]
    fn only_scores_near_the_best_share_with_it() {
        let routing =
            Routing { used: 2, odds: Odds::Near { jitter: 0.1 }, normalised: false, scale: 1.0 };
        // 9 lies within a fifth of 10, and 5 of neither.
        let routes = route(&[5.0, 10.0, 9.0], 3, &routing);
        assert_eq!(routes.ids, [1, 2]);
        assert!((routes.weights[0] - 1.0 / (1.0 + (-1.0_f64).exp())).abs() < 1e-12);
        assert_eq!(routes.weights[1], 1.0);
    }

    #[test]
    fn groups_are_stable_and_blocks_are_padded() {
        let groups = group(&[2, 0, 2, 2, 0], 4, 2);
        assert_eq!(groups.offsets, [0, 2, 2, 5, 5]);
        assert_eq!(groups.order, [1, 4, 0, 2, 3]);
        assert_eq!(groups.blocks[..6], [0, 0, 2, 2, 2, 4]);
        assert_eq!(groups.blocks.len(), 2 * (3 + 4));
        assert_eq!(groups.blocks[6..8], [4, 5]);
    }
}
