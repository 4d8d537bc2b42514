//! Mellum 2 (JetBrains 2026): Qwen3-MoE with windows in some layers, which rotate by a base of their
//! own.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::rope::Scaling;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, decoder, deepseek, experts, llama, mixtral, qwen3};
use crate::{scaling, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, Pairing, QkNorm};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mellum 2",
    name: "mellum",
    gguf: "mellum",
    class: "MellumForCausalLM",
    unsaid: Unsaid::sizes([2304, 7168, 28, 32, 4, 1024, 131_072, 98_304]).numbers(NUMBERS),
    names: &[llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("head_dim", 128),
    ("moe_intermediate_size", 896),
    ("num_local_experts", 64),
    ("num_experts_per_tok", 8),
];

/// Settings of blocks that guess tokens ahead, which are not computed.
const NOTED: &[&str] =
    &["num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"];

/// One layer of this many sees everything in GGUF files that list none.
const PERIOD: usize = 4;

/// The base of layers with a window in GGUF.
const LOCAL: Key = Key("", "rope.freq_base_swa");

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    NOTED.iter().for_each(|key| keys.note(key));
    let gguf = keys.dialect() == Dialect::Gguf;
    // Where no layers are listed, none has a window; but in GGUF by their numbers.
    raw.windows = match keys.get(Key("layer_types", "")) {
        Some(_) => windows::of_all(files, &raw.layers)?,
        None if gguf => windows::periodic(files, &raw.layers, PERIOD)?,
        None => {
            keys.size("sliding_window")?;
            Vec::new()
        }
    };
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    let of = |kind, base| scaling::of_kind_or(files, kind, width.value, (base, Scaling::None));
    let mut local = of("sliding_attention", 10_000.0)?;
    match (&raw.rotation, keys.number(LOCAL)?) {
        (Some(rotation), base) if gguf => {
            let one = rotation.theta.value;
            if let Some(other) = base.filter(|base| base.value != one) {
                return Err(other.wrong(format!("{one}: llama.cpp has one base"), other.value));
            }
            local.theta = rotation.theta.clone();
        }
        _ => raw.rotation = Some(of("full_attention", 500_000.0)?),
    }
    let (bias, loaded) = (files.bias("attention_bias")?, raw.loaded);
    let config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &width, Pairing::Half, context)?;
    let dense = deepseek::listed(files, config.layers)?;
    let dense = dense.unwrap_or_else(|| vec![false; config.layers]);
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = keys.flag(Key("norm_topk_prob", ""))?.unwrap_or(true);
    let mixture = mixtral::mixture(options);
    let attention = move |config: &Config, layer| {
        let options = config.attention(layer);
        let rope = if options.window.is_some() { Some(local.clone()) } else { options.rope };
        AttentionOptions {
            qkv_bias: bias,
            output_bias: bias,
            qk_norm: QkNorm::Heads(config.norm_eps),
            rope,
            ..options
        }
    };
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| match dense[i] {
        true => decoder::gated(builder, config, i, Bias::Never),
        false => mixture(builder, config, i),
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    Ok(mixtral::opened(config, parts, options.experts))
}
