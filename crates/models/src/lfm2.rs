//! LFM2 (Liquid AI 2025): most layers mix a few neighbouring rows by a short convolution between
//! two gates; the others are attention with norms of each head.

pub(crate) mod convs;

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::decoder::{self, Layer, Mixer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, experts, lfm2_moe};
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use nn::{AttentionOptions, Bias, ExpertsOptions, GatedConv, MixtureOfExperts, QkNorm, Weights};
use program::Weight;
use std::sync::Arc;

pub(crate) const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.embedding_norm", "token_embd_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.operator_norm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.out_proj", "blk.{}.attn_output"),
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_layernorm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_layernorm", "blk.{}.attn_k_norm"),
    ("blocks.{}.conv.in", "model.layers.{}.conv.in_proj", "blk.{}.shortconv.in_proj"),
    ("blocks.{}.conv.conv", "model.layers.{}.conv.conv", "blk.{}.shortconv.conv"),
    ("blocks.{}.conv.o", "model.layers.{}.conv.out_proj", "blk.{}.shortconv.out_proj"),
    ("blocks.{}.mlp_norm", "model.layers.{}.ffn_norm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.w1", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.w3", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.w2", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "LFM2",
    name: "lfm2",
    gguf: "lfm2",
    class: "Lfm2ForCausalLM",
    unsaid: Unsaid::sizes([2560, 12_288, 32, 32, 8, 0, 128_000, 65_536])
        .theta(1_000_000.0)
        .numbers(&[("conv_L_cache", 3)])
        .eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Reads the mixture of a configuration, and how many blocks at the beginning have none.
pub(crate) type Mixture = fn(&Files<'_>, &Config) -> Result<(ExpertsOptions, usize)>;

fn open(files: &Files<'_>) -> Result<Opened> {
    // Where the first configurations state the width, and some of them do alone.
    opened(&files.with_names(&[("intermediate_size", "block_ff_dim")]), None)
}

/// Such a model, with the mixture that is read by `mixture`.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn opened(files: &Files<'_>, mixture: Option<Mixture>) -> Result<Opened> {
    let keys = &files.keys;
    let eps = Key("norm_eps", "attention.layer_norm_rms_epsilon");
    let mut raw = Raw::read_ungated(files, eps)?;
    if mixture.is_none() {
        raw.feed_forward = feed_forward(files, raw.feed_forward)?;
    }
    // The same number by the names of the first configurations.
    for (key, same) in
        [("block_dim", &raw.hidden), ("conv_dim", &raw.hidden), ("conv_dim_out", &raw.hidden)]
    {
        if let Some(width) = keys.size(Key(key, ""))?.filter(|width| width.value != same.value) {
            return Err(width.wrong(format!("{}, as {} says", same.value, same.key()), width.value));
        }
    }
    for key in [
        "block_mlp_init_scale",
        "block_out_init_scale",
        "block_norm_eps",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_use_xavier_init",
        "num_heads",
        "use_pos_enc",
        "theta",
    ] {
        keys.note(key);
    }
    if keys.flag(Key("conv_bias", ""))? == Some(true) {
        return Err(keys.wrong("conv_bias", "false: convolutions without biases", true));
    }
    // An older name of `tie_word_embeddings`.
    if let Some(tied) = keys.flag(Key("tie_embedding", ""))? {
        raw.tied = tied && files.names.find("head")?.is_none();
    }
    let kernel = keys.needed(Key("conv_L_cache", "shortconv.l_cache"))?.within(2..=1 << 8)?;
    let convs = convs(files, &raw.layers)?;
    let config = raw.check()?;
    let mixture = mixture.map(|read| read(files, &config)).transpose()?;
    let attention = |config: &Config, layer: usize| AttentionOptions {
        qk_norm: QkNorm::Heads(config.norm_eps),
        ..config.attention(layer)
    };
    let mixer: Mixer = Box::new(move |builder, config, i| {
        let conv = || GatedConv::new(builder, &format!("blocks.{i}.conv"), config.hidden, kernel);
        let layer = |conv: GatedConv| Box::new(move |x: &nn::Tensor| conv.forward(x)) as Layer;
        Ok(convs[i].then(conv).transpose()?.map(layer))
    });
    let mut parts = decoder::Parts { mixer, ..decoder::Parts::new(Bias::Never, attention) };
    let count = mixture.map_or(0, |(options, _)| options.experts);
    if let Some((options, dense)) = mixture {
        parts.feed_forward = Box::new(move |builder, config, i| {
            if i < dense {
                return decoder::gated(builder, config, i, Bias::Never);
            }
            let experts = MixtureOfExperts::new(builder, &format!("blocks.{i}.mlp"), &options)?;
            Ok(Box::new(move |x| experts.forward(x)))
        });
    }
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match convs::part(
        weights,
        name,
        config.hidden,
        kernel,
    )? {
        None if count > 0 => experts::joined(weights, name, count),
        part => Ok(part),
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The width of the feed-forward: two thirds of what `config.json` states, rounded up, unless it
/// says that the number is meant as it is.
fn feed_forward(files: &Files<'_>, stated: Stated<usize>) -> Result<Stated<usize>> {
    let keys = &files.keys;
    keys.note("intermediate_size");
    let by = keys.number(Key("block_ffn_dim_multiplier", ""))?;
    let multiple = keys.size(Key("block_multiple_of", ""))?;
    let adjusted = keys.flag(Key("block_auto_adjust_ff_dim", ""))?;
    if keys.dialect() == Dialect::Gguf {
        return Ok(stated);
    }
    if adjusted == Some(false) {
        return Ok(stated);
    }
    let by = by.map_or(Ok(1.0), |by| by.positive())?;
    let multiple = multiple.map_or(Ok(256), |multiple| multiple.within(1..=LIMIT))?;
    let wide = stated.within(1..=LIMIT)?;
    let scaled = (by * (2 * wide / 3) as f64) as usize;
    Ok(stated.map(|_| scaled.min(LIMIT).div_ceil(multiple) * multiple))
}

/// Whether each layer is a convolution: by `layer_types`, or every layer outside
/// `full_attn_idxs`; in GGUF by its weights.
fn convs(files: &Files<'_>, layers: &Stated<usize>) -> Result<Arc<[bool]>> {
    let (keys, count) = (&files.keys, layers.value.min(LAYERS));
    if keys.dialect() == Dialect::Gguf {
        let conv = |i: usize| Ok(files.names.find(&format!("blocks.{i}.conv.in"))?.is_some());
        return (0..count).map(conv).collect();
    }
    let attention = keys.numbers("full_attn_idxs")?;
    const TYPES: Key = Key("layer_types", "");
    let Some(types) = keys.get(TYPES) else {
        let full = attention.unwrap_or_default();
        // None is listed: all are attention.
        let conv = |i: usize| !full.is_empty() && !full.contains(&(i as f32));
        return Ok((0..count).map(conv).collect());
    };
    let list = types.as_array().ok_or_else(|| keys.odd(TYPES, "a list", types))?;
    if list.len() != layers.value {
        let expected = format!("{} entries, as {} says", layers.value, layers.key());
        return Err(keys.wrong(TYPES, expected, list.len()));
    }
    let one = |kind: &serde_json::Value| match kind.as_str() {
        Some("conv") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(keys.odd(TYPES, "full_attention or conv", kind)),
    };
    list.iter().map(one).collect()
}

/// GGUF's settings that `config.json` lacks: layers that are convolutions have no key/value heads.
pub(crate) fn metadata(config: &Config, held: &[Weight]) -> Option<(&'static str, MetadataValue)> {
    if ![ARCHITECTURE.name, lfm2_moe::ARCHITECTURE.name].contains(&config.architecture.name) {
        return None;
    }
    let conv = |i: usize| held.iter().any(|weight| weight.name == format!("blocks.{i}.conv.taps"));
    let heads = |i: usize| if conv(i) { 0 } else { config.kv_heads as i32 };
    let heads = (0..config.layers).map(heads).collect();
    Some(("attention.head_count_kv", MetadataValue::Array(MetadataArray::I32(heads))))
}
