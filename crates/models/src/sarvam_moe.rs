//! Sarvam 30B (Sarvam AI 2026): GLM-4.5's mixture with norms of each head, which rotate as a whole,
//! under names of its own.

use crate::config::Raw;
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Config, Opened, decoder, experts, llama, phi3, qwen3};
use formats::Result;
use nn::{AttentionOptions, QkNorm, Weights};

const NAMES: &[Row] = &[
    ("embed", "model.word_embeddings", ""),
    ("blocks.{}.attention.qkv", "model.layers.{}.attention.query_key_value", ""),
    ("blocks.{}.attention.o", "model.layers.{}.attention.dense", ""),
    ("blocks.{}.attention.q_norm", "model.layers.{}.attention.query_layernorm", ""),
    ("blocks.{}.attention.k_norm", "model.layers.{}.attention.key_layernorm", ""),
    ("blocks.{}.mlp.router.correction", "model.layers.{}.mlp.gate.expert_bias!", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Sarvam 30B",
    name: "sarvam_moe",
    gguf: "",
    class: "SarvamMoEForCausalLM",
    unsaid: Unsaid::sizes([4096, 8192, 19, 64, 4, 0, 131_072, 262_144])
        .theta(8_000_000.0)
        .numbers(NUMBERS),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

const OWN: &[(&str, &str)] =
    &[("n_shared_experts", "num_shared_experts"), ("attention_bias", "use_qkv_bias")];

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("head_dim", 64),
    ("moe_intermediate_size", 1024),
    ("n_routed_experts", 128),
    ("num_experts_per_tok", 6),
];

/// What the first configurations state of these models' training, and of what all of them have.
const NOTED: &[&str] = &[
    "max_window_layers",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_dropout",
    "router_dtype",
    "use_rmsnorm",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let raw = Raw::read(files, &["silu"])?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("score_function", ""), &["sigmoid"])?;
    let normed = keys.flag(Key("use_qk_norm", ""))?.unwrap_or(true);
    let usual = Usual { scale: 2.5, ..Usual::default() };
    let (config, mut parts, count) = glm4_moe::parts(files, raw, usual)?;
    let attention = parts.attention;
    parts.attention = Box::new(move |config: &Config, layer| AttentionOptions {
        qk_norm: if normed { QkNorm::Heads(config.norm_eps) } else { QkNorm::None },
        ..attention(config, layer)
    });
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match name
        .contains(".attention.")
    {
        true => phi3::part(config, weights, name),
        false => experts::joined(weights, name, count),
    };
    Ok(decoder::open_recipes(config, parts, stored))
}
