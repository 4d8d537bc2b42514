//! Reverse-mode differentiation (Linnainmaa 1970): what a rule is given, and the operations that
//! only gradients are made of.
//!
//! Each operation's rule, [`Operation::vjp`], stands in its own file. It asks a [`Reverse`] for the
//! cotangents of its outputs (the derivatives of a loss with respect to them) and records
//! operations that make the cotangents of its inputs and weights. A value with the shape of a
//! weight has [`Rows::Fixed`](crate::Rows::Fixed); a vector is one row.

pub mod adamw;
pub mod attend;
pub mod conv;
pub mod cross_entropy;
pub mod delta;
pub mod draws;
pub mod dropout;
pub mod elements;
pub mod embedding_noise;
pub mod experts;
pub mod gains;
pub mod gated_norm;
pub mod gaussian_top_k;
pub mod limits;
pub mod match_rms;
pub mod matmul;
pub mod matrices;
pub mod mix;
pub mod norms;
pub mod products;
pub mod rows;
pub mod scan;
pub mod xielu;

mod tangents;

pub use attend::{Attend, AttendBackward, seen};
pub use conv::{ConvBackward, PackedConv};
pub use cross_entropy::CrossEntropy;
pub use delta::{DeltaBackward, DeltaTangent, PackedDelta};
pub use draws::Draws;
pub use dropout::Dropout;
pub use elements::{Filled, GatedBackward, MapBackward};
pub use embedding_noise::EmbeddingNoise;
pub use experts::{AdaptedExperts, AdaptedExpertsBackward, ExpertFactors};
pub use experts::{ExpertsBackward, ExpertsTangent, Shares};
pub use gated_norm::{GatedNormBackward, GatedNormTangent};
pub use gaussian_top_k::{GaussianTopKBackward, GaussianTopKTangent};
pub use limits::LimitSlopes;
pub use match_rms::{MatchRmsBackward, MatchRmsTangent};
pub use mix::MixBackward;
pub use norms::{LayerNormBackward, RmsNormBackward};
pub use products::{LinearBackward, LinearBackwardAdd, Outer, SumColumns, SumRows};
pub use rows::{Gathered, Spread};
pub use scan::{PackedScan, ScanBackward, ScanTangent};
pub use tangents::{AttendTangent, NormTangent};
pub use xielu::{XieluBackward, XieluSums, XieluTangent};

pub(crate) use products::linear_vjp;

use crate::operation::{Launches, Operation, ReferenceCall, Sharding};
use crate::{Binary, Op, Shape, Zip, expect};
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

/// The tangent of what is linear in its first input and in its first weight, and adds the second
/// weight, if there is one.
pub(crate) fn bilinear(at: &mut dyn Forward, op: impl Into<Op>) -> Result<()> {
    let (op, x): (Op, RuleValue) = (op.into(), at.input(0));
    if let Some(dx) = at.tangent(0) {
        let dy = one(at, op.clone(), &[dx], &[0])?;
        at.add(0, dy)?;
    }
    if let Some(weight) = at.weight_tangent(0) {
        let dy = one(at, op.clone(), &[x], &[weight])?;
        at.add(0, dy)?;
    }
    of_bias(at, op)
}

/// Adds the tangent of the second weight, which is added to what an operation makes of zeros.
pub(crate) fn of_bias(at: &mut dyn Forward, op: impl Into<Op>) -> Result<()> {
    let Some(bias) = at.weight_tangent(1) else { return Ok(()) };
    let x = at.input(0);
    let none = zeros(at, x)?;
    let dy = one(at, op, &[none], &[0, bias])?;
    at.add(0, dy)
}

/// Zeros like a value.
pub(crate) fn zeros(at: &mut dyn Forward, like: RuleValue) -> Result<RuleValue> {
    let shape = at.shape(like);
    one(at, Filled { shape, value: 0.0 }, &[], &[])
}

/// Writes sums, each to the output in its place.
fn round_sums(outputs: &mut [Vec<f32>], sums: impl IntoIterator<Item = Vec<f64>>) {
    for (to, sums) in outputs.iter_mut().zip(sums) {
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
    }
}

/// Checks that tangents, the second half of an operation's inputs, are as wide as the first.
fn same_widths(name: &'static str, inputs: &[Shape]) -> Result<()> {
    let (inputs, tangents) = inputs.split_at(inputs.len() / 2);
    for (input, tangent) in inputs.iter().zip(tangents) {
        expect(name, "width of a tangent", &[tangent.width], &[input.width])?;
    }
    Ok(())
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
        Op::Map(_) | Op::Scale(_) | Op::ScaleColumns(_) | Op::ScaleRows(_) => true,
        Op::Rope(_) | Op::Select(_) => true,
        Op::Splice(_) | Op::GroupLimit(_) | Op::Stretch(_) | Op::Xielu(_) => true,
        Op::Zip(Zip(Binary::Add | Binary::Sub | Binary::Mul)) => true,
        Op::Experts(_) | Op::Gated(_) | Op::GatedNorm(_) => true,
        Op::Mix(_) | Op::MatchRms(_) | Op::GaussianTopK(_) | Op::RoundRows(_) => true,
        Op::Gradient(op) => !matches!(
            op,
            Gradient::NormTangent(_)
                | Gradient::AttendTangent(_)
                | Gradient::DeltaTangent(_)
                | Gradient::ExpertsTangent(_)
                | Gradient::GatedNormTangent(_)
                | Gradient::GaussianTopKTangent(_)
                | Gradient::MatchRmsTangent(_)
                | Gradient::ScanTangent(_)
                | Gradient::XieluTangent(_)
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
    /// `q, k, v; (sinks), (slopes) -> y, lse`: causal attention among the rows of each packed sequence.
    Attend,
    /// `q, k, v, y, lse, dy; (sinks), (slopes) -> dq, dk, dv, (dsinks)`.
    AttendBackward,
    /// `x; taps -> y`: a short convolution of the rows of each packed sequence.
    PackedConv,
    /// `x, dy; taps -> dx, (dtaps)`.
    ConvBackward,
    /// `qkv, a, b; (decay, dt) -> y`: a gated delta net over the rows of each packed sequence.
    PackedDelta,
    /// `qkv, a, b, dy; (decay, dt) -> dqkv, da, db, (ddecay, ddt)`.
    DeltaBackward,
    /// `xbc, dt; decay, bias, skip -> y`, or `x, step, b, c; decay, skip -> y`: a state space over
    /// the rows of each packed sequence.
    PackedScan,
    /// `xbc, dt, dy; decay, bias, skip -> (a gradient of each other operand)`, or of the other form.
    ScanBackward,
    /// `gate, x, dy; weight -> dgate, dx, (dweight)`.
    GatedNormBackward,
    /// `x, c, dy -> dx, dc` of [`Mix`](crate::Mix).
    MixBackward,
    /// `x, like, dy -> dx, dlike` of [`MatchRms`](crate::MatchRms).
    MatchRmsBackward,
    /// `x, dy -> dx` of [`GaussianTopK`](crate::GaussianTopK).
    GaussianTopKBackward,
    /// `x; head, (bias) -> losses, (dx), (dhead), (dbias)`: the cross-entropy of a linear head, in
    /// chunks of rows.
    CrossEntropy,
    /// `x -> y`: some elements become zero, by chance.
    Dropout,
    /// `x -> y`: noise on embeddings.
    EmbeddingNoise,
    /// `-> a value, all of whose elements are one number`.
    Filled,
    /// `x, dy -> dx` of a function of one element.
    MapBackward,
    /// `x, dy; a, b -> dx` of [`Xielu`](crate::Xielu).
    XieluBackward,
    /// `x, dy; a -> [rows, 1]`: each row's part of the gradient of one of [`Xielu`](crate::Xielu)'s
    /// numbers.
    XieluSums,
    /// `x; a, da -> dy` of one of [`Xielu`](crate::Xielu)'s numbers.
    XieluTangent,
    /// `gate, up, dy -> dgate` of [`Gated`](crate::Gated).
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
    /// `q, k, v, lse, dq, dk, dv; (sinks, dsinks), (slopes) -> dy`.
    AttendTangent,
    /// `qkv, a, b, dqkv, da, db; (decay, dt), (ddecay, ddt) -> dy`.
    DeltaTangent,
    /// `xbc, dt, dxbc, ddt; decay, bias, skip, (ddecay, dbias, dskip) -> dy`, or of the other form.
    ScanTangent,
    /// `gate, x, dgate, dx; weight, (dweight) -> dy`.
    GatedNormTangent,
    /// `x, like, dx, dlike -> dy`.
    MatchRmsTangent,
    /// `x, dx -> dy`.
    GaussianTopKTangent,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Packed;
    use crate::{GatedNorm, GaussianTopK, MatchRms, Mix, SelectiveScan, Xielu};

    /// The first row of each row's sequence.
    const FIRST: [u32; 7] = [0, 0, 0, 0, 4, 4, 4];

    /// An operation's outputs, of inputs that have the rows of [`FIRST`] and of weights.
    fn run(op: &dyn Operation, inputs: &[Vec<f32>], weights: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let rows = FIRST.len();
        let widths: Vec<usize> = inputs.iter().map(|x| x.len() / rows).collect();
        let shape = |width: &usize| Shape { rows: crate::Rows::Tokens, width: *width };
        let shapes: Vec<Shape> = widths.iter().map(shape).collect();
        let dims: Vec<[usize; 1]> = weights.iter().map(|weight| [weight.len()]).collect();
        let dims: Vec<&[usize]> = dims.iter().map(|dims| dims.as_slice()).collect();
        let outputs = op.infer(&shapes, &dims).unwrap();
        let outputs = outputs.iter().map(|y| vec![0.0; y.rows.count(rows, rows) * y.width]);
        let mut call = ReferenceCall {
            inputs: inputs.iter().map(Vec::as_slice).collect(),
            widths,
            weights,
            outputs: outputs.collect(),
            tokens: &[],
            positions: &[],
            picks: &[],
            deltas: Vec::new(),
            cache: &mut [],
            packed: Packed { first: &FIRST, ..Packed::default() },
        };
        op.reference(&mut call);
        call.outputs
    }

    /// Holds gradients of a sum of `y dy` against differences of the sum: of each input and each
    /// weight, in order.
    fn prove(
        op: &dyn Operation,
        inputs: &[Vec<f32>],
        weights: &[Vec<f32>],
        gradients: impl Fn(&[f32]) -> Vec<Vec<f32>>,
    ) {
        let dy = crate::test::noise(99, run(op, inputs, weights)[0].len());
        let sum = |inputs: &[Vec<f32>], weights: &[Vec<f32>]| -> f64 {
            let y = &run(op, inputs, weights)[0];
            y.iter().zip(&dy).map(|(y, dy)| f64::from(*y) * f64::from(*dy)).sum()
        };
        let found = gradients(&dy);
        assert_eq!(found.len(), inputs.len() + weights.len());
        for (which, found) in found.iter().enumerate() {
            let most = found.iter().fold(0.05f32, |most, v| most.max(v.abs()));
            for (i, found) in found.iter().enumerate() {
                let h = 4e-3f32;
                let moved = |by: f32| {
                    let (mut inputs, mut weights) = (inputs.to_vec(), weights.to_vec());
                    match which.checked_sub(inputs.len()) {
                        None => inputs[which][i] += by,
                        Some(weight) => weights[weight][i] += by,
                    }
                    sum(&inputs, &weights)
                };
                let slope = (moved(h) - moved(-h)) / f64::from(2.0 * h);
                let off = (slope - f64::from(*found)).abs();
                assert!(off < 2e-3 * f64::from(most), "{op:?}: {which}.{i}: {slope} {found}");
            }
        }
    }

    fn noise(seed: u64, len: usize) -> Vec<f32> {
        crate::test::noise(seed, len)
    }

    #[test]
    fn state_spaces_against_differences() {
        for (heads, groups, head_dim, state) in [(1, 1, 1, 1), (4, 2, 3, 5), (3, 1, 8, 4)] {
            let of = SelectiveScan::new([heads, groups, head_dim, state]);
            let rows = FIRST.len();
            let inputs = [noise(1, rows * of.width()), noise(2, rows * heads)];
            let weights = [3, 4, 5].map(|seed| noise(seed, heads));
            prove(&PackedScan(of), &inputs, &weights, |dy| {
                let all = [inputs.as_slice(), &[dy.to_vec()]].concat();
                let found = run(&ScanBackward(of), &all, &weights);
                by_rows(&of, &all, &weights, &found);
                found
            });
        }
    }

    #[test]
    fn state_spaces_that_decay_by_element_against_differences() {
        for (heads, groups, head_dim, state) in [(1, 1, 1, 1), (1, 1, 5, 4), (4, 2, 3, 2)] {
            let sizes = [heads, groups, head_dim, state];
            let of = SelectiveScan { by_element: true, ..SelectiveScan::new(sizes) };
            let rows = FIRST.len();
            let (inner, each) = (heads * head_dim, groups * state);
            let mut inputs = [(1, inner), (2, inner), (3, each), (4, each)]
                .map(|(seed, width)| noise(seed, rows * width));
            inputs[1].iter_mut().for_each(|step| *step = step.abs() + 0.1);
            let weights = [noise(5, inner * state), noise(6, inner)];
            prove(&PackedScan(of), &inputs, &weights, |dy| {
                run(&ScanBackward(of), &[inputs.as_slice(), &[dy.to_vec()]].concat(), &weights)
            });
        }
    }

    /// What the CPU computes row by row in f32 is what the definition says.
    fn by_rows(of: &SelectiveScan, all: &[Vec<f32>], weights: &[Vec<f32>], found: &[Vec<f32>]) {
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{a} {b}");
        let (n, size) = (of.head_dim, of.state * of.head_dim);
        for h in 0..of.heads {
            let own = [0, 1, 2].map(|i| weights[i].as_slice());
            let (head, [x, b, c]) = (scan::ScanHead::new(of, own, h), scan::parts(of, h));
            let row = |t: usize| &all[0][t * of.width()..][..of.width()];
            let (mut matrices, mut matrix) = (Vec::new(), vec![0f32; size]);
            for (t, first) in FIRST.iter().enumerate() {
                if *first as usize == t {
                    matrix.fill(0.0);
                }
                let before = matrix.clone();
                head.advance(
                    &mut matrix,
                    [&row(t)[x.clone()], &row(t)[b.clone()]],
                    all[1][t * of.heads + h],
                );
                matrices.push([before, matrix.clone()]);
            }
            let (mut slopes, mut work) = (vec![0f32; size], vec![0f32; n]);
            let mut sums = [0f64; 3];
            for (t, [before, after]) in matrices.iter().enumerate().rev() {
                let dy = &all[2][(t * of.heads + h) * n..][..n];
                let operands = [&row(t)[x.clone()], &row(t)[b.clone()], &row(t)[c.clone()], dy];
                let (mut dx, mut db, mut dc) =
                    (vec![0f32; n], vec![0f32; of.state], vec![0f32; of.state]);
                let to = scan::ScanRow { x: &mut dx, b: &mut db, c: &mut dc };
                let dt = all[1][t * of.heads + h];
                let own = head.backward([before, after], &mut slopes, operands, dt, to, &mut work);
                let at = &found[0][t * of.width()..];
                (0..n).for_each(|j| near(dx[j], at[x.start + j]));
                if of.groups == of.heads {
                    (0..of.state).for_each(|i| near(db[i], at[b.start + i]));
                    (0..of.state).for_each(|i| near(dc[i], at[c.start + i]));
                }
                near(own.dt as f32, found[1][t * of.heads + h]);
                for (sum, own) in sums.iter_mut().zip([own.decay, own.dt, own.skip]) {
                    *sum += own;
                }
                if FIRST[t] as usize == t {
                    slopes.fill(0.0);
                }
            }
            (0..3).for_each(|i| near(sums[i] as f32, found[2 + i][h]));
        }
    }

    #[test]
    fn gated_norms_against_differences() {
        for (groups, norm_first) in [(1, false), (1, true), (3, false), (2, true)] {
            let of = GatedNorm { eps: 1e-2, groups, norm_first };
            let (inputs, weights) = ([1, 2].map(|seed| noise(seed, 7 * 12)), [noise(3, 12)]);
            prove(&of, &inputs, &weights, |dy| {
                let all = [inputs.as_slice(), &[dy.to_vec()]].concat();
                run(&GatedNormBackward { of, weight: true }, &all, &weights)
            });
        }
    }

    /// The gradients of an operation without weights that `backward` computes.
    fn prove_rows(op: &dyn Operation, backward: &dyn Operation, inputs: &[Vec<f32>]) {
        prove(op, inputs, &[], |dy| run(backward, &[inputs, &[dy.to_vec()]].concat(), &[]));
    }

    #[test]
    fn streams_against_differences() {
        for (from, to) in [(4, 4), (1, 3), (3, 2)] {
            let of = Mix { from, to };
            prove_rows(&of, &MixBackward(of), &[noise(1, 7 * 5 * from), noise(2, 7 * to * from)]);
        }
        // The mean squares are 0.33: above this floor for some groups, below for others.
        for floor in [1e-5, 0.3] {
            let of = MatchRms { floor };
            prove_rows(&of, &MatchRmsBackward(of), &[noise(1, 7 * 3 * 5), noise(2, 7 * 5)]);
        }
    }

    #[test]
    fn what_stands_out_against_differences() {
        for deviations in [-0.5, 0.2, 1.0] {
            let of = GaussianTopK { deviations };
            prove_rows(&of, &GaussianTopKBackward(of), &[noise(1, 7 * 12)]);
        }
    }

    #[test]
    fn xielu_against_differences() {
        let (inputs, weights) = ([noise(1, 7 * 9)], [vec![0.3], vec![-0.6]]);
        let linear = 0.5;
        prove(&Xielu { linear }, &inputs, &weights, |dy| {
            let all = [inputs[0].clone(), dy.to_vec()];
            let mut found = run(&XieluBackward { linear }, &all, &weights);
            for (weight, negative) in [(0, false), (1, true)] {
                let sums = run(&XieluSums { negative }, &all, &weights[weight..=weight]);
                found.push(vec![sums[0].iter().sum()]);
            }
            found
        });
    }
}
