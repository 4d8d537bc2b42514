//! Helium (Kyutai 2025): Llama whose heads rotate in adjacent pairs everywhere.

use crate::config::{RMS_EPS, Raw};
use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama};
use formats::Result;
use nn::{AttentionOptions, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Helium",
    name: "helium",
    gguf: "",
    class: "HeliumForCausalLM",
    unsaid: Unsaid::sizes([2560, 7040, 24, 20, 20, 0, 4096, 48_000])
        .theta(100_000.0)
        .numbers(&[("head_dim", 128)])
        .eps(1e-8),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    raw.pairing = Pairing::Adjacent;
    let (qkv_bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp_bias, move |config, layer| AttentionOptions {
        qkv_bias,
        ..config.attention(layer)
    }))
}
