//! OLMoE (Muennighoff et al. 2024): Llama with norms of q and k over all heads together, and a
//! mixture of experts in every block.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, qwen3, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OLMoE",
    name: "olmoe",
    gguf: "olmoe",
    class: "OlmoeForCausalLM",
    unsaid: Unsaid::sizes([2048, 2048, 16, 16, 0, 0, 4096, 50_304])
        .eps(1e-5)
        .numbers(&[("num_experts", 64), ("num_experts_per_tok", 8)]),
    names: &[llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    let bias = files.bias("attention_bias")?;
    if let Some(most) = keys.number(Key("clip_qkv", "attention.clamp_kqv"))? {
        return Err(most.wrong("null: q, k and v are not bounded here", most.value));
    }
    let config = raw.check()?;
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Rows(config.norm_eps),
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: mixtral::mixture(options),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(mixtral::opened(config, parts, options.experts))
}
