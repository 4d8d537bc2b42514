//! Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and a window on the upper layers where the
//! configuration switches it on.

use crate::{Architecture, Config, decoder::Decoder};
use formats::Result;
use nn::{AttentionOptions, Bias, Builder};

pub(crate) const ARCHITECTURE: Architecture =
    Architecture { name: "qwen2", class: "Qwen2ForCausalLM", adjacent_rope_in_gguf: false, build };

fn build(builder: &Builder<'_>, config: &Config) -> Result<Decoder> {
    Decoder::new(builder, config, Bias::Never, |layer| AttentionOptions {
        qkv_bias: Bias::Always,
        ..config.attention(layer)
    })
}
