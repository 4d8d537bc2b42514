//! DeepSeekMoE (Dai et al. 2024), the first DeepSeek mixture: Llama's attention, and DeepSeek-V2's
//! mixture, whose odds are among all experts.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, deepseek, experts, glm4_moe, llama};
use formats::{ErrorKind, Result};
use nn::Pairing;

/// The name in folders and in GGUF.
pub(crate) const NAME: &str = "deepseek";

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "DeepSeekMoE",
    name: NAME,
    gguf: NAME,
    class: "DeepseekForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    if keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    if keys.flag(Key("attention_bias", ""))? == Some(true) {
        let error = keys.wrong("attention_bias", "false: this architecture has none", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let attention: decoder::Mixer = Box::new(|_, _, _| Ok(None));
    deepseek::opened(files, raw.check()?, attention, 1.0, |_, _| Ok(None))
}
