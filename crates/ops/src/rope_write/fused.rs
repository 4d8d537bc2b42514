//! The body of the fused kernels: a simdgroup takes one head of a few tokens through norm, rotation
//! and write.
//!
//! Queries are read and written pair by pair, so that they may be turned in place. Keys and values
//! go to the cache in vectors of consecutive elements, as q8_0 needs them; a lane that turns a
//! key's vector also reads the other half of its pairs. The usual head is taken as a whole, four
//! elements to a lane.

use tile::dsl::*;
use tile::launch::Mode;

use super::Variant;
use crate::kv_write::{Cache, Target, require_step};
use crate::rope::{Angles, Heads};
use crate::sweep::{RowThreads, begin, load, require_vectors};
use formats::Pairing;

/// Simdgroups of a threadgroup: heads it works on.
const SIMDS: u32 = 8;
/// Elements of the usual head: four to a lane.
const USUAL: u32 = 128;

/// The buffers and constants that the kernels bind, except the caches' arrays.
#[derive(Clone, Copy)]
pub(super) struct Fused {
    pub(super) q: In,
    pub(super) k: In,
    pub(super) v: In,
    pub(super) y: Out,
    pub(super) tokens: Val<u32>,
    pub(super) cache: Cache,
    pub(super) frequencies: In,
    pub(super) heads: Val<u32>,
    pub(super) pairs: Val<u32>,
    pub(super) magnitude: Val<f32>,
    pub(super) variant: Variant,
}

/// A norm's weight and eps.
#[derive(Clone, Copy)]
struct Norm {
    weight: In,
    eps: Val<f32>,
}

impl Norm {
    fn declare(scalar: Scalar, which: &str) -> Self {
        let name = format!("{which}_norm");
        require_vectors(&[(&name, dim("head_dim"))]);
        Norm { weight: In::stored(&name, scalar), eps: Const::declare(&format!("{which}_eps")) }
    }
}

/// One head of each token of a simdgroup, read through its norm.
struct Lot {
    x: In,
    /// Which head. A simdgroup past the last repeats it and keeps nothing.
    head: Val<u32>,
    /// Each token's first element.
    first: Vec<Val<u32>>,
    /// Whether the simdgroup has this head and token to itself.
    live: Vec<Val<bool>>,
    /// The norm's weight and each token's scale.
    norm: Option<(In, Vec<Val<f32>>)>,
}

impl Lot {
    /// Elements of a token's head from `i` on.
    #[track_caller]
    fn read(&self, token: u32, i: Val<u32>, lanes: u8) -> Vec<Val<f32>> {
        let token = token as usize;
        let x = load(self.x, self.first[token] + i, lanes);
        let Some((weight, scales)) = &self.norm else { return x };
        let weights = load(*weight, i, lanes);
        x.into_iter().zip(weights).map(|(x, w)| x * scales[token] * w).collect()
    }
}

impl Fused {
    /// Records the kernel, with norms whose weights are of a type.
    #[track_caller]
    pub(super) fn record(self, norms: Scalar, keys: impl Target, values: impl Target) {
        let Fused { cache, heads, variant, .. } = self;
        let groups = |of: &str| dim(of).ceil_div(SIMDS);
        let jobs = groups("heads") + groups("kv_heads") * 2u32;
        let several = variant.schedule.tokens;
        launch(Mode::Row, [dim("tokens").ceil_div(several), jobs, fixed(1)], SIMDS * 32);
        let q_size = dim("tokens") * dim("heads") * dim("head_dim");
        let kv_size = dim("tokens") * dim("kv_heads") * dim("head_dim");
        require_vectors(&[("q", q_size.clone()), ("y", q_size)]);
        require_vectors(&[("k", kv_size.clone()), ("v", kv_size)]);
        require_step();
        let q_norm = variant.q_norm.then(|| Norm::declare(norms, "q"));
        let k_norm = variant.k_norm.then(|| Norm::declare(norms, "k"));
        begin();
        // A group has heads of q, of k or of v only: what it does is the same for all its threads.
        let group = group_id_of(1);
        let q_groups = (heads + (SIMDS - 1)) / SIMDS;
        let kv_groups = (cache.kv_heads + (SIMDS - 1)) / SIMDS;
        let turned = || {
            let position = |k: Val<u32>| cache.positions.get(self.token(k));
            let (frequencies, pairs) = (self.frequencies, self.pairs);
            let angles = Angles::of(several, position, frequencies, pairs, self.magnitude);
            let usual = Order::eq(cache.head_dim, USUAL) & Order::eq(pairs, USUAL / 2);
            let usual = usual & (variant.pairing == Pairing::Half).val();
            let of_q = || {
                let general = || self.query(&self.lot(self.q, group, heads, q_norm), angles);
                let held = || {
                    self.held(self.q, group, heads, q_norm, angles, |head, token, values, live| {
                        let first = (self.token(token) * heads + head) * USUAL;
                        let keep = || self.y.set_vec(first + lane_id() * 4u32, values);
                        test(live).then(keep).otherwise(|| {});
                    });
                };
                test(usual).then(held).otherwise(general);
            };
            let of_k = || {
                let group = group - q_groups;
                let general = || {
                    let lot = self.lot(self.k, group, cache.kv_heads, k_norm);
                    self.append(&lot, keys, |token, i, own, lanes| {
                        self.turn_key(&lot, angles, token, i, own, lanes)
                    });
                };
                let held = || {
                    let heads = cache.kv_heads;
                    self.held(self.k, group, heads, k_norm, angles, |head, token, values, live| {
                        let slot = cache.slot(self.token(token));
                        keys.put(&cache, slot, head * USUAL + lane_id() * 4u32, values, live);
                    });
                };
                test(usual).then(held).otherwise(general);
            };
            test(Order::lt(group, q_groups)).then(of_q).otherwise(of_k);
        };
        let of_v = || {
            let group = group - q_groups - kv_groups;
            let lot = self.lot(self.v, group, cache.kv_heads, None);
            self.append(&lot, values, |_, _, own, _| own);
        };
        test(Order::lt(group, q_groups + kv_groups)).then(turned).otherwise(of_v);
    }

    /// The usual head, of [`USUAL`] elements that all turn in halves, of each token of this
    /// simdgroup: read once, four elements to a lane, so that the other elements of its pairs are
    /// sixteen lanes away. `keep(head, token, elements, live)` gets the lane's elements, normed and
    /// turned.
    #[track_caller]
    fn held(
        &self,
        x: In,
        group: Val<u32>,
        heads: Val<u32>,
        norm: Option<Norm>,
        angles: Angles,
        keep: impl Fn(Val<u32>, u32, &[Val<f32>], Val<bool>),
    ) {
        let turn = group * SIMDS + simd_id();
        let (head, own) = (turn.min(heads - 1u32), lane_id() * 4u32);
        let tokens = 0..self.variant.schedule.tokens;
        let first = |token: u32| (self.token(token) * heads + head) * USUAL;
        let loaded: Vec<Vec<Val<f32>>> =
            tokens.clone().map(|token| load(x, first(token) + own, 4)).collect();
        let norm = norm.map(|Norm { weight, eps }| (load(weight, own, 4), eps));
        let upper = Order::ge(lane_id(), 16u32);
        for (token, mut values) in tokens.zip(loaded) {
            if let Some((weights, eps)) = &norm {
                let zero = 0.0f32.val();
                let squares = values.iter().fold(zero, |sum, v| v.fma(*v, sum));
                let scale = (simd_sum(squares) / USUAL as f32 + *eps).rsqrt();
                values = values.iter().zip(weights).map(|(v, w)| *v * scale * *w).collect();
            }
            let angles = angles.get(token, lane_id() % 16u32 * 4u32, 4);
            let turned: Vec<Val<f32>> = values
                .iter()
                .zip(angles)
                .map(|(&v, (cos, sin))| {
                    let other = shuffle_xor(v, 16);
                    v * cos + select(upper, other, -other) * sin
                })
                .collect();
            let live = Order::lt(turn, heads) & Order::lt(self.turn(token), self.tokens);
            keep(head, token, &turned, live);
        }
    }

    /// The `k`th token of this threadgroup, or the last of all.
    #[track_caller]
    fn token(&self, k: impl IntoVal<u32>) -> Val<u32> {
        self.turn(k).min(self.tokens - 1u32)
    }

    #[track_caller]
    fn turn(&self, k: impl IntoVal<u32>) -> Val<u32> {
        group_id() * self.variant.schedule.tokens + k.val()
    }

    /// The index of this simdgroup's head in its group of heads, with the scales of its norm.
    #[track_caller]
    fn lot(&self, x: In, group: Val<u32>, heads: Val<u32>, norm: Option<Norm>) -> Lot {
        let head_dim = self.cache.head_dim;
        let turn = group * SIMDS + simd_id();
        let head = turn.min(heads - 1u32);
        let tokens = 0..self.variant.schedule.tokens;
        let first: Vec<Val<u32>> =
            tokens.clone().map(|k| (self.token(k) * heads + head) * head_dim).collect();
        let live =
            tokens.map(|k| Order::lt(turn, heads) & Order::lt(self.turn(k), self.tokens)).collect();
        let scales = |Norm { weight, eps }: Norm| {
            let squares: Vec<Var<f32>> = first.iter().map(|_| Var::new(0.0)).collect();
            RowThreads::Simd.sweep(head_dim, 4, |at, lanes| {
                let read = |first: &Val<u32>| -> Vec<Val<f32>> {
                    at.iter().flat_map(|&i| load(x, *first + i, lanes)).collect()
                };
                let loaded: Vec<_> = first.iter().map(read).collect();
                for (squares, values) in squares.iter().zip(loaded) {
                    values.iter().for_each(|v| squares.set(v.fma(*v, squares.get())));
                }
            });
            let scale = |s: &Var<f32>| (simd_sum(s.get()) / head_dim.f32() + eps).rsqrt();
            (weight, squares.iter().map(scale).collect())
        };
        let norm = norm.map(scales);
        Lot { x, head, first, live, norm }
    }

    /// Turns a head of q.
    #[track_caller]
    fn query(&self, lot: &Lot, angles: Angles) {
        let pairing = self.variant.pairing;
        let heads = Heads {
            tokens: self.variant.schedule.tokens,
            heads: 1u32.val(),
            head_dim: self.cache.head_dim,
            pairs: self.pairs,
            pairing,
        };
        let write = |token: u32, i: Val<u32>, values: &[Val<f32>]| {
            let token = token as usize;
            let keep = || self.y.set_vec(lot.first[token] + i, values);
            test(lot.live[token]).then(keep).otherwise(|| {});
        };
        // Two pairs per lane: the 64 of the usual head at once.
        let lanes = if pairing == Pairing::Half { 2 } else { 4 };
        let read = |token, i, lanes| lot.read(token, i, lanes);
        heads.turn(RowThreads::Simd, lanes, angles, &read, &write);
    }

    /// Elements `i` on of a key, turned. Every lane turns what it writes; what does not turn takes
    /// the angle of pair 0 and drops the result.
    #[track_caller]
    fn turn_key(
        &self,
        lot: &Lot,
        angles: Angles,
        token: u32,
        i: Val<u32>,
        own: Vec<Val<f32>>,
        lanes: u8,
    ) -> Vec<Val<f32>> {
        let pairs = self.pairs;
        let turns = Order::lt(i, pairs * 2u32);
        let within = |i: Val<u32>| select(turns, i, 0u32);
        let vector = self.variant.pairing == Pairing::Adjacent && lanes > 1;
        // The first pair, the other elements of the pairs, and which of own elements are the upper
        // ones.
        let (pair, other, upper): (Val<u32>, Vec<Val<f32>>, Vec<Val<bool>>) =
            match self.variant.pairing {
                Pairing::Half => {
                    let upper = Order::ge(i, pairs);
                    let lower = select(upper, i - pairs, i);
                    let partner = select(upper, lower, i + pairs);
                    let other = lot.read(token, within(partner), lanes);
                    (within(lower), other, vec![upper; usize::from(lanes)])
                }
                Pairing::Adjacent if vector => {
                    let other = (0..own.len()).map(|j| own[j ^ 1]).collect();
                    (within(i / 2u32), other, (0..own.len()).map(|j| (j % 2 == 1).val()).collect())
                }
                Pairing::Adjacent => {
                    let other = lot.read(token, within(i ^ 1u32), 1);
                    (within(i / 2u32), other, vec![Order::ne(i & 1u32, 0u32)])
                }
            };
        let angles = angles.get(token, pair, if vector { lanes / 2 } else { lanes });
        let turned = |j: usize| {
            let (cos, sin) = angles[if vector { j / 2 } else { j }];
            let across = select(upper[j], other[j], -other[j]);
            select(turns, own[j] * cos + across * sin, own[j])
        };
        (0..own.len()).map(turned).collect()
    }

    /// Appends a head of k or v, `change(token, i, elements, lanes)` between reading and writing.
    #[track_caller]
    fn append(
        &self,
        lot: &Lot,
        to: impl Target,
        change: impl Fn(u32, Val<u32>, Vec<Val<f32>>, u8) -> Vec<Val<f32>>,
    ) {
        let head_dim = self.cache.head_dim;
        let tokens = 0..self.variant.schedule.tokens;
        let slots: Vec<Val<u32>> = tokens.clone().map(|k| self.cache.slot(self.token(k))).collect();
        let all = |lanes: u8| {
            // All lanes go on until the last has nothing left: they may exchange what they have.
            range(0u32, head_dim).step(32 * u32::from(lanes)).each(|start| {
                let i = start + lane_id() * u32::from(lanes);
                let keep = Order::lt(i, head_dim);
                let i = select(keep, i, 0u32);
                let read = |token| change(token, i, lot.read(token, i, lanes), lanes);
                let values: Vec<_> = tokens.clone().map(read).collect();
                for ((values, slot), live) in values.iter().zip(&slots).zip(&lot.live) {
                    to.put(&self.cache, *slot, lot.head * head_dim + i, values, keep & *live);
                }
            });
        };
        // Four elements are all turned or not, and halves of pairs lie as far apart as vectors do.
        let divides = |n: Val<u32>, by: u32| Order::eq(n % by, 0u32);
        let pairs = if self.variant.pairing == Pairing::Half { 4 } else { 2 };
        let whole = divides(head_dim, 4) & divides(self.pairs, pairs);
        test(whole).then(|| all(4)).otherwise(|| all(1));
    }
}
