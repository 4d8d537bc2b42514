//! Scores and mixtures by lanes: for any types, on any target.
//!
//! In a simdgroup, a team of lanes shares a key: each holds some elements of it, 16 bytes at a
//! time. Four keys per team are read at once with their values. Their scores are summed over the
//! team by exchanging halves, so that a quarter of the team's lanes ends with each key and the
//! exponentials are computed once, not once per lane. Each team has a running softmax of its own;
//! the teams of a simdgroup are merged at the end.

use tile::dsl::*;
use tile::ir::LoadHint;

use super::{Plan, Softmaxes, Span};
use crate::attention::form::{AttentionForm, Extras, FLOOR, MASKED, Stored};
use crate::kv_write::Cache;
use crate::sweep::when;

/// Simdgroups of a group.
const SIMDS: u32 = 4;
const THREADS: u32 = 32 * SIMDS;
/// Keys that a team reads at once.
const AHEAD: u32 = 4;

/// Who does what: follows from the form and the cache's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lanes {
    /// Lanes that share a key.
    team: u32,
    /// Elements read at once.
    vector: u32,
    /// Elements of a head in a lane: of those of the last ones some are past the head's end, where
    /// it has no multiple of `team` elements.
    each: u32,
}

impl Lanes {
    /// The plan for elements of at most `bytes` bytes, in the cache and in queries.
    fn of(form: AttentionForm, bytes: u32) -> Lanes {
        let d = form.head_dim;
        // Eight elements or more per lane; fewer than four lanes could not exchange quarters.
        let teams = [32u32, 16, 8].into_iter().find(|t| d.is_multiple_of(*t) && d / t >= 8);
        let team = teams.unwrap_or(4);
        let fits = |v: &u32| (d / team).is_multiple_of(*v) && v * bytes <= 16;
        let vector = [16u32, 8, 4, 2].into_iter().find(|v| d.is_multiple_of(team) && fits(v));
        Lanes { team, vector: vector.unwrap_or(1), each: d.div_ceil(team) }
    }
}

/// Whether what a lane reads at once can be copied asynchronously, which takes four bytes: in
/// some heads, such as heads of 12 elements, a lane reads a single one.
pub(super) fn copies(form: AttentionForm, query: Scalar, cache: Scalar) -> bool {
    let lanes = Lanes::of(form, cache.bytes().max(query.bytes()) as u32);
    lanes.vector * cache.bytes() as u32 >= 4
}

/// Simdgroups, keys that each takes at once, and the most heads that a group works for: registers
/// hold a query and a sum for each head, and the keys, if these do not come through shared memory;
/// shared memory a sum per simdgroup.
pub(super) fn plan(form: AttentionForm, bytes: u32, stages: u32) -> (u32, u32, u32) {
    let keys = AHEAD * 32 / Lanes::of(form, bytes).team;
    let heads = if stages > 0 { 8 } else { 4 };
    (SIMDS, keys, (1024 / form.head_dim).clamp(1, heads))
}

/// A running softmax per head: maximum, sum, and sum of values.
#[derive(Clone, Copy)]
struct Running {
    top: Regs<f32>,
    sum: Regs<f32>,
    mixed: Regs<f32>,
}

/// The softmaxes of a group's simdgroups over a span of keys: queries `q`, and a layer's keys and
/// values.
pub(super) fn attend(
    form: AttentionForm,
    plan: Plan,
    stages: u32,
    extras: &Extras,
    q: In,
    keys: Stored,
    values: Stored,
    cache: &Cache,
    scale: Val<f32>,
    span: Span,
) -> Softmaxes {
    let stored = keys.array.scalar();
    let bytes = if keys.scales.is_some() { 1 } else { stored.bytes() };
    let lanes = Lanes::of(form, bytes.max(q.scalar().bytes()) as u32);
    let Lanes { team, vector, each } = lanes;
    let (pack, Span { first, from, to, .. }) = (plan.pack, span);
    grid_wait();
    let (row, packed) = (group_id_of(2), group_id_of(1));
    let head = packed / (groups(1) / cache.kv_heads);
    let sequence = cache.sequences.get(row);
    let (turn, lane) = (lane_id() / team, lane_id() % team);
    // A lane's vectors alternate with its team's, so that a team reads consecutive bytes.
    let mut elements: Vec<Val<u32>> =
        (0..each / vector).map(|i| (i * team + lane) * vector).collect();
    let ragged = !form.head_dim.is_multiple_of(team);
    // Past a head's end its last element is read again, times a query of zero.
    let within = elements.iter().filter(|_| ragged).map(|&e| Order::lt(e, form.head_dim));
    let within: Vec<Val<bool>> = within.collect();
    for e in elements.iter_mut().filter(|_| ragged) {
        *e = e.min(form.head_dim - 1);
    }
    let (inner, outer) = extras.scales(scale);
    let inner = if extras.cap.is_some() { inner } else { outer };
    let queries: Vec<Vec<Val<f32>>> = (0..pack)
        .map(|g| {
            let start = ((row * groups(1) + packed) * pack + g) * plan.head_dim;
            let read = |&e: &Val<u32>| q.get_raw_vec(start + e, vector as u8, LoadHint::None);
            let numbers = elements.iter().flat_map(read).map(|x| x.f32() * inner);
            let kept = |(i, x)| within.get(i).map_or(x, |within| select(*within, x, 0.0f32));
            numbers.enumerate().map(kept).collect()
        })
        .collect();
    let slopes: Vec<Val<f32>> = match extras.slopes {
        Some(slopes) => {
            (0..pack).map(|g| slopes.get(packed * pack + g) * std::f32::consts::LOG2_E).collect()
        }
        None => Vec::new(),
    };
    let running = Running {
        top: Regs::new(pack, FLOOR),
        sum: Regs::new(pack, 0.0),
        mixed: Regs::new(pack * each, 0.0),
    };
    let apart = 32 / team;
    let start = from + simd_id() * plan.keys;
    let step = SIMDS * plan.keys;
    // Past the end the last key is read again, and not seen.
    let slots = move |base: Val<u32>| -> Vec<Val<u32>> {
        if let Some(chosen) = extras.chosen {
            let slot = |u: u32| {
                let entry = (base + turn + u * apart).min(to - 1u32).max(first);
                cache.slot_at(sequence, chosen.position(row, entry))
            };
            return (0..AHEAD).map(slot).collect();
        }
        let (slot, left) = (cache.slot_at(sequence, base), to - 1u32 - base);
        (0..AHEAD).map(|u| slot + (turn + u * apart).min(left)).collect()
    };
    let ring = (stages > 0).then(|| Ring::new(stored, lanes, stages));
    let fetch = |base: Val<u32>, stage: Val<u32>| {
        let Some(ring) = ring else { return };
        when(Order::lt(base, to), || {
            for (u, slot) in (0..).zip(slots(base)) {
                for (i, &e) in (0..).zip(&elements) {
                    let at = cache.element(slot, head) + e;
                    ring.bring(stage, 0, u, i, keys.array, at);
                    ring.bring(stage, 1, u, i, values.array, at);
                }
            }
        });
        copy_commit();
    };
    (1..stages).for_each(|stage| fetch(start + (stage - 1) * step, (stage - 1).val()));
    range(start, to).step(step).each(|base| {
        let turns = (base - start) / step;
        fetch(base + stages.max(1) * step - step, (turns + stages.max(1) - 1u32) % stages.max(1));
        let slots = if ring.is_none() || keys.scales.is_some() { slots(base) } else { vec![] };
        let read =
            |stored: Stored, kind: u32, factors: &[Option<Val<f32>>]| -> Vec<Vec<Val<f32>>> {
                let count = elements.len();
                let one = |u: usize, i: usize| -> Vec<Val<f32>> {
                    let lanes = vector as u8;
                    let factor = factors.get(u * count + i).copied().flatten();
                    let nibbles = || {
                        let at = cache.element(slots[u], head) + elements[i];
                        stored.nibbles(at, vector)
                    };
                    if let (None, Some(codes)) =
                        (ring, (stored.array.scalar() == Scalar::U32).then(nibbles).flatten())
                    {
                        return codes.into_iter().map(|x| factor.map_or(x, |f| x * f)).collect();
                    }
                    let raw = match ring {
                        Some(ring) => ring.read(turns % stages, kind, u as u32, i as u32),
                        None => {
                            let at = cache.element(slots[u], head) + elements[i];
                            stored.array.get_raw_vec(at, lanes, LoadHint::None)
                        }
                    };
                    let scaled = move |x: Val<Raw>| factor.map_or(x.f32(), |f| x.f32() * f);
                    raw.into_iter().map(scaled).collect()
                };
                (0..AHEAD as usize).map(|u| (0..count).flat_map(|i| one(u, i)).collect()).collect()
            };
        let factors = |stored: Stored| -> Vec<Option<Val<f32>>> {
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
            // Keys past the end are not seen, whatever their distance.
            let score = slopes.get(g as usize).map_or(score, |slope| {
                let distance = (span.end - 1u32 - key.min(span.end - 1u32)).f32();
                score - *slope * distance
            });
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
    gather(plan, lanes, running)
}

/// Batches of keys and values on their way to the lanes that asked for them. A lane reads only what
/// it brought itself, so no lane waits for another.
#[derive(Clone, Copy)]
struct Ring {
    /// `[stages, 2, AHEAD, vectors, THREADS, vector]`.
    array: Shared,
    lanes: Lanes,
}

impl Ring {
    fn new(scalar: Scalar, lanes: Lanes, stages: u32) -> Self {
        let len = stages * 2 * AHEAD * lanes.each * THREADS;
        Ring { array: Shared::stored(scalar, "ring", len), lanes }
    }

    #[track_caller]
    fn at(&self, stage: Val<u32>, kind: u32, u: u32, i: u32) -> Val<u32> {
        let Lanes { each, vector, .. } = self.lanes;
        let batch = (kind * AHEAD + u) * each + i * vector;
        stage * (2 * AHEAD * each * THREADS) + batch * THREADS + thread_id() * vector
    }

    #[track_caller]
    fn bring(&self, stage: Val<u32>, kind: u32, u: u32, i: u32, from: In, at: Val<u32>) {
        let to = self.at(stage, kind, u, i);
        copy_async(self.array, to, from, at, self.lanes.vector as u8, None);
    }

    #[track_caller]
    fn read(&self, stage: Val<u32>, kind: u32, u: u32, i: u32) -> Vec<Val<Raw>> {
        self.array.get_raw_vec(self.at(stage, kind, u, i), self.lanes.vector as u8, LoadHint::None)
    }
}

#[track_caller]
fn dot(a: &[Val<f32>], b: &[Val<f32>]) -> Val<f32> {
    let zero = 0.0f32.val();
    a.iter().zip(b).fold(zero, |sum, (a, b)| a.fma(*b, sum))
}

/// Sums each of [`AHEAD`] values over a team; a lane gets value `lane / (team / AHEAD)`. Lanes
/// exchange the halves that they are not to hold, which takes fewer exchanges than to sum each
/// value everywhere.
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

/// Merges each simdgroup's teams and writes what they have to shared memory.
fn gather(plan: Plan, lanes: Lanes, running: Running) -> Softmaxes {
    let (Lanes { team, vector, each }, Plan { head_dim, pack, .. }) = (lanes, plan);
    let width = head_dim + 2;
    let rows = Shared::<f32>::named("softmaxes", SIMDS * pack * width);
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
        let start = (simd_id() * pack + g) * width;
        when(Order::eq(lane_id(), 0u32), || {
            rows.set(start + head_dim, top);
            rows.set(start + head_dim + 1u32, sum);
        });
        when(Order::lt(lane_id(), team), || {
            for i in 0..each / vector {
                for j in 0..vector {
                    let value = running.mixed.get(g * each + i * vector + j);
                    let element = (i * team + lane) * vector;
                    let set = || rows.set(start + element + j, value);
                    match head_dim.is_multiple_of(team) {
                        true => set(),
                        false => when(Order::lt(element, head_dim), set),
                    }
                }
            }
        });
    }
    Softmaxes { rows, heads: pack, width, top: head_dim, sum: head_dim + 1 }
}
