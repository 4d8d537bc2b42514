//! Kernels of selective state spaces over packed sequences, and of their gradients, without
//! atomics.
//!
//! With `u = step x` a head's matrix `h` and the gradient `D` of the matrix behind a row go from
//! row to row, in the order of rows and in reverse:
//!
//! ```text
//! h := g h + B u,   C h      for each column of h by itself
//! D := D + C dy,  B D,  D := g D    for each column of D by itself
//! ```
//!
//! so that columns are spread over lanes and threadgroups, whose sums are over the state alone
//! ([`scan_states`]). The gradients of `B` and `C` are sums over columns and over the heads that
//! share them. [`scan_slopes`] therefore goes the same ways with rows of `h` and `D` spread
//! instead, through all blocks of the batch's rows at once and through some heads one after
//! another, whose sums it adds up: the first kernel leaves `h` in front of each block and `D`
//! behind it.
//!
//! ```text
//! of C: h dy,  of B: step D x
//! ```
//!
//! The gradients of steps need no matrices. What a row answers depends on the sum of `ln g` from a
//! source's row to its own, so that the gradient of `ln g` is the sum of `dy C h - u B D` over the
//! row and all behind it in the sequence ([`scan_steps`]). The rows behind a block add up to
//! `<D, h>` at its end; sums begin there, so that what rounding leaves of terms that cancel does
//! not grow with the sequence.

use tile::dsl::*;
use tile::launch::{Extent, Mode, Numbers};

use crate::SelectiveScan;
use crate::gradient::matrices::{Lane, PackedForm, blocks, heads, key_head};
use crate::gradient::products::sums_of_rows;
use crate::math::{sigmoid, softplus};
use crate::recurrence::{over_keys, products};
use crate::selective_scan::write;
use crate::states::each_row;
use crate::sweep::{begin, load, require_lengths, require_vectors, when};
use formats::Result;

/// Simdgroups of a threadgroup of [`scan_inputs`].
const SIMDS: u32 = 4;
/// Threads of a threadgroup of kernels in which each thread works by itself.
const THREADS: u32 = 128;
/// Most heads of a threadgroup of [`scan_slopes`]: more save memory, fewer fill a GPU.
const TOGETHER: usize = 8;

/// The form in which lanes have columns of a state space's matrices, or rows if `turned`.
///
/// # Errors
/// States or heads that do not fit a simdgroup's registers.
pub fn form(of: &SelectiveScan, turned: bool) -> Result<PackedForm> {
    let sizes = [("states", of.state), ("heads", of.head_dim)];
    PackedForm::new("selective_scan", sizes, of.width(), turned)
}

/// Heads that [`scan_slopes`] adds up in one threadgroup: the greatest number up to 8 that divides
/// those of a group.
pub fn together(of: &SelectiveScan) -> usize {
    let each = of.heads / of.groups;
    (1..=TOGETHER.min(each)).rev().find(|n| each.is_multiple_of(*n)).unwrap_or(1)
}

/// The numbers of all launches: rows, sequences, and rows of a block.
pub fn numbers(of: &SelectiveScan, tokens: usize, sequences: usize, block: usize) -> Numbers {
    let counts = [("tokens", tokens), ("batch", sequences), ("block", block)];
    let sizes = [("heads", of.heads), ("groups", of.groups), ("together", together(of))];
    let all = counts.into_iter().chain(sizes);
    let numbers = all.fold(Numbers::new(), |numbers, (name, n)| numbers.with(name, n as u32));
    numbers.with_f32("least", of.limit[0]).with_f32("most", of.limit[1])
}

/// Elements of `x`, `B` and `C` of all rows.
fn inputs(form: PackedForm) -> Extent {
    dim("tokens") * (dim("heads") * form.value_dim + dim("groups") * (2 * form.key_dim))
}

/// Elements of the gradients of `B` and `C`, apart for each threadgroup's heads.
fn slopes(form: PackedForm) -> Extent {
    heads().ceil_div(dim("together")) * (2 * form.key_dim)
}

/// Where a head's `x`, `B` and `C` begin in a row of `xbc`.
#[track_caller]
fn row_starts(lane: &Lane, groups: Val<u32>, row: Val<u32>) -> [Val<u32>; 3] {
    let PackedForm { key_dim, value_dim, .. } = lane.form;
    let (inner, each) = (lane.heads * value_dim, groups * key_dim);
    let first = row * (inner + each * 2u32);
    let group = key_head(false, lane.head, [lane.heads, groups]) * key_dim;
    let b = first + inner + group;
    [first + lane.head * value_dim, b, b + each]
}

/// Numbers of a row and a head that later kernels need, `rates[tokens, heads, 2]`: the step, and
/// the factor by which the row decays the matrix, 0 in the first row of a sequence. A thread has
/// one of them.
#[kernel]
pub fn scan_rates(
    dt: In<{ scalar }>,
    decay: In<f32>,
    bias: In<f32>,
    positions: In<u32>,
    rates: Out<f32>,
    tokens: Arg<u32>,
    heads: Const<u32>,
    least: Const<f32>,
    most: Const<f32>,
    scalar: Scalar,
) {
    launch(Mode::Element, [self::heads().ceil_div(THREADS), fixed(1), fixed(1)], THREADS);
    let vector = dim("heads");
    require_lengths(&[("dt", self::heads()), ("decay", vector.clone()), ("bias", vector)]);
    require_lengths(&[("positions", dim("tokens"))]);
    require_vectors(&[("rates", self::heads() * 2)]);
    begin();
    let item = group_id() * THREADS + thread_id();
    when(Order::lt(item, tokens * heads), || {
        let head = item % heads;
        let step = softplus(dt.get(item) + bias.get(head)).max(least).min(most);
        let begins = Order::eq(positions.get(item / heads), 0u32);
        let gate = select(begins, 0.0, (decay.get(head) * step).exp());
        rates.set_vec(item * 2u32, &[step, gate]);
    });
}

/// The rows of a sequence, as a kernel reads them that has columns of a head's matrix.
#[derive(Clone, Copy)]
struct Rows {
    lane: Lane,
    groups: Val<u32>,
    xbc: In,
    rates: In,
    first: Val<u32>,
    end: Val<u32>,
}

/// A row: its numbers, and the lane's elements of its `B` and `C`, and of its `x` or of the
/// gradient of its output.
struct Row<'a> {
    step: Val<f32>,
    gate: Val<f32>,
    b: &'a [Val<f32>],
    c: &'a [Val<f32>],
    own: &'a [Val<f32>],
}

impl Rows {
    /// Those of the sequence of this number.
    #[track_caller]
    fn new(
        (lane, groups): (Lane, Val<u32>),
        [xbc, rates]: [In; 2],
        starts: In<u32>,
        sequence: Val<u32>,
    ) -> Rows {
        let (first, end) = (starts.get(sequence), starts.get(sequence + 1u32));
        Rows { lane, groups, xbc, rates, first, end }
    }

    /// Calls `body` with each row, the last first if there are gradients of outputs, `dy`.
    #[track_caller]
    fn each(&self, dy: Option<In>, body: impl Fn(Val<u32>, Row<'_>)) {
        let &Rows { lane, groups, xbc, rates, first, end } = self;
        let share = lane.form.share();
        let ask = |row| {
            let [x, b, c] = row_starts(&lane, groups, row);
            let mut found = load(rates, lane.item(row) * 2u32, 2);
            found.extend(share.load(xbc, b));
            found.extend(share.load(xbc, c));
            found.extend(match dy {
                Some(dy) => lane.own(dy, lane.item(row) * lane.form.value_dim),
                None => lane.own(xbc, x),
            });
            found
        };
        let count = 2 + 2 * share.own() + u32::from(lane.form.wide);
        let each = |row: Val<u32>, values: &[Val<f32>]| {
            let (rates, rest) = values.split_at(2);
            let (b, rest) = rest.split_at(share.own() as usize);
            let (c, own) = rest.split_at(share.own() as usize);
            body(row, Row { step: rates[0], gate: rates[1], b, c, own });
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

impl Row<'_> {
    /// Moves a head's matrix from in front of the row to behind it, and asks it.
    #[track_caller]
    fn advance(&self, matrix: Regs) -> Vec<Val<f32>> {
        let written: Vec<Val<f32>> = self.own.iter().map(|&x| x * self.step).collect();
        write(matrix, self.b, &written, self.gate);
        products(matrix, self.c, self.own.len() as u32)
    }

    /// Moves the gradient of a head's matrix from behind the row to the front of it; gives the
    /// gradient of what the row wrote, `step x`.
    #[track_caller]
    fn reverse(&self, slopes: Regs) -> Vec<Val<f32>> {
        write(slopes, self.c, self.own, 1.0f32.val());
        let of_written = products(slopes, self.b, self.own.len() as u32);
        (0..slopes.len()).for_each(|i| slopes.set(i, slopes.get(i) * self.gate));
        of_written
    }
}

/// The state space of each sequence, `xbc[tokens, width] -> y[tokens, heads * head_dim]`; `rates`
/// as [`scan_rates`] gives them. Sequences begin at `starts[batch + 1]`, whose last is the end. A
/// threadgroup has some columns of a head's matrix in registers while the rows of a sequence pass.
#[kernel]
pub fn packed_scan(
    xbc: In<{ scalar }>,
    rates: In<f32>,
    skip: In<f32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    heads: Const<u32>,
    groups: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    form.launch([dim("heads"), dim("batch")]);
    require_vectors(&[("xbc", inputs(form)), ("rates", self::heads() * 2), ("y", form.values())]);
    require_lengths(&[("skip", dim("heads")), ("starts", dim("batch") + 1)]);
    begin();
    let lane = Lane::new(form, heads);
    let rows = Rows::new((lane, groups), [xbc, rates], starts, group_id_of(2));
    let skip = skip.get(lane.head);
    let matrix = Regs::new(form.registers(), 0.0);
    rows.each(None, |number, row| {
        let answers = row.advance(matrix).into_iter().zip(row.own);
        let y_row: Vec<Val<f32>> = answers.map(|(answer, &x)| x.fma(skip, answer)).collect();
        rows.put(y, number, &y_row);
    });
}

/// Both recurrences of a gradient, side by side: what matrices answer, `answers[tokens, heads *
/// head_dim]`, and the gradients of what rows write, `du`, from those of outputs, `dy`. Besides,
/// `before[blocks, heads, state, head_dim]` are the matrices in front of each block of rows that
/// does not begin a sequence, and `behind` the gradients of those behind each block that does not
/// end one. The rest as in [`packed_scan`].
#[kernel]
pub fn scan_states(
    xbc: In<{ scalar }>,
    rates: In<f32>,
    dy: In<{ scalar }>,
    starts: In<u32>,
    answers: Out<f32>,
    before: Out<f32>,
    du: Out<f32>,
    behind: Out<f32>,
    batch: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    form.launch([dim("heads"), dim("batch") * 2]);
    require_vectors(&[
        ("xbc", inputs(form)),
        ("rates", self::heads() * 2),
        ("dy", form.values()),
        ("answers", form.values()),
        ("before", form.matrices()),
        ("du", form.values()),
        ("behind", form.matrices()),
    ]);
    require_lengths(&[("starts", dim("batch") + 1)]);
    begin();
    let lane = Lane::new(form, heads);
    let forward = Order::lt(group_id_of(2), batch);
    let sequence = select(forward, group_id_of(2), group_id_of(2) - batch);
    let rows = Rows::new((lane, groups), [xbc, rates], starts, sequence);
    let matrix = Regs::new(form.registers(), 0.0);
    let there = || {
        rows.each(None, |number, row| {
            let new = Order::eq(number % block, 0u32) & Order::gt(number, rows.first);
            when(new, || lane.leave(matrix, before, number / block));
            rows.put(answers, number, &row.advance(matrix));
        });
    };
    let back = || {
        rows.each(Some(dy), |number, row| {
            let next = number + 1u32;
            let last = Order::eq(next % block, 0u32) & Order::lt(next, rows.end);
            when(last, || lane.leave(matrix, behind, number / block));
            rows.put(du, number, &row.reverse(matrix));
        });
    };
    test(forward).then(there).otherwise(back);
}

/// A row of a block, as a kernel reads it that has rows of a head's matrix: its numbers, the lane's
/// elements of `B` or of `C`, and its shares of `x` and of the gradient of the output.
struct BlockRow<'a> {
    step: Val<f32>,
    gate: Val<f32>,
    own: &'a [Val<f32>],
    x: &'a [Val<f32>],
    dy: &'a [Val<f32>],
    /// What earlier heads left of the gradients.
    earlier: &'a [Val<f32>],
}

/// The buffers of a block's rows, and which rows those are.
#[derive(Clone, Copy)]
struct Block {
    xbc: In,
    rates: In,
    dy: In,
    slopes: InOut<f32>,
    groups: Val<u32>,
    /// Heads of a threadgroup, and whether others of them were there before.
    together: Val<u32>,
    later: Val<bool>,
    start: Val<u32>,
    end: Val<u32>,
}

impl Block {
    /// Where the lane's gradients of `B` (`part` 0) or of `C` (1) of a row are.
    #[track_caller]
    fn place(&self, lane: &Lane, row: Val<u32>, part: u32) -> Val<u32> {
        let item = row * (lane.heads / self.together) + group_id_of(1);
        (item * 2u32 + part) * lane.form.key_dim + lane.first
    }

    /// Calls `body` with each row, which moves the matrix and gives what it adds to the gradients
    /// of `C`, or `back` to those of `B`.
    #[track_caller]
    fn each(&self, lane: &Lane, back: bool, body: impl Fn(BlockRow<'_>) -> Vec<Val<f32>>) {
        let &Block { xbc, rates, dy, slopes, groups, .. } = self;
        let (share, wide) = (lane.form.share(), usize::from(lane.form.wide));
        let part = u32::from(!back);
        let kept = Regs::<f32>::new(wide as u32, 0.0);
        let ask = |row| {
            let [x, b, c] = row_starts(lane, groups, row);
            let mut found = load(rates, lane.item(row) * 2u32, 2);
            found.extend(lane.own(xbc, if back { c } else { b }));
            found.extend(share.load(xbc, x));
            found.extend(share.load(dy, lane.item(row) * lane.form.value_dim));
            when(self.later, || {
                lane.once(|| {
                    let earlier = load(slopes, self.place(lane, row, part), wide as u8);
                    (0u32..).zip(earlier).for_each(|(i, value)| kept.set(i, value));
                });
            });
            found.extend((0..wide as u32).map(|i| kept.get(i)));
            found
        };
        let count = 2 + 2 * wide as u32 + 2 * share.own();
        let each = |row: Val<u32>, values: &[Val<f32>]| {
            let (rates, rest) = values.split_at(2);
            let (own, rest) = rest.split_at(wide);
            let (x, rest) = rest.split_at(share.own() as usize);
            let (dy, earlier) = rest.split_at(share.own() as usize);
            let [step, gate] = [rates[0], rates[1]];
            let sums = body(BlockRow { step, gate, own, x, dy, earlier });
            lane.once(|| slopes.set_vec(self.place(lane, row, part), &sums));
        };
        let some = Order::lt(self.start, self.end);
        when(some, || each_row([self.start, self.end], back, count, ask, each));
    }
}

/// The gradients of `B` and of `C`, `slopes[tokens, heads / together, 2, state]`, of `together`
/// neighbouring heads each, which all share theirs, and `along[blocks, state, heads]`, the parts of
/// `<D, h>` behind each block of rows, zeros where a sequence ends there. `before` and `behind` are
/// what [`scan_states`] gave. A threadgroup keeps some rows of a head's matrices while the rows of
/// a block pass, forward and back, for one head after another. `form` is turned.
#[kernel]
pub fn scan_slopes(
    xbc: In<{ scalar }>,
    rates: In<f32>,
    dy: In<{ scalar }>,
    positions: In<u32>,
    before: In<f32>,
    behind: In<f32>,
    slopes: InOut<f32>,
    along: Out<f32>,
    tokens: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    together: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let shares = dim("heads").ceil_div(dim("together"));
    form.launch([shares, dim("tokens").ceil_div(dim("block"))]);
    require_vectors(&[
        ("xbc", inputs(form)),
        ("rates", self::heads() * 2),
        ("dy", form.values()),
        ("before", form.matrices()),
        ("behind", form.matrices()),
        ("slopes", self::slopes(form)),
    ]);
    require_lengths(&[("positions", dim("tokens")), ("along", blocks() * form.key_dim)]);
    begin();
    let (any, number, wide) = (Lane::new(form, heads), group_id_of(2), u32::from(form.wide));
    let (start, end) = (number * block, (number * block + block).min(tokens));
    let goes_on = Order::lt(end, tokens) & Order::gt(positions.get(end.min(tokens - 1u32)), 0u32);
    let matrix = Regs::new(form.registers(), 0.0);
    let change = Regs::new(form.registers(), 0.0);
    range(0u32, together).each(|turn| {
        let lane = Lane { head: group_id_of(1) * together + turn, ..any };
        let later = Order::gt(turn, 0u32);
        let rows = Block { xbc, rates, dy, slopes, groups, together, later, start, end };
        (0..matrix.len()).for_each(|i| matrix.set(i, 0.0));
        when(Order::gt(positions.get(start), 0u32), || lane.take_up(matrix, before, number));
        rows.each(&lane, false, |row| {
            let written: Vec<Val<f32>> = row.own.iter().map(|&b| b * row.step).collect();
            write(matrix, row.x, &written, row.gate);
            added(products(matrix, row.dy, wide), row.earlier)
        });
        (0..change.len()).for_each(|i| change.set(i, 0.0));
        when(goes_on, || lane.take_up(change, behind, number));
        let sums: Vec<Val<f32>> =
            (0..wide).map(|own| dot_of_rows(matrix, change, own, wide)).collect();
        lane.once(|| {
            for (own, &sum) in (0u32..).zip(&sums) {
                along.set((number * form.key_dim + lane.first + own) * heads + lane.head, sum);
            }
        });
        rows.each(&lane, true, |row| {
            write(change, row.dy, row.own, 1.0f32.val());
            let found = products(change, row.x, wide).into_iter().map(|sum| sum * row.step);
            let found = found.collect();
            (0..change.len()).for_each(|i| change.set(i, change.get(i) * row.gate));
            added(found, row.earlier)
        });
    });
}

/// Sums of the same elements.
#[track_caller]
fn added(x: Vec<Val<f32>>, y: &[Val<f32>]) -> Vec<Val<f32>> {
    x.into_iter().zip(y).map(|(x, &y)| x + y).collect()
}

/// The product of a row of one matrix with that of another, of which the lanes that share it have
/// parts: `own` of `wide`.
#[track_caller]
fn dot_of_rows(a: Regs, b: Regs, own: u32, wide: u32) -> Val<f32> {
    let each = (own..a.len()).step_by(wide as usize);
    over_keys(each.fold(0.0f32.val(), |sum, i| a.get(i).fma(b.get(i), sum)))
}

/// The gradients of `B` and `C` in their places in `dxbc[tokens, width]`: the sums of `slopes` over
/// the threadgroups of a group's heads. A thread has one element.
#[kernel]
pub fn scan_shared(
    slopes: In<f32>,
    dxbc: Out<{ scalar }>,
    tokens: Arg<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    together: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let all = dim("tokens") * dim("groups") * (2 * form.key_dim);
    launch(Mode::Element, [all.ceil_div(THREADS), fixed(1), fixed(1)], THREADS);
    require_vectors(&[("slopes", self::slopes(form)), ("dxbc", inputs(form))]);
    begin();
    let (item, each) = (group_id() * THREADS + thread_id(), groups * form.key_dim);
    when(Order::lt(item, tokens * each * 2u32), || {
        let (row, at) = (item / (each * 2u32), item % (each * 2u32));
        let (part, own) = (at / each, at % each);
        let (group, element) = (own / form.key_dim, own % form.key_dim);
        let (all, shares) = (heads / together, heads / together / groups);
        let first = ((row * all + group * shares) * 2u32 + part) * form.key_dim + element;
        let sum = Var::new(0.0);
        range(0u32, shares).each(|share| {
            sum.set(sum.get() + slopes.get(first + share * (2 * form.key_dim)));
        });
        let inner = heads * form.value_dim;
        dxbc.set(row * (inner + each * 2u32) + inner + at, sum.get());
    });
}

/// The gradients of `x` in their places in `dxbc[tokens, width]`, and of each head of a row: what
/// it adds to the gradient of its own and all earlier `ln g`, `terms[tokens, heads]`; that of its
/// step by what it writes, `of_steps`; and that of `skip`, `of_skips`. `answers` and `du` are what
/// [`scan_states`] gave. A simdgroup has a head of a row.
#[kernel]
pub fn scan_inputs(
    xbc: In<{ scalar }>,
    rates: In<f32>,
    dy: In<{ scalar }>,
    answers: In<f32>,
    du: In<f32>,
    skip: In<f32>,
    dxbc: Out<{ scalar }>,
    terms: Out<f32>,
    of_steps: Out<f32>,
    of_skips: Out<f32>,
    tokens: Arg<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    launch(Mode::Row, [self::heads().ceil_div(SIMDS), fixed(1), fixed(1)], 32 * SIMDS);
    require_vectors(&[
        ("xbc", inputs(form)),
        ("rates", self::heads() * 2),
        ("dy", form.values()),
        ("answers", form.values()),
        ("du", form.values()),
        ("dxbc", inputs(form)),
    ]);
    let items = self::heads();
    require_lengths(&[("skip", dim("heads")), ("terms", items.clone())]);
    require_lengths(&[("of_steps", items.clone()), ("of_skips", items)]);
    begin();
    // Past the last they repeat it, and keep nothing.
    let (item, last) = (group_id() * SIMDS + simd_id(), tokens * heads - 1u32);
    let (live, item) = (Order::le(item, last), item.min(last));
    let (row, head) = (item / heads, item % heads);
    let width = heads * form.value_dim + groups * (2 * form.key_dim);
    let from = row * width + head * form.value_dim;
    let (step, skip) = (rates.get(item * 2u32), skip.get(head));
    let [of_answers, of_written, of_skip] = [(); 3].map(|()| Var::new(0.0));
    range(lane_id(), form.value_dim).step(32u32).each(|j| {
        let (x, at) = (xbc.get(from + j), item * form.value_dim + j);
        let (dy, du) = (dy.get(at), du.get(at));
        of_answers.set(dy.fma(answers.get(at), of_answers.get()));
        of_written.set(x.fma(du, of_written.get()));
        of_skip.set(x.fma(dy, of_skip.get()));
        when(live, || dxbc.set(from + j, du.fma(step, dy * skip)));
    });
    let sums = [of_answers, of_written, of_skip].map(|sum| simd_sum(sum.get()));
    let [of_answers, of_written, of_skip] = sums;
    when(live & Order::eq(lane_id(), 0u32), || {
        terms.set(item, of_answers - of_written * step);
        of_steps.set(item, of_written);
        of_skips.set(item, of_skip);
    });
}

/// The gradients of `ln g` and of `dt + bias`, which take the places of `terms[tokens, heads]` and
/// `of_steps[tokens, heads]`, of which they are made; the latter also as `ddt`. `along` is as
/// [`scan_slopes`] gives it. A thread has a head of a block.
#[kernel]
pub fn scan_steps(
    dt: In<{ scalar }>,
    decay: In<f32>,
    bias: In<f32>,
    along: In<f32>,
    positions: In<u32>,
    terms: InOut<f32>,
    of_steps: InOut<f32>,
    ddt: Out<{ scalar }>,
    tokens: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    least: Const<f32>,
    most: Const<f32>,
    scalar: Scalar,
    state: u32,
) {
    launch(Mode::Element, [blocks().ceil_div(THREADS), fixed(1), fixed(1)], THREADS);
    for name in ["dt", "terms", "of_steps", "ddt"] {
        require_lengths(&[(name, self::heads())]);
    }
    require_lengths(&[
        ("decay", dim("heads")),
        ("bias", dim("heads")),
        ("along", blocks() * state),
        ("positions", dim("tokens")),
    ]);
    begin();
    let item = group_id() * THREADS + thread_id();
    let (number, head) = (item / heads, item % heads);
    let start = number * block;
    when(Order::lt(start, tokens), || {
        let end = (start + block).min(tokens);
        let sum = Var::new(0.0);
        range(0u32, state).each(|i| {
            sum.set(sum.get() + along.get((number * state + i) * heads + head));
        });
        let (decay, bias) = (decay.get(head), bias.get(head));
        range(start, end).each(|turn| {
            let row = end - 1u32 - (turn - start);
            let at = row * heads + head;
            sum.set(sum.get() + terms.get(at));
            // The first row of a sequence has nothing to forget.
            when(Order::eq(positions.get(row), 0u32), || sum.set(0.0));
            terms.set(at, sum.get());
            let shifted = dt.get(at) + bias;
            let step = softplus(shifted);
            let free = Order::ge(step, least) & Order::le(step, most);
            let slope = select(free, sigmoid(shifted), 0.0);
            let of_step = sum.get().fma(decay, of_steps.get(at)) * slope;
            of_steps.set(at, of_step);
            ddt.set(at, of_step);
        });
    });
}

/// The gradient of decay rates over all rows: `terms[rows, width]` are the gradients of `ln g` of
/// `width` heads.
#[kernel]
pub fn scan_decays(terms: In<f32>, rates: In<f32>, y: Out<f32>, rows: Arg<u32>, width: Arg<u32>) {
    require_lengths(&[("rates", dim("rows") * dim("width") * 2)]);
    let term = |_, at: Val<u32>| terms.get(at) * rates.get(at * 2u32);
    sums_of_rows(&["terms"], (y, None), [rows, width], term);
}
