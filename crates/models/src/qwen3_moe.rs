//! Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in all blocks but those that the
//! configuration leaves dense.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, qwen3, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen3-MoE",
    name: "qwen3_moe",
    gguf: "qwen3moe",
    class: "Qwen3MoeForCausalLM",
    unsaid: Unsaid::sizes([2048, 6144, 24, 32, 4, 4096, 32_768, 151_936]).numbers(&[
        ("moe_intermediate_size", 768),
        ("num_experts", 128),
        ("num_experts_per_tok", 8),
    ]),
    names: &[llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let (config, parts, experts) = read(files, false)?;
    Ok(mixtral::opened(config, parts, experts))
}

/// The configuration, the decoder's parts and the number of experts, whose odds are made to sum to
/// one if the configuration says so, or if the decoder is one `beside` towers, which has no windows
/// either.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn read(files: &Files<'_>, beside: bool) -> Result<(Config, decoder::Parts, usize)> {
    let mut raw = Raw::read(files)?;
    raw.windows = match beside {
        true => windows::of_gguf(files, &raw.layers)?,
        false => windows::of_switch(files, &raw.layers, |_| true)?,
    };
    let sparse = Sparse::read(files)?;
    let bias = files.bias("attention_bias")?;
    // Qwen3-Coder states what all of these models have, and what none has.
    let keys = &files.keys;
    if keys.flag(Key("use_qk_norm", ""))? == Some(false) {
        return Err(keys.wrong("use_qk_norm", "true, as of this architecture", false));
    }
    const SHARED: Key = Key("shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    if let Some(shared) = keys.size(SHARED)?.filter(|shared| shared.value > 0) {
        return Err(shared.wrong("0: no expert that all tokens share", shared.value));
    }
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    // GGUF does not say it: all published models have it so.
    options.routing.normalised |= beside || files.keys.dialect() == Dialect::Gguf;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Heads(config.norm_eps),
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: blocks(sparse, mixtral::mixture(options)),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok((config, parts, options.experts))
}

/// Which blocks have experts.
#[derive(Debug)]
pub(crate) struct Sparse {
    /// The number of blocks from one with experts to the next.
    step: usize,
    /// Dense all the same.
    dense: Vec<usize>,
}

impl Sparse {
    /// Reads Qwen's rule.
    ///
    /// # Errors
    /// Values of another type or out of range, by key.
    pub(crate) fn read(files: &Files<'_>) -> Result<Sparse> {
        Sparse::read_or(files, &[])
    }

    /// The same, where the blocks `dense` are so if nothing is said.
    ///
    /// # Errors
    /// As [`Sparse::read`].
    pub(crate) fn read_or(files: &Files<'_>, dense: &[f32]) -> Result<Sparse> {
        let keys = &files.keys;
        let step = keys.size(Key("decoder_sparse_step", ""))?;
        let step = step.map_or(Ok(1), |step| step.within(1..=LAYERS))?;
        let dense = match keys.dialect() {
            Dialect::HuggingFace => keys.numbers("mlp_only_layers")?.unwrap_or(dense.to_vec()),
            Dialect::Gguf => Vec::new(),
        };
        Ok(Sparse { step, dense: dense.into_iter().map(|layer| layer as usize).collect() })
    }
}

/// Experts in the blocks that have them, a gated feed-forward in the others.
pub(crate) fn blocks(sparse: Sparse, mixture: decoder::FeedForward) -> decoder::FeedForward {
    Box::new(move |builder, config, i| {
        if !(i + 1).is_multiple_of(sparse.step) || sparse.dense.contains(&i) {
            return decoder::gated(builder, config, i, Bias::Never);
        }
        mixture(builder, config, i)
    })
}
