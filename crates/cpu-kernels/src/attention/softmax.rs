//! The running softmax: the step between the two products of attention, and the final division.
//!
//! A row keeps the greatest score so far (`top`), the sum of `e^(score - top)` (`weight`), and the
//! sum of values weighted by it (`sums`). A greater score in a new tile scales the latter two by
//! `e^(old top - new top)`.

use super::{AttentionCall, AttentionShape, Fall, Kept, P_STRIDE, Work, from};
use crate::math::lanes::Lanes;
use crate::math::{exp, tanh};
use crate::team::SharedSlice;
use formats::CacheType;
use std::ops::Range;

/// Starts rows `0..rows`, with no keys seen.
///
/// # Safety
/// `work` has that many rows.
#[inline(always)]
pub(super) unsafe fn reset<L: Lanes>(work: &Work, rows: usize, width: usize) {
    // SAFETY: the rows exist; `width` is whole vectors.
    unsafe {
        for row in 0..rows {
            *work.top.add(row) = f32::NEG_INFINITY;
            *work.weight.add(row) = 0.0;
        }
        for i in (0..rows * width).step_by(L::N) {
            L::splat(0.0).store(work.sums.add(i));
        }
    }
}

/// Turns the scores of one row of a tile into probabilities relative to the row's top, and scales
/// the row's sums.
///
/// The row's scores are `0..columns` (whole vectors); those outside `seen` count as -infinity,
/// whatever they hold, and so do those that are not [`Kept`].
///
/// # Safety
/// `work` has that row; `columns` is at most the tile; `seen` lies inside `0..columns`.
#[inline(always)]
pub(super) unsafe fn row<L: Lanes>(
    shape: &AttentionShape,
    work: &Work,
    row: usize,
    columns: usize,
    seen: Range<usize>,
    width: usize,
    kept: Kept<'_>,
) {
    // SAFETY: by the caller's promise every index is inside the row.
    unsafe {
        let p = work.p.add(row * P_STRIDE);
        if let Some(cap) = shape.softcap {
            for i in (0..columns).step_by(L::N) {
                tanh(L::load(p.add(i)).mul(L::splat(1.0 / cap))).mul(L::splat(cap)).store(p.add(i));
            }
        }
        if let Some(Fall { slope, distance }) = kept.fall {
            for i in 0..columns {
                *p.add(i) -= slope * (distance - i as f32);
            }
        }
        for i in (0..seen.start).chain(seen.end..columns) {
            *p.add(i) = f32::NEG_INFINITY;
        }
        if let Some(chosen) = kept.chosen {
            let mut chosen = from(chosen, kept.start + seen.start);
            for i in seen.clone() {
                match chosen.split_first() {
                    Some((&next, rest)) if next == (kept.start + i) as f32 => chosen = rest,
                    _ => *p.add(i) = f32::NEG_INFINITY,
                }
            }
        }
        let mut greatest = L::splat(f32::NEG_INFINITY);
        for i in (0..columns).step_by(L::N) {
            greatest = L::load(p.add(i)).max(greatest);
        }
        let old = *work.top.add(row);
        let greatest = greatest.greatest();
        let top = if greatest > old { greatest } else { old };
        if seen.is_empty() || top == f32::NEG_INFINITY {
            // Nothing visible here or before: avoid infinity minus infinity.
            for i in (0..columns).step_by(L::N) {
                L::splat(0.0).store(p.add(i));
            }
            return;
        }
        let mut sum = L::splat(0.0);
        for i in (0..columns).step_by(L::N) {
            let e = exp(L::load(p.add(i)).sub(L::splat(top)));
            e.store(p.add(i));
            sum = sum.add(e);
        }
        let mut weight = *work.weight.add(row);
        if top != old {
            let factor = (old - top).exp();
            weight *= factor;
            let sums = work.sums.add(row * width);
            for i in (0..width).step_by(L::N) {
                L::load(sums.add(i)).mul(L::splat(factor)).store(sums.add(i));
            }
        }
        *work.top.add(row) = top;
        *work.weight.add(row) = weight + sum.sum();
    }
}

/// Writes the result of `tokens` tokens of group `nth`: sums divided by weights, sinks
/// included, and rotated back if the cache's values are rotated.
///
/// # Safety
/// `work` holds `tokens * group` rows; no other thread accesses the group's part of those rows of
/// `out`.
pub(super) unsafe fn finish(
    call: &AttentionCall<'_>,
    first_row: usize,
    tokens: usize,
    nth: usize,
    work: &Work,
    out: SharedSlice<'_, f32>,
) {
    let shape = &call.shape;
    let (group, dim, width) = (shape.group(), shape.head_dim, shape.width());
    for token in 0..tokens {
        for g in 0..group {
            let (row, head) = (token * group + g, nth * group + g);
            let start = ((first_row + token) * shape.heads + head) * dim;
            // SAFETY: the row exists, and its place in `out` is this caller's.
            let (top, mut weight, sums, out) = unsafe {
                (
                    *work.top.add(row),
                    *work.weight.add(row),
                    std::slice::from_raw_parts(work.sums.add(row * width), dim),
                    out.slice_mut(start..start + dim),
                )
            };
            let mut factor = 1.0;
            if let Some(sinks) = call.sinks {
                // A sink is one more score, with the value zero.
                let new = top.max(sinks[head]);
                factor = (top - new).exp();
                weight = weight * factor + (sinks[head] - new).exp();
            }
            // A weight of zero means that the row saw no key; its sums are zeros.
            let scale = if weight == 0.0 { 0.0 } else { factor / weight };
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum * scale;
            }
            if call.cache.geometry().element.rotates() {
                CacheType::rotate(out);
            }
        }
    }
}

/// Stores the group's state for [`merge`].
///
/// # Safety
/// `work` holds a group's rows.
pub(super) unsafe fn save(shape: &AttentionShape, work: &Work, partial: &mut [f32]) {
    let (group, width) = (shape.group(), shape.width());
    // SAFETY: the group's rows exist.
    unsafe {
        let (sums, rest) = partial.split_at_mut(group * width);
        sums.copy_from_slice(std::slice::from_raw_parts(work.sums, group * width));
        let (top, weight) = rest.split_at_mut(group);
        top.copy_from_slice(std::slice::from_raw_parts(work.top, group));
        weight.copy_from_slice(std::slice::from_raw_parts(work.weight, group));
    }
}

/// Merges saved states, in their order, into `work`'s first rows.
///
/// # Safety
/// `work` has a group's rows.
pub(super) unsafe fn merge(shape: &AttentionShape, partials: &[f32], work: &Work) {
    let (group, width) = (shape.group(), shape.width());
    for g in 0..group {
        let tops =
            || partials.chunks_exact(shape.partial()).map(|partial| partial[group * width + g]);
        let top = tops().fold(f32::NEG_INFINITY, f32::max);
        // SAFETY: the row exists.
        let sums = unsafe { std::slice::from_raw_parts_mut(work.sums.add(g * width), width) };
        sums.fill(0.0);
        let mut weight = 0.0;
        for partial in partials.chunks_exact(shape.partial()) {
            let own = partial[group * width + g];
            // A chunk whose scores are all -infinity contributes nothing; `top` may be -infinity,
            // too.
            let factor = if own == f32::NEG_INFINITY { 0.0 } else { (own - top).exp() };
            weight += factor * partial[group * width + group + g];
            for (sum, &part) in sums.iter_mut().zip(&partial[g * width..][..width]) {
                *sum += factor * part;
            }
        }
        // SAFETY: the row exists.
        unsafe {
            *work.top.add(g) = top;
            *work.weight.add(g) = weight;
        }
    }
}
