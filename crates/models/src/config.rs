//! What a model's configuration says, from `config.json` (both dialects) or GGUF metadata, checked once.

use crate::Architecture;
use crate::rope::{Scaling, frequencies};
use crate::stated::Stated;
use formats::Result;
use nn::{AttentionOptions, Bias, Pairing, Rope};

/// Hyperparameters of a decoder.
#[derive(Debug, Clone)]
pub struct Config {
    /// The architecture's row in the registry.
    pub architecture: &'static Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Width of the feed-forward.
    pub feed_forward: usize,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Added to the mean square of every norm.
    pub norm_eps: f32,
    /// Window of each layer; empty: none has one.
    pub windows: Vec<Option<usize>>,
    /// Positions the model was trained for.
    pub context: usize,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// The rotation of q and k.
    pub rope: Rope,
    /// What the file leaves out or says oddly and what was assumed, one line each.
    pub warnings: Vec<String>,
}

/// The unchecked numbers that both dialects give.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) architecture: &'static Architecture,
    pub(crate) hidden: Stated<usize>,
    pub(crate) layers: Stated<usize>,
    pub(crate) heads: Stated<usize>,
    pub(crate) kv_heads: Stated<usize>,
    pub(crate) head_dim: Option<Stated<usize>>,
    pub(crate) feed_forward: Stated<usize>,
    pub(crate) vocab: Stated<usize>,
    pub(crate) norm_eps: Stated<f64>,
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) context: Stated<usize>,
    pub(crate) tied: bool,
    pub(crate) theta: Stated<f64>,
    pub(crate) rotary: Option<Stated<usize>>,
    pub(crate) scaling: Stated<Scaling>,
    pub(crate) pairing: Pairing,
    pub(crate) warnings: Vec<String>,
}

/// Larger than any model's, small enough that products of two cannot overflow.
pub(crate) const LIMIT: usize = 1 << 28;
/// More layers than any model has.
pub(crate) const LAYERS: usize = 4096;

impl Raw {
    pub(crate) fn check(self) -> Result<Config> {
        let (hidden, layers) = (self.hidden.within(1..=LIMIT)?, self.layers.within(1..=LAYERS)?);
        let heads = self.heads.within(1..=1 << 16)?;
        let kv_heads = self.kv_heads.within(1..=1 << 16)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of {} = {kv_heads}", self.kv_heads.key());
            return Err(self.heads.wrong(expected, heads));
        }
        let head_dim = match &self.head_dim {
            Some(head_dim) => head_dim.within(1..=1 << 14)?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a multiple of {} = {heads}", self.heads.key());
                return Err(self.hidden.wrong(expected, hidden));
            }
        };
        let rotary = match &self.rotary {
            Some(rotary) if !rotary.value.is_multiple_of(2) => {
                return Err(rotary.wrong(format!("an even number up to {head_dim}"), rotary.value));
            }
            Some(rotary) => rotary.within(2..=head_dim)?,
            None if head_dim.is_multiple_of(2) => head_dim,
            None => {
                let source = self.head_dim.as_ref().unwrap_or(&self.hidden);
                return Err(source.wrong("heads of an even size, to be rotated", head_dim));
            }
        };
        let norm_eps = self.norm_eps.positive()?;
        if norm_eps >= 1.0 {
            return Err(self.norm_eps.wrong("a number below 1", norm_eps));
        }
        let frequencies = frequencies(self.theta.positive()?, rotary, &self.scaling)?;
        let context = self.context.within(1..=LIMIT)?;
        let magnitude = self.scaling.value.magnitude();
        Ok(Config {
            architecture: self.architecture,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            feed_forward: self.feed_forward.within(1..=LIMIT)?,
            vocab: self.vocab.within(1..=LIMIT)?,
            norm_eps: norm_eps as f32,
            windows: self.windows,
            // A stretched context may be meant by its factor alone.
            context: context.max(self.scaling.value.context().unwrap_or(0)),
            tied: self.tied,
            rope: Rope { head_dim, pairing: self.pairing, frequencies, magnitude },
            warnings: self.warnings,
        })
    }
}

impl Config {
    /// The attention of layer `layer` without biases or q/k norms, which architectures add.
    pub(crate) fn attention(&self, layer: usize) -> AttentionOptions {
        AttentionOptions {
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            qkv_bias: Bias::Never,
            output_bias: Bias::Never,
            qk_norm: None,
            window: self.windows.get(layer).copied().flatten(),
            rope: self.rope.clone(),
        }
    }
}
