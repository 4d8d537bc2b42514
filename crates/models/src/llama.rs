//! Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): grouped-query attention, rotary positions with
//! `llama3` or `linear` scaling, SwiGLU, no window. Biases only where a checkpoint brings them.

use crate::{Architecture, Config, decoder::Decoder};
use formats::Result;
use nn::{AttentionOptions, Bias, Builder};

pub(crate) const ARCHITECTURE: Architecture =
    Architecture { name: "llama", class: "LlamaForCausalLM", adjacent_rope_in_gguf: true, build };

fn build(builder: &Builder<'_>, config: &Config) -> Result<Decoder> {
    Decoder::new(builder, config, Bias::IfStored, |layer| AttentionOptions {
        qkv_bias: Bias::IfStored,
        output_bias: Bias::IfStored,
        ..config.attention(layer)
    })
}
