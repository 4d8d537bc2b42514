//! Granite 4 (IBM 2025): Granite 3 most of whose layers are state spaces (Mamba-2), or none in some
//! models. The feed-forward is the expert that every token goes through, beside a mixture where
//! there is one.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, granite, granitemoe, llama, mamba, phi3};
use formats::Result;
use nn::Weights;

/// The feed-forward where there is no mixture.
const NAMES: &[Row] = &[
    ("blocks.{}.mlp.gate_up", "model.layers.{}.shared_mlp.input_linear", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.shared_mlp.output_linear", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Granite 4",
    name: "granitemoehybrid",
    gguf: "granitehybrid",
    class: "GraniteMoeHybridForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 32_000])
        .numbers(mamba::NUMBERS)
        .numbers(&[
            ("num_experts_per_tok", 2),
            ("num_local_experts", 8),
            ("shared_intermediate_size", 1024),
        ]),
    names: &[NAMES, granitemoe::NAMES, mamba::NAMES, llama::NAMES, experts::SPARSE_BLOCK],
    signs: None,
    experts: true,
    open,
};

/// Models without state spaces, which are Granite 3 in GGUF.
static WITHOUT: Architecture = Architecture { gguf: granite::ARCHITECTURE.gguf, ..ARCHITECTURE };

/// Keys about state spaces that no key here reads.
const NOTED: &[&str] = &[
    "init_method",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_silu(files)?;
    let layers = mamba::layers(files, &raw.layers)?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("normalization_function", ""), &["rmsnorm"])?;
    keys.only(Key("position_embedding_type", ""), &["rope", "nope"])?;
    let rotates = match keys.dialect() {
        Dialect::HuggingFace => keys.text(Key("position_embedding_type", ""))? == Some("rope"),
        Dialect::Gguf => keys.flag(Key("", "rope.scaling.finetuned"))?.unwrap_or(true),
    };
    if !rotates {
        raw.rotation = None;
    }
    // Granite 3 has no such number in GGUF.
    let some = layers.contains(&true);
    let shared = if some { "expert_shared_feed_forward_length" } else { "" };
    let shared = Key("shared_intermediate_size", shared);
    let shared = match keys.dialect() {
        Dialect::HuggingFace => keys.needed(shared)?,
        Dialect::Gguf => keys.size(shared)?.unwrap_or_else(|| raw.feed_forward.clone()),
    };
    let eps = raw.norm_eps.value as f32;
    let options = some.then(|| mamba::read(files, &raw.hidden, eps)).transpose()?;
    if !some {
        raw.architecture = &WITHOUT;
    }
    let mixtures = experts::are_stated(keys)?;
    let width = shared.within(1..=1 << 20)?;
    if !mixtures {
        raw.feed_forward = shared;
    }
    let mut open = granite::read(files, raw)?;
    if let Some(options) = options {
        open.parts.mixer = mamba::mixer(options, layers);
    }
    let part = move |weights: &dyn Weights, name: &str| match &options {
        Some(options) => mamba::part(weights, name, options),
        None => Ok(None),
    };
    if mixtures {
        return granitemoe::opened(files, open, Some(width), part);
    }
    let granite::Open { config, parts } = open;
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        Ok(part(weights, name)?.or(phi3::part(config, weights, name)?))
    };
    Ok(decoder::open_recipes(config, parts, stored))
}
