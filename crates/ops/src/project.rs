//! A norm and the projections that share its result: `n = rms_norm(x)`, `y_j = linear_j(n)`. The fused form of
//! q/k/v; with no norm, projections that share an input; with one projection, a norm folded into its consumer.

use crate::{Shape, arity, linear, rms_norm};
use formats::Result;

/// Which operands a projection group has.
#[derive(Debug, Clone, PartialEq)]
pub struct Project {
    /// The norm's eps, when a norm comes first.
    pub norm: Option<f32>,
    /// For each projection, whether a bias follows its weight.
    pub biases: Vec<bool>,
}

/// Operand indices of one projection within the weights of a [`Project`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projection {
    /// Index of the weight.
    pub weight: usize,
    /// Index of the bias.
    pub bias: Option<usize>,
}

impl Project {
    /// Where each projection's operands stand among the weights: the norm, if any, is first.
    pub fn projections(&self) -> impl Iterator<Item = Projection> + '_ {
        let mut next = usize::from(self.norm.is_some());
        self.biases.iter().map(move |&bias| {
            let weight = next;
            next += 1 + usize::from(bias);
            Projection { weight, bias: bias.then_some(weight + 1) }
        })
    }

    /// `x; (norm), weight, (bias).. -> y..`.
    pub fn shape(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let wanted = usize::from(self.norm.is_some())
            + self.biases.iter().map(|&b| 1 + usize::from(b)).sum::<usize>();
        arity("project", inputs, 1, weights, &[wanted])?;
        let width = inputs[0].width;
        if self.norm.is_some() {
            rms_norm::check("project", width, weights[0])?;
        }
        self.projections()
            .map(|p| {
                let out =
                    linear::check("project", width, weights[p.weight], p.bias.map(|b| weights[b]))?;
                Ok(Shape { width: out, ..inputs[0] })
            })
            .collect()
    }
}
