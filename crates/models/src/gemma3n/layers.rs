//! The layers of Gemma 3n, of which the streams are in `streams`.
//!
//! ```text
//! z = norm(x)                                              of the predicted active stream x
//! y = (x + norm(attention(z)) + z + norm(up(down(z)))) / sqrt(2)
//! y = y + norm(mlp(norm(y)))
//! mlp(x) = down(gelu(gate(x)) * up(x))                     where few of gate's elements may pass
//! ```

use super::streams::{self, Count, Ends, Streams};
use crate::decoder::Layer;
use crate::gemma4::inputs::{Input, Inputs};
use crate::{Config, Ending, Layers, gemma2};
use formats::{Result, Source};
use nn::{
    AttentionOptions, Bias, Builder, Embedding, ForwardPass, Norm, Projection, QkNorm, Rope,
    SelfAttention, Stored, Tensor, Unary, Weights,
};
use ops::{GaussianTopK, Op};

/// The sizes of the layers that [`Config`] does not have.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The rotation of layers within a window.
    pub(super) local: Rope,
    /// The width of each layer's feed-forward.
    pub(super) feed_forward: Vec<usize>,
    /// Standard deviations above the mean of a gate's elements of those that pass, if not all do.
    pub(super) deviations: Vec<Option<f32>>,
    /// The layer to whose keys and values each layer attends, if not to its own.
    pub(super) shared: Vec<Option<usize>>,
    /// The width of each layer's own input.
    pub(super) input: usize,
    /// The rank of the product beside attention.
    pub(super) rank: usize,
    pub(super) streams: Count,
    /// The bound on logits.
    pub(super) logit_cap: Option<f32>,
    /// Biases of attention.
    pub(super) bias: Bias,
}

/// Weights that are not stored as they are used: those of streams, ones for the norms of values, and
/// the table of inputs. Tokens that this table has no row for take its first.
pub(super) fn stored(
    config: &Config,
    plan: &Plan,
    weights: &dyn Weights,
    name: &str,
) -> Result<Option<Stored>> {
    if name.ends_with(".attention.v_norm") {
        let shape = vec![config.head_dim];
        let source = Source::Plus(Box::new(Source::Zeros(shape.clone())), 1.0);
        return Ok(Some(Stored { source, shape }));
    }
    if name != "inputs" {
        return streams::stored(plan.streams, config.hidden, weights, name);
    }
    let Some(Stored { source, mut shape }) = weights.find(name)? else { return Ok(None) };
    let missing = config.vocab.saturating_sub(shape.first().copied().unwrap_or(0));
    if missing == 0 || shape.first().is_none_or(|rows| *rows == 0) {
        return Ok(Some(Stored { source, shape }));
    }
    let first = source.clone().rows(0, 1);
    shape[0] += missing;
    let parts = std::iter::once(source).chain(std::iter::repeat_n(first, missing));
    Ok(Some(Stored { source: Source::Concat(parts.collect()), shape }))
}

/// A feed-forward, some of which let few of the gate's elements pass.
struct SparseMlp {
    gate: Projection, // [hidden] -> [ff]
    up: Projection,   // [hidden] -> [ff]
    down: Projection, // [ff] -> [hidden]
    passing: Option<GaussianTopK>,
}

impl SparseMlp {
    fn new(builder: &Builder<'_>, config: &Config, plan: &Plan, i: usize) -> Result<SparseMlp> {
        let (hidden, ff) = (config.hidden, plan.feed_forward[i]);
        let linear = |part: &str, shape| {
            Projection::new(builder, &format!("blocks.{i}.mlp.{part}"), shape, Bias::Never)
        };
        Ok(SparseMlp {
            gate: linear("gate", [ff, hidden])?,
            up: linear("up", [ff, hidden])?,
            down: linear("down", [hidden, ff])?,
            passing: plan.deviations[i].map(|deviations| GaussianTopK { deviations }),
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let gate = self.gate.forward(x);
        let gate = match self.passing {
            Some(passing) => gate.apply(Op::from(passing), &[], Vec::new()),
            None => gate,
        };
        self.down.forward(&gate.map(Unary::GeluTanh).mul(&self.up.forward(x)))
    }
}

struct Block {
    streams: Streams,
    attention_norm: Norm,
    attention: SelfAttention,
    after_attention_norm: Norm,
    laurel: [Projection; 2], // [hidden] -> [rank] -> [hidden]
    laurel_norm: Norm,
    mlp_norm: Norm,
    mlp: SparseMlp,
    after_mlp_norm: Norm,
    input: Input,
}

impl Block {
    fn new(builder: &Builder<'_>, config: &Config, plan: &Plan, i: usize) -> Result<Block> {
        let (hidden, eps, rank) = (config.hidden, config.norm_eps, plan.rank);
        let norm = |name: &str| Norm::rms(builder, &format!("blocks.{i}.{name}"), hidden, eps);
        let laurel = |part: &str, shape| {
            Projection::new(builder, &format!("blocks.{i}.laurel.{part}"), shape, Bias::Never)
        };
        let options = config.attention(i);
        let local = options.window.map(|_| plan.local.clone());
        let options = AttentionOptions {
            rope: local.or(options.rope),
            scale: Some(1.0),
            qk_norm: QkNorm::Heads(eps),
            value_norm: Some(eps),
            qkv_bias: plan.bias,
            output_bias: plan.bias,
            shared: plan.shared[i],
            ..options
        };
        Ok(Block {
            streams: Streams::new(builder, config, plan.streams, i)?,
            attention_norm: norm("attention_norm")?,
            attention: SelfAttention::new(builder, &format!("blocks.{i}.attention"), options)?,
            after_attention_norm: norm("after_attention_norm")?,
            laurel: [laurel("down", [rank, hidden])?, laurel("up", [hidden, rank])?],
            laurel_norm: norm("laurel.norm")?,
            mlp_norm: norm("mlp_norm")?,
            mlp: SparseMlp::new(builder, config, plan, i)?,
            after_mlp_norm: norm("after_mlp_norm")?,
            input: Input::new(builder, config, plan.input, i)?,
        })
    }

    /// The streams behind the block.
    fn forward(&self, streams: &Tensor, inputs: &Tensor) -> Tensor {
        let predicted = self.streams.predicted(streams);
        let x = self.streams.active(&predicted);
        let z = self.attention_norm.forward(&x);
        let low = self.laurel.iter().fold(z.clone(), |y, matrix| matrix.forward(&y));
        let beside = z.add(&self.laurel_norm.forward(&low));
        let y = x.add(&self.after_attention_norm.forward(&self.attention.forward(&z)));
        let y = y.add(&beside).scale(0.5f32.sqrt());
        let y = y.add(&self.after_mlp_norm.forward(&self.mlp.forward(&self.mlp_norm.forward(&y))));
        self.streams.corrected(&predicted, &y, |active| self.input.forward(active, inputs))
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
    let inputs = Inputs::new(builder, config, plan.input)?;
    let ends = Ends::new(builder, config, plan.streams)?;
    let blocks: Vec<Block> =
        (0..config.layers).map(|i| Block::new(builder, config, plan, i)).collect::<Result<_>>()?;
    let norm = Norm::rms(builder, "norm", hidden, config.norm_eps)?;
    let head = || -> Result<Layer> { gemma2::head(builder, config, &embed, cap) };
    let head = (ending == Ending::Logits).then(head).transpose()?;
    let hidden = move |step: &ForwardPass| {
        let x = embed.forward(step).scale((hidden as f32).sqrt()).trace("embed");
        let inputs = inputs.forward(step, &x);
        let mut streams = ends.begin(&x);
        for (i, block) in blocks.iter().enumerate() {
            streams = block.forward(&streams, &inputs).trace(format!("blocks.{i}"));
        }
        norm.forward(&ends.end(&streams.select())).trace("norm")
    };
    Ok(Layers { blank: builder.program(), hidden: Box::new(hidden), head })
}
