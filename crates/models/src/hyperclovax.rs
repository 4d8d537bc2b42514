//! HyperCLOVA X SEED Think (NAVER 2025): Granite with norms behind sublayers too, and logits that
//! are multiplied, not divided.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Config, Opened, decoder, granite, llama, windows};
use formats::Result;
use nn::AttentionOptions;

const NORMS: &[Row] = &[
    ("blocks.{}.after_attention_norm", "model.layers.{}.post_norm1", ""),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_norm2", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "HyperCLOVA X SEED Think",
    name: "hyperclovax",
    gguf: "",
    class: "HyperCLOVAXForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 32_000]),
    names: &[NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    let behind = keys.flag(Key("use_post_norm", ""))?.unwrap_or(true);
    let logits = keys.number_or(Key("logits_scaling", ""), 1.0)?.positive()? as f32;
    let usual = keys.number(Key("attention_multiplier", ""))?.is_none();
    let granite::Open { config, mut parts } = granite::read(files, raw)?;
    parts.normed = decoder::both(true, behind);
    parts.multipliers[2] = logits;
    let attention = parts.attention;
    parts.attention = Box::new(move |config: &Config, layer| {
        let options = attention(config, layer);
        AttentionOptions { scale: options.scale.filter(|_| !usual), ..options }
    });
    Ok(decoder::open_parts(config, parts))
}
