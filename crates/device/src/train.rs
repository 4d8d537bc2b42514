//! Training on a device: activations are kept for one batch only, and some weights change between
//! batches.

use std::collections::BTreeMap;

use formats::Result;
use ops::gradient::adamw::Rule;
use program::{Program, WeightId};

use crate::Memory;

/// Precision of activations and of the matrices they are multiplied with. Sums, statistics, losses
/// and gradients of weights are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Nothing is rounded.
    #[default]
    F32,
    /// Activations and the operands of products are rounded to bfloat16.
    BF16,
}

/// Options for loading Programs for training.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Programs over the same weights; the last Program has every weight of the others. The
    /// results of each are losses, optionally followed by the gradients of all trained weights in
    /// order.
    pub programs: Vec<Program>,
    /// The trained weights. They are not read from the file but [written](Trainer::write).
    pub trained: Vec<WeightId>,
    /// Trained vectors that are divided by row norms (DoRA); either none of them or all.
    pub divided: Vec<Divided>,
    /// The precision of activations.
    pub precision: Precision,
}

/// A trained vector that is used divided by the row norms of a matrix, including the product of its
/// low-rank factors (DoRA). The norms are constants for gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divided {
    /// The vector.
    pub weight: WeightId,
    /// The matrix, which is frozen.
    pub matrix: WeightId,
    /// Its low-rank factor `A`, which is trained.
    pub down: WeightId,
    /// Its low-rank factor `B`, which is trained.
    pub up: WeightId,
    /// The factor on their product.
    pub scale: f32,
}

/// The rows of a batch of packed sequences.
#[derive(Debug, Clone, Copy)]
pub struct PackedRows<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// The position of each row in its sequence.
    pub positions: &'a [u32],
    /// For each row, the index of its sequence's first row.
    pub first: &'a [u32],
    /// The target token of each row.
    pub targets: &'a [u32],
    /// The loss weight of each row.
    pub counts: &'a [f32],
    /// The number of each row in the run, by which operations draw random numbers.
    pub draws: &'a [u32],
    /// Indices of the rows with a loss, ascending.
    pub picks: &'a [u32],
}

/// The values that a device keeps for each trained weight, in f32 and in the weight's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// The weight's values.
    Values,
    /// Its gradient in the last batch.
    Gradient,
    /// The sum of its [accumulated](Trainer::accumulate) gradients.
    Sum,
    /// First moment: the running mean of gradients.
    First,
    /// Second moment: the running mean of their squares.
    Second,
}

/// Programs loaded for training on a device, with their weights, gradients and optimizer state.
pub trait Trainer: Send {
    /// Writes a kept value of a trained weight, row-major.
    ///
    /// # Errors
    /// A weight that is not trained or has another number of elements; too little memory.
    fn write(&mut self, weight: WeightId, kept: Kept, values: &[f32]) -> Result<()>;

    /// Reads a kept value of a trained weight, row-major. Sums and moments are zeros at first.
    ///
    /// # Errors
    /// As [`Trainer::write`].
    fn read(&mut self, weight: WeightId, kept: Kept, values: &mut [f32]) -> Result<()>;

    /// Replaces Program `number` by another over the same weights.
    ///
    /// # Errors
    /// An operation that the device does not have.
    fn replace(&mut self, number: usize, program: Program) -> Result<()>;

    /// Runs Program `number` on rows that have been checked.
    ///
    /// # Errors
    /// Too little memory, and device failures.
    fn run(&mut self, number: usize, rows: &PackedRows<'_>) -> Result<()>;

    /// The losses of the last run.
    ///
    /// # Errors
    /// Device failures.
    fn losses(&mut self) -> Result<&[f32]>;

    /// Adds the gradients of the last run to the sums, or overwrites the sums if they are the
    /// `first` of an update.
    ///
    /// # Errors
    /// A Program without gradients; too little memory.
    fn accumulate(&mut self, first: bool) -> Result<()>;

    /// Replaces the gradient sums by their totals over all devices of a data-parallel group; all of
    /// them are asked at the same time.
    ///
    /// # Errors
    /// A device that belongs to no group, too little memory, device failures.
    fn reduce(&mut self) -> Result<()>;

    /// Sets the sums to zero.
    ///
    /// # Errors
    /// Too little memory.
    fn clear(&mut self) -> Result<()>;

    /// The sum of squares of all gradient sums, added in an order that depends on the weights
    /// alone. Not finite if one of the sums is not.
    ///
    /// # Errors
    /// Device failures.
    fn squares(&mut self) -> Result<f64>;

    /// Updates all trained weights and their moments from the gradient sums. Vectors get no weight
    /// decay.
    ///
    /// # Errors
    /// Device failures.
    fn update(&mut self, rule: &Rule) -> Result<()>;

    /// Sets sums and moments to zero.
    ///
    /// # Errors
    /// Device failures.
    fn forget(&mut self) -> Result<()>;

    /// Repeats the last run launch by launch, and returns the seconds of each operation by name;
    /// `None` on a device that cannot time them.
    ///
    /// # Errors
    /// Device failures.
    fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>>;

    /// Bytes that a run of Program `number` takes beside the weights, for `tokens` rows of which
    /// `outputs` have a loss.
    fn bytes(&self, number: usize, tokens: usize, outputs: usize) -> usize;

    /// Bytes of sums and moments, allocated from the first update on.
    fn update_bytes(&self) -> usize;

    /// Free bytes for runs and updates; `None` if unknown.
    ///
    /// # Errors
    /// A device that does not answer.
    fn free(&self) -> Result<Option<usize>>;

    /// The memory it holds.
    fn memory(&self) -> Memory;
}
