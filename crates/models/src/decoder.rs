//! The pre-norm decoder that Llama and its kin share: embed; for every block, attention and a gated feed-forward, each
//! normed in front and added to the residual stream; norm; head.

use crate::{Config, Layers, Opened};
use formats::Result;
use nn::{
    Attention, AttentionOptions, Bias, Builder, Embedding, Linear, Mlp, RmsNorm, Step, Tensor,
    Weights,
};

/// A model that is such a stack; `attention` gives the options of each layer, where the architectures differ.
pub(crate) fn open(
    config: Config,
    mlp_bias: Bias,
    attention: impl Fn(&Config, usize) -> AttentionOptions + 'static,
) -> Opened {
    let of = config.clone();
    let build = move |weights: &dyn Weights| layers(weights, &of, mlp_bias, &attention);
    Opened { config, build: Box::new(build) }
}

/// The layers of such a stack.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
pub(crate) fn layers(
    weights: &dyn Weights,
    config: &Config,
    mlp_bias: Bias,
    attention: impl Fn(&Config, usize) -> AttentionOptions,
) -> Result<Layers> {
    let builder = Builder::new(weights);
    let decoder = Decoder::new(&builder, config, mlp_bias, |layer| attention(config, layer))?;
    let blank = builder.program();
    Ok(Layers { blank, forward: Box::new(move |step| decoder.forward(step)) })
}

/// A stack of blocks between an embedding and a head.
struct Decoder {
    embed: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl Decoder {
    /// Builds the stack; `attention` gives the options of each layer, where the architectures differ.
    fn new(
        builder: &Builder<'_>,
        config: &Config,
        mlp_bias: Bias,
        attention: impl Fn(usize) -> AttentionOptions,
    ) -> Result<Self> {
        let (hidden, eps) = (config.hidden, config.norm_eps);
        let embed = Embedding::new(builder, "embed", config.vocab, hidden)?;
        let block = |i: usize| -> Result<Block> {
            Ok(Block {
                attention_norm: RmsNorm::new(
                    builder,
                    &format!("blocks.{i}.attention_norm"),
                    hidden,
                    eps,
                )?,
                attention: Attention::new(builder, &format!("blocks.{i}.attention"), attention(i))?,
                mlp_norm: RmsNorm::new(builder, &format!("blocks.{i}.mlp_norm"), hidden, eps)?,
                mlp: Mlp::new(
                    builder,
                    &format!("blocks.{i}.mlp"),
                    hidden,
                    config.feed_forward,
                    mlp_bias,
                )?,
            })
        };
        let blocks = (0..config.layers).map(block).collect::<Result<_>>()?;
        let norm = RmsNorm::new(builder, "norm", hidden, eps)?;
        let head = if config.tied {
            embed.tied()
        } else {
            Linear::new(builder, "head", [config.vocab, hidden], Bias::Never)?
        };
        Ok(Decoder { embed, blocks, norm, head })
    }

    /// Logits `[outputs, vocab]` of the step's tokens.
    fn forward(&self, step: &Step) -> Tensor {
        let mut x = self.embed.forward(step).trace("embed");
        for (i, block) in self.blocks.iter().enumerate() {
            x = x.add(&block.attention.forward(&block.attention_norm.forward(&x)));
            x = x.add(&block.mlp.forward(&block.mlp_norm.forward(&x))).trace(format!("blocks.{i}"));
        }
        self.head.forward(&self.norm.forward(&x.select()).trace("norm"))
    }
}
