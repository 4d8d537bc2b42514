//! Phi-3.5-MoE (Abdin et al. 2024): layer norms, biases on attention and head, and two experts for
//! each token, each weighted among the experts whose scores are near its own (SparseMixer).

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, windows};
use formats::{ErrorKind, Result};
use nn::{Bias, Builder, Odds};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Phi-3.5-MoE",
    name: "phimoe",
    gguf: "phimoe",
    class: "PhimoeForCausalLM",
    unsaid: Unsaid::sizes([4096, 6400, 32, 32, 8, 0, 131_072, 32_064])
        .theta(1_000_000.0)
        .eps(1e-5)
        .numbers(&[("num_experts_per_tok", 2), ("num_local_experts", 16)]),
    names: &[llama::NAMES, experts::SPARSE_BLOCK, FACTORS],
    signs: None,
    experts: true,
    open,
};

/// The factors of LongRoPE in GGUF.
pub(crate) const FACTORS: &[crate::names::Row] = &[
    ("rope_factors_long", "rope_factors_long", "rope_factors_long"),
    ("rope_factors_short", "rope_factors_short", "rope_factors_short"),
];

/// Experts that a token goes through: odds are made for no other number.
const EACH: usize = 2;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    let (bias, head_bias) = (files.bias("attention_bias")?, files.bias("lm_head_bias")?);
    let jitter = keys.number_or(Key("router_jitter_noise", ""), 0.01)?.positive()? as f32;
    // Noise on what the router reads, for training.
    keys.number(Key("input_jitter_noise", ""))?;
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    if options.routing.used != EACH {
        let used = Key("num_experts_per_tok", "expert_used_count");
        let error = keys.wrong(used, EACH, options.routing.used);
        return Err(error.of(ErrorKind::Unsupported));
    }
    options.routing.odds = Odds::Near { jitter };
    options.routing.normalised = false;
    let parts = decoder::Parts {
        feed_forward: mixtral::mixture(options),
        norm,
        head_bias,
        ..decoder::Parts::new(Bias::Never, decoder::biased(bias))
    };
    Ok(mixtral::opened(config, parts, options.experts))
}

/// A layer norm with a bias.
pub(crate) fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<decoder::Layer> {
    decoder::layer_norm(builder, name, config, Bias::Always)
}
