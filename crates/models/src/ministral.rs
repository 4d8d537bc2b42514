//! Ministral (Mistral AI 2024): Mistral whose layers attend within a window or to everything, as a
//! list says.

use crate::unsaid::Unsaid;
use crate::{Architecture, llama, mistral};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Ministral",
    name: "ministral",
    gguf: "llama",
    class: "MinistralForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 4096, 131_072, 32_000]),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open: mistral::open,
};
