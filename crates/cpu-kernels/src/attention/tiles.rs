//! [`super::prefill`] on Intel's tile unit, for caches of f16 or of codes: both products on sums of
//! two bf16, with nearly the accuracy of f32.
//!
//! Queries, probabilities, keys and values are each split into two bf16; for f16 keys and values
//! the split is exact. Of the four products of their parts, the one of the two small parts, about
//! `2^-18` of the whole, is left out. Calls with [`super::Call::rounded`] use only the product of
//! the large parts.

use super::cache::GROUP;
use super::store::{Eighth, Half, Store, Turbo};
use super::{
    AttentionCall, DEEP as KEYS, MAX_HEAD_DIM, P_STRIDE, QuerySequence, Work, softmax, visible,
};
use crate::amx::{self, DEPTH, Run, SIDE, TILE};
use crate::math::lanes::Avx512;
use formats::CacheType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of a product: two tiles.
pub(super) const ROWS: usize = 2 * SIDE;

/// Whether the tile unit handles such a cache: heads must be whole tiles.
pub(super) fn takes(element: CacheType, head_dim: usize) -> bool {
    !matches!(element, CacheType::BF16 | CacheType::F32) && head_dim.is_multiple_of(DEPTH)
}

/// Attention of tokens `first..first + tokens` of the sequence.
///
/// # Safety
/// The processor has the unit, [`takes`] holds for the cache, and the conditions of
/// [`super::prefill::block`] hold.
pub(super) unsafe fn block(
    call: &AttentionCall<'_>,
    sequence: &QuerySequence<'_>,
    nth: usize,
    first: usize,
    tokens: usize,
    work: Work,
) {
    let kernel = match (call.cache.geometry().element, call.rounded) {
        (CacheType::Q8_0, false) => kernel::<Eighth, 2>,
        (CacheType::Q8_0, true) => kernel::<Eighth, 1>,
        (CacheType::Turbo, false) => kernel::<Turbo, 2>,
        (CacheType::Turbo, true) => kernel::<Turbo, 1>,
        (_, false) => kernel::<Half, 2>,
        (_, true) => kernel::<Half, 1>,
    };
    // SAFETY: the caller's promises.
    unsafe { kernel(call, sequence, nth, first, tokens, work) }
}

/// The kernel behind [`block`]. `PARTS` is the number of bf16 parts that numbers are split into, 1
/// or 2.
///
/// # Safety
/// As for [`block`], with a cache of type `E`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn kernel<E: Store, const PARTS: usize>(
    call: &AttentionCall<'_>,
    sequence: &QuerySequence<'_>,
    nth: usize,
    first: usize,
    tokens: usize,
    work: Work,
) {
    let shape = &call.shape;
    let (group, dim, kv_head) = (shape.group(), shape.head_dim, call.kv_head(nth));
    let rows = tokens * group;
    let sees = |row: usize| visible(shape, sequence, sequence.position + first + row / group);
    let (lowest, end) = (sees(0).start, sees(rows - 1).end);
    let products = 2 * PARTS - 1;
    // Number of tiles in a head's elements, and in a tile of keys.
    let (deep, long) = (dim / DEPTH, KEYS / DEPTH);
    let queries = Split::<PARTS> { start: work.q.cast(), plane: work.tiles.rows * dim * 2 };
    let weights =
        Split::<PARTS> { start: work.tiles.weights.cast(), plane: work.tiles.rows * KEYS * 2 };
    let keys = Split::<PARTS> { start: work.keys.cast(), plane: KEYS * dim * 2 };
    let values = Split::<PARTS> { start: work.values.cast(), plane: KEYS * dim * 2 };
    // SAFETY: `work` has room for the block's rows, rounded up to whole products; `check` vouches
    // for the table, and `visible` for the positions.
    unsafe {
        for row in 0..rows {
            let start = (sequence.row + first + row / group) * call.q_stride;
            let q = &call.q[start + (nth * group + row % group) * dim..][..dim];
            let mut turned = [0.0; MAX_HEAD_DIM];
            let turned = &mut turned[..dim];
            turned.copy_from_slice(q);
            if call.cache.geometry().element.rotates() {
                CacheType::rotate(turned);
            }
            queries.row(row, deep, turned.as_ptr(), shape.scale, 0..deep);
        }
        softmax::reset::<Avx512>(&work, rows, dim);
        amx::configure();
        for start in (lowest / KEYS * KEYS..end).step_by(KEYS) {
            // The part of these keys that is visible to the block.
            let seen = lowest.max(start) - start..end.min(start + KEYS) - start;
            for k in seen.start / GROUP..seen.end.div_ceil(GROUP) {
                let (from, _) = call.cache.group(sequence.table, start + k * GROUP, kv_head);
                for i in 0..dim / 2 {
                    let key = |i: usize| E::key::<Avx512>(from, dim, i, 0).register();
                    keys.pair(k * deep * TILE + 64 * i, key(2 * i), key(2 * i + 1));
                }
            }
            for k in 0..KEYS / GROUP {
                let group = k * GROUP..(k + 1) * GROUP;
                let from = (group.start < seen.end && seen.start < group.end)
                    .then(|| call.cache.group(sequence.table, start + group.start, kv_head).1);
                for pair in 0..GROUP / 2 {
                    // Keys that are not visible may hold anything, and zero times NaN is NaN.
                    let of = |key: usize| {
                        let there = seen.contains(&(group.start + key));
                        from.filter(|_| there).map(|from| (from, key))
                    };
                    let (low, high) = (of(2 * pair), of(2 * pair + 1));
                    let number = |row: Option<(*mut u8, usize)>, at: usize| match row {
                        Some((from, key)) => E::value::<Avx512>(from, dim, key, at).register(),
                        None => _mm512_setzero_ps(),
                    };
                    let to = 64 * (group.start / 2 + pair);
                    for c in 0..dim / SIDE {
                        let (low, high) = (number(low, c * SIDE), number(high, c * SIDE));
                        values.pair(c * long * TILE + to, low, high);
                    }
                }
            }
            for row in (0..rows).step_by(ROWS) {
                let last = sees(rows.min(row + ROWS) - 1).end.clamp(start, start + KEYS) - start;
                let columns = last.next_multiple_of(DEPTH);
                let p = work.p.add(row * P_STRIDE).cast::<u8>();
                for column in (0..columns).step_by(ROWS) {
                    let runs =
                        runs(&queries, row / SIDE * deep, &keys, column / SIDE * deep, deep, deep);
                    let to = p.add(4 * column);
                    amx::multiply(&runs[..products], [2, 2], amx::NOTHING, (to, 4 * P_STRIDE));
                }
                for row in row..rows.min(row + ROWS) {
                    let sees = sees(row);
                    let seen = sees.start.clamp(start, start + columns) - start
                        ..sees.end.clamp(start, start + columns) - start;
                    let token = first + row / group;
                    let (position, of) = (sequence.position + token, sequence.row + token);
                    let kept = call.kept(nth * group + row % group, of, position, start);
                    softmax::row::<Avx512>(shape, &work, row, columns, seen, dim, kept);
                    let p = work.p.add(row * P_STRIDE);
                    weights.row(row, long, p, 1.0, 0..columns / DEPTH);
                }
                if columns > 0 {
                    let sums = work.sums.add(row * dim).cast::<u8>();
                    for column in (0..dim).step_by(ROWS) {
                        let n = columns / DEPTH;
                        let runs = runs(
                            &weights,
                            row / SIDE * long,
                            &values,
                            column / SIDE * long,
                            long,
                            n,
                        );
                        let to = sums.add(4 * column);
                        amx::multiply(
                            &runs[..products],
                            [2, 2],
                            (to.cast_const(), 4 * dim),
                            (to, 4 * dim),
                        );
                    }
                }
            }
        }
        amx::release();
    }
}

/// Tiles of the large parts of numbers, followed at distance `plane` by tiles of the small parts,
/// if there are two.
struct Split<const PARTS: usize> {
    start: *mut u8,
    /// Distance between the two planes in bytes.
    plane: usize,
}

impl<const PARTS: usize> Split<PARTS> {
    /// Writes row `row` of left tiles: the elements of `x` in `tiles`, times `scale`, split into
    /// parts. 16 rows of tiles take `length` bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn row(
        &self,
        row: usize,
        length: usize,
        x: *const f32,
        scale: f32,
        tiles: Range<usize>,
    ) {
        let scale = _mm512_set1_ps(scale);
        for tile in tiles {
            // SAFETY: `x` has these elements, and the tiles have room for them, by the caller's
            // promise.
            unsafe {
                let x = x.add(tile * DEPTH);
                let load = |at: usize| _mm512_mul_ps(_mm512_loadu_ps(x.add(at)), scale);
                let to = (row / SIDE * length + tile) * TILE + row % SIDE * 64;
                self.store(to, amx::split_row(load(0), load(16)));
            }
        }
    }

    /// Writes a row of a right tile, for both parts.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pair(&self, to: usize, low: __m512, high: __m512) {
        // SAFETY: passed on.
        unsafe { self.store(to, amx::split_pair(low, high)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(&self, to: usize, [first, second]: [__m512i; 2]) {
        // SAFETY: the caller has room for it.
        unsafe {
            _mm512_storeu_si512(self.start.add(to).cast(), first);
            if PARTS == 2 {
                _mm512_storeu_si512(self.start.add(self.plane + to).cast(), second);
            }
        }
    }
}

/// The products that add up to two by two result tiles: one, or three if numbers have two parts.
/// Each runs over `tiles` tiles; the next 16 rows or columns lie `length` bytes further.
fn runs<const PARTS: usize>(
    left: &Split<PARTS>,
    row: usize,
    right: &Split<PARTS>,
    column: usize,
    length: usize,
    tiles: usize,
) -> [Run; 3] {
    [(0, 0), (0, 1), (1, 0)].map(|(x, w)| {
        let of = |side: &Split<PARTS>, plane: usize, first: usize| {
            let start = side.start.wrapping_add(plane * side.plane + first * TILE).cast_const();
            [start, start.wrapping_add(length * TILE)]
        };
        Run { left: of(left, x, row), right: of(right, w, column), tiles }
    })
}
