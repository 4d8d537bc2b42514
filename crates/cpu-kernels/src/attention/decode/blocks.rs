//! Products of a decode query with a quantised cache. Codes are multiplied directly; a block's
//! scale multiplies its sum of scores, or the probabilities of its values.

use super::{P_STRIDE, Q_STRIDE, TILE, Tile, Work};
use crate::attention::cache::GROUP;
use crate::attention::store::{BLOCK, Blocks, Codes};
use crate::math::lanes::Lanes;
use crate::{LINE, prefetch};
use std::ops::Range;

/// Prefetches line `line` of a group of `bytes`, if it has that many.
#[inline(always)]
fn fetch(group: *const u8, line: usize, bytes: usize) {
    if line * LINE < bytes {
        prefetch(group.wrapping_add(line * LINE));
    }
}

/// See [`Store::score`](crate::attention::store::Store::score).
///
/// # Safety
/// As for that method.
#[inline(always)]
pub(in crate::attention) unsafe fn score<
    L: Lanes,
    C: Codes,
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
    // SAFETY: the queries and keys have `dim` elements, which are whole blocks; the scores have the
    // room.
    unsafe {
        for block in 0..dim / BLOCK {
            let mut sums = [[[L::splat(0.0); VECTORS]; GROUPS]; ROWS];
            for i in 0..BLOCK / 2 {
                let mut columns = [[[L::splat(0.0); 2]; VECTORS]; GROUPS];
                each!(k < GROUPS, {
                    let line = block * (BLOCK / 2) + i;
                    fetch(tile.values[first + k], line, Blocks::<C>::bytes(dim));
                    each!(v < VECTORS, {
                        let keys = tile.keys[first + k];
                        columns[k][v] = Blocks::<C>::keys(keys, block, i, v * L::N);
                    });
                });
                each!(r < ROWS, {
                    let q = q.add(r * Q_STRIDE + block * BLOCK + i);
                    let (low, high) = (L::splat(*q), L::splat(*q.add(BLOCK / 2)));
                    each!(k < GROUPS, {
                        each!(v < VECTORS, {
                            let [a, b] = columns[k][v];
                            sums[r][k][v] = b.fma(high, a.fma(low, sums[r][k][v]));
                        });
                    });
                });
            }
            each!(k < GROUPS, {
                each!(v < VECTORS, {
                    let scales = Blocks::<C>::scales(tile.keys[first + k], dim, block);
                    let scales = L::load_f16(scales.add(v * L::N));
                    each!(r < ROWS, {
                        let p = p.add(r * P_STRIDE + (first + k) * GROUP + v * L::N);
                        let before = if block == 0 { L::splat(0.0) } else { L::load(p) };
                        sums[r][k][v].fma(scales, before).store(p);
                    });
                });
            });
        }
    }
}

/// See [`Store::sums`](crate::attention::store::Store::sums).
///
/// # Safety
/// As for that method.
#[inline(always)]
pub(in crate::attention) unsafe fn sums<L: Lanes, C: Codes>(
    rows: usize,
    seen: Range<usize>,
    width: usize,
    work: &Work,
    tile: &Tile,
    then: &Tile,
) {
    // Vectors of half a block.
    macro_rules! step {
        ($rows:literal, $row:expr) => {{
            let (p, sums) = (work.p.add($row * P_STRIDE), work.sums.add($row * width));
            match L::N {
                16 => sum::<L, C, $rows, 1>(p, &seen, tile, then, width, sums),
                8 => sum::<L, C, $rows, 2>(p, &seen, tile, then, width, sums),
                _ => sum::<L, C, $rows, 4>(p, &seen, tile, then, width, sums),
            }
        }};
    }
    // SAFETY: the steps stay inside `rows`.
    unsafe {
        for row in (0..rows).step_by(4) {
            match rows - row {
                1 => step!(1, row),
                2 => step!(2, row),
                3 => step!(3, row),
                _ => step!(4, row),
            }
        }
    }
}

/// Adds to the sums of `ROWS` rows, block by block.
#[inline(always)]
unsafe fn sum<L: Lanes, C: Codes, const ROWS: usize, const VECTORS: usize>(
    p: *const f32,
    seen: &Range<usize>,
    tile: &Tile,
    then: &Tile,
    width: usize,
    sums: *mut f32,
) {
    // SAFETY: values and probabilities exist, and the sums have the room.
    unsafe {
        for block in 0..width / BLOCK {
            let mut weights = [[0.0; TILE]; ROWS];
            for at in (0..TILE).step_by(L::N) {
                let scales = Blocks::<C>::scales(tile.values[at / GROUP], width, block);
                let scales = L::load_f16(scales.add(at % GROUP));
                each!(r < ROWS, {
                    let p = L::load(p.add(r * P_STRIDE + at));
                    p.mul(scales).store(weights[r].as_mut_ptr().add(at));
                });
            }
            let sums = |r: usize, v: usize| sums.add(r * width + block * BLOCK + v * L::N);
            let mut totals = [[[L::splat(0.0); 2]; VECTORS]; ROWS];
            each!(r < ROWS, {
                each!(v < VECTORS, {
                    let at = sums(r, v);
                    totals[r][v] = [L::load(at), L::load(at.add(BLOCK / 2))];
                });
            });
            for i in 0..TILE {
                // Take a value of each group in turn, as for floats.
                let (k, t) = (i % (TILE / GROUP), i / (TILE / GROUP));
                if !seen.contains(&(k * GROUP + t)) {
                    continue;
                }
                fetch(then.keys[k], block * GROUP + t, Blocks::<C>::bytes(width));
                each!(v < VECTORS, {
                    let [a, b] =
                        Blocks::<C>::values::<L>(tile.values[k], width, t, block, v * L::N);
                    each!(r < ROWS, {
                        let weight = L::splat(weights[r][k * GROUP + t]);
                        let [low, high] = totals[r][v];
                        totals[r][v] = [a.fma(weight, low), b.fma(weight, high)];
                    });
                });
            }
            each!(r < ROWS, {
                each!(v < VECTORS, {
                    let (at, [low, high]) = (sums(r, v), totals[r][v]);
                    low.store(at);
                    high.store(at.add(BLOCK / 2));
                });
            });
        }
    }
}
