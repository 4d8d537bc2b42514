//! Programs in training, as a device runs them: values are kept for a batch alone, and some weights change from one to the next.

use std::collections::BTreeMap;

use formats::Result;
use program::{Program, WeightId};

use crate::Memory;

/// How precise activations and the matrices that they are multiplied with are. Sums, statistics, losses and gradients of weights
/// are f32 either way.
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
    /// Programs of the same weights; the last has all that any of them has.
    pub programs: Vec<Program>,
    /// The weights that are not read, but [set](Trainer::set).
    pub trained: Vec<WeightId>,
    /// The precision of activations.
    pub precision: Precision,
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

/// Programs in training on a device, with their weights.
pub trait Trainer: Send {
    /// Gives a trained weight its values, row-major.
    ///
    /// # Errors
    /// A weight that is not trained, or has another number of elements.
    fn set(&mut self, weight: WeightId, values: &[f32]) -> Result<()>;

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

    /// All results of the last run, row-major and in f32.
    ///
    /// # Errors
    /// Whatever fails.
    fn results(&mut self) -> Result<Vec<&[f32]>>;

    /// Does the last run once more, one launch after another, and gives the seconds that each operation took, by name; none on a
    /// device that has no clock for it.
    ///
    /// # Errors
    /// Whatever fails.
    fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>>;

    /// Bytes that a run of a Program takes beside the weights, for so many tokens of which so many are to predict something.
    fn bytes(&self, number: usize, tokens: usize, outputs: usize) -> usize;

    /// Bytes that are left for runs; none where that cannot be told.
    ///
    /// # Errors
    /// If the device does not answer.
    fn free(&self) -> Result<Option<usize>>;

    /// What it holds.
    fn memory(&self) -> Memory;
}
