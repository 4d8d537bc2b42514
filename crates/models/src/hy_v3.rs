//! Hy3 (Tencent 2026): Qwen3's attention, and behind the first dense block a mixture whose experts are
//! chosen by corrected odds, beside one that every token goes through.

use crate::config::{RMS_EPS, Raw};
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, experts, llama, qwen3};
use formats::Result;
use formats::gguf::MetadataValue;

/// Names of published folders.
const NAMES: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.router.gate", "blk.{}.ffn_gate_inp"),
    ("blocks.{}.mlp.router.correction", "model.layers.{}.mlp.expert_bias!", "blk.{}.exp_probs_b!"),
    // As Transformers names it, after whose modules adapters are named.
    ("blocks.{}.mlp.router.correction", "model.layers.{}.mlp.e_score_correction_bias!", ""),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.mlp.shared_mlp.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    ("blocks.{}.mlp.shared.up", "model.layers.{}.mlp.shared_mlp.up_proj", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.mlp.shared_mlp.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Hy3",
    name: "hy_v3",
    gguf: "hy_v3",
    class: "HYV3ForCausalLM",
    unsaid: Unsaid::sizes([4096, 13_312, 80, 64, 8, 0, 131_072, 120_832])
        .theta(11_158_840.0)
        .numbers(NUMBERS)
        .eps(1e-5),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

const OWN: &[(&str, &str)] = &[
    ("n_shared_experts", "num_shared_experts"),
    ("routed_scaling_factor", "router_scaling_factor"),
];

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("head_dim", 128),
    ("moe_intermediate_size", 1536),
    ("num_experts", 192),
    ("num_experts_per_tok", 8),
];

/// What published configurations state of how these models are computed, and of blocks that guess
/// tokens ahead.
const NOTED: &[&str] = &[
    "enable_attention_fp32_softmax",
    "enable_lm_head_fp32",
    "enable_moe_fp32_combine",
    "expert_hidden_dim",
    "moe_router_enable_expert_bias",
    "moe_router_use_sigmoid",
    "num_mtp_layers",
    "num_nextn_predict_layers",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    glm4_moe::guesses(files, &mut raw)?;
    NOTED.iter().for_each(|key| keys.note(key));
    for key in ["qk_norm", "route_norm", "norm_topk_prob"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            return Err(keys.wrong(key, "true, as of this architecture", false));
        }
    }
    let usual = Usual { output_bias: true, scale: 2.826, ..Usual::default() };
    let opened = glm4_moe::opened(files, raw, true, usual)?;
    let normalised = Some(MetadataValue::Bool(true));
    keys.state(Key("norm_topk_prob", "expert_weights_norm"), normalised);
    Ok(opened)
}
