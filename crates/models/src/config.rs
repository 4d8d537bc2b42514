//! What a model's configuration says, from `config.json` (both dialects) or GGUF metadata, checked once.

use crate::Architecture;
use crate::rope::{Scaling, frequencies};
use formats::{Error, Result};
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
}

/// The unchecked numbers that both dialects give.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) architecture: &'static Architecture,
    pub(crate) place: String,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: Option<usize>,
    pub(crate) feed_forward: usize,
    pub(crate) vocab: usize,
    pub(crate) norm_eps: f64,
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) context: usize,
    pub(crate) tied: bool,
    pub(crate) theta: f64,
    pub(crate) rotary: Option<usize>,
    pub(crate) scaling: Scaling,
    pub(crate) pairing: Pairing,
}

/// Larger than any model's, small enough that products of two cannot overflow.
const LIMIT: usize = 1 << 28;

impl Raw {
    pub(crate) fn check(self) -> Result<Config> {
        let place = |key: &str| format!("{}: {key}", self.place);
        let named = [
            ("hidden size", self.hidden, LIMIT),
            ("layers", self.layers, 4096),
            ("attention heads", self.heads, 1 << 16),
            ("key/value heads", self.kv_heads, 1 << 16),
            ("feed-forward size", self.feed_forward, LIMIT),
            ("vocabulary", self.vocab, LIMIT),
            ("context length", self.context, LIMIT),
            ("head_dim", self.head_dim.unwrap_or(1), 1 << 14),
        ];
        for (name, value, limit) in named {
            if value == 0 || value > limit {
                return Err(Error::new(place(name), format!("1..={limit}"), value));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a multiple of {} key/value heads", self.kv_heads);
            return Err(Error::new(place("attention heads"), expected, self.heads));
        }
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if self.hidden.is_multiple_of(self.heads) => self.hidden / self.heads,
            None => {
                let expected = format!("a multiple of {} heads, or head_dim", self.heads);
                return Err(Error::new(place("hidden size"), expected, self.hidden));
            }
        };
        let rotary = self.rotary.unwrap_or(head_dim);
        if rotary == 0 || !rotary.is_multiple_of(2) || rotary > head_dim {
            return Err(Error::new(
                place("rotary dimensions"),
                format!("an even number up to {head_dim}"),
                rotary,
            ));
        }
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(Error::new(place("rope theta"), "a positive number", self.theta));
        }
        if !(0.0..1.0).contains(&self.norm_eps) {
            return Err(Error::new(place("norm epsilon"), "a number in 0..1", self.norm_eps));
        }
        if self.windows.contains(&Some(0)) {
            return Err(Error::new(place("sliding window"), "at least 1", 0));
        }
        if !self.windows.is_empty() && self.windows.len() != self.layers {
            return Err(Error::new(
                place("layer types"),
                format!("{} entries", self.layers),
                self.windows.len(),
            ));
        }
        let frequencies = frequencies(self.theta, rotary, &self.scaling)?;
        if frequencies.iter().chain([&self.scaling.magnitude()]).any(|f| !f.is_finite()) {
            return Err(Error::new(
                place("rope scaling"),
                "finite frequencies",
                format!("{:?}", self.scaling),
            ));
        }
        Ok(Config {
            architecture: self.architecture,
            hidden: self.hidden,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim,
            feed_forward: self.feed_forward,
            vocab: self.vocab,
            norm_eps: self.norm_eps as f32,
            windows: self.windows,
            // A stretched context may be meant by its factor alone.
            context: self.context.max(self.scaling.context().unwrap_or(0)),
            tied: self.tied,
            rope: Rope {
                head_dim,
                pairing: self.pairing,
                frequencies,
                magnitude: self.scaling.magnitude(),
            },
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
