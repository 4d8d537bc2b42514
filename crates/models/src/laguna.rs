//! Laguna (poolside 2026): Qwen3's attention with a gate of each head, a softplus, on what it gives;
//! windows in some layers, which have heads and a rotation of their own; and behind the dense blocks
//! a mixture whose experts are chosen by corrected odds, beside one that every token goes through.

use crate::config::{Config, LIMIT, Raw};
use crate::export::{Exported, From};
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::Scaling;
use crate::unsaid::{Numbers, Unsaid, said};
use crate::{Architecture, Opened, decoder, experts, lfm3, llama, qwen3, scaling, windows};
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use nn::{AttentionOptions, Bias, Pairing, QkNorm, Unary, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.g_proj", "blk.{}.attn_gate"),
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.mlp.experts.e_score_correction_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.mlp.shared_expert.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    ("blocks.{}.mlp.shared.up", "model.layers.{}.mlp.shared_expert.up_proj", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.mlp.shared_expert.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Laguna",
    name: "laguna",
    gguf: "laguna",
    class: "LagunaForCausalLM",
    unsaid: Unsaid::sizes([2048, 8192, 40, 48, 8, 512, 131_072, 100_352])
        .rotated(said!({
            "full_attention": { "rope_theta": 500_000.0, "partial_rotary_factor": 0.5 },
            "sliding_attention": { "rope_theta": 10_000.0, "partial_rotary_factor": 1.0 },
        }))
        .numbers(NUMBERS),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// The number of heads of each layer.
const HEADS: Key = Key("num_attention_heads_per_layer", "attention.head_count");

/// One layer of this many sees everything in GGUF files that list none.
const PERIOD: usize = 4;

const OWN: &[(&str, &str)] = &[("routed_scaling_factor", "moe_routed_scaling_factor")];

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("head_dim", 128),
    ("moe_intermediate_size", 512),
    ("shared_expert_intermediate_size", 512),
    ("num_experts", 256),
    ("num_experts_per_tok", 8),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN).with_lists(&[HEADS.1]);
    let keys = &files.keys;
    let gguf = keys.dialect() == Dialect::Gguf;
    let mut raw = Raw::read(files)?;
    // The rows of the gates say it.
    ["gating", "gating_types"].into_iter().for_each(|key| keys.note(key));
    const EARLY: &str = "moe_apply_router_weight_on_input";
    if keys.flag(Key(EARLY, ""))? == Some(true) {
        return Err(keys.wrong(EARLY, "false, as of this architecture", true));
    }
    let cap = keys.number(Key("moe_router_logit_softcapping", ""))?;
    if let Some(cap) = cap.filter(|cap| cap.value > 0.0) {
        return Err(cap.wrong("0: scores of experts that are not bounded", cap.value));
    }
    // Where no layers are listed, none has a window; but in GGUF by their numbers.
    raw.windows = match keys.get(Key("layer_types", "")) {
        Some(_) => windows::of_all(files, &raw.layers)?,
        None if gguf => windows::leading(files, &raw.layers, PERIOD)?,
        None => {
            keys.size("sliding_window")?;
            Vec::new()
        }
    };
    let layers = raw.layers.within(1..=crate::config::LAYERS)?;
    let heads = keys.of_layers(HEADS, layers)?;
    let groups = raw.kv_heads.within(1..=LIMIT)?;
    let odd = |heads: &&usize| **heads == 0 || !heads.is_multiple_of(groups);
    if let Some(odd) = heads.iter().flatten().find(odd) {
        let expected = format!("multiples of {} = {groups}", raw.kv_heads.key());
        return Err(keys.wrong(HEADS, expected, odd));
    }
    let heads = heads.unwrap_or_else(|| vec![raw.heads.value; layers]);
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    let of = |kind, base| scaling::of_kind_or(files, kind, width.value, (base, Scaling::None));
    let mut local = of("sliding_attention", 10_000.0)?;
    match gguf {
        true => {
            local.theta = keys.number_or(Key("", "rope.freq_base_swa"), 10_000.0)?;
            local.rotary = keys.size(Key("", "rope.dimension_count_swa"))?;
        }
        false => raw.rotation = Some(of("full_attention", 500_000.0)?),
    }
    let loaded = raw.loaded;
    let usual = Usual { output_bias: true, ..Usual::default() };
    // Odds are made to sum to one whatever is said.
    keys.state(Key("", "expert_weights_norm"), Some(MetadataValue::Bool(true)));
    let (config, mut parts, count) = glm4_moe::parts(files, raw, usual)?;
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &width, Pairing::Half, context)?;
    let (attention, of_layers) = (parts.attention, heads.clone());
    parts.attention = Box::new(move |config: &Config, layer| {
        let options = attention(config, layer);
        let rope = if options.window.is_some() { Some(local.clone()) } else { options.rope };
        AttentionOptions {
            heads: of_layers[layer],
            qk_norm: QkNorm::Heads(config.norm_eps),
            output_gate: Some((Unary::Softplus, Bias::Never)),
            rope,
            ..options
        }
    });
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        let Some(block) = name.strip_suffix(".attention.gate") else {
            return experts::joined(weights, name, count);
        };
        let layer = block.strip_prefix("blocks.").and_then(|layer| layer.parse().ok());
        let heads = layer.and_then(|layer: usize| heads.get(layer).copied());
        let found = weights.find(name)?;
        Ok(found.map(|stored| lfm3::per_head(stored, heads.unwrap_or(0), config.head_dim)))
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// GGUF's metadata of heads, which layers have different numbers of; none for other architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
) -> Result<Option<(&'static str, MetadataValue)>> {
    if config.architecture.name != ARCHITECTURE.name {
        return Ok(None);
    }
    let heads = files.keys.of_layers(HEADS, config.layers)?;
    let heads = heads.unwrap_or_else(|| vec![config.heads; config.layers]);
    let heads = heads.into_iter().map(|heads| heads as i32).collect();
    Ok(Some((HEADS.1, MetadataValue::Array(MetadataArray::I32(heads)))))
}

/// Gates as the folder stores them, in the place of those with a row for each element; of Step 3.5,
/// too.
///
/// # Errors
/// Tensors that cannot be found.
pub(crate) fn gates(files: &Files<'_>, config: &Config, weights: &mut [Exported]) -> Result<()> {
    if ![ARCHITECTURE.name, "step3p5"].contains(&config.architecture.name) {
        return Ok(());
    }
    for i in 0..config.layers {
        let name = format!("blk.{i}.attn_gate.weight");
        let stored = files.names.find(&format!("blocks.{i}.attention.gate"))?;
        let gate = weights.iter_mut().find(|weight| weight.name == name);
        if let (Some(gate), Some(stored)) = (gate, stored) {
            (gate.from, gate.shape) = (From::Source(stored.source), stored.shape);
        }
    }
    Ok(())
}
