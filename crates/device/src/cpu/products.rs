//! Products with matrices: projections, gates and plain linear layers. The rows are normalised and
//! quantised first, then workers deal out the panels of the matrices.

use super::class::{EVEN, FEW, MOST_PART, PART};
use super::replay::Replay;
use cpu_kernels::math;
use cpu_kernels::matmul::{
    Activations, BLOCK, Epilogue, Matrix, Output, Path, ROWS, multiply, share,
};
use cpu_kernels::team::Worker;
use ops::{GateUp, Op, Project, Rows};
use program::{Node, StepKind, ValueId};
use std::ops::Range;

/// Rows that are normalised and quantised together: as many as a worker's own scratch holds.
const NEAR: usize = FEW;

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
    pub(super) fn project(
        &self,
        index: usize,
        project: &Project,
        node: &Node,
        worker: &Worker<'_>,
    ) {
        let norm = project.norm.map(|eps| (self.vector(node.weights[0]), eps));
        let x = self.input(index, node, norm, worker);
        let projection = |i: usize| {
            project.projections().nth(i).unwrap_or_else(|| unreachable!("outputs are projections"))
        };
        let matrix = |i: usize| self.matrix(node.weights[projection(i).weight]);
        deal(worker, x.tokens(), node.outputs.len(), matrix, |i, panels| {
            let bias = projection(i).bias.map(|b| self.vector(node.weights[b]));
            let (out, stride) = (self.start(node.outputs[i]), self.width(node.outputs[i]));
            let product = Product { matrix: matrix(i), bias, out, stride, accumulate: false };
            self.multiply(&product, &x, panels.clone(), worker);
            self.low_rank_up((index, i), &product, &x, panels, None, worker);
        });
    }

    pub(super) fn gate_up(&self, index: usize, op: &GateUp, node: &Node, worker: &Worker<'_>) {
        let norm = op.norm.map(|eps| (self.vector(node.weights[0]), eps));
        let both = &node.weights[usize::from(norm.is_some())..];
        let x = self.input(index, node, norm, worker);
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
                let product = |i: usize| {
                    let (matrix, (at, stride)) = (self.matrix(both[i]), operands[i]);
                    Product { matrix, bias: None, out: row_0(at), stride, accumulate: false }
                };
                let products = [0, 1].map(product);
                for product in &products {
                    self.multiply(product, &x, panels.clone(), worker);
                }
                for (i, product) in products.iter().enumerate() {
                    self.low_rank_up((index, i), product, &x, panels.clone(), None, worker);
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

    /// Whether a value with `rows` rows is kept only in quantised form. Adapters read floats.
    fn quantised_only(&self, value: ValueId, rows: usize) -> bool {
        let reader = self.loaded.quantised_only[value.0];
        rows > EVEN && reader.is_some_and(|reader| !self.is_adapted(reader))
    }

    pub(super) fn linear(&self, index: usize, node: &Node, worker: &Worker<'_>) {
        let residual = matches!(node.op, Op::LinearAdd(_));
        let x = self.input(index, node, None, worker);
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
                let kept = residual.then(|| self.kept_residual(index, node, &panels));
                self.multiply(&product, &x, panels.clone(), worker);
                self.low_rank_up((index, 0), &product, &x, panels, kept, worker);
            },
        );
    }

    /// The first input of a node of products, normalised if requested and quantised for the weights
    /// that need it. Also begins what adapters of the step change in those products.
    fn input(
        &self,
        index: usize,
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
        let adapted = self.is_adapted(index);
        let stored = few || float || adapted;
        let mine = if few { 0..rows } else { worker.split(rows) };
        // Rows are normalised and quantised in batches that fit the L1 cache; the normalised rows
        // are stored only if something else reads them.
        for first in mine.clone().step_by(NEAR) {
            let near = first..mine.end.min(first + NEAR);
            let mut start = self.offset(value);
            if let Some((weight, eps)) = norm {
                let from = near.start * width..near.end * width;
                let (place, to) =
                    if stored { (normed, from.clone()) } else { (own, 0..from.len()) };
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
        let start = if norm.is_some() { normed } else { self.offset(value) };
        if adapted {
            self.low_rank_down(index, node, start, worker);
        }
        activations(start, quantised)
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
}

/// Columns of a row-major output: the range that `panels` of a matrix of `width` rows write in row
/// `t`.
pub(super) fn columns(t: usize, width: usize, panels: &Range<usize>) -> Range<usize> {
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
