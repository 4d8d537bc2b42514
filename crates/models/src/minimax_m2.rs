//! MiniMax-M2 (MiniMax 2025): norms of q and k over all heads together, part of each head rotated,
//! and a mixture in every block, whose experts are chosen by corrected odds.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, glm4_moe, llama, mixtral, qwen3};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

const NAMES: &[Row] = &[(
    "blocks.{}.mlp.router.correction",
    "model.layers.{}.block_sparse_moe.e_score_correction_bias!",
    "blk.{}.exp_probs_b.bias!",
)];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "MiniMax-M2",
    name: "minimax_m2",
    gguf: "minimax-m2",
    class: "MiniMaxM2ForCausalLM",
    unsaid: Unsaid::sizes([3072, 1536, 62, 48, 8, 0, 196_608, 200_064])
        .theta(5_000_000.0)
        .numbers(&[("num_experts_per_tok", 8), ("num_local_experts", 256)]),
    names: &[NAMES, experts::SPARSE_BLOCK, llama::NAMES, qwen3::NORMS],
    signs: None,
    experts: true,
    open,
};

/// Keys of its first configurations that are about other models of the family, or about blocks that
/// guess tokens ahead.
const NOTED: &[&str] = &[
    "attn_type_list",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "use_mtp",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("qk_norm_type", ""), &["per_layer"])?;
    keys.only(Key("scoring_func", ""), &["sigmoid"])?;
    for key in ["use_qk_norm", "use_routing_bias"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            return Err(keys.wrong(key, "true, as of this architecture", false));
        }
    }
    if let Some(width) = keys.size(Key("shared_intermediate_size", ""))?.filter(|w| w.value > 0) {
        return Err(width.wrong("0: no expert that all tokens share", width.value));
    }
    let rotary = keys.size(Key("rotary_dim", ""))?;
    if let Some(rotation) = raw.rotation.as_mut().filter(|_| keys.dialect() == Dialect::HuggingFace)
    {
        rotation.rotary = rotation.rotary.take().or(rotary);
    }
    // Noise on what the router reads, for training.
    keys.number(Key("router_jitter_noise", ""))?;
    let config = raw.check()?;
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let mut options = glm4_moe::limited(files, options, true, 1.0)?;
    options.routing.normalised = true;
    let parts = decoder::Parts {
        feed_forward: mixtral::mixture(options),
        ..decoder::Parts::new(Bias::Never, |config: &Config, layer| AttentionOptions {
            qk_norm: QkNorm::Rows(config.norm_eps),
            ..config.attention(layer)
        })
    };
    Ok(mixtral::opened(config, parts, options.experts))
}
