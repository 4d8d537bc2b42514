//! The layers of Gemma 4.
//!
//! ```text
//! x = x + norm(attention(norm(x)))
//! x = x + norm(mlp(norm(x)))                              and experts beside it: see `mixture`
//! x = x + norm(projection(gelu(gate(x)) * input_i))      where layers have `inputs`
//! x = scale_i * x
//! ```

use super::inputs::{Input, Inputs};
use super::mixture::Mixture;
use crate::decoder::Layer;
use crate::{Config, Ending, Layers, experts, gemma2};
use formats::{Result, Source};
use nn::{
    AttentionOptions, Bias, Builder, Embedding, ExpertsOptions, ForwardPass, Mlp, Norm, QkNorm,
    Rope, SelfAttention, Stored, Tensor, Weights,
};

/// The sizes that layers of one kind have in common.
#[derive(Debug, Clone)]
pub(super) struct Kind {
    pub(super) head_dim: usize,
    pub(super) kv_heads: usize,
    pub(super) rope: Rope,
}

/// The sizes of the layers that [`Config`] does not have.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Layers within a window, and layers that see everything.
    pub(super) kinds: [Kind; 2],
    /// The width of each layer's feed-forward.
    pub(super) feed_forward: Vec<usize>,
    /// The layer to whose keys and values each layer attends, if not to its own.
    pub(super) shared: Vec<Option<usize>>,
    /// The factor on the residual stream behind each layer.
    pub(super) scales: Vec<f32>,
    /// The width of the input that each layer has of its own; 0: they have none.
    pub(super) input: usize,
    /// The bound on logits.
    pub(super) logit_cap: Option<f32>,
    /// Biases of attention.
    pub(super) bias: Bias,
    /// The experts beside each feed-forward, if there are some.
    pub(super) mixture: Option<ExpertsOptions>,
}

/// Weights that are not stored as they are used: experts' matrices, ones for the norms of values,
/// and keys' matrices for values where these have none.
pub(super) fn values(plan: &Plan, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    if let Some(mixture) = plan.mixture.as_ref().filter(|_| name.contains(".moe.experts.")) {
        return experts::stacked(weights, name, mixture.experts);
    }
    let Some((block, part)) = name.rsplit_once(".attention.") else { return Ok(None) };
    if part == "v" && weights.find(name)?.is_none() {
        return weights.find(&format!("{block}.attention.k"));
    }
    let at = block.rsplit('.').next().and_then(|i| i.parse::<usize>().ok());
    let (Some(_), "v_norm") = (at, part) else { return Ok(None) };
    let q_norm = weights.find(&format!("{block}.attention.q_norm"))?;
    let shape = q_norm.map_or_else(|| vec![plan.kinds[0].head_dim], |norm| norm.shape);
    let source = Source::Plus(Box::new(Source::Zeros(shape.clone())), 1.0);
    Ok(Some(Stored { source, shape }))
}

struct Block {
    attention_norm: Norm,
    attention: SelfAttention,
    after_attention_norm: Norm,
    mlp_norm: Norm,
    mlp: Mlp,
    mixture: Option<Mixture>,
    after_mlp_norm: Norm,
    input: Option<Input>,
    scale: f32,
}

impl Block {
    fn new(builder: &Builder<'_>, config: &Config, plan: &Plan, i: usize) -> Result<Block> {
        let (hidden, eps) = (config.hidden, config.norm_eps);
        let norm = |name: &str| Norm::rms(builder, &format!("blocks.{i}.{name}"), hidden, eps);
        let options = config.attention(i);
        let kind = &plan.kinds[usize::from(options.window.is_none())];
        let options = AttentionOptions {
            head_dim: kind.head_dim,
            kv_heads: kind.kv_heads,
            rope: Some(kind.rope.clone()),
            scale: Some(1.0),
            qk_norm: QkNorm::Heads(eps),
            value_norm: Some(eps),
            qkv_bias: plan.bias,
            output_bias: plan.bias,
            shared: plan.shared[i],
            ..options
        };
        let (sizes, name) = ([hidden, plan.feed_forward[i]], format!("blocks.{i}.mlp"));
        let mixture =
            |options: &ExpertsOptions| Mixture::new(builder, &format!("blocks.{i}"), options, eps);
        let input = || Input::new(builder, config, plan.input, i);
        Ok(Block {
            attention_norm: norm("attention_norm")?,
            attention: SelfAttention::new(builder, &format!("blocks.{i}.attention"), options)?,
            after_attention_norm: norm("after_attention_norm")?,
            mlp_norm: norm("mlp_norm")?,
            mlp: Mlp::new(builder, &name, sizes, Bias::Never, config.gate)?,
            mixture: plan.mixture.as_ref().map(mixture).transpose()?,
            after_mlp_norm: norm("after_mlp_norm")?,
            input: (plan.input > 0).then(input).transpose()?,
            scale: plan.scales[i],
        })
    }

    fn forward(&self, x: &Tensor, inputs: Option<&Tensor>) -> Tensor {
        let y = self.attention.forward(&self.attention_norm.forward(x));
        let x = x.add(&self.after_attention_norm.forward(&y));
        let y = self.mlp.forward(&self.mlp_norm.forward(&x));
        let y = self.mixture.as_ref().map_or(y.clone(), |mixture| mixture.forward(&x, &y));
        let x = x.add(&self.after_mlp_norm.forward(&y));
        let x = match (&self.input, inputs) {
            (Some(input), Some(inputs)) => x.add(&input.forward(&x, inputs)),
            _ => x,
        };
        if self.scale == 1.0 { x } else { x.scale(self.scale) }
    }
}

/// The layers of the model that `plan` describes.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
pub(super) fn build(
    weights: &dyn Weights,
    config: &Config,
    plan: &Plan,
    ending: Ending,
) -> Result<Layers> {
    let builder = &Builder::new(weights);
    let (hidden, cap) = (config.hidden, plan.logit_cap);
    let embed = Embedding::new(builder, "embed", config.vocab, hidden)?;
    let inputs = (plan.input > 0).then(|| Inputs::new(builder, config, plan.input)).transpose()?;
    let blocks: Vec<Block> =
        (0..config.layers).map(|i| Block::new(builder, config, plan, i)).collect::<Result<_>>()?;
    let norm = Norm::rms(builder, "norm", hidden, config.norm_eps)?;
    let head = || -> Result<Layer> { gemma2::head(builder, config, &embed, cap) };
    let head = (ending == Ending::Logits).then(head).transpose()?;
    let hidden = move |step: &ForwardPass| {
        let mut x = embed.forward(step).scale((hidden as f32).sqrt()).trace("embed");
        let inputs = inputs.as_ref().map(|inputs| inputs.forward(step, &x));
        for (i, block) in blocks.iter().enumerate() {
            x = block.forward(&x, inputs.as_ref()).trace(format!("blocks.{i}"));
        }
        norm.forward(&x.select()).trace("norm")
    };
    Ok(Layers { blank: builder.program(), hidden: Box::new(hidden), head })
}
