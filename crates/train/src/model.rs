//! What a run trains, as the loop of a run sees it.

use formats::Result;
use std::ops::Range;

/// Sequences packed one behind the other. No token sees another sequence's, and positions begin at 0 in each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Token ids of all sequences.
    pub tokens: Vec<u32>,
    /// What each token is to predict; of a sequence's last token it is not read.
    pub targets: Vec<u32>,
    /// How much each prediction counts: 0 for a prompt's tokens and a sequence's last, 1 for an answer's; less than 0 where it is to
    /// become less likely.
    pub weights: Vec<f32>,
    /// Where each sequence lies: ranges that follow one another and cover all tokens.
    pub sequences: Vec<Range<usize>>,
}

/// A sum of losses and what it is divided by, so that losses of several batches add up.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// The sum of `weight * -ln p(target)` over a batch's tokens, in nats.
    pub sum: f64,
    /// The sum of the weights.
    pub weight: f64,
}

impl Loss {
    /// Nats per token that counts; zero where none does.
    pub fn mean(&self) -> f64 {
        if self.weight == 0.0 { 0.0 } else { self.sum / self.weight }
    }
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Loss) {
        self.sum += other.sum;
        self.weight += other.weight;
    }
}

/// A tensor that is trained, in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name, the same in every run of the same model and settings.
    pub name: String,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Vec<f32>,
    /// Whether weight decay applies to it: to matrices, not to norms and biases.
    pub decays: bool,
}

/// A model in training.
pub trait Model {
    /// What is trained, always in the same order.
    fn parameters(&self) -> &[Parameter];

    /// The same, to be updated.
    fn parameters_mut(&mut self) -> &mut [Parameter];

    /// The loss of a batch.
    ///
    /// # Errors
    /// A batch that does not fit the model, or a loss that is not finite.
    fn loss(&mut self, batch: &Batch) -> Result<Loss>;

    /// The loss of a batch, and the gradients of its *sum* with respect to each parameter, added to `gradients`, which
    /// has a row of the parameter's length for each.
    ///
    /// # Errors
    /// As [`Model::loss`].
    fn gradients(&mut self, batch: &Batch, gradients: &mut [Vec<f32>]) -> Result<Loss>;

    /// What the parameters make of the model, to be used beside or in place of it: an adapter's files, or a model's.
    /// Files are named and have their bytes; nothing is written.
    ///
    /// # Errors
    /// Parameters that are not finite, by name.
    fn export(&self) -> Result<Vec<(String, Vec<u8>)>>;
}
