//! Shape classes: where everything that a replay touches lies in the arena, for up to so many rows.

use super::experts;
use cpu_kernels::matmul::{Activations, Path, ROWS};
use ops::Rope;
use program::{Plan, Program, plan_memory};

/// Rows that decode, up to which every worker norms and quantises for itself: cheaper than a
/// barrier.
pub(super) const FEW: usize = 4;

/// Rows up to which the workers' parts of a product are even shares of its bytes.
pub(super) const EVEN: usize = 2 * FEW;

/// Panels of a product's part that pay for a pass over more rows than that, and the most that a
/// part has.
pub(super) const PART: usize = 16;
pub(super) const MOST_PART: usize = 2 * PART;

/// The arena's layout for one shape class. All offsets are in bytes, multiples of 64.
pub(super) struct Class {
    pub(super) tokens: usize,
    pub(super) outputs: usize,
    pub(super) plan: Plan,
    /// Cosines, then sines, of each rope: `[tokens, pairs]`.
    pub(super) angles: Vec<(usize, usize)>,
    /// Normed rows shared by all workers: `[rows, width]`.
    pub(super) normed: usize,
    /// Quantised rows shared by all workers.
    pub(super) lines: usize,
    /// Worker `i`'s operands of a gate, of the columns that it has in hand: the second, then the
    /// first where it needs a place.
    pub(super) hands: usize,
    pub(super) hand_bytes: usize,
    /// Worker `i`'s own memory: normed rows, then quantised rows, of at most [`FEW`] rows.
    pub(super) workers: usize,
    pub(super) worker_bytes: usize,
    pub(super) worker_lines: usize,
    /// Working memory of mixtures of experts, and what lies where in it.
    pub(super) mixture: usize,
    pub(super) experts: experts::Layout,
    /// Rows between the factors of adapters: `[rows, rank]`.
    pub(super) low: usize,
    /// End of the arena.
    pub(super) bytes: usize,
}

/// The widest operands of a Program.
struct Widths {
    /// Input of any projection.
    input: usize,
    /// Output of any gate.
    gate: usize,
    /// Quantised bytes of the hungriest projection, for some rows on a path.
    lines: Box<dyn Fn(Path, usize) -> usize>,
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
    let lines = move |path, rows| {
        inputs.iter().map(|&width| Activations::bytes(path, rows, width)).max().unwrap_or(0)
    };
    Widths { input, gate, lines: Box::new(lines) }
}

/// Elements of the largest part of `[rows, width]` that a worker has in hand at once, as
/// [`deal`](super::replay) deals them.
fn widest(rows: usize, width: usize, workers: usize) -> usize {
    let panels = width.div_ceil(ROWS);
    let few = rows.min(EVEN) * (panels / workers + 1);
    few.max(rows * panels.min(MOST_PART)).next_multiple_of(4) * ROWS
}

impl Class {
    /// Lays out `program` for up to `tokens` rows, `outputs` of them with logits, and adapters of a
    /// rank up to `rank`.
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
        let hand_bytes = 2 * widest(rows, widths.gate, workers) * float;
        let (normed, lines, hands) = (
            take(rows * widths.input * float),
            take((widths.lines)(Path::Expanded, rows)),
            take(hand_bytes * workers),
        );
        let few = rows.min(FEW);
        let worker_lines = (few * widths.input * float).next_multiple_of(64);
        let of = |rows| (widths.lines)(Path::InPlace, rows);
        let few_lines = (1..=few).map(of).max().unwrap_or(0);
        // Neighbours' scratch a page apart: no false sharing, and adjacent-line prefetches stay at
        // home.
        let worker_bytes = (worker_lines + few_lines).next_multiple_of(4096);
        let start = take(worker_bytes * workers);
        let experts = experts::Layout::new(program, tokens, workers);
        let mixture = take(experts.bytes);
        let low = take(rows * rank * float);
        Class {
            mixture,
            experts,
            tokens,
            outputs,
            plan,
            angles,
            normed,
            lines,
            hands,
            hand_bytes,
            workers: start,
            worker_bytes,
            worker_lines,
            low,
            bytes: end,
        }
    }
}
