//! Kernels of attention among packed rows and of its gradients, for any type and head size: a
//! simdgroup for each query row of a head, and for each key row of a key/value head.
//!
//! A lane has every 32nd key (or query) and computes its score by itself; then all lanes take turns
//! over the 32, each with every 32nd element of a head. What a gradient adds up is added in one
//! order by one simdgroup, without atomics: `dq` over the keys that a query sees, `dk` and `dv`
//! over the query heads of the group, then over the queries that see the key.

use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::Attention;
use crate::attention::{AttentionForm, Extras};
use crate::gradient::products::sums_of_rows;
use crate::sweep::{begin, require_lengths, when};

/// Simdgroups of a threadgroup.
const SIMDS: u32 = 4;
/// A maximum over nothing: below any score.
const FLOOR: f32 = -1.0e30;

/// The form of the kernels of an attention's gradients: what a sink takes is in `lse` already.
pub fn backward_form(of: &Attention) -> AttentionForm {
    AttentionForm { sinks: false, ..form(of) }
}

/// The form of an attention's kernels.
pub fn form(of: &Attention) -> AttentionForm {
    // All positions are chosen where texts are trained.
    AttentionForm { chosen: false, ..AttentionForm::of(of, false) }
}

/// The numbers of a launch for `tokens` tokens.
pub fn numbers(of: &Attention, tokens: usize) -> Numbers {
    let mut numbers = Numbers::new()
        .with("tokens", tokens as u32)
        .with("kv_heads", of.kv_heads as u32)
        .with_f32("scale", of.scale);
    if let Some(window) = of.window {
        numbers.set("window", window.min(1 << 30) as u32);
    }
    match of.cap {
        Some(cap) => numbers.with_f32("cap", cap),
        None => numbers,
    }
}

/// A row of a head, element by element: a lane has every 32nd.
#[derive(Clone, Copy)]
struct Head {
    rows: In,
    /// Heads of a row.
    heads: Val<u32>,
    head: Val<u32>,
    head_dim: u32,
}

impl Head {
    #[track_caller]
    fn first(self, row: Val<u32>) -> Val<u32> {
        (row * self.heads + self.head) * self.head_dim
    }

    /// The dot product of one of its rows with a row of another.
    #[track_caller]
    fn dot(self, row: Val<u32>, other: Head, of: Val<u32>) -> Val<f32> {
        let (a, b) = (self.first(row), other.first(of));
        let sum = Var::new(0.0);
        range(0u32, self.head_dim).each(|i| {
            sum.set(self.rows.get(a + i).fma(other.rows.get(b + i), sum.get()));
        });
        sum.get()
    }

    /// The lane's elements of a row.
    #[track_caller]
    fn lane(self, row: Val<u32>) -> Vec<Val<f32>> {
        let first = self.first(row);
        let mut values = Vec::new();
        for part in 0..self.head_dim.div_ceil(32) {
            // Lanes beyond the head have its last element, and keep nothing.
            let i = (lane_id() + 32 * part).min(self.head_dim - 1);
            values.push(self.rows.get(first + i));
        }
        values
    }

    /// Registers for a lane's elements of a row.
    #[track_caller]
    fn sums(self) -> Regs<f32> {
        Regs::new(self.head_dim.div_ceil(32), 0.0)
    }

    /// `sums += by` times the lane's elements of a row.
    #[track_caller]
    fn add(self, sums: Regs<f32>, by: Val<f32>, row: Val<u32>) {
        for (i, value) in (0..).zip(self.lane(row)) {
            sums.set(i, by.fma(value, sums.get(i)));
        }
    }

    /// Writes the lane's elements of a row that looks as these do.
    #[track_caller]
    fn store(self, to: Out, row: Val<u32>, values: impl Fn(u32) -> Val<f32>) {
        let first = self.first(row);
        for part in 0..self.head_dim.div_ceil(32) {
            let i = lane_id() + 32 * part;
            when(Order::lt(i, self.head_dim), || to.set(first + i, values(part)));
        }
    }
}

/// The buffers and constants that all kernels have.
struct Layer {
    scale: Val<f32>,
    window: Option<Val<u32>>,
    chunked: bool,
    cap: Option<Val<f32>>,
    slopes: Option<In>,
}

impl Layer {
    fn new(extras: &Extras, scale: Val<f32>) -> Layer {
        let Extras { window, chunked, cap, slopes, .. } = *extras;
        Layer { scale, window, chunked, cap, slopes }
    }

    /// A score of a product `q . k`.
    #[track_caller]
    fn score(&self, product: Val<f32>) -> Val<f32> {
        match self.cap {
            Some(cap) => (product * self.scale / cap).tanh() * cap,
            None => product * self.scale,
        }
    }

    /// The score of a key for a query, rows of one sequence, behind what its head's slope takes.
    #[track_caller]
    fn fallen(&self, score: Val<f32>, head: Val<u32>, query: Val<u32>, key: Val<u32>) -> Val<f32> {
        match self.slopes {
            Some(slopes) => score - slopes.get(head) * (query.f32() - key.f32()),
            None => score,
        }
    }

    /// The derivative of a score with respect to the product.
    #[track_caller]
    fn slope(&self, score: Val<f32>) -> Val<f32> {
        match self.cap {
            Some(cap) => self.scale * (1.0 - (score / cap) * (score / cap)),
            None => self.scale,
        }
    }

    /// The first row that a query sees, in a sequence that begins at `first`.
    #[track_caller]
    fn oldest(&self, first: Val<u32>, row: Val<u32>) -> Val<u32> {
        match self.window {
            Some(chunk) if self.chunked => first + (row - first) / chunk * chunk,
            Some(window) => first.max(row + 1u32 - window.min(row + 1u32)),
            None => first,
        }
    }

    /// The row behind the last that sees a key, in a sequence that begins at `first`, if it is in
    /// chunks, and ends before `end`.
    #[track_caller]
    fn end(&self, first: Option<Val<u32>>, row: Val<u32>, end: Val<u32>) -> Val<u32> {
        match (self.window, first) {
            (Some(chunk), Some(first)) => end.min(first + ((row - first) / chunk + 1u32) * chunk),
            (Some(window), None) => end.min(row + window),
            (None, _) => end,
        }
    }
}

/// The work of a simdgroup: one row and one of its heads.
struct Own {
    row: Val<u32>,
    head: Val<u32>,
    live: Val<bool>,
}

impl Own {
    /// States the launch: a simdgroup for each of `heads` heads of every token.
    #[track_caller]
    fn launch(tokens: Val<u32>, heads: Val<u32>, all: tile::launch::Extent) -> Own {
        launch(Mode::Row, [(dim("tokens") * all).ceil_div(SIMDS), fixed(1), fixed(1)], 32 * SIMDS);
        let item = group_id() * SIMDS + simd_id();
        // Past the last they repeat it, and keep nothing.
        let last = tokens * heads - 1u32;
        let (live, item) = (Order::le(item, last), item.min(last));
        Own { row: item / heads, head: item % heads, live }
    }
}

fn lengths(form: AttentionForm, wide: &[&str], narrow: &[&str]) {
    let row = |heads: tile::launch::Extent| dim("tokens") * heads * form.head_dim;
    let heads = || dim("kv_heads") * form.group;
    wide.iter().for_each(|name| require_lengths(&[(*name, row(heads()))]));
    narrow.iter().for_each(|name| require_lengths(&[(*name, row(dim("kv_heads")))]));
    require_lengths(&[("lse", dim("tokens") * heads())]);
}

/// Attends each row of `q` `[tokens, kv_heads * group, head_dim]` to the rows of its sequence up to
/// itself; `first` has the first row of each row's sequence. `lse` is the logarithm of each
/// softmax's denominator.
#[kernel]
pub fn attend(
    q: In<{ scalar }>,
    k: In<{ scalar }>,
    v: In<{ scalar }>,
    first: In<u32>,
    y: Out<{ scalar }>,
    lse: Out<f32>,
    tokens: Arg<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
) {
    lengths(form, &["q", "y"], &["k", "v"]);
    require_lengths(&[("first", dim("tokens"))]);
    let extras = form.extras();
    let layer = Layer::new(&extras, scale);
    let heads = kv_heads * form.group;
    let own = Own::launch(tokens, heads, dim("kv_heads") * form.group);
    begin();
    let of = |rows, heads, head| Head { rows, heads, head, head_dim: form.head_dim };
    let query = of(q, heads, own.head);
    let group = own.head / form.group;
    let (keys, values) = (of(k, kv_heads, group), of(v, kv_heads, group));
    let oldest = layer.oldest(first.get(own.row), own.row);
    let (top, sum) = match extras.sinks {
        Some(sinks) => (Var::new(sinks.get(own.head)), Var::new(1.0f32)),
        None => (Var::new(FLOOR), Var::new(0.0f32)),
    };
    let mixed = query.sums();
    range(oldest, own.row + 1u32).step(32u32).each(|start| {
        let key = start + lane_id();
        let seen = Order::le(key, own.row);
        let product = query.dot(own.row, keys, key.min(own.row));
        let score = layer.fallen(layer.score(product), own.head, own.row, key);
        let score = select(seen, score, FLOOR);
        let highest = top.get().max(simd_max(score));
        let weight = select(seen, (score - highest).exp(), 0.0);
        let decay = (top.get() - highest).exp();
        top.set(highest);
        sum.set(sum.get() * decay + simd_sum(weight));
        (0..mixed.len()).for_each(|i| mixed.set(i, mixed.get(i) * decay));
        let count = (own.row + 1u32 - start).min(32u32);
        range(0u32, count).each(|j| values.add(mixed, shuffle(weight, j), start + j));
    });
    let share = 1.0f32 / sum.get();
    when(own.live, || {
        query.store(y, own.row, |i| mixed.get(i) * share);
        when(Order::eq(lane_id(), 0u32), || {
            lse.set(own.row * heads + own.head, top.get() + sum.get().ln());
        });
    });
}

/// `dq` of [`attend`], and `along[tokens, heads] = dy . y`, which [`attend_keys`] is given.
#[kernel]
pub fn attend_queries(
    q: In<{ scalar }>,
    k: In<{ scalar }>,
    v: In<{ scalar }>,
    y: In<{ scalar }>,
    lse: In<f32>,
    dy: In<{ scalar }>,
    first: In<u32>,
    dq: Out<{ scalar }>,
    along: Out<f32>,
    tokens: Arg<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
) {
    lengths(form, &["q", "y", "dy", "dq"], &["k", "v"]);
    let all = dim("tokens") * dim("kv_heads") * form.group;
    require_lengths(&[("first", dim("tokens")), ("along", all)]);
    let extras = form.extras();
    let layer = Layer::new(&extras, scale);
    let heads = kv_heads * form.group;
    let own = Own::launch(tokens, heads, dim("kv_heads") * form.group);
    begin();
    let of = |rows, heads, head| Head { rows, heads, head, head_dim: form.head_dim };
    let (query, cotangent) = (of(q, heads, own.head), of(dy, heads, own.head));
    let group = own.head / form.group;
    let (keys, values) = (of(k, kv_heads, group), of(v, kv_heads, group));
    let oldest = layer.oldest(first.get(own.row), own.row);
    let place = own.row * heads + own.head;
    let (base, along_row) =
        (lse.get(place), cotangent.dot(own.row, of(y, heads, own.head), own.row));
    let sums = query.sums();
    range(oldest, own.row + 1u32).step(32u32).each(|start| {
        let key = start + lane_id();
        let (seen, key) = (Order::le(key, own.row), key.min(own.row));
        let score = layer.score(query.dot(own.row, keys, key));
        let weight = (layer.fallen(score, own.head, own.row, key) - base).exp();
        let change = cotangent.dot(own.row, values, key) - along_row;
        let slope = select(seen, weight * change * layer.slope(score), 0.0);
        let count = (own.row + 1u32 - start).min(32u32);
        range(0u32, count).each(|j| keys.add(sums, shuffle(slope, j), start + j));
    });
    when(own.live, || {
        query.store(dq, own.row, |i| sums.get(i));
        when(Order::eq(lane_id(), 0u32), || along.set(place, along_row));
    });
}

/// `dk` and `dv` of [`attend`]; `ends` has the row behind the last of each row's sequence. With
/// chunks the buffer `first` follows, as [`attend`] has it.
#[kernel]
pub fn attend_keys(
    q: In<{ scalar }>,
    k: In<{ scalar }>,
    v: In<{ scalar }>,
    lse: In<f32>,
    dy: In<{ scalar }>,
    along: In<f32>,
    ends: In<u32>,
    dk: Out<{ scalar }>,
    dv: Out<{ scalar }>,
    tokens: Arg<u32>,
    kv_heads: Const<u32>,
    scale: Const<f32>,
    scalar: Scalar,
    form: AttentionForm,
) {
    lengths(form, &["q", "dy"], &["k", "v", "dk", "dv"]);
    let all = dim("tokens") * dim("kv_heads") * form.group;
    require_lengths(&[("ends", dim("tokens")), ("along", all)]);
    let extras = form.extras();
    let layer = Layer::new(&extras, scale);
    let heads = kv_heads * form.group;
    let firsts = extras.chunked.then(|| {
        require_lengths(&[("first", dim("tokens"))]);
        In::<u32>::declare("first")
    });
    let own = Own::launch(tokens, kv_heads, dim("kv_heads"));
    begin();
    let of = |rows, heads, head| Head { rows, heads, head, head_dim: form.head_dim };
    let (keys, values) = (of(k, kv_heads, own.head), of(v, kv_heads, own.head));
    let first = firsts.map(|firsts| firsts.get(own.row));
    let end = layer.end(first, own.row, ends.get(own.row));
    let (by_key, by_value) = (keys.sums(), values.sums());
    range(0u32, form.group).each(|member| {
        let head = own.head * form.group + member;
        let (query, cotangent) = (of(q, heads, head), of(dy, heads, head));
        range(own.row, end).step(32u32).each(|start| {
            let row = start + lane_id();
            let (sees, row) = (Order::lt(row, end), row.min(end - 1u32));
            let score = layer.score(query.dot(row, keys, own.row));
            let place = row * heads + head;
            let fallen = layer.fallen(score, head, row, own.row);
            let weight = select(sees, (fallen - lse.get(place)).exp(), 0.0);
            let change = cotangent.dot(row, values, own.row) - along.get(place);
            let slope = weight * change * layer.slope(score);
            let count = (end - start).min(32u32);
            range(0u32, count).each(|j| {
                query.add(by_key, shuffle(slope, j), start + j);
                cotangent.add(by_value, shuffle(weight, j), start + j);
            });
        });
    });
    when(own.live, || {
        keys.store(dk, own.row, |i| by_key.get(i));
        values.store(dv, own.row, |i| by_value.get(i));
    });
}

/// The gradient of sinks, `y[h] = -sum_t exp(sinks[h] - lse[t, h]) along[t, h]`, on the device, in
/// an order that follows from the number of rows alone: `width` heads, `along` as
/// [`attend_queries`] gives it.
#[kernel]
pub fn attend_sinks(
    sinks: In<f32>,
    lse: In<f32>,
    along: In<f32>,
    y: Out<f32>,
    rows: Arg<u32>,
    width: Arg<u32>,
) {
    require_lengths(&[("sinks", dim("width"))]);
    let term = |row: Val<u32>, at: Val<u32>| {
        let share = (sinks.get(at - row * width) - lse.get(at)).exp();
        -(share * along.get(at))
    };
    sums_of_rows(&["lse", "along"], (y, None), [rows, width], term);
}
