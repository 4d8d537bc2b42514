//! Kernels of gated delta nets over packed sequences, and of their gradients, without atomics.
//!
//! With `c = beta u` the changes that a row writes, a head's matrix `S` and the gradient `D` of the
//! matrix behind a row go from row to row, in the order of rows and in reverse:
//!
//! ```text
//! u = v - g k S,  S := g S + k c          for each column of S by itself
//! D := D + q dy,  dv = beta k D,  D := g (D - k dv)    for each column of D by itself
//! ```
//!
//! so that columns are spread over lanes and threadgroups, whose sums are over keys alone
//! ([`delta_states`]). Once all `u` and `dv` are known, neither needs a sum, and the gradients of
//! queries and keys are sums over columns. [`delta_slopes`] therefore goes the same ways with the
//! rows of `S` and `D` spread instead, through all blocks of the batch's rows at once: the first
//! kernel leaves `S` in front of each block and `D` behind it.
//!
//! ```text
//! of q: S dy,  of k: D c - g S dv
//! ```
//!
//! The gradients of gates need no matrices. `S / G`, where `G` is the product of all gates up to a
//! row, depends on gates through `v / G` alone, so that the gradient of `ln g` is the sum of
//! `y dy - v dv` over the row and all behind it in the sequence ([`delta_gates`]). The rows behind
//! a block add up to `<D, S>` at its end; sums begin there, so that what rounding leaves of terms
//! that cancel does not grow with the sequence. [`delta_operands`] adds up the heads that share a
//! key, and goes back through the lengths of queries and keys.
//!
//! Where each element of a key forgets at a rate of its own, `G` is a vector, and rows of `S` and
//! `D` stay as far apart as elements are: the gradient of an element's `ln g` is the sum of what
//! the query's element has of `y dy` and the key's of `v dv`, which [`delta_slopes`] has in hand,
//! so that it needs no kernel more.

use tile::dsl::*;
use tile::launch::{Extent, Mode, Numbers};

use crate::delta_net::{Correction, DeltaNet, Kept, LENGTH_EPS};
use crate::gradient::matrices::{Lane, PackedForm, blocks, heads, key_head};
use crate::gradient::products::sums_of_rows;
use crate::math::{sigmoid, softplus};
use crate::recurrence::{over_keys, products};
use crate::states::each_row;
use crate::sweep::{begin, load, require_lengths, require_vectors, when};
use formats::Result;

/// Simdgroups of a threadgroup of kernels that have no matrix.
const SIMDS: u32 = 4;
/// Threads of a threadgroup of [`delta_gates`], each with a head of a block.
const GATES: u32 = 64;

/// The form in which lanes have columns of a net's matrices, or rows if `turned`.
///
/// # Errors
/// Keys or values that do not fit a simdgroup's registers.
pub fn form(of: &DeltaNet, turned: bool) -> Result<PackedForm> {
    let sizes = [("keys", of.key_dim), ("values", of.value_dim)];
    let form = PackedForm::new("delta_net", sizes, of.width(), turned)?;
    let DeltaNet { tiled, doubled, by_element, key_dim, .. } = *of;
    // Beside as many factors as elements of a long key, registers have room for one column.
    let wide = if by_element && !turned && key_dim > 128 { 1 } else { form.wide };
    Ok(PackedForm { tiled, doubled, by_element, wide, ..form })
}

/// Elements of the queries, keys and values of all rows.
fn inputs(form: PackedForm) -> Extent {
    dim("tokens") * (dim("key_heads") * (2 * form.key_dim) + dim("heads") * form.value_dim)
}

/// The buffer of the logarithms of factors, `a[tokens, heads, key_dim]`, in kernels of nets each
/// element of whose keys has its own.
#[track_caller]
fn own_gates(form: PackedForm, scalar: Scalar) -> Option<In> {
    form.by_element.then(|| {
        require_vectors(&[("a", heads() * form.key_dim)]);
        <In>::stored("a", scalar)
    })
}

/// The numbers of all launches: rows, sequences, and rows of a block.
pub fn numbers(of: &DeltaNet, tokens: usize, sequences: usize, block: usize) -> Numbers {
    let counts = [("tokens", tokens), ("batch", sequences), ("block", block)];
    let sizes = [("heads", of.heads), ("key_heads", of.key_heads)];
    let all = counts.into_iter().chain(sizes);
    all.fold(Numbers::new(), |numbers, (name, n)| numbers.with(name, n as u32))
}

/// Where a row begins in `qkv`, and its keys and values behind that.
#[track_caller]
fn row_starts(
    [key_dim, value_dim]: [u32; 2],
    row: Val<u32>,
    [heads, key_heads]: [Val<u32>; 2],
) -> [Val<u32>; 3] {
    let keys = key_heads * key_dim;
    let first = row * (keys * 2u32 + heads * value_dim);
    [first, first + keys, first + keys * 2u32]
}

/// A row's numbers, of one head.
#[derive(Clone, Copy)]
struct Rates {
    /// Factors of a query and a key.
    q: Val<f32>,
    k: Val<f32>,
    /// The factor by which the matrix decays, and the strength of the correction.
    gate: Val<f32>,
    beta: Val<f32>,
}

impl Rates {
    /// Those of a head of a row: `at = row * heads + head`.
    #[track_caller]
    fn get(rates: In, at: Val<u32>) -> Rates {
        Rates::split(&load(rates, at * 4u32, 4)).0
    }

    /// Those in front of other values.
    fn split(values: &[Val<f32>]) -> (Rates, &[Val<f32>]) {
        let (own, rest) = values.split_at(4);
        (Rates { q: own[0], k: own[1], gate: own[2], beta: own[3] }, rest)
    }
}

/// Numbers of a row and a head that later kernels need, `rates[tokens, heads, 4]`: what its query
/// is multiplied with, its length and the root of its number of elements included; the same of its
/// key; the factor by which the row decays the matrix, 1 where elements have their own; and the
/// strength of its correction. Where heads have one factor, it also reads `a[tokens, heads]` and
/// the weights `decay[heads]` and `dt[heads]`.
#[kernel]
pub fn delta_rates(
    qkv: In<{ scalar }>,
    b: In<{ scalar }>,
    rates: Out<f32>,
    tokens: Arg<u32>,
    heads: Const<u32>,
    key_heads: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let gates = self::heads();
    let forgetting = (!form.by_element).then(|| {
        let lengths = [("a", gates.clone()), ("decay", dim("heads")), ("dt", dim("heads"))];
        require_lengths(&lengths);
        (<In>::stored("a", scalar), ["decay", "dt"].map(<In>::declare))
    });
    launch(Mode::Row, [self::heads().ceil_div(SIMDS), fixed(1), fixed(1)], 32 * SIMDS);
    require_lengths(&[("b", gates.clone())]);
    require_vectors(&[("qkv", inputs(form)), ("rates", gates * 4)]);
    begin();
    // Past the last they repeat it, and keep nothing.
    let (item, last) = (group_id() * SIMDS + simd_id(), tokens * heads - 1u32);
    let (live, item) = (Order::le(item, last), item.min(last));
    let (row, head, sizes) = (item / heads, item % heads, [heads, key_heads]);
    let of = key_head(form.tiled, head, sizes) * form.key_dim;
    let starts = row_starts([form.key_dim, form.value_dim], row, sizes);
    let [q, k] = [0, 1].map(|part| {
        let sum = Var::new(0.0);
        range(lane_id(), form.key_dim).step(32u32).each(|i| {
            let x = qkv.get(starts[part] + of + i);
            sum.set(x.fma(x, sum.get()));
        });
        (simd_sum(sum.get()) + LENGTH_EPS).rsqrt()
    });
    let gate = forgetting.map_or(1.0f32.val(), |(a, [decay, dt])| {
        (decay.get(head) * softplus(a.get(item) + dt.get(head))).exp()
    });
    let strength = sigmoid(b.get(item));
    let strength = if form.doubled { strength * 2.0 } else { strength };
    let values = [q * (1.0 / (form.key_dim as f32).sqrt()), k, gate, strength];
    when(live & Order::eq(lane_id(), 0u32), || rates.set_vec(item * 4u32, &values));
}

/// Where the query, key and value of a lane's head begin in `qkv`.
#[track_caller]
fn lane_starts(lane: &Lane, key_heads: Val<u32>, row: Val<u32>) -> [Val<u32>; 3] {
    let PackedForm { key_dim, value_dim, tiled, .. } = lane.form;
    let sizes = [lane.heads, key_heads];
    let [q, k, v] = row_starts([key_dim, value_dim], row, sizes);
    let of = key_head(tiled, lane.head, sizes) * key_dim;
    [q + of, k + of, v + lane.head * value_dim]
}

/// The rows of a sequence, as a kernel reads them that has columns of a head's matrix.
#[derive(Clone, Copy)]
struct Rows {
    lane: Lane,
    key_heads: Val<u32>,
    qkv: In,
    rates: In,
    /// See [`own_gates`].
    gates: Option<In>,
    first: Val<u32>,
    end: Val<u32>,
}

/// A row: its numbers, and the lane's elements of its key, of its query if it is read, of its value
/// or of the gradient of its output, and of its factors.
struct Row {
    rates: Rates,
    key: Vec<Val<f32>>,
    query: Vec<Val<f32>>,
    own: Vec<Val<f32>>,
    /// The factors of the lane's elements, where each has its own.
    gates: Vec<Val<f32>>,
}

impl Rows {
    /// Those of the sequence of this number.
    #[track_caller]
    fn new(
        (lane, key_heads): (Lane, Val<u32>),
        ([qkv, rates], gates): ([In; 2], Option<In>),
        starts: In<u32>,
        sequence: Val<u32>,
    ) -> Rows {
        let (first, end) = (starts.get(sequence), starts.get(sequence + 1u32));
        Rows { lane, key_heads, qkv, rates, gates, first, end }
    }

    /// Calls `body` with each row, the last first if there are gradients of outputs, `dy`.
    #[track_caller]
    fn each(&self, queries: bool, dy: Option<In>, body: impl Fn(Val<u32>, Row)) {
        let &Rows { lane, key_heads, qkv, rates, gates, first, end } = self;
        let share = lane.form.share();
        let (own, wide) = (share.own() as usize, usize::from(lane.form.wide));
        let read = if queries { own } else { 0 };
        let ask = |row| {
            let [q, k, v] = lane_starts(&lane, key_heads, row);
            let mut found = load(rates, lane.item(row) * 4u32, 4);
            found.extend(share.load(qkv, k));
            if queries {
                found.extend(share.load(qkv, q));
            }
            found.extend(match dy {
                Some(dy) => lane.own(dy, lane.item(row) * lane.form.value_dim),
                None => lane.own(qkv, v),
            });
            if let Some(gates) = gates {
                found.extend(share.load(gates, lane.item(row) * lane.form.key_dim));
            }
            found
        };
        let factors = if gates.is_some() { own } else { 0 };
        let count = (4 + own + read + wide + factors) as u32;
        let each = |row: Val<u32>, values: &[Val<f32>]| {
            let (rates, rest) = Rates::split(values);
            let (key, rest) = rest.split_at(own);
            let (query, rest) = rest.split_at(read);
            let (own, gates) = rest.split_at(wide);
            let [key, query, own] = [key, query, own].map(<[Val<f32>]>::to_vec);
            let gates = gates.iter().map(|a| a.exp()).collect();
            body(row, Row { rates, key, query, own, gates });
        };
        let some = Order::lt(first, end);
        when(some, || each_row([first, end], dy.is_some(), count, ask, each));
    }

    /// Writes the lane's columns of a row of values.
    #[track_caller]
    fn put(&self, y: impl Elements<f32>, row: Val<u32>, values: &[Val<f32>]) {
        self.lane.put(y, self.lane.item(row) * self.lane.form.value_dim, values);
    }
}

impl Row {
    /// Moves a head's matrix from in front of the row to behind it; gives by how much it missed the
    /// row's value.
    #[track_caller]
    fn advance(&self, matrix: Regs) -> Vec<Val<f32>> {
        let Rates { k, gate, beta, .. } = self.rates;
        let (kept, left) = match &self.gates[..] {
            [] => (Kept::Together(gate), gate * k),
            gates => (Kept::ByElement(gates), k),
        };
        let correction = Correction { kept, left, written: beta * k };
        correction.apply(matrix, &self.key, &self.own)
    }

    /// Moves the gradient of a head's matrix from behind the row to the front of it; gives the
    /// gradient of the row's value.
    #[track_caller]
    fn reverse(&self, slopes: Regs) -> Vec<Val<f32>> {
        let Rates { q, k, gate, beta } = self.rates;
        let wide = self.own.len() as u32;
        let dy: Vec<Val<f32>> = self.own.iter().map(|&dy| dy * q).collect();
        for (i, &query) in (0u32..).zip(&self.query) {
            for (at, &dy) in (i * wide..).zip(&dy) {
                slopes.set(at, query.fma(dy, slopes.get(at)));
            }
        }
        let written = beta * k;
        let of_value: Vec<Val<f32>> =
            products(slopes, &self.key, wide).into_iter().map(|of| of * written).collect();
        for (i, &key) in (0u32..).zip(&self.key) {
            let gate = self.gates.get(i as usize).copied().unwrap_or(gate);
            for (at, &of) in (i * wide..).zip(&of_value) {
                slopes.set(at, (slopes.get(at) - key * (of * k)) * gate);
            }
        }
        of_value
    }
}

/// The gated delta net of each sequence, `qkv[tokens, width] -> y[tokens, heads * value_dim]`;
/// `rates` as [`delta_rates`] gives them. Sequences begin at `starts[batch + 1]`, whose last is the
/// end. A threadgroup has some columns of a head's matrix in registers while the rows of a sequence
/// pass. Where elements of keys have factors of their own, it also reads
/// `a[tokens, heads, key_dim]`.
#[kernel]
pub fn packed_delta(
    qkv: In<{ scalar }>,
    rates: In<f32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    heads: Const<u32>,
    key_heads: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let gates = own_gates(form, scalar);
    form.launch([dim("heads"), dim("batch")]);
    require_vectors(&[("qkv", inputs(form)), ("rates", self::heads() * 4), ("y", form.values())]);
    require_lengths(&[("starts", dim("batch") + 1)]);
    begin();
    let lane = Lane::new(form, heads);
    let rows = Rows::new((lane, key_heads), ([qkv, rates], gates), starts, group_id_of(2));
    let matrix = Regs::new(form.registers(), 0.0);
    rows.each(true, None, |number, row| {
        row.advance(matrix);
        let answers = products(matrix, &row.query, u32::from(form.wide)).into_iter();
        rows.put(y, number, &answers.map(|answer| answer * row.rates.q).collect::<Vec<Val<f32>>>());
    });
}

/// Both recurrences of a gradient, side by side: by how much the matrices in front of rows missed
/// their values, `misses[tokens, heads * value_dim]`, and the gradients of values, `dv`, from those
/// of outputs, `dy`. Besides, `before[blocks, heads, key_dim, value_dim]` are the matrices in front
/// of each block of rows that does not begin a sequence, and `behind` the gradients of those behind
/// each block that does not end one. The rest as in [`packed_delta`].
#[kernel]
pub fn delta_states(
    qkv: In<{ scalar }>,
    rates: In<f32>,
    dy: In<{ scalar }>,
    starts: In<u32>,
    misses: Out<f32>,
    before: Out<f32>,
    dv: Out<f32>,
    behind: Out<f32>,
    batch: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    key_heads: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let gates = own_gates(form, scalar);
    form.launch([dim("heads"), dim("batch") * 2]);
    require_vectors(&[
        ("qkv", inputs(form)),
        ("rates", self::heads() * 4),
        ("dy", form.values()),
        ("misses", form.values()),
        ("before", form.matrices()),
        ("dv", form.values()),
        ("behind", form.matrices()),
    ]);
    require_lengths(&[("starts", dim("batch") + 1)]);
    begin();
    let lane = Lane::new(form, heads);
    let forward = Order::lt(group_id_of(2), batch);
    let sequence = select(forward, group_id_of(2), group_id_of(2) - batch);
    let rows = Rows::new((lane, key_heads), ([qkv, rates], gates), starts, sequence);
    let matrix = Regs::new(form.registers(), 0.0);
    let there = || {
        rows.each(false, None, |number, row| {
            let new = Order::eq(number % block, 0u32) & Order::gt(number, rows.first);
            when(new, || lane.leave(matrix, before, number / block));
            rows.put(misses, number, &row.advance(matrix));
        });
    };
    let back = || {
        rows.each(true, Some(dy), |number, row| {
            let next = number + 1u32;
            let last = Order::eq(next % block, 0u32) & Order::lt(next, rows.end);
            when(last, || lane.leave(matrix, behind, number / block));
            rows.put(dv, number, &row.reverse(matrix));
        });
    };
    test(forward).then(there).otherwise(back);
}

/// The gradients of each head's query and key, both as they were multiplied with `rates`,
/// `slopes[tokens, heads, 2, key_dim]`. `misses`, `before`, `dv` and `behind` are what
/// [`delta_states`] gave. A threadgroup keeps some rows of a head's matrices while the rows of a
/// block pass, forward and back. `form` is turned.
///
/// Besides, where heads have one factor, `along[blocks, key_dim, heads]`, the parts of `<D, S>`
/// behind each block of rows, zeros where a sequence ends there; where elements have their own,
/// from these the gradients of their logarithms, `da[tokens, heads, key_dim]`.
#[kernel]
pub fn delta_slopes(
    qkv: In<{ scalar }>,
    rates: In<f32>,
    misses: In<f32>,
    dy: In<{ scalar }>,
    dv: In<f32>,
    positions: In<u32>,
    before: In<f32>,
    behind: In<f32>,
    slopes: InOut<f32>,
    tokens: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    key_heads: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let along = (!form.by_element).then(|| {
        require_lengths(&[("along", blocks() * form.key_dim)]);
        <Out>::declare("along")
    });
    let own_gates = own_gates(form, scalar).map(|a| {
        require_vectors(&[("da", self::heads() * form.key_dim)]);
        (a, <Out>::stored("da", scalar))
    });
    form.launch([dim("heads"), dim("tokens").ceil_div(dim("block"))]);
    require_vectors(&[
        ("qkv", inputs(form)),
        ("rates", self::heads() * 4),
        ("misses", form.values()),
        ("dy", form.values()),
        ("dv", form.values()),
        ("before", form.matrices()),
        ("behind", form.matrices()),
        ("slopes", self::heads() * (2 * form.key_dim)),
    ]);
    require_lengths(&[("positions", dim("tokens"))]);
    begin();
    let lane = Lane::new(form, heads);
    let (share, wide, number) = (form.share(), u32::from(form.wide), group_id_of(2));
    let (start, end) = (number * block, (number * block + block).min(tokens));
    let values = |x: In, row| share.load(x, lane.item(row) * form.value_dim);
    // A sequence begins with zeros, and the gradient in front of it is nobody's.
    let first = |row| Order::eq(positions.get(row), 0u32);
    let factors = |rates: Rates, row| -> Vec<Val<f32>> {
        let first = first(row);
        match own_gates {
            None => vec![select(first, 0.0, rates.gate); wide as usize],
            Some((a, _)) => lane
                .own(a, lane.item(row) * form.key_dim)
                .into_iter()
                .map(|a| select(first, 0.0, a.exp()))
                .collect(),
        }
    };
    let place = |row: Val<u32>, part: u32| (lane.item(row) * 2u32 + part) * form.key_dim;

    let matrix = Regs::new(form.registers(), 0.0);
    when(Order::gt(positions.get(start), 0u32), || lane.take_up(matrix, before, number));
    range(start, end).each(|row| {
        let rates = Rates::get(rates, lane.item(row));
        let keys = lane.own(qkv, lane_starts(&lane, key_heads, row)[1]);
        let gates = factors(rates, row);
        (0..matrix.len()).for_each(|i| matrix.set(i, matrix.get(i) * gates[(i % wide) as usize]));
        let kept = products(matrix, &values(dv, row), wide);
        let written = rates.beta * rates.k;
        for (i, miss) in (0u32..).zip(values(misses, row)) {
            for (at, &key) in (i * wide..).zip(&keys) {
                matrix.set(at, miss.fma(key * written, matrix.get(at)));
            }
        }
        let answers = products(matrix, &values(dy, row), wide);
        lane.put(slopes, place(row, 0), &answers);
        let kept: Vec<Val<f32>> = kept.into_iter().map(|kept| -kept).collect();
        lane.put(slopes, place(row, 1), &kept);
    });

    let change = Regs::new(form.registers(), 0.0);
    let goes_on = Order::lt(end, tokens) & Order::gt(positions.get(end.min(tokens - 1u32)), 0u32);
    when(goes_on, || lane.take_up(change, behind, number));
    let sums: Vec<Val<f32>> = (0..wide)
        .map(|own| {
            let each = (0..share.own()).map(|i| i * wide + own);
            let sum = each.fold(0.0f32.val(), |sum, i| matrix.get(i).fma(change.get(i), sum));
            over_keys(sum)
        })
        .collect();
    if let Some(along) = along {
        lane.once(|| {
            for (own, &sum) in (0u32..).zip(&sums) {
                let key = number * form.key_dim + lane.first + own;
                along.set(key * heads + lane.head, sum);
            }
        });
    }
    let of_gates =
        own_gates.map(|(_, da)| (da, sums.into_iter().map(Var::new).collect::<Vec<_>>()));
    range(start, end).each(|turn| {
        let row = end - 1u32 - (turn - start);
        let rates = Rates::get(rates, lane.item(row));
        let [q, k, _] = lane_starts(&lane, key_heads, row);
        let (queries, keys) = (lane.own(qkv, q), lane.own(qkv, k));
        for (i, dy) in (0u32..).zip(values(dy, row)) {
            for (at, &query) in (i * wide..).zip(&queries) {
                change.set(at, dy.fma(query * rates.q, change.get(at)));
            }
        }
        let found = products(change, &values(misses, row), wide);
        let gates = factors(rates, row);
        for (i, dv) in (0u32..).zip(values(dv, row)) {
            for ((at, &key), &gate) in (i * wide..).zip(&keys).zip(&gates) {
                change.set(at, (change.get(at) - dv * (key * rates.k)) * gate);
            }
        }
        lane.once(|| {
            let at = place(row, 1) + lane.first;
            let kept = load(slopes, at, form.wide);
            let all = found.iter().zip(&kept).map(|(&found, &kept)| found.fma(rates.beta, kept));
            slopes.set_vec(at, &all.collect::<Vec<Val<f32>>>());
            if let Some((da, sums)) = &of_gates {
                let of_query = load(slopes, place(row, 0) + lane.first, form.wide);
                for (own, sum) in sums.iter().enumerate() {
                    let of_key = kept[own] - found[own] * rates.beta;
                    let term = queries[own] * rates.q * of_query[own];
                    sum.set(sum.get() + (keys[own] * rates.k).fma(of_key, term));
                }
                let all: Vec<Val<f32>> = sums.iter().map(Var::get).collect();
                da.set_vec(lane.item(row) * form.key_dim + lane.first, &all);
                when(first(row), || sums.iter().for_each(|sum| sum.set(0.0)));
            }
        });
    });
}

/// The gradients of a row's queries, keys and values `dqkv[tokens, width]` and of `b`, and, where
/// heads have one factor, what it adds to the gradient of its own and all earlier `ln g`,
/// `terms[tokens, heads]`. A simdgroup has a head of queries and keys of a row, and all heads that
/// share it.
#[kernel]
pub fn delta_operands(
    qkv: In<{ scalar }>,
    rates: In<f32>,
    misses: In<f32>,
    dv: In<f32>,
    slopes: In<f32>,
    dqkv: Out<{ scalar }>,
    db: Out<{ scalar }>,
    tokens: Arg<u32>,
    heads: Const<u32>,
    key_heads: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let terms = (!form.by_element).then(|| {
        require_lengths(&[("terms", self::heads())]);
        <Out>::declare("terms")
    });
    let items = dim("tokens") * dim("key_heads");
    launch(Mode::Row, [items.ceil_div(SIMDS), fixed(1), fixed(1)], 32 * SIMDS);
    require_vectors(&[
        ("qkv", inputs(form)),
        ("rates", self::heads() * 4),
        ("misses", form.values()),
        ("dv", form.values()),
        ("slopes", self::heads() * (2 * form.key_dim)),
        ("dqkv", inputs(form)),
    ]);
    require_lengths(&[("db", self::heads())]);
    begin();
    // Past the last they repeat it, and keep nothing.
    let (item, last) = (group_id() * SIMDS + simd_id(), tokens * key_heads - 1u32);
    let (live, item) = (Order::le(item, last), item.min(last));
    let (row, own) = (item / key_heads, item % key_heads);
    let [q, k, v] = row_starts([form.key_dim, form.value_dim], row, [heads, key_heads]);
    let places = [q, k].map(|start| start + own * form.key_dim);
    let parts = form.key_dim.div_ceil(32);
    // A lane's elements of a query or key; zeros behind the last.
    let lane = |x: In, from: Val<u32>| -> Vec<Val<f32>> {
        let element = |part: u32| {
            let i = lane_id() + 32 * part;
            let value = x.get(from + i.min(form.key_dim - 1));
            match part < form.key_dim / 32 {
                true => value,
                false => select(Order::lt(i, form.key_dim), value, 0.0),
            }
        };
        (0..parts).map(element).collect()
    };
    let [query, key] = places.map(|from| lane(qkv, from));
    let dot = |x: &[Val<f32>], y: &[Val<f32>]| {
        let sum = x.iter().zip(y).fold(0.0f32.val(), |sum, (&x, &y)| x.fma(y, sum));
        simd_sum(sum)
    };
    let sums = Regs::new(2 * parts, 0.0);
    let group = heads / key_heads;
    let member = |m: Val<u32>| match form.tiled {
        true => own + m * key_heads,
        false => own * group + m,
    };
    range(0u32, group).each(|m| {
        let head = member(m);
        let at = row * heads + head;
        let rates = Rates::get(rates, at);
        let [of_q, of_k] = [0u32, 1].map(|part| lane(slopes, (at * 2u32 + part) * form.key_dim));
        for (i, &slope) in (0u32..).zip(of_q.iter().chain(&of_k)) {
            sums.set(i, sums.get(i) + slope);
        }
        let (of_values, of_misses) = (Var::new(0.0), Var::new(0.0));
        range(lane_id(), form.value_dim).step(32u32).each(|j| {
            let (place, of) = (v + head * form.value_dim + j, at * form.value_dim + j);
            let slope = dv.get(of);
            of_values.set(qkv.get(place).fma(slope, of_values.get()));
            of_misses.set(misses.get(of).fma(slope, of_misses.get()));
            when(live, || dqkv.set(place, slope));
        });
        let (of_values, of_misses) = (simd_sum(of_values.get()), simd_sum(of_misses.get()));
        let term = terms.map(|terms| (terms, dot(&query, &of_q) * rates.q - of_values));
        let share = if form.doubled { rates.beta * 0.5 } else { rates.beta };
        when(live & Order::eq(lane_id(), 0u32), || {
            if let Some((terms, term)) = term {
                terms.set(at, term);
            }
            db.set(at, of_misses * (1.0 - share));
        });
    });
    // All that share a key have what divides it.
    let rates = Rates::get(rates, row * heads + member(0u32.val()));
    let all: Vec<Val<f32>> = (0..2 * parts).map(|i| sums.get(i)).collect();
    let (of_q, of_k) = all.split_at(parts as usize);
    let scales = [(rates.q, form.key_dim as f32), (rates.k, 1.0)];
    for (((x, of), from), (scale, square)) in
        [(&query, of_q), (&key, of_k)].into_iter().zip(places).zip(scales)
    {
        let along = dot(x, of) * (scale * scale * square);
        for (part, (&x, &of)) in (0u32..).zip(x.iter().zip(of)) {
            let i = lane_id() + 32 * part;
            when(live & Order::lt(i, form.key_dim), || {
                dqkv.set(from + i, (of - x * along) * scale);
            });
        }
    }
}

/// The gradients of `ln g`, which take the place of the `terms[tokens, heads]` that they are sums
/// of, and of `a`; `along` as [`delta_slopes`] gives it. A thread has a head of a block.
#[kernel]
pub fn delta_gates(
    a: In<{ scalar }>,
    decay: In<f32>,
    dt: In<f32>,
    along: In<f32>,
    positions: In<u32>,
    terms: InOut<f32>,
    da: Out<{ scalar }>,
    tokens: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    scalar: Scalar,
    key_dim: u32,
) {
    launch(Mode::Element, [blocks().ceil_div(GATES), fixed(1), fixed(1)], GATES);
    for name in ["a", "terms", "da"] {
        require_lengths(&[(name, self::heads())]);
    }
    require_lengths(&[
        ("decay", dim("heads")),
        ("dt", dim("heads")),
        ("along", blocks() * key_dim),
        ("positions", dim("tokens")),
    ]);
    begin();
    let item = group_id() * GATES + thread_id();
    let (number, head) = (item / heads, item % heads);
    let start = number * block;
    when(Order::lt(start, tokens), || {
        let end = (start + block).min(tokens);
        let sum = Var::new(0.0);
        range(0u32, key_dim).each(|key| {
            sum.set(sum.get() + along.get((number * key_dim + key) * heads + head));
        });
        let (decay, dt) = (decay.get(head), dt.get(head));
        range(start, end).each(|turn| {
            let row = end - 1u32 - (turn - start);
            let at = row * heads + head;
            sum.set(sum.get() + terms.get(at));
            terms.set(at, sum.get());
            da.set(at, sum.get() * decay * sigmoid(a.get(at) + dt));
            when(Order::eq(positions.get(row), 0u32), || sum.set(0.0));
        });
    });
}

/// The gradient of decay rates, or of `dt`, over all rows: `slopes[rows, width]` are the gradients
/// of `ln g` of `width` heads.
#[kernel]
pub fn delta_weights(
    slopes: In<f32>,
    a: In<{ scalar }>,
    decay: In<f32>,
    dt: In<f32>,
    y: Out<f32>,
    rows: Arg<u32>,
    width: Arg<u32>,
    scalar: Scalar,
    of_decay: bool,
) {
    require_lengths(&[("decay", dim("width")), ("dt", dim("width"))]);
    let term = |row: Val<u32>, at: Val<u32>| {
        let head = at - row * width;
        let shifted = a.get(at) + dt.get(head);
        let by = if of_decay { softplus(shifted) } else { sigmoid(shifted) * decay.get(head) };
        slopes.get(at) * by
    };
    sums_of_rows(&["slopes", "a"], (y, None), [rows, width], term);
}
