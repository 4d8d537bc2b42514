//! Granite 3 (IBM 2024): Llama with numbers that embeddings, scores, the results of sublayers, and
//! logits are multiplied with.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Granite 3",
    name: "granite",
    gguf: "granite",
    class: "GraniteForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 32_000]),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    let Open { config, parts } = read(files, raw)?;
    Ok(decoder::open_parts(config, parts))
}

/// Parts that the family's models share.
pub(crate) struct Open {
    pub(crate) config: Config,
    /// With a dense feed-forward.
    pub(crate) parts: decoder::Parts,
}

/// Reads what the family's models share.
///
/// # Errors
/// A key that is of another type or out of range.
pub(crate) fn read(files: &Files<'_>, mut raw: Raw) -> Result<Open> {
    let keys = &files.keys;
    if keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let number = |key: Key| -> Result<f32> { Ok(keys.number_or(key, 1.0)?.positive()? as f32) };
    let embedding = number(Key("embedding_multiplier", "embedding_scale"))?;
    let scale = number(Key("attention_multiplier", "attention.scale"))?;
    let residual = number(Key("residual_multiplier", "residual_scale"))?;
    let logits = number(Key("logits_scaling", "logit_scale"))?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        scale: Some(scale),
        ..config.attention(layer)
    };
    let multipliers = [embedding, residual, 1.0 / logits];
    let parts = decoder::Parts { multipliers, ..decoder::Parts::new(mlp_bias, attention) };
    Ok(Open { config: raw.check()?, parts })
}
