//! Flint (Recursive 2026): Qwen3-MoE with sinks, windows in the layers that rotate and none in those
//! that do not, and a mixture whose experts are chosen by odds of each alone, beside one that every
//! token goes through.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::qwen3_moe::{Sparse, blocks};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, qwen2_moe, qwen3, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, Odds, QkNorm, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.sinks", "model.layers.{}.self_attn.softmax_offset!", ""),
    // As Transformers names them.
    ("blocks.{}.attention.sinks", "model.layers.{}.self_attn.sinks!", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Flint",
    name: "flint",
    gguf: "",
    class: "FlintForCausalLM",
    unsaid: Unsaid::sizes([2048, 6144, 49, 32, 4, 513, 262_144, 150_144]).numbers(&[
        ("head_dim", 128),
        ("moe_intermediate_size", 512),
        ("num_experts", 256),
        ("num_experts_per_tok", 6),
        ("shared_expert_intermediate_size", 1024),
    ]),
    names: &[NAMES, llama::NAMES, qwen3::NORMS, experts::STACKS, qwen2_moe::SHARED],
    signs: None,
    experts: true,
    open,
};

/// Where nothing is said, the blocks without experts.
const DENSE: &[f32] = &[0.0, 1.0];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_silu(files)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    if keys.dialect() == Dialect::HuggingFace && keys.get(Key("layer_types", "")).is_none() {
        // The first two layers see everything, one of four behind them, and the last.
        let last = raw.layers.within(1..=LAYERS)? - 1;
        let whole = |i: usize| i < 2 || i % 4 == 1 || i == last;
        let windows = raw.windows.iter_mut().enumerate().filter(|(i, _)| whole(*i));
        windows.for_each(|(_, window)| *window = None);
    }
    let sparse = Sparse::read_or(files, DENSE)?;
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.odds = Odds::Sigmoid;
    options.routing.normalised = keys.flag(Key("norm_topk_prob", ""))?.unwrap_or(true);
    let shared = keys.needed(Key("shared_expert_intermediate_size", ""))?.within(1..=1 << 20)?;
    let attention = move |config: &Config, layer| {
        let options = decoder::biased(bias)(config, layer);
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            sinks: true,
            rope: options.rope.filter(|_| options.window.is_some()),
            ..options
        }
    };
    let parts = decoder::Parts {
        feed_forward: blocks(sparse, mixtral::beside_one(options, shared)),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let count = options.experts;
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name| {
        experts::stacked(weights, name, count)
    }))
}
