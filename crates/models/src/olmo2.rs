//! OLMo 2 and 3 (OLMo Team 2024, 2025): Llama with norms behind sublayers in place of those in
//! front, and norms of q and k over all heads together. OLMo 3 has a window in three layers of
//! four, whose rotation is not stretched. GGUF has it under the name of OLMo 2.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, scaling, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, Pairing, QkNorm};

/// The norms of q and k, and those behind sublayers.
pub(crate) const NORMS: &[Row] = &[
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    (
        "blocks.{}.after_attention_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    (
        "blocks.{}.after_mlp_norm",
        "model.layers.{}.post_feedforward_layernorm",
        "blk.{}.post_ffw_norm",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OLMo 2",
    name: "olmo2",
    gguf: "olmo2",
    class: "Olmo2ForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 50_304]).eps(1e-5),
    names: &[NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// OLMo 3.
pub(crate) const OLMO3: Architecture = Architecture {
    title: "OLMo 3",
    name: "olmo3",
    class: "Olmo3ForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 4096, 2048, 50_304]).theta(500_000.0).eps(1e-5),
    ..ARCHITECTURE
};

/// One layer of this many sees everything.
const PERIOD: usize = 4;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    let bias = files.bias("attention_bias")?;
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    let global = scaling::of_kind(files, "full_attention", width.value)?;
    // Where kinds are told apart, one that is not told has the base of the class.
    let of_class =
        global.is_some().then(|| keys.stated("rope_theta", files.architecture.unsaid.theta));
    raw.rotation = global.or(raw.rotation);
    let base = keys.number(Key("", "rope.freq_base_swa"))?;
    let local = match scaling::of_kind(files, "sliding_attention", width.value)? {
        Some(local) => Some(local),
        None => raw.rotation.as_ref().map(|rotation| Rotation {
            theta: base.or(of_class).unwrap_or_else(|| rotation.theta.clone()),
            scaling: keys.stated("rope_scaling", Scaling::None),
            ..rotation.clone()
        }),
    };
    let loaded = raw.loaded;
    let config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let local = local.map(|local| local.rope(config.head_dim, &width, Pairing::Half, context));
    let local = local.transpose()?;
    let attention = move |config: &Config, layer| {
        let options = config.attention(layer);
        let rope = if options.window.is_some() { local.clone() } else { options.rope };
        AttentionOptions {
            qkv_bias: bias,
            output_bias: bias,
            qk_norm: QkNorm::Rows(config.norm_eps),
            rope,
            ..options
        }
    };
    let parts = decoder::Parts {
        normed: decoder::both(false, true),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_parts(config, parts))
}
