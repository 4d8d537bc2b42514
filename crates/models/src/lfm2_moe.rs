//! LFM2-MoE (Liquid AI 2025): LFM2 with a mixture behind the first blocks, whose experts are chosen
//! by corrected odds.

use crate::config::{Config, LAYERS};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, experts, glm4_moe, lfm2};
use formats::Result;
use formats::gguf::MetadataValue;
use nn::ExpertsOptions;

/// The names of its experts.
const NAMES: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.feed_forward.gate", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.feed_forward.expert_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
    (
        "blocks.{}.mlp.experts.gate",
        "model.layers.{}.feed_forward.switch_mlp.gate_proj",
        "blk.{}.ffn_gate_exps",
    ),
    (
        "blocks.{}.mlp.experts.up",
        "model.layers.{}.feed_forward.switch_mlp.up_proj",
        "blk.{}.ffn_up_exps",
    ),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.feed_forward.switch_mlp.down_proj",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.{}.gate", "model.layers.{}.feed_forward.experts.{}.w1", ""),
    ("blocks.{}.mlp.experts.{}.up", "model.layers.{}.feed_forward.experts.{}.w3", ""),
    ("blocks.{}.mlp.experts.{}.down", "model.layers.{}.feed_forward.experts.{}.w2", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "LFM2-MoE",
    name: "lfm2_moe",
    gguf: "lfm2moe",
    class: "Lfm2MoeForCausalLM",
    unsaid: Unsaid::sizes([2048, 7168, 32, 32, 8, 0, 128_000, 65_536])
        .theta(1_000_000.0)
        .numbers(&[
            ("conv_L_cache", 3),
            ("moe_intermediate_size", 1792),
            ("num_dense_layers", 2),
            ("num_experts", 32),
            ("num_experts_per_tok", 4),
        ])
        .eps(1e-5),
    names: &[lfm2::NAMES, NAMES],
    experts: true,
    open,
    ..lfm2::ARCHITECTURE
};

fn open(files: &Files<'_>) -> Result<Opened> {
    lfm2::opened(files, Some(mixture))
}

/// The mixture, and how many blocks at the beginning have none. GGUF does not say that
/// the odds of the chosen experts are made to sum to one: they are.
fn mixture(files: &Files<'_>, config: &Config) -> Result<(ExpertsOptions, usize)> {
    let keys = &files.keys;
    const DENSE: Key = Key("num_dense_layers", "leading_dense_block_count");
    let dense = keys.size(DENSE)?.map_or(Ok(0), |dense| dense.within(0..=LAYERS))?;
    keys.state(DENSE, Some(MetadataValue::U32(dense as u32)));
    let corrected = keys.flag(Key("use_expert_bias", ""))?.unwrap_or(true);
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let mut options = glm4_moe::limited(files, options, true, 1.0)?;
    options.routing.normalised |= keys.dialect() == Dialect::Gguf;
    if !corrected {
        options.limit = None;
    }
    Ok((options, dense))
}
