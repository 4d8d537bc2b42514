//! Ministral (Mistral AI 2024): Mistral whose layers attend within a window or to everything, as a
//! list says.

use crate::{Architecture, llama, mistral};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Ministral",
    name: "ministral",
    gguf: "llama",
    class: "MinistralForCausalLM",
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open: mistral::open,
};
