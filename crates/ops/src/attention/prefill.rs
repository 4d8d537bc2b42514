//! Attention of a chunk of tokens, on the matrix units: `y = softmax(q k^T * scale) v`
//! (FlashAttention-2, Dao 2023).
//!
//! A threadgroup owns a block of one head's query rows, a simdgroup 16 of them or more. Keys and
//! values pass through shared memory a block at a time: values arrive while scores are computed,
//! the next keys while values are mixed. Scores, weights and the running softmax stay in registers;
//! a block of weights becomes a left operand as it is, rounded to the type of the values. Blocks of
//! keys that no row sees are not read, and only blocks that some rows see in part are masked.
//!
//! Tokens of f32 have no matrix unit: [`super::decode`] takes each as a row of its own.

mod together;

use tile::dsl::*;
use tile::instr::UnaryOp;
use tile::ir::{LoadHint, Reduce};
use tile::launch::{Mode, Requirement};

use super::decode::LARGE;
use super::form::{AttentionForm, Extras, FLOOR, MASKED, Stored, require_aligned};
use super::wide::WideTiling;
use crate::kv_write::Cache;
use crate::sweep::{begin, require_lengths, when};
use crate::tuned::ForAttention;

/// How a head's work is cut up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefillTiling {
    /// Simdgroups per threadgroup.
    pub simds: u32,
    /// Tiles of 16 query rows per simdgroup. With one, queries stay in registers; with more they
    /// stay in shared memory.
    pub tiles: u32,
    /// Keys per block: a multiple of 16.
    pub keys: u32,
}

impl PrefillTiling {
    /// Picks the blocks for heads of `head_dim` elements, on a device with `shared` bytes of shared
    /// memory per group.
    pub fn pick(head_dim: u32, shared: u32, tuned: &ForAttention) -> PrefillTiling {
        let tilings = if shared >= LARGE { tuned.large } else { tuned.small };
        tilings[usize::from(head_dim > 128)]
    }

    /// Query rows per threadgroup.
    pub fn rows(self) -> u32 {
        self.simds * self.own()
    }

    /// Query rows per simdgroup.
    fn own(self) -> u32 {
        16 * self.tiles
    }

    fn threads(self) -> u32 {
        32 * self.simds
    }
}

/// How a threadgroup works for its query rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefillSchedule {
    /// Each simdgroup has rows of its own.
    Apart(PrefillTiling),
    /// All simdgroups share them: for heads of more than [`MOST`] elements.
    Together(WideTiling),
}

/// The most elements of heads whose rows a simdgroup has for itself.
pub const MOST: u32 = 256;

impl PrefillSchedule {
    /// Picks the blocks for a form, on a device with `shared` bytes of shared memory per group;
    /// `None` for heads that matrix units do not take, or that need more than there is.
    pub fn pick(form: AttentionForm, shared: u32, tuned: &ForAttention) -> Option<PrefillSchedule> {
        let d = form.head_dim;
        if !d.is_multiple_of(16) || form.chosen {
            return None;
        }
        if d <= MOST {
            return Some(PrefillSchedule::Apart(PrefillTiling::pick(d, shared, tuned)));
        }
        let fits = |wide: &&WideTiling| wide.bytes(d, form.keys_only) <= shared;
        tuned.wide.iter().find(fits).map(|wide| PrefillSchedule::Together(*wide))
    }

    fn rows(self) -> u32 {
        match self {
            PrefillSchedule::Apart(tiling) => tiling.rows(),
            PrefillSchedule::Together(tiling) => tiling.rows(),
        }
    }

    fn threads(self) -> u32 {
        match self {
            PrefillSchedule::Apart(tiling) => tiling.threads(),
            PrefillSchedule::Together(tiling) => 32 * tiling.simds(),
        }
    }
}

/// How keys and values lie that are no block pool: of each sequence one array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueLayout {
    /// `[kv_heads, keys, head_dim]`.
    HeadMajor,
    /// `[keys, kv_heads, head_dim]`.
    KeyMajor,
}

/// Attends chunks of `q` `[tokens, kv_heads * group, head_dim]` to a cache of the same type. Chunk
/// `i` is rows `starts[i]..starts[i + 1]`, consecutive positions of one sequence, whose keys are in
/// the cache; `longest` is the most rows of a chunk. Weights are rounded to their type before they
/// meet the values.
#[kernel]
pub fn attention_prefill(
    q: In<{ scalar }>,
    keys: In<{ scalar }>,
    values: In<{ scalar }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
    schedule: PrefillSchedule,
) {
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    require_aligned(&["keys", "values"]);
    let step = Step { q, y, lse: None, positions, starts, kv_heads, scale };
    let [keys, values] = [keys, values].map(Stored::numbers);
    prefill(form, schedule, step, keys, values, Paged(cache));
}

/// As [`attention_prefill`], over a cache of codes, decoded on the way: i8 is q8_0, u32 turbo. 32
/// must divide `head_dim`.
#[kernel]
pub fn attention_prefill_codes(
    q: In<{ scalar }>,
    key_codes: In<{ codes }>,
    key_scales: In<{ Scalar::F16 }>,
    value_codes: In<{ codes }>,
    value_scales: In<{ Scalar::F16 }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    codes: Scalar,
    form: AttentionForm,
    schedule: PrefillSchedule,
) {
    let head_dim = form.head_dim.val();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    require_aligned(&["key_codes", "value_codes"]);
    let keys = Stored::codes(key_codes, key_scales);
    let values = Stored::codes(value_codes, value_scales);
    let step = Step { q, y, lse: None, positions, starts, kv_heads, scale };
    prefill(form, schedule, step, keys, values, Paged(cache));
}

/// As [`attention_prefill`], over arrays of `length` keys and values per chunk instead of a cache.
/// Keys at `length` and beyond are not seen.
#[kernel]
pub fn attention_dense(
    q: In<{ scalar }>,
    keys: In<{ scalar }>,
    values: In<{ scalar }>,
    positions: In<u32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    length: Arg<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
    tiling: PrefillTiling,
    layout: ValueLayout,
) {
    require_aligned(&["keys", "values"]);
    let size = dim("batch") * dim("length") * (dim("kv_heads") * form.head_dim);
    require_lengths(&[("keys", size.clone()), ("values", size)]);
    let step = Step { q, y, lse: None, positions, starts, kv_heads, scale };
    let dense = Dense { layout, length, kv_heads, head_dim: form.head_dim };
    let [keys, values] = [keys, values].map(Stored::numbers);
    prefill(form, PrefillSchedule::Apart(tiling), step, keys, values, dense);
}

/// As [`attention_prefill`], among the rows of whole sequences that lie one behind the other, as a
/// model is trained: keys and values are rows of their own, and `lse` `[tokens, kv_heads * group]`
/// is the logarithm of each softmax's denominator.
#[kernel]
pub fn attention_packed(
    q: In<{ scalar }>,
    keys: In<{ scalar }>,
    values: In<{ scalar }>,
    positions: In<u32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    lse: Out<f32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
    tiling: PrefillTiling,
) {
    require_aligned(&["keys", "values"]);
    let size = dim("tokens") * (dim("kv_heads") * form.head_dim);
    require_lengths(&[("keys", size.clone()), ("values", size)]);
    require_lengths(&[("lse", dim("tokens") * (dim("kv_heads") * form.group))]);
    let step = Step { q, y, lse: Some(lse), positions, starts, kv_heads, scale };
    let packed = Packed { kv_heads, head_dim: form.head_dim };
    let [keys, values] = [keys, values].map(Stored::numbers);
    prefill(form, PrefillSchedule::Apart(tiling), step, keys, values, packed);
}

/// The buffers and constants that all prefill kernels bind.
#[derive(Clone, Copy)]
struct Step {
    q: In,
    y: Out,
    /// Where the logarithms of denominators go, if they are wanted.
    lse: Option<Out>,
    positions: In<u32>,
    starts: In<u32>,
    kv_heads: Val<u32>,
    scale: Val<f32>,
}

/// Where keys lie.
trait Rows: Copy {
    /// States what the launch contract says of it.
    fn contract(self) {}

    /// How many keys there are at most, if that is less than queries could see.
    fn limit(self) -> Option<Val<u32>>;

    /// The first elements of a head in the rows of positions `start`, `start + 16`, .., and the
    /// elements from each row to the next within sixteen.
    fn slabs(
        self,
        first_row: Val<u32>,
        head: Val<u32>,
        start: Val<u32>,
        slabs: Regs<u32>,
    ) -> Val<u32>;
}

/// In the block pool: a block holds a multiple of 16 positions.
#[derive(Clone, Copy)]
struct Paged(Cache);

impl Rows for Paged {
    fn contract(self) {
        require(Requirement::Divisible(dim("block"), 16));
    }

    fn limit(self) -> Option<Val<u32>> {
        None
    }

    #[track_caller]
    fn slabs(
        self,
        first_row: Val<u32>,
        head: Val<u32>,
        start: Val<u32>,
        slabs: Regs<u32>,
    ) -> Val<u32> {
        let cache = self.0;
        let sequence = cache.sequences.get(first_row);
        let row = cache.kv_heads * cache.head_dim;
        // One look-up where all of them lie in one block.
        let whole = Order::eq(cache.block % (16 * slabs.len()), 0u32);
        let one = || {
            let first = cache.element(cache.slot_at(sequence, start), head);
            (0..slabs.len()).for_each(|i| slabs.set(i, first + row * (16 * i)));
        };
        let each = || {
            for i in 0..slabs.len() {
                let slot = cache.slot_at(sequence, start + 16 * i);
                slabs.set(i, cache.element(slot, head));
            }
        };
        test(whole).then(one).otherwise(each);
        row
    }
}

/// In one array per chunk.
#[derive(Clone, Copy)]
struct Dense {
    layout: ValueLayout,
    length: Val<u32>,
    kv_heads: Val<u32>,
    head_dim: u32,
}

impl Rows for Dense {
    fn limit(self) -> Option<Val<u32>> {
        Some(self.length)
    }

    #[track_caller]
    fn slabs(self, _: Val<u32>, head: Val<u32>, start: Val<u32>, slabs: Regs<u32>) -> Val<u32> {
        let chunk = group_id_of(2);
        let (first, row) = match self.layout {
            ValueLayout::HeadMajor => {
                let row = self.head_dim.val();
                (((chunk * self.kv_heads + head) * self.length + start) * row, row)
            }
            ValueLayout::KeyMajor => {
                let row = self.kv_heads * self.head_dim;
                ((chunk * self.length + start) * row + head * self.head_dim, row)
            }
        };
        (0..slabs.len()).for_each(|i| slabs.set(i, first + row * (16 * i)));
        row
    }
}

/// In the rows of the queries' own sequence, of several that lie one behind the other.
#[derive(Clone, Copy)]
struct Packed {
    kv_heads: Val<u32>,
    head_dim: u32,
}

impl Rows for Packed {
    fn limit(self) -> Option<Val<u32>> {
        None
    }

    #[track_caller]
    fn slabs(
        self,
        first_row: Val<u32>,
        head: Val<u32>,
        start: Val<u32>,
        slabs: Regs<u32>,
    ) -> Val<u32> {
        let row = self.kv_heads * self.head_dim;
        let first = (first_row + start) * row + head * self.head_dim;
        (0..slabs.len()).for_each(|i| slabs.set(i, first + row * (16 * i)));
        row
    }
}

/// Begins to bring eight elements of keys or values, from `from` on, to shared memory; zeros unless
/// `keep`.
#[track_caller]
fn stage(stored: Stored, to: Shared, at: Val<u32>, from: Val<u32>, keep: Val<bool>) {
    let Some(scales) = stored.scales else {
        return copy_async(to, at, stored.array, from, 8, Some(keep));
    };
    let decoded = || {
        if let Some(codes) = stored.nibbles(from, 8) {
            let scale = scales.get(from / 32u32);
            let values: Vec<Val<Raw>> =
                codes.into_iter().map(|c| (c * scale).to(to.scalar())).collect();
            return to.set_raw_vec(at, &values);
        }
        let codes = stored.array.get_raw_vec(from, 8, LoadHint::None);
        let scale = scales.get(from / 32u32);
        let values: Vec<Val<Raw>> =
            codes.iter().map(|c| (c.f32() * scale).to(to.scalar())).collect();
        to.set_raw_vec(at, &values);
    };
    let zeros = || to.set_raw_vec(at, &[0.0f32.val().to(to.scalar()); 8]);
    test(keep).then(decoded).otherwise(zeros);
}

/// Brings the rows whose first elements `from` gives to consecutive rows of `to`, those below
/// `left`.
#[track_caller]
pub(crate) fn bring(
    threads: u32,
    d: u32,
    rows: u32,
    stored: Stored,
    (to, at): (Shared, impl IntoVal<u32> + Copy),
    from: impl Fn(u32, Val<u32>) -> Val<u32>,
    left: Val<u32>,
) {
    let per_row = d / 8;
    for slab in 0..rows / 16 {
        let mut done = 0;
        while done < 16 * per_row {
            let i = thread_id() + done;
            let (row, element) = (i / per_row, i % per_row * 8u32);
            let one = || {
                let keep = Order::lt(row + 16 * slab, left);
                let to_at = at.val() + (row + 16 * slab) * (d + PAD) + element;
                stage(stored, to, to_at, from(slab, row) + element, keep);
            };
            match done + threads <= 16 * per_row {
                true => one(),
                false => when(Order::lt(i, 16 * per_row), one),
            }
            done += threads;
        }
    }
}

/// Elements between rows in shared memory: eight rows of 16 bytes then lie in different banks.
pub(crate) const PAD: u32 = 8;

/// The body of all kernels.
fn prefill(
    form: AttentionForm,
    schedule: PrefillSchedule,
    step: Step,
    keys: Stored,
    values: Stored,
    place: impl Rows,
) {
    let d = form.head_dim;
    let rows = schedule.rows();
    let heads = dim("kv_heads") * form.group;
    let blocks = dim("longest").ceil_div(rows);
    launch(Mode::Tile, [heads.clone(), blocks, dim("batch")], schedule.threads());
    require_lengths(&[
        ("q", dim("tokens") * heads.clone() * d),
        ("y", dim("tokens") * heads * d),
        ("positions", dim("tokens")),
        ("starts", dim("batch") + 1),
    ]);
    require_aligned(&["q", "y"]);
    place.contract();
    let extras = form.extras();
    begin();
    let chunk = group_id_of(2);
    let first_row = step.starts.get(chunk);
    let count = step.starts.get(chunk + 1u32) - first_row;
    // The last rows see the most keys: they go first.
    let offset = (groups(1) - 1u32 - group_id_of(1)) * rows;
    when(Order::lt(offset, count), || {
        let left = count - offset;
        match schedule {
            PrefillSchedule::Apart(tiling) => {
                let flash = Flash { form, tiling, step, extras, first_row, offset, left };
                flash.run(keys, values, place);
            }
            PrefillSchedule::Together(tiling) => {
                let flash = Flash { form, tiling, step, extras, first_row, offset, left };
                flash.share(keys, values, place);
            }
        }
    });
}

/// One threadgroup's work.
struct Flash<T> {
    form: AttentionForm,
    tiling: T,
    step: Step,
    extras: Extras,
    /// The chunk's first row.
    first_row: Val<u32>,
    /// The first of this group's rows in the chunk.
    offset: Val<u32>,
    /// The chunk's rows from there on.
    left: Val<u32>,
}

impl Flash<PrefillTiling> {
    fn run(&self, keys: Stored, values: Stored, place: impl Rows) {
        let PrefillTiling { tiles, keys: step, .. } = self.tiling;
        let (d, rows) = (self.form.head_dim, self.tiling.rows());
        let (ld, threads_rows) = (d + PAD, self.tiling.own());
        let position = self.step.positions.get(self.first_row) + self.offset;
        let last = position + self.left.min(rows);
        let end = place.limit().map_or(last, |limit| last.min(limit));
        let head = group_id() / self.form.group;
        let start = self.extras.first(position + 1u32) / step * step;

        // Queries that stay in registers leave their place to keys and values.
        let staging =
            self.shared("staging", ld * (2 * step).max(if tiles == 1 { rows } else { 0 }));
        let query = if tiles == 1 { staging } else { self.shared("query", ld * rows) };
        let heads = self.step.kv_heads * self.form.group;
        let row_of =
            |row: Val<u32>| ((self.first_row + self.offset + row) * heads + group_id()) * d;
        bring(
            self.tiling.threads(),
            d,
            rows,
            Stored::numbers(self.step.q),
            (query, 0),
            |slab, row| row_of(row + 16 * slab),
            self.left,
        );
        copy_commit();
        copy_wait(0);
        barrier();
        let own = simd_id() * threads_rows;
        let left_operand = |r: u32, k: u32| Frag::left(query, (own + 16 * r) * ld + 16 * k, ld);
        let held: Vec<Frag> = match tiles {
            1 => (0..d / 16).map(|k| left_operand(0, k)).collect(),
            _ => vec![],
        };
        if tiles == 1 {
            barrier();
        }

        let slabs = Regs::<u32>::new(step / 16, 0u32);
        let fetch = |stored: Stored, at: u32, start: Val<u32>| {
            let row = place.slabs(self.first_row, head, start, slabs);
            let from = |slab: u32, r: Val<u32>| slabs.get(slab) + r * row;
            let threads = self.tiling.threads();
            bring(threads, d, step, stored, (staging, at), from, end - start);
            copy_commit();
        };
        let (inner, outer) = self.extras.scales(self.step.scale);
        let (top, sum) = match self.extras.sinks {
            // A sink is where the softmax starts.
            Some(sinks) => {
                let logit = sinks.get(group_id()) * std::f32::consts::LOG2_E / outer;
                (Frag::rows(logit), Frag::rows(1.0f32))
            }
            None => (Frag::rows(FLOOR), Frag::rows(0.0f32)),
        };
        let running = Running {
            top: Frags::new(tiles, top),
            sum: Frags::new(tiles, sum),
            mixed: Frags::accumulators(tiles * (d / 16), 0.0),
            scores: Frags::accumulators(tiles * (step / 16), 0.0),
        };
        when(Order::lt(start, end), || fetch(keys, 0, start));
        range(start, end).step(step).each(|key| {
            copy_wait(0);
            barrier();
            fetch(values, ld * step, key);
            self.score(
                &running,
                |r, k| if tiles == 1 { held[k as usize] } else { left_operand(r, k) },
                staging,
                inner,
            );
            self.lean(&running, position, key, outer);
            self.mask(&running, position, key, place.limit());
            copy_wait(0);
            barrier();
            when(Order::lt(key + step, end), || fetch(keys, 0, key + step));
            self.weigh(&running, outer);
            self.mix(&running, staging);
        });
        barrier();
        self.store(&running, query, own);
        if let Some(lse) = self.step.lse {
            self.store_lse(&running, lse, own, outer);
        }
    }

    /// An array of shared memory for operands.
    fn shared(&self, name: &str, len: u32) -> Shared {
        Shared::stored(self.step.q.scalar(), name, len)
    }

    /// `scores = q k^T`, bounded if the form says so.
    fn score(
        &self,
        running: &Running,
        query: impl Fn(u32, u32) -> Frag,
        staging: Shared,
        inner: Val<f32>,
    ) {
        let PrefillTiling { tiles, keys, .. } = self.tiling;
        let ld = self.form.head_dim + PAD;
        let columns = keys / 16;
        let mut scores = vec![Frag::filled(0.0f32); (tiles * columns) as usize];
        for k in 0..self.form.head_dim / 16 {
            let left: Vec<Frag> = (0..tiles).map(|r| query(r, k)).collect();
            for j in 0..columns {
                let right = Frag::right_transposed(staging, 16 * j * ld + 16 * k, ld);
                for (r, left) in (0..tiles).zip(&left) {
                    let at = (r * columns + j) as usize;
                    scores[at] = scores[at].mma(*left, right);
                }
            }
        }
        let inner = self.extras.cap.map(|_| Frag::filled(inner));
        for (i, score) in (0..).zip(scores) {
            let bounded = inner.map_or(score, |inner| (score * inner).map(UnaryOp::Tanh));
            running.scores.set(i, bounded);
        }
    }

    /// Takes from scores what slopes do: the slope for each position from a key to the query.
    fn lean(&self, running: &Running, position: Val<u32>, key: Val<u32>, outer: Val<f32>) {
        let Some(slopes) = self.extras.slopes else { return };
        let PrefillTiling { tiles, keys, .. } = self.tiling;
        let slope = Frag::filled(slopes.get(group_id()) * std::f32::consts::LOG2_E / outer);
        let own = position + simd_id() * self.tiling.own();
        for r in 0..tiles {
            let rows = (Frag::row_numbers() + Frag::filled_u32(own + 16 * r)).cast(Scalar::F32);
            for j in 0..keys / 16 {
                let columns = Frag::col_numbers() + Frag::filled_u32(key + 16 * j);
                let at = r * (keys / 16) + j;
                let leaning = (columns.cast(Scalar::F32) - rows) * slope;
                running.scores.set(at, running.scores.get(at) + leaning);
            }
        }
    }

    /// Masks what rows do not see of the keys from `key` on, if there is any such.
    fn mask(&self, running: &Running, position: Val<u32>, key: Val<u32>, limit: Option<Val<u32>>) {
        let PrefillTiling { tiles, keys, .. } = self.tiling;
        let own = position + simd_id() * self.tiling.own();
        let mut edge = Order::gt(key + keys, position + 1u32);
        if self.extras.window.is_some() {
            edge = edge | Order::lt(key, self.extras.first(position + self.tiling.rows()));
        }
        if let Some(limit) = limit {
            edge = edge | Order::gt(key + keys, limit);
        }
        when(edge, || {
            let masked = Frag::filled(MASKED);
            for r in 0..tiles {
                let rows = Frag::row_numbers() + Frag::filled_u32(own + 16 * r);
                for j in 0..keys / 16 {
                    let columns = Frag::col_numbers() + Frag::filled_u32(key + 16 * j);
                    let seen = self.seen(rows, columns, limit);
                    let at = r * (keys / 16) + j;
                    running.scores.set(at, seen.select(running.scores.get(at), masked));
                }
            }
        });
    }

    /// Scores become weights; the maximum, the sum and what is mixed follow.
    fn weigh(&self, running: &Running, outer: Val<f32>) {
        let PrefillTiling { tiles, keys, .. } = self.tiling;
        let columns = keys / 16;
        let (scale, wide) = (Frag::rows(outer), Frag::filled(outer));
        let minus = Frag::rows(-outer);
        for r in 0..tiles {
            let at = |j: u32| r * columns + j;
            let all = (1..columns)
                .fold(running.scores.get(at(0)), |all, j| all.max(running.scores.get(at(j))));
            let before = running.top.get(r);
            let top = before.max(all.reduce_rows(Reduce::Max));
            let shift = top * minus;
            // The difference first: over nothing it is exactly 0, which a product rounded by itself
            // would not give.
            let decay = ((before - top) * scale).map(UnaryOp::Exp2);
            let across = shift.across();
            let mut total: Option<Frag> = None;
            for j in 0..columns {
                let weight = (running.scores.get(at(j)) * wide + across).map(UnaryOp::Exp2);
                running.scores.set(at(j), weight);
                total = Some(total.map_or(weight, |total| total + weight));
            }
            running.top.set(r, top);
            if let Some(total) = total {
                let sum = running.sum.get(r) * decay + total.reduce_rows(Reduce::Sum);
                running.sum.set(r, sum);
            }
            let decay = decay.across();
            for i in 0..self.form.head_dim / 16 {
                let at = r * (self.form.head_dim / 16) + i;
                running.mixed.set(at, running.mixed.get(at) * decay);
            }
        }
    }

    /// `mixed += weights v`.
    fn mix(&self, running: &Running, staging: Shared) {
        let PrefillTiling { tiles, keys, .. } = self.tiling;
        let (ld, columns) = (self.form.head_dim + PAD, self.form.head_dim / 16);
        let count = (tiles * columns) as usize;
        let mut mixed: Vec<Frag> = (0..count as u32).map(|i| running.mixed.get(i)).collect();
        for j in 0..keys / 16 {
            let left: Vec<Frag> = (0..tiles)
                .map(|r| running.scores.get(r * (keys / 16) + j).to_left(staging.scalar()))
                .collect();
            for i in 0..columns {
                let right = Frag::right(staging, (keys + 16 * j) * ld + 16 * i, ld);
                for (r, left) in (0..tiles).zip(&left) {
                    let at = (r * columns + i) as usize;
                    mixed[at] = mixed[at].mma(*left, right);
                }
            }
        }
        (0..).zip(mixed).for_each(|(i, tile)| running.mixed.set(i, tile));
    }

    /// Divides by the sums and writes the rows that there are, by way of shared memory.
    fn store(&self, running: &Running, through: Shared, own: Val<u32>) {
        let (d, ld) = (self.form.head_dim, self.form.head_dim + PAD);
        let columns = d / 16;
        for r in 0..self.tiling.tiles {
            // The sum is 1 at least, or 0 where nothing was seen, as what was mixed is then.
            let sum = running.sum.get(r).max(Frag::rows(1.0e-30f32));
            let inverse = (Frag::rows(1.0f32) / sum).across();
            for i in 0..columns {
                let tile = running.mixed.get(r * columns + i) * inverse;
                tile.store(through, (own + 16 * r) * ld + 16 * i, ld);
            }
        }
        simd_barrier();
        let heads = self.step.kv_heads * self.form.group;
        let per_row = d / 8;
        range(lane_id(), self.tiling.own() * per_row).step(32u32).each(|i| {
            let (row, element) = (own + i / per_row, i % per_row * 8u32);
            when(Order::lt(row, self.left), || {
                let values = through.get_raw_vec(row * ld + element, 8, LoadHint::None);
                let token = self.first_row + self.offset + row;
                self.step.y.set_raw_vec((token * heads + group_id()) * d + element, &values);
            });
        });
    }
}

impl Flash<PrefillTiling> {
    /// Writes the natural logarithms of the denominators of the rows that there are.
    fn store_lse(&self, running: &Running, lse: Out, own: Val<u32>, outer: Val<f32>) {
        let heads = self.step.kv_heads * self.form.group;
        let through = Shared::<f32>::named("denominators", self.tiling.simds * 256);
        let place = simd_id() * 256u32;
        for r in 0..self.tiling.tiles {
            let top = running.top.get(r) * Frag::rows(outer);
            let log = running.sum.get(r).map(UnaryOp::Log2) + top;
            let log = log * Frag::rows(std::f32::consts::LN_2);
            log.across().store(through, place, 16u32);
            simd_barrier();
            let row = own + 16 * r + lane_id();
            when(Order::lt(lane_id(), 16u32) & Order::lt(row, self.left), || {
                let token = self.first_row + self.offset + row;
                lse.set(token * heads + group_id(), through.get(place + lane_id() * 16u32));
            });
            simd_barrier();
        }
    }
}

impl<T> Flash<T> {
    /// Which of the keys at the positions `columns` the rows at the positions `rows` see.
    #[track_caller]
    fn seen(&self, rows: Frag, columns: Frag, limit: Option<Val<u32>>) -> Frag {
        let mut seen = columns.le(rows);
        if let Some(chunk) = self.extras.window.filter(|_| self.extras.chunked) {
            let chunk = Frag::filled_u32(chunk);
            seen = seen.and((rows / chunk * chunk).le(columns));
        } else if let Some(window) = self.extras.window {
            // Sums stay far below 2^32, as positions do.
            let reach = Frag::filled_u32(window.min(1u32 << 30));
            seen = seen.and(rows.lt(columns + reach));
        }
        if let Some(limit) = limit {
            seen = seen.and(columns.lt(Frag::filled_u32(limit)));
        }
        seen
    }

    /// Where a row's elements of this group's head begin.
    #[track_caller]
    fn row(&self, row: Val<u32>) -> Val<u32> {
        let heads = self.step.kv_heads * self.form.group;
        ((self.first_row + self.offset + row) * heads + group_id()) * self.form.head_dim
    }
}

/// The running softmax of a simdgroup's rows, in units of `outer`, and the scores of a block.
struct Running {
    top: Frags,
    sum: Frags,
    mixed: Frags,
    scores: Frags,
}
