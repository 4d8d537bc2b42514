//! Causal attention over a layer's cache: `y = softmax(q k^T * scale) v` per head, each query at
//! position `p` seeing the keys at positions `p - window + 1 ..= p`. Query heads share key/value
//! heads in groups (Ainslie et al. 2023).
//!
//! Scores may be bounded, `cap * tanh(score / cap)` (Gemma 2), and a head may have a sink, a
//! learned logit that joins the softmax's denominator alone. A head may have a slope, by which scores
//! fall with each position from the query back to the key (ALiBi, Press et al. 2022). A query may
//! see only positions that were chosen for it, as [`Indexer`](crate::Indexer) chooses them. Kernels:
//! [`decode`] for the latest token of each sequence, [`prefill`] for chunks of tokens.

pub mod decode;
pub mod prefill;

mod cases;
mod chunks;
mod form;
mod wide;

use crate::operation::{
    ActivationPrecision, CacheUse, CachedLayer, CachedWork, Operand, Operation, ReferenceCall,
    Sharding, StateAccess,
};
use crate::tuned::ForAttention;
use crate::{Shape, arity, expect};
use decode::{DecodeLoad, DecodeSchedule};
use formats::Result;
use prefill::PrefillSchedule;
use tile::case::Spec;
use tile::types::Scalar;

pub(crate) use cases::{Scene, Stores};
pub use form::AttentionForm;
pub(crate) use form::{Extras, Stored, require_aligned};
pub use wide::WideTiling;

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "attention_decode", cases: cases::decode, benches: cases::decode_benches },
    Spec {
        name: "attention_decode_codes",
        cases: cases::decode_codes,
        benches: cases::decode_q8_0_benches,
    },
    Spec { name: "attention_prefill", cases: chunks::prefill, benches: chunks::prefill_benches },
    Spec {
        name: "attention_prefill_codes",
        cases: chunks::prefill_codes,
        benches: chunks::prefill_q8_0_benches,
    },
    Spec { name: "attention_dense", cases: chunks::dense, benches: chunks::dense_benches },
];

/// The constants of one attention layer:
/// `q[tokens, heads * head_dim], (chosen[tokens, count]); (sinks[heads]), (slopes[heads])
/// -> as q`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Attention {
    /// Index of the cache layer.
    pub layer: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Multiplies the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// How many positions a query sees, itself included; `None`: all.
    pub window: Option<usize>,
    /// Whether attention is chunked rather than windowed: positions lie in chunks of `window`, and
    /// a query sees the positions of its own chunk up to itself.
    pub chunked: bool,
    /// Bounds the scaled scores: `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// Whether a weight gives each head a sink: a logit that joins the softmax's denominator alone.
    pub sinks: bool,
    /// Whether a weight, the last, gives each head a slope: scores fall by it with each position
    /// from the query back to the key, behind the bound.
    pub slopes: bool,
    /// If a second input says which positions each query sees, of those that it could: how many, in
    /// ascending order behind [`NONE`](crate::indexer::NONE) where there are fewer.
    #[serde(default)]
    pub chosen: Option<usize>,
}

/// The score function of a head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// Multiplies `q . k`.
    pub scale: f32,
    /// Bounds the scaled product: `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// A logit that joins the denominator alone.
    pub sink: Option<f32>,
    /// How much a score falls with each position from the last key back.
    pub slope: f32,
}

impl Scores {
    /// Attends one head's query `q` `[head_dim]` to keys and values `[head_dim]` each, in f64.
    /// Zeros if there are none.
    pub fn reference(&self, q: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f64> {
        let score = |(i, k): (usize, &&[f32])| {
            let scaled = formats::dot(q, k) * f64::from(self.scale);
            let bounded =
                self.cap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh());
            bounded - f64::from(self.slope) * (keys.len() - 1 - i) as f64
        };
        let scores: Vec<f64> = keys.iter().enumerate().map(score).collect();
        let sink = self.sink.map_or(f64::NEG_INFINITY, f64::from);
        let top = scores.iter().copied().fold(sink, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let mut y = vec![0.0; q.len()];
        if keys.is_empty() {
            return y;
        }
        let sum = weights.iter().sum::<f64>() + (sink - top).exp();
        for (i, y) in y.iter_mut().enumerate() {
            let mixed: f64 = weights.iter().zip(values).map(|(w, v)| w * f64::from(v[i])).sum();
            *y = mixed / sum;
        }
        y
    }
}

impl Operation for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let wanted = 1 + usize::from(self.chosen.is_some());
        arity("attention", inputs, wanted, weights, &[self.vectors()])?;
        if let Some(count) = self.chosen {
            expect("attention", "chosen positions", &[inputs[1].width], &[count])?;
            expect("attention", "slopes over chosen positions", &[self.slopes.into()], &[0])?;
        }
        for vector in weights {
            expect("attention", "sinks or slopes", vector, &[self.heads])?;
        }
        expect("attention", "heads modulo kv_heads", &[self.heads % self.kv_heads.max(1)], &[0])?;
        expect("attention", "query width", &[inputs[0].width], &[self.heads * self.head_dim])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let CachedLayer { keys, values, .. } = &call.cache[self.layer];
        let vectors = self.sinks_and_slopes(call.weights).map(|vector| vector.map(Vec::as_slice));
        let chosen = self.chosen.map(|_| call.inputs[1]);
        let y = &mut call.outputs[0];
        self.attend(call.positions, call.inputs[0], keys, values, vectors, chosen, y);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Heads { weights: true }
    }

    fn cache(&self) -> Option<CacheUse> {
        let Attention { layer, kv_heads, head_dim, window, .. } = *self;
        Some(CacheUse { layer, access: StateAccess::Read { kv_heads, head_dim, window } })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn bound(&mut self, positions: usize) {
        // A chunk that is longer than what is kept becomes a window over that: what came before it
        // is seen until it is dropped.
        self.chunked &= self.window.is_some_and(|window| window <= positions);
        self.window = Some(self.window.map_or(positions, |window| window.min(positions)));
    }

    fn divide_heads(&mut self, ranks: usize) {
        // Ranks beyond the key/value heads have the same ones.
        (self.heads, self.kv_heads) = (self.heads / ranks, (self.kv_heads / ranks).max(1));
    }

    fn reads_whole(&self, input: usize) -> bool {
        // Positions that were chosen.
        input == 1
    }

    fn cached_work(&self, positions: &[u32], oldest: u32) -> CachedWork {
        // A score and a weighted value: two products per element of a head.
        let each = 4 * self.heads * self.head_dim;
        CachedWork::of(positions, oldest, |position| self.first(position), each)
    }

    fn shares_type(&self, operand: Operand) -> bool {
        operand != Operand::Input(1)
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Queries
    }
}

/// Whether rows of `width` elements that are keys and values of up to 32 heads are attended to by
/// matrix units, in prompts and by single tokens, with `shared` bytes of shared memory per group.
pub fn takes_latents(width: u32, shared: u32, tuned: &ForAttention) -> bool {
    let form = AttentionForm { keys_only: true, ..AttentionForm::plain(width, 32) };
    let (scalar, load) = (Scalar::BF16, DecodeLoad::Few);
    let alone = DecodeSchedule::pick(form, scalar, scalar, u32::MAX, load, shared, tuned);
    let prompts = PrefillSchedule::pick(form, shared, tuned);
    matches!(alone, DecodeSchedule::Together(_)) && prompts.is_some()
}

impl Attention {
    /// How many weights it has: sinks and slopes.
    pub fn vectors(&self) -> usize {
        usize::from(self.sinks) + usize::from(self.slopes)
    }

    /// The sinks and the slopes among its weights, if it has them.
    pub fn sinks_and_slopes<'a, T>(&self, weights: &'a [T]) -> [Option<&'a T>; 2] {
        [weights.first().filter(|_| self.sinks), weights.last().filter(|_| self.slopes)]
    }

    /// The first position that a query at `position` sees.
    pub fn first(&self, position: usize) -> usize {
        match self.window {
            Some(chunk) if self.chunked => position / chunk.max(1) * chunk,
            Some(window) => (position + 1).saturating_sub(window),
            None => 0,
        }
    }

    /// Attends `q` `[tokens, heads * head_dim]` to `keys` and `values`
    /// `[positions, kv_heads * head_dim]`, which hold every position from 0, into `y`, in f64.
    /// Sinks and slopes are `[heads]`, and what is chosen `[tokens, count]`, if there are any.
    pub fn attend<'a>(
        &self,
        positions: &[u32],
        q: &[f32],
        keys: &'a [f32],
        values: &'a [f32],
        [sinks, slopes]: [Option<&[f32]>; 2],
        chosen: Option<&[f32]>,
        y: &mut [f32],
    ) {
        let (d, kv_width, group) =
            (self.head_dim, self.kv_heads * self.head_dim, self.heads / self.kv_heads);
        for (t, &position) in positions.iter().enumerate() {
            let last = position as usize;
            let first = self.first(last);
            let chosen = chosen.map(|all| {
                let count = all.len() / positions.len();
                &all[t * count..][..count]
            });
            let sees = |p: &usize| chosen.is_none_or(|chosen| chosen.contains(&(*p as f32)));
            let seen: Vec<usize> = (first..=last).filter(sees).collect();
            for h in 0..self.heads {
                let q = &q[(t * self.heads + h) * d..][..d];
                let of = |x: &'a [f32]| -> Vec<&'a [f32]> {
                    seen.iter().map(|p| &x[p * kv_width + h / group * d..][..d]).collect()
                };
                let sink = sinks.map(|sinks| sinks[h]);
                let slope = slopes.map_or(0.0, |slopes| slopes[h]);
                let scores = Scores { scale: self.scale, cap: self.cap, sink, slope };
                let mixed = scores.reference(q, &of(keys), &of(values));
                for (y, mixed) in y[(t * self.heads + h) * d..][..d].iter_mut().zip(mixed) {
                    *y = mixed as f32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::noise;

    fn plain(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> Attention {
        let (scale, cap, sinks, slopes) = (1.0, None, false, false);
        let chunked = false;
        Attention {
            layer: 0,
            heads,
            kv_heads,
            head_dim,
            scale,
            window,
            chunked,
            cap,
            sinks,
            slopes,
            chosen: None,
        }
    }

    #[test]
    fn a_window_of_one_returns_the_value_itself() {
        let attention = plain(4, 2, 3, Some(1));
        let (q, keys, values) = (noise(1, 24), noise(2, 12), noise(3, 12));
        let mut y = vec![0.0; 24];
        attention.attend(&[0, 1], &q, &keys, &values, [None; 2], None, &mut y);
        for t in 0..2 {
            for h in 0..4 {
                assert_eq!(y[(t * 4 + h) * 3..][..3], values[t * 6 + h / 2 * 3..][..3]);
            }
        }
    }

    #[test]
    fn equal_scores_average_the_values_seen() {
        let attention = plain(1, 1, 1, None);
        let mut y = [0.0; 2];
        let (keys, values) = ([5.0; 4], [1.0, 2.0, 3.0, 6.0]);
        attention.attend(&[0, 3], &[0.0; 2], &keys, &values, [None; 2], None, &mut y);
        assert_eq!(y, [1.0, 3.0]);
    }

    #[test]
    fn only_what_was_chosen_is_seen() {
        let attention = Attention { chosen: Some(2), ..plain(1, 1, 1, None) };
        let chosen = [crate::indexer::NONE, 0.0, 1.0, 3.0];
        let (mut y, values) = ([0.0; 2], [1.0, 2.0, 3.0, 6.0]);
        attention.attend(&[0, 3], &[0.0; 2], &[5.0; 4], &values, [None; 2], Some(&chosen), &mut y);
        assert_eq!(y, [1.0, 4.0]);
    }

    #[test]
    fn a_slope_prefers_what_is_near() {
        let key = [0.0f32];
        let sloped = Scores { scale: 1.0, cap: None, sink: None, slope: 3f32.ln() };
        let y = sloped.reference(&[1.0], &[&key, &key], &[&[4.0], &[8.0]]);
        assert!((y[0] - 7.0).abs() < 1e-6, "{y:?}");
    }

    #[test]
    fn a_sink_takes_its_share_and_a_cap_bounds() {
        let (key, value) = ([0.0f32], [3.0f32]);
        let sink = Scores { scale: 1.0, cap: None, sink: Some(2f32.ln()), slope: 0.0 };
        let y = sink.reference(&[1.0], &[&key], &[&value]);
        assert!((y[0] - 1.0).abs() < 1e-6, "{y:?}");
        let capped = Scores { scale: 1.0, cap: Some(1e-6), sink: None, slope: 0.0 };
        let y = capped.reference(&[1.0], &[&[50.0], &key], &[&[4.0], &[2.0]]);
        assert!((y[0] - 3.0).abs() < 1e-3, "{y:?}");
        assert_eq!(capped.reference(&[1.0], &[], &[]), [0.0]);
    }

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
