//! AdamW (Loshchilov and Hutter 2019): Adam with weight decay apart from the gradient, in f32.
//!
//! ```text
//! p <- p - rate * decay * p
//! m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
//! p <- p - rate / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//! ```

use crate::Parameter;
use crate::cpu::vectorised::total;
use formats::{Error, Result};
use ops::gradient::adamw::Rule;

/// The options of the updates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// How fast the running means of gradients and of their squares forget.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// The share of a parameter that an update at rate 1 takes away, for parameters with weight
    /// decay.
    pub decay: f64,
    /// The greatest norm of all gradients together; longer ones are scaled to it.
    pub clip: Option<f64>,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { betas: [0.9, 0.999], epsilon: 1e-8, decay: 0.0, clip: Some(1.0) }
    }
}

impl AdamW {
    /// An update, from 1, by gradients of a norm that were added up `scale` times too long. Of what
    /// does not decay, `keep` is 1.
    pub(crate) fn rule(&self, update: u64, norm: f64, rate: f64, scale: f64) -> Rule {
        // As PyTorch's clip_grad_norm_ has it.
        let clip = self.clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0));
        let [b1, b2] = self.betas;
        let corrected = |beta: f64| 1.0 - beta.powf(update as f64);
        Rule {
            scale: (clip / scale) as f32,
            rest: [(1.0 - b1) as f32, (1.0 - b2) as f32],
            kept: b2 as f32,
            step: (rate / corrected(b1)) as f32,
            root: corrected(b2).sqrt() as f32,
            epsilon: self.epsilon as f32,
            keep: (1.0 - rate * self.decay) as f32,
        }
    }
}

/// The error of gradients of a parameter that are not finite.
pub(crate) fn unsound(parameter: &Parameter) -> Error {
    let place = format!("the gradient of {}", parameter.name);
    Error::new(place, "finite numbers", "others").hint("take a lower learning rate")
}

/// The running means of gradients and of their squares, a row for each parameter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Moments {
    /// Moving averages of gradients.
    pub first: Vec<Vec<f32>>,
    /// Moving averages of their squares.
    pub second: Vec<Vec<f32>>,
    /// Updates that were made.
    pub updates: u64,
}

/// Elements from which on an update is shared out among threads, and those of a part.
const SHARED: usize = 1 << 20;
const PART: usize = 1 << 16;

impl Moments {
    /// The moments before the first update.
    pub fn zeros(parameters: &[Parameter]) -> Moments {
        let zeros = || parameters.iter().map(|p| vec![0.0; p.values.len()]).collect();
        Moments { first: zeros(), second: zeros(), updates: 0 }
    }

    /// Updates the parameters at a learning rate by gradients that are `scale` times too long, and
    /// returns their norm before clipping, scaled.
    ///
    /// # Errors
    /// Gradients that are not finite, by the parameter's name; nothing is changed then.
    pub fn update(
        &mut self,
        parameters: &mut [Parameter],
        gradients: &[Vec<f32>],
        options: &AdamW,
        rate: f64,
        scale: f64,
    ) -> Result<f64> {
        let mut squares = 0.0;
        for (parameter, gradient) in parameters.iter().zip(gradients) {
            let own = total(gradient, gradient, |g, _| f64::from(g) * f64::from(g));
            if !own.is_finite() {
                return Err(unsound(parameter));
            }
            squares += own;
        }
        let norm = squares.sqrt() / scale;
        self.updates += 1;
        let rule = options.rule(self.updates, norm, rate, scale);
        let moments = self.first.iter_mut().zip(&mut self.second);
        let all = parameters.iter_mut().zip(gradients).zip(moments);
        let parts = all.flat_map(|((parameter, gradient), (first, second))| {
            let keep = if parameter.decays { rule.keep } else { 1.0 };
            let rule = Rule { keep, ..rule };
            let moments = first.chunks_mut(PART).zip(second.chunks_mut(PART));
            let values = parameter.values.chunks_mut(PART).zip(gradient.chunks(PART));
            values.zip(moments).map(move |((values, gradient), (first, second))| Part {
                rule,
                values,
                gradient,
                first,
                second,
            })
        });
        apply(parts.collect());
        Ok(norm)
    }
}

/// Elements of a parameter in an update.
struct Part<'a> {
    rule: Rule,
    values: &'a mut [f32],
    gradient: &'a [f32],
    first: &'a mut [f32],
    second: &'a mut [f32],
}

/// Updates values and their moments. Every element goes by itself, so that threads change no bit.
fn apply(mut parts: Vec<Part<'_>>) {
    let elements: usize = parts.iter().map(|part| part.values.len()).sum();
    let threads = match elements {
        n if n < SHARED => 1,
        _ => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let each = parts.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for parts in parts.chunks_mut(each) {
            let work = move || {
                for Part { rule, values, gradient, first, second } in parts {
                    rule.apply(values, gradient, first, second);
                }
            };
            if threads == 1 { work() } else { drop(scope.spawn(work)) }
        }
    });
}

/// How the learning rate goes, as Transformers' schedules do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RateSchedule {
    /// It stays.
    Constant,
    /// It falls to zero in a straight line.
    Linear,
    /// It falls to zero along half a cosine.
    #[default]
    Cosine,
}

impl RateSchedule {
    /// The learning rate of update `step`, from 0, of `steps`, of which the first `warmup` rise from
    /// zero to `most`; where it falls from there, it falls to `least`.
    pub fn rate(self, [most, least]: [f64; 2], step: u64, steps: u64, warmup: u64) -> f64 {
        let share = self.share(step, steps, warmup);
        if step < warmup { most * share } else { least + (most - least) * share }
    }

    /// The share of the learning rate in update `step`, from 0, of `steps`, of which the first
    /// `warmup` rise from zero.
    pub fn share(self, step: u64, steps: u64, warmup: u64) -> f64 {
        if step < warmup {
            return step as f64 / warmup as f64;
        }
        let rest = steps.saturating_sub(warmup).max(1) as f64;
        let done = ((step - warmup) as f64 / rest).min(1.0);
        match self {
            RateSchedule::Constant => 1.0,
            RateSchedule::Linear => 1.0 - done,
            RateSchedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        }
    }
}
