//! The trained model, as the loop of a run sees it.

use crate::{AdamW, Moments};
use formats::Result;
use std::ops::Range;

/// Sequences packed one behind the other. No token sees another sequence's, and positions begin at
/// 0 in each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Token ids of all sequences.
    pub tokens: Vec<u32>,
    /// The token that each row is to predict; ignored for a sequence's last token.
    pub targets: Vec<u32>,
    /// How much each prediction counts: 0 for a prompt's tokens and a sequence's last, 1 for an
    /// answer's; less than 0 where it is to become less likely.
    pub weights: Vec<f32>,
    /// Where each sequence lies: ranges that follow one another and cover all tokens.
    pub sequences: Vec<Range<usize>>,
    /// Tokens that a run read before these: random numbers of a row follow from its number in the
    /// run, which goes on from here, modulo 2^32.
    pub read: u64,
    /// Whether each answer is to be learned, where answers are judged one by one; empty elsewhere.
    pub desired: Vec<bool>,
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

/// A model in training. Its device may make the updates: it then keeps gradients and moments, and
/// parameters newer than the host's, and leaves the rows that updates are given as they are until
/// [`Trainable::fetch`].
pub trait Trainable {
    /// The trained parameters, always in the same order, as of the last [`Trainable::fetch`].
    fn parameters(&self) -> &[Parameter];

    /// The same, to be changed by the host: a device forgets what it made of them since the last
    /// [`Trainable::fetch`].
    fn parameters_mut(&mut self) -> &mut [Parameter];

    /// The loss of a batch.
    ///
    /// # Errors
    /// A batch that does not fit the model, or a loss that is not finite.
    fn loss(&mut self, batch: &Batch) -> Result<Loss>;

    /// The loss of a batch, and the gradients of its *sum* with respect to each parameter, added to
    /// `gradients`, which has a row of the parameter's length for each.
    ///
    /// # Errors
    /// As [`Trainable::loss`].
    fn gradients(&mut self, batch: &Batch, gradients: &mut [Vec<f32>]) -> Result<Loss>;

    /// The loss of one batch of an update. Its gradients are added to the gradients of the update's
    /// earlier batches, of which the `first` has none: in `gradients`, with rows as in
    /// [`Trainable::gradients`], or on the device.
    ///
    /// # Errors
    /// As [`Trainable::loss`].
    fn accumulate(
        &mut self,
        batch: &Batch,
        first: bool,
        gradients: &mut [Vec<f32>],
    ) -> Result<Loss> {
        if first {
            gradients.iter_mut().for_each(|row| row.fill(0.0));
        }
        self.gradients(batch, gradients)
    }

    /// Updates the parameters at a learning rate by what was [accumulated](Trainable::accumulate),
    /// which is `scale` times too long, and returns the norm of all gradients before clipping,
    /// scaled.
    ///
    /// # Errors
    /// As [`Moments::update`].
    fn update(
        &mut self,
        options: &AdamW,
        [rate, scale]: [f64; 2],
        gradients: &[Vec<f32>],
        moments: &mut Moments,
    ) -> Result<f64> {
        moments.update(self.parameters_mut(), gradients, options, rate, scale)
    }

    /// Brings the parameters, and the moments if they are asked for, to the host if its device has
    /// newer ones.
    ///
    /// # Errors
    /// If the device fails.
    fn fetch(&mut self, moments: Option<&mut Moments>) -> Result<()> {
        let _ = moments;
        Ok(())
    }

    /// Tells moments that updates go on from.
    ///
    /// # Errors
    /// If the device fails.
    fn go_on_from(&mut self, moments: &Moments) -> Result<()> {
        let _ = moments;
        Ok(())
    }

    /// The files of the trained result, to be used beside or in place of the model: an adapter's
    /// files, or a model's. Returns names and bytes; nothing is written.
    ///
    /// # Errors
    /// Parameters that are not finite, by name.
    fn export(&mut self) -> Result<Vec<(String, Vec<u8>)>>;
}
