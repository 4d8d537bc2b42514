//! MiMo-V2-Flash (Xiaomi 2025): values narrower than keys; windows in most layers, which have sinks,
//! twice the key/value heads and a rotation of their own; and behind the first dense block a mixture
//! whose experts are chosen by corrected odds.

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::decoder::{self, Mixer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::stated::Stated;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, deepseek, experts, glm4_moe, llama, mixtral, scaling, windows};
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use nn::{AttentionOptions, Bias, MixtureOfExperts, Pairing, SelfAttention};

const NAMES: &[Row] = &[
    (
        "blocks.{}.attention.sinks",
        "model.layers.{}.self_attn.attention_sink_bias!",
        "blk.{}.attn_sinks",
    ),
    ("blocks.{}.attention.sinks", "model.layers.{}.self_attn.sinks!", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "MiMo-V2-Flash",
    name: "mimo_v2_flash",
    gguf: "mimo2",
    class: "MiMoV2FlashForCausalLM",
    unsaid: Unsaid::sizes([4096, 16_384, 48, 64, 4, 129, 131_072, 152_576])
        .theta(5_000_000.0)
        .numbers(NUMBERS)
        .eps(1e-5),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("head_dim", 192),
    ("v_head_dim", 128),
    ("moe_intermediate_size", 2048),
    ("n_routed_experts", 256),
    ("num_experts_per_tok", 8),
];

const OWN: &[(&str, &str)] = &[("rms_norm_eps", "layernorm_epsilon")];

const KV_HEADS: Key = Key("num_key_value_heads", "attention.head_count_kv");
const VALUES: Key = Key("v_head_dim", "attention.value_length");
/// Which layers have windows: 1 for those that do.
const PATTERN: Key = Key("hybrid_layer_pattern", "attention.sliding_window_pattern");

/// The part of each head that turns.
const TURNED: f64 = 0.334;

/// What published configurations say of layers with a window beside what follows from the others.
const NOTED: &[&str] = &["attention_chunk_size", "swa_rope_theta", "sliding_window_size"];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN).with_lists(&[KV_HEADS.1]);
    let keys = &files.keys;
    let gguf = keys.dialect() == Dialect::Gguf;
    let width = keys.needed(Key("head_dim", "attention.key_length"))?;
    let mut raw = Raw::read_turned(files, width.clone())?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("scoring_func", ""), &["sigmoid"])?;
    keys.only(Key("topk_method", ""), &["noaux_tc"])?;
    let counted = raw.layers.within(1..=LAYERS)?;
    raw.windows = of_layers(files, &raw.layers)?;
    same(files, &mut raw, counted)?;
    glm4_moe::guesses(files, &mut raw)?;
    let layers = raw.layers.within(1..=LAYERS)?;
    raw.windows.truncate(layers);
    let rotary = raw.rotation.as_ref().and_then(|rotation| rotation.rotary.clone());
    let of = |kind: &'static str, base: Stated<f64>| -> Result<Rotation> {
        let usual = || width.clone().map(|width| (width as f64 * TURNED) as usize);
        let rotary = rotary.clone().or_else(|| Some(usual()));
        let scaling = keys.stated("rope_parameters", Scaling::None);
        let usual = Rotation { theta: base, rotary, scaling };
        let found = scaling::of_kind(files, kind, width.value)?.unwrap_or_else(|| usual.clone());
        Ok(Rotation { rotary: found.rotary.clone().or(usual.rotary), ..found })
    };
    let stated = raw.rotation.as_ref().map(|rotation| rotation.theta.clone());
    let stated = stated.unwrap_or_else(|| keys.stated("rope_theta", 5_000_000.0));
    raw.rotation = Some(of("full_attention", stated)?);
    let local = keys.number_or(Key("swa_rope_theta", "rope.freq_base_swa"), 10_000.0)?;
    let local = of("sliding_attention", local)?;
    let value_dim = keys.needed(VALUES)?.within(1..=width.value.max(1))?;
    const SCALE: Key = Key("attention_value_scale", "attention.value_scale");
    let scale = keys.number_or(SCALE, if gguf { 1.0 } else { 0.707 })?;
    let unscaled = keys.is_null("attention_value_scale");
    let scale = if unscaled { 1.0 } else { scale.positive()? as f32 };
    let (bias, loaded) = (files.bias("attention_bias")?, raw.loaded);
    let config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &width, Pairing::Half, context)?;
    let dense = dense(files, layers)?;
    let options = experts::read(files, config.hidden, config.feed_forward)?;
    let mut options = glm4_moe::limited(files, options, true, 1.0)?;
    // GGUF does not say it.
    options.routing.normalised |= gguf;
    let count = options.experts;
    let mixer: Mixer = Box::new(move |builder, config, i| {
        let options = config.attention(i);
        let windowed = options.window.is_some();
        let options = AttentionOptions {
            kv_heads: config.kv_heads * if windowed { 2 } else { 1 },
            value_dim: Some(value_dim),
            qkv_bias: bias,
            sinks: windowed,
            rope: if windowed { Some(local.clone()) } else { options.rope },
            ..options
        };
        let attention = SelfAttention::new(builder, &format!("blocks.{i}.attention"), options)?;
        // The factor of values is one of what attention gives.
        Ok(Some(Box::new(move |x| decoder::scaled(attention.forward(x), scale))))
    });
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        if dense[i] {
            return decoder::gated(builder, config, i, Bias::Never);
        }
        let experts = MixtureOfExperts::new(builder, &format!("blocks.{i}.mlp"), &options)?;
        Ok(Box::new(move |x| experts.forward(x)))
    });
    let parts = decoder::Parts {
        mixer,
        feed_forward,
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(mixtral::opened(config, parts, count))
}

/// The window of each layer: as `layer_types` or `hybrid_layer_pattern` list them, or all but the
/// first and every sixth. A size that is stated by another name leaves the token itself out.
fn of_layers(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Option<usize>>> {
    let keys = &files.keys;
    let count = layers.within(1..=LAYERS)?;
    let behind = keys.size(Key("sliding_window_size", ""))?;
    let window = match behind {
        Some(behind) => {
            keys.size("sliding_window")?;
            behind.map(|behind| behind.saturating_add(1))
        }
        None => keys.needed(Key("sliding_window", "attention.sliding_window"))?,
    };
    let window = window.within(1..=LIMIT)?;
    if let Some(listed) = windows::of_types(files, layers, Some(window))? {
        return Ok(listed);
    }
    let listed = keys.of_layers(PATTERN, count)?;
    let usual = |i: usize| usize::from(i > 0 && !(i + 1).is_multiple_of(6));
    let listed = listed.unwrap_or_else(|| (0..count).map(usual).collect());
    Ok(listed.into_iter().map(|kind| (kind == 1).then_some(window)).collect())
}

/// Which blocks have no experts: by a list of either name, or the first.
fn dense(files: &Files<'_>, layers: usize) -> Result<Vec<bool>> {
    if let Some(listed) = deepseek::listed(files, layers)? {
        return Ok(listed);
    }
    let listed = files.keys.of_layers(Key("moe_layer_freq", ""), layers)?;
    if files.keys.dialect() == Dialect::Gguf {
        let routed = |i: usize| files.names.find(&format!("blocks.{i}.mlp.router"));
        return (0..layers).map(|i| Ok(routed(i)?.is_none())).collect();
    }
    let listed = listed.map(|listed| listed.into_iter().map(|experts| experts == 0).collect());
    Ok(listed.unwrap_or_else(|| (0..layers).map(|i| i == 0).collect()))
}

/// Refuses layers with a window that differ from the others in more than these models do.
fn same(files: &Files<'_>, raw: &mut Raw, layers: usize) -> Result<()> {
    let keys = &files.keys;
    // GGUF has the number of each layer.
    if let Some(listed) = keys.of_layers(KV_HEADS, layers)? {
        let windowed = |i: usize| raw.windows.get(i).is_some_and(Option::is_some);
        let one = listed[0] / if windowed(0) { 2 } else { 1 };
        let usual = |i: usize| one * if windowed(i) { 2 } else { 1 };
        if let Some((i, odd)) = listed.iter().enumerate().find(|(i, heads)| **heads != usual(*i)) {
            let expected = format!("{}, as of this architecture", usual(i));
            return Err(keys.wrong(KV_HEADS, expected, odd));
        }
        raw.kv_heads.value = one;
    }
    let head_dim = raw.head_dim.as_ref().map_or(0, |head_dim| head_dim.value);
    let value_dim = keys.needed(VALUES)?.value;
    for (key, expected) in [
        ("swa_num_attention_heads", raw.heads.value),
        ("swa_num_key_value_heads", 2 * raw.kv_heads.value),
        ("swa_head_dim", head_dim),
        ("swa_v_head_dim", value_dim),
    ] {
        if let Some(size) = keys.size(Key(key, ""))?.filter(|size| size.value != expected) {
            return Err(size.wrong(format!("{expected}, as of this architecture"), size.value));
        }
    }
    for (key, expected) in
        [("add_full_attention_sink_bias", false), ("add_swa_attention_sink_bias", true)]
    {
        if let Some(found) = keys.flag(Key(key, ""))?.filter(|found| *found != expected) {
            return Err(keys.wrong(key, format!("{expected}, as of this architecture"), found));
        }
    }
    Ok(())
}

/// GGUF's metadata of layers with windows, which have twice the key/value heads, and of values; none
/// for other architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
) -> Result<Vec<(&'static str, MetadataValue)>> {
    if config.architecture.name != ARCHITECTURE.name {
        return Ok(Vec::new());
    }
    let value = files.keys.needed(VALUES)?.value as u32;
    let list = |of: &dyn Fn(bool) -> usize| {
        let all = config.windows.iter().map(|window| of(window.is_some()) as i32);
        MetadataValue::Array(MetadataArray::I32(all.collect()))
    };
    Ok(vec![
        (VALUES.1, MetadataValue::U32(value)),
        (KV_HEADS.1, list(&|windowed| config.kv_heads * if windowed { 2 } else { 1 })),
        (PATTERN.1, list(&usize::from)),
    ])
}
