//! Orion (OrionStar 2024): Llama with layer norms.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, phimoe, xverse};
use formats::Result;
use nn::Bias;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Orion",
    name: "orion",
    gguf: "orion",
    class: "OrionForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    xverse::state_layout(files);
    let raw = Raw::read_normed(files, Key("rms_norm_eps", "attention.layer_norm_epsilon"))?;
    let parts = decoder::Parts {
        norm: phimoe::norm,
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}
