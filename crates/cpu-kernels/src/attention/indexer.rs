//! Scores by which an indexer chooses positions: `sum over heads of weight max(q . k, 0)`, where
//! all heads share a cache's keys. Each group of sixteen keys is scored by itself, so that a score
//! depends neither on how positions are shared among workers nor on other rows.

use super::cache::{GROUP, LayerCache};
use super::store::{Brain, Eighth, Half, Single, Store, Turbo, dispatch_stored};
use super::{CHUNK, MAX_HEAD_DIM};
use crate::isa::Isa;
use crate::math::lanes::{Lanes, WIDEST, dispatch};
use formats::CacheType;
use std::ops::Range;

/// Heads whose products are under way at once.
const HEADS: usize = 4;

/// Positions that a worker scores at once: their scores begin at multiples of it.
pub const POSITIONS: usize = CHUNK;

/// One row: its queries and the weight of each head.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Queries `[heads * head_dim]`.
    pub q: &'a [f32],
    /// Weights `[heads]`.
    pub weights: &'a [f32],
    /// The sequence's blocks.
    pub table: &'a [u32],
}

/// Scores at most [`POSITIONS`] positions, the first of which is a multiple of that, into `scores`,
/// which has room for all of them up to a multiple of 16.
///
/// # Safety
/// No thread writes the keys.
///
/// # Panics
/// If shapes, lengths or a table's entries do not fit.
pub unsafe fn scores(
    isa: Isa,
    cache: &LayerCache,
    row: Row<'_>,
    positions: Range<usize>,
    scores: &mut [f32],
) {
    let geometry = cache.geometry();
    let dim = geometry.head_dim;
    assert!(
        geometry.kv_heads == 1 && dim <= MAX_HEAD_DIM && row.q.len() == row.weights.len() * dim,
        "indexer: queries of {dim} elements, and a weight for each"
    );
    assert!(
        positions.start.is_multiple_of(POSITIONS)
            && positions.len().next_multiple_of(GROUP) <= scores.len().min(POSITIONS),
        "indexer: room for scores of {positions:?}"
    );
    // SAFETY: the keys exist; the rest was checked, or is the caller's promise.
    unsafe {
        dispatch_stored!(geometry.element, isa, kernel(cache: &LayerCache, row: Row<'_>, positions: Range<usize>, scores: &mut [f32]));
    }
}

/// The kernel behind [`scores`].
#[inline(always)]
unsafe fn kernel<L: Lanes, E: Store>(
    cache: &LayerCache,
    row: Row<'_>,
    positions: Range<usize>,
    scores: &mut [f32],
) {
    let dim = cache.geometry().head_dim;
    scores.fill(0.0);
    let mut turned = [[0.0; MAX_HEAD_DIM]; HEADS];
    let heads = row.q.chunks(HEADS * dim).zip(row.weights.chunks(HEADS));
    for (q, weights) in heads {
        for (turned, q) in turned.iter_mut().zip(q.chunks_exact(dim)) {
            turned[..dim].copy_from_slice(q);
            if cache.geometry().element.rotates() {
                CacheType::rotate(&mut turned[..dim]);
            }
        }
        for start in positions.clone().step_by(GROUP) {
            let (keys, _) = cache.group(row.table, start, 0);
            let to = &mut scores[start - positions.start..][..WIDEST];
            for v in (0..GROUP).step_by(L::N) {
                let mut sums = [L::splat(0.0); HEADS];
                // SAFETY: a group has sixteen keys of `dim` elements.
                unsafe {
                    for i in 0..dim {
                        let key = E::key::<L>(keys, dim, i, v);
                        each!(h < HEADS, {
                            sums[h] = key.fma(L::splat(turned[h][i]), sums[h]);
                        });
                    }
                    let at = to.as_mut_ptr().add(v);
                    let mut score = L::load(at);
                    for (sum, weight) in sums.iter().zip(weights) {
                        score = sum.max(L::splat(0.0)).fma(L::splat(*weight), score);
                    }
                    score.store(at);
                }
            }
        }
    }
}
