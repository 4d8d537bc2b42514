//! Qwen3-Next (Qwen Team 2025): gated delta nets in three of four layers, gated attention in the
//! others, and in every block a mixture of many small experts beside one that all tokens share.

use crate::files::Files;
use crate::hybrid::{self, Hybrid};
use crate::keys::Key;
use crate::qwen3_moe::{Sparse, blocks};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, qwen2_moe, qwen3};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen3-Next",
    name: "qwen3_next",
    gguf: "qwen3next",
    class: "Qwen3NextForCausalLM",
    unsaid: Unsaid::sizes([2048, 5632, 48, 16, 2, 0, 32_768, 151_936])
        .numbers(hybrid::NUMBERS)
        .numbers(&[
            ("moe_intermediate_size", 512),
            ("num_experts", 512),
            ("num_experts_per_tok", 10),
            ("shared_expert_intermediate_size", 512),
        ]),
    names: &[
        hybrid::NAMES,
        llama::NAMES,
        qwen3::NORMS,
        experts::STACKS,
        experts::SWITCHED,
        qwen2_moe::SHARED,
    ],
    signs: None,
    experts: true,
    open,
};

pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    let hybrid = Hybrid::read(files)?;
    let (sparse, config) = (Sparse::read(files)?, hybrid.config.clone());
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = files.keys.flag(Key("norm_topk_prob", ""))?.unwrap_or(true);
    let mixture = qwen2_moe::with_shared(files, options)?;
    let parts = decoder::Parts { feed_forward: blocks(sparse, mixture), ..hybrid.parts() };
    let (recipe, count) = (hybrid.recipes(), options.experts);
    Ok(decoder::open_recipes(config, parts, move |_, weights, name| {
        match experts::stacked(weights, name, count)? {
            Some(found) => Ok(Some(found)),
            None => recipe(weights, name),
        }
    }))
}
