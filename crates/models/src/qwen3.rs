//! Qwen3 (Yang et al. 2025): RMS norms on every head of q and k before the rotation, and no biases.

use crate::{Architecture, Config, decoder::Decoder};
use formats::Result;
use nn::{AttentionOptions, Bias, Builder};

pub(crate) const ARCHITECTURE: Architecture =
    Architecture { name: "qwen3", class: "Qwen3ForCausalLM", adjacent_rope_in_gguf: false, build };

fn build(builder: &Builder<'_>, config: &Config) -> Result<Decoder> {
    Decoder::new(builder, config, Bias::IfStored, |layer| AttentionOptions {
        qkv_bias: Bias::IfStored,
        output_bias: Bias::IfStored,
        qk_norm: Some(config.norm_eps),
        ..config.attention(layer)
    })
}
