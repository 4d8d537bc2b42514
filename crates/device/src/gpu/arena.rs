//! The arena of a step's activations: offsets and element types.

use std::ops::Range;

use ops::Shape;
use ops::experts::Sizes;
use ops::operation::{ActivationPrecision, Operand};
use ops::packed::Format;
use program::{ArenaPlan, BLOCK_TOKENS, Node, Program, StepKind, ValueId, plan_memory};
use tile::types::Scalar;

use super::LIBRARY_ROWS;
use super::lower::{LOW, Lowering};

/// Rows up to which products use matrix-vector kernels.
pub(super) const FEW: usize = 8;

/// Rows up to which the fastest way is looked for to do a vendor's product of a step of a prompt.
/// The way that the library proposes reads a matrix with a few of the multiprocessors where rows are
/// few and sums may not be cut.
pub(super) const SHORT_PROMPT: usize = 192;

/// Rows that kernels for few rows are compiled for: the next power of two. Larger numbers are
/// unchanged.
pub(super) fn bucket(rows: usize) -> usize {
    if rows > FEW || rows == 0 { rows } else { rows.next_power_of_two() }
}

/// Rows of a class of decode steps, of which missing ones are idle: a power of two, or 1.5 times
/// one. There are never more idle rows than positions in a cache block.
pub(super) fn decode_bucket(rows: usize) -> usize {
    if rows > 4 * BLOCK_TOKENS {
        return rows.next_multiple_of(BLOCK_TOKENS);
    }
    let power = rows.next_power_of_two();
    if rows > FEW && rows <= power / 4 * 3 { power / 4 * 3 } else { power }
}

/// Rows of the vendor's products in a step of a prompt: for short prompts one of a few numbers, since
/// the fastest way to do a product is looked for at each. Missing rows are computed and not read.
pub(super) fn prompt_bucket(rows: usize) -> usize {
    match rows {
        0..=128 => rows.next_power_of_two().max(LIBRARY_ROWS),
        129..=SHORT_PROMPT => SHORT_PROMPT,
        _ => rows,
    }
}

/// The types of all values: `half` for those that only attention uses, f32 for the others.
pub(super) fn types(program: &Program, half: Scalar) -> Vec<Scalar> {
    let count = program.values.len();
    // Sets of values that some kernel requires to have one type: `set[v]` is the representative of
    // `v`.
    let mut set: Vec<usize> = (0..count).collect();
    let mut of_attention = vec![false; count];
    let mut of_residual = vec![false; count];
    for node in &program.nodes {
        let inputs = node.inputs.iter().enumerate().map(|(i, v)| (Operand::Input(i), v.0));
        let outputs = node.outputs.iter().enumerate().map(|(i, v)| (Operand::Output(i), v.0));
        let all: Vec<(Operand, usize)> = inputs.chain(outputs).collect();
        let same: Vec<usize> = all
            .iter()
            .filter(|(operand, _)| node.op.shares_type(*operand))
            .map(|(_, v)| *v)
            .collect();
        for pair in same.windows(2) {
            let (from, to) = (set[pair[0]], set[pair[1]]);
            set.iter_mut().filter(|s| **s == from).for_each(|s| *s = to);
        }
        match node.op.precision() {
            ActivationPrecision::Any => {}
            ActivationPrecision::Queries | ActivationPrecision::Rounds => {
                all.iter().for_each(|(_, v)| of_attention[*v] = true);
            }
            ActivationPrecision::Full => of_residual[node.outputs[0].0] = true,
            ActivationPrecision::Exact => all.iter().for_each(|(_, v)| of_residual[*v] = true),
        }
    }
    program.results.iter().chain(&program.input).for_each(|v| of_residual[v.0] = true);
    let any = |marks: &[bool], of: usize| (0..count).any(|v| marks[v] && set[v] == of);
    let is_half = |v: usize| any(&of_attention, set[v]) && !any(&of_residual, set[v]);
    (0..count).map(|v| if is_half(v) { half } else { Scalar::F32 }).collect()
}

/// Whether a node is a product whose output is gated.
fn gated(node: &Node) -> bool {
    node.op.product(node.weights.len()).is_some_and(|product| product.gated)
}

/// The nodes that read each value.
fn readers(program: &Program) -> Vec<Vec<&Node>> {
    let mut readers = vec![vec![]; program.values.len()];
    for node in &program.nodes {
        node.inputs.iter().for_each(|v| readers[v.0].push(node));
    }
    readers
}

/// As [`types`], for steps of few rows. Every threadgroup of the next product reads a whole gate
/// row, which is long; so gates have 16 bits unless that product's matrix is f32.
pub(super) fn narrow_types(
    program: &Program,
    half: Scalar,
    wide: Scalar,
    formats: &[Option<Format>],
) -> Vec<Scalar> {
    let mut types = types(program, half);
    let readers = readers(program);
    for node in &program.nodes {
        if !gated(node) {
            continue;
        }
        let v = node.outputs[0];
        let narrow = |n: &&Node| {
            let matrix = n.weights.first().and_then(|w| formats[w.0]);
            let full = matrix == Some(Format::Dense(Scalar::F32));
            let product = n.op.product(n.weights.len());
            product.is_some_and(|p| p.norm.is_none() && p.projections.len() == 1)
                && n.inputs[0] == v
                && !full
        };
        if readers[v.0].iter().all(narrow) {
            types[v.0] = wide;
        }
    }
    types
}

/// As [`types`], for steps of many rows: gates have the operand type of products, and values to be
/// rotated leave their products as f32.
pub(super) fn wide_types(program: &Program, half: Scalar, wide: Scalar) -> Vec<Scalar> {
    let mut types = types(program, half);
    let readers = readers(program);
    for node in &program.nodes {
        let Some(product) = node.op.product(node.weights.len()) else { continue };
        let rounds = |n: &&Node| n.op.precision() == ActivationPrecision::Rounds;
        if product.gated {
            types[node.outputs[0].0] = wide;
        } else if node.outputs.iter().all(|v| readers[v.0].iter().all(rounds)) {
            node.outputs.iter().for_each(|v| types[v.0] = Scalar::F32);
        }
    }
    types
}

/// Rows that values are allocated for.
#[derive(Debug, Clone, Copy)]
struct RowsOf {
    tokens: usize,
    outputs: usize,
}

impl RowsOf {
    fn of(self, shape: Shape) -> usize {
        shape.rows.count(self.tokens, self.outputs)
    }
}

/// Number of scratch arrays of a mixture of experts.
pub(super) const MIXTURE: usize = 9;

/// Words of each scratch array of a mixture for `rows` rows; see
/// [`Array`](super::lower::experts::Array).
fn mixture(sizes: Sizes, rows: usize) -> [usize; MIXTURE] {
    let Sizes { experts, used, width, ff } = sizes;
    let pairs = rows * used;
    // No block has fewer pairs than one.
    let blocks = 2 * (pairs + experts);
    [pairs, pairs, experts + 1, pairs, blocks, pairs * ff, pairs * ff, pairs * ff, pairs * width]
}

/// The most words of each scratch array that a Program's mixtures need, which have as many rows as
/// `rows` says.
pub(super) fn mixtures(program: &Program, rows: impl Fn(Shape) -> usize) -> [usize; MIXTURE] {
    let mut most = [0; MIXTURE];
    for node in &program.nodes {
        let Some(sizes) = program.mixture(node) else { continue };
        let needs = mixture(sizes, rows(program.shape(node.inputs[0])));
        (0..MIXTURE).for_each(|i| most[i] = most[i].max(needs[i]));
    }
    most
}

/// The arena of one shape class; offsets in bytes.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    plan: ArenaPlan,
    rows: RowsOf,
    /// Scratch of products with many rows: normalised rows, and two outputs (the operands of a
    /// gate, or a sum before the residual is added).
    pub(super) scratch: [Range<usize>; 3],
    /// A number for each row: see [`ops::linear::stream::lay_rows`].
    pub(super) factors: Range<usize>,
    /// Parts of sums: see [`ops::linear::stream::add_splits`].
    pub(super) splits: Range<usize>,
    /// Scratch of mixtures of experts; see [`mixture`].
    pub(super) mixture: [Range<usize>; MIXTURE],
    /// Scratch of adapters, sized by [`Lowering::adapters`].
    pub(super) low: [Range<usize>; LOW],
    /// Values moved elsewhere because the plan would place them over an operand of another type.
    moved: Vec<(ValueId, usize)>,
    /// Size of the arena.
    pub(super) bytes: usize,
}

impl Layout {
    /// Lays out `tokens` rows of a step of this kind, `outputs` of them with logits.
    pub(super) fn new(
        lowering: &Lowering,
        kind: StepKind,
        tokens: usize,
        outputs: usize,
    ) -> Layout {
        let (program, types) = (&lowering.program, lowering.types(kind, tokens));
        let [tokens, outputs] = [tokens, outputs].map(|rows| lowering.room(kind, rows));
        let rows = RowsOf { tokens, outputs };
        let plan = plan_memory(program, rows.tokens, rows.outputs);
        let (mut input, mut output, mut splits) = (0, 0, 0);
        for node in &program.nodes {
            if let Some(product) = node.op.product(node.weights.len()) {
                let size = |v: &ValueId| rows.of(program.shape(*v)) * program.shape(*v).width;
                let own = rows.of(program.shape(node.outputs[0]));
                let many = !lowering.narrow(kind, own);
                if many && kind == StepKind::Decode && lowering.batched {
                    splits = splits.max(lowering.split_floats(node, own));
                }
                if many || product.gated || lowering.facts.small_groups() {
                    input = input.max(size(&node.inputs[0]));
                    output = output.max(size(&node.outputs[0]));
                    if lowering.library {
                        // Results of matrices that are multiplied as one.
                        output = output.max(node.outputs.iter().map(size).sum());
                    }
                }
            }
        }
        let mut end = plan.bytes;
        let scratch = [input, output, output].map(|elements| {
            let start = end.next_multiple_of(256);
            end = start + 4 * elements;
            start..end
        });
        let factors = end.next_multiple_of(256);
        end = factors + 4 * rows.tokens.max(rows.outputs);
        let factors = factors..end;
        let start = end.next_multiple_of(256);
        end = start + 4 * splits;
        let splits = start..end;
        let mixture = mixtures(program, |shape| rows.of(shape)).map(|words| {
            let start = end.next_multiple_of(256);
            end = start + 4 * words;
            start..end
        });
        let low = lowering.adapters.needs(rows.tokens.max(rows.outputs)).map(|bytes| {
            let start = end.next_multiple_of(256);
            end = start + bytes;
            start..end
        });
        // A value must not overwrite an operand whose elements have another size: a kernel would
        // overwrite elements that other threads still read. Such values share one area: the next is
        // written after attention has read the one before.
        let mut moved = Vec::new();
        let mut most = 0;
        for (node, over) in program.nodes.iter().zip(&plan.in_place) {
            let Some(input) = over.map(|i| node.inputs[i]) else { continue };
            let output = node.outputs[0];
            if types[input.0] != types[output.0] {
                moved.push((output, end.next_multiple_of(256)));
                most =
                    most.max(rows.tokens * program.shape(output).width * types[output.0].bytes());
            }
        }
        if !moved.is_empty() {
            end = end.next_multiple_of(256) + most;
        }
        Layout { plan, rows, scratch, factors, splits, mixture, low, moved, bytes: end.max(256) }
    }

    /// The bytes of a value.
    pub(super) fn value(&self, program: &Program, types: &[Scalar], v: ValueId) -> Range<usize> {
        let shape = program.shape(v);
        let moved = self.moved.iter().find(|(value, _)| *value == v);
        let start = moved.map_or(self.plan.offsets[v.0], |(_, at)| *at);
        start..start + self.rows.of(shape) * shape.width * types[v.0].bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 5, 8, 9, 100].map(bucket), [0, 1, 2, 4, 8, 8, 9, 100]);
    }

    #[test]
    fn rows_that_decode_are_of_few_numbers() {
        let rows = [1, 2, 3, 7, 9, 13, 17, 24, 25, 33, 64, 65, 100, 129, 250];
        let buckets = [1, 2, 4, 8, 12, 16, 24, 24, 32, 48, 64, 96, 128, 192, 256];
        assert_eq!(rows.map(decode_bucket), buckets);
        assert!((1..5000).all(|rows| decode_bucket(rows) - rows < BLOCK_TOKENS));
        assert_eq!([1, 33, 128, 129, 192, 193].map(prompt_bucket), [32, 64, 128, 192, 192, 193]);
    }
}
