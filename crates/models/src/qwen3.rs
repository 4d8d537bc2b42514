//! Qwen3 (Yang et al. 2025): RMS norms on every head of q and k before the rotation, and no biases.

use crate::config::Raw;
use crate::files::Files;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

/// The norms of each head.
pub(crate) const NORMS: &[Row] = &[
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen3",
    name: "qwen3",
    gguf: "qwen3",
    class: "Qwen3ForCausalLM",
    unsaid: Unsaid::sizes([4096, 22_016, 32, 32, 32, 4096, 32_768, 151_936]),
    names: &[llama::NAMES, NORMS],
    signs: Some(&[
        "blocks.0.attention.q",
        "blocks.0.attention.q_norm",
        "blocks.0.attention.k_norm",
    ]),
    experts: false,
    open,
};

pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_qwen(files, &raw.layers)?;
    opened(files, raw)
}

/// A decoder beside towers, which has no windows.
///
/// # Errors
/// A key that is missing or of another type.
pub(crate) fn open_beside(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_gguf(files, &raw.layers)?;
    opened(files, raw)
}

fn opened(files: &Files<'_>, raw: Raw) -> Result<Opened> {
    let bias = files.bias("attention_bias")?;
    Ok(decoder::open(raw.check()?, Bias::IfStored, move |config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Heads(config.norm_eps),
        ..config.attention(layer)
    }))
}
