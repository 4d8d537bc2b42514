//! Lara Mini (Translated 2026): gated delta nets, attention within a window, whose layers rotate, and
//! attention to everything, whose layers do not; in every block a mixture beside one expert that every
//! token goes through.

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{
    Architecture, Opened, decoder, experts, hybrid, llama, mixtral, phi3, qwen2_moe, qwen3,
};
use formats::Result;
use nn::{AttentionOptions, Bias, DeltaNetOptions, QkNorm, Stored, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.delta.all", "model.layers.{}.linear_attn.in_proj", ""),
    // As Transformers has its rows.
    ("blocks.{}.delta.qkv", "model.layers.{}.linear_attn.in_proj_qkv", ""),
    ("blocks.{}.delta.z", "model.layers.{}.linear_attn.in_proj_z", ""),
    ("blocks.{}.delta.b", "model.layers.{}.linear_attn.in_proj_b", ""),
    ("blocks.{}.delta.a", "model.layers.{}.linear_attn.in_proj_a", ""),
    ("blocks.{}.delta.conv", "model.layers.{}.linear_attn.conv1d", ""),
    ("blocks.{}.delta.log_decay", "model.layers.{}.linear_attn.A_log!", ""),
    ("blocks.{}.delta.dt", "model.layers.{}.linear_attn.dt_bias!", ""),
    ("blocks.{}.delta.norm", "model.layers.{}.linear_attn.out_norm", ""),
    ("blocks.{}.delta.norm", "model.layers.{}.linear_attn.norm", ""),
    ("blocks.{}.delta.o", "model.layers.{}.linear_attn.out_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Lara Mini",
    name: "lara_mini",
    gguf: "",
    class: "LaraMiniForCausalLM",
    unsaid: Unsaid::sizes([1024, 0, 34, 16, 4, 512, 131_072, 151_936])
        .numbers(&[
            ("head_dim", 128),
            ("linear_conv_kernel_dim", 4),
            ("linear_key_head_dim", 128),
            ("linear_num_key_heads", 8),
            ("linear_num_value_heads", 16),
            ("linear_value_head_dim", 128),
        ])
        .numbers(&[
            ("moe_intermediate_size", 512),
            ("num_experts", 128),
            ("num_experts_per_tok", 4),
            ("shared_expert_intermediate_size", 512),
        ]),
    names: &[NAMES, llama::NAMES, qwen3::NORMS, experts::STACKS, qwen2_moe::SHARED],
    signs: None,
    experts: true,
    open,
};

/// What a layer has in front of its mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Net,
    Within,
    Whole,
}

/// The kinds of layers, over and over, where nothing is said.
const USUAL: [Kind; 5] = [Kind::Net, Kind::Within, Kind::Net, Kind::Whole, Kind::Within];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_silu(files)?;
    let kinds = kinds(files, &raw.layers)?;
    let window = keys.needed(Key("sliding_window", ""))?.within(1..=LIMIT)?;
    let within = |kind: &Kind| (*kind == Kind::Within).then_some(window);
    raw.windows = kinds.iter().map(within).collect();
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let net = hybrid::net(files, config.hidden, config.norm_eps)?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = keys.flag(Key("norm_topk_prob", ""))?.unwrap_or(true);
    let shared = keys.needed(Key("shared_expert_intermediate_size", ""))?.within(1..=1 << 20)?;
    let attention = move |config: &Config, layer| {
        let options = decoder::biased(bias)(config, layer);
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            rope: options.rope.filter(|_| options.window.is_some()),
            ..options
        }
    };
    let parts = decoder::Parts {
        mixer: hybrid::mixer(net, kinds.iter().map(|kind| *kind == Kind::Net).collect()),
        feed_forward: mixtral::beside_one(options, shared),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let count = options.experts;
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name| {
        match name.split_once(".delta.") {
            Some((block, part)) => delta(weights, block, part, &net),
            None => experts::stacked(weights, name, count),
        }
    }))
}

/// The kind of each layer.
fn kinds(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Kind>> {
    const TYPES: Key = Key("layer_types", "");
    let (keys, count) = (&files.keys, layers.within(1..=LAYERS)?);
    let Some(types) = keys.get(TYPES) else {
        return Ok(USUAL.into_iter().cycle().take(count).collect());
    };
    let one = |kind: &serde_json::Value| match kind.as_str() {
        Some("linear_attention") => Some(Kind::Net),
        Some("sliding_attention") => Some(Kind::Within),
        Some("full_attention") => Some(Kind::Whole),
        _ => None,
    };
    let all = types.as_array().and_then(|list| list.iter().map(one).collect::<Option<Vec<_>>>());
    let expected = format!("linear_, sliding_ or full_attention of {count} layers");
    all.filter(|all| all.len() == count).ok_or_else(|| keys.odd(TYPES, &expected, types))
}

/// A weight of a net, whose projections are stored in one matrix: those of queries, keys, values and
/// gates, and how they are written and forgotten.
fn delta(
    weights: &dyn Weights,
    block: &str,
    part: &str,
    net: &DeltaNetOptions,
) -> Result<Option<Stored>> {
    let (values, heads) = (net.heads * net.value_dim, net.heads);
    let mixed = 2 * net.key_heads * net.key_dim + values;
    let (start, count) = match part {
        "qkv" => (0, mixed),
        "z" => (mixed, values),
        "b" => (mixed + values, heads),
        "a" => (mixed + values + heads, heads),
        _ => return hybrid::delta(weights, block, part, net),
    };
    let shape = [mixed + values + 2 * heads, net.hidden];
    match phi3::rows(weights, &format!("{block}.delta.all"), &shape, start, count)? {
        Some(rows) => Ok(Some(rows)),
        None => weights.find(&format!("{block}.delta.{part}")),
    }
}
