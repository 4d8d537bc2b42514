//! AFMoE, the models called Trinity (Arcee 2025): norms in front of and behind sublayers, attention
//! whose output goes through a gate, and behind the first dense blocks dots.llm1's mixture. Three
//! layers of four have a window and a rotation; the fourth has neither.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, qwen3, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm, Unary};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.gate_proj", "blk.{}.attn_gate"),
    (
        "blocks.{}.after_attention_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    ("blocks.{}.mlp_norm", "model.layers.{}.pre_mlp_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_mlp_layernorm", "blk.{}.post_ffw_norm"),
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.router.gate", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.mlp.expert_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Trinity",
    name: "afmoe",
    gguf: "afmoe",
    class: "AfmoeForCausalLM",
    unsaid: Unsaid::sizes([2048, 6144, 32, 16, 0, 1024, 16_384, 200_192]).eps(1e-5).numbers(&[
        ("first_k_dense_replace", 1),
        ("moe_intermediate_size", 1408),
        ("n_shared_experts", 2),
        ("num_experts", 64),
        ("num_experts_per_tok", 6),
    ]),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Names of its own for what GLM-4.5 has, too.
const OWN: &[(&str, &str)] = &[
    ("first_k_dense_replace", "num_dense_layers"),
    ("n_shared_experts", "num_shared_experts"),
    ("norm_topk_prob", "route_norm"),
    ("routed_scaling_factor", "route_scale"),
    ("sliding_window_pattern", "global_attn_every_n_layers"),
];

/// One layer of this many sees everything.
const PERIOD: usize = 4;

/// Groups of experts where there is one, how it was trained, and what a list of layers says, too.
const NOTED: &[&str] = &[
    "global_attn_every_n_layers",
    "load_balance_coeff",
    "num_expert_groups",
    "num_limited_groups",
    "use_grouped_mm",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    if raw.windows.is_empty() {
        let window = Key("sliding_window", "attention.sliding_window");
        return Err(keys.wrong(window, "a window of the layers that rotate", "nothing"));
    }
    keys.only(Key("score_func", ""), &["sigmoid"])?;
    NOTED.iter().for_each(|key| keys.note(key));
    // GGUF takes it for granted.
    let multiplied =
        keys.dialect() == Dialect::Gguf || keys.flag(Key("mup_enabled", ""))?.unwrap_or(false);
    let usual = Usual::default();
    let (config, mut parts, count) = glm4_moe::parts(files, raw, usual)?;
    let attention = parts.attention;
    parts.attention = Box::new(move |config: &Config, layer| {
        let options = attention(config, layer);
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            output_gate: Some((Unary::Sigmoid, Bias::Never)),
            rope: options.rope.filter(|_| options.window.is_some()),
            ..options
        }
    });
    parts.normed = decoder::both(true, true);
    if multiplied {
        parts.multipliers[0] = (config.hidden as f32).sqrt();
    }
    Ok(mixtral::opened(config, parts, count))
}
