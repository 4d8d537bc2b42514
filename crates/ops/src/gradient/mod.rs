//! Reverse-mode differentiation (Linnainmaa 1970): what a rule is given, and the operations that
//! only gradients are made of.
//!
//! Each operation's rule, [`Operation::vjp`], stands in its own file. It asks a [`Reverse`] for the
//! cotangents of its outputs (the derivatives of a loss with respect to them) and records
//! operations that make the cotangents of its inputs and weights. A value with the shape of a
//! weight has [`Rows::Fixed`](crate::Rows::Fixed); a vector is one row.

pub mod adamw;
pub mod attend;
pub mod columns;
pub mod conv;
pub mod cross_entropy;
pub mod delta;
pub mod elements;
pub mod experts;
pub mod gains;
pub mod limits;
pub mod matmul;
pub mod norms;
pub mod products;
pub mod rows;
pub mod xielu;

mod tangents;

pub use attend::{Attend, AttendBackward, seen};
pub use columns::ScaleColumns;
pub use conv::{ConvBackward, PackedConv};
pub use cross_entropy::CrossEntropy;
pub use delta::{DeltaBackward, DeltaTangent, PackedDelta};
pub use elements::{Filled, GatedBackward, MapBackward};
pub use experts::{AdaptedExperts, AdaptedExpertsBackward, ExpertFactors};
pub use experts::{ExpertsBackward, ExpertsTangent, Shares};
pub use limits::LimitSlopes;
pub use norms::{LayerNormBackward, RmsNormBackward};
pub use products::{LinearBackward, LinearBackwardAdd, Outer, SumColumns, SumRows};
pub use rows::{Gathered, Spread};
pub use tangents::{AttendTangent, NormTangent};
pub use xielu::XieluBackward;

pub use crate::gated::Gated;

pub(crate) use products::{linear_jvp, linear_vjp};

use crate::operation::{Launches, Operation, ReferenceCall, Sharding};
use crate::{Binary, Op, Shape, Zip};
use formats::Result;

/// A value in the hands of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleValue(pub usize);

/// An operand that has a cotangent, by its place among the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrt {
    /// An input.
    Input(usize),
    /// A weight.
    Weight(usize),
}

/// Where rules record operations.
pub trait Recorder {
    /// Records an operation on values and on weights of the node, by their places, and gives its
    /// outputs.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn record(&mut self, op: Op, inputs: &[RuleValue], weights: &[usize])
    -> Result<Vec<RuleValue>>;
}

/// A node whose tangents are asked for: how its outputs change along a direction of its operands.
pub trait Forward: Recorder {
    /// An input of the node.
    fn input(&self, index: usize) -> RuleValue;

    /// An output of the node.
    fn output(&self, index: usize) -> RuleValue;

    /// Shape of a value.
    fn shape(&self, value: RuleValue) -> Shape;

    /// The tangent of an input; none if it does not change.
    fn tangent(&self, input: usize) -> Option<RuleValue>;

    /// The place of a weight's tangent, for [`Recorder::record`]; none if it does not change or
    /// there is no such weight.
    fn weight_tangent(&self, weight: usize) -> Option<usize>;

    /// Whether the node has such an input.
    fn has_input(&self, index: usize) -> bool;

    /// Whether the node has such a weight.
    fn has_weight(&self, index: usize) -> bool;

    /// Adds to the tangent of an output.
    ///
    /// # Errors
    /// A tangent of another shape than the output's.
    fn add(&mut self, output: usize, tangent: RuleValue) -> Result<()>;
}

/// A node in reverse: what its rule asks, and where it records.
pub trait Reverse: Recorder {
    /// An input of the node.
    fn input(&self, index: usize) -> RuleValue;

    /// An output of the node.
    fn output(&self, index: usize) -> RuleValue;

    /// Shape of a value.
    fn shape(&self, value: RuleValue) -> Shape;

    /// Shape of a weight of the node; none if it has no such.
    fn weight(&self, index: usize) -> Option<&[usize]>;

    /// The cotangent of an output; none if no loss depends on it.
    fn cotangent(&self, output: usize) -> Option<RuleValue>;

    /// Whether every element of a value is 1, as in the cotangent of the loss itself.
    fn is_ones(&self, value: RuleValue) -> bool;

    /// Whether the cotangent of an operand is needed.
    fn wants(&self, of: Wrt) -> bool;

    /// Adds to the cotangent of an operand.
    ///
    /// # Errors
    /// A cotangent of another shape than the operand's.
    fn give(&mut self, of: Wrt, cotangent: RuleValue) -> Result<()>;

    /// Says that a recorded value equals an output, which is read in its place.
    fn replace(&mut self, output: usize, by: RuleValue);
}

/// Records an operation of one output.
pub(crate) fn one(
    at: &mut dyn Recorder,
    op: impl Into<Op>,
    inputs: &[RuleValue],
    weights: &[usize],
) -> Result<RuleValue> {
    Ok(at.record(op.into(), inputs, weights)?.swap_remove(0))
}

/// Records `a * b`.
pub(crate) fn mul(at: &mut dyn Recorder, a: RuleValue, b: RuleValue) -> Result<RuleValue> {
    one(at, Zip(Binary::Mul), &[a, b], &[])
}

/// Adds `op` of the first input's tangent to the first output's: the rule of what is linear.
pub(crate) fn linear_in_x(at: &mut dyn Forward, op: impl Into<Op>) -> Result<()> {
    let Some(dx) = at.tangent(0) else { return Ok(()) };
    let dy = one(at, op, &[dx], &[])?;
    at.add(0, dy)
}

/// Zeros like a value.
pub(crate) fn zeros(at: &mut dyn Forward, like: RuleValue) -> Result<RuleValue> {
    let shape = at.shape(like);
    one(at, Filled { shape, value: 0.0 }, &[], &[])
}

/// Gives an input a cotangent that `make` records, if it is needed.
pub(crate) fn give(
    at: &mut dyn Reverse,
    of: Wrt,
    make: impl FnOnce(&mut dyn Reverse) -> Result<RuleValue>,
) -> Result<()> {
    if !at.wants(of) {
        return Ok(());
    }
    let cotangent = make(at)?;
    at.give(of, cotangent)
}

/// Whether Programs in training may have an operation. Forward mode is for the references alone.
pub fn trains(op: &Op) -> bool {
    match op {
        Op::Embed(_) | Op::RmsNorm(_) | Op::LayerNorm(_) | Op::Linear(_) | Op::LinearAdd(_) => true,
        Op::Map(_) | Op::Scale(_) | Op::ScaleRows(_) | Op::Rope(_) | Op::Select(_) => true,
        Op::Splice(_) | Op::GroupLimit(_) | Op::Stretch(_) | Op::Xielu(_) => true,
        Op::Zip(Zip(Binary::Add | Binary::Sub | Binary::Mul)) => true,
        Op::Experts(_) => true,
        Op::Gradient(op) => !matches!(
            op,
            Gradient::NormTangent(_)
                | Gradient::AttendTangent(_)
                | Gradient::DeltaTangent(_)
                | Gradient::ExpertsTangent(_)
                | Gradient::LimitSlopes(LimitSlopes { tangent: true, .. })
        ),
        _ => false,
    }
}

/// Makes [`Gradient`] of a table, as [`Op`] is made.
macro_rules! gradients {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The operations that only Programs in training have. Operands are listed as
        /// `inputs; weights -> outputs`.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Gradient {
            $($(#[$doc])* $name($name),)*
        }

        impl Gradient {
            fn inner(&self) -> &dyn Operation {
                match self {
                    $(Gradient::$name(op) => op,)*
                }
            }
        }

        $(impl From<$name> for Op {
            fn from(op: $name) -> Op {
                Op::Gradient(Gradient::$name(op))
            }
        })*
    };
}

gradients! {
    /// `q, k, v; (sinks) -> y, lse`: causal attention among the rows of each packed sequence.
    Attend,
    /// `q, k, v, y, lse, dy; (sinks) -> dq, dk, dv, (dsinks)`.
    AttendBackward,
    /// `x; taps -> y`: a short convolution of the rows of each packed sequence.
    PackedConv,
    /// `x, dy; taps -> dx, (dtaps)`.
    ConvBackward,
    /// `qkv, a, b; decay, dt -> y`: a gated delta net over the rows of each packed sequence.
    PackedDelta,
    /// `qkv, a, b, dy; decay, dt -> dqkv, da, db, ddecay, ddt`.
    DeltaBackward,
    /// `x; head, (bias) -> losses, (dx), (dhead), (dbias)`: the cross-entropy of a linear head, in
    /// chunks of rows.
    CrossEntropy,
    /// `x; s[width], (b[width]) -> y`: each column times a number of its own, plus another.
    ScaleColumns,
    /// `-> a value, all of whose elements are one number`.
    Filled,
    /// `x, dy -> dx` of a function of one element.
    MapBackward,
    /// `x, dy -> dx` of [`Xielu`](crate::Xielu).
    XieluBackward,
    /// `gate, up -> f(gate) up`.
    Gated,
    /// `gate, up, dy -> dgate` of [`Gated`].
    GatedBackward,
    /// `x, dy; weight -> dx, (dweight)`.
    RmsNormBackward,
    /// `x, dy; weight -> dx, (dweight), (dbias)`.
    LayerNormBackward,
    /// `dy; weight[out, in] -> dx`: the product with the other side.
    LinearBackward,
    /// `dy, added; weight[out, in] -> dx`: the same, added to another value.
    LinearBackwardAdd,
    /// `dy, x -> dweight[out, in]`: a sum over rows of outer products.
    Outer,
    /// `x -> [1, width]`: a sum over rows.
    SumRows,
    /// `x -> [rows, 1]`: a sum over columns.
    SumColumns,
    /// `x, scores, dy; gate, up, down, (their biases), (factors) -> dx, dscores, (a gradient of each
    /// weight)`.
    ExpertsBackward,
    /// `x, scores, (residual); (the mixture's weights), (factors) -> y`: experts with low-rank
    /// factors.
    AdaptedExperts,
    /// `x, scores, dy; (the mixture's weights), (factors) -> dx, dscores, (a gradient of each
    /// factor)`.
    AdaptedExpertsBackward,
    /// `scores, y, d -> d`: changes of what a [`GroupLimit`](crate::GroupLimit) leaves, or its
    /// cotangents.
    LimitSlopes,
    /// `dy -> dtable`: rows added up where tokens picked them.
    Gathered,
    /// `dy[outputs] -> dx[tokens]`: rows that were not selected are zeros.
    Spread,
    /// `x, dx; weight -> dy`.
    NormTangent,
    /// `q, k, v, lse, dq, dk, dv; (sinks, dsinks) -> dy`.
    AttendTangent,
    /// `qkv, a, b, dqkv, da, db; decay, dt, (ddecay, ddt) -> dy`.
    DeltaTangent,
    /// `x, scores, dx, dscores; gate, up, down, (their biases), (factors), (tangents of weights) ->
    /// dy`.
    ExpertsTangent,
}

impl Operation for Gradient {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        self.inner().infer(inputs, weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        self.inner().reference(call);
    }

    fn sharding(&self) -> Sharding {
        self.inner().sharding()
    }

    fn overwrites(&self) -> Option<usize> {
        self.inner().overwrites()
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        self.inner().launch(to)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        self.inner().vjp(at)
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        self.inner().jvp(at)
    }
}
