//! DeepSeek-V3.2 (DeepSeek-AI 2025) and GLM-5 (Z.ai 2026): DeepSeek-V3's form, whose attention sees
//! the positions that an indexer scores best, so many for each query. As long as there are no more
//! than these, a query sees all, which is the context that such a model is given here: the indexer is
//! not computed.

use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, deepseek, experts, glm4_moe, latent, llama};
use formats::{ErrorKind, Result};

/// Weights of indexers.
const NAMES: &[Row] = &[
    ("blocks.{}.indexer.q", "model.layers.{}.self_attn.indexer.wq_b", "blk.{}.indexer.attn_q_b"),
    ("blocks.{}.indexer.k", "model.layers.{}.self_attn.indexer.wk", "blk.{}.indexer.attn_k"),
    (
        "blocks.{}.indexer.k_norm",
        "model.layers.{}.self_attn.indexer.k_norm",
        "blk.{}.indexer.k_norm",
    ),
    (
        "blocks.{}.indexer.heads",
        "model.layers.{}.self_attn.indexer.weights_proj",
        "blk.{}.indexer.proj",
    ),
];

pub(crate) const DEEPSEEK: Architecture = Architecture {
    title: "DeepSeek-V3.2, in contexts that its indexer chooses whole",
    name: "deepseek_v32",
    gguf: latent::DEEPSEEK32,
    class: "DeepseekV32ForCausalLM",
    unsaid: Unsaid::sizes([7168, 18_432, 61, 128, 128, 0, 163_840, 129_280])
        .numbers(latent::NUMBERS)
        .numbers(&[
            ("first_k_dense_replace", 3),
            ("index_topk", 2048),
            ("moe_intermediate_size", 2048),
            ("n_group", 8),
            ("n_routed_experts", 256),
            ("num_experts_per_tok", 8),
            ("q_lora_rank", 1536),
            ("topk_group", 4),
        ]),
    names: &[
        NAMES,
        latent::NAMES,
        glm4_moe::NAMES,
        llama::NAMES,
        experts::NAMES,
        experts::SWITCHED,
    ],
    open,
    ..deepseek::V3
};

pub(crate) const GLM: Architecture = Architecture {
    title: "GLM-5, in contexts that its indexer chooses whole",
    name: "glm_moe_dsa",
    gguf: latent::GLM_DSA,
    class: "GlmMoeDsaForCausalLM",
    unsaid: Unsaid::sizes([6144, 12_288, 78, 64, 64, 0, 202_752, 154_880]).eps(1e-5).numbers(&[
        ("first_k_dense_replace", 3),
        ("index_topk", 2048),
        ("kv_lora_rank", 512),
        ("moe_intermediate_size", 2048),
        ("n_routed_experts", 256),
        ("num_experts_per_tok", 8),
        ("q_lora_rank", 2048),
        ("qk_nope_head_dim", 192),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 256),
    ]),
    ..DEEPSEEK
};

/// Sizes of indexers, which layers have one of their own, and the kinds of layers, which follow.
const NOTED: &[&str] = &[
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.types",
    "index_head_dim",
    "index_n_heads",
    "index_skip_topk_offset",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "layer_types",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    NOTED.iter().for_each(|key| files.keys.note(key));
    let most = files.keys.needed(Key("index_topk", "attention.indexer.top_k"))?;
    let seen = most.within(1..=crate::config::LIMIT)?;
    if let Some(context) = files.context.filter(|context| *context > seen) {
        let found = format!("a context of {context}");
        let error = most.wrong(format!("contexts of up to {seen}, which are seen whole"), found);
        return Err(error
            .of(ErrorKind::Unsupported)
            .hint("the indexer of others is not supported"));
    }
    let mut opened = (deepseek::V3.open)(files)?;
    let config = &mut opened.config;
    config.context = config.context.min(seen);
    let blocks = 0..config.layers;
    let parts = ["q", "k", "k_norm", "k_norm.bias", "heads"];
    let of = |i: usize| parts.map(|part| format!("blocks.{i}.indexer.{part}"));
    config.spare.extend(blocks.flat_map(of));
    config.warnings.push(format!(
        "{}: contexts have up to {seen} positions: the indexer that chooses among more is not computed",
        most.key()
    ));
    Ok(opened)
}
