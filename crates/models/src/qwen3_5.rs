//! Qwen3.5 (Qwen Team 2026), its text: gated delta nets in three of four layers, gated attention in
//! the others, dense feed-forwards.

use crate::files::Files;
use crate::hybrid::{self, Hybrid};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, qwen3};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen3.5, its text",
    name: "qwen3_5",
    gguf: "qwen35",
    class: "Qwen3_5ForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 12_288, 32, 16, 4, 0, 32_768, 248_320]).numbers(hybrid::NUMBERS),
    names: &[hybrid::NAMES, llama::NAMES, qwen3::NORMS],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    // A list of blocks without experts: none has them.
    files.keys.note("mlp_only_layers");
    let hybrid = Hybrid::read(files)?;
    let (parts, recipe) = (hybrid.parts(), hybrid.recipes());
    Ok(decoder::open_recipes(hybrid.config, parts, move |_, weights, name| recipe(weights, name)))
}
