//! Mistral (Jiang et al. 2023): Llama with a sliding attention window.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Dialect;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{Bias, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mistral",
    name: "mistral",
    gguf: "llama",
    class: "MistralForCausalLM",
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files, &["silu"])?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    if files.keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    Ok(decoder::open(raw.check()?, Bias::Never, |config, layer| config.attention(layer)))
}
