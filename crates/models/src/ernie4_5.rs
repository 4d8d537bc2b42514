//! ERNIE 4.5, dense (Baidu 2025): Llama whose heads rotate in adjacent pairs everywhere.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::{Architecture, Opened, decoder, llama};
use formats::Result;
use nn::{AttentionOptions, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "ERNIE 4.5, dense",
    name: "ernie4_5",
    gguf: "ernie4_5",
    class: "Ernie4_5ForCausalLM",
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// The base where nothing is said.
const THETA: f64 = 500_000.0;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files, &["silu"])?;
    raw.pairing = Pairing::Adjacent;
    let unsaid = keys.dialect() == Dialect::HuggingFace
        && keys.get(Key("rope_theta", "")).is_none()
        && keys.get(Key("rope_parameters", "")).is_none();
    if let (Some(rotation), true) = (&mut raw.rotation, unsaid) {
        rotation.theta.value = THETA;
    }
    if let Some(by) = keys.number(Key("compression_ratio", ""))?.filter(|by| by.value != 1.0) {
        return Err(by.wrong("1: positions are not divided", by.value));
    }
    let bias = files.bias("use_bias")?;
    Ok(decoder::open(raw.check()?, bias, move |config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        ..config.attention(layer)
    }))
}
