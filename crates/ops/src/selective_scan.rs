//! A selective state space (Mamba-2; Dao & Gu 2024, Transformers are SSMs): each head carries a
//! matrix `h` `[state, head_dim]`, forgets some of it at each position, and adds the position's
//! input:
//!
//! ```text
//! h = exp(decay step) h + B (step x),  y = C h + skip x
//! step = clamp(softplus(dt + bias), limit)
//! ```
//!
//! `decay` is negative, and a number for each head, as `dt`, `bias` and `skip` are. Some heads that
//! are beside each other share `B` and `C`.
//!
//! In the first Mamba (Gu & Dao 2023) each element of `h` decays at a rate of its own: `decay` is a
//! matrix as `h` is, and each element of `x` has a `step` and a `skip`; one head has them all.

use formats::{Error, ErrorKind, Result};
use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::math::softplus;
use crate::operation::{
    ActivationPrecision, CacheUse, CachedWork, Operation, ReferenceCall, Sharding, StateAccess,
};
use crate::recurrence::{
    COLUMN_LANES, Columns, KEY_LANES, Part, Passes, Piece, Share, StagedRow, StagedRows,
    parts_of_products, products, require_staged,
};
use crate::states::{States, Trial, chunk};
use crate::sweep::{load, require_vectors, when};
use crate::trial::{memory, random, scaled};
use crate::{Shape, arity, expect};

/// `xbc[tokens, heads * head_dim + 2 * groups * state], dt[tokens, heads]; decay[heads],
/// bias[heads], skip[heads] -> [tokens, heads * head_dim]`. A row of `xbc` has the heads' `x`, then
/// the groups' `B`, then their `C`. Where each element decays at a rate of its own:
/// `x[tokens, heads * head_dim], step[tokens, heads * head_dim], b[tokens, groups * state],
/// c[tokens, groups * state]; decay[heads * state * head_dim], skip[heads * head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SelectiveScan {
    /// Index of the cache layer.
    pub layer: usize,
    /// Where its part of the layer's state begins, `[heads, state, head_dim]`.
    pub start: usize,
    /// Heads, each of which has a matrix.
    pub heads: usize,
    /// Groups of heads that share `B` and `C`; divides `heads`.
    pub groups: usize,
    /// Elements of a head's `x`.
    pub head_dim: usize,
    /// Elements of `B` and of `C`.
    pub state: usize,
    /// The least and the greatest step.
    pub limit: [f32; 2],
    /// Whether each element decays at a rate of its own. Then steps come as they are, neither shifted
    /// nor bounded.
    pub by_element: bool,
}

/// Bounds of a step that bound nothing.
pub const UNLIMITED: [f32; 2] = [0.0, f32::MAX];

impl SelectiveScan {
    /// One of these numbers of heads, groups, elements of `x` of a head, and elements of `B`, in the
    /// first layer, whose heads decay by any steps: the other forms are further fields.
    pub fn new([heads, groups, head_dim, state]: [usize; 4]) -> SelectiveScan {
        let (layer, start, limit, by_element) = (0, 0, UNLIMITED, false);
        SelectiveScan { layer, start, heads, groups, head_dim, state, limit, by_element }
    }

    /// Elements in a row of `xbc`.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim + 2 * self.groups * self.state
    }

    /// Elements of its part of the state.
    pub fn elements(&self) -> usize {
        self.heads * self.state * self.head_dim
    }

    /// Where the `x`, the `B` and the `C` of a head begin in a row.
    pub fn starts(&self, head: usize) -> [usize; 3] {
        let group = head / (self.heads / self.groups) * self.state;
        let all = self.heads * self.head_dim;
        [head * self.head_dim, all + group, all + self.groups * self.state + group]
    }

    /// The names and widths of its inputs.
    pub(crate) fn inputs(&self) -> Vec<(&'static str, usize)> {
        let (inner, each) = (self.heads * self.head_dim, self.groups * self.state);
        match self.by_element {
            true => vec![("x", inner), ("step", inner), ("b", each), ("c", each)],
            false => vec![("x, B and C", self.width()), ("dt", self.heads)],
        }
    }

    /// The names and lengths of its weights.
    pub(crate) fn weights(&self) -> Vec<(&'static str, usize)> {
        match self.by_element {
            true => vec![("decay", self.elements()), ("skip", self.heads * self.head_dim)],
            false => ["decay", "bias", "skip"].map(|name| (name, self.heads)).to_vec(),
        }
    }

    /// Moves the matrices of all heads one position on, and gives a row of `y`; all in f64. `row` has
    /// the position's inputs one behind the other.
    fn position(&self, states: &mut [f64], row: &[f32], weights: &[&[f32]]) -> Vec<f64> {
        let &SelectiveScan { heads, groups, head_dim, state, by_element, .. } = self;
        let (inner, each) = (heads * head_dim, groups * state);
        let (x, rest) = row.split_at(inner);
        let (steps, bc) = match by_element {
            true => rest.split_at(inner),
            false => {
                let (bc, dt) = rest.split_at(2 * each);
                (dt, bc)
            }
        };
        let (b, c) = bc.split_at(each);
        let number = |of: &[f32], i: usize| f64::from(of[i]);
        let mut y = Vec::new();
        for (column, &x) in x.iter().enumerate() {
            let (head, x) = (column / head_dim, f64::from(x));
            let own = if by_element { column } else { head };
            let step = match by_element {
                true => number(steps, own),
                false => self.step(number(steps, own) + number(weights[1], own)),
            };
            let group = head / (heads / groups) * state;
            let mut answer = number(weights[weights.len() - 1], own) * x;
            for i in 0..state {
                let at = (head * state + i) * head_dim + column % head_dim;
                let decay = number(weights[0], if by_element { at } else { head });
                let added = number(b, group + i) * step * x;
                states[at] = states[at] * (decay * step).exp() + added;
                answer += number(c, group + i) * states[at];
            }
            y.push(answer);
        }
        y
    }

    /// The step that a shifted `dt` is.
    fn step(&self, shifted: f64) -> f64 {
        let [least, most] = self.limit.map(f64::from);
        // ln(1 + e^x) without e^x, where that is past all numbers.
        let step = shifted.max(0.0) + (-shifted.abs()).exp().ln_1p();
        step.max(least).min(most)
    }
}

impl Operation for SelectiveScan {
    fn name(&self) -> &'static str {
        "selective_scan"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let (read, held) = (self.inputs(), self.weights());
        arity("selective_scan", inputs, read.len(), weights, &[held.len()])?;
        let shared = self.heads % self.groups.max(1);
        expect("selective_scan", "heads modulo groups", &[shared], &[0])?;
        for ((operand, width), input) in read.into_iter().zip(inputs) {
            expect("selective_scan", operand, &[input.width], &[width])?;
        }
        for ((operand, len), weight) in held.into_iter().zip(weights) {
            expect("selective_scan", operand, weight, &[len])?;
        }
        let [least, most] = self.limit;
        if !(least >= 0.0 && least <= most && most.is_finite()) {
            let found = format!("{least} and {most}");
            return Err(Error::new("selective_scan: limit", "finite bounds of a step", found));
        }
        Ok(vec![Shape { width: self.heads * self.head_dim, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        call.recur(self.layer, (self.start, self.elements()), |states, row, weights| {
            let weights: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
            self.position(states, row, &weights)
        });
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn cache(&self) -> Option<CacheUse> {
        let access = StateAccess::Carry { start: self.start, elements: self.elements() };
        Some(CacheUse { layer: self.layer, access })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn cached_work(&self, positions: &[u32], _oldest: u32) -> CachedWork {
        // For each element of the state: forgetting, what is added, and the answer; and where it
        // has one of its own, the factor by which it decays.
        let each = if self.by_element { 7 } else { 5 };
        let operations = each * (positions.len() * self.elements()) as u64;
        CachedWork { positions: 0, operations }
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }
}

/// The most elements of `B` and of `C`: a lane has its share of a column in registers.
pub const MAX_STATE: usize = 256;

/// The parameters that distinguish the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanForm {
    /// Elements of `B` and of `C`.
    pub state: u32,
    /// Neighbouring elements of these that a lane has: 4, or 1 where they are no whole number of
    /// such vectors.
    pub run: u8,
    /// Neighbouring columns that a lane has: 2, or 1 where a row of a matrix is no whole number of
    /// such vectors; 4 where staged rows fill a GPU so, too.
    pub columns: u8,
    /// Simdgroups of a group that have columns of their own.
    pub simds: u32,
    /// Whether one more simdgroup brings rows through shared memory, as is faster where a step has
    /// many.
    pub staged: bool,
    /// See [`SelectiveScan::by_element`].
    pub by_element: bool,
}

impl ScanForm {
    /// For `op`, whose layer has states of `size` elements.
    ///
    /// # Errors
    /// States that do not fit a simdgroup's registers.
    pub fn of(op: &SelectiveScan, size: usize) -> Result<ScanForm> {
        if op.state > MAX_STATE {
            let expected = format!("states of up to {MAX_STATE} elements");
            let error = Error::new("selective_scan", expected, op.state);
            return Err(error.of(ErrorKind::Unsupported));
        }
        let fours = op.state.is_multiple_of(4 * KEY_LANES as usize)
            && (op.heads * op.head_dim).is_multiple_of(4);
        let pairs = [op.head_dim, op.start, size].iter().all(|n| n.is_multiple_of(2));
        let columns = if pairs { 2 } else { 1 };
        let several = op.head_dim.is_multiple_of(4 * (COLUMN_LANES as usize) * columns);
        Ok(ScanForm {
            state: op.state as u32,
            run: if fours { 4 } else { 1 },
            columns: columns as u8,
            simds: if several { 4 } else { 1 },
            staged: false,
            by_element: op.by_element,
        })
    }

    /// The form for steps of many rows, for `op`, whose layer has states of `size` elements. The
    /// bits of a row are the same. Where elements decay by themselves there is no other.
    pub fn for_many(self, op: &SelectiveScan, size: usize) -> ScanForm {
        let columns = Columns::of(op.heads, op.head_dim, self.share(), &[op.start, size]);
        columns.filter(|_| !self.by_element).map_or(self, |columns| self.staged(columns))
    }

    fn staged(self, Columns { each, simds }: Columns) -> ScanForm {
        ScanForm { columns: each, simds, staged: true, ..self }
    }

    /// A lane's share of `B` or of `C`.
    fn share(self) -> Share {
        Share { len: self.state, run: self.run }
    }

    /// Threads of a group.
    fn threads(self) -> u32 {
        32 * (self.simds + u32::from(self.staged))
    }

    /// Columns that a group has.
    fn group(self) -> u32 {
        self.simds * COLUMN_LANES * u32::from(self.columns)
    }

    /// Declares the launch, a group for some columns of a head and a sequence; gives a lane's part
    /// of its head's matrix, and the sequence.
    #[track_caller]
    fn part(self, states: States, heads: Val<u32>, head_dim: Val<u32>) -> (Part, Val<u32>) {
        let groups = dim("head_dim").ceil_div(self.group());
        launch(Mode::Row, [groups, dim("heads"), dim("batch")], self.threads());
        States::require();
        let (head, sequence) = (group_id_of(1), group_id_of(2));
        let wide = u32::from(self.columns);
        let first = (group_id() * self.simds + simd_id()) * (COLUMN_LANES * wide);
        let column = first + lane_id() / KEY_LANES * wide;
        let (share, columns) = (self.share(), self.columns);
        (Part { share, columns, states, head, heads, width: head_dim, column }, sequence)
    }
}

/// Moves the states of a step's sequences on, and asks them, on the device: `xbc`
/// `[tokens, width]`, `dt` `[tokens, heads]`, `y` `[tokens, heads * head_dim]`. A group has some
/// columns of a head's matrix in registers while all rows of a sequence pass, whatever the step's
/// kind. Idle rows become zeros.
#[kernel]
pub fn selective_scan(
    xbc: In<f32>,
    dt: In<f32>,
    decay: In<f32>,
    bias: In<f32>,
    skip: In<f32>,
    positions: In<u32>,
    sequences: In<u32>,
    starts: In<u32>,
    table: In<u32>,
    states: InOut<f32>,
    y: Out<f32>,
    tokens: Arg<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    size: Const<u32>,
    start: Const<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    head_dim: Const<u32>,
    least: Const<f32>,
    most: Const<f32>,
    form: ScanForm,
) {
    let all = dim("tokens") * dim("heads");
    let both = dim("groups") * (2 * form.state);
    require_vectors(&[
        ("xbc", dim("tokens") * (dim("heads") * dim("head_dim") + both)),
        ("dt", all.clone()),
        ("decay", dim("heads")),
        ("bias", dim("heads")),
        ("skip", dim("heads")),
        ("states", dim("size")),
        ("y", all * dim("head_dim")),
    ]);
    let states = States { states, positions, sequences, starts, table, stride, block, size, start };
    let (part, sequence) = form.part(states, heads, head_dim);
    let (head, wide) = (part.head, u32::from(form.columns));
    let inputs = Inputs { xbc, dt };
    if form.staged {
        require_staged(2 * form.state + form.group() + 1);
        let weights = HeadWeights::of(head, [decay, bias, skip], [least, most]);
        inputs.walk_staged((form, groups), part, weights, [sequence, tokens], y);
    } else {
        let ask = |row| inputs.row(part, groups, row);
        part.walk(sequence, tokens, y, 2 * part.share.own() + wide + 1, ask, || {
            let head = HeadWeights::of(head, [decay, bias, skip], [least, most]);
            move |matrix, values: &[Val<f32>]| head.advance(matrix, values, wide)
        });
    }
}

/// As [`selective_scan()`], where each element decays at a rate of its own: `x` and `step`
/// `[tokens, heads * head_dim]`, `b` and `c` `[tokens, groups * state]`, `decay`
/// `[heads, state, head_dim]`, `skip` `[heads * head_dim]`.
#[kernel]
pub fn selective_scan_by_element(
    x: In<f32>,
    step: In<f32>,
    b: In<f32>,
    c: In<f32>,
    decay: In<f32>,
    skip: In<f32>,
    positions: In<u32>,
    sequences: In<u32>,
    starts: In<u32>,
    table: In<u32>,
    states: InOut<f32>,
    y: Out<f32>,
    tokens: Arg<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    size: Const<u32>,
    start: Const<u32>,
    heads: Const<u32>,
    groups: Const<u32>,
    head_dim: Const<u32>,
    form: ScanForm,
) {
    let inner = dim("heads") * dim("head_dim");
    let [values, shared] =
        [inner.clone(), dim("groups") * form.state].map(|width| dim("tokens") * width);
    require_vectors(&[
        ("x", values.clone()),
        ("step", values.clone()),
        ("b", shared.clone()),
        ("c", shared),
        ("decay", inner.clone() * form.state),
        ("skip", inner),
        ("states", dim("size")),
        ("y", values),
    ]);
    let states = States { states, positions, sequences, starts, table, stride, block, size, start };
    let (part, sequence) = form.part(states, heads, head_dim);
    let Part { share, columns, head, column, .. } = part;
    let own = head * head_dim + select(Order::lt(column, head_dim), column, 0u32);
    let ask = |row: Val<u32>| {
        let shared = (row * groups + head / (heads / groups)) * share.len;
        let values = row * (heads * head_dim) + own;
        let [b, c] = [b, c].map(|x| share.load(x, shared));
        [b, c, load(x, values, columns), load(step, values, columns)].concat()
    };
    let count = 2 * (share.own() + u32::from(columns));
    part.walk(sequence, tokens, y, count, ask, || {
        let decays = part.of(decay);
        let skips = load(skip, own, columns);
        move |matrix, values: &[Val<f32>]| {
            let (shares, rest) = values.split_at(2 * share.own() as usize);
            let (b, c) = shares.split_at(shares.len() / 2);
            let (x, step) = rest.split_at(skips.len());
            add_by_element(matrix, decays, b, x, step);
            let said = products(matrix, c, u32::from(columns)).into_iter().zip(x).zip(&skips);
            said.map(|((said, x), skip)| x.fma(*skip, said)).collect()
        }
    });
}

/// Moves columns side by side, whose inputs are `x`, on by a lane's share of `B`, where elements decay
/// at the rates `decays`, and columns have steps.
#[track_caller]
fn add_by_element(matrix: Regs, decays: Regs, b: &[Val<f32>], x: &[Val<f32>], steps: &[Val<f32>]) {
    let wide = x.len() as u32;
    let written: Vec<Val<f32>> = x.iter().zip(steps).map(|(&x, &step)| x * step).collect();
    for (i, &b) in (0u32..).zip(b) {
        for (at, (&written, &step)) in (i * wide..).zip(written.iter().zip(steps)) {
            let gate = (decays.get(at) * step).exp();
            matrix.set(at, b.fma(written, matrix.get(at) * gate));
        }
    }
}

/// The buffers of rows that a kernel reads.
#[derive(Clone, Copy)]
struct Inputs {
    xbc: In,
    dt: In,
}

impl Inputs {
    /// A lane's inputs of a row: its elements of `B`, of `C` and of `x`, then `dt`.
    #[track_caller]
    fn row(&self, part: Part, groups: Val<u32>, row: Val<u32>) -> Vec<Val<f32>> {
        let Part { share, columns, head, heads, width, column, .. } = part;
        let (inner, each) = (heads * width, groups * share.len);
        let first = row * (inner + each * 2u32);
        let b = first + inner + head / (heads / groups) * share.len;
        let exists = Order::lt(column, width);
        let column = head * width + select(exists, column, 0u32);
        let mut found = share.load(self.xbc, b);
        found.extend(share.load(self.xbc, b + each));
        found.extend(load(self.xbc, first + column, columns));
        found.push(self.dt.get(row * heads + head));
        found
    }

    /// Walks over rows that come through shared memory.
    #[track_caller]
    fn walk_staged(
        self,
        (form, groups): (ScanForm, Val<u32>),
        part: Part,
        weights: HeadWeights,
        step: [Val<u32>; 2],
        y: Out,
    ) {
        let Part { share, head, heads, width, .. } = part;
        let (inner, each) = (heads * width, groups * share.len);
        let row_len = inner + each * 2u32;
        let b = inner + head / (heads / groups) * share.len;
        let first = group_id() * form.group();
        let x_at = |row: Val<u32>| row * row_len + head * width + first;
        let pieces = [
            Piece { from: self.xbc, len: share.len, at: &|row| row * row_len + b },
            Piece { from: self.xbc, len: share.len, at: &|row| row * row_len + b + each },
            Piece { from: self.xbc, len: form.group(), at: &x_at },
            Piece { from: self.dt, len: 1, at: &|row| row * heads + head },
        ];
        let (brings, part) = part.staged(form.simds);
        part.walk_staged(step, y, brings, &pieces, &Staged { form, part, first, weights });
    }
}

/// How a state space passes staged rows.
struct Staged {
    form: ScanForm,
    part: Part,
    /// The group's first column.
    first: Val<u32>,
    weights: HeadWeights,
}

impl Staged {
    /// The lane's columns of a row of `x`.
    #[track_caller]
    fn x(&self, row: &StagedRow<'_>) -> Vec<Val<f32>> {
        row.elements(2, self.part.column - self.first, self.form.columns)
    }
}

impl Passes for Staged {
    /// The step, and the factor by which it decays the matrix.
    #[track_caller]
    fn prepare(&self, rows: StagedRows<'_>) {
        when(Order::lt(lane_id(), rows.len()), || {
            let row = rows.row(lane_id());
            let rates = self.weights.rates(row.element(3));
            (0..).zip(rates).for_each(|(i, x)| row.set_number(i, x));
        });
    }

    #[track_caller]
    fn ask(&self, row: &StagedRow<'_>) -> Vec<Val<f32>> {
        let share = self.part.share;
        [row.numbers(2), self.x(row), row.share(0, share), row.share(1, share)].concat()
    }

    #[track_caller]
    fn advance(&self, matrix: Regs, values: &[Val<f32>]) -> Vec<Val<f32>> {
        let (rates, rest) = values.split_at(2);
        let (x, rest) = rest.split_at(usize::from(self.form.columns));
        let (b, c) = rest.split_at(rest.len() / 2);
        add(matrix, b, x, [rates[0], rates[1]]);
        parts_of_products(matrix, c, x.len() as u32)
    }

    #[track_caller]
    fn answer(&self, row: &StagedRow<'_>, said: Vec<Val<f32>>) -> Vec<Val<f32>> {
        self.weights.skipping(&self.x(row), said)
    }
}

/// A head's numbers.
#[derive(Clone, Copy)]
struct HeadWeights {
    decay: Val<f32>,
    bias: Val<f32>,
    skip: Val<f32>,
    limit: [Val<f32>; 2],
}

impl HeadWeights {
    #[track_caller]
    fn of(head: Val<u32>, weights: [In; 3], limit: [Val<f32>; 2]) -> HeadWeights {
        let [decay, bias, skip] = weights.map(|weight| weight.get(head));
        HeadWeights { decay, bias, skip, limit }
    }

    /// The step of a row, and the factor by which it decays the matrix.
    #[track_caller]
    fn rates(&self, dt: Val<f32>) -> [Val<f32>; 2] {
        let [least, most] = self.limit;
        let step = softplus(dt + self.bias).max(least).min(most);
        [step, (self.decay * step).exp()]
    }

    /// Moves `wide` columns of a matrix on by what [`row`](Inputs::row) gave of a position, and
    /// asks them.
    #[track_caller]
    fn advance(&self, matrix: Regs, values: &[Val<f32>], wide: u32) -> Vec<Val<f32>> {
        let (rest, dt) = values.split_at(values.len() - 1);
        let (shares, x) = rest.split_at(rest.len() - wide as usize);
        let (b, c) = shares.split_at(shares.len() / 2);
        add(matrix, b, x, self.rates(dt[0]));
        self.skipping(x, products(matrix, c, wide))
    }

    /// Adds what skips the matrix to what its columns say.
    #[track_caller]
    fn skipping(&self, x: &[Val<f32>], said: Vec<Val<f32>>) -> Vec<Val<f32>> {
        said.into_iter().zip(x).map(|(said, &x)| x.fma(self.skip, said)).collect()
    }
}

/// Moves columns side by side, whose inputs are `x`, on by a lane's share of `B`.
#[track_caller]
fn add(matrix: Regs, b: &[Val<f32>], x: &[Val<f32>], [step, gate]: [Val<f32>; 2]) {
    let written: Vec<Val<f32>> = x.iter().map(|&x| x * step).collect();
    write(matrix, b, &written, gate);
}

/// Makes `gate matrix + b written'` of a matrix, of whose columns side by side `written` has an
/// element each; `b` and `matrix` are a lane's shares.
#[track_caller]
pub(crate) fn write(matrix: Regs, b: &[Val<f32>], written: &[Val<f32>], gate: Val<f32>) {
    let wide = written.len() as u32;
    for (i, &b) in (0u32..).zip(b) {
        for (at, &written) in (i * wide..).zip(written) {
            matrix.set(at, b.fma(written, matrix.get(at) * gate));
        }
    }
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "selective_scan", cases, benches: || benches(false) },
    Spec { name: "selective_scan_by_element", cases: cases_by_element, benches: || benches(true) },
];

/// The kernel of a form.
pub fn kernel(form: ScanForm) -> Recipe<'static> {
    if form.by_element { selective_scan_by_element(form) } else { selective_scan(form) }
}

/// The numbers of a launch; `step` has the numbers of its step.
pub fn numbers(op: &SelectiveScan, step: Numbers) -> Numbers {
    let sizes = step
        .with("start", op.start as u32)
        .with("heads", op.heads as u32)
        .with("groups", op.groups as u32)
        .with("head_dim", op.head_dim as u32);
    match op.by_element {
        true => sizes,
        false => sizes.with_f32("least", op.limit[0]).with_f32("most", op.limit[1]),
    }
}

fn cases() -> Vec<Case> {
    let all = [chunk(0, 0..2), chunk(1, 14..19), chunk(2, 15..17), chunk(4, 0..2)].concat();
    let each = [chunk(0, 31..32), chunk(1, 0..1), chunk(2, 5..6), chunk(4, 0..2)].concat();
    let columns = |each, simds| Some(Columns { each, simds });
    let long = [chunk(0, 0..11), chunk(1, 3..40), chunk(2, 15..17), chunk(4, 0..1)].concat();
    [
        (&chunk(0, 7..8)[..], [2, 1, 64, 128], None, "one token"),
        (&each, [2, 1, 16, 32], None, "a token of each of three sequences, and idle rows"),
        (&chunk(0, 0..1), [2, 2, 32, 256], None, "the first token, states as wide as any"),
        (&all, [6, 3, 12, 16], None, "chunks of several sequences, and bounds that bind"),
        (&all, [4, 2, 7, 13], None, "sizes that no vector divides"),
        (&chunk(1, 30..34), [3, 1, 40, 32], None, "over a block's end, columns that fill no group"),
        (&long, [6, 3, 16, 32], columns(2, 2), "prompts, staged, and bounds that bind"),
        (&long, [2, 1, 80, 64], columns(2, 2), "prompts, staged, five groups of columns"),
        (&chunk(3, 5..20), [1, 1, 32, 256], columns(1, 4), "staged, states as wide as any"),
        (&long, [2, 1, 64, 32], columns(4, 4), "prompts, staged, four columns a lane"),
    ]
    .into_iter()
    .map(|(rows, sizes, staged, why)| {
        let limit = if sizes[1] == 3 { [0.3, 0.9] } else { UNLIMITED };
        let start = if staged.is_some() { 8 } else { 6 };
        let op = SelectiveScan { start, limit, ..SelectiveScan::new(sizes) };
        case(op, rows, staged, why)
    })
    .collect()
}

fn cases_by_element() -> Vec<Case> {
    let all = [chunk(0, 0..2), chunk(1, 14..19), chunk(2, 15..17), chunk(4, 0..2)].concat();
    let each = [chunk(0, 31..32), chunk(1, 0..1), chunk(2, 5..6), chunk(4, 0..2)].concat();
    [
        (&chunk(0, 7..8)[..], [1, 1, 96, 16], "one token"),
        (&each, [1, 1, 32, 32], "a token of each of three sequences, and idle rows"),
        (&chunk(0, 0..1), [1, 1, 16, 256], "the first token, states as wide as any"),
        (&all, [1, 1, 80, 16], "chunks of several sequences"),
        (&all, [4, 2, 7, 13], "sizes that no vector divides, heads that share B and C"),
        (&chunk(1, 30..34), [1, 1, 40, 8], "over a block's end, columns that fill no group"),
    ]
    .into_iter()
    .map(|(rows, sizes, why)| {
        let op = SelectiveScan { start: 6, by_element: true, ..SelectiveScan::new(sizes) };
        case(op, rows, None, why)
    })
    .collect()
}

/// A step of `rows`, `(sequence, position)`.
fn case(op: SelectiveScan, rows: &[(u32, u32)], staged: Option<Columns>, why: &str) -> Case {
    let SelectiveScan { start, heads, groups, head_dim, state, by_element, .. } = op;
    let trial = Trial::of(rows, op.start + op.elements() + start % 4);
    let form = ScanForm::of(&op, trial.size).expect("states that fit");
    let form = staged.map_or(form, |columns| form.staged(columns));
    let tokens = rows.len();
    let states = random(Scalar::F32, 5, trial.elements());
    // Decay rates and steps have signs of their own.
    let decay: Vec<f32> = match by_element {
        true => (0..op.elements()).map(|i| -0.02 - (i % 23) as f32 / 3.0).collect(),
        false => (0..heads).map(|h| -0.02 - h as f32).collect(),
    };
    let read = op.inputs();
    let inputs: Vec<Buffer> = (1u64..)
        .zip(&read)
        .map(|(seed, (name, width))| match *name {
            "dt" => scaled(Scalar::F32, seed, tokens * width, 4.0),
            "step" => {
                let noise = random(Scalar::F32, seed, tokens * width).to_f32();
                let steps: Vec<f32> = noise.iter().map(|x| x.abs()).collect();
                Buffer::floats(Scalar::F32, &steps)
            }
            _ => random(Scalar::F32, seed, tokens * width),
        })
        .collect();
    let rest = op.weights().into_iter().skip(1).zip(read.len() as u64 + 1..);
    let weights: Vec<Buffer> = std::iter::once(Buffer::floats(Scalar::F32, &decay))
        .chain(rest.map(|((_, len), seed)| random(Scalar::F32, seed, len)))
        .collect();
    let [numbers_of_rows, held] = [&inputs, &weights]
        .map(|buffers| buffers.iter().map(Buffer::to_f32).collect::<Vec<Vec<f32>>>());
    let held: Vec<&[f32]> = held.iter().map(Vec::as_slice).collect();
    let part = op.start..op.start + op.elements();
    let (after, y) = trial.walk(&states, part, heads * head_dim, |row, state| {
        let of = numbers_of_rows.iter().zip(&read);
        let whole: Vec<f32> =
            of.flat_map(|(x, (_, width))| x[row * width..][..*width].to_vec()).collect();
        op.position(state, &whole, &held)
    });
    let outputs = inputs.len() + weights.len() + 4;
    let mut buffers = [inputs, weights].concat();
    buffers.extend(trial.buffers());
    // Not zeros, which idle rows must become: those that have a sequence's number.
    let y_before = match tokens <= Trial::IDLE as usize + 1 {
        true => random(Scalar::F32, 6, tokens * heads * head_dim),
        false => Buffer::zeros(Scalar::F32, tokens * heads * head_dim),
    };
    buffers.extend([states, y_before]);
    let near = |values| Expected::Near(values, tolerance(Scalar::F32));
    Case {
        kernel: kernel(form).record(),
        label: format!("{tokens} x {heads} of {state} x {head_dim} by {groups}, {why}"),
        numbers: numbers(&op, trial.numbers()),
        buffers,
        expected: vec![(outputs, near(after)), (outputs + 1, near(y))],
    }
}

fn benches(by_element: bool) -> Vec<Bench> {
    // Nemotron Nano's sizes, and Falcon Mamba's.
    let sizes = if by_element { [1, 1, 8192, 16] } else { [128, 8, 64, 128] };
    let [heads, _, head_dim, state] = sizes;
    let op = SelectiveScan { by_element, ..SelectiveScan::new(sizes) };
    let bench = |(tokens, many): (usize, bool)| {
        let trial = Trial::one(tokens, op.elements());
        let noise = |len| Fill::Noise(Scalar::F32, len);
        let mut buffers: Vec<Fill> =
            op.inputs().into_iter().map(|(_, width)| noise(tokens * width)).collect();
        buffers.extend(op.weights().into_iter().map(|(_, len)| noise(len)));
        buffers.extend(trial.buffers().map(Fill::These));
        buffers.push(Fill::Zeros(Scalar::F32, trial.elements()));
        buffers.push(Fill::Zeros(Scalar::F32, tokens * heads * head_dim));
        let form = ScanForm::of(&op, op.elements()).expect("states that fit");
        let kernel = kernel(if many { form.for_many(&op, op.elements()) } else { form });
        let flops = op.cached_work(&vec![0; tokens], 0).operations;
        let how = if many { ", staged" } else { "" };
        let label = format!("{tokens} x {heads} of {state} x {head_dim}{how}");
        memory(kernel, &label, numbers(&op, trial.numbers()), buffers, flops)
    };
    let all = [(1, false), (16, false), (16, true), (2048, false), (2048, true)];
    all.into_iter().filter(|(_, many)| !(*many && by_element)).map(bench).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn staged_rows_have_the_bits_of_others() {
        let rows: Vec<(u32, u32)> = (5..30).map(|position| (1, position)).collect();
        let run = |staged| {
            let op = SelectiveScan { start: 8, ..SelectiveScan::new([2, 1, 32, 64]) };
            let Case { kernel, numbers, mut buffers, .. } = case(op, &rows, staged, "");
            tile::interp::run(&kernel, &numbers, &mut buffers).unwrap();
            let [.., states, y] = &buffers[..] else { unreachable!("states and answers") };
            (states.bytes.clone(), y.bytes.clone())
        };
        let others = run(None);
        for (each, simds) in [(1, 4), (2, 1), (2, 2), (4, 2)] {
            assert!(run(Some(Columns { each, simds })) == others, "{each} columns, {simds}");
        }
    }
}
