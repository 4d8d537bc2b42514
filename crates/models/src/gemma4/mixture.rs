//! The mixture of Gemma 4: experts beside the feed-forward of each layer, chosen by what stands in
//! front of both.
//!
//! ```text
//! y = norm(mlp(..)) + norm(experts(norm(x)))       as scores(x) say
//! scores(x) = router(norm(x) / sqrt(hidden))
//! ```
//!
//! The odds of the chosen experts sum to one before each is multiplied with its expert's factor.

use crate::experts;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use formats::Result;
use nn::{Builder, ExpertsOptions, Gate, MixtureOfExperts, Norm, Tensor, Unary};

const USED: Key = Key("top_k_experts", "expert_used_count");
const WIDTH: Key = Key("moe_intermediate_size", "expert_feed_forward_length");

/// Reads the numbers of the mixture, if the model has one.
///
/// # Errors
/// A key that is missing or out of range.
pub(super) fn read(files: &Files<'_>, hidden: usize) -> Result<Option<ExpertsOptions>> {
    let keys = &files.keys;
    let stated = match keys.dialect() {
        Dialect::HuggingFace => keys.flag("enable_moe_block")? == Some(true),
        Dialect::Gguf => experts::are_stated(keys)?,
    };
    if !stated {
        ["num_experts", USED.0, WIDTH.0].iter().for_each(|key| keys.note(key));
        return Ok(None);
    }
    let width = keys.needed(WIDTH)?.within(1..=1 << 20)?;
    let mut options = experts::read_used(files, hidden, width, keys.size(USED)?)?;
    options.routing.normalised = true;
    options.gate = Gate::Plain(Unary::GeluTanh);
    // GGUF files may do without.
    options.factors = files.names.find("blocks.0.moe.router.factors")?.is_some();
    Ok(Some(options))
}

/// A layer's experts and the norms around them.
pub(super) struct Mixture {
    router_norm: Norm,
    norm: Norm,
    experts: MixtureOfExperts,
    after: Norm,
    after_dense: Norm,
    hidden: usize,
}

impl Mixture {
    /// The mixture of the layer `name`, whose norms add `eps`.
    ///
    /// # Errors
    /// Weights that are missing, or do not fit the configuration.
    pub(super) fn new(
        builder: &Builder<'_>,
        name: &str,
        options: &ExpertsOptions,
        eps: f32,
    ) -> Result<Mixture> {
        let hidden = options.hidden;
        let norm = |part: &str| Norm::rms(builder, &format!("{name}.{part}"), hidden, eps);
        Ok(Mixture {
            router_norm: norm("moe.router_norm")?,
            norm: norm("moe_norm")?,
            experts: MixtureOfExperts::new(builder, &format!("{name}.moe"), options)?,
            after: norm("after_moe_norm")?,
            after_dense: norm("after_dense_norm")?,
            hidden,
        })
    }

    /// The experts' results for `x`, added to the feed-forward's, `dense`.
    pub(super) fn forward(&self, x: &Tensor, dense: &Tensor) -> Tensor {
        let router = self.router_norm.forward(x).scale(1.0 / (self.hidden as f32).sqrt());
        let y = self.experts.forward_routed(&self.norm.forward(x), &router);
        self.after_dense.forward(dense).add(&self.after.forward(&y))
    }
}
