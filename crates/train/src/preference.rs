//! Learning from pairs of answers to a prompt, of which one is better, by weighted gradients of
//! cross-entropies.
//!
//! ```text
//! margin = ln p(chosen) - ln p0(chosen) - ln p(rejected) + ln p0(rejected)        p0: the base
//! ```
//!
//! The base is the model without its adapter, or the adapter that was gone on from
//! ([`Tuned::rebase`]). An [`Objective`] says what is made of the margin, or of `p` alone. All of
//! them change with sums of an answer's cross-entropies, so that their gradients are those sums'
//! with other weights: of DPO, `beta sigmoid(-beta margin)` for the tokens of the chosen answer, and
//! minus that for those of the rejected one.

use crate::{AdamW, Batch, Loss, Moments, Parameter, Trainable, Tuned};
use formats::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;

/// What is to become less, of a pair of answers or of a judged one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// `-ln sigmoid(beta margin)`: DPO (Rafailov et al. 2023).
    Dpo {
        /// The greater, the closer the adapter stays to the base.
        beta: f64,
    },
    /// `max(0, 1 - beta margin)`: SLiC's loss (Zhao et al. 2023) of DPO's margin.
    Hinge {
        /// Divides the margin from which on a pair is learned.
        beta: f64,
    },
    /// `(margin - 1 / (2 beta))^2` of margins that are means over tokens: IPO (Azar et al. 2023).
    Ipo {
        /// The greater, the closer the adapter stays to the base.
        beta: f64,
    },
    /// `-ln sigmoid(beta (mean ln p(chosen) - mean ln p(rejected)) - gamma)`, without a base: SimPO
    /// (Meng et al. 2024).
    SimPo {
        /// The factor on both means.
        beta: f64,
        /// By how much the chosen answer is to be better.
        gamma: f64,
    },
    /// A loss of single answers, each with a label: `1 - sigmoid(beta (gain - kl))` of a desired one
    /// and `1 - sigmoid(beta (kl - gain))` of another, where `gain = ln p - ln p0` and `kl` is the
    /// mean gain of a batch's answers to each other's prompts, or 0 if that is less, which counts
    /// as constant: KTO (Ethayarajh et al. 2024).
    Kto {
        /// The greater, the closer the adapter stays to the base.
        beta: f64,
        /// The weights of desired answers and of others.
        weights: [f64; 2],
    },
    /// `-mean ln p(chosen) - beta ln sigmoid(ln odds(chosen) - ln odds(rejected))` with `odds = q / (1
    /// - q)` of `q = e^(mean ln p)`, without a base: ORPO (Hong et al. 2024).
    Orpo {
        /// The weight of the ratio of odds beside the chosen answer's own loss.
        beta: f64,
    },
}

/// What an objective is made of: sums of cross-entropies of the chosen answer and of the rejected one,
/// those of the base, and how many tokens they are of.
#[derive(Debug, Clone, Copy)]
struct Pair {
    losses: [f64; 2],
    base: [f64; 2],
    tokens: [f64; 2],
}

impl Pair {
    /// How much more the chosen answer gained over the base.
    fn margin(&self) -> f64 {
        self.losses[1] - self.losses[0] - (self.base[1] - self.base[0])
    }
}

impl Objective {
    /// Its name, and its numbers, as a run that is resumed must have them.
    pub fn identity(&self) -> String {
        match self {
            Objective::Dpo { beta } => format!("DPO, beta {beta}"),
            Objective::Hinge { beta } => format!("hinge, beta {beta}"),
            Objective::Ipo { beta } => format!("IPO, beta {beta}"),
            Objective::SimPo { beta, gamma } => format!("SimPO, beta {beta}, gamma {gamma}"),
            Objective::Orpo { beta } => format!("ORPO, beta {beta}"),
            Objective::Kto { beta, weights: [desired, other] } => {
                format!("KTO, beta {beta}, weights {desired} and {other}")
            }
        }
    }

    /// Whether answers are compared with what a base makes of them.
    pub fn has_base(&self) -> bool {
        !matches!(self, Objective::SimPo { .. } | Objective::Orpo { .. })
    }

    /// # Errors
    /// Numbers out of range.
    fn check(&self) -> Result<()> {
        let (beta, gamma) = match *self {
            Objective::Dpo { beta }
            | Objective::Hinge { beta }
            | Objective::Ipo { beta }
            | Objective::Orpo { beta } => (beta, 0.0),
            Objective::Kto { beta, weights } => {
                if let Some(odd) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
                    return Err(Error::new("weights", "zero or numbers above it", odd));
                }
                (beta, 0.0)
            }
            Objective::SimPo { beta, gamma } => (beta, gamma),
        };
        if !(beta.is_finite() && beta > 0.0) {
            return Err(Error::new("beta", "a number above zero", beta));
        }
        if !(gamma.is_finite() && gamma >= 0.0) {
            return Err(Error::new("gamma", "zero or a number above it", gamma));
        }
        Ok(())
    }

    /// Whether answers are judged one by one.
    pub fn is_judged(&self) -> bool {
        matches!(self, Objective::Kto { .. })
    }

    /// The losses of a batch's pairs, and how each changes with the sums of cross-entropies of
    /// either answer.
    fn of_all(&self, pairs: &[Pair], desired: &[bool]) -> Vec<(f64, [f64; 2])> {
        let Objective::Kto { beta, weights } = *self else {
            return pairs.iter().map(|pair| self.of(pair)).collect();
        };
        let gain = |pair: &Pair, i: usize| pair.base[i] - pair.losses[i];
        let kl = pairs.iter().map(|pair| gain(pair, 1)).sum::<f64>() / pairs.len().max(1) as f64;
        let kl = kl.max(0.0);
        let each = pairs.iter().zip(desired).map(|(pair, desired)| {
            let (sign, weight) = if *desired { (1.0, weights[0]) } else { (-1.0, weights[1]) };
            let missing = 1.0 / (1.0 + (sign * beta * (gain(pair, 0) - kl)).exp());
            (weight * missing, [sign * weight * beta * missing * (1.0 - missing), 0.0])
        });
        each.collect()
    }

    /// The loss of a pair, and how it changes with the sums of cross-entropies of either answer.
    fn of(&self, pair: &Pair) -> (f64, [f64; 2]) {
        let Pair { losses, base, tokens } = *pair;
        let means: [f64; 2] = std::array::from_fn(|i| losses[i] / tokens[i]);
        let margin = pair.margin();
        // ln(1 + e^-z), whose power never overflows, and how little it falls.
        let logistic = |z: f64| ((-z.abs()).exp().ln_1p() + (-z).max(0.0), 1.0 / (1.0 + z.exp()));
        match *self {
            Objective::Dpo { beta } => {
                let (loss, slope) = logistic(beta * margin);
                (loss, [beta * slope, -beta * slope])
            }
            Objective::Hinge { beta } => match 1.0 - beta * margin {
                missing if missing > 0.0 => (missing, [beta, -beta]),
                _ => (0.0, [0.0; 2]),
            },
            Objective::Ipo { beta } => {
                let gain = |i: usize| (base[i] - losses[i]) / tokens[i];
                let missing = gain(0) - gain(1) - 0.5 / beta;
                let slope = 2.0 * missing;
                (missing * missing, [-slope / tokens[0], slope / tokens[1]])
            }
            Objective::SimPo { beta, gamma } => {
                let (loss, slope) = logistic(beta * (means[1] - means[0]) - gamma);
                (loss, [beta * slope / tokens[0], -beta * slope / tokens[1]])
            }
            // Pairs of a judged answer and another have no loss by themselves.
            Objective::Kto { .. } => (0.0, [0.0; 2]),
            Objective::Orpo { beta } => {
                // 1 - q, which is above zero however sure the model is.
                let rest = means.map(|mean| (-(-mean).exp_m1()).max(f64::MIN_POSITIVE));
                let odds: [f64; 2] = std::array::from_fn(|i| -means[i] - rest[i].ln());
                let (loss, slope) = logistic(odds[0] - odds[1]);
                let chosen = 1.0 + beta * slope / rest[0];
                let rejected = beta * slope / rest[1];
                (means[0] + beta * loss, [chosen / tokens[0], -rejected / tokens[1]])
            }
        }
    }
}

/// A model in training by preferences. The sequences of its batches are a chosen and a rejected one in
/// turn, or a judged one and one with the answer of another; a loss is the loss of such a pair.
pub struct Preference {
    model: Tuned,
    objective: Objective,
    /// The base's losses of pairs that were met, by their tokens and weights.
    bases: HashMap<Vec<u32>, [f64; 2]>,
}

impl Preference {
    /// Trains `model`, an adapter unless the objective has no base.
    ///
    /// # Errors
    /// A model all of whose weights are trained beside a base; numbers of the objective that are out
    /// of range.
    pub fn new(model: Tuned, objective: Objective) -> Result<Preference> {
        objective.check()?;
        if objective.has_base() && !model.is_adapter() {
            let expected = "an adapter, without which the model is what is compared with";
            return Err(Error::new("preferences", expected, "all weights"));
        }
        Ok(Preference { model, objective, bases: HashMap::new() })
    }

    /// The model in training.
    pub fn model(&self) -> &Tuned {
        &self.model
    }

    /// The margin of each pair of a batch.
    ///
    /// # Errors
    /// A batch that does not fit the model, or has a sequence without its partner.
    pub fn margins(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        Ok(self.pairs(batch)?.iter().map(Pair::margin).collect())
    }

    /// What the losses of a batch's pairs are made of.
    fn pairs(&mut self, batch: &Batch) -> Result<Vec<Pair>> {
        let answers = answers(batch)?;
        if self.objective.is_judged() && batch.desired.len() != answers.len() {
            let expected = format!("{} labels", answers.len());
            return Err(Error::new("batch", expected, batch.desired.len()));
        }
        let own = self.model.sequence_losses(batch)?;
        let mut pairs = Vec::with_capacity(answers.len());
        for (answers, own) in answers.into_iter().zip(own.chunks_exact(2)) {
            let count = |rows: &Range<usize>| {
                let weights = batch.weights[rows.clone()].iter().map(|weight| f64::from(*weight));
                // An answer that was cut off has none.
                Some(weights.sum::<f64>()).filter(|count| *count > 0.0).unwrap_or(1.0)
            };
            let tokens = answers.each_ref().map(count);
            let base = match self.objective {
                Objective::Kto { .. } => {
                    // Other answers stand behind a judged one each time.
                    let [own, other] = answers;
                    let none = |rows: &Range<usize>| rows.end..rows.end;
                    let one = self.base(batch, [own.clone(), none(&own)])?[0];
                    [one, self.base(batch, [other.clone(), none(&other)])?[0]]
                }
                _ if self.objective.has_base() => self.base(batch, answers)?,
                _ => [0.0; 2],
            };
            pairs.push(Pair { losses: [own[0], own[1]], base, tokens });
        }
        Ok(pairs)
    }

    /// The base's losses of a pair, whose second sequence may be empty. Each is computed by itself,
    /// so that it never depends on the batch.
    fn base(&mut self, batch: &Batch, [chosen, rejected]: [Range<usize>; 2]) -> Result<[f64; 2]> {
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
            sequences: [0..chosen.len(), chosen.len()..chosen.len() + rejected.len()]
                .into_iter()
                .filter(|rows| !rows.is_empty())
                .collect(),
            ..Batch::default()
        };
        let losses = self.model.base_losses(&alone)?;
        let base = [losses[0], losses.get(1).copied().unwrap_or(0.0)];
        self.bases.insert(key, base);
        Ok(base)
    }

    /// The loss of a batch, and the batch whose cross-entropies have its gradients.
    fn weighted(&mut self, batch: &Batch) -> Result<(Loss, Batch)> {
        let pairs = self.pairs(batch)?;
        let all = self.objective.of_all(&pairs, &batch.desired);
        let mut weighted = batch.clone();
        for (answers, (_, slopes)) in answers(batch)?.into_iter().zip(&all) {
            for (rows, by) in answers.into_iter().zip(slopes) {
                weighted.weights[rows].iter_mut().for_each(|weight| *weight *= *by as f32);
            }
        }
        if self.objective.is_judged() {
            weighted = firsts(&weighted);
        }
        Ok((sum(&all), weighted))
    }
}

/// The loss of a batch, of its pairs'.
fn sum(all: &[(f64, [f64; 2])]) -> Loss {
    Loss { sum: all.iter().map(|(loss, _)| loss).sum(), weight: all.len() as f64 }
}

/// The first sequence of each pair of a batch.
fn firsts(batch: &Batch) -> Batch {
    let mut of = Batch::default();
    for rows in batch.sequences.iter().step_by(2) {
        let start = of.tokens.len();
        of.tokens.extend(&batch.tokens[rows.clone()]);
        of.targets.extend(&batch.targets[rows.clone()]);
        of.weights.extend(&batch.weights[rows.clone()]);
        of.sequences.push(start..of.tokens.len());
    }
    of
}

/// The sequences of a batch two by two.
fn answers(batch: &Batch) -> Result<Vec<[Range<usize>; 2]>> {
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
        let pairs = self.pairs(batch)?;
        Ok(sum(&self.objective.of_all(&pairs, &batch.desired)))
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
