//! Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with a mixture of experts, and one expert
//! that every token goes through, weighted by a gate of its own.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::qwen3_moe::{Sparse, blocks};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, ExpertsOptions, MixtureOfExperts, Mlp, Projection, Unary};

/// The expert that all tokens share.
pub(crate) const SHARED: &[Row] = &[
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.mlp.shared_expert.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    ("blocks.{}.mlp.shared.up", "model.layers.{}.mlp.shared_expert.up_proj", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.mlp.shared_expert.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
    (
        "blocks.{}.mlp.shared_gate",
        "model.layers.{}.mlp.shared_expert_gate",
        "blk.{}.ffn_gate_inp_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen1.5-MoE and Qwen2-MoE",
    name: "qwen2_moe",
    gguf: "qwen2moe",
    class: "Qwen2MoeForCausalLM",
    unsaid: Unsaid::sizes([2048, 5632, 24, 16, 16, 4096, 32_768, 151_936]).numbers(&[
        ("moe_intermediate_size", 1408),
        ("num_experts", 60),
        ("num_experts_per_tok", 4),
        ("shared_expert_intermediate_size", 5632),
    ]),
    names: &[llama::NAMES, experts::NAMES, experts::SWITCHED, SHARED],
    signs: None,
    experts: true,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    // Every other layer below that number, where layers are not listed.
    let last = keys.size("max_window_layers")?.map_or(28, |last| last.value);
    let within = |layer: usize| layer.is_multiple_of(2) && layer < last;
    raw.windows = windows::of_switch(files, &raw.layers, within)?;
    let sparse = Sparse::read(files)?;
    let bias =
        if keys.flag(Key("qkv_bias", ""))? == Some(false) { Bias::Never } else { Bias::Always };
    let config = raw.check()?;
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let mixture = with_shared(files, options)?;
    let attention = move |config: &crate::Config, layer| AttentionOptions {
        qkv_bias: bias,
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: blocks(sparse, mixture),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(mixtral::opened(config, parts, options.experts))
}

/// A mixture beside one expert that every token goes through, weighted by a gate of its own.
///
/// # Errors
/// A width of that one that is missing or out of range, by key.
pub(crate) fn with_shared(
    files: &Files<'_>,
    options: ExpertsOptions,
) -> Result<decoder::FeedForward> {
    const SHARED: Key = Key("shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    let shared = files.keys.needed(SHARED)?.within(1..=1 << 20)?;
    Ok(Box::new(move |builder, config, i| {
        let (name, hidden) = (format!("blocks.{i}.mlp"), options.hidden);
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        let (one, sizes) = (format!("{name}.shared"), [hidden, shared]);
        let one = Mlp::new(builder, &one, sizes, Bias::Never, config.gate)?;
        let gate =
            Projection::new(builder, &format!("{name}.shared_gate"), [1, hidden], Bias::Never)?;
        let layer = move |x: &nn::Tensor| {
            let share = gate.forward(x).map(Unary::Sigmoid);
            experts.forward(x).add(&one.forward(x).scale_rows(&share))
        };
        Ok(Box::new(layer) as decoder::Layer)
    }))
}
