//! Apertus (Swiss AI 2025): Llama with norms of each head and a feed-forward without a gate, whose
//! function has numbers that each layer has learnt ([`ops::xielu`]).

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::{Architecture, Opened, decoder, llama, qwen3};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Error, Result};
use nn::{AttentionOptions, Bias, Projection, QkNorm};
use ops::{Op, Xielu, xielu};

/// The stored numbers of the function, of which `positive` and `negative - linear` are the softplus
/// of the first two.
const NUMBERS: [(&str, &str, Option<f32>); 4] = [
    ("positive", "xielu.alpha_p", None),
    ("negative", "xielu.alpha_n", None),
    ("linear", "xielu.beta", Some(0.5)),
    ("bound", "xielu.eps", Some(xielu::BOUND)),
];

const NAMES: &[Row] = &[
    ("blocks.{}.attention_norm", "model.layers.{}.attention_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.mlp_norm", "model.layers.{}.feedforward_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.positive", "model.layers.{}.mlp.act_fn.alpha_p!", ""),
    ("blocks.{}.mlp.negative", "model.layers.{}.mlp.act_fn.alpha_n!", ""),
    ("blocks.{}.mlp.linear", "model.layers.{}.mlp.act_fn.beta!", ""),
    ("blocks.{}.mlp.bound", "model.layers.{}.mlp.act_fn.eps!", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Apertus",
    name: "apertus",
    gguf: "apertus",
    class: "ApertusForCausalLM",
    names: &[NAMES, llama::NAMES, qwen3::NORMS],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    keys.only(Key("hidden_act", ""), &["xielu"])?;
    let eps = Key("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    let raw = Raw::read_normed(files, eps, 1e-5)?;
    for (key, usual) in [("qk_norm", true), ("post_norm", false)] {
        if let Some(other) = keys.flag(Key(key, ""))?.filter(|flag| *flag != usual) {
            return Err(keys.wrong(key, format!("{usual}, as of this architecture"), other));
        }
    }
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let config = raw.check()?;
    // Errors are reported where layers are built: before that, weights may be missing.
    let functions = functions(files, config.layers);
    let attention = move |config: &crate::Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Heads(config.norm_eps),
        ..config.attention(layer)
    };
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        let (hidden, ff) = (config.hidden, config.feed_forward);
        let matrix = |part: &str, sizes| {
            Projection::new(builder, &format!("blocks.{i}.mlp.{part}"), sizes, mlp_bias)
        };
        let (up, down) = (matrix("up", [ff, hidden])?, matrix("down", [hidden, ff])?);
        let function = functions.as_ref().map_err(Error::clone)?[i];
        Ok(Box::new(move |x| {
            down.forward(&up.forward(x).apply(Op::from(function), &[], Vec::new()))
        }))
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    Ok(decoder::open_parts(config, parts))
}

/// The function of each layer.
fn functions(files: &Files<'_>, layers: usize) -> Result<Vec<Xielu>> {
    let [positive, negative, linear, bound] = numbers(files, layers)?;
    if let Some(odd) = bound.iter().find(|bound| !(-1e-5..=0.0).contains(*bound)) {
        let expected = format!("{}, as of this architecture", xielu::BOUND);
        return Err(Error::new(files.names.place("blocks.0.mlp.bound"), expected, odd));
    }
    let softplus = |x: f32| f64::from(x).exp().ln_1p() as f32;
    let function = |i: usize| Xielu {
        positive: softplus(positive[i]),
        negative: linear[i] + softplus(negative[i]),
        linear: linear[i],
    };
    Ok((0..layers).map(function).collect())
}

/// Each of [`NUMBERS`] as it is stored, for each layer.
fn numbers(files: &Files<'_>, layers: usize) -> Result<[Vec<f32>; 4]> {
    let mut all: [Vec<f32>; 4] = Default::default();
    for ((name, key, usual), all) in NUMBERS.into_iter().zip(&mut all) {
        if files.keys.dialect() == Dialect::Gguf {
            *all = listed(files, key, layers)?;
            continue;
        }
        for i in 0..layers {
            let name = format!("blocks.{i}.mlp.{name}");
            let missing = || Error::new(files.names.place(&name), "a number", "none in the file");
            all.push(files.number(&name)?.or(usual).ok_or_else(missing)?);
        }
    }
    Ok(all)
}

/// A number of each layer, which GGUF lists, or says once.
fn listed(files: &Files<'_>, key: &'static str, layers: usize) -> Result<Vec<f32>> {
    let Some(metadata) = files.metadata() else { return Ok(Vec::new()) };
    let list = match metadata.f32s(key) {
        Ok(Some(list)) => list,
        _ => vec![metadata.f32(key)?.ok_or_else(|| metadata.missing(key))?; layers],
    };
    if list.len() != layers || list.iter().any(|number| !number.is_finite()) {
        let expected = format!("{layers} finite numbers, one for each layer");
        return Err(Error::new(metadata.at(key), expected, format!("{} numbers", list.len())));
    }
    Ok(list)
}

/// GGUF's metadata of the function; none for other architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(files: &Files<'_>, layers: usize) -> Result<Vec<(String, MetadataValue)>> {
    if files.architecture.name != ARCHITECTURE.name {
        return Ok(Vec::new());
    }
    let all = NUMBERS.iter().map(|(_, key, _)| (*key).to_owned()).zip(numbers(files, layers)?);
    Ok(all.map(|(key, list)| (key, MetadataValue::Array(MetadataArray::F32(list)))).collect())
}
