//! Mistral (Jiang et al. 2023): Llama with a sliding attention window.

use crate::{Architecture, Config, decoder::Decoder};
use formats::Result;
use nn::{Bias, Builder};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    name: "mistral",
    class: "MistralForCausalLM",
    adjacent_rope_in_gguf: true,
    build,
};

fn build(builder: &Builder<'_>, config: &Config) -> Result<Decoder> {
    Decoder::new(builder, config, Bias::Never, |layer| config.attention(layer))
}
