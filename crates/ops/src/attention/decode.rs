//! Attention of single tokens over the cache: `y = softmax(q k^T * scale) v` for the latest
//! position of each row's sequence.
//!
//! Keys are split over threadgroups (flash-decoding, Dao et al. 2023), and the last group of a head
//! to finish merges the parts, so that one launch does it all. A group works for all query heads
//! that share a key/value head, up to a pack of them, so that the cache is read once. Within a
//! group every simdgroup takes batches of keys in turn and has a running softmax of its own;
//! simdgroups and groups are merged at the end.
//!
//! A simdgroup multiplies in one of two ways ([`DecodeSchedule`]): `lanes`, which any types and any
//! target allow, and `matrix`, which makes the query heads of a pack the rows of a tile. For long
//! heads whose keys are their values all simdgroups of a group multiply `together`.

mod batches;
mod lanes;
mod matrix;
mod together;

use tile::dsl::*;
use tile::ir::{AtomicOp, LoadHint, Reduce};
use tile::launch::{Mode, Requirement};

use self::batches::{Codes, Numbers};
use super::form::{AttentionForm, Extras, FLOOR, Stored, ceil_div, require_aligned};
use super::wide::WideTiling;
use crate::kv_write::Cache;
use crate::sweep::{require_lengths, when};
use crate::tuned::ForAttention;

/// Elements that a thread merges, and parts that it reads at once.
const VECTOR: u32 = 4;
const TOGETHER: u32 = 16;
/// The most groups that share a head's keys.
pub const MOST_SPLITS: u32 = 128;

/// How a group multiplies. All give the same results but for rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DecodeSchedule {
    /// Every lane multiplies the elements that it reads. `stages` is how many batches of keys are
    /// on their way at once through shared memory, 16 KiB each, or 32 for f32; 0: through
    /// registers, one batch.
    Lanes {
        /// Batches.
        stages: u32,
    },
    /// The matrix unit multiplies, weights rounded to the queries' type, which has 16 bits: a cache
    /// of that type and heads of 16, 32, .. 128 elements, or a cache of q8_0, decoded to that type,
    /// and heads of 64 or 128; forms without slopes or chosen positions.
    Matrix {
        /// Simdgroups of a group.
        simds: u32,
        /// Keys of a batch: 16 or 32.
        keys: u32,
        /// Batches of each simdgroup in shared memory, all but one of which are on their way while
        /// it multiplies.
        stages: u32,
    },
    /// All simdgroups of a group multiply together, by matrix units: keys that are the values, of
    /// whole tiles of elements; forms without slopes.
    Together(WideTiling),
}

/// The sequences that a device is loaded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DecodeLoad {
    /// One, or a few: a launch decides how many groups share a row's keys.
    Few,
    /// Several: a row's own number of keys decides.
    Several,
    /// So many ([`ForAttention::many`]) that their rows alone keep a GPU busy.
    Many,
}

/// Bytes of shared memory that schedules of large devices are made for: what a threadgroup has on
/// every NVIDIA GPU from compute capability 8.0 on, of which GeForce cards have the least.
pub const LARGE: u32 = 99 << 10;

impl DecodeSchedule {
    /// Picks the schedule for queries and a cache of these types (i8: q8_0; u32: turbo, in
    /// registers alone) and up to `length` keys, on a device with `shared` bytes of shared memory
    /// per group.
    pub fn pick(
        form: AttentionForm,
        query: Scalar,
        cache: Scalar,
        length: u32,
        load: DecodeLoad,
        shared: u32,
        tuned: &ForAttention,
    ) -> DecodeSchedule {
        let d = form.head_dim;
        if form.keys_only && query != Scalar::F32 && d.is_multiple_of(16) && !form.slopes {
            let rows = DecodeSchedule::pack(form, 32);
            let fits = |wide: &&WideTiling| {
                wide.bytes(d, true) + 4 * rows * MOST_SPLITS <= shared
                    && together::fits(**wide, d, true)
            };
            // As few tiles as have room for all heads of a pack, or else one.
            let tiles = [rows.div_ceil(16), 1];
            let alike =
                |tiles: &u32| tuned.wide_rows.iter().filter(|wide| wide.tiles == *tiles).find(fits);
            if let Some(wide) = tiles.iter().find_map(alike) {
                return DecodeSchedule::Together(*wide);
            }
        }
        let crowds = length < tuned.crowded.0 && form.group * d >= tuned.crowded.1;
        // On devices with less, Apple's, lanes read all at once what they work on.
        let roomy = shared >= LARGE;
        // A slope belongs to each row of a tile, and models with slopes have no groups of heads.
        // Tiles take keys that lie side by side.
        let allowed = !form.slopes && !form.chosen;
        let allowed = allowed
            && match query {
                Scalar::F16 | Scalar::BF16 if cache == query => {
                    d.is_multiple_of(16) && d <= matrix::MOST
                }
                Scalar::F16 | Scalar::BF16 if cache == Scalar::I8 => d == 64 || d == 128,
                _ => false,
            };
        let (keys, stages) = (tuned.keys[usize::from(d > 64)], 2);
        let after = matrix::softmaxes(d);
        let batches = match cache {
            Scalar::I8 => Codes::bytes(d, keys, stages, after),
            _ => Numbers::bytes(d, keys, stages, after),
        };
        // Merging takes some, too.
        let merging = 4 * (matrix::HEADS * MOST_SPLITS + 16);
        let fits = |simds: &u32| matrix::bytes(d, *simds, batches) + merging <= shared;
        let simds = tuned.simds[load as usize];
        match simds.into_iter().find(fits).filter(|_| allowed && roomy && !crowds) {
            Some(simds) => DecodeSchedule::Matrix { simds, keys, stages },
            None => {
                let copies = cache != Scalar::U32 && lanes::copies(form, query, cache);
                DecodeSchedule::Lanes { stages: if roomy && copies { 2 } else { 0 } }
            }
        }
    }

    /// How groups share a row's keys.
    pub fn shares(self, load: DecodeLoad, tuned: &ForAttention) -> KeyShares {
        match (load, self) {
            (DecodeLoad::Few, _) => KeyShares::Launched,
            (DecodeLoad::Several, DecodeSchedule::Together(_)) => tuned.own_wide[0],
            (DecodeLoad::Many, DecodeSchedule::Together(_)) => tuned.own_wide[1],
            (DecodeLoad::Many, DecodeSchedule::Matrix { .. }) => tuned.own[1],
            _ => tuned.own[0],
        }
    }

    /// How many groups share the keys of each of `heads` key/value heads (of all rows) on a GPU
    /// with `processors` multiprocessors, for `length` keys: as many as keep all of them busy, but
    /// no group without keys.
    pub fn splits(self, processors: u32, heads: u32, length: u32) -> u32 {
        let each = match self {
            DecodeSchedule::Lanes { .. } => 2,
            // Shared memory has room for one.
            DecodeSchedule::Matrix { simds, .. } => (8 / simds).max(1),
            DecodeSchedule::Together(_) => 1,
        };
        // One group merges the parts of all heads of a pack, which are long.
        let least = if matches!(self, DecodeSchedule::Together(_)) { 384 } else { 64 };
        let busy = each * processors / heads.max(1);
        busy.min(length.div_ceil(least)).clamp(1, MOST_SPLITS)
    }

    /// The work of a group for a form, over a cache; elements of the cache and of queries have
    /// at most `bytes` bytes.
    fn plan(self, form: AttentionForm, bytes: u32) -> Plan {
        let (simds, keys, most) = match self {
            DecodeSchedule::Lanes { stages } => lanes::plan(form, bytes, stages),
            DecodeSchedule::Matrix { simds, keys, .. } => (simds, keys, matrix::HEADS),
            DecodeSchedule::Together(tiling) => (tiling.simds(), tiling.keys(), tiling.rows()),
        };
        let softmaxes = if matches!(self, DecodeSchedule::Together(_)) { 1 } else { simds };
        let pack = DecodeSchedule::pack(form, most);
        Plan { head_dim: form.head_dim, pack, simds, softmaxes, keys }
    }

    /// Query heads that a group works for, where it can for up to `most`.
    fn pack(form: AttentionForm, most: u32) -> u32 {
        (1..=most).rev().find(|p| form.group.is_multiple_of(*p)).unwrap_or(1)
    }
}

/// How many keys of a row a group takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyShares {
    /// All `splits` groups of the launch take as many. What a row's sums are rounded to then
    /// depends on the launch.
    Launched,
    /// The row's own number of keys decides: as few equal parts as have at most `most` keys each,
    /// but no more than `parts`, which longer rows have larger. A launch has groups for the parts
    /// of its longest row, and a row's bits do not depend on other rows.
    Own {
        /// Keys of a part.
        most: u32,
        /// Parts: at most [`MOST_SPLITS`].
        parts: u32,
    },
}

impl KeyShares {
    /// The most groups that share a row's keys where there are up to `length`; none where the
    /// launch decides.
    pub fn splits(self, length: u32) -> Option<u32> {
        match self {
            KeyShares::Launched => None,
            KeyShares::Own { most, parts } => Some(length.div_ceil(most).clamp(1, parts)),
        }
    }
}

/// Who does what.
#[derive(Debug, Clone, Copy)]
struct Plan {
    head_dim: u32,
    /// Query heads that a threadgroup works for.
    pack: u32,
    /// Simdgroups of a group.
    simds: u32,
    /// Softmaxes of a group: one for each simdgroup, or one for all.
    softmaxes: u32,
    /// Keys that a softmax takes at once: a multiple of them must make a block of the cache.
    keys: u32,
}

/// Attends rows `q` `[rows, kv_heads * group, head_dim]` to a cache of its own type, each at its
/// own position, which is the latest; a row at position `u32::MAX` is idle and becomes zero.
///
/// `splits` groups share the keys of each head. `partial` holds
/// `rows * kv_heads * group * splits * head_dim` numbers, `stats`
/// `rows * kv_heads * group * splits * 2`; `counters` `rows * kv_heads * group` zeros, which are
/// zeros again afterwards.
///
/// The kernel in front may write queries, and keys and values of a sequence's last `rows`
/// positions: older ones, the positions and the table may be read before it is done.
///
/// # Panics
/// If the schedule does not suit the types or the form: see [`DecodeSchedule`].
#[kernel]
pub fn attention_decode(
    q: In<{ query }>,
    keys: In<{ stored }>,
    values: In<{ stored }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    y: Out<{ query }>,
    partial: InOut<f32>,
    stats: InOut<f32>,
    counters: InOut<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    query: Scalar,
    stored: Scalar,
    form: AttentionForm,
    schedule: DecodeSchedule,
    shares: KeyShares,
) {
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    require_aligned(&["keys", "values"]);
    let plan = schedule.plan(form, query.bytes().max(stored.bytes()) as u32);
    let attend = |extras: &Extras, span| match schedule {
        DecodeSchedule::Lanes { stages } => {
            let [keys, values] = [keys, values].map(Stored::numbers);
            lanes::attend(form, plan, stages, extras, q, keys, values, &cache, scale, span)
        }
        DecodeSchedule::Matrix { stages, .. } => {
            assert_eq!(query, stored, "the matrix unit takes queries and a cache of one type");
            let batches = Numbers::new(plan, stages, [keys, values]);
            matrix::attend(plan, stages, extras, q, batches, &cache, scale, span)
        }
        DecodeSchedule::Together(tiling) => {
            let stores = [keys, values].map(Stored::numbers);
            together::attend(form, plan, tiling, extras, q, stores, &cache, scale, span)
        }
    };
    decode(form, plan, shares, &cache, y, Scratch { partial, stats, counters }, attend);
}

/// As [`attention_decode`], over a cache of codes: i8 is q8_0, u32 turbo. 32 must divide
/// `head_dim`.
#[kernel]
pub fn attention_decode_codes(
    q: In<{ query }>,
    key_codes: In<{ codes }>,
    key_scales: In<{ Scalar::F16 }>,
    value_codes: In<{ codes }>,
    value_scales: In<{ Scalar::F16 }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    y: Out<{ query }>,
    partial: InOut<f32>,
    stats: InOut<f32>,
    counters: InOut<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    query: Scalar,
    codes: Scalar,
    form: AttentionForm,
    schedule: DecodeSchedule,
    shares: KeyShares,
) {
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    require_aligned(&["key_codes", "value_codes"]);
    let keys = Stored::codes(key_codes, key_scales);
    let values = Stored::codes(value_codes, value_scales);
    let plan = schedule.plan(form, query.bytes() as u32);
    let attend = |extras: &Extras, span| match schedule {
        DecodeSchedule::Lanes { stages } => {
            lanes::attend(form, plan, stages, extras, q, keys, values, &cache, scale, span)
        }
        DecodeSchedule::Matrix { stages, .. } => {
            let batches = Codes::new(query, plan, stages, [keys, values]);
            matrix::attend(plan, stages, extras, q, batches, &cache, scale, span)
        }
        DecodeSchedule::Together(tiling) => {
            together::attend(form, plan, tiling, extras, q, [keys, values], &cache, scale, span)
        }
    };
    decode(form, plan, shares, &cache, y, Scratch { partial, stats, counters }, attend);
}

/// Where groups leave their parts of a head.
#[derive(Clone, Copy)]
struct Scratch {
    /// `[parts, pack, head_dim]`: sums of values, not yet divided.
    partial: InOut,
    /// `[parts, pack, 2]`: maxima and sums.
    stats: InOut<f32>,
    /// One per head pack: how many groups have finished.
    counters: InOut<u32>,
}

/// The positions that a group attends to, or the entries of what was chosen: from `from` on, where
/// a batch begins, below `to`; those below `first` are not seen.
#[derive(Clone, Copy)]
struct Span {
    first: Val<u32>,
    from: Val<u32>,
    to: Val<u32>,
    /// After the row's own.
    end: Val<u32>,
}

/// The body of both kernels; `attend` finds the softmaxes of a group's simdgroups.
fn decode(
    form: AttentionForm,
    plan: Plan,
    shares: KeyShares,
    cache: &Cache,
    y: Out,
    scratch: Scratch,
    attend: impl FnOnce(&Extras, Span) -> Softmaxes,
) {
    let Plan { head_dim: d, pack, simds, softmaxes, keys } = plan;
    let packs = form.group / pack;
    launch(Mode::Tile, [dim("splits"), dim("kv_heads") * packs, dim("rows")], 32 * simds);
    let heads = dim("rows") * (dim("kv_heads") * form.group);
    require_lengths(&[
        ("q", heads.clone() * d),
        ("y", heads.clone() * d),
        ("positions", dim("rows")),
        ("sequences", dim("rows")),
        ("partial", heads.clone() * dim("splits") * d),
        ("stats", heads * dim("splits") * 2),
        ("counters", dim("rows") * (dim("kv_heads") * packs)),
    ]);
    require_aligned(&["q", "y", "partial", "stats"]);
    require(Requirement::Divisible(dim("block"), keys));
    require(Requirement::AtMost(dim("splits"), MOST_SPLITS));
    let extras = form.extras();
    // What the kernel in front writes, which are queries, and keys and values of this step, is
    // there once `attend` has waited.
    grid_trigger();

    let (row, packed) = (group_id_of(2), group_id_of(1));
    let index = row * groups(1) + packed;
    let end = cache.positions.get(row) + 1u32;
    let first = extras.first(end);
    // Where positions are chosen, entries of the row's list take their place.
    let (first, end) = match extras.chosen {
        Some(chosen) => chosen.entries(end - first),
        None => (first, end),
    };
    // Shares begin where a simdgroup's keys lie in one block.
    let aligned = first / keys * keys;
    let step = keys * softmaxes;
    let parts = match shares {
        KeyShares::Launched => groups(0),
        KeyShares::Own { most, parts } => ceil_div(end - aligned, most).min(parts).max(1u32),
    };
    let share = (ceil_div(ceil_div(end - aligned, parts), step) * step).max(step);
    let used = ceil_div(end - aligned, share).max(1u32);
    let split = group_id();
    when(Order::lt(split, used), || {
        let from = aligned + split * share;
        let to = (from + share).min(end);
        let part =
            Part::new(attend(&extras, Span { first, from, to, end }), plan, &extras, split, packed);
        let at = index * (pack * d);
        let alone = || {
            part.each(|head, element, mixed, _, sum| {
                y.set(at + head * d + element, mixed * inverse(sum));
            })
        };
        let shared = || {
            let slice = (index * groups(0) + split) * pack;
            part.each(|head, element, mixed, top, sum| {
                scratch.partial.set((slice + head) * d + element, mixed);
                when(Order::eq(element, 0u32), || {
                    scratch.stats.set_vec((slice + head) * 2u32, &[top, sum]);
                });
            });
            // The thread that counts is the one that fences, on both sides: a barrier carries what
            // the others wrote to its fence, and what its fence has seen to them, but no fence of
            // theirs says anything of its atomic.
            barrier();
            let last = Shared::<u32>::named("last", 1);
            when(Order::eq(thread_id(), 0u32), || {
                fence();
                let before = scratch.counters.atomic(AtomicOp::Add, index, 1u32);
                fence();
                last.set(0u32, select(Order::eq(before, used - 1u32), 1u32, 0u32));
            });
            barrier();
            when(Order::eq(last.get(0u32), 1u32), || {
                merge(plan, scratch, index, used, |head, element, values| {
                    let rounded: Vec<Val<Raw>> = values.iter().map(|v| v.to(y.scalar())).collect();
                    y.set_raw_vec(at + head * d + element, &rounded);
                });
                when(Order::eq(thread_id(), 0u32), || scratch.counters.set(index, 0u32));
            });
        };
        test(Order::eq(used, 1u32)).then(alone).otherwise(shared);
    });
}

/// `1 / sum`, or 0 where nothing was seen.
#[track_caller]
fn inverse(sum: Val<f32>) -> Val<f32> {
    select(Order::gt(sum, 0.0), 1.0f32 / sum, 0.0)
}

/// The softmaxes of a group's simdgroups: for each head of the pack a row of shared memory,
/// `[simds, heads, width]`, which holds sums of values, from element `top` on the maximum (an
/// exponent of two) and from `sum` on the sum.
struct Softmaxes {
    rows: Shared<f32>,
    heads: u32,
    width: u32,
    top: u32,
    sum: u32,
}

/// The softmaxes of a threadgroup.
struct Part {
    plan: Plan,
    simds: Softmaxes,
    /// The exponents and the weight of sinks, by head of the pack.
    sink: Option<Sink>,
}

/// A head's sink, given the head: its exponent and its weight.
type Sink = Box<dyn Fn(Val<u32>) -> (Val<f32>, Val<f32>)>;

impl Part {
    /// Once all simdgroups have written theirs.
    fn new(
        simds: Softmaxes,
        plan: Plan,
        extras: &Extras,
        split: Val<u32>,
        packed: Val<u32>,
    ) -> Part {
        barrier();
        let sink = extras.sinks.map(|sinks| {
            // It belongs to the first part of a head alone.
            let mine = Order::eq(split, 0u32);
            let of = move |head: Val<u32>| {
                let logit = sinks.get(packed * plan.pack + head) * std::f32::consts::LOG2_E;
                (select(mine, logit, FLOOR), select(mine, 1.0f32, 0.0f32))
            };
            Box::new(of) as Sink
        });
        Part { plan, simds, sink }
    }

    /// Calls `body(head, element, mixed, top, sum)` for each element of each head of the pack, all
    /// threads together.
    fn each(&self, body: impl FnOnce(Val<u32>, Val<u32>, Val<f32>, Val<f32>, Val<f32>)) {
        let (d, pack) = (self.plan.head_dim, self.plan.pack);
        let Softmaxes { rows, heads, width, top, sum } = self.simds;
        strided(pack * d).each(|i| {
            let (head, element) = (i / d, i % d);
            let starts: Vec<Val<u32>> =
                (0..self.plan.softmaxes).map(|own| (own * heads + head) * width).collect();
            let tops: Vec<Val<f32>> = starts.iter().map(|&at| rows.get(at + top)).collect();
            let sink = self.sink.as_ref().map(|sink| sink(head));
            let start = sink.map_or_else(|| FLOOR.val(), |(logit, _)| logit);
            let most = tops.iter().fold(start, |most, t| most.max(*t));
            let mut total = match sink {
                Some((logit, weight)) => (logit - most).exp2() * weight,
                None => 0.0f32.val(),
            };
            let mut mixed = 0.0f32.val();
            for (&at, own) in starts.iter().zip(&tops) {
                let decay = (*own - most).exp2();
                total = rows.get(at + sum).fma(decay, total);
                mixed = rows.get(at + element).fma(decay, mixed);
            }
            body(head, element, mixed, most, total);
        });
    }
}

/// Merges the parts of all groups of a head pack and hands elements from `element` on to
/// `store(head, element, values)`.
///
/// This stands at the end of every launch, when nothing else is under way: so the first
/// [`TOGETHER`] parts are asked for before their weights are known.
fn merge(
    plan: Plan,
    scratch: Scratch,
    index: Val<u32>,
    used: Val<u32>,
    store: impl FnOnce(Val<u32>, Val<u32>, &[Val<f32>]),
) {
    let Plan { head_dim: d, pack, simds, .. } = plan;
    let vector = [VECTOR, VECTOR / 2].into_iter().find(|v| d.is_multiple_of(*v)).unwrap_or(1);
    let weights = Shared::<f32>::named("weights", pack * MOST_SPLITS);
    let first = index * groups(0) * pack;
    let vectors = pack * d / vector;
    // Parts from `start` on of a vector of elements; the last one again where there are fewer.
    let read = |i: Val<u32>, start: Val<u32>| -> Vec<Vec<Val<f32>>> {
        let (head, element) = (i * vector / d, i * vector % d);
        let one = |k: u32| {
            let part = (start + k).min(used - 1u32);
            let at = (first + part * pack + head) * d + element;
            scratch.partial.get_vec(at, vector as u8, LoadHint::Coherent)
        };
        (0..TOGETHER).map(one).collect()
    };
    // Registers hold one vector's.
    let early = (vectors <= threads()).then(|| read(thread_id().min(vectors - 1), 0u32.val()));
    // A simdgroup finds the weights of a head's parts, each divided by the sum, one lane per part.
    range(simd_id(), pack).step(simds).each(|head| {
        let parts: Vec<(Val<u32>, Val<bool>)> = (0..MOST_SPLITS / 32)
            .map(|k| (lane_id() + 32 * k, Order::lt(lane_id() + 32 * k, used)))
            .collect();
        let stats: Vec<Vec<Val<f32>>> = parts
            .iter()
            .map(|(part, _)| {
                let at = (first + part.min(used - 1u32) * pack + head) * 2u32;
                scratch.stats.get_vec(at, 2, LoadHint::Coherent)
            })
            .collect();
        let most = stats[1..].iter().fold(stats[0][0], |most, s| most.max(s[0]));
        let most = simd_reduce(Reduce::Max, most);
        let mine: Vec<Val<f32>> = parts
            .iter()
            .zip(&stats)
            .map(|((_, live), s)| select(*live, (s[0] - most).exp2(), 0.0f32))
            .collect();
        let zero = 0.0f32.val();
        let sum = mine.iter().zip(&stats).fold(zero, |sum, (weight, s)| s[1].fma(*weight, sum));
        let scale = inverse(simd_sum(sum));
        for ((part, _), weight) in parts.iter().zip(mine) {
            weights.set(head * MOST_SPLITS + *part, weight * scale);
        }
    });
    barrier();
    strided(vectors).each(|i| {
        let (head, element) = (i * vector / d, i * vector % d);
        let sums = Regs::new(vector, 0.0);
        let add = |start: Val<u32>, parts: &[Vec<Val<f32>>]| {
            for (k, part) in (0..).zip(parts) {
                // Parts that are not there have the weight 0.
                let weight = weights.get(head * MOST_SPLITS + start + k);
                for (j, value) in (0..).zip(part) {
                    sums.set(j, value.fma(weight, sums.get(j)));
                }
            }
        };
        let rest = match &early {
            Some(parts) => {
                add(0u32.val(), parts);
                TOGETHER
            }
            None => 0,
        };
        range(rest, used).step(TOGETHER).each(|start| add(start, &read(i, start)));
        let values: Vec<Val<f32>> = (0..vector).map(|j| sums.get(j)).collect();
        store(head, element, &values);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuned::HOPPER;

    /// Apple's GPUs, GeForce cards, an A100, an H100.
    const DEVICES: [u32; 4] = [32 << 10, LARGE, 163 << 10, 227 << 10];

    #[test]
    fn what_is_picked_fits_the_device() {
        for (d, group) in [(64, 4), (64, 7), (128, 1), (128, 4), (128, 8), (256, 4)] {
            let form = AttentionForm::plain(d, group);
            for (query, shared) in
                [Scalar::F32, Scalar::BF16].into_iter().flat_map(|q| DEVICES.map(|s| (q, s)))
            {
                let tuned = &HOPPER.attention;
                for load in [DecodeLoad::Few, DecodeLoad::Several, DecodeLoad::Many] {
                    let schedule =
                        DecodeSchedule::pick(form, query, query, 4096, load, shared, tuned);
                    let shares = schedule.shares(load, tuned);
                    let kernel = attention_decode(query, query, form, schedule, shares);
                    let bytes = kernel.record().shared_bytes();
                    assert!(
                        bytes <= shared,
                        "{form:?}, {query}: {schedule:?} takes {bytes} of {shared}"
                    );
                    let staged = schedule != DecodeSchedule::Lanes { stages: 0 };
                    assert_eq!(staged, shared >= LARGE, "{form:?}, {query}: {schedule:?}");
                }
            }
        }
    }
}
