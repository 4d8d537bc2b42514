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
use crate::recurrence::{
    COLUMN_LANES, Columns, KEY_LANES, Part, Passes, Piece, Share, StagedRow, StagedRows, over_keys,
    parts_of_products, products, require_staged,
};
use crate::states::{States, Trial};
use crate::sweep::{load, require_vectors, when};
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
    /// such vectors; 4 where staged rows fill a GPU so, too.
    pub columns: u8,
    /// Simdgroups of a group that have columns of their own.
    pub simds: u32,
    /// See [`DeltaNet::tiled`].
    pub tiled: bool,
    /// Whether one more simdgroup brings rows through shared memory, as is faster where a step has
    /// many.
    pub staged: bool,
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
            staged: false,
        })
    }

    /// The form for steps of many rows, for `op`, whose layer has states of `size` elements. The
    /// bits of a row are the same.
    pub fn for_many(self, op: &DeltaNet, size: usize) -> DeltaForm {
        let columns = Columns::of(op.heads, op.value_dim, self.share(), &[op.start, size]);
        columns.map_or(self, |columns| self.staged(columns))
    }

    fn staged(self, Columns { each, simds }: Columns) -> DeltaForm {
        DeltaForm { columns: each, simds, staged: true, ..self }
    }

    /// A lane's share of a query or key.
    fn share(self) -> Share {
        Share { len: self.key_dim, run: self.keys }
    }

    /// Threads of a group.
    fn threads(self) -> u32 {
        32 * (self.simds + u32::from(self.staged))
    }

    /// Columns that a group has.
    fn group(self) -> u32 {
        self.simds * COLUMN_LANES * u32::from(self.columns)
    }

    /// By what answers are multiplied.
    fn root(self) -> f32 {
        1.0 / (self.key_dim as f32).sqrt()
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
    launch(Mode::Row, [groups, dim("heads"), dim("batch")], form.threads());
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
    if form.staged {
        require_staged(2 * form.key_dim + form.group() + 2);
        let weights = [decay, dt].map(|weight| weight.get(head));
        lane.walk_staged(Inputs { qkv, a, b }, weights, [sequence, tokens], y);
    } else {
        let ask = |row| lane.row(Inputs { qkv, a, b }, row);
        part.walk(sequence, tokens, y, 2 * share.own() + wide + 2, ask, || {
            let (decay, dt) = (decay.get(head), dt.get(head));
            move |matrix, values: &[Val<f32>]| lane.advance(matrix, values, decay, dt)
        });
    }
}

/// The buffers of rows that a kernel reads.
#[derive(Clone, Copy)]
struct Inputs {
    qkv: In,
    a: In,
    b: In,
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
    /// By a row's `b`; `length` is the inverse one of its key.
    #[track_caller]
    fn new(gate: Val<f32>, b: Val<f32>, length: Val<f32>) -> Correction {
        Correction { gate, left: gate * length, written: sigmoid(b) * length }
    }

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

/// A lane of a head.
#[derive(Clone, Copy)]
struct Lane {
    form: DeltaForm,
    key_heads: Val<u32>,
    part: Part,
}

impl Lane {
    /// The head of queries and keys that its head shares.
    #[track_caller]
    fn key_head(&self) -> Val<u32> {
        let Part { head, heads, .. } = self.part;
        if self.form.tiled { head % self.key_heads } else { head / (heads / self.key_heads) }
    }

    /// The lane's inputs of a row: its elements of the query, of the key and of the values, then
    /// `a` and `b`.
    #[track_caller]
    fn row(&self, inputs: Inputs, row: Val<u32>) -> Vec<Val<f32>> {
        let Part { share, head, heads, width, column, .. } = self.part;
        let (keys, all) = (self.key_heads * self.form.key_dim, heads * width);
        let first = row * (keys * 2u32 + all);
        let of = first + self.key_head() * self.form.key_dim;
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
        let gate = gate(a, decay, dt);
        let [q_length, k_length] = [q, k].map(inverse_length);
        Correction::new(gate, b, k_length).apply(matrix, k, v);
        let scale = q_length * self.form.root();
        products(matrix, q, wide).into_iter().map(|answer| answer * scale).collect()
    }

    /// Walks over rows that come through shared memory.
    #[track_caller]
    fn walk_staged(
        &self,
        Inputs { qkv, a, b }: Inputs,
        [decay, dt]: [Val<f32>; 2],
        step: [Val<u32>; 2],
        y: Out,
    ) {
        let Part { head, heads, width, .. } = self.part;
        let form = self.form;
        let keys = self.key_heads * form.key_dim;
        let row_len = keys * 2u32 + heads * width;
        let of = self.key_head() * form.key_dim;
        let first = group_id() * form.group();
        let gate_at = |row: Val<u32>| row * heads + head;
        let value_at = |row: Val<u32>| row * row_len + keys * 2u32 + head * width + first;
        let pieces = [
            Piece { from: qkv, len: form.key_dim, at: &|row| row * row_len + of },
            Piece { from: qkv, len: form.key_dim, at: &|row| row * row_len + of + keys },
            Piece { from: qkv, len: form.group(), at: &value_at },
            Piece { from: a, len: 1, at: &gate_at },
            Piece { from: b, len: 1, at: &gate_at },
        ];
        // The last simdgroup has no columns.
        let brings = Order::eq(simd_id(), form.simds);
        let column = select(brings, width, self.part.column);
        let part = Part { column, ..self.part };
        part.walk_staged(step, y, brings, &pieces, &Staged { form, part, first, decay, dt });
    }
}

/// What staged rows are passed with.
struct Staged {
    form: DeltaForm,
    part: Part,
    /// The group's first column.
    first: Val<u32>,
    decay: Val<f32>,
    dt: Val<f32>,
}

impl Passes for Staged {
    /// The numbers of a [`Correction`], and by what answers are multiplied.
    #[track_caller]
    fn prepare(&self, rows: StagedRows<'_>) {
        let count = rows.len();
        for (number, piece) in [(3, 0), (1, 1)] {
            for done in (0..count).step_by(COLUMN_LANES as usize) {
                let row = rows.row(lane_id() / KEY_LANES + done);
                let length = inverse_length(&row.share(piece, self.part.share));
                let one = Order::eq(lane_id() % KEY_LANES, 0u32);
                when(one, || row.set_number(number, length));
            }
        }
        simd_barrier();
        when(Order::lt(lane_id(), count), || {
            let row = rows.row(lane_id());
            let gate = gate(row.element(3), self.decay, self.dt);
            let Correction { gate, left, written } =
                Correction::new(gate, row.element(4), row.number(1));
            let scale = row.number(3) * self.form.root();
            (0..).zip([gate, left, written, scale]).for_each(|(i, x)| row.set_number(i, x));
        });
    }

    #[track_caller]
    fn ask(&self, row: &StagedRow<'_>) -> Vec<Val<f32>> {
        let Part { share, column, .. } = self.part;
        let v = row.elements(2, column - self.first, self.form.columns);
        [row.numbers(4), v, row.share(1, share), row.share(0, share)].concat()
    }

    #[track_caller]
    fn advance(&self, matrix: Regs, values: &[Val<f32>]) -> Vec<Val<f32>> {
        let (numbers, rest) = values.split_at(4);
        let (v, rest) = rest.split_at(usize::from(self.form.columns));
        let (k, q) = rest.split_at(rest.len() / 2);
        let [gate, left, written] = [0, 1, 2].map(|i| numbers[i]);
        Correction { gate, left, written }.apply(matrix, k, v);
        parts_of_products(matrix, q, v.len() as u32)
    }

    #[track_caller]
    fn answer(&self, row: &StagedRow<'_>, said: Vec<Val<f32>>) -> Vec<Val<f32>> {
        let scale = row.number(3);
        said.into_iter().map(|said| said * scale).collect()
    }
}

/// The factor by which a matrix decays.
#[track_caller]
fn gate(a: Val<f32>, decay: Val<f32>, dt: Val<f32>) -> Val<f32> {
    (decay * softplus(a + dt)).exp()
}

/// By what a query or key is multiplied, of which the lanes of a column have shares.
#[track_caller]
fn inverse_length(share: &[Val<f32>]) -> Val<f32> {
    let square = share.iter().fold(0.0f32.val(), |sum, &x| x.fma(x, sum));
    (over_keys(square) + LENGTH_EPS).rsqrt()
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
    let chunk = |sequence: u32, positions: std::ops::Range<u32>| -> Vec<(u32, u32)> {
        positions.map(|position| (sequence, position)).collect()
    };
    let all = [chunk(0, 0..2), chunk(1, 30..35), chunk(2, 15..17), chunk(4, 0..2)].concat();
    let columns = |each, simds| Some(Columns { each, simds });
    let long = [chunk(0, 0..11), chunk(1, 3..40), chunk(2, 15..17), chunk(4, 0..1)].concat();
    [
        (&chunk(0, 7..8)[..], [4, 2, 32, 32], None, "one token, a key for two heads"),
        (&chunk(1, 0..20), [2, 2, 64, 16], None, "a prompt over a block's end, small groups"),
        (&all, [2, 1, 32, 8], None, "chunks of several sequences, and idle rows"),
        (&all, [3, 3, 13, 7], None, "sizes that no vector divides"),
        (&chunk(3, 16..18), [1, 1, 256, 4], None, "the longest keys, from a block's end on"),
        (&chunk(0, 7..8), [4, 2, 32, 64], columns(2, 4), "one token, staged"),
        (&long, [2, 1, 32, 8], columns(2, 1), "prompts, staged, and an idle row"),
        (&long, [2, 1, 64, 32], columns(2, 4), "prompts, staged, four simdgroups"),
        (&long, [1, 1, 256, 16], columns(1, 2), "prompts, staged, the longest keys"),
        (&long, [4, 2, 32, 32], columns(4, 2), "prompts, staged, four columns a lane"),
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
    let [heads, key_heads, key_dim, value_dim] = sizes;
    let tiled = heads == 4;
    let op = DeltaNet { layer: 0, start, heads, key_heads, key_dim, value_dim, tiled };
    let trial = Trial::of(rows, op.start + op.elements() + start % 4);
    let form = DeltaForm::of(&op, trial.size).expect("keys that fit");
    let form = staged.map_or(form, |columns| form.staged(columns));
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
}

fn benches() -> Vec<Bench> {
    let [heads, key_heads, key_dim, value_dim] = [32, 16, 128, 128];
    let op = DeltaNet { layer: 0, start: 0, heads, key_heads, key_dim, value_dim, tiled: false };
    let bench = |(tokens, many): (usize, bool)| {
        let trial = Trial::one(tokens, op.elements());
        let noise = |len| Fill::Noise(Scalar::F32, len);
        let gates = tokens * op.heads;
        let mut buffers =
            vec![noise(tokens * op.width()), noise(gates), noise(gates), noise(op.heads)];
        buffers.push(noise(op.heads));
        buffers.extend(trial.buffers().map(Fill::These));
        buffers.push(Fill::Zeros(Scalar::F32, trial.elements()));
        buffers.push(Fill::Zeros(Scalar::F32, gates * op.value_dim));
        let form = DeltaForm::of(&op, op.elements()).expect("keys that fit");
        let kernel = delta_net(if many { form.for_many(&op, op.elements()) } else { form });
        let flops = 7 * (tokens * op.elements()) as u64;
        let how = if many { ", staged" } else { "" };
        let label = format!("{tokens} x 32 of 128 x 128{how}");
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
                case((&rows, [2, 1, 64, 32]), 8, staged, "");
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
