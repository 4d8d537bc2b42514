//! Seed-OSS (ByteDance 2025): Llama with biases on q, k and v.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, glm4_moe, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Bias};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Seed-OSS",
    name: "seed_oss",
    gguf: "seed_oss",
    class: "SeedOssForCausalLM",
    unsaid: Unsaid::sizes([4096, 27_648, 64, 80, 8, 0, 524_288, 155_136]),
    names: &[glm4_moe::NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    // Dropped in training.
    keys.number(Key("residual_dropout", ""))?;
    let qkv_bias = match (keys.dialect(), keys.flag(Key("attention_bias", ""))?) {
        (Dialect::HuggingFace, None | Some(true)) => Bias::Always,
        _ => Bias::IfStored,
    };
    let (output_bias, mlp_bias) = (files.bias("attention_out_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp_bias, move |config, layer| AttentionOptions {
        qkv_bias,
        output_bias,
        ..config.attention(layer)
    }))
}
