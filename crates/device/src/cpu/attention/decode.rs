//! One query over one chunk of keys: every key and value is read from memory once, for all heads of the group.

use super::cache::{Brain, GROUP, Half, Single, Store};
use super::{CHUNK, Call, P_STRIDE, Q_STRIDE, Sequence, TILE, Work, softmax, visible};
use crate::CacheType;
use crate::cpu::isa::Isa;
use crate::cpu::math::lanes::{Lanes, dispatch};

/// Leaves the state of `sequence`'s query over chunk `chunk` (keys `chunk * CHUNK..`, as far as visible) in the
/// first rows of `work`.
///
/// # Safety
/// `check` holds for the call, `work` is the caller's own, and nobody writes what the sequence sees.
pub(super) unsafe fn chunk(
    isa: Isa,
    call: &Call<'_>,
    sequence: &Sequence<'_>,
    kv_head: usize,
    chunk: usize,
    work: Work,
) {
    // SAFETY: the caller's promises; the element is the cache's.
    unsafe {
        match call.cache.geometry().element {
            CacheType::F16 => {
                dispatch!(isa, kernel[Half](call: &Call<'_>, sequence: &Sequence<'_>, kv_head: usize, chunk: usize, work: Work));
            }
            CacheType::BF16 => {
                dispatch!(isa, kernel[Brain](call: &Call<'_>, sequence: &Sequence<'_>, kv_head: usize, chunk: usize, work: Work));
            }
            CacheType::F32 => {
                dispatch!(isa, kernel[Single](call: &Call<'_>, sequence: &Sequence<'_>, kv_head: usize, chunk: usize, work: Work));
            }
            CacheType::Q8_0 => unreachable!("no pool is made of it"),
        }
    }
}

/// The kernel behind [`chunk`].
#[inline(always)]
unsafe fn kernel<L: Lanes, E: Store>(
    call: &Call<'_>,
    sequence: &Sequence<'_>,
    kv_head: usize,
    chunk: usize,
    work: Work,
) {
    let shape = &call.shape;
    let (group, dim, width) = (shape.group(), shape.head_dim, shape.width());
    let visible = visible(shape, sequence, sequence.position);
    let seen = visible.start.max(chunk * CHUNK)..visible.end.min((chunk + 1) * CHUNK);
    let q = &call.q[sequence.row * call.q_stride + kv_head * group * dim..][..group * dim];
    // SAFETY: `work` has a group's rows; `check` vouches for the table, and `seen` for the positions.
    unsafe {
        for g in 0..group {
            for i in 0..dim {
                *work.q.add(g * Q_STRIDE + i) = q[g * dim + i] * shape.scale;
            }
        }
        softmax::reset::<L>(&work, group, width);
        let mut start = seen.start / TILE * TILE;
        while start < seen.end {
            let from = seen.start.max(start) - start;
            let to = seen.end.min(start + TILE) - start;
            // Whole groups of keys, from the first that is seen.
            let (first, last) = (from / GROUP, to.div_ceil(GROUP));
            let mut keys = [std::ptr::null(); TILE / GROUP];
            for k in first..last {
                keys[k] =
                    call.cache.keys::<E>(sequence.table, start + k * GROUP, kv_head).cast_const();
            }
            // An unseen group in front stands in for itself with one that exists; its scores are masked.
            for k in 0..first {
                keys[k] = keys[first];
            }
            scores::<L, E>(group, last, dim, &work, &keys);
            for g in 0..group {
                softmax::row::<L>(shape, &work, g, last * GROUP, from..to, width);
            }
            for k in first..last {
                let (from, to) = (from.max(k * GROUP), to.min((k + 1) * GROUP));
                let values = call.cache.values::<E>(sequence.table, start + from, kv_head);
                sums::<L, E>(group, to - from, width, &work, from, values);
            }
            start += TILE;
        }
    }
}

/// Scores of `rows` queries with `groups` groups of keys.
///
/// # Safety
/// `work` has the rows; each of the first `groups` pointers is to a group of keys.
#[inline(always)]
unsafe fn scores<L: Lanes, E: Store>(
    rows: usize,
    groups: usize,
    dim: usize,
    work: &Work,
    keys: &[*const E::Bits; TILE / GROUP],
) {
    // Rows and groups at a time, so that the sums fill the registers and hide the latency of the additions.
    // SAFETY: the steps stay inside `rows` and `groups`.
    unsafe {
        let mut row = 0;
        while row < rows {
            let left = rows - row;
            let (q, p) = (work.q.add(row * Q_STRIDE), work.p.add(row * P_STRIDE));
            match L::N {
                16 => {
                    row += left.min(4);
                    match (left, groups) {
                        (1, 4) => score::<L, E, 1, 4, 1>(q, dim, &keys[..], p),
                        (2, 4) => score::<L, E, 2, 4, 1>(q, dim, &keys[..], p),
                        (3, 4) => score::<L, E, 3, 4, 1>(q, dim, &keys[..], p),
                        (4.., 4) => score::<L, E, 4, 4, 1>(q, dim, &keys[..], p),
                        (4.., _) => each::<L, E, 4, 1>(q, dim, &keys[..groups], p),
                        (3, _) => each::<L, E, 3, 1>(q, dim, &keys[..groups], p),
                        (2, _) => each::<L, E, 2, 1>(q, dim, &keys[..groups], p),
                        _ => each::<L, E, 1, 1>(q, dim, &keys[..groups], p),
                    }
                }
                8 => {
                    row += left.min(4);
                    match left {
                        1 | 2 if groups.is_multiple_of(2) => {
                            for k in (0..groups).step_by(2) {
                                let (keys, p) = (&keys[k..k + 2], p.add(k * GROUP));
                                match left {
                                    1 => score::<L, E, 1, 2, 2>(q, dim, keys, p),
                                    _ => score::<L, E, 2, 2, 2>(q, dim, keys, p),
                                }
                            }
                        }
                        1 => each::<L, E, 1, 2>(q, dim, &keys[..groups], p),
                        2 => each::<L, E, 2, 2>(q, dim, &keys[..groups], p),
                        3 => each::<L, E, 3, 2>(q, dim, &keys[..groups], p),
                        _ => each::<L, E, 4, 2>(q, dim, &keys[..groups], p),
                    }
                }
                _ => {
                    row += left.min(4);
                    match left {
                        1 => each::<L, E, 1, 4>(q, dim, &keys[..groups], p),
                        2 => each::<L, E, 2, 4>(q, dim, &keys[..groups], p),
                        3 => each::<L, E, 3, 4>(q, dim, &keys[..groups], p),
                        _ => each::<L, E, 4, 4>(q, dim, &keys[..groups], p),
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
    keys: &[*const E::Bits],
    p: *mut f32,
) {
    for (k, key) in keys.iter().enumerate() {
        // SAFETY: the caller's promises.
        unsafe {
            score::<L, E, ROWS, 1, VECTORS>(q, dim, std::slice::from_ref(key), p.add(k * GROUP))
        };
    }
}

/// Scores of `ROWS` queries with `GROUPS` groups of keys, each `VECTORS` vectors wide.
#[inline(always)]
unsafe fn score<
    L: Lanes,
    E: Store,
    const ROWS: usize,
    const GROUPS: usize,
    const VECTORS: usize,
>(
    q: *const f32,
    dim: usize,
    keys: &[*const E::Bits],
    p: *mut f32,
) {
    let mut sums = [[[L::splat(0.0); VECTORS]; GROUPS]; ROWS];
    // SAFETY: the queries and keys have `dim` elements; the scores have the room.
    unsafe {
        for i in 0..dim {
            let mut columns = [[L::splat(0.0); VECTORS]; GROUPS];
            for k in 0..GROUPS {
                let key = keys[k].add(i * GROUP);
                // The same place of the next tile: in the same block, most of the time.
                prefetch(key.wrapping_add(TILE * dim));
                for v in 0..VECTORS {
                    columns[k][v] = E::load::<L>(key.add(v * L::N));
                }
            }
            for r in 0..ROWS {
                let q = L::splat(*q.add(r * Q_STRIDE + i));
                for k in 0..GROUPS {
                    for v in 0..VECTORS {
                        sums[r][k][v] = columns[k][v].fma(q, sums[r][k][v]);
                    }
                }
            }
        }
        for r in 0..ROWS {
            for k in 0..GROUPS {
                for v in 0..VECTORS {
                    sums[r][k][v].store(p.add(r * P_STRIDE + k * GROUP + v * L::N));
                }
            }
        }
    }
}

/// Adds `count` values, times the probabilities from column `from` on, to the sums of `rows` rows.
///
/// # Safety
/// `work` has the rows; `values` points to `count` rows of `width`.
#[inline(always)]
unsafe fn sums<L: Lanes, E: Store>(
    rows: usize,
    count: usize,
    width: usize,
    work: &Work,
    from: usize,
    values: *const E::Bits,
) {
    let vectors = width / L::N;
    // SAFETY: the steps stay inside `rows` and `width`.
    unsafe {
        let mut row = 0;
        while row < rows {
            let p = work.p.add(row * P_STRIDE + from);
            let sums = work.sums.add(row * width);
            let left = rows - row;
            let mut column = 0;
            while column < vectors {
                let (sums, values) = (sums.add(column * L::N), values.add(column * L::N));
                // As many columns as the registers hold next to four rows; a narrow head takes what there is.
                macro_rules! step {
                    ($columns:literal) => {{
                        match left {
                            1 => sum::<L, E, 1, $columns>(p, count, values, width, sums),
                            2 => sum::<L, E, 2, $columns>(p, count, values, width, sums),
                            3 => sum::<L, E, 3, $columns>(p, count, values, width, sums),
                            _ => sum::<L, E, 4, $columns>(p, count, values, width, sums),
                        }
                        column += $columns;
                    }};
                }
                match vectors - column {
                    4.. if L::N == 16 || left <= 2 => step!(4),
                    2.. => step!(2),
                    _ => step!(1),
                }
            }
            row += left.min(4);
        }
    }
}

/// Adds to the sums of `ROWS` rows in `COLUMNS` vectors.
#[inline(always)]
unsafe fn sum<L: Lanes, E: Store, const ROWS: usize, const COLUMNS: usize>(
    p: *const f32,
    count: usize,
    values: *const E::Bits,
    width: usize,
    sums: *mut f32,
) {
    // SAFETY: `count` values and probabilities exist, and the sums have the room.
    unsafe {
        let mut totals = [[L::splat(0.0); COLUMNS]; ROWS];
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                totals[r][c] = L::load(sums.add(r * width + c * L::N));
            }
        }
        for t in 0..count {
            let mut value = [L::splat(0.0); COLUMNS];
            for c in 0..COLUMNS {
                let at = values.add(t * width + c * L::N);
                if (c * L::N).is_multiple_of(32) {
                    prefetch(at.wrapping_add(TILE * width));
                }
                value[c] = E::load::<L>(at);
            }
            for r in 0..ROWS {
                let p = L::splat(*p.add(r * P_STRIDE + t));
                for c in 0..COLUMNS {
                    totals[r][c] = value[c].fma(p, totals[r][c]);
                }
            }
        }
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                totals[r][c].store(sums.add(r * width + c * L::N));
            }
        }
    }
}

/// Asks for a cache line; any address is allowed.
#[inline(always)]
fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64 and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of every aarch64 and never faults.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}
