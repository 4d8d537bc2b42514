//! Direct preference optimisation (Rafailov et al. 2023): of two answers to a prompt, the better is
//! to gain more than the worse.
//!
//! ```text
//! margin = ln p(chosen) - ln p0(chosen) - ln p(rejected) + ln p0(rejected)        p0: the base
//! loss   = -ln sigmoid(beta margin)
//! ```
//!
//! The base is the model without its adapter, or the adapter that was gone on from
//! ([`Tuned::rebase`]). The gradients are weighted gradients of cross-entropies: the tokens of the
//! chosen answer count `beta sigmoid(-beta margin)`, the tokens of the rejected one minus that.

use crate::{AdamW, Batch, Loss, Moments, Parameter, Trainable, Tuned};
use formats::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;

/// An adapter in training by preferences. The sequences of its batches are a chosen and a rejected
/// one in turn; a loss is the loss of a pair.
pub struct Preference {
    model: Tuned,
    beta: f64,
    /// `ln p0(chosen) - ln p0(rejected)` of pairs that were met, by their tokens and weights.
    bases: HashMap<Vec<u32>, f64>,
}

impl Preference {
    /// Trains `model`, an adapter; the greater `beta`, the closer it stays to the base.
    ///
    /// # Errors
    /// A model all of whose weights are trained; a `beta` that is not above zero.
    pub fn new(model: Tuned, beta: f64) -> Result<Preference> {
        if !(beta.is_finite() && beta > 0.0) {
            return Err(Error::new("beta", "a number above zero", beta));
        }
        if !model.is_adapter() {
            let expected = "an adapter, without which the model is what is compared with";
            return Err(Error::new("preferences", expected, "all weights"));
        }
        Ok(Preference { model, beta, bases: HashMap::new() })
    }

    /// The adapter in training.
    pub fn model(&self) -> &Tuned {
        &self.model
    }

    /// The margin of each pair of a batch.
    ///
    /// # Errors
    /// A batch that does not fit the model, or has a sequence without its partner.
    pub fn margins(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        let pairs = pairs(batch)?;
        let own = self.model.sequence_losses(batch)?;
        let mut margins = Vec::with_capacity(pairs.len());
        for (pair, own) in pairs.into_iter().zip(own.chunks_exact(2)) {
            margins.push(own[1] - own[0] - self.base(batch, pair)?);
        }
        Ok(margins)
    }

    /// The base that a pair's margin is measured from. Each is computed by itself, so that it never
    /// depends on the batch.
    fn base(&mut self, batch: &Batch, [chosen, rejected]: [Range<usize>; 2]) -> Result<f64> {
        let whole = chosen.start..rejected.end;
        let bits = batch.weights[whole.clone()].iter().map(|weight| weight.to_bits());
        let mut key = batch.tokens[whole.clone()].to_vec();
        key.extend(bits);
        key.push(chosen.len() as u32);
        if let Some(base) = self.bases.get(&key) {
            return Ok(*base);
        }
        let alone = Batch {
            tokens: batch.tokens[whole.clone()].to_vec(),
            targets: batch.targets[whole.clone()].to_vec(),
            weights: batch.weights[whole].to_vec(),
            sequences: vec![0..chosen.len(), chosen.len()..chosen.len() + rejected.len()],
        };
        let losses = self.model.base_losses(&alone)?;
        let base = losses[1] - losses[0];
        self.bases.insert(key, base);
        Ok(base)
    }

    /// The loss of a batch, and the batch whose cross-entropies have its gradients.
    fn weighted(&mut self, batch: &Batch) -> Result<(Loss, Batch)> {
        let margins = self.margins(batch)?;
        let mut weighted = batch.clone();
        for (pair, margin) in pairs(batch)?.into_iter().zip(&margins) {
            let slope = (self.beta / (1.0 + (self.beta * margin).exp())) as f32;
            for (rows, by) in pair.into_iter().zip([slope, -slope]) {
                weighted.weights[rows].iter_mut().for_each(|weight| *weight *= by);
            }
        }
        Ok((self.of(&margins), weighted))
    }

    fn of(&self, margins: &[f64]) -> Loss {
        // ln(1 + e^-z), whose power never overflows.
        let softplus = |z: f64| (-z.abs()).exp().ln_1p() + (-z).max(0.0);
        let sum = margins.iter().map(|margin| softplus(self.beta * margin)).sum();
        Loss { sum, weight: margins.len() as f64 }
    }
}

/// The sequences of a batch two by two.
fn pairs(batch: &Batch) -> Result<Vec<[Range<usize>; 2]>> {
    let pairs = batch.sequences.chunks_exact(2);
    if !pairs.remainder().is_empty() {
        let found = batch.sequences.len();
        return Err(Error::new("batch", "a chosen and a rejected sequence in turn", found));
    }
    Ok(pairs.map(|pair| [pair[0].clone(), pair[1].clone()]).collect())
}

impl Trainable for Preference {
    fn parameters(&self) -> &[Parameter] {
        self.model.parameters()
    }

    fn parameters_mut(&mut self) -> &mut [Parameter] {
        self.model.parameters_mut()
    }

    fn loss(&mut self, batch: &Batch) -> Result<Loss> {
        let margins = self.margins(batch)?;
        Ok(self.of(&margins))
    }

    fn gradients(&mut self, batch: &Batch, gradients: &mut [Vec<f32>]) -> Result<Loss> {
        let (loss, weighted) = self.weighted(batch)?;
        self.model.gradients(&weighted, gradients)?;
        Ok(loss)
    }

    fn accumulate(
        &mut self,
        batch: &Batch,
        first: bool,
        gradients: &mut [Vec<f32>],
    ) -> Result<Loss> {
        let (loss, weighted) = self.weighted(batch)?;
        self.model.accumulate(&weighted, first, gradients)?;
        Ok(loss)
    }

    fn update(
        &mut self,
        options: &AdamW,
        by: [f64; 2],
        gradients: &[Vec<f32>],
        moments: &mut Moments,
    ) -> Result<f64> {
        self.model.update(options, by, gradients, moments)
    }

    fn fetch(&mut self, moments: Option<&mut Moments>) -> Result<()> {
        self.model.fetch(moments)
    }

    fn go_on_from(&mut self, moments: &Moments) -> Result<()> {
        self.model.go_on_from(moments)
    }

    fn export(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        self.model.export()
    }
}
