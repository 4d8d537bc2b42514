//! Scores and mixtures by the matrix unit: the query heads of a pack are the rows of a 16 x 16
//! tile, most of which are zeros. That wastes products, of which there are plenty, and spares
//! instructions, of which lanes need too many: five times as many for four heads of 128 elements.
//!
//! A simdgroup brings its own keys and values to shared memory, a batch at a time, and waits for
//! nobody else. The next batches are on their way while it multiplies one: memory answers after a
//! microsecond, in which a processor must have asked for some 40 KB.

use tile::dsl::*;
use tile::instr::UnaryOp;
use tile::ir::{LoadHint, Reduce};

use super::batches::{Batches, Operands, PAD};
use super::{Plan, Softmaxes, Span};
use crate::attention::form::{Extras, FLOOR, MASKED};
use crate::kv_write::Cache;
use crate::sweep::when;

/// The most elements of a head: its sums and its query stay in registers.
pub(super) const MOST: u32 = 128;
/// The most heads of a pack: rows of a tile.
pub(super) const HEADS: u32 = 16;
/// Elements of a query that are copied at once.
const CHUNK: u32 = 8;

/// Bytes of shared memory that [`attend`] takes, `batches` of them for what [`Batches`] has of each
/// simdgroup.
pub(super) fn bytes(head_dim: u32, simds: u32, batches: u32) -> u32 {
    simds * batches + 2 * HEADS * (head_dim + PAD)
}

/// Bytes of a simdgroup's softmaxes, which take over memory of its batches.
pub(super) fn softmaxes(head_dim: u32) -> u32 {
    4 * HEADS * (head_dim + 16)
}

/// The softmaxes of a group's simdgroups over a span of keys: queries `q`, and a layer's keys and
/// values.
pub(super) fn attend<B: Batches>(
    plan: Plan,
    stages: u32,
    extras: &Extras,
    q: In,
    batches: B,
    cache: &Cache,
    scale: Val<f32>,
    span: Span,
) -> Softmaxes {
    let (d, row, packed) = (plan.head_dim, group_id_of(2), group_id_of(1));
    assert!(extras.slopes.is_none(), "slopes are for lanes");
    assert!(d <= MOST && plan.keys.is_multiple_of(16), "{plan:?}: more than registers hold");
    let start = span.from + simd_id() * plan.keys;
    let step = plan.simds * plan.keys;
    let sequence = cache.sequences.get(row);
    let head = packed / (groups(1) / cache.kv_heads);
    // Two batches of copies, keys and values, also where there is nothing to copy.
    let fetch = |base: Val<u32>, stage: Val<u32>| {
        let bring = || {
            let slot = cache.slot_at(sequence, base);
            let keep = |key| Order::lt(base + key, span.to) & Order::ge(base + key, span.first);
            batches.bring(stage, 0, cache, slot, head, keep);
            copy_commit();
            batches.bring(stage, 1, cache, slot, head, keep);
        };
        test(Order::lt(base, span.to)).then(bring).otherwise(copy_commit);
        copy_commit();
    };
    // What a sequence gets in one step are its last positions, a row for each: what is older than
    // that was there before.
    let old: Vec<(u32, Val<bool>)> = (0..stages)
        .map(|stage| (stage, Order::le(start + (stage * step + plan.keys) + groups(2), span.end)))
        .collect();
    for &(stage, old) in &old {
        when(old, || fetch(start + stage * step, stage.val()));
    }
    grid_wait();
    for &(stage, old) in &old {
        when(!old, || fetch(start + stage * step, stage.val()));
    }
    let query = Shared::<f32>::stored(q.scalar(), "query", HEADS * (d + PAD));
    for i in 0..(HEADS * d).div_ceil(CHUNK * threads()) {
        let chunk = thread_id() + i * threads();
        let (g, element) = (chunk / (d / CHUNK), chunk % (d / CHUNK) * CHUNK);
        let bring = || {
            let own = (row * groups(1) + packed) * plan.pack + g.min(plan.pack - 1);
            let values = q.get_raw_vec(own * d + element, CHUNK as u8, LoadHint::None);
            let zero = 0.0f32.val().to(q.scalar());
            let live = Order::lt(g, plan.pack);
            let values: Vec<Val<Raw>> = values.into_iter().map(|v| select(live, v, zero)).collect();
            query.set_raw_vec(g * (d + PAD) + element, &values);
        };
        match (HEADS * d).is_multiple_of(CHUNK * threads()) {
            true => bring(),
            false => when(Order::lt(chunk, HEADS * d / CHUNK), bring),
        }
    }
    barrier();
    let held: Vec<Frag> = (0..d / 16).map(|k| Frag::left(query, 16 * k, d + PAD)).collect();

    let (inner, outer) = extras.scales(scale);
    let running = Running {
        top: Frags::new(1, Frag::rows(FLOOR)),
        sum: Frags::accumulators(1, 0.0),
        mixed: Frags::accumulators(d / 16, 0.0),
        scores: Frags::accumulators(plan.keys / 16, 0.0),
    };
    range(start, span.to).step(step).each(|base| {
        let stage = (base - start) / step % stages;
        copy_wait((2 * stages - 1) as u8);
        simd_barrier();
        let inner = extras.cap.map(|_| Frag::filled(inner));
        let (operands, from) = (batches.operands(), batches.ready(stage, 0));
        for j in 0..plan.keys / 16 {
            let score = score(operands, from, 16 * j, &held);
            let bounded = inner.map_or(score, |inner| (score * inner).map(UnaryOp::Tanh));
            running.scores.set(j, bounded);
        }
        let edge = Order::gt(base + plan.keys, span.to) | Order::lt(base, span.first);
        when(edge, || running.mask(plan, base, span));
        running.weigh(plan, outer);
        copy_wait((2 * stages - 2) as u8);
        simd_barrier();
        let from = batches.ready(stage, 1);
        let next = || fetch(base + stages * step, stage);
        if B::FREES {
            next();
        }
        running.mix(plan, operands, from);
        if !B::FREES {
            // All lanes have read what is overwritten.
            simd_barrier();
            next();
        }
    });
    // The last batches have been read, by every simdgroup.
    copy_wait(0);
    barrier();
    running.store(plan, batches.spent(), outer)
}

/// `q k^T` for sixteen keys, from `first` on, of a batch that begins at `from`.
#[track_caller]
fn score(keys: Operands, from: Val<u32>, first: u32, query: &[Frag]) -> Frag {
    // Two sums: a product waits for the one before it.
    let mut sums = [Frag::filled(0.0f32); 2];
    for (k, left) in (0..).zip(query) {
        let right = keys.right(from, first, 16 * k, true);
        let sum = &mut sums[k as usize % 2];
        *sum = sum.mma(*left, right);
    }
    if query.len() == 1 { sums[0] } else { sums[0] + sums[1] }
}

/// The running softmax of a simdgroup, in units of `outer`: maxima by head, sums spread over a
/// tile, sums of values; and the scores of a batch.
#[derive(Clone, Copy)]
struct Running {
    top: Frags,
    sum: Frags,
    mixed: Frags,
    scores: Frags,
}

impl Running {
    /// Masks the keys outside the span.
    #[track_caller]
    fn mask(self, plan: Plan, base: Val<u32>, span: Span) {
        let [first, to] = [span.first, span.to].map(Frag::filled_u32);
        for j in 0..plan.keys / 16 {
            let key = Frag::col_numbers() + Frag::filled_u32(base + 16 * j);
            let seen = first.le(key).and(key.lt(to));
            let masked = Frag::filled(MASKED);
            self.scores.set(j, seen.select(self.scores.get(j), masked));
        }
    }

    /// Scores become weights; the maxima, the sums and what is mixed follow.
    #[track_caller]
    fn weigh(self, plan: Plan, outer: Val<f32>) {
        let columns = plan.keys / 16;
        let all = (1..columns).fold(self.scores.get(0), |all, j| all.max(self.scores.get(j)));
        let before = self.top.get(0);
        let top = before.max(all.reduce_rows(Reduce::Max));
        let shift = (top * Frag::rows(-outer)).across();
        // The difference first: over nothing it is exactly 0, which a product rounded by itself
        // would not give.
        let decay = ((before - top) * Frag::rows(outer)).map(UnaryOp::Exp2).across();
        let mut sum = self.sum.get(0) * decay;
        for j in 0..columns {
            let weight = (self.scores.get(j) * Frag::filled(outer) + shift).map(UnaryOp::Exp2);
            self.scores.set(j, weight);
            sum = sum + weight;
        }
        self.top.set(0, top);
        self.sum.set(0, sum);
        for i in 0..plan.head_dim / 16 {
            self.mixed.set(i, self.mixed.get(i) * decay);
        }
    }

    /// `mixed += weights v`: the operands of values begin at `from`.
    #[track_caller]
    fn mix(self, plan: Plan, values: Operands, from: Val<u32>) {
        for j in 0..plan.keys / 16 {
            let left = self.scores.get(j).to_left(values.array.scalar());
            for i in 0..plan.head_dim / 16 {
                let right = values.right(from, 16 * j, 16 * i, false);
                self.mixed.set(i, self.mixed.get(i).mma(left, right));
            }
        }
    }

    /// Writes it to shared memory, in the place of what is no longer needed.
    #[track_caller]
    fn store(self, plan: Plan, spent: Shared, outer: Val<f32>) -> Softmaxes {
        let (d, width) = (plan.head_dim, plan.head_dim + 16);
        let rows = Shared::<f32>::over(spent, "softmaxes", plan.simds * HEADS * width);
        let start = simd_id() * (HEADS * width);
        for i in 0..d / 16 {
            self.mixed.get(i).store(rows, start + 16 * i, width);
        }
        // A tile whose left half is the maxima and whose right half is the sums.
        let top = (self.top.get(0) * Frag::rows(outer)).across();
        let sum = self.sum.get(0).reduce_rows(Reduce::Sum).across();
        let left = Frag::col_numbers().lt(Frag::filled_u32(8u32));
        left.select(top, sum).store(rows, start + d, width);
        Softmaxes { rows, heads: HEADS, width, top: d, sum: d + 8 }
    }
}
