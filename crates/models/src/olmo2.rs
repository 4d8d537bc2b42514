//! OLMo 2 (OLMo Team 2024): Llama with norms behind sublayers in place of those in front, and norms
//! of q and k over all heads together.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::names::Row;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

const NORMS: &[Row] = &[
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    (
        "blocks.{}.after_attention_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    (
        "blocks.{}.after_mlp_norm",
        "model.layers.{}.post_feedforward_layernorm",
        "blk.{}.post_ffw_norm",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OLMo 2",
    name: "olmo2",
    gguf: "olmo2",
    class: "Olmo2ForCausalLM",
    names: &[NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let raw = Raw::read(files, &["silu"])?;
    windows::of_types(files, &raw.layers, None)?;
    let bias = files.bias("attention_bias")?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Rows(config.norm_eps),
        ..config.attention(layer)
    };
    let parts =
        decoder::Parts { normed: (false, true), ..decoder::Parts::new(Bias::Never, attention) };
    Ok(decoder::open_parts(raw.check()?, parts))
}
