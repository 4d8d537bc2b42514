//! The layout of a batch's values and words, and the types of values.

use std::ops::Range;

use ops::gradient::Gradient;
use ops::{Op, Rows};
use program::{ArenaPlan, Program, ValueId, plan_sizes};
use tile::types::Scalar;

use super::lower::Lowering;
use super::states;
use crate::gpu::arena::{MIXTURE, mixtures};

/// Alignment of scratch and of results.
const ALIGN: usize = 256;

/// The next place for scratch or a result.
pub(super) fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// Types of all values. Activations have `scalar`; values with a weight's shape, one number per row
/// or head, and a router's scores, whose rounding could select other experts, are f32.
pub(super) fn types(program: &Program, scalar: Scalar) -> Vec<Scalar> {
    let fixed = |v: &ops::Shape| matches!(v.rows, Rows::Fixed(_));
    let of = |v| if fixed(v) { Scalar::F32 } else { scalar };
    let mut types: Vec<Scalar> = program.values.iter().map(of).collect();
    for node in &program.nodes {
        match &node.op {
            Op::Gradient(Gradient::Attend(_)) => types[node.outputs[1].0] = Scalar::F32,
            Op::Gradient(Gradient::CrossEntropy(_) | Gradient::XieluSums(_)) => {
                types[node.outputs[0].0] = Scalar::F32;
            }
            // Products write any type; what else there may be has one for all its operands.
            Op::Linear(_) if only_scores(program, node.outputs[0]) => {
                types[node.outputs[0].0] = Scalar::F32;
            }
            Op::GroupLimit(_) => types[node.outputs[0].0] = types[node.inputs[0].0],
            _ => {}
        }
    }
    types
}

/// Whether mixtures, and what limits their experts, read a value as scores, and nothing else does.
fn only_scores(program: &Program, v: ValueId) -> bool {
    let mut readers = program.nodes.iter().filter(|node| node.inputs.contains(&v)).peekable();
    readers.peek().is_some()
        && readers.all(|node| match &node.op {
            Op::GroupLimit(_) => only_scores(program, node.outputs[0]),
            Op::Gradient(Gradient::LimitSlopes(_)) => node.inputs[2] != v,
            _ => program.mixture(node).is_some() && node.inputs[1] == v,
        })
}

/// The key of a class of batches: sizes, all rounded up so that batches share classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) tokens: usize,
    /// Rows with a loss.
    pub(super) outputs: usize,
    pub(super) sequences: usize,
    /// Rows of the longest sequence.
    pub(super) longest: usize,
}

impl Counts {
    /// For these sequences, given by the first row of each row's sequence.
    pub(super) fn new(first: &[u32], outputs: usize) -> Counts {
        let lengths = first.chunk_by(|a, b| a == b).map(<[u32]>::len);
        let (sequences, longest) = (lengths.clone().count(), lengths.max().unwrap_or(0));
        Counts::whole([first.len(), outputs], sequences, longest)
    }

    /// For the most sequences that `tokens` rows can have.
    pub(super) fn most(tokens: usize, outputs: usize) -> Counts {
        Counts::whole([tokens, outputs], tokens, tokens)
    }

    fn whole(rows: [usize; 2], sequences: usize, longest: usize) -> Counts {
        let up = |n: usize| n.next_multiple_of(if n > 256 { 128 } else { 16 });
        let [tokens, outputs] = rows.map(up);
        // Padding rows form a sequence of their own.
        let sequences = (sequences + 1).next_power_of_two();
        let longest = longest.max(tokens - rows[0]).next_power_of_two();
        Counts { tokens, outputs: outputs.min(tokens), sequences, longest }
    }

    /// Number of rows of a value.
    pub(super) fn rows(self, rows: Rows) -> usize {
        rows.count(self.tokens, self.outputs)
    }
}

/// The layout of a batch's words, in bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Words {
    pub(super) tokens: Range<usize>,
    pub(super) positions: Range<usize>,
    pub(super) first: Range<usize>,
    pub(super) ends: Range<usize>,
    pub(super) targets: Range<usize>,
    pub(super) counts: Range<usize>,
    pub(super) draws: Range<usize>,
    pub(super) picks: Range<usize>,
    /// The first row of each sequence, and the end.
    pub(super) starts: Range<usize>,
    /// Zeros, one for each token.
    pub(super) zeros: Range<usize>,
    pub(super) bytes: usize,
}

impl Words {
    pub(super) fn new(counts: Counts) -> Words {
        let Counts { tokens, outputs, sequences, .. } = counts;
        let mut end = 0;
        let mut take = |words: usize| {
            let start: usize = end;
            end = (start + 4 * words.max(1)).next_multiple_of(64);
            start..start + 4 * words
        };
        let mut words = Words {
            tokens: take(tokens),
            positions: take(tokens),
            first: take(tokens),
            ends: take(tokens),
            targets: take(tokens),
            counts: take(tokens),
            draws: take(tokens),
            picks: take(outputs),
            starts: take(sequences + 1),
            zeros: take(tokens),
            bytes: 0,
        };
        words.bytes = end;
        words
    }
}

/// The arena of a Program for batches of a class. The gradients of trained weights come first, at
/// the same offsets in all Programs, so that the padding between them is never written.
pub(super) struct Layout {
    plan: ArenaPlan,
    counts: Counts,
    /// Start of the values that are not gradients.
    first: usize,
    /// The offset of each result.
    placed: Vec<(ValueId, usize)>,
    /// Scratch: logits of the head, their gradients, and one number per row and head for
    /// attention's gradients.
    pub(super) products: Range<usize>,
    pub(super) slopes: Range<usize>,
    pub(super) along: Range<usize>,
    /// Scratch of gated delta nets and state spaces; see [`states`].
    pub(super) states: Range<usize>,
    /// Scratch of mixtures of experts; see [`mixtures`].
    pub(super) mixture: [Range<usize>; MIXTURE],
    pub(super) bytes: usize,
}

impl Layout {
    pub(super) fn new(lowering: &Lowering, counts: Counts) -> Layout {
        let program = &lowering.program;
        let size = |v: ValueId| {
            let shape = program.shape(v);
            let elements = counts.rows(shape.rows) * shape.width;
            elements * lowering.types[v.0].bytes()
        };
        let inside = |v: ValueId| if program.results.contains(&v) { 0 } else { size(v) };
        let plan = plan_sizes(program, &inside);
        let first = lowering.gradient_bytes();
        let mut end = align(first + plan.bytes);
        let mut take = |bytes: usize| {
            let start: usize = end;
            end = align(start + bytes);
            start..start + bytes
        };
        let [products, slopes, along] = lowering.scratch(counts).map(&mut take);
        let states = take(states::bytes(program, counts));
        let words = mixtures(program, |shape| counts.rows(shape.rows));
        let mixture = words.map(|words| take(4 * words));
        let mut placed = lowering.gradients();
        placed.extend(program.results.first().map(|losses| (*losses, take(size(*losses)).start)));
        let bytes = end.max(ALIGN);
        Layout { plan, counts, first, placed, products, slopes, along, states, mixture, bytes }
    }

    /// The bytes of a value.
    pub(super) fn value(&self, lowering: &Lowering, v: ValueId) -> Range<usize> {
        let shape = lowering.program.shape(v);
        let elements = self.counts.rows(shape.rows) * shape.width;
        let placed = self.placed.iter().find(|(of, _)| *of == v);
        let start = placed.map_or_else(|| self.first + self.plan.offsets[v.0], |(_, start)| *start);
        start..start + elements * lowering.types[v.0].bytes()
    }
}
