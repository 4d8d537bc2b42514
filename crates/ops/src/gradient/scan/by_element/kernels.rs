//! Kernels of state spaces whose elements decay at rates of their own over packed sequences, and of
//! their gradients, without atomics.
//!
//! Each element of a matrix is a recurrence of its own, so that lanes have columns of it while all
//! rows pass. What an element's decay gives to a row's step and to its rate needs the element in
//! front of the row and the gradient behind it at once: [`scan_gradients_by_element`] keeps the
//! matrices in front of each block of rows, then goes through the blocks from the last, each time
//! forward, keeping the matrices of the block's rows, and back. The gradients of `B` and `C` are
//! sums over columns, which each threadgroup adds up of its own; [`scan_shared_by_element`] adds
//! those up.

use tile::dsl::*;
use tile::launch::{Extent, Mode, Numbers};

use crate::SelectiveScan;
use crate::gradient::matrices::{Lane, PackedForm, heads, key_head};
use crate::recurrence::{KEY_LANES, over_keys, products};
use crate::states::each_row;
use crate::sweep::{begin, require_lengths, require_vectors, when};
use formats::{Error, ErrorKind, Result};

/// Threads of a threadgroup of [`scan_shared_by_element`].
const THREADS: u32 = 128;
/// Rows whose sums over a threadgroup's columns are added up together.
const TOGETHER: u32 = 8;
/// The most elements of `B` and of `C`: six of each of a lane's are in registers.
const MAX_STATE: usize = 64;

/// How lanes share a head's matrix.
///
/// # Errors
/// States that do not fit a simdgroup's registers.
pub fn form(of: &SelectiveScan) -> Result<PackedForm> {
    if of.state > MAX_STATE {
        let expected = format!("states of up to {MAX_STATE} elements");
        let error = Error::new("selective_scan", expected, of.state);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let width = of.heads * of.head_dim;
    Ok(PackedForm::of_sizes([of.state, of.head_dim], width, false))
}

/// Threadgroups, each of which has a part of the gradients of a head's `B` and `C`.
pub fn parts(form: PackedForm) -> usize {
    form.groups() as usize
}

/// The numbers of all launches: rows, sequences, and rows of a block.
pub fn numbers(of: &SelectiveScan, tokens: usize, sequences: usize, block: usize) -> Numbers {
    let counts = [("tokens", tokens), ("batch", sequences), ("block", block)];
    let all = counts.into_iter().chain([("heads", of.heads), ("groups", of.groups)]);
    all.fold(Numbers::new(), |numbers, (name, n)| numbers.with(name, n as u32))
}

/// Elements of `B` of all rows.
fn shared(form: PackedForm) -> Extent {
    dim("tokens") * (dim("groups") * form.key_dim)
}

/// Elements of all heads' matrices.
fn matrices(form: PackedForm) -> Extent {
    dim("heads") * (form.key_dim * form.value_dim)
}

/// What the kernels require of the operands that both read.
#[track_caller]
fn require_operands(form: PackedForm) {
    require_vectors(&[
        ("x", form.values()),
        ("step", form.values()),
        ("b", shared(form)),
        ("c", shared(form)),
        ("decay", matrices(form)),
        ("skip", dim("heads") * form.value_dim),
    ]);
}

/// How many numbers a row has besides, and what reads them.
type More<'a> = (u32, &'a dyn Fn(Val<u32>) -> Vec<Val<f32>>);

/// The rows of packed sequences, as a lane reads them.
#[derive(Clone, Copy)]
struct Rows {
    lane: Lane,
    groups: Val<u32>,
    x: In,
    step: In,
    b: In,
    c: In,
}

/// The lane's numbers of a row: its shares of `B` and `C`, and those of its columns.
struct Row<'a> {
    b: &'a [Val<f32>],
    c: &'a [Val<f32>],
    x: &'a [Val<f32>],
    step: &'a [Val<f32>],
    /// What was asked for besides.
    more: &'a [Val<f32>],
}

impl Rows {
    /// Calls `body` with each row from `first` to `end`, of which there are some, the last first if
    /// `back`, and with the `count` numbers that `ask` reads of it besides.
    #[track_caller]
    fn each(
        &self,
        rows: [Val<u32>; 2],
        back: bool,
        (count, ask): More<'_>,
        body: impl Fn(Val<u32>, Row<'_>),
    ) {
        let Rows { lane, groups, .. } = *self;
        let (own, wide) = (lane.form.share().own() as usize, usize::from(lane.form.wide));
        let read = |row| {
            let group = row * groups + key_head(false, lane.head, [lane.heads, groups]);
            let shared =
                [self.b, self.c].map(|x| lane.form.share().load(x, group * lane.form.key_dim));
            let mut found = shared.concat();
            [self.x, self.step].iter().for_each(|x| found.extend(self.own(*x, row)));
            found.extend(ask(row));
            found
        };
        each_row(rows, back, 2 * (own + wide) as u32 + count, read, |row, values| {
            let (b, rest) = values.split_at(own);
            let (c, rest) = rest.split_at(own);
            let (x, rest) = rest.split_at(wide);
            let (step, more) = rest.split_at(wide);
            body(row, Row { b, c, x, step, more });
        });
    }

    /// The elements of the lane's columns of a row; zeros where it has none, so that it adds nothing
    /// to sums over columns.
    #[track_caller]
    fn own(&self, x: In, row: Val<u32>) -> Vec<Val<f32>> {
        let found = self.lane.own(x, self.at(row));
        match self.lane.exists() {
            None => found,
            Some(exists) => found.into_iter().map(|x| select(exists, x, 0.0)).collect(),
        }
    }

    /// Where the head's elements of a row begin.
    #[track_caller]
    fn at(&self, row: Val<u32>) -> Val<u32> {
        self.lane.item(row) * self.lane.form.value_dim
    }

    /// The lane's part of a matrix of each head.
    #[track_caller]
    fn matrix(&self, from: In) -> Regs {
        let own = Regs::new(self.lane.form.registers(), 0.0);
        self.lane.take_up(own, from, 0u32.val());
        own
    }
}

impl Row<'_> {
    /// What is left of each element of the matrix; nothing where a sequence begins.
    #[track_caller]
    fn gates(&self, decays: Regs, begins: Val<bool>) -> Vec<Val<f32>> {
        let steps = self.step.iter().cycle();
        let gates = (0..decays.len()).zip(steps).map(|(at, &step)| (decays.get(at) * step).exp());
        gates.map(|gate| select(begins, 0.0, gate)).collect()
    }

    /// Moves the matrix from in front of the row to behind it.
    #[track_caller]
    fn advance(&self, matrix: Regs, gates: &[Val<f32>]) {
        let written: Vec<Val<f32>> =
            self.x.iter().zip(self.step).map(|(&x, &step)| x * step).collect();
        let elements = self.b.iter().flat_map(|b| written.iter().map(move |written| (b, written)));
        for ((at, gate), (b, &written)) in (0..).zip(gates).zip(elements) {
            matrix.set(at, b.fma(written, matrix.get(at) * *gate));
        }
    }
}

/// The state space of each sequence, `x[tokens, heads * head_dim] -> y`; `step` is like `x`, `b` and
/// `c` are `[tokens, groups * state]`, `decay` is `[heads, state, head_dim]`. Sequences begin at
/// `starts[batch + 1]`, whose last is the end. A threadgroup has some columns of a head's matrix in
/// registers while the rows of a sequence pass.
#[kernel]
pub fn packed_scan_by_element(
    x: In<{ scalar }>,
    step: In<{ scalar }>,
    b: In<{ scalar }>,
    c: In<{ scalar }>,
    decay: In<f32>,
    skip: In<f32>,
    starts: In<u32>,
    y: Out<{ scalar }>,
    heads: Const<u32>,
    groups: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    form.launch([dim("heads"), dim("batch")]);
    require_operands(form);
    require_vectors(&[("y", form.values())]);
    require_lengths(&[("starts", dim("batch") + 1)]);
    begin();
    let rows = Rows { lane: Lane::new(form, heads), groups, x, step, b, c };
    let (first, end) = (starts.get(group_id_of(2)), starts.get(group_id_of(2) + 1u32));
    let (decays, skips) = (rows.matrix(decay), rows.own(skip, 0u32.val()));
    let matrix = Regs::new(form.registers(), 0.0);
    when(Order::lt(first, end), || {
        rows.each([first, end], false, (0, &|_| Vec::new()), |number, row| {
            let gates = row.gates(decays, Order::eq(number, first));
            row.advance(matrix, &gates);
            let said = products(matrix, row.c, u32::from(form.wide)).into_iter();
            let skipping = said.zip(row.x).zip(&skips);
            let y_row: Vec<Val<f32>> =
                skipping.map(|((said, x), skip)| x.fma(*skip, said)).collect();
            rows.lane.put(y, rows.at(number), &y_row);
        });
    });
}

/// The gradients of `x`, of steps, of decay rates and of `skip`, and of `B` and `C` by threadgroup,
/// `slopes[tokens, heads, threadgroups, 2, state]`, of the gradient of the output `dy`. `before`
/// `[blocks, heads, state, head_dim]` and `kept[block + 1, heads, state, head_dim]` are memory: for
/// the matrices in front of each block of rows, and of the rows of the one in hand. The rest as in
/// [`packed_scan_by_element`]. A threadgroup has some columns of a head while all rows of the batch
/// pass, so that its sums over rows have one order.
#[kernel]
pub fn scan_gradients_by_element(
    x: In<{ scalar }>,
    step: In<{ scalar }>,
    b: In<{ scalar }>,
    c: In<{ scalar }>,
    dy: In<{ scalar }>,
    decay: In<f32>,
    skip: In<f32>,
    positions: In<u32>,
    before: InOut<f32>,
    kept: InOut<f32>,
    dx: Out<{ scalar }>,
    dstep: Out<{ scalar }>,
    slopes: Out<f32>,
    ddecay: Out<f32>,
    dskip: Out<f32>,
    tokens: Arg<u32>,
    block: Arg<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    form.launch([dim("heads"), fixed(1)]);
    require_operands(form);
    let blocks = dim("tokens").ceil_div(dim("block"));
    require_vectors(&[
        ("dy", form.values()),
        ("before", blocks * matrices(form)),
        ("kept", (dim("block") + 1) * matrices(form)),
        ("dx", form.values()),
        ("dstep", form.values()),
        ("ddecay", matrices(form)),
        ("dskip", dim("heads") * form.value_dim),
    ]);
    require_lengths(&[
        ("positions", dim("tokens")),
        ("slopes", self::heads() * (form.groups() * 2 * form.key_dim)),
    ]);
    begin();
    let rows = Rows { lane: Lane::new(form, heads), groups, x, step, b, c };
    let lane = rows.lane;
    let (decays, skips) = (rows.matrix(decay), rows.own(skip, 0u32.val()));
    let registers = || Regs::<f32>::new(form.registers(), 0.0);
    let (matrix, change, total) = (registers(), registers(), registers());
    let begins = |row: Val<u32>| Order::eq(positions.get(row), 0u32);
    let nothing: More<'_> = (0, &|_| Vec::new());
    rows.each([0u32.val(), tokens], false, nothing, |number, row| {
        when(Order::eq(number % block, 0u32), || lane.leave(matrix, before, number / block));
        row.advance(matrix, &row.gates(decays, begins(number)));
    });
    let skip_total = Regs::<f32>::new(u32::from(form.wide), 0.0);
    let sums = Sums { form, shares: Shared::new(TOGETHER * form.simds * 2 * form.key_dim) };
    let blocks = (tokens + block - 1u32) / block;
    range(0u32, blocks).each(|turn| {
        let number = blocks - 1u32 - turn;
        let (start, end) = (number * block, (number * block + block).min(tokens));
        (0..matrix.len()).for_each(|i| matrix.set(i, 0.0));
        lane.take_up(matrix, before, number);
        lane.leave(matrix, kept, 0u32.val());
        rows.each([start, end], false, nothing, |number, row| {
            row.advance(matrix, &row.gates(decays, begins(number)));
            lane.leave(matrix, kept, number - start + 1u32);
        });
        // Sums over a block's rows, so that long sums are sums of short ones.
        let (sum, skip_sum) = (registers(), Regs::<f32>::new(u32::from(form.wide), 0.0));
        let ask = |row: Val<u32>| {
            let earlier = registers();
            lane.take_up(earlier, kept, row - start);
            let mut found = rows.own(dy, row);
            found.extend((0..earlier.len()).map(|i| earlier.get(i)));
            found
        };
        let count = u32::from(form.wide) + form.registers();
        let parts = (end - start + (TOGETHER - 1)) / TOGETHER;
        range(0u32, parts).each(|turn| {
            let first = start + (parts - 1u32 - turn) * TOGETHER;
            let last = (first + TOGETHER).min(end);
            rows.each([first, last], true, (count, &ask), |number, row| {
                let gates = row.gates(decays, begins(number));
                let (dy, earlier) = row.more.split_at(usize::from(form.wide));
                let back = Back { row: &row, dy, earlier, gates: &gates, decays };
                let found = back.reverse([matrix, change, sum]);
                sums.leave(number - first, found.shared);
                let each = found.written.into_iter().zip(found.steps).zip(&skips);
                let own = row.x.iter().zip(row.step).zip(dy).zip(each);
                let (of_x, of_steps): (Vec<Val<f32>>, Vec<Val<f32>>) = own
                    .map(|(((x, step), dy), ((written, steps), skip))| {
                        (written.fma(*step, *dy * *skip), x.fma(written, steps))
                    })
                    .unzip();
                lane.put(dx, rows.at(number), &of_x);
                lane.put(dstep, rows.at(number), &of_steps);
                for ((i, x), dy) in (0..).zip(row.x).zip(dy) {
                    skip_sum.set(i, x.fma(*dy, skip_sum.get(i)));
                }
            });
            barrier();
            sums.add_up(last - first, |row, at, sum| {
                let item = lane.item(first + row) * form.groups() + group_id();
                slopes.set(item * (2 * form.key_dim) + at, sum);
            });
            barrier();
        });
        for (total, sum) in [(total, sum), (skip_total, skip_sum)] {
            (0..total.len()).for_each(|i| total.set(i, total.get(i) + sum.get(i)));
        }
    });
    lane.leave(total, ddecay, 0u32.val());
    let all: Vec<Val<f32>> = (0..skip_total.len()).map(|i| skip_total.get(i)).collect();
    lane.put(dskip, lane.head * form.value_dim, &all);
}

/// A row in reverse: the gradients of its output, the elements of the matrix in front of it, and the
/// factors on them.
struct Back<'a> {
    row: &'a Row<'a>,
    dy: &'a [Val<f32>],
    earlier: &'a [Val<f32>],
    gates: &'a [Val<f32>],
    decays: Regs,
}

/// What a row gives.
struct Found {
    /// The gradients of what its columns write.
    written: Vec<Val<f32>>,
    /// Those of its steps through the decay.
    steps: Vec<Val<f32>>,
    /// The gradients of the lane's shares of `B` and of `C`, summed over its columns.
    shared: [Vec<Val<f32>>; 2],
}

impl Back<'_> {
    /// Moves the matrix, and the gradient of it, from behind the row to the front of it, and adds to
    /// the gradient of the decay rates.
    #[track_caller]
    fn reverse(&self, [matrix, change, sum]: [Regs; 3]) -> Found {
        let Back { row, dy, earlier, gates, decays } = *self;
        let zeros = |len: usize| vec![0.0f32.val(); len];
        let (mut written, mut steps) = (zeros(dy.len()), zeros(dy.len()));
        let mut shared = [zeros(row.b.len()), zeros(row.b.len())];
        let puts: Vec<Val<f32>> = row.x.iter().zip(row.step).map(|(&x, &step)| x * step).collect();
        for (i, (&b, &c)) in row.b.iter().zip(row.c).enumerate() {
            for (j, &dy) in dy.iter().enumerate() {
                let number = i * self.dy.len() + j;
                let at = number as u32;
                let slope = c.fma(dy, change.get(at));
                shared[0][i] = slope.fma(puts[j], shared[0][i]);
                shared[1][i] = matrix.get(at).fma(dy, shared[1][i]);
                written[j] = slope.fma(b, written[j]);
                let kept = slope * gates[number];
                let of_power = kept * earlier[number];
                steps[j] = of_power.fma(decays.get(at), steps[j]);
                sum.set(at, of_power.fma(row.step[j], sum.get(at)));
                change.set(at, kept);
                matrix.set(at, earlier[number]);
            }
        }
        let [written, steps] = [written, steps].map(|all| all.into_iter().map(over_keys).collect());
        Found { written, steps, shared }
    }
}

/// Sums over a threadgroup's columns, of some rows at a time: `[TOGETHER, simdgroups, 2, state]`.
#[derive(Clone, Copy)]
struct Sums {
    form: PackedForm,
    shares: Shared<f32>,
}

impl Sums {
    /// Leaves a row's sums over the simdgroup's columns, of which each lane has its own.
    #[track_caller]
    fn leave(&self, row: Val<u32>, shared: [Vec<Val<f32>>; 2]) {
        let PackedForm { simds, key_dim, .. } = self.form;
        for (part, own) in (0u32..).zip(shared) {
            let whole: Vec<Val<f32>> = own.into_iter().map(over_columns).collect();
            let first = ((row * simds + simd_id()) * 2u32 + part) * key_dim;
            when(Order::lt(lane_id(), KEY_LANES), || {
                self.form.share().runs(|element, number, exists| {
                    let run = u32::from(self.form.run);
                    let set = || {
                        (0..run).for_each(|i| {
                            self.shares.set(first + element + i, whole[(number + i) as usize]);
                        });
                    };
                    match exists {
                        Some(exists) => when(exists, set),
                        None => set(),
                    }
                });
            });
        }
    }

    /// Calls `keep` with each of `rows` rows, the place in it, and the sum over all columns.
    #[track_caller]
    fn add_up(&self, rows: Val<u32>, keep: impl Fn(Val<u32>, Val<u32>, Val<f32>)) {
        let PackedForm { simds, key_dim, .. } = self.form;
        let width = 2 * key_dim;
        range(thread_id(), rows * width).step(32 * simds).each(|item| {
            let (row, at) = (item / width, item % width);
            let each = (0..simds).map(|simd| self.shares.get((row * simds + simd) * width + at));
            if let Some(sum) = each.reduce(|sum, share| sum + share) {
                keep(row, at, sum);
            }
        });
    }
}

/// The sum over the lanes of a simdgroup that have other columns.
#[track_caller]
fn over_columns(x: Val<f32>) -> Val<f32> {
    let lanes = KEY_LANES as u8;
    [lanes, 2 * lanes].into_iter().fold(x, |x, mask| x + shuffle_xor(x, mask))
}

/// The gradients of `B` and of `C`, `[tokens, groups * state]`: the sums of `slopes` over the
/// threadgroups and heads that share them. A thread has one element.
#[kernel]
pub fn scan_shared_by_element(
    slopes: In<f32>,
    db: Out<{ scalar }>,
    dc: Out<{ scalar }>,
    tokens: Arg<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    scalar: Scalar,
    form: PackedForm,
) {
    let width = 2 * form.key_dim;
    let all = dim("tokens") * (dim("groups") * width);
    launch(Mode::Element, [all.ceil_div(THREADS), fixed(1), fixed(1)], THREADS);
    require_lengths(&[
        ("slopes", self::heads() * (form.groups() * width)),
        ("db", shared(form)),
        ("dc", shared(form)),
    ]);
    begin();
    let item = group_id() * THREADS + thread_id();
    when(Order::lt(item, tokens * groups * width), || {
        let (group, at) = (item / width, item % width);
        let shares = heads / groups * form.groups();
        let sum = Var::new(0.0);
        range(0u32, shares).each(|share| {
            sum.set(sum.get() + slopes.get((group * shares + share) * width + at));
        });
        let element = group * form.key_dim + at % form.key_dim;
        test(Order::lt(at, form.key_dim))
            .then(|| db.set(element, sum.get()))
            .otherwise(|| dc.set(element, sum.get()));
    });
}
