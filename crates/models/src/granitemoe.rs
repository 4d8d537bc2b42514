//! Granite 3's mixtures (IBM 2024): Granite with a mixture of experts in every block, normalised
//! among the chosen, beside one that every token goes through in some models.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, granite, llama, phi3, windows};
use formats::Result;
use nn::{Bias, Builder, ExpertsOptions, MixtureOfExperts, Mlp, Stored, Weights};

/// The router, the stacks of experts, and the expert that every token goes through.
pub(crate) const NAMES: &[Row] = &[
    (
        "blocks.{}.mlp.router",
        "model.layers.{}.block_sparse_moe.router.layer",
        "blk.{}.ffn_gate_inp",
    ),
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.block_sparse_moe.input_linear", ""),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.block_sparse_moe.output_linear",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.shared.gate_up", "model.layers.{}.shared_mlp.input_linear", ""),
    ("blocks.{}.mlp.shared.gate", "", "blk.{}.ffn_gate_shexp"),
    ("blocks.{}.mlp.shared.up", "", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.shared_mlp.output_linear",
        "blk.{}.ffn_down_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Granite 3, mixtures",
    name: "granitemoe",
    gguf: "granitemoe",
    class: "GraniteMoeForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 32_000])
        .numbers(&[("num_experts_per_tok", 2), ("num_local_experts", 8)]),
    names: &[NAMES, llama::NAMES, experts::SPARSE_BLOCK],
    signs: None,
    experts: true,
    open,
};

/// The same with one expert that every token goes through.
pub(crate) const SHARED: Architecture = Architecture {
    title: "Granite 3, mixtures with a shared expert",
    name: "granitemoeshared",
    class: "GraniteMoeSharedForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 32_000])
        .numbers(&[("num_experts_per_tok", 2), ("num_local_experts", 8)]),
    ..ARCHITECTURE
};

fn open(files: &Files<'_>) -> Result<Opened> {
    const SHARED: Key = Key("shared_intermediate_size", "expert_shared_feed_forward_length");
    let raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    let shared = files.keys.size(SHARED)?.filter(|width| width.value > 0);
    let shared = shared.map(|width| width.within(1..=1 << 20)).transpose()?;
    opened(files, granite::read(files, raw)?, shared, |_, _| Ok(None))
}

/// A model with a mixture in every block, and the expert of the width `shared` beside it; `change`
/// gives further weights that are made of those that are stored.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn opened(
    files: &Files<'_>,
    granite::Open { config, parts }: granite::Open,
    shared: Option<usize>,
    change: impl Fn(&dyn Weights, &str) -> Result<Option<Stored>> + 'static,
) -> Result<Opened> {
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = true;
    let parts = decoder::Parts { feed_forward: feed_forward(options, shared), ..parts };
    let count = options.experts;
    let stored =
        move |config: &Config, weights: &dyn Weights, name: &str| match change(weights, name)? {
            Some(made) => Ok(Some(made)),
            None => part(weights, name, config.hidden, count, shared),
        };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// A mixture, and the expert of the width `shared` beside it.
fn feed_forward(options: ExpertsOptions, shared: Option<usize>) -> decoder::FeedForward {
    Box::new(move |builder: &Builder<'_>, config, i| {
        let (name, hidden) = (format!("blocks.{i}.mlp"), options.hidden);
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        let name = format!("{name}.shared");
        let one = |width| Mlp::new(builder, &name, [hidden, width], Bias::Never, config.gate);
        let one = shared.map(one).transpose()?;
        Ok(Box::new(move |x| match &one {
            Some(one) => experts.forward(x).add(&one.forward(x)),
            None => experts.forward(x),
        }))
    })
}

/// The weight `name`, where it is part of another: checkpoints have gates on top of ups.
fn part(
    weights: &dyn Weights,
    name: &str,
    hidden: usize,
    count: usize,
    shared: Option<usize>,
) -> Result<Option<Stored>> {
    if let (Some(width), Some((stem, part))) = (shared, name.rsplit_once(".shared.")) {
        let start = match part {
            "gate" => 0,
            "up" => width,
            _ => return Ok(None),
        };
        let fused = format!("{stem}.shared.gate_up");
        return phi3::rows(weights, &fused, &[2 * width, hidden], start, width);
    }
    experts::stacked(weights, name, count)
}
