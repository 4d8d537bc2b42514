//! A mixture of experts: a router's scores select the gated feed-forwards that each token goes
//! through.

use crate::{Bias, Builder, Projection, Tensor};
use formats::Result;
use ops::experts::{Gate, Routing};
use ops::{GroupLimit, Op};
use program::WeightId;

/// The configuration of a mixture.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsOptions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of experts.
    pub experts: usize,
    /// Width of each expert's feed-forward.
    pub feed_forward: usize,
    /// Whether the router has a bias.
    pub router_bias: Bias,
    /// Whether all matrices of experts have biases.
    pub biases: bool,
    /// How scores select experts.
    pub routing: Routing,
    /// The group limit on experts, if scores have a correction.
    pub limit: Option<GroupLimit>,
    /// The experts' gating function.
    pub gate: Gate,
    /// Whether routing weights multiply the experts' input rather than their output.
    pub weighs_inputs: bool,
    /// Whether each expert's routing weight has a factor.
    pub factors: bool,
}

/// `[tokens, hidden] -> [tokens, hidden]`: the weighted sum of the selected experts' outputs.
pub struct MixtureOfExperts {
    router: Projection, // [hidden] -> [experts]
    limit: Option<(GroupLimit, WeightId)>,
    weights: Vec<WeightId>,
    op: ops::Experts,
}

impl MixtureOfExperts {
    /// Takes `name.router` `[experts, hidden]`; `name.experts.gate` and `.up` `[experts * ff,
    /// hidden]`, `.down` `[experts * hidden, ff]`; with a limit, `name.router.correction`
    /// `[experts]`; with biases, `name.experts.gate.bias` and so on; with factors,
    /// `name.router.factors` `[experts]`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn new(builder: &Builder<'_>, name: &str, options: &ExpertsOptions) -> Result<Self> {
        let &ExpertsOptions { hidden, experts, feed_forward: ff, .. } = options;
        let router = format!("{name}.router");
        let router = Projection::new(builder, &router, [experts, hidden], options.router_bias)?;
        let correction = || builder.weight(&format!("{name}.router.correction"), &[experts]);
        let limit = options.limit.map(|limit| Ok((limit, correction()?))).transpose()?;
        let parts = [("gate", ff, hidden), ("up", ff, hidden), ("down", hidden, ff)];
        let mut weights = Vec::new();
        for (part, out, input) in parts {
            let name = format!("{name}.experts.{part}");
            weights.push(builder.weight(&name, &[experts * out, input])?);
        }
        for (part, out, _) in parts.into_iter().filter(|_| options.biases) {
            let name = format!("{name}.experts.{part}.bias");
            weights.push(builder.weight(&name, &[experts * out])?);
        }
        if options.factors {
            weights.push(builder.weight(&format!("{name}.router.factors"), &[experts])?);
        }
        let ExpertsOptions { routing, gate, weighs_inputs, .. } = *options;
        let op = ops::Experts { routing, gate, weighs_inputs, inner: false };
        Ok(MixtureOfExperts { router, limit, weights, op })
    }

    /// The weighted sum of each row's experts.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.forward_routed(x, x)
    }

    /// The weighted sum of each row's experts, which its row of `router` selects.
    pub fn forward_routed(&self, x: &Tensor, router: &Tensor) -> Tensor {
        let mut scores = self.router.forward(router);
        if let Some((limit, correction)) = self.limit {
            scores = scores.apply(Op::from(limit), &[], vec![correction]);
        }
        x.apply(Op::from(self.op), &[&scores], self.weights.clone())
    }
}
