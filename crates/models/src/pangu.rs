//! openPangu-Embedded (Huawei 2025): Llama with biases of attention.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama};
use formats::Result;
use nn::Bias;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "openPangu-Embedded",
    name: "PanguEmbedded",
    gguf: "pangu-embedded",
    class: "PanguEmbeddedForCausalLM",
    unsaid: Unsaid::sizes([4096, 12_800, 34, 32, 8, 0, 32_768, 153_376])
        .theta(16_000_000.0)
        .eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let raw = Raw::read(files)?;
    let bias = match (files.keys.dialect(), files.keys.flag(Key("bias", ""))?) {
        (Dialect::Gguf, _) => Bias::IfStored,
        (_, Some(false)) => Bias::Never,
        _ => Bias::Always,
    };
    Ok(decoder::open(raw.check()?, Bias::Never, decoder::biased(bias)))
}
