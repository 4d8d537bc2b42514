//! Attention of heads that are too wide for one simdgroup's registers: of more than 256 elements, as
//! Gemma 4's, or as latents that all heads share (DeepSeek-V2).
//!
//! All simdgroups of a group work for the same query rows. Of a block of keys each scores 16 rows
//! with 16 keys; maxima and weights pass through shared memory; then each mixes some elements of the
//! values for all rows, so that its registers hold those alone. Where values are the keys, what was
//! brought for scores is mixed, too, and the next block arrives meanwhile; else values arrive while
//! scores are computed and the next keys while values are mixed.

use tile::dsl::*;
use tile::instr::UnaryOp;
use tile::ir::Reduce;

use super::form::{AttentionForm, Extras, FLOOR, MASKED, Stored};
use super::prefill::{PAD, bring};
use crate::sweep::when;

/// Elements of a tile.
const TILE: u32 = 256;

/// How a group shares its rows and blocks of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WideTiling {
    /// Tiles of 16 query rows.
    pub tiles: u32,
    /// Tiles of 16 keys of a block. There is a simdgroup for each of them and each tile of rows.
    pub columns: u32,
    /// Blocks of keys in shared memory where values are the keys: 2 if the next arrives while one
    /// is used, else 1.
    pub stages: u32,
}

impl WideTiling {
    /// Query rows of a group.
    pub fn rows(self) -> u32 {
        16 * self.tiles
    }

    /// Keys of a block.
    pub fn keys(self) -> u32 {
        16 * self.columns
    }

    /// Simdgroups of a group.
    pub fn simds(self) -> u32 {
        self.tiles * self.columns
    }

    /// Tiles of a head's elements that a simdgroup mixes.
    fn own(self, d: u32) -> u32 {
        (d / 16).div_ceil(self.simds())
    }

    /// Bytes of shared memory for heads of `d` elements.
    pub fn bytes(self, d: u32, keys_only: bool) -> u32 {
        let exchanged = 4 * TILE * (self.simds() + self.tiles);
        2 * (self.rows() * (d + PAD) + self.staged(d, keys_only) + self.weights()) + exchanged
    }

    /// Elements of shared memory for blocks of keys and values.
    pub(super) fn staged(self, d: u32, keys_only: bool) -> u32 {
        let blocks = if keys_only { self.stages } else { 2 };
        blocks * self.keys() * (d + PAD)
    }

    fn weights(self) -> u32 {
        self.rows() * (self.keys() + PAD)
    }
}

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Keys,
    Values,
}

/// A group's work: heads of `d` elements, whose queries are in `query`, rows of `d + PAD` elements.
pub(super) struct Wide {
    pub(super) tiling: WideTiling,
    pub(super) d: u32,
    /// Whether values are the keys.
    keys_only: bool,
    pub(super) query: Shared,
    /// For blocks of keys and values ([`WideTiling::staged`]).
    pub(super) staging: Shared,
    /// The factor in front of the bound of scores, if they are bounded.
    inner: Option<Val<f32>>,
    /// The factor behind it, which makes scores exponents of two.
    pub(super) outer: Val<f32>,
}

impl Wide {
    /// For queries of a type; scores are multiplied by `scale` and bounded as `extras` says.
    #[track_caller]
    pub(super) fn new(
        tiling: WideTiling,
        form: AttentionForm,
        scalar: Scalar,
        extras: &Extras,
        scale: Val<f32>,
    ) -> Wide {
        let AttentionForm { head_dim: d, keys_only, .. } = form;
        let (inner, outer) = extras.scales(scale);
        Wide {
            tiling,
            d,
            keys_only,
            query: Shared::<f32>::stored(scalar, "query", tiling.rows() * (d + PAD)),
            staging: Shared::<f32>::stored(scalar, "staging", tiling.staged(d, keys_only)),
            inner: extras.cap.map(|_| inner),
            outer,
        }
    }

    /// Begins to bring rows to where queries lie: those below `left`, at the elements that `from`
    /// gives.
    #[track_caller]
    pub(super) fn ask(&self, q: In, from: impl Fn(Val<u32>) -> Val<u32>, left: Val<u32>) {
        let from = |slab: u32, row: Val<u32>| from(row + 16 * slab);
        let (rows, threads) = (self.tiling.rows(), 32 * self.tiling.simds());
        bring(threads, self.d, rows, Stored::numbers(q), (self.query, 0u32), from, left);
        copy_commit();
    }

    /// The softmaxes of all rows over the keys from `start` up to `end`. Copies to `query` that are
    /// under way are waited for; the caller has a barrier before it reads what was mixed.
    ///
    /// `fetch(side, at, key)` begins to bring the block that begins at `key` to `at`.
    /// `mask(scores, row, key)` masks a tile of scores, of the rows from `row` on and of the keys
    /// from `key` on.
    pub(super) fn attend(
        &self,
        (start, end): (Val<u32>, Val<u32>),
        fetch: impl Fn(Side, Val<u32>, Val<u32>),
        mask: impl Fn(Frag, Val<u32>, Val<u32>) -> Frag,
    ) -> Mixed {
        let WideTiling { tiles, columns, stages, .. } = self.tiling;
        let (step, ld, scalar) = (self.tiling.keys(), self.d + PAD, self.query.scalar());
        let block = step * ld;
        let own = self.tiling.own(self.d);
        let weights = Shared::<f32>::stored(scalar, "mixing", self.tiling.weights());
        let mixed = Mixed {
            tiling: self.tiling,
            d: self.d,
            sums: Frags::accumulators(tiles * own, 0.0),
            exchange: Shared::<f32>::named("exchange", self.tiling.simds() * TILE),
            rows: Shared::<f32>::named("tops", tiles * TILE),
        };
        let (tile, column) = (simd_id() % tiles, simd_id() / tiles);
        let outer = Frag::filled(self.outer);
        let running =
            Running { top: Frags::accumulators(1, FLOOR), sum: Frags::accumulators(1, 0.0) };
        let bring = |side: Side, at: Val<u32>, key: Val<u32>| {
            when(Order::lt(key, end), || fetch(side, at, key));
            copy_commit();
        };
        let stage = |key: Val<u32>| match self.keys_only {
            true if stages > 1 => (key - start) / step % stages * block,
            _ => 0u32.val(),
        };
        bring(Side::Keys, 0u32.val(), start);
        range(start, end).step(step).each(|key| {
            copy_wait(0);
            // The keys are there, and all have mixed the block before.
            barrier();
            let keys = stage(key);
            match self.keys_only {
                true if stages > 1 => bring(Side::Keys, stage(key + step), key + step),
                true => (),
                false => bring(Side::Values, block.val(), key),
            }
            let score = self.score(tile, keys + column * (16 * ld));
            let score = mask(score, tile * 16u32, key + column * 16u32);
            let top = running.raise(&mixed, score, tile, columns);
            let decay = ((running.top.get(0) - top) * outer).map(UnaryOp::Exp2);
            let weight = ((score - top) * outer).map(UnaryOp::Exp2);
            running.top.set(0, top);
            running.sum.set(0, running.sum.get(0) * decay + weight);
            let (lw, own_rows) = (step + PAD, tile * 16u32);
            weight.store(weights, own_rows * lw + column * 16u32, lw);
            when(Order::lt(simd_id(), tiles), || decay.store(mixed.rows, tile * TILE, 16u32));
            if !self.keys_only {
                copy_wait(0);
            }
            barrier();
            if !self.keys_only {
                // All have read the keys.
                bring(Side::Keys, 0u32.val(), key + step);
            }
            let values = if self.keys_only { keys } else { block.val() };
            mixed.mix(weights, self.staging, values);
            if self.keys_only && stages == 1 {
                barrier();
                bring(Side::Keys, 0u32.val(), key + step);
            }
        });
        barrier();
        running.sum.get(0).reduce_rows(Reduce::Sum).across().store(
            mixed.exchange,
            simd_id() * TILE,
            16u32,
        );
        when(Order::lt(simd_id(), tiles), || {
            running.top.get(0).store(mixed.rows, tile * TILE, 16u32);
        });
        mixed
    }

    /// `q k^T` of a tile of rows and the sixteen keys that begin at `keys`, bounded if scores are.
    #[track_caller]
    fn score(&self, tile: Val<u32>, keys: Val<u32>) -> Frag {
        let ld = self.d + PAD;
        let rows = tile * (16 * ld);
        // Two sums: a product waits for the one before it.
        let mut sums = [Frag::filled(0.0f32); 2];
        for k in 0..self.d / 16 {
            let left = Frag::left(self.query, rows + 16 * k, ld);
            let right = Frag::right_transposed(self.staging, keys + 16 * k, ld);
            let sum = &mut sums[k as usize % 2];
            *sum = sum.mma(left, right);
        }
        let score = sums[0] + sums[1];
        let bound = |inner| (score * Frag::filled(inner)).map(UnaryOp::Tanh);
        self.inner.map_or(score, bound)
    }
}

/// A simdgroup's maxima, in each column of a tile, and its sums, spread over one.
struct Running {
    top: Frags,
    sum: Frags,
}

impl Running {
    /// The maxima of its rows over all keys up to this block's, whose scores these are.
    #[track_caller]
    fn raise(&self, mixed: &Mixed, score: Frag, tile: Val<u32>, columns: u32) -> Frag {
        let tiles = mixed.tiling.tiles;
        let own = score.reduce_rows(Reduce::Max).across();
        if columns == 1 {
            return self.top.get(0).max(own);
        }
        own.store(mixed.exchange, simd_id() * TILE, 16u32);
        barrier();
        (0..columns).fold(self.top.get(0), |top, j| {
            let at = (tile + j * tiles) * TILE;
            top.max(Frag::accumulator(mixed.exchange, at, 16u32))
        })
    }
}

/// Softmaxes of a group's rows: sums of values, of which each simdgroup has some elements in
/// registers, and maxima and sums of weights, in shared memory.
pub(super) struct Mixed {
    tiling: WideTiling,
    d: u32,
    /// `[tiles, own]`.
    sums: Frags,
    /// A tile for each simdgroup: maxima, and in the end sums of weights.
    exchange: Shared<f32>,
    /// A tile for each tile of rows: decays, and in the end maxima.
    rows: Shared<f32>,
}

impl Mixed {
    /// `sums = sums * decay + weights values`.
    #[track_caller]
    fn mix(&self, weights: Shared, staging: Shared, values: Val<u32>) {
        let WideTiling { tiles, columns, .. } = self.tiling;
        let (own, ld, lw) = (self.tiling.own(self.d), self.d + PAD, self.tiling.keys() + PAD);
        for r in 0..tiles {
            let decay = Frag::accumulator(self.rows, r * TILE, 16u32);
            for i in r * own..(r + 1) * own {
                self.sums.set(i, self.sums.get(i) * decay);
            }
        }
        let places: Vec<Val<u32>> = (0..own).map(|i| values + self.tile(i) * 16u32).collect();
        for j in 0..columns {
            let left: Vec<Frag> =
                (0..tiles).map(|r| Frag::left(weights, 16 * r * lw + 16 * j, lw)).collect();
            for (i, place) in (0..).zip(&places) {
                let right = Frag::right(staging, *place + 16 * j * ld, ld);
                for (r, left) in (0..).zip(&left) {
                    let at = r * own + i;
                    self.sums.set(at, self.sums.get(at).mma(*left, right));
                }
            }
        }
    }

    /// The tile of a head's elements that is this simdgroup's `i`th; the last one again past the
    /// end.
    #[track_caller]
    fn tile(&self, i: u32) -> Val<u32> {
        let tile = simd_id() * self.tiling.own(self.d) + i;
        if self.is_even() { tile } else { tile.min(self.d / 16 - 1) }
    }

    /// Whether all simdgroups have as many tiles of elements.
    fn is_even(&self) -> bool {
        (self.d / 16).is_multiple_of(self.tiling.simds())
    }

    /// The maxima of a tile of rows, in units of the scores, in each column.
    #[track_caller]
    pub(super) fn top(&self, r: u32) -> Frag {
        Frag::accumulator(self.rows, r * TILE, 16u32)
    }

    /// The sums of weights of a tile of rows, in each column.
    #[track_caller]
    pub(super) fn total(&self, r: u32) -> Frag {
        let at = |j: u32| (r + j * self.tiling.tiles) * TILE;
        let read = |j: u32| Frag::accumulator(self.exchange, at(j), 16u32);
        (1..self.tiling.columns).fold(read(0), |sum, j| sum + read(j))
    }

    /// Calls `body(r, element, sums)` for this simdgroup's sums of each tile of rows, from an
    /// element on.
    #[track_caller]
    pub(super) fn each(&self, r: u32, body: impl Fn(Val<u32>, Frag)) {
        let own = self.tiling.own(self.d);
        for i in 0..own {
            let one = || body(self.tile(i) * 16u32, self.sums.get(r * own + i));
            let there = simd_id() * own + i;
            match self.is_even() {
                true => one(),
                false => when(Order::lt(there, self.d / 16), one),
            }
        }
    }
}

/// Scores of what is seen, and of the rest [`MASKED`].
#[track_caller]
pub(super) fn masked(seen: Frag, score: Frag) -> Frag {
    seen.select(score, Frag::filled(MASKED))
}
