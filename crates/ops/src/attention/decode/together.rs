//! Scores and mixtures by all simdgroups of a group together ([`Wide`]): the query heads of a pack
//! are the rows. For heads whose values are their keys, which all query heads share.

use tile::dsl::*;

use super::{Plan, Softmaxes, Span};
use crate::attention::form::{AttentionForm, Extras, Stored};
use crate::attention::prefill::bring;
use crate::attention::wide::{self, Side, Wide, WideTiling};
use crate::kv_write::Cache;
use crate::sweep::when;

/// Elements beside a row's sums of values: its maximum and its sum.
const BESIDE: u32 = 16;

/// Whether what a group leaves has room where its keys were.
pub(super) fn fits(tiling: WideTiling, d: u32, keys_only: bool) -> bool {
    4 * tiling.rows() * (d + BESIDE) <= 2 * tiling.staged(d, keys_only)
}

/// The softmax of a group over a span of keys: queries `q`, and a layer's keys and values.
pub(super) fn attend(
    form: AttentionForm,
    plan: Plan,
    tiling: WideTiling,
    extras: &Extras,
    q: In,
    [keys, values]: [Stored; 2],
    cache: &Cache,
    scale: Val<f32>,
    span: Span,
) -> Softmaxes {
    assert!(extras.slopes.is_none(), "slopes are for lanes");
    let (d, rows, threads) = (plan.head_dim, tiling.rows(), 32 * tiling.simds());
    assert!(fits(tiling, d, form.keys_only), "{tiling:?}: sums want more room than keys");
    grid_wait();
    let (row, packed) = (group_id_of(2), group_id_of(1));
    let sequence = cache.sequences.get(row);
    let head = packed / (groups(1) / cache.kv_heads);
    let work = Wide::new(tiling, form, q.scalar(), extras, scale);
    let staging = work.staging;
    let own = (row * groups(1) + packed) * plan.pack;
    work.ask(q, |g| (own + g) * d, plan.pack.val());
    let fetch = |side: Side, at: Val<u32>, key: Val<u32>| {
        let stored = if side == Side::Keys { keys } else { values };
        let left = span.to - key;
        let Some(chosen) = extras.chosen else {
            let first = cache.element(cache.slot_at(sequence, key), head);
            let from = |slab: u32, r: Val<u32>| first + (r + 16 * slab) * (cache.kv_heads * d);
            return bring(threads, d, plan.keys, stored, (staging, at), from, left);
        };
        // Entries in front of the first, or behind the last, are not seen.
        let from = |slab: u32, r: Val<u32>| {
            let entry = (key + r + 16 * slab).min(span.to - 1u32).max(span.first);
            cache.element(cache.slot_at(sequence, chosen.position(row, entry)), head)
        };
        bring(threads, d, plan.keys, stored, (staging, at), from, left);
    };
    let mask = |score: Frag, _: Val<u32>, key: Val<u32>| {
        let columns = Frag::col_numbers() + Frag::filled_u32(key);
        let [first, to] = [span.first, span.to].map(Frag::filled_u32);
        wide::masked(first.le(columns).and(columns.lt(to)), score)
    };
    let mixed = work.attend((span.from, span.to), fetch, mask);
    let width = d + BESIDE;
    // Keys that all have read make room, also where nothing was attended to.
    copy_wait(0);
    barrier();
    let softmaxes = Shared::<f32>::over(staging, "softmaxes", rows * width);
    for r in 0..tiling.tiles {
        let start = 16 * r * width;
        mixed.each(r, |element, tile| tile.store(softmaxes, element + start, width));
        // A tile whose left half is the maxima and whose right half is the sums.
        when(Order::eq(simd_id(), 0u32), || {
            let (top, sum) = (mixed.top(r) * Frag::filled(work.outer), mixed.total(r));
            let left = Frag::col_numbers().lt(Frag::filled_u32(8u32));
            left.select(top, sum).store(softmaxes, start + d, width);
        });
    }
    Softmaxes { rows: softmaxes, heads: rows, width, top: d, sum: d + 8 }
}
