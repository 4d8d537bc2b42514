//! Gradients of attention among packed rows on the matrix units (Dao, FlashAttention-2, 2023), for
//! operands of 16 bits and heads of a multiple of 16 elements, or of 32 if they have more than 128
//! ([`takes`]). The forward pass is
//! [`attention_packed`](crate::attention::prefill::attention_packed).
//!
//! A threadgroup owns 64 rows of one head of one sequence, a simdgroup 16 of them: query rows for
//! `dq`, key rows for `dk` and `dv`. Rows of the other side pass through shared memory, a few at a
//! time; scores are computed again and become weights and slopes in registers, which meet the other
//! side as they are, rounded to its type. Key rows have the heads of their group one after another,
//! so that everything is added up by one simdgroup in one order.
//!
//! Registers have no room for the rows and the sums of larger heads. Their rows stay in shared
//! memory, and two threadgroups have half of a row's sums each: both compute its scores.

use tile::dsl::*;
use tile::instr::UnaryOp;
use tile::launch::{Mode, Requirement};

use crate::attention::prefill::{PAD, bring};
use crate::attention::{AttentionForm, Extras, Stored, require_aligned};
use crate::sweep::{begin, require_lengths, when};

/// Simdgroups of a threadgroup.
const SIMDS: u32 = 4;
/// Rows that a threadgroup owns.
pub const ROWS: u32 = 16 * SIMDS;
const THREADS: u32 = 32 * SIMDS;
/// Elements of the largest heads whose rows and sums registers have room for.
const WHOLE: u32 = 128;

/// Whether the kernels take heads of this size, on a device with so much shared memory for a
/// threadgroup, in bytes.
pub fn takes(head_dim: usize, shared: u32) -> bool {
    let Ok(d) = u32::try_from(head_dim) else { return false };
    let fits = d <= WHOLE && d.is_multiple_of(16) || d <= 2 * WHOLE && d.is_multiple_of(32);
    fits && 2 * staging(d) + 2 * 4 * ROWS <= shared
}

/// Threadgroups that have parts of a row's sums.
fn parts(head_dim: u32) -> u32 {
    if head_dim > WHOLE { 2 } else { 1 }
}

/// Rows of the other side in shared memory.
fn step(head_dim: u32) -> u32 {
    if head_dim > WHOLE { 16 } else { 32 }
}

/// Rows in shared memory that a threadgroup owns and that stay there.
fn kept(head_dim: u32) -> u32 {
    if head_dim > WHOLE { 2 * ROWS } else { 0 }
}

/// Elements of shared memory for rows.
fn staging(head_dim: u32) -> u32 {
    ROWS.max(kept(head_dim) + 2 * step(head_dim)) * (head_dim + PAD)
}

/// `along[tokens, heads] = dy . y`, a simdgroup for each.
#[kernel]
pub fn attend_along(
    y: In<{ scalar }>,
    dy: In<{ scalar }>,
    along: Out<f32>,
    items: Arg<u32>,
    head_dim: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("items").ceil_div(SIMDS), fixed(1), fixed(1)], THREADS);
    let size = dim("items") * dim("head_dim");
    require_lengths(&[("y", size.clone()), ("dy", size), ("along", dim("items"))]);
    begin();
    let item = group_id() * SIMDS + simd_id();
    let from = item.min(items - 1u32) * head_dim;
    let sum = Var::new(0.0);
    for i in range(lane_id(), head_dim).step(32u32) {
        sum.set(y[from + i].fma(dy[from + i], sum.get()));
    }
    let sum = simd_sum(sum.get());
    if lane_id().eq(0u32) & Order::lt(item, items) {
        along[item] = sum;
    }
}

/// The operands of both kernels.
#[derive(Clone, Copy)]
struct Operands {
    q: In,
    k: In,
    v: In,
    lse: In,
    dy: In,
    along: In,
    kv_heads: Val<u32>,
    form: AttentionForm,
}

impl Operands {
    /// States the contract: `heads` along the first axis, of each its parts.
    fn contract(&self, heads: tile::launch::Extent) {
        let blocks = dim("longest").ceil_div(ROWS);
        let heads = match parts(self.form.head_dim) {
            1 => heads,
            parts => heads * parts,
        };
        launch(Mode::Tile, [heads, blocks, dim("batch")], THREADS);
        let d = self.form.head_dim;
        let narrow = dim("tokens") * (dim("kv_heads") * d);
        let heads = dim("tokens") * (dim("kv_heads") * self.form.group);
        require_lengths(&[
            ("q", heads.clone() * d),
            ("dy", heads.clone() * d),
            ("k", narrow.clone()),
            ("v", narrow),
            ("lse", heads.clone()),
            ("along", heads),
            ("starts", dim("batch") + 1),
        ]);
        require_aligned(&["q", "dy", "k", "v"]);
        require(Requirement::AtMost(dim("tokens"), 1 << 24));
    }
}

impl Operands {
    /// This threadgroup's head.
    fn head(&self) -> Val<u32> {
        match parts(self.form.head_dim) {
            1 => group_id(),
            parts => group_id() / parts,
        }
    }

    /// The elements of a row whose sums this threadgroup has.
    fn columns(&self) -> Columns {
        let d = self.form.head_dim;
        match parts(d) {
            1 => Columns { first: None, count: d },
            parts => {
                let count = d / parts;
                Columns { first: Some(group_id() % parts * count), count }
            }
        }
    }
}

/// Neighbouring elements of a row.
#[derive(Clone, Copy)]
struct Columns {
    /// None is the row's first.
    first: Option<Val<u32>>,
    count: u32,
}

impl Columns {
    /// An offset from the first of them.
    fn at(self, offset: u32) -> Val<u32> {
        self.first.map_or_else(|| offset.val(), |first| first + offset)
    }
}

/// A simdgroup's sixteen of a threadgroup's rows, as left operands.
enum Held {
    Registers(Vec<Frag>),
    Shared(Staged),
}

impl Held {
    /// Sixteen of their columns.
    fn left(&self, k: u32) -> Frag {
        match self {
            Held::Registers(held) => held[k as usize],
            Held::Shared(rows) => {
                let first = simd_id() * (16 * rows.stride()) + (rows.at + 16 * k);
                Frag::left(rows.rows, first, rows.stride())
            }
        }
    }
}

/// Rows of a head that lie in shared memory.
#[derive(Clone, Copy)]
struct Staged {
    rows: Shared,
    /// The first of them.
    at: u32,
    head_dim: u32,
}

impl Staged {
    fn stride(self) -> u32 {
        self.head_dim + PAD
    }

    /// Brings rows from memory: `from` has the first element of row 0, `row` elements to the next;
    /// zeros from `left` on.
    fn bring(self, count: u32, array: In, from: Val<u32>, row: Val<u32>, left: Val<u32>) {
        let of = |slab: u32, r: Val<u32>| from + (r + 16 * slab) * row;
        bring(
            THREADS,
            self.head_dim,
            count,
            Stored::numbers(array),
            (self.rows, self.at),
            of,
            left,
        );
    }

    /// This simdgroup's sixteen of a threadgroup's rows: in registers if there is room for them,
    /// else they stay where they are.
    fn hold(self, array: In, from: Val<u32>, row: Val<u32>, left: Val<u32>) -> Held {
        self.bring(ROWS, array, from, row, left);
        copy_commit();
        copy_wait(0);
        barrier();
        if kept(self.head_dim) > 0 {
            return Held::Shared(self);
        }
        let held = self.left(simd_id() * 16u32);
        barrier();
        Held::Registers(held)
    }

    /// Sixteen rows from one on, as left operands.
    fn left(self, row: Val<u32>) -> Vec<Frag> {
        let first = row * self.stride() + self.at;
        (0..self.head_dim / 16)
            .map(|k| Frag::left(self.rows, first + 16 * k, self.stride()))
            .collect()
    }

    /// `sum += left rows'`: the products of rows with sixteen of these from one on.
    fn products(self, left: &Held, row: u32) -> Frag {
        let first = self.at + row * self.stride();
        (0..self.head_dim / 16).fold(Frag::filled(0.0), |sum, k| {
            let left = left.left(k);
            sum.mma(left, Frag::right_transposed(self.rows, first + 16 * k, self.stride()))
        })
    }

    /// `sums += weights rows`, of these columns of sixteen rows from one on.
    fn mix(self, sums: Frags, weights: Frag, row: u32, columns: Columns) {
        let first = self.at + row * self.stride();
        for i in 0..columns.count / 16 {
            let right = Frag::right(self.rows, columns.at(first + 16 * i), self.stride());
            sums.set(i, sums.get(i).mma(weights, right));
        }
    }

    /// Writes sums over these columns of this simdgroup's rows, by way of these rows' place, those
    /// below `left`; `to` has the first element of row 0, and so many to the next.
    fn store(
        self,
        sums: Frags,
        (to, from, row): (Out, Val<u32>, Val<u32>),
        left: Val<u32>,
        columns: Columns,
    ) {
        let own = simd_id() * 16u32;
        for i in 0..columns.count / 16 {
            sums.get(i).store(self.rows, own * self.stride() + (self.at + 16 * i), self.stride());
        }
        simd_barrier();
        let from = columns.first.map_or(from, |first| from + first);
        let per_row = columns.count / 8;
        range(lane_id(), 16 * per_row).step(32u32).each(|i| {
            let (r, element) = (own + i / per_row, i % per_row * 8u32);
            when(Order::lt(r, left), || {
                let at = r * self.stride() + self.at + element;
                let values = self.rows.get_raw_vec(at, 8, tile::ir::LoadHint::None);
                to.set_raw_vec(from + r * row + element, &values);
            });
        });
        simd_barrier();
    }
}

/// A tile of products as scores' weights and slopes.
struct Scores {
    inner: Val<f32>,
    outer: Val<f32>,
    scale: Val<f32>,
    cap: Option<Val<f32>>,
    window: Option<Val<u32>>,
    slopes: Option<In>,
}

impl Scores {
    #[track_caller]
    fn new(extras: &Extras, scale: Val<f32>) -> Scores {
        let (inner, outer) = extras.scales(scale);
        let Extras { cap, window, slopes, .. } = *extras;
        Scores { inner, outer, scale, cap, window, slopes }
    }

    /// `exp(score - lse)`, zero where a query does not see a key; and `f'` of the score. `base` is
    /// `lse` in powers of two.
    fn weights(&self, products: Frag, base: Frag, seen: Frag) -> (Frag, Frag) {
        let (bounded, slope) = match self.cap {
            Some(_) => {
                let tanh = (products * Frag::filled(self.inner)).map(UnaryOp::Tanh);
                (tanh, (Frag::filled(1.0) - tanh * tanh) * Frag::filled(self.scale))
            }
            None => (products, Frag::filled(self.scale)),
        };
        let weights = (bounded * Frag::filled(self.outer) - base).map(UnaryOp::Exp2);
        (seen.select(weights, Frag::filled(0.0)), slope)
    }

    /// `base` plus the amounts by which the slope of a head lowers the scores of keys, by their rows
    /// in the sequence.
    #[track_caller]
    fn fall(&self, base: Frag, head: Val<u32>, queries: Frag, keys: Frag) -> Frag {
        let Some(slopes) = self.slopes else { return base };
        let slope = Frag::filled(slopes.get(head) * std::f32::consts::LOG2_E);
        base + (queries.cast(Scalar::F32) - keys.cast(Scalar::F32)) * slope
    }

    /// Whether queries see keys, by their rows in the sequence.
    fn seen(&self, queries: Frag, keys: Frag) -> Frag {
        let seen = keys.le(queries);
        match self.window {
            Some(window) => seen.and(queries.lt(keys + Frag::filled_u32(window.min(1u32 << 30)))),
            None => seen,
        }
    }
}

/// The first row of this threadgroup's sequence, and how many rows it has.
#[track_caller]
fn sequence(starts: In<u32>) -> (Val<u32>, Val<u32>) {
    let first = starts.get(group_id_of(2));
    (first, starts.get(group_id_of(2) + 1u32) - first)
}

/// `dq` of attention among packed rows; `starts` has the first row of each sequence, and the end.
#[kernel]
pub fn attend_tile_queries(
    q: In<{ scalar }>,
    k: In<{ scalar }>,
    v: In<{ scalar }>,
    lse: In<f32>,
    dy: In<{ scalar }>,
    along: In<f32>,
    starts: In<u32>,
    dq: Out<{ scalar }>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
) {
    let of = Operands { q, k, v, lse, dy, along, kv_heads, form };
    of.contract(dim("kv_heads") * form.group);
    require_aligned(&["dq"]);
    require_lengths(&[("dq", dim("tokens") * (dim("kv_heads") * form.group) * form.head_dim)]);
    let extras = form.extras();
    begin();
    let (first, count) = sequence(starts);
    // The last rows see the most keys: they go first.
    let offset = (groups(1) - 1u32 - group_id_of(1)) * ROWS;
    let scores = Scores::new(&extras, scale);
    when(Order::lt(offset, count), || queries(of, dq, scores, first, offset, count));
}

#[track_caller]
fn queries(
    of: Operands,
    dq: Out,
    scores: Scores,
    first: Val<u32>,
    offset: Val<u32>,
    count: Val<u32>,
) {
    let d = of.form.head_dim;
    let (left, heads) = (count - offset, of.kv_heads * of.form.group);
    let (wide, narrow) = (heads * d, of.kv_heads * d);
    let own = (first + offset) * wide + of.head() * d;
    let of_group = first * narrow + of.head() / of.form.group * d;
    let [rows, others, keys, values] = places(of);
    let query = rows.hold(of.q, own, wide, left);
    let cotangent = others.hold(of.dy, own, wide, left);
    let marks = Marks::new(ROWS);
    marks.bring(of, ROWS, (first + offset) * heads + of.head(), heads, left);
    barrier();
    let mine = simd_id() * 16u32;
    let base = marks.down(marks.base, mine);
    let along = marks.down(marks.along, mine);
    let (columns, step) = (of.columns(), step(d));
    let sums = Frags::accumulators(columns.count / 16, 0.0);
    let last = offset + left.min(ROWS);
    let oldest = match scores.window {
        Some(window) => offset + 1u32 - window.min(offset + 1u32),
        None => 0u32.val(),
    };
    range(oldest / step * step, last).step(step).each(|key| {
        barrier();
        keys.bring(step, of.k, of_group + key * narrow, narrow, last - key);
        values.bring(step, of.v, of_group + key * narrow, narrow, last - key);
        copy_commit();
        copy_wait(0);
        barrier();
        for j in 0..step / 16 {
            let row = Frag::row_numbers() + Frag::filled_u32(offset + mine);
            let column = Frag::col_numbers() + Frag::filled_u32(key + 16 * j);
            let seen = scores.seen(row, column);
            let products = keys.products(&query, 16 * j);
            let base = scores.fall(base, of.head(), row, column);
            let (weights, slope) = scores.weights(products, base, seen);
            let change = values.products(&cotangent, 16 * j) - along;
            let slopes = (weights * change * slope).to_left(rows.rows.scalar());
            keys.mix(sums, slopes, 16 * j, columns);
        }
    });
    barrier();
    rows.store(sums, (dq, own, wide), left, columns);
}

/// The places in shared memory of two operands of a threadgroup's rows, and of two of the other
/// side's. Where the former go to registers, all share their place.
fn places(of: Operands) -> [Staged; 4] {
    let d = of.form.head_dim;
    let rows = Shared::<f32>::stored(of.q.scalar(), "staging", staging(d));
    let (kept, step) = (kept(d), step(d));
    [0, kept / 2, kept, kept + step].map(|first| Staged {
        rows,
        at: first * (d + PAD),
        head_dim: d,
    })
}

/// `lse`, in powers of two, and `along` of some rows of a head, in shared memory.
#[derive(Clone, Copy)]
struct Marks {
    base: Shared,
    along: Shared,
}

impl Marks {
    fn new(count: u32) -> Marks {
        Marks { base: Shared::named("row_base", count), along: Shared::named("row_along", count) }
    }

    /// Copies the marks of `count` rows, `row` elements apart, from element `from` on; zeros from row
    /// `left` on.
    fn bring(self, of: Operands, count: u32, from: Val<u32>, row: Val<u32>, left: Val<u32>) {
        range(thread_id(), count).step(THREADS).each(|r| {
            let inside = Order::lt(r, left);
            let at = from + select(inside, r, 0u32) * row;
            let value = |array: In| select(inside, array.get(at), 0.0);
            self.base.set(r, value(of.lse) * std::f32::consts::LOG2_E);
            self.along.set(r, value(of.along));
        });
    }

    /// A tile each of whose rows is one of sixteen numbers.
    fn down(self, of: Shared, at: Val<u32>) -> Frag {
        Frag::accumulator_transposed(of, at, 0u32)
    }

    /// A tile each of whose columns is one of sixteen numbers.
    fn across(self, of: Shared, at: u32) -> Frag {
        Frag::accumulator(of, at, 0u32)
    }
}

/// `dk` and `dv` of attention among packed rows.
#[kernel]
pub fn attend_tile_keys(
    q: In<{ scalar }>,
    k: In<{ scalar }>,
    v: In<{ scalar }>,
    lse: In<f32>,
    dy: In<{ scalar }>,
    along: In<f32>,
    starts: In<u32>,
    dk: Out<{ scalar }>,
    dv: Out<{ scalar }>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
) {
    let of = Operands { q, k, v, lse, dy, along, kv_heads, form };
    of.contract(dim("kv_heads"));
    require_aligned(&["dk", "dv"]);
    let size = dim("tokens") * (dim("kv_heads") * form.head_dim);
    require_lengths(&[("dk", size.clone()), ("dv", size)]);
    let extras = form.extras();
    begin();
    let (first, count) = sequence(starts);
    // The first rows are seen by the most queries, and go first.
    let offset = group_id_of(1) * ROWS;
    let scores = Scores::new(&extras, scale);
    when(Order::lt(offset, count), || keys(of, [dk, dv], scores, first, offset, count));
}

#[track_caller]
fn keys(
    of: Operands,
    [dk, dv]: [Out; 2],
    scores: Scores,
    first: Val<u32>,
    offset: Val<u32>,
    count: Val<u32>,
) {
    let d = of.form.head_dim;
    let (left, heads) = (count - offset, of.kv_heads * of.form.group);
    let (wide, narrow) = (heads * d, of.kv_heads * d);
    let own = (first + offset) * narrow + of.head() * d;
    let [rows, others, queries, cotangents] = places(of);
    let key = rows.hold(of.k, own, narrow, left);
    let value = others.hold(of.v, own, narrow, left);
    let (columns, step) = (of.columns(), step(d));
    let marks = Marks::new(step);
    let mine = offset + simd_id() * 16u32;
    let [by_key, by_value] = [0, 1].map(|_| Frags::accumulators(columns.count / 16, 0.0));
    let end = match scores.window {
        Some(window) => count.min(offset + ROWS + window.min(1u32 << 30)),
        None => count,
    };
    range(0u32, of.form.group).each(|member| {
        let head = of.head() * of.form.group + member;
        let of_head = first * wide + head * d;
        range(offset / step * step, end).step(step).each(|row| {
            barrier();
            queries.bring(step, of.q, of_head + row * wide, wide, end - row);
            cotangents.bring(step, of.dy, of_head + row * wide, wide, end - row);
            copy_commit();
            marks.bring(of, step, (first + row) * heads + head, heads, end - row);
            copy_wait(0);
            barrier();
            for j in 0..step / 16 {
                let keys = Frag::row_numbers() + Frag::filled_u32(mine);
                let column = Frag::col_numbers() + Frag::filled_u32(row + 16 * j);
                let inside = column.lt(Frag::filled_u32(end));
                let seen = scores.seen(column, keys).and(inside);
                let base = marks.across(marks.base, 16 * j);
                let base = scores.fall(base, head, column, keys);
                let along = marks.across(marks.along, 16 * j);
                let products = queries.products(&key, 16 * j);
                let (weights, slope) = scores.weights(products, base, seen);
                let change = cotangents.products(&value, 16 * j) - along;
                let scalar = rows.rows.scalar();
                let slopes = (weights * change * slope).to_left(scalar);
                cotangents.mix(by_value, weights.to_left(scalar), 16 * j, columns);
                queries.mix(by_key, slopes, 16 * j, columns);
            }
        });
    });
    barrier();
    rows.store(by_key, (dk, own, narrow), left, columns);
    rows.store(by_value, (dv, own, narrow), left, columns);
}
