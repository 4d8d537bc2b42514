//! LFM3 (Liquid AI 2026): LFM2 with norms behind sublayers too, windows in some of its attention
//! layers, which rotate by a base of their own, and a gate of each head.

use crate::config::{LAYERS, LIMIT, Raw};
use crate::decoder::{self, Layer, Mixer};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::stated::Stated;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Config, Opened, lfm2, llama, scaling};
use formats::{Error, Result, Source};
use nn::{AttentionOptions, Bias, GatedConv, Pairing, QkNorm, Stored, Unary, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", ""),
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm", ""),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm", ""),
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.gate_proj", ""),
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.g_proj", ""),
    ("blocks.{}.after_attention_norm", "model.layers.{}.post_operator_norm", ""),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_ffn_norm", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "LFM3",
    name: "lfm3",
    gguf: "",
    class: "Lfm3ForCausalLM",
    unsaid: Unsaid::sizes([2048, 7680, 24, 16, 4, 256, 128_000, 128_000])
        .numbers(NUMBERS)
        .theta(1_000_000.0)
        .eps(1e-5),
    names: &[NAMES, lfm2::NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[("head_dim", 128), ("conv_L_cache", 7)];

/// What a layer has in front of its feed-forward.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Conv,
    Full,
    Sliding,
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, Key("norm_eps", ""))?;
    keys.only(Key("hidden_act", ""), &["silu"])?;
    if keys.flag(Key("conv_bias", ""))? == Some(true) {
        return Err(keys.wrong("conv_bias", "false: convolutions without biases", true));
    }
    if keys.flag(Key("attention_bias", ""))? == Some(true) {
        return Err(keys.wrong("attention_bias", "false: attention without biases", true));
    }
    let kernel = keys.needed(Key("conv_L_cache", ""))?.within(2..=1 << 8)?;
    let kinds = kinds(files, &raw.layers)?;
    let window = keys.size(Key("sliding_window", ""))?;
    if let Some(window) = window {
        let window = window.within(1..=LIMIT)?;
        let of = |kind: &Kind| (*kind == Kind::Sliding).then_some(window);
        raw.windows = kinds.iter().map(of).collect();
    }
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    // A part alone leaves the whole head rotated, as in Transformers: only `proportional` reads it.
    let of = |kind, usual| {
        let rotation = scaling::of_kind_or(files, kind, width.value, usual)?;
        Ok::<Rotation, Error>(Rotation { rotary: None, ..rotation })
    };
    let local = of("sliding_attention", (10_000.0, Scaling::None))?;
    let half = Scaling::Proportional { part: 0.5, factor: 1.0 };
    raw.rotation = Some(of("full_attention", (1_000_000.0, half))?);
    let gated = keys.flag(Key("use_attention_gate", ""))?.unwrap_or(true);
    let behind = keys.flag(Key("use_sandwich_norm", ""))?.unwrap_or(true);
    let loaded = raw.loaded;
    let config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &width, Pairing::Half, context)?;
    let attention = move |config: &Config, layer| {
        let options = config.attention(layer);
        let rope = if options.window.is_some() { Some(local.clone()) } else { options.rope };
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            output_gate: gated.then_some((Unary::Sigmoid, Bias::Never)),
            rope,
            ..options
        }
    };
    let mixer: Mixer = Box::new(move |builder, config, i| {
        if kinds[i] != Kind::Conv {
            return Ok(None);
        }
        let conv = GatedConv::new(builder, &format!("blocks.{i}.conv"), config.hidden, kernel)?;
        Ok(Some(Box::new(move |x: &nn::Tensor| conv.forward(x)) as Layer))
    });
    let parts = decoder::Parts {
        mixer,
        normed: decoder::both(true, behind),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match name
        .ends_with(".attention.gate")
    {
        true => {
            let found = weights.find(name)?;
            Ok(found.map(|stored| per_head(stored, config.heads, config.head_dim)))
        }
        false => lfm2::convs::part(weights, name, config.hidden, kernel),
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The kind of each layer: by `layer_types`, or by its number.
fn kinds(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Kind>> {
    const TYPES: Key = Key("layer_types", "");
    let (keys, count) = (&files.keys, layers.within(1..=LAYERS)?);
    let Some(types) = keys.get(TYPES) else {
        let usual = |i: usize| match i % 4 {
            2 => Kind::Full,
            0 if i > 0 => Kind::Sliding,
            _ => Kind::Conv,
        };
        return Ok((0..count).map(usual).collect());
    };
    let list = types.as_array().filter(|list| list.len() == count);
    let list = list.ok_or_else(|| keys.odd(TYPES, &format!("a list of {count} kinds"), types))?;
    let one = |kind: &serde_json::Value| match kind.as_str() {
        Some("conv") => Ok(Kind::Conv),
        Some("full_attention") => Ok(Kind::Full),
        Some("sliding_attention") => Ok(Kind::Sliding),
        _ => Err(keys.odd(TYPES, "conv, full_attention or sliding_attention", kind)),
    };
    list.iter().map(one).collect()
}

/// A row of a gate for each of the `each` elements that a head gives: the row of its head. Gates that
/// have a row for each element stay.
pub(crate) fn per_head(stored: Stored, heads: usize, each: usize) -> Stored {
    let [rows, columns] = stored.shape[..] else { return stored };
    if rows != heads {
        return stored;
    }
    let of_head = |h: usize| std::iter::repeat_n(stored.source.clone().rows(h, 1), each);
    let source = Source::Concat((0..heads).flat_map(of_head).collect());
    Stored { source, shape: vec![heads * each, columns] }
}
