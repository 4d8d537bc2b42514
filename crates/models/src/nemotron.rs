//! Nemotron-4 and Minitron (NVIDIA 2024): layer norms of `1 + w`, a feed-forward without a gate
//! whose function is the square of what is positive, and a part of each head rotated.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gemma2, gpt2, llama, phimoe};
use formats::Result;
use nn::{Unary, Weights};

/// The square of what is positive.
pub(crate) const SQUARED: &[Unary] = &[Unary::Relu, Unary::Square];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Nemotron-4 and Minitron",
    name: "nemotron",
    gguf: "nemotron",
    class: "NemotronForCausalLM",
    unsaid: Unsaid::sizes([6144, 24_576, 32, 48, 0, 0, 4096, 256_000]).eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let eps = Key("norm_eps", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    raw.turns_part(files, 0.5)?;
    // Another name of the part that is rotated.
    if let Some(part) = files.keys.number(Key("rope_percent", ""))?.filter(|p| p.value != 0.5) {
        return Err(part.wrong("0.5, as of this architecture", part.value));
    }
    // And of the width of heads.
    let width =
        raw.head_dim.as_ref().map_or(raw.hidden.value / raw.heads.value.max(1), |d| d.value);
    if let Some(other) = files.keys.size(Key("kv_channels", ""))?.filter(|n| n.value != width) {
        return Err(other.wrong(format!("{width}, the width of heads"), other.value));
    }
    // What GGUF says twice.
    files.keys.number(Key("norm_eps", "attention.layer_norm_rms_epsilon"))?;
    let act = gpt2::activation(files, "hidden_act", SQUARED)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, mlp_bias)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    let less_one = files.keys.dialect() == Dialect::HuggingFace;
    let norm =
        move |_: &Config, weights: &dyn Weights, name: &str| gemma2::norm(weights, name, less_one);
    Ok(decoder::open_recipes(raw.check()?, parts, norm))
}
