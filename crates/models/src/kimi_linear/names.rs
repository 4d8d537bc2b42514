//! The names of weights in Kimi Linear and Ling 3.

use crate::names::Row;

/// The names of nets, as Kimi Linear's files have them.
pub(super) const NETS: &[Row] = &[
    ("blocks.{}.delta.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.delta.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.delta.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.delta.q_conv", "model.layers.{}.self_attn.q_conv1d", "blk.{}.ssm_conv1d_q"),
    ("blocks.{}.delta.k_conv", "model.layers.{}.self_attn.k_conv1d", "blk.{}.ssm_conv1d_k"),
    ("blocks.{}.delta.v_conv", "model.layers.{}.self_attn.v_conv1d", "blk.{}.ssm_conv1d_v"),
    ("blocks.{}.delta.a_in", "model.layers.{}.self_attn.f_a_proj", "blk.{}.ssm_f_a"),
    ("blocks.{}.delta.a", "model.layers.{}.self_attn.f_b_proj", "blk.{}.ssm_f_b"),
    ("blocks.{}.delta.b", "model.layers.{}.self_attn.b_proj", "blk.{}.ssm_beta"),
    ("blocks.{}.delta.z_in", "model.layers.{}.self_attn.g_a_proj", "blk.{}.ssm_g_a"),
    ("blocks.{}.delta.z", "model.layers.{}.self_attn.g_b_proj", "blk.{}.ssm_g_b"),
    ("blocks.{}.delta.log_decay", "model.layers.{}.self_attn.A_log!", ""),
    ("blocks.{}.delta.decay", "", "blk.{}.ssm_a!"),
    ("blocks.{}.delta.dt", "model.layers.{}.self_attn.dt_bias!", "blk.{}.ssm_dt.bias!"),
    ("blocks.{}.delta.norm", "model.layers.{}.self_attn.o_norm", "blk.{}.ssm_norm"),
    ("blocks.{}.delta.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    // As Transformers names modules, after which adapters are named.
    ("blocks.{}.delta.a_in", "model.layers.{}.self_attn.forget_gate.f_a_proj", ""),
    ("blocks.{}.delta.a", "model.layers.{}.self_attn.forget_gate.f_b_proj", ""),
];

/// The rest of Kimi Linear's: Transformers writes dense feed-forwards under the mixtures' name.
pub(super) const KIMI: &[Row] = &[
    ("blocks.{}.mlp.gate", "model.layers.{}.block_sparse_moe.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.block_sparse_moe.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.block_sparse_moe.down_proj", "blk.{}.ffn_down"),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.block_sparse_moe.shared_experts.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    (
        "blocks.{}.mlp.shared.up",
        "model.layers.{}.block_sparse_moe.shared_experts.up_proj",
        "blk.{}.ffn_up_shexp",
    ),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.block_sparse_moe.shared_experts.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.block_sparse_moe.gate.e_score_correction_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
];

/// Ling's own names.
pub(super) const LING: &[Row] = &[
    ("embed", "model.word_embeddings", ""),
    ("blocks.{}.attention.q", "model.layers.{}.attention.q_proj", ""),
    ("blocks.{}.attention.q_a", "model.layers.{}.attention.q_a_proj", ""),
    ("blocks.{}.attention.q_a_norm", "model.layers.{}.attention.q_a_layernorm", ""),
    ("blocks.{}.attention.q_b", "model.layers.{}.attention.q_b_proj", ""),
    ("blocks.{}.attention.kv_a", "model.layers.{}.attention.kv_a_proj_with_mqa", ""),
    ("blocks.{}.attention.kv_a_norm", "model.layers.{}.attention.kv_a_layernorm", ""),
    ("blocks.{}.attention.kv_b", "model.layers.{}.attention.kv_b_proj", ""),
    ("blocks.{}.attention.o", "model.layers.{}.attention.dense", ""),
    ("blocks.{}.attention.gate", "model.layers.{}.attention.g_proj", ""),
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.g_proj", ""),
    ("blocks.{}.delta.q", "model.layers.{}.attention.q_proj", ""),
    ("blocks.{}.delta.k", "model.layers.{}.attention.k_proj", ""),
    ("blocks.{}.delta.v", "model.layers.{}.attention.v_proj", ""),
    ("blocks.{}.delta.q_conv", "model.layers.{}.attention.q_conv1d", ""),
    ("blocks.{}.delta.k_conv", "model.layers.{}.attention.k_conv1d", ""),
    ("blocks.{}.delta.v_conv", "model.layers.{}.attention.v_conv1d", ""),
    ("blocks.{}.delta.a", "model.layers.{}.attention.f_proj", ""),
    ("blocks.{}.delta.a", "model.layers.{}.self_attn.forget_gate.f_proj", ""),
    ("blocks.{}.delta.b", "model.layers.{}.attention.b_proj", ""),
    ("blocks.{}.delta.z", "model.layers.{}.attention.g_proj", ""),
    ("blocks.{}.delta.z", "model.layers.{}.self_attn.g_proj", ""),
    ("blocks.{}.delta.log_decay", "model.layers.{}.attention.A_log!", ""),
    ("blocks.{}.delta.dt", "model.layers.{}.attention.dt_bias!", ""),
    ("blocks.{}.delta.norm", "model.layers.{}.attention.o_norm", ""),
    ("blocks.{}.delta.o", "model.layers.{}.attention.dense", ""),
    ("blocks.{}.mlp.router.correction", "model.layers.{}.mlp.gate.expert_bias!", ""),
];
