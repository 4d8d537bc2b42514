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
//!
//! Corrections of up to twice what is missed (Grazzi et al. 2024, Unlocking State-Tracking in Linear
//! RNNs Through Negative Eigenvalues) have `beta = 2 sigmoid(b)`. Where each element of a key forgets
//! at a rate of its own (Kimi Team 2025, Kimi Linear), `g` is a diagonal matrix: `g = exp(a)`.

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
use crate::states::{States, Trial, chunk};
use crate::sweep::{load, require_vectors, when};
use crate::trial::{memory, random, scaled};
use crate::{Shape, arity, expect};

/// `qkv[tokens, 2 * key_heads * key_dim + heads * value_dim], a[tokens, heads], b[tokens, heads];
/// decay[heads], dt[heads] -> [tokens, heads * value_dim]`. Several heads share a head of `q` and
/// `k`. Where each element of a key forgets at a rate of its own, `a` is
/// `[tokens, heads * key_dim]`, and there are no weights.
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
    /// Whether corrections are twice as strong: `beta` is up to 2.
    pub doubled: bool,
    /// Whether each element of a key forgets at a rate of its own: `a` has the logarithms of the
    /// factors that remain, none of them positive.
    pub by_element: bool,
}

/// Added to the square of the length of a query or key.
pub(crate) const LENGTH_EPS: f32 = 1e-6;

impl DeltaNet {
    /// One of these numbers of heads, heads of keys, and elements of a key and of a value, in the
    /// first layer, whose heads forget: the other forms are further fields.
    pub fn new([heads, key_heads, key_dim, value_dim]: [usize; 4]) -> DeltaNet {
        DeltaNet {
            layer: 0,
            start: 0,
            heads,
            key_heads,
            key_dim,
            value_dim,
            tiled: false,
            doubled: false,
            by_element: false,
        }
    }

    /// Elements in a row of queries, keys and values.
    pub fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.heads * self.value_dim
    }

    /// The head of queries and keys that a head shares.
    pub fn key_head(&self, head: usize) -> usize {
        if self.tiled { head % self.key_heads } else { head / (self.heads / self.key_heads) }
    }

    /// Elements in a row of `a`.
    pub fn gates(&self) -> usize {
        self.heads * if self.by_element { self.key_dim } else { 1 }
    }

    /// Weights that it has: the decay and `dt`, or none.
    pub fn weights(&self) -> usize {
        if self.by_element { 0 } else { 2 }
    }

    /// The strength of a correction where the logistic function of `b` is 1.
    pub fn strongest(&self) -> f32 {
        if self.doubled { 2.0 } else { 1.0 }
    }

    /// Elements of its part of the state.
    pub fn elements(&self) -> usize {
        self.heads * self.key_dim * self.value_dim
    }

    /// Moves the matrices of all heads one position on, and gives a row of `y`; all in f64. `qkv`,
    /// `a` and `b` are the position's, `decay` and `dt` the weights, empty where there are none.
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
        let own = || a[head * self.key_dim..][..self.key_dim].iter().map(|a| f64::from(*a).exp());
        let gates = self.by_element.then(|| own().collect());
        // Factors of elements take the place of a head's, which is 1 then.
        let (shifted, decay) = match self.by_element {
            true => (0.0, 0.0),
            false => (f64::from(a[head]) + f64::from(dt[head]), f64::from(decay[head])),
        };
        let (step, strongest) = (shifted.exp().ln_1p(), f64::from(self.strongest()));
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
            gates,
            beta: strongest * logistic(f64::from(b[head])),
            strongest,
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
    /// The factor of each element of the key, where each has its own.
    pub(crate) gates: Option<Vec<f64>>,
    pub(crate) beta: f64,
    /// What `beta` is below.
    pub(crate) strongest: f64,
}

impl HeadRow {
    /// The factor by which a row of the matrix decays, that of an element of the key.
    pub(crate) fn gate(&self, element: usize) -> f64 {
        self.gates.as_ref().map_or(self.gate, |gates| gates[element])
    }

    /// Moves the matrix `[key_dim, value_dim]` one position on, and gives `y`.
    pub(crate) fn advance(&self, state: &mut [f64]) -> Vec<f64> {
        let (n, keys) = (self.v.len(), self.k.len());
        for (i, row) in state.chunks_exact_mut(n).enumerate() {
            row.iter_mut().for_each(|s| *s *= self.gate(i));
        }
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
        arity("delta_net", inputs, 3, weights, &[self.weights()])?;
        let shared = self.heads % self.key_heads.max(1);
        expect("delta_net", "heads modulo key heads", &[shared], &[0])?;
        expect("delta_net", "queries, keys and values", &[inputs[0].width], &[self.width()])?;
        for (operand, input, width) in [("a", 1, self.gates()), ("b", 2, self.heads)] {
            expect("delta_net", operand, &[inputs[input].width], &[width])?;
        }
        for (operand, weight) in ["decay", "dt"].into_iter().zip(weights) {
            expect("delta_net", operand, weight, &[self.heads])?;
        }
        Ok(vec![Shape { width: self.heads * self.value_dim, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        call.recur(self.layer, (self.start, self.elements()), |states, row, weights| {
            let (qkv, gates) = row.split_at(self.width());
            let (a, b) = gates.split_at(self.gates());
            let [decay, dt] = [0, 1].map(|i| weights.get(i).map_or(&[][..], Vec::as_slice));
            self.position(states, [qkv, a, b, decay, dt])
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
    /// See [`DeltaNet::doubled`].
    pub doubled: bool,
    /// See [`DeltaNet::by_element`].
    pub by_element: bool,
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
            doubled: op.doubled,
            by_element: op.by_element,
        })
    }

    /// The form for steps of many rows, for `op`, whose layer has states of `size` elements. The
    /// bits of a row are the same. Where elements of keys forget by themselves there is no other.
    pub fn for_many(self, op: &DeltaNet, size: usize) -> DeltaForm {
        let columns = Columns::of(op.heads, op.value_dim, self.share(), &[op.start, size]);
        columns.filter(|_| !self.by_element).map_or(self, |columns| self.staged(columns))
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

    /// The strength of a correction by a row's `b`; `length` is the inverse one of its key.
    #[track_caller]
    fn written(self, b: Val<f32>, length: Val<f32>) -> Val<f32> {
        let written = sigmoid(b) * length;
        if self.doubled { written * 2.0 } else { written }
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
///
/// Where heads forget, it also reads the weights `decay` and `dt` `[heads]`; where each element of
/// a key forgets at a rate of its own, `a` is `[tokens, heads * key_dim]`.
#[kernel]
pub fn delta_net(
    qkv: In<f32>,
    a: In<f32>,
    b: In<f32>,
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
    let weights = (!form.by_element).then(|| ["decay", "dt"].map(<In>::declare));
    let states = States { states, positions, sequences, starts, table, stride, block, size, start };
    let groups = dim("value_dim").ceil_div(form.group());
    launch(Mode::Row, [groups, dim("heads"), dim("batch")], form.threads());
    let values = dim("heads") * dim("value_dim");
    let gates = dim("tokens") * dim("heads");
    let all = if form.by_element { gates.clone() * form.key_dim } else { gates.clone() };
    let rows = dim("tokens") * (dim("key_heads") * (2 * form.key_dim) + values.clone());
    let mut read = vec![("qkv", rows), ("a", all), ("b", gates)];
    read.extend(weights.iter().flat_map(|_| [("decay", dim("heads")), ("dt", dim("heads"))]));
    read.extend([("states", dim("size")), ("y", dim("tokens") * values)]);
    require_vectors(&read);
    States::require();
    let (head, sequence) = (group_id_of(1), group_id_of(2));
    let wide = u32::from(form.columns);
    let first = (group_id() * form.simds + simd_id()) * (COLUMN_LANES * wide);
    let column = first + lane_id() / KEY_LANES * wide;
    let (share, columns) = (form.share(), form.columns);
    let part = Part { share, columns, states, head, heads, width: value_dim, column };
    let (lane, inputs) = (Lane { form, key_heads, part }, Inputs { qkv, a, b });
    let own = || weights.map(|weights| weights.map(|weight| weight.get(head)));
    let staged = form.staged.then(|| {
        require_staged(2 * form.key_dim + form.group() + 2);
        own()
    });
    if let Some(weights) = staged.flatten() {
        lane.walk_staged(inputs, weights, [sequence, tokens], y);
    } else {
        let gates = if form.by_element { share.own() } else { 1 };
        let count = 2 * share.own() + wide + gates + 1;
        part.walk(
            sequence,
            tokens,
            y,
            count,
            |row| lane.row(inputs, row),
            || {
                let weights = own();
                move |matrix, values: &[Val<f32>]| lane.advance(matrix, values, weights)
            },
        );
    }
}

/// The buffers of rows that a kernel reads.
#[derive(Clone, Copy)]
struct Inputs {
    qkv: In,
    a: In,
    b: In,
}

/// The factors by which a matrix decays.
#[derive(Clone, Copy)]
pub(crate) enum Kept<'a> {
    /// One factor.
    Together(Val<f32>),
    /// One for each element of the key, of which the lane has a share.
    ByElement(&'a [Val<f32>]),
}

/// The update of a head's matrix by a row.
#[derive(Clone, Copy)]
pub(crate) struct Correction<'a> {
    /// The factors by which the matrix decays.
    pub(crate) kept: Kept<'a>,
    /// The inverse length of the key, times the decay if that is one factor.
    pub(crate) left: Val<f32>,
    /// The strength of the correction, times the inverse length of the key.
    pub(crate) written: Val<f32>,
}

impl Correction<'_> {
    /// Corrects what the lane's columns say of the key `k`, of which the lane has a share; gives by
    /// how much they missed `v`.
    #[track_caller]
    pub(crate) fn apply(self, matrix: Regs, k: &[Val<f32>], v: &[Val<f32>]) -> Vec<Val<f32>> {
        let wide = v.len() as u32;
        let decayed: Vec<Val<f32>> = match self.kept {
            Kept::Together(_) => k.to_vec(),
            Kept::ByElement(gates) => k.iter().zip(gates).map(|(&k, &gate)| k * gate).collect(),
        };
        let said = products(matrix, &decayed, wide).into_iter().zip(v);
        let (misses, changes): (Vec<_>, Vec<_>) = said
            .map(|(said, &v)| {
                let miss = v - said * self.left;
                (miss, miss * self.written)
            })
            .unzip();
        for (i, &k) in (0u32..).zip(k) {
            let gate = match self.kept {
                Kept::Together(gate) => gate,
                Kept::ByElement(gates) => gates[i as usize],
            };
            for (at, &change) in (i * wide..).zip(&changes) {
                matrix.set(at, k.fma(change, matrix.get(at) * gate));
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
    /// `a`, or its elements of it, and `b`.
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
        match self.form.by_element {
            true => found.extend(share.load(inputs.a, gate * self.form.key_dim)),
            false => found.push(inputs.a.get(gate)),
        }
        found.push(inputs.b.get(gate));
        found
    }

    /// Moves a matrix on by what [`row`](Lane::row) gave of a position, and asks it.
    #[track_caller]
    fn advance(
        &self,
        matrix: Regs,
        values: &[Val<f32>],
        weights: Option<[Val<f32>; 2]>,
    ) -> Vec<Val<f32>> {
        let (own, wide) = (self.part.share.own() as usize, u32::from(self.form.columns));
        let ([q, k], rest) = ([&values[..own], &values[own..2 * own]], &values[2 * own..]);
        let (v, rest) = rest.split_at(wide as usize);
        let (a, b) = (&rest[..rest.len() - 1], rest[rest.len() - 1]);
        let gate = weights.map(|[decay, dt]| gate(a[0], decay, dt));
        let gates: Vec<Val<f32>> = match gate {
            Some(_) => Vec::new(),
            None => a.iter().map(|a| a.exp()).collect(),
        };
        let [q_length, k_length] = [q, k].map(inverse_length);
        let left = gate.map_or(k_length, |gate| gate * k_length);
        let written = self.form.written(b, k_length);
        let kept = gate.map_or(Kept::ByElement(&gates), Kept::Together);
        Correction { kept, left, written }.apply(matrix, k, v);
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
        let (brings, part) = self.part.staged(form.simds);
        part.walk_staged(step, y, brings, &pieces, &Staged { form, part, first, decay, dt });
    }
}

/// How a net passes staged rows.
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
        simd_barrier();
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
            let length = row.number(1);
            let written = self.form.written(row.element(4), length);
            let scale = row.number(3) * self.form.root();
            (0..)
                .zip([gate, gate * length, written, scale])
                .for_each(|(i, x)| row.set_number(i, x));
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
        Correction { kept: Kept::Together(gate), left, written }.apply(matrix, k, v);
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
    [false, true].into_iter().flat_map(cases_of).collect()
}

fn cases_of(by_element: bool) -> Vec<Case> {
    let all = [chunk(0, 0..2), chunk(1, 30..35), chunk(2, 15..17), chunk(4, 0..2)].concat();
    let columns = |each, simds| Some(Columns { each, simds });
    let long = [chunk(0, 0..11), chunk(1, 3..40), chunk(2, 15..17), chunk(4, 0..1)].concat();
    [
        (&chunk(0, 7..8)[..], [4, 2, 32, 32], None, "one token, a key for two heads"),
        (&chunk(1, 0..20), [2, 2, 64, 16], None, "a prompt over a block's end, small groups"),
        (&all, [2, 1, 32, 8], None, "chunks of several sequences, and idle rows"),
        (&all, [3, 3, 13, 7], None, "sizes that no vector divides"),
        (&chunk(3, 16..18), [1, 1, 256, 4], None, "the longest keys, from a block's end on"),
        (&chunk(1, 0..20), [2, 2, 32, 16], None, "a prompt, corrections twice as strong"),
        (&chunk(0, 7..8), [4, 2, 32, 64], columns(2, 4), "one token, staged"),
        (&long, [2, 1, 32, 8], columns(2, 1), "prompts, staged, and an idle row"),
        (&long, [2, 1, 64, 32], columns(2, 4), "prompts, staged, corrections twice as strong"),
        (&long, [1, 1, 256, 16], columns(1, 2), "prompts, staged, the longest keys"),
        (&long, [4, 2, 32, 32], columns(4, 2), "prompts, staged, four columns a lane"),
    ]
    .into_iter()
    .filter(|(_, _, staged, _)| staged.is_none() || !by_element)
    .map(|(rows, sizes, staged, why)| {
        let why = if by_element { format!("{why}, by element") } else { why.to_owned() };
        case((rows, sizes), if staged.is_some() { 8 } else { 6 }, (by_element, staged), &why)
    })
    .collect()
}

/// A step of `rows`, `(sequence, position)`, on states whose part begins at `start`.
fn case(
    (rows, sizes): (&[(u32, u32)], [usize; 4]),
    start: usize,
    (by_element, staged): (bool, Option<Columns>),
    why: &str,
) -> Case {
    let [heads, _, key_dim, value_dim] = sizes;
    let (tiled, doubled) = (heads == 4, why.contains("twice"));
    let op = DeltaNet { start, tiled, doubled, by_element, ..DeltaNet::new(sizes) };
    let trial = Trial::of(rows, op.start + op.elements() + start % 4);
    let form = DeltaForm::of(&op, trial.size).expect("keys that fit");
    let form = staged.map_or(form, |columns| form.staged(columns));
    let tokens = rows.len();
    let qkv = random(Scalar::F32, 1, tokens * op.width());
    let b = scaled(Scalar::F32, 3, tokens * heads, 4.0);
    let a = scaled(Scalar::F32, 2, tokens * op.gates(), 4.0);
    let a = if by_element { below_zero(Scalar::F32, &a) } else { a };
    let decay: Vec<f32> = (0..heads).map(|h| -0.02 - h as f32).collect();
    let dt = random(Scalar::F32, 4, heads);
    let states = random(Scalar::F32, 5, trial.elements());
    let [x, gates, rates, shifts] = [&qkv, &a, &b, &dt].map(Buffer::to_f32);
    let part = op.start..op.start + op.elements();
    let (after, y) = trial.walk(&states, part, heads * value_dim, |row, state| {
        let of = |all: &'_ [f32], width: usize| all[row * width..][..width].to_vec();
        let (x, a, b) = (of(&x, op.width()), of(&gates, op.gates()), of(&rates, heads));
        op.position(state, [&x, &a, &b, &decay, &shifts])
    });
    let mut buffers = vec![qkv, a, b];
    buffers.extend(trial.buffers());
    let first = buffers.len();
    buffers.extend([states, Buffer::zeros(Scalar::F32, tokens * heads * value_dim)]);
    if !by_element {
        buffers.extend([Buffer::floats(Scalar::F32, &decay), dt]);
    }
    let near = |values| Expected::Near(values, tolerance(Scalar::F32));
    Case {
        kernel: delta_net(form).record(),
        label: format!("{tokens} x {heads} of {key_dim} x {value_dim}, {why}"),
        numbers: numbers(&op, trial.numbers()),
        buffers,
        expected: vec![(first, near(after)), (first + 1, near(y))],
    }
}

/// Logarithms of factors, which are below zero.
pub(crate) fn below_zero(scalar: Scalar, a: &Buffer) -> Buffer {
    let a: Vec<f32> = a.to_f32().iter().map(|a| -a.abs() / 4.0).collect();
    Buffer::floats(scalar, &a)
}

fn benches() -> Vec<Bench> {
    [false, true].into_iter().flat_map(benches_of).collect()
}

fn benches_of(by_element: bool) -> Vec<Bench> {
    let op = DeltaNet { by_element, ..DeltaNet::new([32, 16, 128, 128]) };
    let bench = |(tokens, many): (usize, bool)| {
        let trial = Trial::one(tokens, op.elements());
        let noise = |len| Fill::Noise(Scalar::F32, len);
        let gates = tokens * op.heads;
        let mut buffers =
            vec![noise(tokens * op.width()), noise(tokens * op.gates()), noise(gates)];
        buffers.extend(trial.buffers().map(Fill::These));
        buffers.push(Fill::Zeros(Scalar::F32, trial.elements()));
        buffers.push(Fill::Zeros(Scalar::F32, gates * op.value_dim));
        buffers.extend((0..op.weights()).map(|_| noise(op.heads)));
        let form = DeltaForm::of(&op, op.elements()).expect("keys that fit");
        let kernel = delta_net(if many { form.for_many(&op, op.elements()) } else { form });
        let flops = 7 * (tokens * op.elements()) as u64;
        let how = match (many, by_element) {
            (true, _) => ", staged",
            (_, true) => ", by element",
            _ => "",
        };
        let label = format!("{tokens} x 32 of 128 x 128{how}");
        memory(kernel, &label, numbers(&op, trial.numbers()), buffers, flops)
    };
    let steps = [(1, false), (16, false), (16, true), (2048, false), (2048, true)];
    steps.into_iter().filter(|(_, many)| !(by_element && *many)).map(bench).collect()
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
            let Case { kernel, numbers, mut buffers, expected, .. } =
                case((&rows, [2, 1, 64, 32]), 8, (false, staged), "");
            tile::interp::run(&kernel, &numbers, &mut buffers).unwrap();
            let [states, y] = [0, 1].map(|i| buffers[expected[i].0].bytes.clone());
            (states, y)
        };
        let others = run(None);
        for (each, simds) in [(1, 4), (2, 1), (2, 2), (4, 2)] {
            assert!(run(Some(Columns { each, simds })) == others, "{each} columns, {simds}");
        }
    }
}
