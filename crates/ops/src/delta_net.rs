//! A gated delta net (Yang et al. 2024, Gated Delta Networks): each head carries a matrix `S`
//! `[key, value]` that maps keys to values, forgets some of it at each position, and corrects what
//! it says of the position's key:
//!
//! ```text
//! S' = g S,  S = S' + k (beta (v - k S')),  y = q S
//! g = exp(decay softplus(a + dt)),  beta = sigmoid(b)
//! ```
//!
//! `q` and `k` are divided by their lengths first, and `q` by the root of its number of elements.
//! `decay` is negative.

use formats::{Error, ErrorKind, Result};
use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::math::{sigmoid, softplus};
use crate::operation::{
    ActivationPrecision, CacheUse, CachedWork, Operation, ReferenceCall, Sharding, StateAccess,
};
use crate::states::{States, Trial, each_row};
use crate::sweep::{begin, load, require_vectors, when};
use crate::trial::{memory, random, scaled};
use crate::{Shape, arity, expect};

/// `qkv[tokens, 2 * key_heads * key_dim + heads * value_dim], a[tokens, heads], b[tokens, heads];
/// decay[heads], dt[heads] -> [tokens, heads * value_dim]`. Several heads share a head of `q` and
/// `k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeltaNet {
    /// Index of the cache layer.
    pub layer: usize,
    /// Where its part of the layer's state begins, `[heads, key_dim, value_dim]`.
    pub start: usize,
    /// Heads, of which each has values and a matrix.
    pub heads: usize,
    /// Heads of queries and keys; divides `heads`.
    pub key_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Which heads share a head of queries and keys: every `key_heads`th, as GGUF files of Qwen3.5
    /// have them, or those beside each other.
    pub tiled: bool,
}

/// Added to the square of the length of a query or key.
pub(crate) const LENGTH_EPS: f32 = 1e-6;

impl DeltaNet {
    /// Elements in a row of queries, keys and values.
    pub fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.heads * self.value_dim
    }

    /// The head of queries and keys that a head shares.
    pub fn key_head(&self, head: usize) -> usize {
        if self.tiled { head % self.key_heads } else { head / (self.heads / self.key_heads) }
    }

    /// Elements of its part of the state.
    pub fn elements(&self) -> usize {
        self.heads * self.key_dim * self.value_dim
    }

    /// Moves the matrices of all heads one position on, and gives a row of `y`; all in f64. `qkv`,
    /// `a` and `b` are the position's, `decay` and `dt` the weights.
    pub(crate) fn position(&self, states: &mut [f64], operands: [&[f32]; 5]) -> Vec<f64> {
        let matrices = states.chunks_exact_mut(self.key_dim * self.value_dim).enumerate();
        let head = |(h, state): (usize, &mut [f64])| self.row(h, operands).advance(state);
        matrices.flat_map(head).collect()
    }

    /// Where the query, the key and the value of a head begin in a row.
    pub fn starts(&self, head: usize) -> [usize; 3] {
        let (keys, of) = (self.key_heads * self.key_dim, self.key_head(head) * self.key_dim);
        [of, keys + of, 2 * keys + head * self.value_dim]
    }

    /// A position's operands as a head uses them.
    pub(crate) fn row(&self, head: usize, [qkv, a, b, decay, dt]: [&[f32]; 5]) -> HeadRow {
        let [q, k, v] = self.starts(head);
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        let unit = |x: &[f32]| {
            let x = wide(x);
            let square: f64 = x.iter().map(|x| x * x).sum();
            let length = (square + f64::from(LENGTH_EPS)).sqrt();
            (x.iter().map(|x| x / length).collect(), length)
        };
        let ((q, q_length), (k, k_length)) =
            (unit(&qkv[q..][..self.key_dim]), unit(&qkv[k..][..self.key_dim]));
        let shifted = f64::from(a[head]) + f64::from(dt[head]);
        let (decay, step) = (f64::from(decay[head]), shifted.exp().ln_1p());
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        HeadRow {
            q,
            k,
            v: wide(&qkv[v..][..self.value_dim]),
            lengths: [q_length, k_length],
            root: (self.key_dim as f64).sqrt(),
            step,
            rate: logistic(shifted),
            decay,
            gate: (decay * step).exp(),
            beta: logistic(f64::from(b[head])),
        }
    }
}

/// A position as one head sees it, in f64.
pub(crate) struct HeadRow {
    /// The query and the key, divided by their lengths.
    pub(crate) q: Vec<f64>,
    pub(crate) k: Vec<f64>,
    pub(crate) v: Vec<f64>,
    /// The lengths of the query and of the key.
    pub(crate) lengths: [f64; 2],
    /// Divisor of `y`.
    pub(crate) root: f64,
    /// `softplus(a + dt)`, and how it changes with `a`.
    pub(crate) step: f64,
    pub(crate) rate: f64,
    pub(crate) decay: f64,
    pub(crate) gate: f64,
    pub(crate) beta: f64,
}

impl HeadRow {
    /// Moves the matrix `[key_dim, value_dim]` one position on, and gives `y`.
    pub(crate) fn advance(&self, state: &mut [f64]) -> Vec<f64> {
        let (n, keys) = (self.v.len(), self.k.len());
        state.iter_mut().for_each(|s| *s *= self.gate);
        (0..n)
            .map(|j| {
                let said: f64 = (0..keys).map(|i| state[i * n + j] * self.k[i]).sum();
                let change = (self.v[j] - said) * self.beta;
                (0..keys).for_each(|i| state[i * n + j] += self.k[i] * change);
                (0..keys).map(|i| state[i * n + j] * self.q[i]).sum::<f64>() / self.root
            })
            .collect()
    }
}

impl Operation for DeltaNet {
    fn name(&self) -> &'static str {
        "delta_net"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("delta_net", inputs, 3, weights, &[2])?;
        let shared = self.heads % self.key_heads.max(1);
        expect("delta_net", "heads modulo key heads", &[shared], &[0])?;
        expect("delta_net", "queries, keys and values", &[inputs[0].width], &[self.width()])?;
        for (operand, input) in [("a", 1), ("b", 2)] {
            expect("delta_net", operand, &[inputs[input].width], &[self.heads])?;
        }
        for (operand, weight) in ["decay", "dt"].into_iter().zip(weights) {
            expect("delta_net", operand, weight, &[self.heads])?;
        }
        Ok(vec![Shape { width: self.heads * self.value_dim, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        call.recur(self.layer, (self.start, self.elements()), |states, row, weights| {
            let (qkv, gates) = row.split_at(self.width());
            let (a, b) = gates.split_at(self.heads);
            self.position(states, [qkv, a, b, &weights[0], &weights[1]])
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
        // For each element of the state: forgetting, what it says, the change and the answer.
        let operations = 7 * (positions.len() * self.elements()) as u64;
        CachedWork { positions: 0, operations }
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }
}

/// Lanes of a simdgroup that share a column, by keys; the others have other columns.
pub(crate) const KEY_LANES: u32 = 8;
/// Columns, or pairs of them, that a simdgroup has side by side.
pub(crate) const COLUMN_LANES: u32 = 32 / KEY_LANES;
/// The most elements of a query or key: a lane has its share of a column in registers.
pub const MAX_KEY_DIM: usize = 256;

/// The parameters that distinguish the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaForm {
    /// Elements of a query or key.
    pub key_dim: u32,
    /// Neighbouring elements of a key that a lane has: 4, or 1 where keys are no whole number of
    /// such vectors.
    pub keys: u8,
    /// Neighbouring columns that a lane has: 2, or 1 where a row of a matrix is no whole number of
    /// such vectors.
    pub columns: u8,
    /// Simdgroups of a group, each with columns of its own.
    pub simds: u32,
    /// See [`DeltaNet::tiled`].
    pub tiled: bool,
}

impl DeltaForm {
    /// For `op`, whose layer has states of `size` elements.
    ///
    /// # Errors
    /// Keys that do not fit a simdgroup's registers.
    pub fn of(op: &DeltaNet, size: usize) -> Result<DeltaForm> {
        if op.key_dim > MAX_KEY_DIM {
            let expected = format!("keys of up to {MAX_KEY_DIM} elements");
            let error = Error::new("delta_net", expected, op.key_dim);
            return Err(error.of(ErrorKind::Unsupported));
        }
        let fours =
            op.key_dim.is_multiple_of(4 * KEY_LANES as usize) && op.width().is_multiple_of(4);
        let pairs = [op.value_dim, op.start, size, op.width()].iter().all(|n| n.is_multiple_of(2));
        let columns = if pairs { 2 } else { 1 };
        let several = op.value_dim.is_multiple_of(4 * (COLUMN_LANES as usize) * columns);
        Ok(DeltaForm {
            key_dim: op.key_dim as u32,
            keys: if fours { 4 } else { 1 },
            columns: columns as u8,
            simds: if several { 4 } else { 1 },
            tiled: op.tiled,
        })
    }

    /// A lane's share of a query or key.
    fn share(self) -> Share {
        Share { len: self.key_dim, run: self.keys }
    }

    /// Columns that a group has.
    fn group(self) -> u32 {
        self.simds * COLUMN_LANES * u32::from(self.columns)
    }
}

/// Moves the states of a step's sequences on, and asks them, on the device: `qkv`
/// `[tokens, width]`, `a` and `b` `[tokens, heads]`, `y` `[tokens, heads * value_dim]`. A group has
/// some columns of a head's matrix in registers while all rows of a sequence pass, whatever the
/// step's kind. Idle rows become zeros.
#[kernel]
pub fn delta_net(
    qkv: In<f32>,
    a: In<f32>,
    b: In<f32>,
    decay: In<f32>,
    dt: In<f32>,
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
    key_heads: Const<u32>,
    value_dim: Const<u32>,
    form: DeltaForm,
) {
    let groups = dim("value_dim").ceil_div(form.group());
    launch(Mode::Row, [groups, dim("heads"), dim("batch")], 32 * form.simds);
    let values = dim("heads") * dim("value_dim");
    let gates = dim("tokens") * dim("heads");
    require_vectors(&[
        ("qkv", dim("tokens") * (dim("key_heads") * (2 * form.key_dim) + values.clone())),
        ("a", gates.clone()),
        ("b", gates),
        ("decay", dim("heads")),
        ("dt", dim("heads")),
        ("states", dim("size")),
        ("y", dim("tokens") * values),
    ]);
    States::require();
    let states = States { states, positions, sequences, starts, table, stride, block, size, start };
    let (head, sequence) = (group_id_of(1), group_id_of(2));
    let wide = u32::from(form.columns);
    let first = (group_id() * form.simds + simd_id()) * (COLUMN_LANES * wide);
    let column = first + lane_id() / KEY_LANES * wide;
    let (share, columns) = (form.share(), form.columns);
    let part = Part { share, columns, states, head, heads, width: value_dim, column };
    let lane = Lane { form, key_heads, part };
    let ask = |row| lane.row(Inputs { qkv, a, b }, row);
    part.walk(sequence, tokens, y, 2 * share.own() + wide + 2, ask, || {
        let (decay, dt) = (decay.get(head), dt.get(head));
        move |matrix, values: &[Val<f32>]| lane.advance(matrix, values, decay, dt)
    });
}

/// The buffers of rows that a kernel reads.
#[derive(Clone, Copy)]
struct Inputs {
    qkv: In,
    a: In,
    b: In,
}

/// The sum over the lanes that share a column.
#[track_caller]
pub(crate) fn over_keys(x: Val<f32>) -> Val<f32> {
    [1, 2, 4].into_iter().fold(x, |x, mask| x + shuffle_xor(x, mask))
}

/// A lane's share of a vector that the lanes of a column have together: runs of neighbouring
/// elements, by turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// Elements of the vector.
    pub(crate) len: u32,
    /// Elements of a run.
    pub(crate) run: u8,
}

impl Share {
    /// Elements that a lane has.
    pub(crate) fn own(self) -> u32 {
        self.len.div_ceil(KEY_LANES * u32::from(self.run)) * u32::from(self.run)
    }

    /// Calls `f` with the first element of each of the lane's runs, its number in registers, and
    /// whether it is one.
    #[track_caller]
    pub(crate) fn runs(self, mut f: impl FnMut(Val<u32>, u32, Option<Val<bool>>)) {
        let wide = u32::from(self.run);
        for run in 0..self.own() / wide {
            let first = (lane_id() % KEY_LANES + run * KEY_LANES) * wide;
            let whole = (run + 1) * KEY_LANES * wide <= self.len;
            f(first, run * wide, (!whole).then(|| Order::lt(first, self.len)));
        }
    }

    /// The lane's elements of a vector that begins at `from`; zeros behind the last.
    #[track_caller]
    pub(crate) fn load(self, x: In, from: Val<u32>) -> Vec<Val<f32>> {
        let mut found = Vec::new();
        self.runs(|first, _, exists| {
            let first = exists.map_or(first, |exists| select(exists, first, 0u32));
            let values = load(x, from + first, self.run);
            let kept = values
                .into_iter()
                .map(|value| exists.map_or(value, |exists| select(exists, value, 0.0)));
            found.extend(kept);
        });
        found
    }
}

/// The products of the lane's columns of a matrix with a vector, summed over the lanes that share
/// them: `x` and `matrix` are its shares, `wide` columns side by side.
#[track_caller]
pub(crate) fn products(matrix: Regs, x: &[Val<f32>], wide: u32) -> Vec<Val<f32>> {
    let column = |c: u32| {
        // Two sums hide the latency of the additions.
        let mut sums = [0.0f32.val(), 0.0f32.val()];
        for (i, &x) in (0u32..).zip(x) {
            let sum = &mut sums[i as usize % 2];
            *sum = matrix.get(i * wide + c).fma(x, *sum);
        }
        over_keys(sums[0] + sums[1])
    };
    (0..wide).map(column).collect()
}

/// The update of a head's matrix by a row.
#[derive(Clone, Copy)]
pub(crate) struct Correction {
    /// The factor by which the matrix decays.
    pub(crate) gate: Val<f32>,
    /// The decay by what divides the key.
    pub(crate) left: Val<f32>,
    /// The strength of the correction, by what divides the key.
    pub(crate) written: Val<f32>,
}

impl Correction {
    /// Corrects what the lane's columns say of the key `k`, of which the lane has a share; gives by
    /// how much they missed `v`.
    #[track_caller]
    pub(crate) fn apply(self, matrix: Regs, k: &[Val<f32>], v: &[Val<f32>]) -> Vec<Val<f32>> {
        let wide = v.len() as u32;
        let said = products(matrix, k, wide).into_iter().zip(v);
        let (misses, changes): (Vec<_>, Vec<_>) = said
            .map(|(said, &v)| {
                let miss = v - said * self.left;
                (miss, miss * self.written)
            })
            .unzip();
        for (i, &k) in (0u32..).zip(k) {
            for (at, &change) in (i * wide..).zip(&changes) {
                matrix.set(at, k.fma(change, matrix.get(at) * self.gate));
            }
        }
        misses
    }
}

/// A lane's part of a head's matrix `[share.len, width]`: its share of the rows, and neighbouring
/// columns.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) share: Share,
    /// Neighbouring columns that a lane has.
    pub(crate) columns: u8,
    pub(crate) states: States,
    pub(crate) head: Val<u32>,
    pub(crate) heads: Val<u32>,
    /// Columns of a matrix.
    pub(crate) width: Val<u32>,
    /// Its first column.
    pub(crate) column: Val<u32>,
}

impl Part {
    /// Moves the matrix over the rows of `sequence`, and writes its columns of `y`
    /// `[tokens, heads * width]`; idle rows become zeros. `ask` reads the `count` numbers that a
    /// row has for the lane, `start` gives what moves the matrix by them and answers.
    #[track_caller]
    pub(crate) fn walk<A>(
        &self,
        sequence: Val<u32>,
        tokens: Val<u32>,
        y: Out,
        count: u32,
        ask: impl Fn(Val<u32>) -> Vec<Val<f32>>,
        start: impl FnOnce() -> A,
    ) where
        A: Fn(Regs, &[Val<f32>]) -> Vec<Val<f32>>,
    {
        let States { positions, block, .. } = self.states;
        let wide = u32::from(self.columns);
        let chunk = self.states.chunk(sequence);
        let matrix = Regs::new(self.share.own() * wide, 0.0);
        // An earlier step wrote it, before the kernel in front: it is asked for before that is
        // done.
        let begins = positions.get(chunk.first.min(tokens - 1u32));
        let before = Order::lt(chunk.first, chunk.end) & Order::gt(begins, 0u32);
        when(before, || {
            self.take_up(matrix, self.states.behind(&chunk, begins.max(1u32) - 1u32));
        });
        begin();
        // A sequence of no rows has an idle row to see to, perhaps.
        when(chunk.is_empty() & Order::lt(sequence, tokens), || {
            self.states.when_idle(sequence, || {
                self.put(y, sequence, &vec![0.0f32.val(); wide as usize]);
            });
        });
        when(Order::lt(chunk.first, chunk.end), || {
            let advance = start();
            each_row([chunk.first, chunk.end], false, count, ask, |row, values| {
                self.put(y, row, &advance(matrix, values));
                let position = positions.get(row);
                let last = Order::eq((position + 1u32) % block, 0u32);
                when(last | Order::eq(row + 1u32, chunk.end), || {
                    self.leave(matrix, self.states.behind(&chunk, position));
                });
            });
        });
    }

    /// Calls `f` with the place of each of its vectors of a matrix that is there, and its number in
    /// registers.
    #[track_caller]
    fn places(&self, state: Val<u32>, f: impl Fn(Val<u32>, u32)) {
        let from = state + self.head * self.share.len * self.width + self.column;
        let column = Order::lt(self.column, self.width);
        self.share.runs(|first, number, exists| {
            when(exists.map_or(column, |exists| exists & column), || {
                for row in 0..u32::from(self.share.run) {
                    let at = from + (first + row) * self.width;
                    f(at, (number + row) * u32::from(self.columns));
                }
            });
        });
    }

    /// Reads its part of a matrix from a state.
    #[track_caller]
    fn take_up(&self, matrix: Regs, state: Val<u32>) {
        self.places(state, |at, number| {
            let values = load(self.states.states, at, self.columns);
            (number..).zip(values).for_each(|(i, value)| matrix.set(i, value));
        });
    }

    /// Writes its part of a matrix to a state.
    #[track_caller]
    fn leave(&self, matrix: Regs, state: Val<u32>) {
        let wide = u32::from(self.columns);
        self.places(state, |at, number| {
            let values: Vec<Val<f32>> = (number..number + wide).map(|i| matrix.get(i)).collect();
            self.states.states.set_vec(at, &values);
        });
    }

    /// Writes its columns of a row of `y`, which the lanes that share them have alike.
    #[track_caller]
    fn put(&self, y: Out, row: Val<u32>, values: &[Val<f32>]) {
        let own = Order::eq(lane_id() % KEY_LANES, 0u32) & Order::lt(self.column, self.width);
        let at = (row * self.heads + self.head) * self.width + self.column;
        when(own, || y.set_vec(at, values));
    }
}

/// A lane of a head.
#[derive(Clone, Copy)]
struct Lane {
    form: DeltaForm,
    key_heads: Val<u32>,
    part: Part,
}

impl Lane {
    /// The lane's inputs of a row: its elements of the query, of the key and of the values, then
    /// `a` and `b`.
    #[track_caller]
    fn row(&self, inputs: Inputs, row: Val<u32>) -> Vec<Val<f32>> {
        let Part { share, head, heads, width, column, .. } = self.part;
        let (keys, all) = (self.key_heads * self.form.key_dim, heads * width);
        let first = row * (keys * 2u32 + all);
        let of = match self.form.tiled {
            true => head % self.key_heads,
            false => head / (heads / self.key_heads),
        };
        let of = first + of * self.form.key_dim;
        let exists = Order::lt(column, width);
        let column = head * width + select(exists, column, 0u32);
        let mut found = share.load(inputs.qkv, of);
        found.extend(share.load(inputs.qkv, of + keys));
        found.extend(load(inputs.qkv, first + keys * 2u32 + column, self.form.columns));
        let gate = row * heads + head;
        found.extend([inputs.a.get(gate), inputs.b.get(gate)]);
        found
    }

    /// Moves a matrix on by what [`row`](Lane::row) gave of a position, and asks it.
    #[track_caller]
    fn advance(
        &self,
        matrix: Regs,
        values: &[Val<f32>],
        decay: Val<f32>,
        dt: Val<f32>,
    ) -> Vec<Val<f32>> {
        let (own, wide) = (self.part.share.own() as usize, u32::from(self.form.columns));
        let ([q, k], rest) = ([&values[..own], &values[own..2 * own]], &values[2 * own..]);
        let (v, a, b) = (&rest[..wide as usize], rest[wide as usize], rest[wide as usize + 1]);
        let gate = (decay * softplus(a + dt)).exp();
        let [q_length, k_length] = [q, k].map(|x| {
            let square = x.iter().fold(0.0f32.val(), |sum, &x| x.fma(x, sum));
            (over_keys(square) + LENGTH_EPS).rsqrt()
        });
        let (left, written) = (gate * k_length, sigmoid(b) * k_length);
        Correction { gate, left, written }.apply(matrix, k, v);
        let scale = q_length * (1.0 / (self.form.key_dim as f32).sqrt());
        products(matrix, q, wide).into_iter().map(|answer| answer * scale).collect()
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "delta_net", cases, benches }];

/// The numbers of a launch; `step` has the numbers of its step.
pub fn numbers(op: &DeltaNet, step: Numbers) -> Numbers {
    step.with("start", op.start as u32)
        .with("heads", op.heads as u32)
        .with("key_heads", op.key_heads as u32)
        .with("value_dim", op.value_dim as u32)
}

fn cases() -> Vec<Case> {
    let case = |(rows, sizes, why): (&[(u32, u32)], [usize; 4], &str)| {
        let [heads, key_heads, key_dim, value_dim] = sizes;
        let tiled = heads == 4;
        let op = DeltaNet { layer: 0, start: 6, heads, key_heads, key_dim, value_dim, tiled };
        let form = DeltaForm::of(&op, op.start + op.elements() + 2).expect("keys that fit");
        let trial = Trial::of(rows, op.start + op.elements() + 2);
        let tokens = rows.len();
        let qkv = random(Scalar::F32, 1, tokens * op.width());
        let [a, b] = [2, 3].map(|seed| scaled(Scalar::F32, seed, tokens * heads, 4.0));
        let decay: Vec<f32> = (0..heads).map(|h| -0.02 - h as f32).collect();
        let dt = random(Scalar::F32, 4, heads);
        let states = random(Scalar::F32, 5, trial.elements());
        let [x, gates, rates, shifts] = [&qkv, &a, &b, &dt].map(Buffer::to_f32);
        let part = op.start..op.start + op.elements();
        let (after, y) = trial.walk(&states, part, heads * value_dim, |row, state| {
            let of = |all: &'_ [f32], width: usize| all[row * width..][..width].to_vec();
            let (x, a, b) = (of(&x, op.width()), of(&gates, heads), of(&rates, heads));
            op.position(state, [&x, &a, &b, &decay, &shifts])
        });
        let mut buffers = vec![qkv, a, b, Buffer::floats(Scalar::F32, &decay), dt];
        buffers.extend(trial.buffers());
        buffers.extend([states, Buffer::zeros(Scalar::F32, tokens * heads * value_dim)]);
        let near = |values| Expected::Near(values, tolerance(Scalar::F32));
        Case {
            kernel: delta_net(form).record(),
            label: format!("{tokens} x {heads} of {key_dim} x {value_dim}, {why}"),
            numbers: numbers(&op, trial.numbers()),
            buffers,
            expected: vec![(9, near(after)), (10, near(y))],
        }
    };
    let chunk = |sequence: u32, positions: std::ops::Range<u32>| -> Vec<(u32, u32)> {
        positions.map(|position| (sequence, position)).collect()
    };
    let all = [chunk(0, 0..2), chunk(1, 30..35), chunk(2, 15..17), chunk(4, 0..2)].concat();
    [
        (&chunk(0, 7..8)[..], [4, 2, 32, 32], "one token, a key for two heads"),
        (&chunk(1, 0..20), [2, 2, 64, 16], "a prompt over a block's end, small groups"),
        (&all, [2, 1, 32, 8], "chunks of several sequences, and idle rows"),
        (&all, [3, 3, 13, 7], "sizes that no vector divides"),
        (&chunk(3, 16..18), [1, 1, 256, 4], "the longest keys, from a block's end on"),
    ]
    .into_iter()
    .map(case)
    .collect()
}

fn benches() -> Vec<Bench> {
    let [heads, key_heads, key_dim, value_dim] = [32, 16, 128, 128];
    let op = DeltaNet { layer: 0, start: 0, heads, key_heads, key_dim, value_dim, tiled: false };
    let bench = |tokens: usize| {
        let trial = Trial::one(tokens, op.elements());
        let noise = |len| Fill::Noise(Scalar::F32, len);
        let gates = tokens * op.heads;
        let mut buffers =
            vec![noise(tokens * op.width()), noise(gates), noise(gates), noise(op.heads)];
        buffers.push(noise(op.heads));
        buffers.extend(trial.buffers().map(Fill::These));
        buffers.push(Fill::Zeros(Scalar::F32, trial.elements()));
        buffers.push(Fill::Zeros(Scalar::F32, gates * op.value_dim));
        let kernel = delta_net(DeltaForm::of(&op, op.elements()).expect("keys that fit"));
        let flops = 7 * (tokens * op.elements()) as u64;
        let label = format!("{tokens} x 32 of 128 x 128");
        memory(kernel, &label, numbers(&op, trial.numbers()), buffers, flops)
    };
    [1, 2048].map(bench).to_vec()
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
