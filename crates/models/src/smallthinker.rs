//! SmallThinker (Song et al. 2025): Llama with a mixture in every block, whose gates let pass what is
//! positive, and whose router reads the block's own input. Layers within a window rotate, the others
//! do not.

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key, Keys};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mixtral};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, ExpertsOptions, Gate, MixtureOfExperts, Odds, Unary};

const NAMES: &[Row] = &[
    (
        "blocks.{}.mlp.router",
        "model.layers.{}.block_sparse_moe.primary_router",
        "blk.{}.ffn_gate_inp",
    ),
    ("blocks.{}.mlp.experts.{}.gate", "model.layers.{}.block_sparse_moe.experts.{}.gate", ""),
    ("blocks.{}.mlp.experts.{}.up", "model.layers.{}.block_sparse_moe.experts.{}.up", ""),
    ("blocks.{}.mlp.experts.{}.down", "model.layers.{}.block_sparse_moe.experts.{}.down", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "SmallThinker",
    name: "smallthinker",
    gguf: "smallthinker",
    class: "SmallThinkerForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES, llama::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Names of its own for numbers of experts.
const OWN: &[(&str, &str)] = &[
    ("num_experts", "moe_num_primary_experts"),
    ("num_experts_per_tok", "moe_num_active_primary_experts"),
    ("moe_intermediate_size", "moe_ffn_hidden_size"),
];

/// In GGUF the first layer of so many has no window, and does not rotate.
const PERIOD: usize = 4;
const WINDOW: Key = Key("sliding_window_size", "attention.sliding_window");
const GATING: Key = Key("", "expert_gating_func");
const SOFTMAX: usize = 1;
const SIGMOID: u32 = 2;

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_silu(files)?;
    check(keys)?;
    let layers = raw.layers.value.min(LAYERS);
    let window = keys.size(WINDOW)?.filter(|window| window.value > 0);
    let window = window.map(|window| window.within(1..=LIMIT)).transpose()?;
    let (local, turned) = match keys.dialect() {
        Dialect::Gguf => {
            keys.note("attention.sliding_window_pattern");
            let of_period = |i: usize| window.is_some() && i.is_multiple_of(PERIOD);
            let local: Vec<bool> = (0..layers).map(|i| window.is_some() && !of_period(i)).collect();
            (local, (0..layers).map(|i| !of_period(i)).collect())
        }
        Dialect::HuggingFace => {
            let local = layout(keys, "sliding_window_layout", layers, false)?;
            (local, layout(keys, "rope_layout", layers, true)?)
        }
    };
    raw.windows = local.into_iter().map(|local| window.filter(|_| local)).collect();
    let config = raw.check()?;
    let options = mixture(files, &config)?;
    let attention = move |config: &Config, layer: usize| {
        let options = config.attention(layer);
        let turns = turned.get(layer).copied().unwrap_or(true);
        AttentionOptions { rope: options.rope.filter(|_| turns), ..options }
    };
    let behind: decoder::MakeBehind = Box::new(move |builder, config, i| {
        let norm = decoder::rms_norm(builder, &format!("blocks.{i}.mlp_norm"), config)?;
        let experts = MixtureOfExperts::new(builder, &format!("blocks.{i}.mlp"), &options)?;
        Ok(Box::new(move |input, x| experts.forward_routed(&norm(x), input)))
    });
    let parts = decoder::Parts {
        holds: Box::new(|_| [true, false]),
        behind: Some(behind),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(mixtral::opened(config, parts, options.experts))
}

/// The mixture's numbers: odds are those of the chosen experts, which sum to one.
fn mixture(files: &Files<'_>, config: &Config) -> Result<ExpertsOptions> {
    let keys = &files.keys;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    let softmax = match keys.dialect() {
        Dialect::HuggingFace => keys.flag(Key("moe_primary_router_apply_softmax", ""))?,
        Dialect::Gguf => keys.size(GATING)?.map(|gating| gating.value == SOFTMAX),
    };
    let softmax = softmax.unwrap_or(false);
    options.routing.odds = if softmax { Odds::Softmax } else { Odds::Sigmoid };
    keys.state(GATING, Some(MetadataValue::U32(if softmax { SOFTMAX as u32 } else { SIGMOID })));
    options.routing.normalised = true;
    options.gate = Gate::Plain(Unary::Relu);
    Ok(options)
}

/// Whether each layer is of a kind, by a list of zeros and ones.
fn layout(keys: &Keys<'_>, key: &'static str, layers: usize, usual: bool) -> Result<Vec<bool>> {
    let Some(list) = keys.numbers(key)? else { return Ok(vec![usual; layers]) };
    if list.len() != layers || list.iter().any(|n| *n != 0.0 && *n != 1.0) {
        let expected = format!("0 or 1 for each of {layers} layers");
        return Err(keys.wrong(key, expected, format!("{} numbers", list.len())));
    }
    Ok(list.into_iter().map(|n| n == 1.0).collect())
}

/// Refuses what configurations could say and no published model has.
fn check(keys: &Keys<'_>) -> Result<()> {
    for key in
        ["model_name", "sliding_window", "sliding_window_pattern", "moe_secondary_expert_size"]
    {
        keys.note(key);
    }
    let flags = [("moe_enable_early_router", false), ("moe_enable_secondary_experts", true)];
    for (key, refused) in flags.into_iter().chain([("moe_shared_primary_router", true)]) {
        if keys.flag(Key(key, ""))? == Some(refused) {
            let expected = format!("{}, as of published models", !refused);
            return Err(keys.wrong(key, expected, refused).of(ErrorKind::Unsupported));
        }
    }
    const MIXED: &str = "moe_layer_layout";
    if let Some(list) = keys.numbers(MIXED)?
        && list.iter().any(|n| *n != 1.0)
    {
        let error = keys.wrong(MIXED, "1 for every layer, as of published models", "another");
        return Err(error.of(ErrorKind::Unsupported));
    }
    Ok(())
}
