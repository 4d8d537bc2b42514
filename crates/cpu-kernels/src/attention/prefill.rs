//! Attention of a block of queries over all visible keys: tiles of keys and values, converted once,
//! multiplied with blocks of rows.

use super::cache::GROUP;
use super::store::{Brain, Eighth, Half, Single, Store, Turbo, dispatch_stored};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::{
    AttentionCall, P_STRIDE, Q_STRIDE, QuerySequence, TILE, Work, queries, softmax, visible,
};
use crate::isa::Isa;
use crate::math::lanes::{Lanes, dispatch};
use crate::team::SharedSlice;
use formats::CacheType;

/// Rows of the inner product: six rows and four vectors fill 24 of the 32 registers of AVX-512 and
/// Advanced SIMD.
const STRIP: usize = 6;

/// Attention of one block of `sequence`'s queries, for the heads of group `nth`.
///
/// # Safety
/// `check` holds for the call; `work` and the block's part of `out` are the caller's own; no thread
/// writes the visible keys and values.
pub(super) unsafe fn block(
    isa: Isa,
    call: &AttentionCall<'_>,
    sequence: &QuerySequence<'_>,
    nth: usize,
    block: usize,
    work: Work,
    out: SharedSlice<'_, f32>,
) {
    let shape = &call.shape;
    let first = block * shape.block();
    let tokens = shape.block().min(sequence.tokens - first);
    // SAFETY: the caller's promises; the element is the cache's; the block's rows are in `work`
    // when finished.
    unsafe {
        match call.cache.geometry().element {
            #[cfg(target_arch = "x86_64")]
            element if isa == Isa::Amx && tiles::takes(element, shape.head_dim) => {
                tiles::block(call, sequence, nth, first, tokens, work);
            }
            element => {
                dispatch_stored!(element, isa, kernel(call: &AttentionCall<'_>, sequence: &QuerySequence<'_>, nth: usize, first: usize, tokens: usize, work: Work));
            }
        }
        softmax::finish(call, sequence.row + first, tokens, nth, &work, out);
    }
}

/// The kernel behind [`block`]: tokens `first..first + tokens` of the sequence.
#[inline(always)]
unsafe fn kernel<L: Lanes, E: Store>(
    call: &AttentionCall<'_>,
    sequence: &QuerySequence<'_>,
    nth: usize,
    first: usize,
    tokens: usize,
    work: Work,
) {
    let shape = &call.shape;
    let (group, dim, width) = (shape.group(), shape.head_dim, shape.width());
    let rows = tokens * group;
    let sees = |row: usize| visible(shape, sequence, sequence.position + first + row / group);
    let (lowest, end) = (sees(0).start, sees(rows - 1).end);
    // SAFETY: `work` has a block's rows; `check` vouches for the table, and `visible` for the
    // positions.
    unsafe {
        for token in 0..tokens {
            let to = work.q.add(token * group * Q_STRIDE);
            queries(call, sequence.row + first + token, nth, to);
        }
        softmax::reset::<L>(&work, rows, width);
        let mut start = lowest / TILE * TILE;
        while start < end {
            // The part of the tile that is visible to the block.
            let (from, to) = (lowest.max(start) - start, end.min(start + TILE) - start);
            let tile = call.cache.tile(sequence.table, start, call.kv_head(nth));
            for k in from / GROUP..to.div_ceil(GROUP) {
                let keys = tile.keys[k];
                for i in 0..dim {
                    for v in (0..GROUP).step_by(L::N) {
                        E::key::<L>(keys, dim, i, v).store(work.keys.add(i * TILE + k * GROUP + v));
                    }
                }
                let (from, to) = (from.max(k * GROUP), to.min((k + 1) * GROUP));
                for key in from..to {
                    for i in (0..width).step_by(L::N) {
                        E::value::<L>(tile.values[k], width, key % GROUP, i)
                            .store(work.values.add(key * width + i));
                    }
                }
            }
            // `columns(row)`: the keys of this tile that the rows from `row` to the end of their
            // strip see.
            let columns = |last: usize| sees(last).end.clamp(start, start + TILE) - start;
            for row in (0..rows).step_by(STRIP) {
                let count = STRIP.min(rows - row);
                let columns = columns(row + count - 1).next_multiple_of(GROUP);
                let (q, p) = (work.q.add(row * Q_STRIDE), work.p.add(row * P_STRIDE));
                product::<L, Q_STRIDE>(count, columns, q, dim, work.keys, TILE, p, P_STRIDE, false);
                for row in row..row + count {
                    let sees = sees(row);
                    let seen = sees.start.clamp(start, start + columns) - start
                        ..sees.end.clamp(start, start + columns) - start;
                    let token = first + row / group;
                    let (position, of) = (sequence.position + token, sequence.row + token);
                    let kept = call.kept(nth * group + row % group, of, position, start);
                    softmax::row::<L>(shape, &work, row, columns, seen, width, kept);
                }
            }
            // Panel by panel, so that a panel of values stays in the L1 cache for all rows.
            for column in (0..width).step_by(4 * GROUP) {
                let panel = (width - column).min(4 * GROUP);
                for row in (0..rows).step_by(STRIP) {
                    let count = STRIP.min(rows - row);
                    let to = columns(row + count - 1);
                    if to > from {
                        let p = work.p.add(row * P_STRIDE + from);
                        let (values, sums) = (
                            work.values.add(from * width + column),
                            work.sums.add(row * width + column),
                        );
                        product::<L, P_STRIDE>(
                            count,
                            panel,
                            p,
                            to - from,
                            values,
                            width,
                            sums,
                            width,
                            true,
                        );
                    }
                }
            }
            start += TILE;
        }
    }
}

/// `c = a b`, or `c += a b`: `a` is `[rows][depth]` at distance `A`, `b` is `[depth][columns]` at
/// `b_stride`, `c` is `[rows][columns]` at `c_stride`. `rows <= STRIP`, and `columns` is a multiple
/// of [`GROUP`] up to four.
///
/// # Safety
/// The pointers are to that many elements.
#[inline(always)]
unsafe fn product<L: Lanes, const A: usize>(
    rows: usize,
    columns: usize,
    a: *const f32,
    depth: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    macro_rules! tiles {
        ($vectors:literal, $at:expr) => {{
            let (b, c) = (b.add($at), c.add($at));
            match rows {
                1 => tile::<L, A, 1, $vectors>(a, depth, b, b_stride, c, c_stride, add),
                2 => tile::<L, A, 2, $vectors>(a, depth, b, b_stride, c, c_stride, add),
                3 => tile::<L, A, 3, $vectors>(a, depth, b, b_stride, c, c_stride, add),
                4 => tile::<L, A, 4, $vectors>(a, depth, b, b_stride, c, c_stride, add),
                5 => tile::<L, A, 5, $vectors>(a, depth, b, b_stride, c, c_stride, add),
                _ => tile::<L, A, 6, $vectors>(a, depth, b, b_stride, c, c_stride, add),
            }
        }};
    }
    // SAFETY: the tiles cover the columns.
    unsafe {
        match L::N {
            16 => match columns / GROUP {
                0 => {}
                1 => tiles!(1, 0),
                2 => tiles!(2, 0),
                3 => tiles!(3, 0),
                _ => tiles!(4, 0),
            },
            8 => {
                for at in (0..columns).step_by(GROUP) {
                    tiles!(2, at);
                }
            }
            _ => {
                for at in (0..columns).step_by(GROUP) {
                    tiles!(4, at);
                }
            }
        }
    }
}

/// `R` rows by `C` vectors of [`product`], in registers.
#[inline(always)]
unsafe fn tile<L: Lanes, const A: usize, const R: usize, const C: usize>(
    a: *const f32,
    depth: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[L::splat(0.0); C]; R];
        if add {
            each!(r < R, {
                each!(v < C, {
                    sums[r][v] = L::load(c.add(r * c_stride + v * L::N));
                });
            });
        }
        each!(k < depth, {
            let mut row = [L::splat(0.0); C];
            each!(v < C, {
                row[v] = L::load(b.add(k * b_stride + v * L::N));
            });
            each!(r < R, {
                let a = L::splat(*a.add(r * A + k));
                each!(v < C, {
                    sums[r][v] = row[v].fma(a, sums[r][v]);
                });
            });
        });
        each!(r < R, {
            each!(v < C, {
                sums[r][v].store(c.add(r * c_stride + v * L::N));
            });
        });
    }
}
