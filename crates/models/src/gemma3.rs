//! Gemma 3 (Gemma Team 2025), its decoder of text: Gemma 2 with norms on every head of q and k in
//! place of soft caps, and five layers within a window, which rotate by a base of their own, for
//! each that sees everything.

use crate::config::Config;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, decoder, gemma2, scaling, windows};
use formats::Result;
use nn::{AttentionOptions, Pairing, QkNorm};

/// The norms of each head.
pub(crate) const NORMS: &[Row] = &[
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Gemma 3, its text",
    name: "gemma3",
    gguf: "gemma3",
    class: "Gemma3ForCausalLM",
    unsaid: Unsaid::sizes([2304, 9216, 26, 8, 4, 4096, 131_072, 262_208]).numbers(NUMBERS),
    names: &[gemma2::NAMES, NORMS],
    signs: None,
    experts: false,
    open,
};

/// One layer of this many sees everything.
const PERIOD: usize = 6;

/// Values that the published configurations with images omit in the decoder's part.
const NUMBERS: Numbers = &[("head_dim", 256), ("query_pre_attn_scalar", 256)];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = gemma2::read(files)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    let plain = keys.number("rope_theta")?.is_none() && keys.dialect() == Dialect::HuggingFace;
    if let Some(global) = scaling::of_kind(files, "full_attention", width.value)? {
        raw.rotation = Some(global);
    } else if let (Some(rotation), true) = (&mut raw.rotation, plain) {
        rotation.theta = keys.stated("rope_theta", 1_000_000.0);
    }
    let local = match scaling::of_kind(files, "sliding_attention", width.value)? {
        Some(local) => local,
        None => Rotation {
            theta: keys.number_or(Key("rope_local_base_freq", "rope.freq_base_swa"), 10_000.0)?,
            rotary: raw.rotation.as_ref().and_then(|rotation| rotation.rotary.clone()),
            scaling: keys.stated("rope_local_base_freq", Scaling::None),
        },
    };
    let logit_cap = keys.number(Key("final_logit_softcapping", "final_logit_softcapping"))?;
    let logit_cap = logit_cap.map(|cap| cap.positive()).transpose()?;
    let scalar = keys.size(Key("query_pre_attn_scalar", ""))?;
    let (bias, loaded) = (files.bias("attention_bias")?, raw.loaded);
    let config = raw.check()?;
    let scalar = match scalar {
        Some(scalar) => scalar.within(1..=1 << 20)?,
        // GGUF does not say it. The largest of the family, of 62 layers, divides by the width that
        // its heads would have.
        None if config.layers == 62 => config.hidden / config.heads,
        None => config.head_dim,
    };
    let scale = 1.0 / (scalar as f32).sqrt();
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &width, Pairing::Half, context)?;
    let attention = move |config: &Config, layer| {
        let options = decoder::biased(bias)(config, layer);
        let rope = if options.window.is_some() { Some(local.clone()) } else { options.rope };
        AttentionOptions {
            scale: Some(scale),
            qk_norm: QkNorm::Heads(config.norm_eps),
            rope,
            ..options
        }
    };
    Ok(gemma2::opened(files, config, attention, logit_cap.map(|cap| cap as f32)))
}
