//! From a model's recorded Program to one that is trained: attention without a cache, factors
//! beside matrices, and losses in the place of logits.

use formats::{Error, ErrorKind, Result, Source};
use ops::embed::Index;
use ops::gradient::{
    Attend, CrossEntropy, Draws, Dropout, EmbeddingNoise, PackedConv, PackedDelta, PackedScan,
};
use ops::{
    Attention, DeltaNet, Embed, KvWrite, Linear, LinearAdd, Map, Op, Scale, ScaleColumns,
    SelectiveScan, Shape, ShortConv, Splice, Unary,
};
use program::{Node, Program, ValueId, Weight, WeightId};
use std::collections::HashSet;

/// A value of a new shape.
fn value(program: &mut Program, shape: Shape) -> ValueId {
    program.values.push(shape);
    ValueId(program.values.len() - 1)
}

/// The same Program for whole sequences, packed one behind the other, whose rows see each other
/// instead of a cache, and whose states begin with each of them. It must be as it was recorded,
/// before [`program::fuse`].
///
/// # Errors
/// Attention to a cache that nothing wrote.
pub fn pack(program: &Program) -> Result<Program> {
    let mut packed =
        Program { nodes: Vec::new(), layers: Vec::new(), traces: Vec::new(), ..program.clone() };
    packed.results.truncate(1);
    let mut cached: Vec<Option<[ValueId; 2]>> = vec![None; program.layers.len()];
    for node in &program.nodes {
        match &node.op {
            Op::KvWrite(KvWrite { layer }) => {
                cached[*layer] = Some(KvWrite::keys_values(&node.inputs));
            }
            // All positions are chosen: texts that are longer than that are refused
            // (`Packing::fits`).
            Op::Indexer(_) => {}
            Op::Attention(attention) => {
                let Some([k, v]) = cached[attention.layer] else {
                    return Err(Error::new("attention", "keys and values", "none"));
                };
                let rows = program.shape(node.inputs[0]).rows;
                let lse = value(&mut packed, Shape { rows, width: attention.heads });
                packed.nodes.push(Node {
                    op: Op::from(Attend(Attention { layer: 0, ..attention.clone() })),
                    inputs: vec![node.inputs[0], k, v],
                    weights: node.weights.clone(),
                    outputs: vec![node.outputs[0], lse],
                });
            }
            // States begin with each sequence.
            Op::ShortConv(conv) => {
                let op = Op::from(PackedConv(ShortConv { layer: 0, start: 0, ..*conv }));
                packed.nodes.push(Node { op, ..node.clone() });
            }
            Op::DeltaNet(net) => {
                let op = Op::from(PackedDelta(DeltaNet { layer: 0, start: 0, ..*net }));
                packed.nodes.push(Node { op, ..node.clone() });
            }
            Op::SelectiveScan(scan) => {
                let op = Op::from(PackedScan(SelectiveScan { layer: 0, start: 0, ..*scan }));
                packed.nodes.push(Node { op, ..node.clone() });
            }
            _ => packed.nodes.push(node.clone()),
        }
    }
    // What indexers alone read.
    let mut read: HashSet<ValueId> = packed.results.iter().copied().collect();
    let nodes = std::mem::take(&mut packed.nodes).into_iter().rev();
    let mut kept: Vec<Node> = nodes
        .filter(|node| {
            let wanted = node.outputs.iter().any(|value| read.contains(value));
            read.extend(node.inputs.iter().filter(|_| wanted));
            wanted
        })
        .collect();
    kept.reverse();
    packed.nodes = kept;
    packed.verify()?;
    Ok(packed)
}

/// The same Program with the product of each of the `pieces` of a matrix, joined by columns, in the
/// place of its product, so that each can have factors of its own. A piece has a name, a recipe and
/// a number of rows; a matrix that has none, and one with a bias, stays whole.
///
/// # Errors
/// Pieces that do not fit, which is a fault of the caller.
pub fn apart(
    program: &Program,
    pieces: &dyn Fn(WeightId) -> Result<Vec<(String, Source, usize)>>,
) -> Result<Program> {
    let mut of = Program { nodes: Vec::new(), ..program.clone() };
    for node in &program.nodes {
        let found = match (&node.op, &node.weights[..]) {
            (Op::Linear(_), [matrix]) => pieces(*matrix)?,
            _ => Vec::new(),
        };
        let mut joined: Option<ValueId> = None;
        for (name, source, rows) in found {
            let shape = vec![rows, program.shape(node.inputs[0]).width];
            of.weights.push(Weight { name, shape, source });
            let weight = WeightId(of.weights.len() - 1);
            let y = super::push(&mut of, Op::from(Linear), node.inputs.clone(), vec![weight])?[0];
            joined = Some(match joined {
                None => y,
                Some(before) => {
                    let count = of.shape(before).width;
                    let (heads, width) = (1, count + rows);
                    let op = Splice { heads, start: 0, count, shared: false, width };
                    super::push(&mut of, Op::from(op), vec![before, y], Vec::new())?[0]
                }
            });
        }
        match (joined, of.nodes.last_mut()) {
            // What the others read is the last one's.
            (Some(_), Some(last)) => last.outputs.clone_from(&node.outputs),
            _ => of.nodes.push(node.clone()),
        }
    }
    of.verify()?;
    Ok(of)
}

/// A matrix that is to have factors, as checkpoints store it: a module of its own, or some rows of
/// one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its name. Matrices of the same name share one `down`.
    pub name: String,
    /// Which of the module's rows each of the matrix's is.
    pub rows: Vec<usize>,
}

/// The factors beside one module of [`adapt`]'s Program.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleFactors {
    /// The module's name.
    pub module: String,
    /// Its columns.
    pub input: usize,
    /// `[rank, in]`.
    pub down: WeightId,
    /// The module's matrices, in order of their first rows.
    pub parts: Vec<GradientPart>,
}

/// The factors beside one matrix of a module.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientPart {
    /// The matrix, `[rows, in]`.
    pub matrix: WeightId,
    /// Where its rows begin if the parts are put one below the other.
    pub first_row: usize,
    /// Which of the module's rows each of its own is.
    pub rows: Vec<usize>,
    /// `[rows, rank]`.
    pub up: WeightId,
    /// The factor on each row of the changed matrix, `[rows]`: with DoRA the row's magnitude
    /// divided by its length.
    pub gain: Option<WeightId>,
}

impl ModuleFactors {
    /// Rows of all matrices of the module.
    pub fn output(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }
}

/// How [`adapt`] changes a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaptedProduct {
    /// Columns and rows of the factors.
    pub rank: usize,
    /// The factor on the factors' product.
    pub scale: f32,
    /// Whether rows have gains (DoRA, Liu et al. 2024).
    pub gains: bool,
    /// Dropout of what `down` reads: the probability and the seed, if there is any. Each module has
    /// a mask of its own.
    pub dropout: Option<(f32, u64)>,
}

/// The same Program with `y + scale up (down x)` in the place of the product `y` of `x` and each
/// matrix that `module` gives a module for; the factors are weights of their own, whose recipes are
/// zeros. With gains, both are multiplied with them, but not the bias.
///
/// # Errors
/// Weights that do not fit, which is a fault of the Program.
pub fn adapt(
    program: &Program,
    module: &dyn Fn(WeightId) -> Option<Module>,
    how: AdaptedProduct,
) -> Result<(Program, Vec<ModuleFactors>)> {
    let empty = Program { nodes: Vec::new(), ..program.clone() };
    let mut adapting = Adapting { program: empty, how, all: Vec::new(), low: Vec::new() };
    for node in &program.nodes {
        let matrix = node.weights.first().filter(|_| node.op == Op::from(Linear));
        match matrix.and_then(|matrix| module(*matrix)) {
            Some(module) => adapting.product(node, module)?,
            None => adapting.program.nodes.push(node.clone()),
        }
    }
    let Adapting { program, mut all, .. } = adapting;
    for factors in &mut all {
        factors.parts.sort_by_key(|part| part.rows.first().copied());
        let mut first_row = 0;
        for part in &mut factors.parts {
            part.first_row = first_row;
            first_row += part.rows.len();
        }
    }
    program.verify()?;
    Ok((program, all))
}

struct Adapting {
    program: Program,
    how: AdaptedProduct,
    all: Vec<ModuleFactors>,
    /// `scale down x`, by `down` and `x`: matrices of one module share it.
    low: Vec<((WeightId, ValueId), ValueId)>,
}

impl Adapting {
    fn weight(&mut self, name: String, shape: &[usize]) -> WeightId {
        let source = Source::Zeros(shape.to_vec());
        self.program.weights.push(Weight { name, shape: shape.to_vec(), source });
        WeightId(self.program.weights.len() - 1)
    }

    /// The factors of a module, which may be new.
    fn factors(&mut self, module: &str, input: usize) -> usize {
        if let Some(at) = self.all.iter().position(|factors| factors.module == module) {
            return at;
        }
        let down = self.weight(format!("{module}.lora_A"), &[self.how.rank, input]);
        self.all.push(ModuleFactors { module: module.to_owned(), input, down, parts: Vec::new() });
        self.all.len() - 1
    }

    /// `scale down x` of the module of this number.
    fn low(&mut self, module: usize, x: ValueId) -> Result<ValueId> {
        let (down, stream) = (self.all[module].down, module as u32);
        if let Some((_, low)) = self.low.iter().find(|(of, _)| *of == (down, x)) {
            return Ok(*low);
        }
        let dropped =
            self.how.dropout.map(|(p, seed)| Dropout { p, draws: Draws { seed, stream } });
        let mut push = |op, input, weights| {
            let outputs = super::push(&mut self.program, op, vec![input], weights)?;
            Ok::<ValueId, Error>(outputs[0])
        };
        let read = match dropped {
            Some(dropout) => push(Op::from(dropout), x, Vec::new())?,
            None => x,
        };
        let low = push(Op::from(Linear), read, vec![down])?;
        let low = push(Op::from(Scale { by: self.how.scale }), low, Vec::new())?;
        self.low.push(((down, x), low));
        Ok(low)
    }

    fn product(&mut self, node: &Node, module: Module) -> Result<()> {
        let (x, y, matrix) = (node.inputs[0], node.outputs[0], node.weights[0]);
        let (input, rows) = (self.program.shape(x).width, self.program.shape(y).width);
        let at = self.factors(&module.name, input);
        let name = format!("{}.lora_B", self.program.weights[matrix.0].name);
        let up = self.weight(name, &[rows, self.how.rank]);
        let low = self.low(at, x)?;
        let gain = self.how.gains.then(|| {
            let name = format!("{}.gain", self.program.weights[matrix.0].name);
            self.weight(name, &[rows])
        });
        self.all[at].parts.push(GradientPart { matrix, first_row: 0, rows: module.rows, up, gain });
        let (own, bias) =
            node.weights.split_at(if gain.is_some() { 1 } else { node.weights.len() });
        let mut push = |op, inputs, weights| super::push(&mut self.program, op, inputs, weights);
        let base = push(node.op.clone(), vec![x], own.to_vec())?[0];
        let (op, inputs, weights) = match gain {
            None => (Op::from(LinearAdd), vec![low, base], vec![up]),
            Some(gain) => {
                let sum = push(Op::from(LinearAdd), vec![low, base], vec![up])?;
                (Op::from(ScaleColumns), sum, [&[gain], bias].concat())
            }
        };
        self.program.nodes.push(Node { op, inputs, weights, outputs: vec![y] });
        Ok(())
    }
}

/// The same Program with noise on its embeddings, as blocks read them: behind the factor that all
/// of them have, if there is one.
///
/// # Errors
/// A Program that picks no rows of a table by tokens.
pub fn noisy(program: &Program, alpha: f32, seed: u64) -> Result<Program> {
    let mut of = Program { nodes: Vec::new(), ..program.clone() };
    let picks = |node: &Node| matches!(node.op, Op::Embed(Embed { index: Index::Token }));
    let nodes = &program.nodes;
    let missing = || Error::new("noise", "a table of embeddings", "none");
    let table = nodes.iter().position(picks).ok_or_else(missing)?;
    let embedded = nodes[table].outputs[0];
    let readers: Vec<usize> =
        (0..nodes.len()).filter(|i| nodes[*i].inputs.contains(&embedded)).collect();
    let last = match readers[..] {
        [only] if matches!(nodes[only].op, Op::Scale(_)) => only,
        _ => table,
    };
    for (i, node) in nodes.iter().enumerate() {
        let mut node = node.clone();
        let (output, shape) = (node.outputs[0], program.shape(node.outputs[0]));
        if i == last {
            node.outputs[0] = value(&mut of, shape);
        }
        let before = node.outputs[0];
        of.nodes.push(node);
        if i == last {
            let op = EmbeddingNoise { alpha, draws: Draws { seed, stream: u32::MAX } };
            let (op, inputs, weights) = (Op::from(op), vec![before], Vec::new());
            of.nodes.push(Node { op, inputs, weights, outputs: vec![output] });
        }
    }
    of.verify()?;
    Ok(of)
}

/// The same Program with the losses of its logits in their place, `[outputs, 1]`: the product of
/// the head and what follows it become one operation.
///
/// # Errors
/// A Program that does not end in a linear head, or in one with something else behind it than
/// scaling and a bound.
pub fn losses(program: &Program) -> Result<Program> {
    let unknown = |found: &str| {
        let expected = "logits of a linear head, scaled or bounded by tanh";
        Error::new("losses", expected, found).of(ErrorKind::Unsupported)
    };
    let writers = program.writers();
    let mut behind: Vec<&Op> = Vec::new();
    let mut logits = *program.results.first().ok_or_else(|| unknown("no result"))?;
    let head = loop {
        let node =
            writers[logits.0].map(|i| &program.nodes[i]).ok_or_else(|| unknown("an input"))?;
        match &node.op {
            Op::Linear(_) => break node.clone(),
            op @ (Op::Scale(_) | Op::Map(_)) => behind.insert(0, op),
            other => return Err(unknown(other.name())),
        }
        logits = node.inputs[0];
    };
    let scales = |ops: &[&Op]| {
        ops.iter().try_fold(1.0, |all, op| match op {
            Op::Scale(Scale { by }) => Ok(all * by),
            other => Err(unknown(other.name())),
        })
    };
    let bound = behind.iter().position(|op| matches!(op, Op::Map(Map(Unary::Tanh))));
    let (scale, cap) = match bound {
        None => (scales(&behind)?, None),
        Some(bound) => {
            let cap = scales(&behind[bound + 1..])?;
            (scales(&behind[..bound])? * cap, Some(cap))
        }
    };
    let mut of = program.clone();
    let losses = value(&mut of, Shape { width: 1, ..program.shape(head.inputs[0]) });
    let op = Op::from(CrossEntropy::new(scale, cap));
    of.nodes.push(Node { op, outputs: vec![losses], ..head });
    of.results = vec![losses];
    of.traces.clear();
    super::differentiate::sweep(&mut of);
    program::fuse_gates(&mut of);
    of.verify()?;
    Ok(of)
}
