//! GLM-4 (GLM Team 2024): a part of each head rotated in adjacent pairs, gate and up in one matrix,
//! biases on q, k and v; norms in front of each sublayer, and in the models of 2025 behind it too.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, phi3};
use formats::Result;
use nn::{AttentionOptions, Bias, Pairing};

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    (
        "blocks.{}.after_attention_norm",
        "model.layers.{}.post_self_attn_layernorm",
        "blk.{}.post_attention_norm",
    ),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_mlp_layernorm", "blk.{}.post_ffw_norm"),
];

/// The names of 2024, when there were norms in front alone, and GGUF had q, k and v in one.
const FRONT: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
];

/// GLM-4 of 2024.
pub(crate) const GLM: Architecture = Architecture {
    title: "GLM-4 of 2024",
    name: "glm",
    gguf: "chatglm",
    class: "GlmForCausalLM",
    unsaid: Unsaid::sizes([4096, 13_696, 40, 32, 2, 0, 131_072, 151_552]),
    names: &[FRONT],
    open: |files| open_normed(files, false),
    ..ARCHITECTURE
};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GLM-4 of 2025",
    name: "glm4",
    gguf: "glm4",
    class: "Glm4ForCausalLM",
    unsaid: Unsaid::sizes([4096, 13_696, 40, 32, 2, 0, 131_072, 151_552]),
    names: &[NAMES],
    signs: None,
    experts: false,
    open: |files| open_normed(files, true),
};

/// Opens a model with norms behind sublayers, or without.
fn open_normed(files: &Files<'_>, behind: bool) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files, &["silu"])?;
    raw.pairing = Pairing::Adjacent;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    // Half of each head, where nothing is said.
    raw.turns_part(files, 0.5)?;
    let stated = keys.flag(Key("attention_bias", ""))?;
    let bias = match (hugging_face, stated) {
        (true, Some(false)) => Bias::Never,
        (true, _) => Bias::Always,
        (false, _) => Bias::IfStored,
    };
    let config = raw.check()?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        ..config.attention(layer)
    };
    let parts =
        decoder::Parts { normed: (true, behind), ..decoder::Parts::new(Bias::Never, attention) };
    Ok(decoder::open_recipes(config, parts, phi3::part))
}
