//! Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and a window on the upper
//! layers where the configuration switches it on.

use crate::config::Raw;
use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Bias};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen2 and Qwen2.5",
    name: "qwen2",
    gguf: "qwen2",
    class: "Qwen2ForCausalLM",
    unsaid: Unsaid::sizes([4096, 22_016, 32, 32, 32, 4096, 32_768, 151_936]),
    names: &[llama::NAMES],
    signs: Some(&["blocks.0.attention.q", "blocks.0.attention.q.bias"]),
    experts: false,
    open,
};

pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_qwen(files, &raw.layers)?;
    const CHUNKS: &str = "dual_chunk_attention_config";
    if files.keys.get(CHUNKS).is_some() {
        let why = "attention is not in chunks here, as it is not in Transformers: contexts beyond \
            the trained one are read as they stand";
        raw.warnings.push(format!("{}: {why}", files.keys.place(CHUNKS)));
    }
    Ok(decoder::open(raw.check()?, Bias::Never, |config, layer| AttentionOptions {
        qkv_bias: Bias::Always,
        ..config.attention(layer)
    }))
}
