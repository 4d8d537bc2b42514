//! Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every block, whose weights are
//! made to sum to one. GGUF has it under Llama's name.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, windows};
use formats::Result;
use nn::{Bias, ExpertsOptions, MixtureOfExperts, Mlp, Pairing, Weights};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mixtral",
    name: "mixtral",
    gguf: "llama",
    class: "MixtralForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 0, 131_072, 32_000])
        .theta(1_000_000.0)
        .eps(1e-5)
        .numbers(&[("num_experts_per_tok", 2), ("num_local_experts", 8)]),
    names: &[llama::NAMES, experts::SPARSE_BLOCK],
    signs: None,
    experts: true,
    open,
};

pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    if files.keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    // Noise on scores, for training.
    files.keys.number(Key("router_jitter_noise", ""))?;
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = true;
    let parts = decoder::Parts {
        feed_forward: mixture(options),
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(opened(config, parts, options.experts))
}

/// A mixture in every block.
pub(crate) fn mixture(options: ExpertsOptions) -> decoder::FeedForward {
    Box::new(move |builder, _, i| {
        let experts = MixtureOfExperts::new(builder, &format!("blocks.{i}.mlp"), &options)?;
        Ok(Box::new(move |x| experts.forward(x)))
    })
}

/// A mixture beside one expert of width `shared` that every token goes through, in every block.
pub(crate) fn beside_one(options: ExpertsOptions, shared: usize) -> decoder::FeedForward {
    Box::new(move |builder, config, i| {
        let name = format!("blocks.{i}.mlp");
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        let (name, sizes) = (format!("{name}.shared"), [options.hidden, shared]);
        let one = Mlp::new(builder, &name, sizes, Bias::Never, config.gate)?;
        Ok(Box::new(move |x| experts.forward(x).add(&one.forward(x))))
    })
}

/// A model of these parts, whose experts are stored in any way.
pub(crate) fn opened(config: Config, parts: decoder::Parts, count: usize) -> Opened {
    let joined =
        move |_: &Config, weights: &dyn Weights, name: &str| experts::joined(weights, name, count);
    decoder::open_recipes(config, parts, joined)
}
