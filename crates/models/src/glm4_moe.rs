//! GLM-4.5 and 4.6 (GLM Team 2025): part of each head rotated, and behind the first dense blocks a
//! mixture whose experts are chosen by corrected odds in the best groups, beside one that every
//! token goes through.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, decoder, deepseek, experts, llama, mixtral, qwen_vl, qwen3};
use formats::Result;
use formats::gguf::MetadataValue;
use nn::{AttentionOptions, Bias, ExpertsOptions, GroupLimit, Odds, QkNorm};
use ops::group_limit::MOST_GROUPS;

/// GGUF's other name for the norm in front of the feed-forward.
pub(crate) const NORMS: &[Row] = &[(
    "blocks.{}.mlp_norm",
    "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_attention_norm",
)];

/// The correction of the router's odds, and the expert that every token goes through.
pub(crate) const NAMES: &[Row] = &[
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.mlp.gate.e_score_correction_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.mlp.shared_experts.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    (
        "blocks.{}.mlp.shared.up",
        "model.layers.{}.mlp.shared_experts.up_proj",
        "blk.{}.ffn_up_shexp",
    ),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.mlp.shared_experts.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GLM-4.5 and 4.6",
    name: "glm4_moe",
    gguf: "glm4moe",
    class: "Glm4MoeForCausalLM",
    unsaid: Unsaid::sizes([4096, 10_944, 46, 96, 8, 0, 131_072, 151_552])
        .eps(1e-5)
        .numbers(NUMBERS),
    names: &[NORMS, NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// GLM-4.5V and GLM-4.6V (GLM Team 2025), their decoder of text: positions in three axes, which a text
/// has alike.
pub(crate) const VISION: Architecture = Architecture {
    title: "GLM-4.5V and GLM-4.6V, their text",
    name: "glm4v_moe",
    gguf: "",
    class: "Glm4vMoeForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 10_944, 46, 96, 8, 0, 65_536, 151_424]).eps(1e-5).numbers(NUMBERS),
    open: |files| {
        qwen_vl::note_tower(files)?;
        let mut raw = Raw::read(files)?;
        raw.turns_part(files, 0.5)?;
        guesses(files, &mut raw)?;
        files.keys.without_head_norms("use_qk_norm")?;
        opened(files, raw, false, Usual::default())
    },
    ..ARCHITECTURE
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("moe_intermediate_size", 1408),
    ("n_routed_experts", 128),
    ("num_experts_per_tok", 8),
];

const DENSE: Key = Key("first_k_dense_replace", "leading_dense_block_count");
const FACTOR: Key = Key("routed_scaling_factor", "expert_weights_scale");

/// GGUF's number of the logistic function.
const LOGISTIC: u32 = 2;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    // Half of each head, where nothing is said.
    raw.turns_part(files, 0.5)?;
    guesses(files, &mut raw)?;
    // GGUF does not say it: the norms are there or not.
    let normed = match hugging_face {
        true => keys.flag("use_qk_norm")?.unwrap_or(false),
        false => files.names.find("blocks.0.attention.q_norm")?.is_some(),
    };
    opened(files, raw, normed, Usual::default())
}

/// Defaults of keys that configurations leave out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usual {
    /// Whether the odds of the chosen experts are made to sum to one.
    pub(crate) normalised: bool,
    /// Whether the output of attention has a bias where q, k and v have some.
    pub(crate) output_bias: bool,
    /// The factor on the odds of the chosen experts.
    pub(crate) scale: f64,
}

impl Default for Usual {
    fn default() -> Usual {
        Usual { normalised: true, output_bias: false, scale: 1.0 }
    }
}

/// A model of such mixtures behind the first dense blocks, with norms of each head if it is
/// `normed`.
///
/// # Errors
/// A key that is of another type or out of range.
pub(crate) fn opened(files: &Files<'_>, raw: Raw, normed: bool, usual: Usual) -> Result<Opened> {
    let (config, mut parts, count) = parts(files, raw, usual)?;
    if normed {
        let attention = parts.attention;
        parts.attention = Box::new(move |config: &Config, layer| AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            ..attention(config, layer)
        });
    }
    Ok(mixtral::opened(config, parts, count))
}

/// The configuration, the parts of such a model without norms of heads, and its number of experts.
///
/// # Errors
/// A key that is of another type or out of range.
pub(crate) fn parts(
    files: &Files<'_>,
    raw: Raw,
    usual: Usual,
) -> Result<(Config, decoder::Parts, usize)> {
    let keys = &files.keys;
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let listed = deepseek::listed(files, config.layers)?;
    let dense = deepseek::counted(files, DENSE, listed.is_some())?;
    let counted = dense.is_some();
    let first = dense.map_or(Ok(0), |dense| dense.within(0..=LAYERS))?;
    // Where a GGUF file does not count them, they are those without a router.
    let told = keys.dialect() == Dialect::HuggingFace || counted;
    let routed = |i: usize| files.names.find(&format!("blocks.{i}.mlp.router"));
    let dense: Vec<bool> = match listed {
        Some(listed) => listed,
        None if told => (0..config.layers).map(|i| i < first).collect(),
        None => (0..config.layers).map(|i| Ok(routed(i)?.is_none())).collect::<Result<_>>()?,
    };
    let leading = dense.iter().take_while(|dense| **dense).count();
    keys.state(DENSE, Some(MetadataValue::U32(leading as u32)));
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let options = limited(files, options, usual.normalised, usual.scale)?;
    let shared = keys.size(Key("n_shared_experts", "expert_shared_count"))?;
    let shared = options.feed_forward * shared.map_or(Ok(1), |shared| shared.within(1..=64))?;
    let own = keys.size(Key("shared_expert_intermediate_size", ""))?;
    let shared = own.map_or(Ok(shared), |width| width.within(1..=1 << 24))?;
    const WIDTH: Key = Key("", "expert_shared_feed_forward_length");
    keys.state(WIDTH, Some(MetadataValue::U32(shared as u32)));
    let shared = keys.size(WIDTH)?.map_or(Ok(shared), |width| width.within(1..=1 << 24))?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: if usual.output_bias { bias } else { Bias::Never },
        ..config.attention(layer)
    };
    let mixture = mixtral::beside_one(options, shared);
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| match dense[i] {
        true => decoder::gated(builder, config, i, Bias::Never),
        false => mixture(builder, config, i),
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    Ok((config, parts, options.experts))
}

/// Further blocks, which guess tokens ahead: GGUF counts theirs among the blocks.
pub(crate) fn guesses(files: &Files<'_>, raw: &mut Raw) -> Result<()> {
    files.keys.note("num_nextn_predict_layers");
    files.keys.note("num_mtp_layers");
    if let Some(guessing) = files.keys.size(Key("", "nextn_predict_layers"))? {
        raw.layers.value -= guessing.within(0..=raw.layers.value.saturating_sub(1))?;
    }
    Ok(())
}

/// A mixture whose experts are chosen by the logistic function of their scores and a correction,
/// among the experts of the best groups; `normalised` where nothing is said, and odds multiplied
/// with `scale` where `config.json` says nothing.
///
/// # Errors
/// Groups that the experts do not make, and other odds, by key.
pub(crate) fn limited(
    files: &Files<'_>,
    mut options: ExpertsOptions,
    normalised: bool,
    scale: f64,
) -> Result<ExpertsOptions> {
    const GROUPS: Key = Key("n_group", "expert_group_count");
    let keys = &files.keys;
    let groups = keys.size(GROUPS)?;
    let count = groups.as_ref().map_or(Ok(1), |groups| groups.clone().within(1..=MOST_GROUPS))?;
    let size = options.experts / count;
    if let Some(groups) = groups.filter(|_| size * count < options.experts || count > 1 && size < 2)
    {
        let expected = format!("groups of two or more that divide {} experts", options.experts);
        return Err(groups.wrong(expected, count));
    }
    let least = options.routing.used.div_ceil(size);
    const STAY: Key = Key("topk_group", "expert_group_used_count");
    // Classes have one where nothing is said.
    let usual = if keys.dialect() == Dialect::HuggingFace { 1 } else { count };
    let stay = keys.size(STAY)?.unwrap_or_else(|| keys.stated(STAY, usual));
    let stay = stay.within(least..=count)?;
    keys.state(STAY, Some(MetadataValue::U32(stay as u32)));
    let scale = if keys.dialect() == Dialect::HuggingFace { scale } else { 1.0 };
    let scale = keys.number_or(FACTOR, scale)?;
    // llama.cpp ends where a file of some of these models does not state it.
    const ODDS: Key = Key("", "expert_gating_func");
    keys.state(ODDS, Some(MetadataValue::U32(LOGISTIC)));
    if let Some(odds) = keys.size(ODDS)?.filter(|odds| odds.value != LOGISTIC as usize) {
        let expected = format!("{LOGISTIC}, the logistic function");
        return Err(odds.wrong(expected, odds.value));
    }
    if keys.dialect() == Dialect::HuggingFace {
        let unsaid = normalised && !keys.is_null("norm_topk_prob"); // A null is no.
        options.routing.normalised = keys.flag("norm_topk_prob")?.unwrap_or(unsaid);
    }
    options.routing.odds = Odds::Sigmoid;
    options.routing.scale = scale.positive()? as f32;
    let used = options.routing.used;
    options.limit = Some(GroupLimit { used, groups: count, groups_used: stay, softmax: false });
    Ok(options)
}
