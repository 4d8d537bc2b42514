//! One replay: all workers walk the nodes together, each computing its share of every node.
//!
//! Activations lie in the arena at the plan's offsets. Between two barriers a worker writes only
//! its own rows, columns or heads, and reads only what was complete before the first of them.

use super::class::Class;
use super::executor::Loaded;
use super::profile::Spans;
use super::rows::Row;
use super::state::Cache;
use super::weights::Weight;
use crate::Watch;
use cpu_kernels::attention::QuerySequence;
use cpu_kernels::math;
use cpu_kernels::matmul::{Matrix, ROWS, Scratch};
use cpu_kernels::team::{SharedSlice, Team, Worker};
use ops::embed::Index;
use ops::{Binary, Embed, Gated, LayerNorm, Map, NormAdd, Op, RmsNorm, Rows, Scale, Unary, Zip};
use program::{Node, Step, ValueId, WeightId};
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

impl Replay<'_> {
    /// Runs the nodes on a team, the loaded one or a smaller. Returns false if it was stopped.
    pub(super) fn run(&self, team: &Team) -> bool {
        let nodes = &self.loaded.program.nodes;
        team.run_until(self.watch.stop, &|worker| {
            self.angles(worker);
            let mut going_on = worker.gather();
            let wanted = nodes.iter().enumerate().take(self.nodes.end).skip(self.nodes.start);
            for (i, node) in wanted.filter(|(_, node)| self.rows(node) > 0) {
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

    pub(super) fn start(&self, value: ValueId) -> *mut f32 {
        self.arena.wrapping_add(self.offset(value)).cast()
    }

    pub(super) fn width(&self, value: ValueId) -> usize {
        self.loaded.program.values[value.0].width
    }

    pub(super) fn count(&self, rows: Rows) -> usize {
        rows.count(self.step.tokens.len(), self.step.outputs.len())
    }

    /// Rows of a node's first output, or of its first input if it has no output.
    pub(super) fn rows(&self, node: &Node) -> usize {
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

    fn node(&self, index: usize, node: &Node, worker: &Worker<'_>) {
        let isa = self.loaded.isa;
        let rows = self.rows(node);
        match &node.op {
            Op::Embed(op) => self.embed(index, op, node, worker),
            Op::RmsNorm(RmsNorm { eps }) | Op::NormAdd(NormAdd { eps }) => {
                let width = self.width(node.inputs[0]);
                let share = worker.split(rows);
                let range = share.start * width..share.end * width;
                // SAFETY: each worker has its own rows; an output in place is the same rows.
                let y = unsafe { self.floats(self.offset(node.outputs[0]), range.clone()) };
                self.copy_unless_in_place(index, node, 0, range.clone());
                math::rms_norm_in_place(isa, y, self.vector(node.weights[0]), *eps);
                if let Some(&residual) = node.inputs.get(1) {
                    // SAFETY: the residual is only read.
                    let residual = unsafe { self.floats(self.offset(residual), range) };
                    math::zip_in_place(isa, Binary::Add, y, residual);
                }
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
            Op::Gated(Gated(f)) => {
                let range = self.elements(node, rows, worker);
                self.copy_unless_in_place(index, node, 0, range.clone());
                // SAFETY: each worker has its own elements; the second operand is only read.
                let (y, up) = unsafe {
                    let y = self.floats(self.offset(node.outputs[0]), range.clone());
                    (y, self.floats(self.offset(node.inputs[1]), range))
                };
                math::gate_in_place(isa, *f, y, up);
            }
            Op::Map(Map(f)) => math::map_in_place(isa, *f, self.own(index, node, rows, worker)),
            Op::Xielu(op) => {
                let [a, b] = [0, 1].map(|i| self.vector(node.weights[i]));
                let factors = op.coefficients(a, b);
                let mut powers = [0.0; 1024];
                for y in self.own(index, node, rows, worker).chunks_mut(powers.len()) {
                    let powers = &mut powers[..y.len()];
                    powers.iter_mut().zip(&*y).for_each(|(to, x)| *to = x.min(ops::xielu::BOUND));
                    math::map_in_place(isa, Unary::Exp, powers);
                    y.iter_mut().zip(powers).for_each(|(y, power)| *y = factors.of(*y, *power));
                }
            }
            Op::Scale(Scale { by }) => {
                math::scale_in_place(isa, *by, self.own(index, node, rows, worker));
            }
            Op::Rope(rope) => {
                let angles = self.angles_of(rope);
                self.change_rows(index, node, worker, rows, |t, y| self.turn(rope, angles, t, y));
            }
            Op::Stretch(stretch) => self.change_rows(index, node, worker, rows, |t, y| {
                math::scale_in_place(isa, stretch.factor(self.rows[t].position), y);
            }),
            Op::KvWrite(op) => self.kv_write(op.layer, &node.inputs, worker),
            Op::Attention(op) => self.attend(op, node, worker),
            Op::Indexer(op) => self.index(op, node, worker),
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
                let weight = self.vector(node.weights[0]);
                let groups = op.own_groups(width, weight.len());
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
            Op::Project(project) => self.project(index, project, node, worker),
            Op::GateUp(op) => self.gate_up(index, op, node, worker),
            Op::Experts(op) => self.experts(op, node, worker),
            Op::BlockLinear(op) => self.block_linear(*op, node, worker),
            Op::ScaleColumns(_) => {
                let by = self.vector(node.weights[0]);
                let bias = node.weights.get(1).map(|&bias| self.vector(bias));
                self.change_rows(index, node, worker, rows, |_, y| {
                    y.iter_mut().zip(by).for_each(|(y, by)| *y *= by);
                    y.iter_mut().zip(bias.unwrap_or_default()).for_each(|(y, bias)| *y += bias);
                });
            }
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
            Op::Mix(mix) => {
                let [x, c, y] = [node.inputs[0], node.inputs[1], node.outputs[0]];
                for t in worker.split(rows) {
                    let row = |v: ValueId| t * self.width(v)..(t + 1) * self.width(v);
                    // SAFETY: each worker has its own rows; inputs are only read.
                    unsafe {
                        let [x, c, y] = [x, c, y].map(|v| self.floats(self.offset(v), row(v)));
                        mix.row(x, c, y);
                    }
                }
            }
            Op::MatchRms(op) => {
                let (width, like) = (self.width(node.inputs[0]), node.inputs[1]);
                for t in worker.split(rows) {
                    let range = t * width..(t + 1) * width;
                    self.copy_unless_in_place(index, node, 0, range.clone());
                    let other = t * self.width(like)..(t + 1) * self.width(like);
                    // SAFETY: each worker has its own rows; those of the other input are only read.
                    let (y, like) = unsafe {
                        let y = self.floats(self.offset(node.outputs[0]), range);
                        (y, self.floats(self.offset(like), other))
                    };
                    op.row(y, like);
                }
            }
            Op::GaussianTopK(op) => {
                self.change_rows(index, node, worker, rows, |_, y| op.row(y));
            }
            Op::RoundRows(op) => self.change_rows(index, node, worker, rows, |_, y| op.row(y)),
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
            // Runs between two parts of a replay.
            Op::Exchange(_) => {}
            // Refused when the Program was loaded.
            Op::AllReduce(_)
            | Op::AllGather(_)
            | Op::JoinColumns(_)
            | Op::Gradient(_)
            | Op::LowRank(_) => {}
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

    /// Has `change(t, row)` change each of this worker's share of `rows` rows of the output, which
    /// begin as those of the input.
    fn change_rows(
        &self,
        index: usize,
        node: &Node,
        worker: &Worker<'_>,
        rows: usize,
        change: impl Fn(usize, &mut [f32]),
    ) {
        let width = self.width(node.inputs[0]);
        for t in worker.split(rows) {
            let range = t * width..(t + 1) * width;
            self.copy_unless_in_place(index, node, 0, range.clone());
            // SAFETY: each worker has its own rows.
            change(t, unsafe { self.floats(self.offset(node.outputs[0]), range) });
        }
    }

    /// Copies an input's elements to the output, unless the plan computes the output in place.
    pub(super) fn copy_unless_in_place(
        &self,
        index: usize,
        node: &Node,
        input: usize,
        range: Range<usize>,
    ) {
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

    fn embed(&self, index: usize, op: &Embed, node: &Node, worker: &Worker<'_>) {
        let (table, y) = (self.matrix(node.weights[0]), node.outputs[0]);
        let width = self.width(y);
        for t in worker.split(self.step.tokens.len()) {
            // SAFETY: each worker has its own tokens.
            let row = unsafe { self.floats(self.offset(y), t * width..(t + 1) * width) };
            let picked = match op.index {
                Index::Token => self.tokens[t],
                Index::Position => self.rows[t].position,
            };
            table.row(picked as usize, row);
            self.low_rank_embedded(index, t, row);
        }
    }
}
