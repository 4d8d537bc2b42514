//! Attention of single tokens over the cache: `y = softmax(q k^T * scale) v` for the latest position of each row's sequence.
//!
//! Keys are split over threadgroups (flash-decoding, Dao et al. 2023), and the last group of a head to finish merges the
//! parts, so that one launch does it all. A group works for all query heads that share a key/value head, up to
//! [`Plan::pack`] of them, so that the cache is read once.
//!
//! In a simdgroup, `team` lanes share a key: each holds some elements of it, 16 bytes at a time. Four keys per team are read at
//! once with their values. Their scores are summed over the team by exchanging halves, so that a quarter of the team's lanes
//! ends with each key and the exponentials are computed once, not once per lane. Each team has a running softmax of its own;
//! teams, simdgroups and groups are merged at the end.

use tile::dsl::*;
use tile::ir::{AtomicOp, Hint, Reduce};
use tile::launch::{Mode, Requirement};

use super::form::{Blocks, Extras, FLOOR, Form, MASKED, Stored, ceil_div, require_aligned};
use crate::kv_write::Cache;
use crate::sweep::{begin, require_lengths, when};
use half::f16;

/// Threads of a group.
const THREADS: u32 = 128;
const SIMDS: u32 = THREADS / 32;
/// Keys that a team reads at once.
const AHEAD: u32 = 4;
/// Batches on their way where shared memory is plenty: 16 KiB each, or 32 for f32.
pub const STAGES: u32 = 2;
/// Elements that a thread merges, and parts that it reads at once.
const VECTOR: u32 = 4;
const TOGETHER: u32 = 16;
/// The most groups that share a head's keys.
pub const MOST_SPLITS: u32 = 128;

/// Who does what: follows from the form and the cache's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Lanes that share a key.
    pub team: u32,
    /// Elements read at once.
    pub vector: u32,
    /// Query heads that a threadgroup works for.
    pub pack: u32,
    head_dim: u32,
}

impl Plan {
    /// The plan for elements of at most so many bytes, in the cache and in queries.
    pub fn of(form: Form, bytes: u32) -> Plan {
        let d = form.head_dim;
        // Eight elements or more per lane; fewer than four lanes could not exchange quarters.
        let teams = [32u32, 16, 8].into_iter().find(|t| d.is_multiple_of(*t) && d / t >= 8);
        let team = teams.unwrap_or(4);
        let fits = |v: &u32| (d / team).is_multiple_of(*v) && v * bytes <= 16;
        let vector = [16u32, 8, 4, 2].into_iter().find(fits).unwrap_or(1);
        // Registers hold a query and a sum for each head, shared memory a sum per simdgroup.
        let packs = (1..=8).rev().find(|p| form.group.is_multiple_of(*p) && p * d <= 1024);
        Plan { team, vector, pack: packs.unwrap_or(1), head_dim: d }
    }

    /// Keys that a simdgroup reads at once: a multiple of them must make a block of the cache.
    pub fn keys(self) -> u32 {
        AHEAD * 32 / self.team
    }

    /// Elements of a head in a lane.
    fn each(self) -> u32 {
        self.head_dim / self.team
    }
}

/// Attends rows `q` `[rows, kv_heads * group, head_dim]` to a cache of `C`, each at its own position, which is the latest; a
/// row at position `u32::MAX` is idle and becomes zero.
///
/// `stages` is how many batches of keys are on their way at once through shared memory, see [`STAGES`]; 0: through registers,
/// one batch. `splits` groups share the keys of each head. `partial` holds `rows * kv_heads * group * splits * head_dim` numbers, `stats`
/// `rows * kv_heads * group * splits * 2`; `counters` `rows * kv_heads * group` zeros, which are zeros again afterwards.
#[kernel]
pub fn attention_decode<T: Float, C: Float>(
    q: In<T>,
    keys: In<C>,
    values: In<C>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    y: Out<T>,
    partial: InOut<f32>,
    stats: InOut<f32>,
    counters: InOut<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    form: Form,
    stages: u32,
) {
    rename(format!("attention_decode_{}_{}_{}_{stages}", T::NAME, C::NAME, form.name()));
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    require_aligned(&["keys", "values"]);
    decode(form, stages, q, keys, values, cache, y, Scratch { partial, stats, counters }, scale);
}

/// As [`attention_decode`], over a cache of q8_0: 32 must divide `head_dim`.
#[kernel]
pub fn attention_decode_q8_0<T: Float>(
    q: In<T>,
    key_codes: In<i8>,
    key_scales: In<f16>,
    value_codes: In<i8>,
    value_scales: In<f16>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    y: Out<T>,
    partial: InOut<f32>,
    stats: InOut<f32>,
    counters: InOut<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    form: Form,
    stages: u32,
) {
    rename(format!("attention_decode_{}_q8_0_{}_{stages}", T::NAME, form.name()));
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    require_aligned(&["key_codes", "value_codes"]);
    let keys = Blocks { codes: key_codes, scales: key_scales };
    let values = Blocks { codes: value_codes, scales: value_scales };
    decode(form, stages, q, keys, values, cache, y, Scratch { partial, stats, counters }, scale);
}

/// Where groups leave their parts of a head.
#[derive(Clone, Copy)]
struct Scratch {
    /// `[parts, pack, head_dim]`: sums of values, not yet divided.
    partial: InOut<f32>,
    /// `[parts, pack, 2]`: maxima and sums.
    stats: InOut<f32>,
    /// One per head pack: how many groups have finished.
    counters: InOut<u32>,
}

/// A running softmax per head: maximum, sum, and sum of values.
#[derive(Clone, Copy)]
struct Running {
    top: Regs<f32>,
    sum: Regs<f32>,
    mixed: Regs<f32>,
}

/// The body of both kernels.
fn decode<T: Float, S: Stored>(
    form: Form,
    stages: u32,
    q: In<T>,
    keys: S,
    values: S,
    cache: Cache,
    y: Out<T>,
    scratch: Scratch,
    scale: Val<f32>,
) {
    let plan = Plan::of(form, S::BYTES.max(T::SCALAR.bytes() as u32));
    let (d, pack) = (form.head_dim, plan.pack);
    let packs = form.group / pack;
    launch(Mode::Tile, [dim("splits"), dim("kv_heads") * packs, dim("rows")], THREADS);
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
    require_aligned(&["q", "y", "partial"]);
    require(Requirement::Divisible(dim("block"), plan.keys()));
    require(Requirement::AtMost(dim("splits"), MOST_SPLITS));
    let extras = form.extras();
    begin();

    let (row, packed) = (group_id_of(2), group_id_of(1));
    let index = row * groups(1) + packed;
    let end = cache.positions.get(row) + 1u32;
    let first = extras.first(end);
    // Shares begin where a simdgroup's keys lie in one block.
    let aligned = first / plan.keys() * plan.keys();
    let step = plan.keys() * SIMDS;
    let share = (ceil_div(ceil_div(end - aligned, groups(0)), step) * step).max(step);
    let used = ceil_div(end - aligned, share).max(1u32);
    let split = group_id();
    when(Order::lt(split, used), || {
        let from = aligned + split * share;
        let to = (from + share).min(end);
        let running =
            attend(plan, stages, &extras, q, keys, values, &cache, scale, [first, from, to]);
        let part = gather(plan, &extras, running, split, packed);
        let at = index * (pack * d);
        let alone = || {
            part.each(|head, element, mixed, _, sum| {
                y.set(at + head * d + element, (mixed * inverse(sum)).cast::<T>());
            })
        };
        let shared = || {
            let slice = (index * groups(0) + split) * pack;
            part.each(|head, element, mixed, top, sum| {
                scratch.partial.set((slice + head) * d + element, mixed);
                when(Order::eq(element, 0u32), || {
                    scratch.stats.set((slice + head) * 2u32, top);
                    scratch.stats.set((slice + head) * 2u32 + 1u32, sum);
                });
            });
            fence();
            barrier();
            let last = Shared::<u32>::named("last", 1);
            when(Order::eq(thread_id(), 0u32), || {
                let before = scratch.counters.atomic(AtomicOp::Add, index, 1u32);
                last.set(0u32, select(Order::eq(before, used - 1u32), 1u32, 0u32));
            });
            barrier();
            when(Order::eq(last.get(0u32), 1u32), || {
                fence();
                merge(plan, scratch, index, used, |head, element, values| {
                    let rounded: Vec<Val<T>> = values.iter().map(|v| v.cast()).collect();
                    y.set_vec(at + head * d + element, &rounded);
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

/// The softmaxes of this lane's team over the keys `from..to`, of which those from `first` on are seen.
fn attend<T: Float, S: Stored>(
    plan: Plan,
    stages: u32,
    extras: &Extras,
    q: In<T>,
    keys: S,
    values: S,
    cache: &Cache,
    scale: Val<f32>,
    [first, from, to]: [Val<u32>; 3],
) -> Running {
    let (team, vector, pack, each) = (plan.team, plan.vector, plan.pack, plan.each());
    let (row, packed) = (group_id_of(2), group_id_of(1));
    let head = packed / (groups(1) / cache.kv_heads);
    let sequence = cache.sequences.get(row);
    let (turn, lane) = (lane_id() / team, lane_id() % team);
    // A lane's vectors alternate with its team's, so that a team reads consecutive bytes.
    let elements: Vec<Val<u32>> = (0..each / vector).map(|i| (i * team + lane) * vector).collect();
    let (inner, outer) = extras.scales(scale);
    let inner = if extras.cap.is_some() { inner } else { outer };
    let queries: Vec<Vec<Val<f32>>> = (0..pack)
        .map(|g| {
            let start = ((row * groups(1) + packed) * pack + g) * plan.head_dim;
            let read = |&e: &Val<u32>| q.get_vec(start + e, vector as u8, Hint::None);
            elements.iter().flat_map(read).map(|x| x.f32() * inner).collect()
        })
        .collect();
    let running = Running {
        top: Regs::new(pack, FLOOR),
        sum: Regs::new(pack, 0.0),
        mixed: Regs::new(pack * each, 0.0),
    };
    let apart = 32 / team;
    let start = from + simd_id() * plan.keys();
    let step = SIMDS * plan.keys();
    // Past the end the last key is read again, and not seen.
    let slots = move |base: Val<u32>| -> Vec<Val<u32>> {
        let (slot, left) = (cache.slot_at(sequence, base), to - 1u32 - base);
        (0..AHEAD).map(|u| slot + (turn + u * apart).min(left)).collect()
    };
    let ring = (stages > 0).then(|| Ring::<S::Element>::new(plan, stages));
    let fetch = |base: Val<u32>, stage: Val<u32>| {
        let Some(ring) = ring else { return };
        when(Order::lt(base, to), || {
            for (u, slot) in (0..).zip(slots(base)) {
                for (i, &e) in (0..).zip(&elements) {
                    let at = cache.element(slot, head) + e;
                    ring.bring(stage, 0, u, i, keys.array(), at);
                    ring.bring(stage, 1, u, i, values.array(), at);
                }
            }
        });
        copy_commit();
    };
    (1..stages).for_each(|stage| fetch(start + (stage - 1) * step, (stage - 1).val()));
    range(start, to).step(step).each(|base| {
        let turns = (base - start) / step;
        fetch(base + stages.max(1) * step - step, (turns + stages.max(1) - 1u32) % stages.max(1));
        let slots = if ring.is_none() || S::BYTES == 1 { slots(base) } else { vec![] };
        let read = |stored: S, kind: u32, factors: &[Option<Val<f32>>]| -> Vec<Vec<Val<f32>>> {
            let count = elements.len();
            let one = |u: usize, i: usize| {
                let lanes = vector as u8;
                let raw = match ring {
                    Some(ring) => ring.read(turns % stages, kind, u as u32, i as u32),
                    None => {
                        let at = cache.element(slots[u], head) + elements[i];
                        stored.array().get_vec(at, lanes, Hint::None)
                    }
                };
                let factor = factors.get(u * count + i).copied().flatten();
                let scaled = move |x: Val<S::Element>| factor.map_or(x.f32(), |f| x.f32() * f);
                raw.into_iter().map(scaled)
            };
            (0..AHEAD as usize).map(|u| (0..count).flat_map(|i| one(u, i)).collect()).collect()
        };
        let factors = |stored: S| -> Vec<Option<Val<f32>>> {
            let of = |slot: &Val<u32>| {
                let slot = *slot;
                elements.iter().map(move |&e| stored.factor(cache, slot, head, e))
            };
            slots.iter().flat_map(of).collect()
        };
        let (key_factors, value_factors) = (factors(keys), factors(values));
        if ring.is_some() {
            copy_wait((stages - 1) as u8);
        }
        let (keys, values) = (read(keys, 0, &key_factors), read(values, 1, &value_factors));
        // The key whose score this lane will hold.
        let own = lane / (team / AHEAD);
        let key = base + turn + own * apart;
        let seen = Order::lt(key, to) & Order::ge(key, first);
        for g in 0..pack {
            let products = keys.iter().map(|key| dot(&queries[g as usize], key)).collect();
            let score = sum_over_team(products, lane, team);
            let score = match extras.cap {
                Some(_) => score.tanh() * outer,
                None => score,
            };
            let score = select(seen, score, MASKED);
            let before = running.top.get(g);
            let top = [team / 2, team / 4]
                .into_iter()
                .fold(score, |top, mask| top.max(shuffle_xor(top, mask as u8)))
                .max(before);
            let (weight, decay) = ((score - top).exp2(), (before - top).exp2());
            running.top.set(g, top);
            running.sum.set(g, running.sum.get(g).fma(decay, weight));
            let weights: Vec<Val<f32>> =
                (0..AHEAD).map(|u| shuffle(weight, turn * team + u * (team / AHEAD))).collect();
            for i in 0..each {
                let kept = running.mixed.get(g * each + i) * decay;
                let add = |sum, (w, v): (&Val<f32>, &Vec<Val<f32>>)| w.fma(v[i as usize], sum);
                running.mixed.set(g * each + i, weights.iter().zip(&values).fold(kept, add));
            }
        }
    });
    running
}

/// Batches of keys and values on their way to the lanes that asked for them: a lane reads what it brought itself, so that
/// nobody waits for others.
#[derive(Clone, Copy)]
struct Ring<E> {
    /// `[stages, 2, AHEAD, vectors, THREADS, vector]`.
    array: Shared<E>,
    plan: Plan,
}

impl<E: Element> Ring<E> {
    fn new(plan: Plan, stages: u32) -> Self {
        let len = stages * 2 * AHEAD * plan.each() * THREADS;
        Ring { array: Shared::named("ring", len), plan }
    }

    #[track_caller]
    fn at(&self, stage: Val<u32>, kind: u32, u: u32, i: u32) -> Val<u32> {
        let (each, vector) = (self.plan.each(), self.plan.vector);
        let batch = (kind * AHEAD + u) * each + i * vector;
        stage * (2 * AHEAD * each * THREADS) + batch * THREADS + thread_id() * vector
    }

    #[track_caller]
    fn bring(&self, stage: Val<u32>, kind: u32, u: u32, i: u32, from: In<E>, at: Val<u32>) {
        let to = self.at(stage, kind, u, i);
        copy_async(self.array, to, from, at, self.plan.vector as u8, None);
    }

    #[track_caller]
    fn read(&self, stage: Val<u32>, kind: u32, u: u32, i: u32) -> Vec<Val<E>> {
        self.array.get_vec(self.at(stage, kind, u, i), self.plan.vector as u8, Hint::None)
    }
}

#[track_caller]
fn dot(a: &[Val<f32>], b: &[Val<f32>]) -> Val<f32> {
    let zero = 0.0f32.val();
    a.iter().zip(b).fold(zero, |sum, (a, b)| a.fma(*b, sum))
}

/// Sums each of [`AHEAD`] values over a team; a lane gets value `lane / (team / AHEAD)`. Lanes exchange the halves that they
/// are not to hold, which takes fewer exchanges than to sum each value everywhere.
#[track_caller]
fn sum_over_team(mut values: Vec<Val<f32>>, lane: Val<u32>, team: u32) -> Val<f32> {
    let mut mask = team / 2;
    while values.len() > 1 {
        let upper = Order::ne(lane & mask, 0u32);
        let high = values.split_off(values.len() / 2);
        values = values
            .into_iter()
            .zip(high)
            .map(|(low, high)| {
                let (keep, send) = (select(upper, high, low), select(upper, low, high));
                keep + shuffle_xor(send, mask as u8)
            })
            .collect();
        mask /= 2;
    }
    let mut sum = values[0];
    while mask > 0 {
        sum = sum + shuffle_xor(sum, mask as u8);
        mask /= 2;
    }
    sum
}

/// The softmaxes of a threadgroup, in shared memory by simdgroup.
struct Part {
    plan: Plan,
    /// `[SIMDS, pack, 2]`: maxima and sums.
    stats: Shared<f32>,
    /// `[SIMDS, pack, head_dim]`.
    mixed: Shared<f32>,
    /// The exponents and the weight of sinks, by head of the pack.
    sink: Option<Sink>,
}

/// A head's sink, given the head: its exponent and its weight.
type Sink = Box<dyn Fn(Val<u32>) -> (Val<f32>, Val<f32>)>;

/// Merges a simdgroup's teams and hands the result to the group.
fn gather(
    plan: Plan,
    extras: &Extras,
    running: Running,
    split: Val<u32>,
    packed: Val<u32>,
) -> Part {
    let (team, vector, pack, each) = (plan.team, plan.vector, plan.pack, plan.each());
    let stats = Shared::<f32>::named("stats_of_simds", SIMDS * pack * 2);
    let mixed = Shared::<f32>::named("mixed_of_simds", SIMDS * pack * plan.head_dim);
    let lane = lane_id() % team;
    for g in 0..pack {
        // Within a team, a quarter of the lanes holds the sum over each quarter of the keys.
        let own = running.sum.get(g);
        let halves = own + shuffle_xor(own, (team / 2) as u8);
        let mut sum = halves + shuffle_xor(halves, (team / 4) as u8);
        let mut top = running.top.get(g);
        let mut mask = team;
        while mask < 32 {
            let other = shuffle_xor(top, mask as u8);
            let most = top.max(other);
            let (a, b) = ((top - most).exp2(), (other - most).exp2());
            sum = sum * a + shuffle_xor(sum, mask as u8) * b;
            for i in g * each..(g + 1) * each {
                let own = running.mixed.get(i);
                running.mixed.set(i, own * a + shuffle_xor(own, mask as u8) * b);
            }
            top = most;
            mask *= 2;
        }
        let at = simd_id() * pack + g;
        when(Order::eq(lane_id(), 0u32), || {
            stats.set(at * 2u32, top);
            stats.set(at * 2u32 + 1u32, sum);
        });
        when(Order::lt(lane_id(), team), || {
            for i in 0..each / vector {
                for j in 0..vector {
                    let element = (i * team + lane) * vector + j;
                    let value = running.mixed.get(g * each + i * vector + j);
                    mixed.set(at * plan.head_dim + element, value);
                }
            }
        });
    }
    barrier();
    let sink = extras.sinks.map(|sinks| {
        // It belongs to the first part of a head alone.
        let mine = Order::eq(split, 0u32);
        let of = move |head: Val<u32>| {
            let logit = sinks.get(packed * pack + head) * std::f32::consts::LOG2_E;
            (select(mine, logit, FLOOR), select(mine, 1.0f32, 0.0f32))
        };
        Box::new(of) as Box<dyn Fn(Val<u32>) -> (Val<f32>, Val<f32>)>
    });
    Part { plan, stats, mixed, sink }
}

impl Part {
    /// Calls `body(head, element, mixed, top, sum)` for each element of each head of the pack, all threads together.
    fn each(&self, body: impl FnOnce(Val<u32>, Val<u32>, Val<f32>, Val<f32>, Val<f32>)) {
        let (d, pack) = (self.plan.head_dim, self.plan.pack);
        strided(pack * d).each(|i| {
            let (head, element) = (i / d, i % d);
            let at = |simd: u32| simd * pack + head;
            let tops: Vec<Val<f32>> = (0..SIMDS).map(|s| self.stats.get(at(s) * 2u32)).collect();
            let sink = self.sink.as_ref().map(|sink| sink(head));
            let start = sink.map_or_else(|| FLOOR.val(), |(logit, _)| logit);
            let top = tops.iter().fold(start, |top, t| top.max(*t));
            let mut sum = match sink {
                Some((logit, weight)) => (logit - top).exp2() * weight,
                None => 0.0f32.val(),
            };
            let mut mixed = 0.0f32.val();
            for (s, own) in (0..SIMDS).zip(&tops) {
                let decay = (*own - top).exp2();
                sum = self.stats.get(at(s) * 2u32 + 1u32).fma(decay, sum);
                mixed = self.mixed.get(at(s) * d + element).fma(decay, mixed);
            }
            body(head, element, mixed, top, sum);
        });
    }
}

/// Merges the parts of all groups of a head pack and hands elements from `element` on to `store(head, element, values)`.
fn merge(
    plan: Plan,
    scratch: Scratch,
    index: Val<u32>,
    used: Val<u32>,
    store: impl FnOnce(Val<u32>, Val<u32>, &[Val<f32>]),
) {
    let (d, pack) = (plan.head_dim, plan.pack);
    let weights = Shared::<f32>::named("weights", pack * MOST_SPLITS);
    let first = index * groups(0) * pack;
    // A simdgroup finds the weights of a head's parts, each divided by the sum, one lane per part.
    range(simd_id(), pack).step(SIMDS).each(|head| {
        let at = |part: Val<u32>| (first + part * pack + head) * 2u32;
        let top = Var::new(FLOOR);
        range(lane_id(), used).step(32u32).each(|part| {
            top.set(top.get().max(scratch.stats.get_with(at(part), Hint::Coherent)));
        });
        let top = simd_reduce(Reduce::Max, top.get());
        let sum = Var::new(0.0);
        range(lane_id(), used).step(32u32).each(|part| {
            let weight = (scratch.stats.get_with(at(part), Hint::Coherent) - top).exp2();
            let own = scratch.stats.get_with(at(part) + 1u32, Hint::Coherent);
            sum.set(own.fma(weight, sum.get()));
            weights.set(head * MOST_SPLITS + part, weight);
        });
        let scale = inverse(simd_sum(sum.get()));
        range(lane_id(), used).step(32u32).each(|part| {
            let at = head * MOST_SPLITS + part;
            weights.set(at, weights.get(at) * scale);
        });
    });
    barrier();
    strided(pack * d / VECTOR).each(|i| {
        let (head, element) = (i * VECTOR / d, i * VECTOR % d);
        let sums = Regs::new(VECTOR, 0.0);
        // Several parts at once, the last one again where there are fewer, with weight zero.
        range(0u32, used).step(TOGETHER).each(|start| {
            let parts: Vec<(Vec<Val<f32>>, Val<f32>)> = (0..TOGETHER)
                .map(|k| {
                    let part = (start + k).min(used - 1u32);
                    let at = (first + part * pack + head) * d + element;
                    let values = scratch.partial.get_vec(at, VECTOR as u8, Hint::Coherent);
                    let weight = weights.get(head * MOST_SPLITS + part);
                    (values, select(Order::lt(start + k, used), weight, 0.0f32))
                })
                .collect();
            for j in 0..VECTOR {
                let add = |sum, (v, w): &(Vec<Val<f32>>, Val<f32>)| v[j as usize].fma(*w, sum);
                sums.set(j, parts.iter().fold(sums.get(j), add));
            }
        });
        let values: Vec<Val<f32>> = (0..VECTOR).map(|j| sums.get(j)).collect();
        store(head, element, &values);
    });
}
