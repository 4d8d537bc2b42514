//! Shape classes: the arena's layout for replays of up to a number of rows.

use super::{blocks, experts};
use cpu_kernels::matmul::{Activations, Path, ROWS};
use cpu_kernels::team::Worker;
use ops::{Op, Rope};
use program::{ArenaPlan, Program, plan_memory};

/// Decode rows up to which every worker normalises and quantises all rows for itself, which is
/// cheaper than a barrier.
pub(super) const FEW: usize = 4;

/// Rows up to which each worker gets an equal share of a product's bytes.
pub(super) const EVEN: usize = 2 * FEW;

/// The least number of panels of a part when more rows than [`EVEN`] are multiplied: with fewer,
/// another pass over the rows would not pay.
pub(super) const PART: usize = 16;
pub(super) const MOST_PART: usize = 2 * PART;

/// The arena's layout for one shape class. All offsets are in bytes, multiples of 64.
pub(super) struct Class {
    pub(super) tokens: usize,
    pub(super) outputs: usize,
    pub(super) plan: ArenaPlan,
    /// Cosines, then sines, of each rotation: `[tokens, pairs]`.
    pub(super) angles: Vec<(usize, usize)>,
    /// Normalised rows shared by all workers: `[rows, width]`.
    pub(super) normed: usize,
    /// Quantised rows shared by all workers.
    pub(super) quantised: usize,
    /// Scratch for `gate_up`, which [`Class::gate_scratch`] shares out.
    gates: usize,
    /// Rows, and the width of the widest gate.
    gate: (usize, usize),
    /// Per-worker scratch: normalised rows, then quantised rows, for at most [`FEW`] rows.
    pub(super) workers: usize,
    pub(super) worker_bytes: usize,
    pub(super) worker_quantised: usize,
    /// Scratch of mixtures of experts, and its layout.
    pub(super) mixture: usize,
    pub(super) experts: experts::Layout,
    /// Per-worker scratch of products with block-diagonal matrices, and its layout.
    pub(super) blocks: usize,
    pub(super) block: blocks::Layout,
    /// Rows between the two low-rank factors of adapters, for each matrix of a product:
    /// `[matrices, rows, rank]`.
    pub(super) low_rank: usize,
    /// Residuals that a product overwrites and an adapter's gains need: `[rows, width]`.
    pub(super) residual: usize,
    /// Size of the arena.
    pub(super) bytes: usize,
}

/// The largest operands of a Program.
struct Widths {
    /// Widest input of a projection.
    input: usize,
    /// Widest output of a gate.
    gate: usize,
    /// Most bytes that quantised input rows take, for a path and a number of rows.
    quantised: Box<dyn Fn(Path, usize) -> usize>,
}

fn widths(program: &Program) -> Widths {
    let mut inputs: Vec<usize> = Vec::new();
    let mut gate = 0;
    for node in &program.nodes {
        let Some(product) = node.op.product(node.weights.len()) else { continue };
        inputs.push(program.shape(node.inputs[0]).width);
        if product.gated {
            gate = gate.max(program.shape(node.outputs[0]).width);
        }
    }
    let input = inputs.iter().copied().max().unwrap_or(0);
    let quantised = move |path, rows| {
        inputs.iter().map(|&width| Activations::bytes(path, rows, width)).max().unwrap_or(0)
    };
    Widths { input, gate, quantised: Box::new(quantised) }
}

/// The largest products that adapters can change.
#[derive(Default)]
struct Adapted {
    /// Most matrices of one, or 1 for a table of embeddings.
    matrices: usize,
    /// Widest residual that one adds to.
    residual: usize,
}

impl Adapted {
    fn new(program: &Program) -> Adapted {
        let mut most = Adapted::default();
        for node in &program.nodes {
            let sites = node.sites(&program.sites);
            if matches!(node.op, Op::Experts(_)) || sites.iter().all(Option::is_none) {
                continue;
            }
            most.matrices = most.matrices.max(sites.len());
            let product = node.op.product(node.weights.len());
            if let Some(residual) = product.and_then(|product| product.residual) {
                most.residual = most.residual.max(program.shape(node.inputs[residual]).width);
            }
        }
        most
    }
}

/// Elements of the largest part of `[rows, width]` that a worker computes at once, as dealt out by
/// [`deal`](super::replay).
fn widest(rows: usize, width: usize, workers: usize) -> usize {
    let panels = width.div_ceil(ROWS);
    let few = rows.min(EVEN) * (panels / workers + 1);
    few.max(rows * panels.min(MOST_PART)).next_multiple_of(4) * ROWS
}

impl Class {
    /// Lays out `program` for up to `tokens` rows, of which `outputs` have logits, and for adapters
    /// of up to `rank`.
    pub(super) fn new(
        program: &Program,
        ropes: &[Rope],
        tokens: usize,
        outputs: usize,
        workers: usize,
        rank: usize,
    ) -> Self {
        let plan = plan_memory(program, tokens, outputs);
        let widths = widths(program);
        let rows = tokens.max(outputs);
        let mut end = plan.bytes;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(64);
            at
        };
        let float = size_of::<f32>();
        let angles = ropes
            .iter()
            .map(|rope| {
                let bytes = tokens * rope.frequencies.len() * float;
                (take(bytes), take(bytes))
            })
            .collect();
        let gate = (rows, widths.gate);
        // However many of the workers take part.
        let most = (1..=workers).map(|count| count * gate_bytes(gate, count)).max().unwrap_or(0);
        let (normed, quantised, gates) = (
            take(rows * widths.input * float),
            take((widths.quantised)(Path::Expanded, rows)),
            take(most),
        );
        let few = rows.min(FEW);
        let worker_quantised = (few * widths.input * float).next_multiple_of(64);
        let of = |rows| (widths.quantised)(Path::InPlace, rows);
        let few_quantised = (1..=few).map(of).max().unwrap_or(0);
        // Place the workers' scratch a page apart, which avoids false sharing and adjacent-line
        // prefetches of another worker's lines.
        let worker_bytes = (worker_quantised + few_quantised).next_multiple_of(4096);
        let start = take(worker_bytes * workers);
        let experts = experts::Layout::new(program, tokens, workers, rank);
        let mixture = take(experts.bytes);
        let block = blocks::Layout::new(program, rows);
        let blocks = take(block.bytes * workers);
        let adapted = Adapted::new(program);
        let low_rank = take(adapted.matrices * rows * rank * float);
        let residual = take(adapted.residual * rows * float);
        Class {
            mixture,
            experts,
            blocks,
            block,
            tokens,
            outputs,
            plan,
            angles,
            normed,
            quantised,
            gates,
            gate,
            workers: start,
            worker_bytes,
            worker_quantised,
            low_rank,
            residual,
            bytes: end,
        }
    }

    /// A worker's own scratch for `gate_up`: the `up` columns being computed, then the `gate`
    /// columns if they are not written in place.
    pub(super) fn gate_scratch(&self, worker: &Worker<'_>) -> usize {
        self.gates + worker.index * gate_bytes(self.gate, worker.count)
    }
}

/// Bytes of a worker's scratch for a gate of `[rows, width]` that `workers` workers share.
fn gate_bytes((rows, width): (usize, usize), workers: usize) -> usize {
    2 * widest(rows, width, workers) * size_of::<f32>()
}
