//! Step-3.5-Flash and Step-3.7-Flash (StepFun 2026), their text: norms of `1 + w` and of each head, a
//! gate of each head on what attention gives; windows in three layers of four, which have heads and a
//! rotation of their own; and behind the dense blocks a mixture whose experts are chosen by corrected
//! odds, beside one that every token goes through. What the last blocks gate lies within bounds.

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::files::Files;
use crate::glm4_moe::{self, limited};
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, decoder, experts, gemma2, lfm3, llama, qwen3, scaling, windows};
use formats::Result;
use formats::gguf::MetadataValue;
use nn::{AttentionOptions, Bias, Gate, MixtureOfExperts, Mlp, Pairing, QkNorm, Unary, Weights};

mod lists;
mod written;

pub(crate) use written::{metadata, rotation};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.g_proj", "blk.{}.attn_gate"),
    ("blocks.{}.mlp.router", "model.layers.{}.moe.gate", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.moe.router_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
    ("blocks.{}.mlp.experts.gate", "model.layers.{}.moe.gate_proj", "blk.{}.ffn_gate_exps"),
    ("blocks.{}.mlp.experts.up", "model.layers.{}.moe.up_proj", "blk.{}.ffn_up_exps"),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.moe.down_proj", "blk.{}.ffn_down_exps"),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.share_expert.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    ("blocks.{}.mlp.shared.up", "model.layers.{}.share_expert.up_proj", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.share_expert.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
    // As Transformers names its modules, after which adapters are named.
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.gate", ""),
    ("blocks.{}.mlp.shared.gate", "model.layers.{}.mlp.shared_experts.gate_proj", ""),
    ("blocks.{}.mlp.shared.up", "model.layers.{}.mlp.shared_experts.up_proj", ""),
    ("blocks.{}.mlp.shared.down", "model.layers.{}.mlp.shared_experts.down_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Step-3.5-Flash and Step-3.7-Flash, their text",
    name: "step3p5",
    gguf: "step35",
    class: "Step3p7ForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 11_264, 45, 64, 8, 0, 128_000, 128_815])
        .numbers(NUMBERS)
        .eps(1e-5),
    names: &[NAMES, llama::NAMES, qwen3::NORMS],
    signs: None,
    experts: true,
    open,
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("head_dim", 128),
    ("moe_intermediate_size", 1280),
    ("n_routed_experts", 288),
    ("num_experts_per_tok", 8),
];

/// Names of its own for what others have, too.
const OWN: &[(&str, &str)] = &[
    ("norm_topk_prob", "norm_expert_weight"),
    ("num_experts_per_tok", "moe_top_k"),
    ("num_key_value_heads", "num_attention_groups"),
    ("routed_scaling_factor", "moe_router_scaling_factor"),
    ("shared_expert_intermediate_size", "share_expert_dim"),
    ("shared_expert_intermediate_size", "share_expert_dims"),
];

/// What is so in all published models, how they compute it, and what lists of layers say, too.
const NOTED: &[&str] = &[
    "att_impl_type",
    "max_seq_len",
    "moe_every_n_layer",
    "moe_layer_offset",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
    "need_fp32_gate",
    "use_head_wise_attn_gate",
    "use_mfa",
    "use_moe",
    "use_moe_router_bias",
    "use_qk_norm",
    "use_rope_layers",
    "yarn_only_types",
    "zero_centered",
    // GGUF's; the routers tell the layers.
    "leading_dense_block_count",
    "moe_every_n_layers",
];

/// One layer of this many sees everything in GGUF files that list none.
const PERIOD: usize = 4;

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN).with_lists(lists::BY_LAYER);
    let keys = &files.keys;
    let gguf = keys.dialect() == Dialect::Gguf;
    let mut raw = Raw::read_silu(files)?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("moe_router_activation", ""), &["sigmoid"])?;
    let all = raw.layers.clone();
    if gguf {
        raw.windows = windows::leading(files, &all, PERIOD)?;
    }
    glm4_moe::guesses(files, &mut raw)?;
    let layers = raw.layers.within(1..=LAYERS)?;
    match gguf {
        true => raw.windows.truncate(layers),
        false => raw.windows = lists::windows(files, layers)?,
    }
    let heads = lists::heads(files, &raw, all.value)?;
    let limits = lists::LIMITS.map(|(key, _)| lists::limits(files, key, layers));
    let [of_experts, of_others] = limits;
    let (of_experts, of_others) = (of_experts?, of_others?);
    let dense = lists::dense(files, layers)?;
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    let local = rotations(files, &mut raw, width.value)?;
    let scale = match keys.number(Key("query_pre_attn_scalar", ""))? {
        Some(scalar) => Some((scalar.positive()? as f32).sqrt().recip()),
        None => None,
    };
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let loaded = raw.loaded;
    let config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &width, Pairing::Half, context)?;
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let options = limited(files, options, true, 1.0)?;
    let normalised = Some(MetadataValue::Bool(options.routing.normalised));
    keys.state(Key("norm_topk_prob", "expert_weights_norm"), normalised);
    const SHARED: Key = Key("shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    let shared = keys.size(SHARED)?.map_or(Ok(options.feed_forward), |n| n.within(1..=1 << 24))?;
    let of_layers = heads.clone();
    let attention = move |config: &Config, layer: usize| {
        let options = decoder::biased(bias)(config, layer);
        let rope = if options.window.is_some() { Some(local.clone()) } else { options.rope };
        AttentionOptions {
            heads: of_layers[layer],
            qk_norm: QkNorm::Heads(config.norm_eps),
            output_gate: Some((Unary::Sigmoid, Bias::Never)),
            scale,
            rope,
            ..options
        }
    };
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        let (name, hidden, within) = (format!("blocks.{i}.mlp"), config.hidden, of_others[i]);
        if dense[i] {
            let sizes = [hidden, config.feed_forward];
            let mlp = Mlp::new(builder, &name, sizes, mlp_bias, config.gate)?;
            let mlp = mlp.within(within);
            return Ok(Box::new(move |x| mlp.forward(x)));
        }
        let gate = of_experts[i].map_or(options.gate, |limit| Gate::Bounded { limit });
        let options = nn::ExpertsOptions { gate, ..options };
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        let (name, sizes) = (format!("{name}.shared"), [hidden, shared]);
        let one = Mlp::new(builder, &name, sizes, mlp_bias, config.gate)?;
        let one = one.within(within);
        Ok(Box::new(move |x| experts.forward(x).add(&one.forward(x))))
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    let count = options.experts;
    Ok(decoder::open_recipes(config, parts, move |config, weights: &dyn Weights, name| {
        if let Some(block) = name.strip_suffix(".attention.gate") {
            let layer = block.strip_prefix("blocks.").and_then(|layer| layer.parse().ok());
            let heads = layer.and_then(|layer: usize| heads.get(layer).copied()).unwrap_or(0);
            let found = weights.find(name)?;
            return Ok(found.map(|stored| lfm3::per_head(stored, heads, config.head_dim)));
        }
        match gemma2::norm(weights, name, !gguf)? {
            Some(norm) => Ok(Some(norm)),
            None => experts::joined(weights, name, count),
        }
    }))
}

/// Sets the rotation of layers that see everything, and gives that of layers within a window.
fn rotations(files: &Files<'_>, raw: &mut Raw, width: usize) -> Result<Rotation> {
    let keys = &files.keys;
    let kind = |kind| scaling::of_kind(files, kind, width);
    if let Some(whole) = kind("full_attention")? {
        raw.rotation = Some(whole);
    }
    let first = |within: bool| raw.windows.iter().position(|window| window.is_some() == within);
    let (whole, within) = (first(false), first(true));
    let base = |layer: Option<usize>, usual: f64| lists::number(files, "rope_theta", layer, usual);
    let part = |layer, usual| -> Result<_> {
        let part = lists::number(files, "partial_rotary_factors", layer, usual)?;
        if !(0.0..=1.0).contains(&part.value) {
            return Err(part.wrong("a part from 0 to 1", part.value));
        }
        Ok(part.map(|part| (part * width as f64) as usize))
    };
    let unstretched = || keys.stated("rope_scaling", Scaling::None);
    if keys.dialect() == Dialect::HuggingFace {
        let turned = part(whole, 1.0)?;
        if let Some(rotation) = raw.rotation.as_mut().filter(|rotation| rotation.rotary.is_none()) {
            rotation.rotary = Some(turned);
        }
        let listed = Rotation {
            theta: base(within, 10_000.0)?,
            rotary: Some(part(within, 1.0)?),
            scaling: unstretched(),
        };
        return Ok(kind("sliding_attention")?.unwrap_or(listed));
    }
    // It states what layers within windows turn, and that many factors; the others turn half.
    let rotation = raw.rotation.as_mut();
    let stated = rotation.as_ref().and_then(|rotation| rotation.rotary.clone());
    let turned = stated.unwrap_or_else(|| keys.stated("rope.dimension_count", width));
    if let Some(rotation) = rotation {
        let half = turned.clone().map(|turned| turned / 2);
        if let Scaling::Factors(factors) = &mut rotation.scaling.value {
            factors.truncate(half.value / 2);
        }
        rotation.rotary = Some(half);
    }
    let theta = keys.number_or(Key("", "rope.freq_base_swa"), 10_000.0)?;
    let rotary = keys.size(Key("", "rope.dimension_count_swa"))?.unwrap_or(turned);
    rotary.within(1..=LIMIT)?;
    Ok(Rotation { theta, rotary: Some(rotary), scaling: unstretched() })
}
