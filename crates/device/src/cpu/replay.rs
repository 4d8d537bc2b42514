//! One replay: all workers walk the nodes together, each computing its share of every node.
//!
//! Activations lie in the arena at the plan's offsets. Between two barriers a worker writes only
//! its own rows, columns or heads, and reads only what was complete before the first of them.

use super::class::{Class, EVEN, FEW, MOST_PART, PART};
use super::executor::{Loaded, Weight, shape};
use super::profile::Spans;
use super::state::Cache;
use crate::Watch;
use cpu_kernels::attention::{self, AttentionCall, LayerCache, QuerySequence};
use cpu_kernels::low_rank::{Factors, OutRows};
use cpu_kernels::math;
use cpu_kernels::matmul::{
    Activations, BLOCK, Epilogue, Matrix, Output, Path, ROWS, Scratch, multiply, share,
};
use cpu_kernels::team::{SharedSlice, Team, Worker};
use ops::embed::Index;
use ops::{
    Embed, GateUp, LayerNorm, LowRank, Map, Op, Project, RmsNorm, Rope, RopeWrite, Rows, Scale,
    Unary, Zip,
};
use program::{Node, Step, StepKind, ValueId, WeightId};
use std::ops::Range;

pub(super) struct Replay<'a> {
    pub(super) loaded: &'a Loaded,
    pub(super) class: &'a Class,
    pub(super) step: &'a Step<'a>,
    /// The step's tokens, with [`CHOSEN`](program::CHOSEN) already replaced.
    pub(super) tokens: &'a [u32],
    /// The sequence and position of each row.
    pub(super) rows: &'a [Row],
    /// The sequences of each cache group as attention takes them.
    pub(super) queries: &'a [Vec<QuerySequence<'a>>],
    pub(super) arena: *mut u8,
    pub(super) caches: &'a [Cache],
    pub(super) scratch: SharedSlice<'a, Scratch>,
    pub(super) partials: SharedSlice<'a, f32>,
    /// Where the workers of a timed replay record the time of each node.
    pub(super) spans: Option<&'a Spans<'a>>,
    pub(super) watch: &'a Watch<'a>,
    /// The nodes to compute: all, or those between two exchanges.
    pub(super) nodes: Range<usize>,
}

// SAFETY: the arena is only reached through `Replay::floats`, whose callers keep workers apart.
unsafe impl Sync for Replay<'_> {}

/// The sequence and position of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// The number of its sequence, and that sequence's first row.
    pub(super) sequence: usize,
    pub(super) first: usize,
    /// Index in the sequence's cache.
    pub(super) index: usize,
    /// Rotary position.
    pub(super) position: u32,
}

/// The path of products for values with rows of this kind. Few of a prompt's rows have logits, so
/// rows of outputs take the path for few rows.
pub(super) fn path(kind: StepKind, rows: Rows) -> Path {
    match (kind, rows) {
        (StepKind::Prompt, Rows::Tokens) => Path::Expanded,
        _ => Path::InPlace,
    }
}

/// One of several products of the same input: its matrix, its output, and whether it adds to what
/// the output holds.
pub(super) struct Product<'a> {
    pub(super) matrix: &'a Matrix,
    pub(super) bias: Option<&'a [f32]>,
    /// Row 0 of the output, and its stride in floats.
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    pub(super) accumulate: bool,
}

impl Replay<'_> {
    /// Runs the nodes on a team, the loaded one or a smaller. Returns false if it was stopped.
    pub(super) fn run(&self, team: &Team) -> bool {
        let nodes = &self.loaded.program.nodes;
        team.run_until(self.watch.stop, &|worker| {
            self.angles(worker);
            let mut going_on = worker.gather();
            let wanted = nodes.iter().enumerate().take(self.nodes.end).skip(self.nodes.start);
            for (i, node) in wanted.filter(|(i, node)| !self.idle(*i, node)) {
                if !going_on {
                    return;
                }
                let begin = self.spans.map(Spans::now);
                self.node(i, node, worker);
                if let (Some(spans), Some(begin)) = (self.spans, begin) {
                    spans.note(i, worker, begin);
                }
                going_on = worker.gather();
                if going_on && worker.index == 0 {
                    (self.watch.progress)((i + 1) as f64 / nodes.len() as f64);
                }
            }
        })
    }

    /// The floats of a range, counted from a byte offset of the arena.
    ///
    /// # Safety
    /// Until the next barrier no other worker accesses these floats, or all of them only read.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller's promise stands in for the borrow checker"
    )]
    pub(super) unsafe fn floats(&self, offset: usize, range: Range<usize>) -> &mut [f32] {
        debug_assert!(offset + range.end * size_of::<f32>() <= self.class.bytes);
        // SAFETY: inside the arena by the class's layout; apart from others by the caller's
        // promise.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.arena.add(offset).cast::<f32>().add(range.start),
                range.len(),
            )
        }
    }

    pub(super) fn offset(&self, value: ValueId) -> usize {
        self.class.plan.offsets[value.0]
    }

    fn start(&self, value: ValueId) -> *mut f32 {
        self.arena.wrapping_add(self.offset(value)).cast()
    }

    fn width(&self, value: ValueId) -> usize {
        self.loaded.program.values[value.0].width
    }

    pub(super) fn count(&self, rows: Rows) -> usize {
        rows.count(self.step.tokens.len(), self.step.outputs.len())
    }

    /// Rows of a node's first output, or of its first input if it has no output.
    fn rows(&self, node: &Node) -> usize {
        let value = node.outputs.first().or(node.inputs.first());
        value.map_or(0, |v| self.count(self.loaded.program.values[v.0].rows))
    }

    pub(super) fn matrix(&self, weight: WeightId) -> &Matrix {
        match &*self.loaded.weights[weight.0] {
            Weight::Matrix(matrix) => matrix,
            Weight::Vector(_) => unreachable!("the verifier gives matrices rank 2"),
        }
    }

    pub(super) fn vector(&self, weight: WeightId) -> &[f32] {
        match &*self.loaded.weights[weight.0] {
            Weight::Vector(values) => values,
            Weight::Matrix(_) => unreachable!("the verifier gives norms and biases rank 1"),
        }
    }

    /// Computes cosines and sines of every token, for every distinct rotation.
    fn angles(&self, worker: &Worker<'_>) {
        for (rope, &(cos, sin)) in self.loaded.ropes.iter().zip(&self.class.angles) {
            let pairs = rope.frequencies.len();
            for t in worker.split(self.step.tokens.len()) {
                let range = t * pairs..(t + 1) * pairs;
                // SAFETY: each worker has its own tokens.
                let (cos, sin) =
                    unsafe { (self.floats(cos, range.clone()), self.floats(sin, range)) };
                rope.angles(self.rows[t].position, cos, sin);
            }
        }
    }

    fn node(&self, index: usize, node: &Node, worker: &Worker<'_>) {
        let isa = self.loaded.isa;
        let rows = self.rows(node);
        match &node.op {
            Op::Embed(op) => self.embed(op, node, worker),
            Op::RmsNorm(RmsNorm { eps }) => {
                let width = self.width(node.inputs[0]);
                let share = worker.split(rows);
                let range = share.start * width..share.end * width;
                // SAFETY: each worker has its own rows; an output in place is the same rows.
                let y = unsafe { self.floats(self.offset(node.outputs[0]), range.clone()) };
                self.copy_unless_in_place(index, node, 0, range);
                math::rms_norm_in_place(isa, y, self.vector(node.weights[0]), *eps);
            }
            Op::Linear(_) | Op::LinearAdd(_) => self.linear(index, node, worker),
            Op::LayerNorm(LayerNorm { eps }) => {
                let width = self.width(node.inputs[0]);
                let share = worker.split(rows);
                let range = share.start * width..share.end * width;
                // SAFETY: each worker has its own rows; an output in place is the same rows.
                let y = unsafe { self.floats(self.offset(node.outputs[0]), range.clone()) };
                self.copy_unless_in_place(index, node, 0, range);
                let bias = node.weights.get(1).map(|&bias| self.vector(bias));
                math::layer_norm_in_place(isa, y, self.vector(node.weights[0]), bias, *eps);
            }
            Op::Zip(Zip(f)) => {
                let range = self.elements(node, rows, worker);
                self.copy_unless_in_place(index, node, 0, range.clone());
                // SAFETY: each worker has its own elements; the second operand is only read.
                let (y, b) = unsafe {
                    let y = self.floats(self.offset(node.outputs[0]), range.clone());
                    (y, self.floats(self.offset(node.inputs[1]), range))
                };
                math::zip_in_place(isa, *f, y, b);
            }
            Op::Map(Map(f)) => math::map_in_place(isa, *f, self.own(index, node, rows, worker)),
            Op::Xielu(op) => {
                let mut powers = [0.0; 1024];
                for y in self.own(index, node, rows, worker).chunks_mut(powers.len()) {
                    let powers = &mut powers[..y.len()];
                    powers.iter_mut().zip(&*y).for_each(|(to, x)| *to = x.min(ops::xielu::BOUND));
                    math::map_in_place(isa, Unary::Exp, powers);
                    y.iter_mut().zip(powers).for_each(|(y, power)| *y = op.of(*y, *power));
                }
            }
            Op::Scale(Scale { by }) => {
                math::scale_in_place(isa, *by, self.own(index, node, rows, worker));
            }
            Op::Rope(rope) => {
                let (width, angles) = (self.width(node.inputs[0]), self.angles_of(rope));
                for t in worker.split(rows) {
                    let range = t * width..(t + 1) * width;
                    self.copy_unless_in_place(index, node, 0, range.clone());
                    // SAFETY: each worker has its own tokens.
                    self.turn(rope, angles, t, unsafe {
                        self.floats(self.offset(node.outputs[0]), range)
                    });
                }
            }
            Op::Stretch(stretch) => {
                let width = self.width(node.inputs[0]);
                for t in worker.split(rows) {
                    let range = t * width..(t + 1) * width;
                    self.copy_unless_in_place(index, node, 0, range.clone());
                    let by = stretch.factor(self.rows[t].position);
                    // SAFETY: each worker has its own tokens.
                    let y = unsafe { self.floats(self.offset(node.outputs[0]), range) };
                    math::scale_in_place(isa, by, y);
                }
            }
            Op::KvWrite(op) => self.kv_write(op.layer, node.inputs[0], node.inputs[1], worker),
            Op::Attention(op) => self.attend(op, node, worker),
            Op::ShortConv(op) => self.short_conv(op, node, worker),
            Op::DeltaNet(op) => self.delta_net(op, node, worker),
            Op::SelectiveScan(op) => self.selective_scan(op, node, worker),
            Op::GatedNorm(op) => {
                let width = self.width(node.inputs[0]);
                let share = worker.split(rows);
                let range = share.start * width..share.end * width;
                // SAFETY: each worker has its own rows; an output in place is the gate's same rows.
                let (y, x) = unsafe {
                    let y = self.floats(self.offset(node.outputs[0]), range.clone());
                    (y, self.floats(self.offset(node.inputs[1]), range.clone()))
                };
                self.copy_unless_in_place(index, node, 0, range);
                let (weight, groups) = (self.vector(node.weights[0]), op.groups);
                math::gated_norm_in_place(isa, y, x, weight, groups, op.eps, op.norm_first);
            }
            Op::Select(_) => {
                let width = self.width(node.inputs[0]);
                for i in worker.split(rows) {
                    let from = self.step.outputs[i] as usize * width;
                    // SAFETY: each worker has its own output rows; inputs are only read.
                    let (x, y) = unsafe {
                        let x = self.floats(self.offset(node.inputs[0]), from..from + width);
                        (x, self.floats(self.offset(node.outputs[0]), i * width..(i + 1) * width))
                    };
                    y.copy_from_slice(x);
                }
            }
            Op::Project(project) => self.project(project, node, worker),
            Op::GateUp(op) => self.gate_up(op, node, worker),
            Op::Experts(op) => self.experts(op, node, worker),
            Op::ScaleRows(_) => {
                let width = self.width(node.inputs[0]);
                for t in worker.split(rows) {
                    let range = t * width..(t + 1) * width;
                    self.copy_unless_in_place(index, node, 0, range.clone());
                    // SAFETY: each worker has its own rows; the factors are only read.
                    let (y, by) = unsafe {
                        let by = self.floats(self.offset(node.inputs[1]), t..t + 1);
                        (self.floats(self.offset(node.outputs[0]), range), by[0])
                    };
                    math::scale_in_place(isa, by, y);
                }
            }
            Op::GroupLimit(limit) => {
                let width = self.width(node.inputs[0]);
                let correction = self.vector(node.weights[0]);
                for t in worker.split(rows) {
                    let range = t * width..(t + 1) * width;
                    // SAFETY: each worker has its own rows; the scores are only read.
                    let (x, y) = unsafe {
                        let x = self.floats(self.offset(node.inputs[0]), range.clone());
                        (x, self.floats(self.offset(node.outputs[0]), range))
                    };
                    limit.row(x, correction, y);
                }
            }
            Op::Splice(splice) => {
                let (x, wide) = (node.inputs[0], self.width(node.outputs[0]));
                for t in worker.split(rows) {
                    let row = |v: ValueId| t * self.width(v)..(t + 1) * self.width(v);
                    // SAFETY: each worker has its own rows; inputs are only read.
                    unsafe {
                        let z = node.inputs.get(1).copied();
                        let z = z.map(|z| &*self.floats(self.offset(z), row(z)));
                        let y = self.floats(self.offset(node.outputs[0]), t * wide..(t + 1) * wide);
                        splice.row(self.floats(self.offset(x), row(x)), z, y);
                    }
                }
            }
            Op::RopeWrite(write) => self.rope_write(index, write, node, worker),
            Op::LowRank(op) => self.low_rank(index, op, node, worker),
            // Runs between two parts of a replay.
            Op::Exchange(_) => {}
            // Refused when the Program was loaded.
            Op::AllReduce(_) | Op::AllGather(_) | Op::JoinColumns(_) | Op::Gradient(_) => {}
        }
    }

    /// Whether a node has nothing to do: it has no rows, or it is an adapter site that no adapter
    /// of the step changes.
    fn idle(&self, index: usize, node: &Node) -> bool {
        let there = self.class.plan.in_place[index] == Some(0);
        self.rows(node) == 0
            || matches!(node.op, Op::LowRank(op) if there && !self.adapted(op.site))
    }

    /// Whether an adapter of the step changes this site.
    pub(super) fn adapted(&self, site: usize) -> bool {
        self.step.sequences.iter().any(|sequence| !self.seated(sequence.adapter, site).is_empty())
    }

    /// The low-rank factors of the adapter on a seat at a site, one pair for each of its matrices.
    fn seated(&self, seat: u32, site: usize) -> &[Factors] {
        let seat = (seat as usize).checked_sub(1).and_then(|seat| self.loaded.seats.get(seat));
        let sites = seat.and_then(Option::as_ref);
        sites.and_then(|sites| sites.get(site)).map_or(&[], Vec::as_slice)
    }

    /// The low-rank factors at one of a site's matrices for a row among those of `rows`.
    pub(super) fn factors(
        &self,
        rows: Rows,
        row: usize,
        site: usize,
        matrix: usize,
    ) -> Option<&Factors> {
        let token = match rows {
            Rows::Outputs => self.step.outputs[row] as usize,
            _ => row,
        };
        let sequence = self.rows[token].sequence;
        self.seated(self.step.sequences[sequence].adapter, site).get(matrix)
    }

    /// Adds each row's adapter at a site, in runs of rows that have the same. With few rows,
    /// workers split ranks and then columns; with many, rows.
    fn low_rank(&self, index: usize, op: &LowRank, node: &Node, worker: &Worker<'_>) {
        let (isa, y, x) = (self.loaded.isa, node.inputs[0], node.inputs.get(1).copied());
        let (rows, width, rank) = (self.rows(node), self.width(y), self.loaded.rank);
        let of = self.loaded.program.values[y.0].rows;
        let factors = |row: usize| self.factors(of, row, op.site, 0);
        let few = rows <= EVEN;
        let mine = if few { 0..rows } else { worker.split(rows) };
        let low: *mut f32 = self.arena.wrapping_add(self.class.low_rank).cast();
        for (run, factors) in runs(mine.clone(), &factors) {
            let ranks = match few {
                true => worker.split(factors.rank()),
                false => 0..factors.rank(),
            };
            let Some(x) = x else {
                for row in run {
                    let own = row * rank + ranks.start..row * rank + ranks.end;
                    // SAFETY: each worker has its own rows, or its own ranks of each.
                    let t = unsafe { self.floats(self.class.low_rank, own) };
                    factors.pick(self.tokens[row] as usize, ranks.clone(), t);
                }
                continue;
            };
            let wide = self.width(x);
            // SAFETY: each worker has its own rows, or its own ranks of each; inputs are only read.
            unsafe {
                let x = self.floats(self.offset(x), run.start * wide..run.end * wide);
                let start = low.wrapping_add(run.start * rank + ranks.start);
                factors.down(isa, x, ranks, OutRows { start, stride: rank });
            }
        }
        worker.barrier();
        let columns = if few { worker.split_units(width, ROWS) } else { 0..width };
        for row in mine.clone() {
            let range = row * width + columns.start..row * width + columns.end;
            self.copy_unless_in_place(index, node, 0, range);
        }
        for (run, factors) in runs(mine, &factors).filter(|_| !columns.is_empty()) {
            let first = run.start * width + columns.start;
            let end = (run.end - 1) * width + columns.end;
            // SAFETY: each worker has its own rows, or its own columns of each; what was computed
            // before the barrier, and the residual, are only read.
            unsafe {
                let t = self.floats(self.class.low_rank, run.start * rank..run.end * rank);
                let start = self.start(node.outputs[0]).wrapping_add(first);
                let residual = node.inputs.get(2);
                let residual = residual.map(|v| &*self.floats(self.offset(*v), first..end));
                let y = OutRows { start, stride: width };
                factors.up(isa, (t, rank), columns.clone(), residual, y);
            }
        }
    }

    /// This worker's share of the elements of a node's output.
    fn elements(&self, node: &Node, rows: usize, worker: &Worker<'_>) -> Range<usize> {
        worker.split_units(rows * self.width(node.outputs[0]), ROWS)
    }

    /// This worker's elements of an elementwise operation's output, holding the input's values.
    #[expect(clippy::mut_from_ref, reason = "workers' elements do not meet")]
    fn own(&self, index: usize, node: &Node, rows: usize, worker: &Worker<'_>) -> &mut [f32] {
        let range = self.elements(node, rows, worker);
        self.copy_unless_in_place(index, node, 0, range.clone());
        // SAFETY: each worker has its own elements.
        unsafe { self.floats(self.offset(node.outputs[0]), range) }
    }

    /// Copies an input's elements to the output, unless the plan computes the output in place.
    fn copy_unless_in_place(&self, index: usize, node: &Node, input: usize, range: Range<usize>) {
        if self.class.plan.in_place[index] == Some(input) {
            return;
        }
        // SAFETY: the caller has this range of the output to itself; the input lies elsewhere and
        // is only read.
        let (x, y) = unsafe {
            let x = self.floats(self.offset(node.inputs[input]), range.clone());
            (x, self.floats(self.offset(node.outputs[0]), range))
        };
        y.copy_from_slice(x);
    }

    fn embed(&self, op: &Embed, node: &Node, worker: &Worker<'_>) {
        let (table, y) = (self.matrix(node.weights[0]), node.outputs[0]);
        let width = self.width(y);
        for t in worker.split(self.step.tokens.len()) {
            // SAFETY: each worker has its own tokens.
            let row = unsafe { self.floats(self.offset(y), t * width..(t + 1) * width) };
            let index = match op.index {
                Index::Token => self.tokens[t],
                Index::Position => self.rows[t].position,
            };
            table.row(index as usize, row);
        }
    }

    fn project(&self, project: &Project, node: &Node, worker: &Worker<'_>) {
        let norm = project.norm.map(|eps| (self.vector(node.weights[0]), eps));
        let x = self.input(node, norm, worker);
        let projection = |i: usize| {
            project.projections().nth(i).unwrap_or_else(|| unreachable!("outputs are projections"))
        };
        let matrix = |i: usize| self.matrix(node.weights[projection(i).weight]);
        deal(worker, x.tokens(), node.outputs.len(), matrix, |i, panels| {
            let bias = projection(i).bias.map(|b| self.vector(node.weights[b]));
            let (out, stride) = (self.start(node.outputs[i]), self.width(node.outputs[i]));
            let product = Product { matrix: matrix(i), bias, out, stride, accumulate: false };
            self.multiply(&product, &x, panels, worker);
        });
    }

    fn gate_up(&self, op: &GateUp, node: &Node, worker: &Worker<'_>) {
        let norm = op.norm.map(|eps| (self.vector(node.weights[0]), eps));
        let both = &node.weights[usize::from(norm.is_some())..];
        let x = self.input(node, norm, worker);
        let (value, width, rows) = (node.outputs[0], self.width(node.outputs[0]), x.tokens());
        let scratch = self.class.gate_scratch(worker);
        let quantised_only = self.quantised_only(value, rows);
        deal(
            worker,
            rows,
            1,
            |_| self.matrix(both[0]),
            |_, panels| {
                // Start and stride, in floats, of both operands of this part. `up` goes to this
                // worker's scratch; so does `gate` if only its quantised form is kept.
                let columns = columns(0, width, &panels);
                let (wide, float) = (panels.len() * ROWS, size_of::<f32>());
                let first = match quantised_only {
                    true => (scratch + rows * wide * float, wide),
                    false => (self.offset(value) + columns.start * float, width),
                };
                let operands = [first, (scratch, wide)];
                let row_0 = |at: usize| -> *mut f32 {
                    self.arena.wrapping_add(at).cast::<f32>().wrapping_sub(columns.start)
                };
                for (&weight, (at, stride)) in both.iter().zip(operands) {
                    let (matrix, out) = (self.matrix(weight), row_0(at));
                    let product = Product { matrix, bias: None, out, stride, accumulate: false };
                    self.multiply(&product, &x, panels.clone(), worker);
                }
                // SAFETY: the part was written above; the quantised rows, stored in the value's
                // place, are this worker's own.
                let part = unsafe {
                    let quantised = self.start(value).cast();
                    Activations::new(
                        self.path(value),
                        row_0(first.0),
                        first.1,
                        rows,
                        width,
                        quantised,
                    )
                };
                for t in 0..rows {
                    // SAFETY: each worker has its own columns.
                    let [gate, up] = operands.map(|(at, stride)| unsafe {
                        self.floats(at, t * stride..t * stride + columns.len())
                    });
                    math::gate_in_place(self.loaded.isa, op.act, gate, up);
                    if quantised_only {
                        let [from, to] =
                            [columns.start, columns.end].map(|column| (t * width + column) / BLOCK);
                        // SAFETY: parts are whole blocks, and no other worker has these.
                        unsafe { part.quantise(self.loaded.isa, from..to, false) };
                    }
                }
            },
        );
    }

    /// The path of products with this value.
    pub(super) fn path(&self, value: ValueId) -> Path {
        path(self.step.kind, self.loaded.program.values[value.0].rows)
    }

    /// Whether a value with `rows` rows is kept only in quantised form.
    fn quantised_only(&self, value: ValueId, rows: usize) -> bool {
        rows > EVEN && self.loaded.quantised_only[value.0]
    }

    fn linear(&self, index: usize, node: &Node, worker: &Worker<'_>) {
        let residual = matches!(node.op, Op::LinearAdd(_));
        let x = self.input(node, None, worker);
        let (matrix, width) = (self.matrix(node.weights[0]), self.width(node.outputs[0]));
        let bias = node.weights.get(1).map(|&b| self.vector(b));
        let out = self.start(node.outputs[0]);
        let product = Product { matrix, bias, out, stride: width, accumulate: residual };
        deal(
            worker,
            x.tokens(),
            1,
            |_| matrix,
            |_, panels| {
                if residual {
                    for t in 0..x.tokens() {
                        self.copy_unless_in_place(index, node, 1, columns(t, width, &panels));
                    }
                }
                self.multiply(&product, &x, panels, worker);
            },
        );
    }

    /// The first input of a node of products, normalised if requested and quantised for the weights
    /// that need it.
    fn input(
        &self,
        node: &Node,
        norm: Option<(&[f32], f32)>,
        worker: &Worker<'_>,
    ) -> Activations<'_> {
        let (isa, value) = (self.loaded.isa, node.inputs[0]);
        let (rows, width) =
            (self.count(self.loaded.program.values[value.0].rows), self.width(value));
        // Few rows are prepared by every worker for itself; many by all workers together, with a
        // barrier after them.
        let path = self.path(value);
        let few = rows <= FEW && path == Path::InPlace;
        let own = self.class.workers + worker.index * self.class.worker_bytes;
        let (normed, quantised) = if few {
            (own, own + self.class.worker_quantised)
        } else {
            (self.class.normed, self.class.quantised)
        };
        // SAFETY: the rows and the storage lie in the arena as the class laid them out for this
        // many rows; nothing else touches either until the next node.
        let activations = |start: usize, quantised: usize| unsafe {
            let (rows_at, quantised) =
                (self.arena.wrapping_add(start), self.arena.wrapping_add(quantised));
            Activations::new(path, rows_at.cast(), width, rows, width, quantised)
        };
        if self.quantised_only(value, rows) {
            return activations(self.offset(value), self.offset(value));
        }
        let float = node.weights.iter().any(|w| self.loaded.weights[w.0].is_float_matrix());
        let mine = if few { 0..rows } else { worker.split(rows) };
        // Rows are normalised and quantised in batches that fit the L1 cache; the normalised rows
        // are stored only if something else reads them.
        for first in mine.clone().step_by(NEAR) {
            let near = first..mine.end.min(first + NEAR);
            let mut start = self.offset(value);
            if let Some((weight, eps)) = norm {
                let from = near.start * width..near.end * width;
                let (place, to) =
                    if few || float { (normed, from.clone()) } else { (own, 0..from.len()) };
                start = (place + to.start * size_of::<f32>())
                    .wrapping_sub(from.start * size_of::<f32>());
                // SAFETY: the scratch rows are this worker's own; the input is only read.
                let (x, y) =
                    unsafe { (self.floats(self.offset(value), from), self.floats(place, to)) };
                math::rms_norm(isa, x, weight, eps, y);
            }
            let x = activations(start, quantised);
            let each = x.blocks().checked_div(rows).unwrap_or(0);
            // SAFETY: workers quantise their own rows, or all rows into storage of their own.
            unsafe { x.quantise(isa, near.start * each..near.end * each, float) };
        }
        if !few {
            worker.barrier();
        }
        activations(if norm.is_some() { normed } else { self.offset(value) }, quantised)
    }

    pub(super) fn multiply(
        &self,
        product: &Product<'_>,
        x: &Activations<'_>,
        panels: Range<usize>,
        worker: &Worker<'_>,
    ) {
        let out = Output { start: product.out, stride: product.stride };
        let epilogue = Epilogue { accumulate: product.accumulate, bias: product.bias };
        // SAFETY: the scratch at this index is this worker's own.
        let scratch = unsafe { self.scratch.slice_mut(worker.index..worker.index + 1) };
        // SAFETY: panels of different workers do not overlap; the quantised rows were complete
        // before the last barrier, or are this worker's own.
        unsafe {
            multiply(
                self.loaded.isa,
                product.matrix,
                x,
                0..x.tokens(),
                panels,
                out,
                epilogue,
                &mut scratch[0],
            );
        }
    }

    /// Offsets of a rotation's cosines and sines in the arena.
    fn angles_of(&self, rope: &Rope) -> (usize, usize) {
        let known = self.loaded.ropes.iter().position(|r| r == rope);
        self.class.angles[known.unwrap_or_else(|| unreachable!("collected at load"))]
    }

    /// Rotates every head of token `t`'s row by the angles at these offsets.
    fn turn(&self, rope: &Rope, (cos, sin): (usize, usize), t: usize, row: &mut [f32]) {
        let pairs = rope.frequencies.len();
        let range = t * pairs..(t + 1) * pairs;
        // SAFETY: angles were complete before the first node and are only read.
        let (cos, sin) = unsafe { (self.floats(cos, range.clone()), self.floats(sin, range)) };
        math::rope(self.loaded.isa, row, rope.head_dim, cos, sin, rope.pairing);
    }

    /// Normalises and rotates this worker's share of the heads of q and k, and writes k and v to
    /// the cache.
    fn rope_write(&self, index: usize, op: &RopeWrite, node: &Node, worker: &Worker<'_>) {
        let [q, k, v] = [0, 1, 2].map(|i| node.inputs[i]);
        let d = op.rope.head_dim;
        let (heads, kv_heads) = (self.width(q) / d, self.width(k) / d);
        // The norms that exist are in order: q's, then k's.
        let q_norm = op.q_norm.map(|eps| (eps, self.vector(node.weights[0])));
        let k_norm =
            op.k_norm.map(|eps| (eps, self.vector(node.weights[usize::from(op.q_norm.is_some())])));
        let angles = self.angles_of(&op.rope);
        let turn = |t: usize, h: usize| {
            let (start, norm) = if h < heads {
                let at = (t * heads + h) * d;
                self.copy_unless_in_place(index, node, 0, at..at + d);
                // SAFETY: each worker has its own heads.
                (unsafe { self.floats(self.offset(node.outputs[0]), at..at + d) }, q_norm)
            } else {
                let at = (t * kv_heads + h - heads) * d;
                // SAFETY: as above; nothing reads k after this node but the cache.
                (unsafe { self.floats(self.offset(k), at..at + d) }, k_norm)
            };
            if let Some((eps, weight)) = norm {
                math::rms_norm_in_place(self.loaded.isa, start, weight, eps);
            }
            self.turn(&op.rope, angles, t, start);
        };
        let (tokens, each) = (self.tokens.len(), heads + kv_heads);
        if tokens <= FEW || self.step.kind == StepKind::Decode {
            let (queries, keys) = (worker.split(tokens * heads), worker.split(tokens * kv_heads));
            // Prefetch the cache lines to be written while the queries are rotated.
            for item in keys.clone() {
                let (t, h) = (item / kv_heads, item % kv_heads);
                let table = self.table(op.layer, self.rows[t].sequence);
                self.cache(op.layer).fetch(table, self.rows[t].index, h);
            }
            for item in queries {
                turn(item / heads, item % heads);
            }
            for item in keys {
                let (t, h) = (item / kv_heads, item % kv_heads);
                turn(t, heads + h);
                self.write(op.layer, k, v, t..t + 1, h..h + 1);
            }
            return;
        }
        // Keys of neighbouring tokens share cache lines: write [`ROWS`] tokens at a time, head by
        // head.
        let mine = worker.split_units(tokens, ROWS);
        for first in mine.clone().step_by(ROWS) {
            let near = first..mine.end.min(first + ROWS);
            for item in near.start * each..near.end * each {
                turn(item / each, item % each);
            }
            self.write(op.layer, k, v, near, 0..kv_heads);
        }
    }

    fn kv_write(&self, layer: usize, k: ValueId, v: ValueId, worker: &Worker<'_>) {
        let kv_heads = self.loaded.program.layers[layer].kv_heads;
        for item in worker.split(self.step.tokens.len() * kv_heads) {
            let (t, head) = (item / kv_heads, item % kv_heads);
            self.write(layer, k, v, t..t + 1, head..head + 1);
        }
    }

    /// Writes keys and values of some tokens and heads to the cache.
    fn write(
        &self,
        layer: usize,
        k: ValueId,
        v: ValueId,
        tokens: Range<usize>,
        heads: Range<usize>,
    ) {
        let width = self.width(k);
        let all = 0..self.tokens.len() * width;
        // SAFETY: this worker wrote these heads of k, or no worker writes them.
        let (k, v) =
            unsafe { (self.floats(self.offset(k), all.clone()), self.floats(self.offset(v), all)) };
        let mut next = tokens.start;
        while next < tokens.end {
            let Row { sequence, first, .. } = self.rows[next];
            let of = &self.step.sequences[sequence];
            let end = tokens.end.min(first + of.rows as usize);
            let (table, start) = (self.table(layer, sequence), of.start as usize);
            let (k, v) = (&k[first * width..], &v[first * width..]);
            let (rows, heads) = (next - first..end - first, heads.clone());
            // SAFETY: these positions and heads are this worker's.
            unsafe {
                self.cache(layer).write(self.loaded.isa, table, start, k, v, width, rows, heads);
            }
            next = end;
        }
    }

    /// The KV cache of a layer.
    fn cache(&self, layer: usize) -> &LayerCache {
        match &self.caches[layer] {
            Cache::KeysValues(cache) => cache,
            Cache::State(_) => unreachable!("the verifier gives attention keys and values"),
        }
    }

    /// The block table of a sequence in a layer's cache.
    pub(super) fn table(&self, layer: usize, sequence: usize) -> &[u32] {
        self.step.sequences[sequence].tables[self.loaded.groups[layer]].blocks
    }

    fn attend(&self, op: &ops::Attention, node: &Node, worker: &Worker<'_>) {
        let (tokens, width) = (self.tokens.len(), op.heads * op.head_dim);
        // SAFETY: q is only read; `attention::run` keeps the workers' rows and heads of the output
        // apart.
        let (q, out) = unsafe {
            let q = self.floats(self.offset(node.inputs[0]), 0..tokens * width);
            (q, SharedSlice::from_raw(self.start(node.outputs[0]), tokens * width))
        };
        let (shape, mut rest) = (shape(op), &self.queries[self.loaded.groups[op.layer]][..]);
        // Attend to as many sequences at a time as the scratch holds: all of them, unless many
        // decode at long contexts.
        while !rest.is_empty() {
            let (sequences, behind) =
                rest.split_at(shape.fitting(worker.count, self.partials.len(), rest));
            let call = AttentionCall {
                shape,
                cache: self.cache(op.layer),
                sequences,
                q,
                q_stride: width,
                sinks: node.weights.first().map(|&sinks| self.vector(sinks)),
                rounded: self.loaded.quantised,
            };
            // SAFETY: a barrier lies before and after every node, and between two parts of one;
            // nothing else uses the scratch, and no claim is open.
            unsafe { attention::run(worker, self.loaded.isa, &call, out, self.partials) };
            rest = behind;
            if !rest.is_empty() {
                worker.barrier();
            }
        }
    }
}

/// The rows that have factors, as runs of those that have the same.
fn runs<'a>(
    rows: Range<usize>,
    factors: impl Fn(usize) -> Option<&'a Factors>,
) -> impl Iterator<Item = (Range<usize>, &'a Factors)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        while row < rows.end {
            let (first, own) = (row, factors(row));
            let same = |row: &usize| match (factors(*row), own) {
                (Some(a), Some(b)) => std::ptr::eq(a, b),
                (a, b) => a.is_none() && b.is_none(),
            };
            row = (first + 1..rows.end).find(|row| !same(row)).unwrap_or(rows.end);
            if let Some(own) = own {
                return Some((first..row, own));
            }
        }
        None
    })
}

/// Rows that are normalised and quantised together: as many as a worker's own scratch holds.
const NEAR: usize = FEW;

/// Columns of a row-major output: the range that `panels` of a matrix of `width` rows write in row
/// `t`.
fn columns(t: usize, width: usize, panels: &Range<usize>) -> Range<usize> {
    t * width + panels.start * ROWS..t * width + (panels.end * ROWS).min(width)
}

/// Deals out the panels of `count` matrices that read the same rows: calls `f(i, panels)` for this
/// worker's part of matrix `i`. With few rows each worker gets an equal share of the bytes; with
/// many, workers claim parts as they become free, since cores differ in speed and other work slows
/// them down. With many rows there must be a barrier before and after.
fn deal<'a>(
    worker: &Worker<'_>,
    rows: usize,
    count: usize,
    matrix: impl Fn(usize) -> &'a Matrix,
    mut f: impl FnMut(usize, Range<usize>),
) {
    if rows <= EVEN {
        let cost = |i: usize| (matrix(i).resident_bytes() / matrix(i).panels().max(1)).max(1);
        let total: usize = (0..count).map(|i| matrix(i).panels() * cost(i)).sum();
        let share = share(total, worker.index, worker.count);
        let (mut low, mut high) = (share.start, share.end);
        for i in 0..count {
            let (panels, each) = (matrix(i).panels(), cost(i));
            f(i, low.div_ceil(each).min(panels)..high.div_ceil(each).min(panels));
            low = low.saturating_sub(panels * each);
            high = high.saturating_sub(panels * each);
        }
        return;
    }
    let total: usize = (0..count).map(|i| matrix(i).panels()).sum();
    // Four parts per worker balance the load, but parts that are too short do not pay for another
    // pass over the rows.
    let share = total / worker.count;
    let part = (share / 4).max(PART.min(share / 2)).clamp(2, MOST_PART) & !1;
    let parts = |i: usize| matrix(i).panels().div_ceil(part);
    while let Some(claimed) = worker.claim((0..count).map(parts).sum(), 1) {
        let (mut i, mut at) = (0, claimed.start);
        while at >= parts(i) {
            at -= parts(i);
            i += 1;
        }
        f(i, at * part..matrix(i).panels().min((at + 1) * part));
    }
}
