//! Attention of one query over one chunk of keys: every key and value is read from memory once, for
//! all heads of the group.
//!
//! Tiles of keys and values alternate, and each is prefetched while the one before it is read: both
//! fit the L1 cache.

pub(super) mod blocks;

use super::cache::{GROUP, Tile};
use super::store::{Brain, Eighth, Half, Number, Single, Store, Turbo, dispatch_stored};
use super::{
    AttentionCall, CHUNK, P_STRIDE, Q_STRIDE, QuerySequence, TILE, Work, queries, softmax, visible,
};
use crate::isa::Isa;
use crate::math::lanes::{Lanes, dispatch};
use crate::{LINE, prefetch};
use formats::CacheType;
use std::ops::Range;

/// A work item: keys `chunk * CHUNK..` for a group of query heads, as far as visible.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) group: usize,
    pub(super) chunk: usize,
}

/// Computes the partial softmax state of `sequence`'s query over one chunk of keys into the first
/// rows of `work`. `next` is the item that this thread will probably read next.
///
/// # Safety
/// `check` holds for the call, `work` is the caller's own, and no thread writes the visible keys
/// and values.
pub(super) unsafe fn chunk(
    isa: Isa,
    call: &AttentionCall<'_>,
    sequence: &QuerySequence<'_>,
    part: Part,
    next: Part,
    work: Work,
) {
    // SAFETY: the caller's promises; the element is the cache's.
    unsafe {
        dispatch_stored!(call.cache.geometry().element, isa, kernel(call: &AttentionCall<'_>, sequence: &QuerySequence<'_>, part: Part, next: Part, work: Work));
    }
}

/// The kernel behind [`chunk`].
#[inline(always)]
unsafe fn kernel<L: Lanes, E: Store>(
    call: &AttentionCall<'_>,
    sequence: &QuerySequence<'_>,
    part: Part,
    next: Part,
    work: Work,
) {
    let shape = &call.shape;
    let (group, dim, width) = (shape.group(), shape.head_dim, shape.width());
    let visible = visible(shape, sequence, sequence.position);
    let seen = visible.start.max(part.chunk * CHUNK)..visible.end.min((part.chunk + 1) * CHUNK);
    // SAFETY: `work` has a group's rows; `check` vouches for the table, and `seen` for the
    // positions.
    unsafe {
        queries(call, sequence.row, part.group, work.q);
        softmax::reset::<L>(&work, group, width);
        let mut start = seen.start / TILE * TILE;
        let mut tile = call.cache.tile(sequence.table, start, call.kv_head(part.group));
        while start < seen.end {
            let then = if start + TILE < seen.end {
                call.cache.tile(sequence.table, start + TILE, call.kv_head(part.group))
            } else {
                let first = visible.start.max(next.chunk * CHUNK) / TILE * TILE;
                call.cache.tile(sequence.table, first, call.kv_head(next.group))
            };
            let from = seen.start.max(start) - start;
            let to = seen.end.min(start + TILE) - start;
            if call.skips(sequence.row, start + from..start + to) {
                (tile, start) = (then, start + TILE);
                continue;
            }
            // Leading groups that are not visible: they exist, and their scores are masked.
            let groups = to.div_ceil(GROUP);
            scores::<L, E>(group, groups, dim, &work, &tile);
            for g in 0..group {
                let head = part.group * group + g;
                let kept = call.kept(head, sequence.row, sequence.position, start);
                softmax::row::<L>(shape, &work, g, groups * GROUP, from..to, width, kept);
            }
            E::sums::<L>(group, from..to, width, &work, &tile, &then);
            (tile, start) = (then, start + TILE);
        }
    }
}

/// Computes the scores of `rows` queries with the first `groups` groups of a tile's keys, while
/// prefetching its values.
///
/// # Safety
/// `work` has the rows; the groups exist.
#[inline(always)]
unsafe fn scores<L: Lanes, E: Store>(
    rows: usize,
    groups: usize,
    dim: usize,
    work: &Work,
    tile: &Tile,
) {
    // Several rows and groups at a time, so that the sums fill the registers and hide the latency
    // of the additions. SAFETY: the steps stay inside `rows` and `groups`.
    unsafe {
        let mut row = 0;
        while row < rows {
            let left = rows - row;
            let (q, p) = (work.q.add(row * Q_STRIDE), work.p.add(row * P_STRIDE));
            match L::N {
                16 => {
                    row += left.min(4);
                    match (left, groups) {
                        (1, 4) => E::score::<L, 1, 4, 1>(q, dim, tile, 0, p),
                        (2, 4) => E::score::<L, 2, 4, 1>(q, dim, tile, 0, p),
                        (3, 4) => E::score::<L, 3, 4, 1>(q, dim, tile, 0, p),
                        (4.., 4) => E::score::<L, 4, 4, 1>(q, dim, tile, 0, p),
                        (4.., _) => each::<L, E, 4, 1>(q, dim, tile, 0..groups, p),
                        (3, _) => each::<L, E, 3, 1>(q, dim, tile, 0..groups, p),
                        (2, _) => each::<L, E, 2, 1>(q, dim, tile, 0..groups, p),
                        _ => each::<L, E, 1, 1>(q, dim, tile, 0..groups, p),
                    }
                }
                8 => {
                    row += left.min(4);
                    match left {
                        1 | 2 if groups.is_multiple_of(2) => {
                            for k in (0..groups).step_by(2) {
                                match left {
                                    1 => E::score::<L, 1, 2, 2>(q, dim, tile, k, p),
                                    _ => E::score::<L, 2, 2, 2>(q, dim, tile, k, p),
                                }
                            }
                        }
                        1 => each::<L, E, 1, 2>(q, dim, tile, 0..groups, p),
                        2 => each::<L, E, 2, 2>(q, dim, tile, 0..groups, p),
                        3 => each::<L, E, 3, 2>(q, dim, tile, 0..groups, p),
                        _ => each::<L, E, 4, 2>(q, dim, tile, 0..groups, p),
                    }
                }
                _ => {
                    row += left.min(4);
                    match left {
                        1 => each::<L, E, 1, 4>(q, dim, tile, 0..groups, p),
                        2 => each::<L, E, 2, 4>(q, dim, tile, 0..groups, p),
                        3 => each::<L, E, 3, 4>(q, dim, tile, 0..groups, p),
                        _ => each::<L, E, 4, 4>(q, dim, tile, 0..groups, p),
                    }
                }
            }
        }
    }
}

/// [`score`], one group of keys after the other.
#[inline(always)]
unsafe fn each<L: Lanes, E: Store, const ROWS: usize, const VECTORS: usize>(
    q: *const f32,
    dim: usize,
    tile: &Tile,
    groups: Range<usize>,
    p: *mut f32,
) {
    for k in groups {
        // SAFETY: the caller's promises.
        unsafe { E::score::<L, ROWS, 1, VECTORS>(q, dim, tile, k, p) };
    }
}

/// [`Store::score`] for caches of floats.
#[inline(always)]
pub(super) unsafe fn score<
    L: Lanes,
    N: Number,
    const ROWS: usize,
    const GROUPS: usize,
    const VECTORS: usize,
>(
    q: *const f32,
    dim: usize,
    tile: &Tile,
    first: usize,
    p: *mut f32,
) {
    let mut sums = [[[L::splat(0.0); VECTORS]; GROUPS]; ROWS];
    // SAFETY: the queries and keys have `dim` elements; the scores have the room.
    unsafe {
        for i in 0..dim {
            let mut columns = [[L::splat(0.0); VECTORS]; GROUPS];
            each!(k < GROUPS, {
                let key = tile.keys[first + k].cast::<N::Bits>().add(i * GROUP);
                if (i * GROUP).is_multiple_of(LINE / size_of::<N::Bits>()) {
                    prefetch(tile.values[first + k].cast::<N::Bits>().wrapping_add(i * GROUP));
                }
                each!(v < VECTORS, {
                    columns[k][v] = N::load::<L>(key.add(v * L::N));
                });
            });
            each!(r < ROWS, {
                let q = L::splat(*q.add(r * Q_STRIDE + i));
                each!(k < GROUPS, {
                    each!(v < VECTORS, {
                        sums[r][k][v] = columns[k][v].fma(q, sums[r][k][v]);
                    });
                });
            });
        }
        each!(r < ROWS, {
            each!(k < GROUPS, {
                each!(v < VECTORS, {
                    sums[r][k][v].store(p.add(r * P_STRIDE + (first + k) * GROUP + v * L::N));
                });
            });
        });
    }
}

/// [`Store::sums`] for caches of floats.
///
/// # Safety
/// As for [`Store::sums`].
#[inline(always)]
pub(super) unsafe fn sums<L: Lanes, N: Number>(
    rows: usize,
    seen: Range<usize>,
    width: usize,
    work: &Work,
    tile: &Tile,
    then: &Tile,
) {
    let vectors = width / L::N;
    // SAFETY: the steps stay inside `rows` and `width`.
    unsafe {
        let mut row = 0;
        while row < rows {
            let (p, sums) = (work.p.add(row * P_STRIDE), work.sums.add(row * width));
            let left = rows - row;
            let mut column = 0;
            while column < vectors {
                // As many columns as fit the registers beside four rows; a narrow head takes fewer.
                macro_rules! step {
                    ($columns:literal) => {{
                        let (sums, at) = (sums.add(column * L::N), column * L::N);
                        let seen = seen.clone();
                        match left {
                            1 => sum::<L, N, 1, $columns>(p, seen, tile, then, at, width, sums),
                            2 => sum::<L, N, 2, $columns>(p, seen, tile, then, at, width, sums),
                            3 => sum::<L, N, 3, $columns>(p, seen, tile, then, at, width, sums),
                            _ => sum::<L, N, 4, $columns>(p, seen, tile, then, at, width, sums),
                        }
                        column += $columns;
                    }};
                }
                match vectors - column {
                    8.. if L::N == 16 && left <= 2 => step!(8),
                    4.. if L::N == 16 || left <= 2 => step!(4),
                    2.. => step!(2),
                    _ => step!(1),
                }
            }
            row += left.min(4);
        }
    }
}

/// Adds to the sums of `ROWS` rows, in `COLUMNS` vectors starting at element `first` of each value.
#[inline(always)]
unsafe fn sum<L: Lanes, N: Number, const ROWS: usize, const COLUMNS: usize>(
    p: *const f32,
    seen: Range<usize>,
    tile: &Tile,
    then: &Tile,
    first: usize,
    width: usize,
    sums: *mut f32,
) {
    // SAFETY: values and probabilities exist, and the sums have the room.
    unsafe {
        let mut totals = [[L::splat(0.0); COLUMNS]; ROWS];
        each!(r < ROWS, {
            each!(c < COLUMNS, {
                totals[r][c] = L::load(sums.add(r * width + c * L::N));
            });
        });
        for i in 0..TILE {
            // Take a value of each group in turn: four streams of cache lines are an eighth faster
            // than one.
            let (k, t) = (i % (TILE / GROUP), i / (TILE / GROUP));
            if !seen.contains(&(k * GROUP + t)) {
                continue;
            }
            let at = t * width + first;
            let values = tile.values[k].cast::<N::Bits>().add(at);
            let keys = then.keys[k].cast::<N::Bits>();
            let mut value = [L::splat(0.0); COLUMNS];
            each!(c < COLUMNS, {
                if (c * L::N).is_multiple_of(LINE / size_of::<N::Bits>()) {
                    prefetch(keys.wrapping_add(at + c * L::N));
                }
                value[c] = N::load::<L>(values.add(c * L::N));
            });
            each!(r < ROWS, {
                let p = L::splat(*p.add(r * P_STRIDE + k * GROUP + t));
                each!(c < COLUMNS, {
                    totals[r][c] = value[c].fma(p, totals[r][c]);
                });
            });
        }
        each!(r < ROWS, {
            each!(c < COLUMNS, {
                totals[r][c].store(sums.add(r * width + c * L::N));
            });
        });
    }
}
