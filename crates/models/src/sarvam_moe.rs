//! Sarvam 30B (Sarvam AI 2026): GLM-4.5's mixture with norms of each head, which rotate as a whole,
//! under names of its own.

use crate::config::Raw;
use crate::files::Files;
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, bailing_moe, experts, glm4_moe, llama, qwen3};
use formats::Result;

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

/// Keys of the first configurations about training, and about properties that all models have.
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
    let raw = Raw::read(files)?;
    NOTED.iter().for_each(|key| files.keys.note(key));
    bailing_moe::open_normed(files, raw)
}
