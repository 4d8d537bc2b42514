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
//! are beside each other share `B` and `C`. Mamba-1, in which each element decays by itself, is
//! another operation.

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
/// the groups' `B`, then their `C`.
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
}

/// Bounds of a step that bound nothing.
pub const UNLIMITED: [f32; 2] = [0.0, f32::MAX];

impl SelectiveScan {
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

    /// Moves the matrices of all heads one position on, and gives a row of `y`; all in f64. `xbc`
    /// and `dt` are the position's, `decay`, `bias` and `skip` the weights.
    fn position(&self, states: &mut [f64], [xbc, dt, decay, bias, skip]: [&[f32]; 5]) -> Vec<f64> {
        let [least, most] = self.limit.map(f64::from);
        let mut y = Vec::new();
        for (h, state) in states.chunks_exact_mut(self.state * self.head_dim).enumerate() {
            let [x, b, c] = self.starts(h);
            let shifted = f64::from(dt[h]) + f64::from(bias[h]);
            // ln(1 + e^x) without e^x, where that is past all numbers.
            let step = shifted.max(0.0) + (-shifted.abs()).exp().ln_1p();
            let step = step.max(least).min(most);
            let gate = (f64::from(decay[h]) * step).exp();
            for j in 0..self.head_dim {
                let x = f64::from(xbc[x + j]);
                let mut answer = f64::from(skip[h]) * x;
                for i in 0..self.state {
                    let at = &mut state[i * self.head_dim + j];
                    *at = *at * gate + f64::from(xbc[b + i]) * step * x;
                    answer += f64::from(xbc[c + i]) * *at;
                }
                y.push(answer);
            }
        }
        y
    }
}

impl Operation for SelectiveScan {
    fn name(&self) -> &'static str {
        "selective_scan"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("selective_scan", inputs, 2, weights, &[3])?;
        let shared = self.heads % self.groups.max(1);
        expect("selective_scan", "heads modulo groups", &[shared], &[0])?;
        expect("selective_scan", "x, B and C", &[inputs[0].width], &[self.width()])?;
        expect("selective_scan", "dt", &[inputs[1].width], &[self.heads])?;
        for (operand, weight) in ["decay", "bias", "skip"].into_iter().zip(weights) {
            expect("selective_scan", operand, weight, &[self.heads])?;
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
            let (xbc, dt) = row.split_at(self.width());
            self.position(states, [xbc, dt, &weights[0], &weights[1], &weights[2]])
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
        // For each element of the state: forgetting, what is added, and the answer.
        let operations = 5 * (positions.len() * self.elements()) as u64;
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
        })
    }

    /// The form for steps of many rows, for `op`, whose layer has states of `size` elements. The
    /// bits of a row are the same.
    pub fn for_many(self, op: &SelectiveScan, size: usize) -> ScanForm {
        let columns = Columns::of(op.heads, op.head_dim, self.share(), &[op.start, size]);
        columns.map_or(self, |columns| self.staged(columns))
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
    let columns = dim("head_dim").ceil_div(form.group());
    launch(Mode::Row, [columns, dim("heads"), dim("batch")], form.threads());
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
    States::require();
    let states = States { states, positions, sequences, starts, table, stride, block, size, start };
    let (head, sequence) = (group_id_of(1), group_id_of(2));
    let wide = u32::from(form.columns);
    let first = (group_id() * form.simds + simd_id()) * (COLUMN_LANES * wide);
    let column = first + lane_id() / KEY_LANES * wide;
    let (share, columns) = (form.share(), form.columns);
    let part = Part { share, columns, states, head, heads, width: head_dim, column };
    let inputs = Inputs { xbc, dt };
    if form.staged {
        require_staged(2 * form.state + form.group() + 1);
        let weights = HeadWeights::of(head, [decay, bias, skip], [least, most]);
        inputs.walk_staged((form, groups), part, weights, [sequence, tokens], y);
    } else {
        let ask = |row| inputs.row(part, groups, row);
        part.walk(sequence, tokens, y, 2 * share.own() + wide + 1, ask, || {
            let head = HeadWeights::of(head, [decay, bias, skip], [least, most]);
            move |matrix, values: &[Val<f32>]| head.advance(matrix, values, wide)
        });
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

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "selective_scan", cases, benches }];

/// The numbers of a launch; `step` has the numbers of its step.
pub fn numbers(op: &SelectiveScan, step: Numbers) -> Numbers {
    step.with("start", op.start as u32)
        .with("heads", op.heads as u32)
        .with("groups", op.groups as u32)
        .with("head_dim", op.head_dim as u32)
        .with_f32("least", op.limit[0])
        .with_f32("most", op.limit[1])
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
        case((rows, sizes), if staged.is_some() { 8 } else { 6 }, staged, why)
    })
    .collect()
}

/// A step of `rows`, `(sequence, position)`, on states whose part begins at `start`.
fn case(
    (rows, sizes): (&[(u32, u32)], [usize; 4]),
    start: usize,
    staged: Option<Columns>,
    why: &str,
) -> Case {
    let [heads, groups, head_dim, state] = sizes;
    let limit = if groups == 3 { [0.3, 0.9] } else { UNLIMITED };
    let op = SelectiveScan { layer: 0, start, heads, groups, head_dim, state, limit };
    let trial = Trial::of(rows, op.start + op.elements() + start % 4);
    let form = ScanForm::of(&op, trial.size).expect("states that fit");
    let form = staged.map_or(form, |columns| form.staged(columns));
    let tokens = rows.len();
    let xbc = random(Scalar::F32, 1, tokens * op.width());
    let dt = scaled(Scalar::F32, 2, tokens * heads, 4.0);
    let decay: Vec<f32> = (0..heads).map(|h| -0.02 - h as f32).collect();
    let [bias, skip] = [3, 4].map(|seed| random(Scalar::F32, seed, heads));
    let states = random(Scalar::F32, 5, trial.elements());
    let [x, steps, shifts, skips] = [&xbc, &dt, &bias, &skip].map(Buffer::to_f32);
    let part = op.start..op.start + op.elements();
    let (after, y) = trial.walk(&states, part, heads * head_dim, |row, state| {
        let (x, dt) = (&x[row * op.width()..][..op.width()], &steps[row * heads..][..heads]);
        op.position(state, [x, dt, &decay, &shifts, &skips])
    });
    let mut buffers = vec![xbc, dt, Buffer::floats(Scalar::F32, &decay), bias, skip];
    buffers.extend(trial.buffers());
    // Not zeros, which idle rows must become: those that have a sequence's number.
    let y_before = match tokens <= Trial::IDLE as usize + 1 {
        true => random(Scalar::F32, 6, tokens * heads * head_dim),
        false => Buffer::zeros(Scalar::F32, tokens * heads * head_dim),
    };
    buffers.extend([states, y_before]);
    let near = |values| Expected::Near(values, tolerance(Scalar::F32));
    Case {
        kernel: selective_scan(form).record(),
        label: format!("{tokens} x {heads} of {state} x {head_dim} by {groups}, {why}"),
        numbers: numbers(&op, trial.numbers()),
        buffers,
        expected: vec![(9, near(after)), (10, near(y))],
    }
}

fn benches() -> Vec<Bench> {
    let [heads, groups, head_dim, state] = [128, 8, 64, 128];
    let op = SelectiveScan { layer: 0, start: 0, heads, groups, head_dim, state, limit: UNLIMITED };
    let bench = |(tokens, many): (usize, bool)| {
        let trial = Trial::one(tokens, op.elements());
        let noise = |len| Fill::Noise(Scalar::F32, len);
        let mut buffers = vec![noise(tokens * op.width()), noise(tokens * heads)];
        buffers.extend([heads; 3].map(noise));
        buffers.extend(trial.buffers().map(Fill::These));
        buffers.push(Fill::Zeros(Scalar::F32, trial.elements()));
        buffers.push(Fill::Zeros(Scalar::F32, tokens * heads * head_dim));
        let form = ScanForm::of(&op, op.elements()).expect("states that fit");
        let kernel = selective_scan(if many { form.for_many(&op, op.elements()) } else { form });
        let flops = 5 * (tokens * op.elements()) as u64;
        let how = if many { ", staged" } else { "" };
        let label = format!("{tokens} x 128 of 128 x 64{how}");
        memory(kernel, &label, numbers(&op, trial.numbers()), buffers, flops)
    };
    [(1, false), (16, false), (16, true), (2048, false), (2048, true)].map(bench).to_vec()
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
            let Case { kernel, numbers, mut buffers, .. } =
                case((&rows, [2, 1, 32, 64]), 8, staged, "");
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
