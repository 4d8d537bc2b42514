//! FlexOlmo (Ai2 2025): OLMo 2 with a mixture of experts in every block.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, olmo2, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "FlexOlmo",
    name: "flex_olmo",
    gguf: "",
    class: "FlexOlmoForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 4096, 100_352])
        .theta(500_000.0)
        .numbers(NUMBERS),
    names: &[olmo2::NORMS, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[("num_experts", 7), ("num_experts_per_tok", 5)];

fn open(files: &Files<'_>) -> Result<Opened> {
    let raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Rows(config.norm_eps),
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        normed: decoder::both(false, true),
        feed_forward: mixtral::mixture(options),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(mixtral::opened(config, parts, options.experts))
}
