//! Programs in training, as a device runs them: values are kept for a batch alone, and some weights
//! change from one to the next.

use std::collections::BTreeMap;

use formats::Result;
use ops::gradient::adamw::Rule;
use program::{Program, WeightId};

use crate::Memory;

/// How precise activations and the matrices that they are multiplied with are. Sums, statistics,
/// losses and gradients of weights are f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Nothing is rounded.
    #[default]
    F32,
    /// Activations and operands of products have bfloat16's 8 bits.
    BF16,
}

/// What a device is told when it loads Programs to be trained.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Programs of the same weights; the last has all that any of them has. The results of each are
    /// losses, and behind them either nothing or the gradients of all that are trained, in their
    /// order.
    pub programs: Vec<Program>,
    /// The weights that are not read, but [written](Trainer::write).
    pub trained: Vec<WeightId>,
    /// What trained vectors are divided by, if they are: then all of them.
    pub divided: Vec<Divided>,
    /// The precision of activations.
    pub precision: Precision,
}

/// A trained vector that counts divided by the lengths of a matrix's rows, the product of its
/// factors included (DoRA). Lengths count as constants in gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divided {
    /// The vector.
    pub weight: WeightId,
    /// The matrix, which is not trained.
    pub matrix: WeightId,
    /// Its factors, which are.
    pub down: WeightId,
    /// The other one.
    pub up: WeightId,
    /// What their product counts.
    pub scale: f32,
}

/// The rows of packed sequences.
#[derive(Debug, Clone, Copy)]
pub struct PackedRows<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Where each row stands in its sequence.
    pub positions: &'a [u32],
    /// The first row of each row's sequence.
    pub first: &'a [u32],
    /// What each row is to predict.
    pub targets: &'a [u32],
    /// How much each row's prediction counts.
    pub counts: &'a [f32],
    /// Rows whose predictions count, ascending.
    pub picks: &'a [u32],
}

/// What a device keeps of each trained weight, in f32 and in the weight's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Its values.
    Values,
    /// Its gradient in the last batch.
    Gradient,
    /// Gradients that were [accumulated](Trainer::accumulate).
    Sum,
    /// The running mean of gradients.
    First,
    /// The running mean of their squares.
    Second,
}

/// Programs in training on a device, with their weights, and with what updates of those are made
/// of.
pub trait Trainer: Send {
    /// Writes what is kept of a trained weight, row-major.
    ///
    /// # Errors
    /// A weight that is not trained, or has another number of elements; too little memory.
    fn write(&mut self, weight: WeightId, kept: Kept, values: &[f32]) -> Result<()>;

    /// Reads what is kept of a trained weight, row-major; sums and moments are zeros at first.
    ///
    /// # Errors
    /// As [`Trainer::write`].
    fn read(&mut self, weight: WeightId, kept: Kept, values: &mut [f32]) -> Result<()>;

    /// Puts another Program of the same weights in the place of one, by its number.
    ///
    /// # Errors
    /// An operation that the device has not.
    fn replace(&mut self, number: usize, program: Program) -> Result<()>;

    /// Runs a Program, by its number, on rows that have been checked.
    ///
    /// # Errors
    /// Too little memory, and whatever fails.
    fn run(&mut self, number: usize, rows: &PackedRows<'_>) -> Result<()>;

    /// The losses of the last run.
    ///
    /// # Errors
    /// Whatever fails.
    fn losses(&mut self) -> Result<&[f32]>;

    /// Adds the gradients of the last run to the sums; where they are the `first` of an update,
    /// they are the sums.
    ///
    /// # Errors
    /// A Program without gradients; too little memory.
    fn accumulate(&mut self, first: bool) -> Result<()>;

    /// Makes the sums those of all devices of a group that trains together; one device alone has
    /// them already. Every device of the group is asked at the same time.
    ///
    /// # Errors
    /// A device that is of no group, too little memory, and whatever fails.
    fn reduce(&mut self) -> Result<()>;

    /// Makes the sums zeros.
    ///
    /// # Errors
    /// Too little memory.
    fn clear(&mut self) -> Result<()>;

    /// The sum of the squares of all sums of gradients, in an order that follows from the weights
    /// alone; not finite where one of the sums is not.
    ///
    /// # Errors
    /// Whatever fails.
    fn squares(&mut self) -> Result<f64>;

    /// Updates all trained weights and their moments by the sums of gradients. Vectors do not
    /// decay.
    ///
    /// # Errors
    /// Whatever fails.
    fn update(&mut self, rule: &Rule) -> Result<()>;

    /// Makes sums and moments zeros.
    ///
    /// # Errors
    /// Whatever fails.
    fn forget(&mut self) -> Result<()>;

    /// Does the last run once more, one launch after another, and gives the seconds that each
    /// operation took, by name; none on a device that has no clock for it.
    ///
    /// # Errors
    /// Whatever fails.
    fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>>;

    /// Bytes that a run of a Program takes beside the weights, for so many tokens of which so many
    /// are to predict something.
    fn bytes(&self, number: usize, tokens: usize, outputs: usize) -> usize;

    /// Bytes that sums and moments take, from the first update on.
    fn update_bytes(&self) -> usize;

    /// Bytes that are left for runs and updates; none where that cannot be told.
    ///
    /// # Errors
    /// If the device does not answer.
    fn free(&self) -> Result<Option<usize>>;

    /// What it holds.
    fn memory(&self) -> Memory;
}
