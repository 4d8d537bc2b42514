//! The rules of operations: all that Programs, their transforms and the devices ask of one. Each
//! operation answers in its own file, next to its mathematics and its kernels; nothing else tells
//! operations apart but fusion, which is about several at once, and the devices' launches.

use std::collections::BTreeMap;
use std::fmt::Debug;

use formats::{Error, ErrorKind, Result};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use crate::embed::Index;
use crate::gradient::{Forward, Reverse};
use crate::low_rank::Delta;
use crate::packed::Format;
use crate::project::ProjectionOperands;
use crate::{Rope, Shape};

/// The rules of one operation.
pub trait Operation: Debug {
    /// Its name in the text form and in profiles.
    fn name(&self) -> &'static str;

    /// The shapes of the outputs.
    ///
    /// # Errors
    /// Why these operands do not fit.
    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>>;

    /// Computes the outputs in slow, obvious loops: every fast implementation is compared with
    /// them.
    fn reference(&self, call: &mut ReferenceCall<'_>);

    /// How tensor parallelism cuts it.
    fn sharding(&self) -> Sharding;

    /// The input whose bytes the first output may take over, if nothing else reads it afterwards.
    fn overwrites(&self) -> Option<usize> {
        None
    }

    /// Its access to the key/value cache, if it has any.
    fn cache(&self) -> Option<CacheUse> {
        None
    }

    /// The site of adapters that it is, if it is one.
    fn site(&self) -> Option<usize> {
        None
    }

    /// Gives its cache layer another number.
    fn set_layer(&mut self, _layer: usize) {}

    /// Lets no query see more than this many positions, itself included.
    fn bound(&mut self, _positions: usize) {}

    /// The operation as one of `ranks` computes it, for those whose constants count heads.
    fn divide_heads(&mut self, _ranks: usize) {}

    /// Whether every head reads this input whole, of an operation that is cut by heads.
    fn reads_whole(&self, _input: usize) -> bool {
        false
    }

    /// The rotation that it applies.
    fn rope(&self) -> Option<&Rope> {
        None
    }

    /// The matrices that it multiplies its first input with, if it is a product.
    fn product(&self, _weights: usize) -> Option<Product> {
        None
    }

    /// If it reads one row of its weight per token, and not all of it: which.
    fn gathers(&self) -> Option<Index> {
        None
    }

    /// For an operation with the weights of several experts: how many experts a row goes through,
    /// and how many there are.
    fn experts(&self, _inputs: &[Shape]) -> Option<(usize, usize)> {
        None
    }

    /// The work of queries at these consecutive positions on a cache that begins at `oldest`.
    fn cached_work(&self, _positions: &[u32], _oldest: u32) -> CachedWork {
        CachedWork::default()
    }

    /// Whether kernels have this operand in the one element type that all such operands of the
    /// operation share.
    fn shares_type(&self, _operand: Operand) -> bool {
        true
    }

    /// Gives `to` its launches on a GPU. False, and nothing was given, if they depend on more than
    /// operands: products, whose kernels a device chooses, and what reaches into the cache.
    ///
    /// # Errors
    /// Whatever `to` cannot launch.
    fn launch(&self, _to: &mut dyn Launches) -> Result<bool> {
        Ok(false)
    }

    /// Records what its cotangents make of the cotangents of its operands: the vector-Jacobian
    /// product.
    ///
    /// # Errors
    /// An operation that has no gradient.
    fn vjp(&self, _at: &mut dyn Reverse) -> Result<()> {
        Err(Error::new(self.name(), "an operation that has a gradient", "none")
            .of(ErrorKind::Unsupported))
    }

    /// Records the Jacobian-vector product: the tangents of its outputs, from the tangents of its
    /// operands.
    ///
    /// # Errors
    /// An operation that has no tangent.
    fn jvp(&self, _at: &mut dyn Forward) -> Result<()> {
        Err(Error::new(self.name(), "an operation that has a tangent", "none")
            .of(ErrorKind::Unsupported))
    }

    /// How precise its operands are on a device that keeps some of them in 16 bits.
    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Any
    }
}

/// An activation of a node, by its place among the inputs or outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// An input.
    Input(usize),
    /// An output.
    Output(usize),
}

/// The source of a buffer that a launch binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// An activation.
    Value(Operand),
    /// A weight, by its place among the node's.
    Weight(usize),
    /// The frequencies of the operation's rotation.
    Frequencies,
    /// The step's token ids.
    Tokens,
    /// The position of each token.
    Positions,
    /// Row numbers whose logits are wanted.
    Picks,
    /// In training, what each row is to predict.
    Targets,
    /// In training, how much each row's prediction counts, in f32.
    Counts,
    /// In training, the number of each row in the run, for random numbers.
    Draws,
    /// In training, the first row of each row's sequence.
    Firsts,
    /// In training, the row behind the last of each row's sequence.
    Ends,
}

/// A node in the hands of a device's lowering, which takes the launches that make it up.
pub trait Launches {
    /// Inputs of the node.
    fn inputs(&self) -> usize;

    /// Rows of an activation in this step.
    fn rows(&self, operand: Operand) -> usize;

    /// Elements in a row of an activation.
    fn width(&self, operand: Operand) -> usize;

    /// The element type of an activation.
    fn scalar(&self, operand: Operand) -> Scalar;

    /// The shape of a weight, or none if the node has no such.
    fn weight(&self, index: usize) -> Option<&[usize]>;

    /// How a matrix is packed.
    ///
    /// # Errors
    /// If the weight is no matrix.
    fn format(&self, weight: usize) -> Result<Format>;

    /// Launches a kernel with these numbers and buffers.
    ///
    /// # Errors
    /// A buffer of the kernel that is not bound, or a kernel that cannot be built.
    fn push(
        &mut self,
        kernel: Recipe<'static>,
        numbers: Numbers,
        bound: &[(&str, Bound)],
    ) -> Result<()>;
}

/// The first input.
pub(crate) const X: Operand = Operand::Input(0);
/// The first output.
pub(crate) const Y: Operand = Operand::Output(0);

/// Launches an element-wise kernel over all of the first output `y`; its inputs are `inputs`, in
/// order.
pub(crate) fn launch_flat(
    to: &mut dyn Launches,
    kernel: Recipe<'static>,
    numbers: Numbers,
    inputs: &[&str],
) -> Result<bool> {
    let n = to.rows(Y) * to.width(Y);
    let mut bound: Vec<(&str, Bound)> = inputs
        .iter()
        .enumerate()
        .map(|(i, &name)| (name, Bound::Value(Operand::Input(i))))
        .collect();
    bound.push(("y", Bound::Value(Y)));
    to.push(kernel, numbers.with("n", n as u32), &bound)?;
    Ok(true)
}

/// How precise the activations of an operation are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationPrecision {
    /// The precision of its neighbours.
    Any,
    /// All operands may have the type of queries.
    Queries,
    /// As [`ActivationPrecision::Queries`], and kernels of many rows take them as products leave
    /// them, in f32, and round.
    Rounds,
    /// The first output is f32.
    Full,
    /// All operands are f32.
    Exact,
}

/// An operation's access to the key/value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheUse {
    /// Index of the cache layer.
    pub layer: usize,
    /// How it is accessed.
    pub access: StateAccess,
}

/// How a cache layer is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateAccess {
    /// Appends input number `keys` and the one after it, the values.
    Append {
        /// Index of the input that has the keys.
        keys: usize,
    },
    /// Reads a layer of this geometry.
    Read {
        /// Key/value heads.
        kv_heads: usize,
        /// Elements per head.
        head_dim: usize,
        /// Positions a query sees, itself included; `None`: all.
        window: Option<usize>,
    },
    /// Takes up its part of a state behind the position before it, and leaves it behind its own.
    Carry {
        /// The first element of its part.
        start: usize,
        /// Elements of its part, in f32.
        elements: usize,
    },
}

/// A product of one input with matrices `[out, in]`, possibly with something in front and behind.
#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    /// eps of an RMS norm in front, whose weight comes first.
    pub norm: Option<f32>,
    /// The matrices and their biases.
    pub projections: Vec<ProjectionOperands>,
    /// Whether the results of two matrices become one output, gated.
    pub gated: bool,
    /// Index of the input that is added to the result.
    pub residual: Option<usize>,
}

/// How tensor parallelism cuts an operation: a rank's part of its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// All of each row.
    Whole,
    /// As much as of the inputs, all alike: the operation works by element, by head or by row.
    Alike,
    /// As much as of the input; each weight has one element for each of its columns.
    Columns,
    /// Its share of the heads, as of all inputs; `weights`: each weight has one element per head.
    Heads {
        /// Whether weights are cut, too.
        weights: bool,
    },
    /// Some rows of each matrix for a whole input; for its share of an input the same columns, and
    /// a sum over all ranks.
    Product,
    /// For whole inputs, some of the columns between the matrices of every expert, and a sum over
    /// all ranks.
    Experts,
    /// It is part of a rank already.
    OfRank,
}

/// The work of attention on the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CachedWork {
    /// Cached positions that any query sees, each counted once.
    pub positions: usize,
    /// Operations in f32: a multiplication and an addition are two.
    pub operations: u64,
}

impl CachedWork {
    /// The work of queries at `positions`, each of which sees what is not older than `oldest`, from
    /// `first` of its position on: `each` operations for a query and a position.
    pub(crate) fn of(
        positions: &[u32],
        oldest: u32,
        first: impl Fn(usize) -> usize,
        each: usize,
    ) -> CachedWork {
        let first = |position: usize| first(position).max(oldest as usize).min(position);
        let positions = positions.iter().map(|&position| position as usize);
        let pairs: usize = positions.clone().map(|p| p + 1 - first(p)).sum();
        let begin = positions.clone().next().map_or(0, first);
        let end = positions.clone().next_back().map_or(0, |p| p + 1);
        CachedWork { positions: end - begin, operations: (pairs * each) as u64 }
    }
}

/// Keys and values of every position of a layer: `[positions, kv_heads * head_dim]` each, f32.
#[derive(Debug, Clone, Default)]
pub struct CachedLayer {
    /// Keys.
    pub keys: Vec<f32>,
    /// Values.
    pub values: Vec<f32>,
    /// The inputs that a state's parts follow from, by the part's first element: `[positions,
    /// any]`.
    pub parts: BTreeMap<usize, Vec<f32>>,
}

impl CachedLayer {
    /// Stores rows of keys and values of `width` elements at their positions.
    pub(crate) fn write(&mut self, positions: &[u32], width: usize, keys: &[f32], values: &[f32]) {
        put(&mut self.keys, positions, width, keys);
        put(&mut self.values, positions, width, values);
    }

    /// Stores rows that the part of a state from `start` on follows from at their positions: for
    /// the definition of an operation that carries it, which begins at the first position whatever
    /// was computed before. All that are there come back.
    pub(crate) fn note(
        &mut self,
        start: usize,
        positions: &[u32],
        width: usize,
        rows: &[f32],
    ) -> &[f32] {
        let noted = self.parts.entry(start).or_default();
        put(noted, positions, width, rows);
        noted
    }
}

/// Stores rows of `width` elements at their positions.
fn put(cached: &mut Vec<f32>, positions: &[u32], width: usize, rows: &[f32]) {
    for (t, &position) in positions.iter().enumerate() {
        let end = (position as usize + 1) * width;
        if cached.len() < end {
            cached.resize(end, 0.0);
        }
        cached[end - width..end].copy_from_slice(&rows[t * width..][..width]);
    }
}

/// The operands of one node in one replay, for its reference.
#[derive(Debug)]
pub struct ReferenceCall<'a> {
    /// Elements of each input, row-major.
    pub inputs: Vec<&'a [f32]>,
    /// Elements in a row of each input.
    pub widths: Vec<usize>,
    /// Elements of each weight, row-major.
    pub weights: &'a [Vec<f32>],
    /// Elements of each output: zeros, to be written.
    pub outputs: Vec<Vec<f32>>,
    /// The step's token ids.
    pub tokens: &'a [u32],
    /// The position of each token.
    pub positions: &'a [u32],
    /// Row numbers whose logits are wanted.
    pub picks: &'a [u32],
    /// The change that the adapter of each row of the first output makes at the operation's site.
    pub deltas: Vec<Option<&'a Delta>>,
    /// All layers of the cache.
    pub cache: &'a mut [CachedLayer],
    /// The packing of rows, in training.
    pub packed: Packed<'a>,
}

impl ReferenceCall<'_> {
    /// The first output of an operation that carries the part of a layer's state from `start` on,
    /// of `elements`: `position` moves it, by a row of all inputs one behind the other, and gives a
    /// row. It begins with zeros at the first position, whatever was computed before.
    pub(crate) fn recur(
        &mut self,
        layer: usize,
        (start, elements): (usize, usize),
        mut position: impl FnMut(&mut [f64], &[f32], &[Vec<f32>]) -> Vec<f64>,
    ) {
        let row = |t: usize| {
            let of = |(x, width): (&&[f32], &usize)| x[t * width..][..*width].to_vec();
            self.inputs.iter().zip(&self.widths).flat_map(of).collect::<Vec<f32>>()
        };
        let rows: Vec<f32> = (0..self.positions.len()).flat_map(row).collect();
        let width = self.widths.iter().sum();
        let history = self.cache[layer].note(start, self.positions, width, &rows);
        let Some(&last) = self.positions.last() else { return };
        let mut state = vec![0.0; elements];
        for (at, row) in history.chunks_exact(width).enumerate().take(last as usize + 1) {
            let y = position(&mut state, row, self.weights);
            let Some(t) = self.positions.iter().position(|&p| p as usize == at) else {
                continue;
            };
            let out = &mut self.outputs[0][t * y.len()..][..y.len()];
            out.iter_mut().zip(y).for_each(|(out, y)| *out = y as f32);
        }
    }
}

/// The packing of a training step's rows; empty elsewhere.
#[derive(Debug, Clone, Copy, Default)]
pub struct Packed<'a> {
    /// The first row of each row's sequence.
    pub first: &'a [u32],
    /// The token that each row is to predict.
    pub targets: &'a [u32],
    /// How much each row's prediction counts.
    pub counts: &'a [f32],
    /// The number of each row in the run, for random numbers.
    pub draws: &'a [u32],
}
