//! Apertus (Swiss AI 2025): Llama with norms of each head and a feed-forward without a gate, whose
//! function has numbers that each layer has learnt ([`ops::xielu`]): weights of a folder, and
//! metadata of a GGUF file.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::{Unsaid, said};
use crate::{Architecture, Opened, decoder, llama, qwen3};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Error, Result, Source, shape};
use nn::{AttentionOptions, Bias, Projection, QkNorm, Stored, Weights};
use ops::{Op, Xielu, xielu};

/// The stored numbers of the function, of which the first two are weights.
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
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 0, 0, 65_536, 131_072])
        .theta(12_000_000.0)
        .rotated(said!({
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }))
        .eps(1e-5),
    names: &[NAMES, llama::NAMES, qwen3::NORMS],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    keys.only(Key("hidden_act", ""), &["xielu"])?;
    let eps = Key("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    let raw = Raw::read_ungated(files, eps)?;
    for (key, usual) in [("qk_norm", true), ("post_norm", false)] {
        if let Some(other) = keys.flag(Key(key, ""))?.filter(|flag| *flag != usual) {
            return Err(keys.wrong(key, format!("{usual}, as of this architecture"), other));
        }
    }
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let config = raw.check()?;
    // Errors are reported where layers are built: before that, weights may be missing.
    let functions = functions(files, config.layers);
    let listed = match keys.dialect() {
        Dialect::Gguf => Some(learnt(files, config.layers)),
        Dialect::HuggingFace => None,
    };
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
        let number = |part: &str| builder.weight(&format!("blocks.{i}.mlp.{part}"), &[1]);
        let learnt = vec![number(NUMBERS[0].0)?, number(NUMBERS[1].0)?];
        Ok(Box::new(move |x| {
            down.forward(&up.forward(x).apply(Op::from(function), &[], learnt.clone()))
        }))
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    Ok(decoder::open_recipes(config, parts, move |config, weights, name| {
        number(listed.as_ref(), config.layers, weights, name)
    }))
}

/// A number that a layer has learnt, as a weight `[1]`; `listed` are all layers' where metadata has
/// them.
///
/// # Errors
/// Metadata without them, and tensors of several numbers.
fn number(
    listed: Option<&Result<Vec<f32>>>,
    layers: usize,
    weights: &dyn Weights,
    name: &str,
) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".mlp.") else { return Ok(None) };
    let Some(which) = NUMBERS[..2].iter().position(|number| number.0 == part) else {
        return Ok(None);
    };
    let block = block.strip_prefix("blocks.").and_then(|block| block.parse::<usize>().ok());
    if let (Some(listed), Some(block)) = (listed, block) {
        // Rows of one list: numbers that happen to be equal stay weights of their own.
        let all = listed.as_ref().map_err(Error::clone)?.iter();
        let one = |number: &f32| Source::Plus(Box::new(Source::Zeros(vec![1])), *number);
        let source = Source::Concat(all.map(one).collect()).rows(which * layers + block, 1);
        return Ok(Some(Stored { source, shape: vec![1] }));
    }
    let Some(Stored { source, shape: dims }) = weights.find(name)? else { return Ok(None) };
    if dims.iter().product::<usize>() != 1 {
        return Err(Error::new(weights.place(name), "one number", shape(&dims)));
    }
    match dims[..] {
        [1] => Ok(Some(Stored { source, shape: dims })),
        _ => {
            let source = Source::Reshape(Box::new(source), vec![1]);
            Ok(Some(Stored { source, shape: vec![1] }))
        }
    }
}

/// The numbers that layers have learnt, of all layers the first and then the second.
fn learnt(files: &Files<'_>, layers: usize) -> Result<Vec<f32>> {
    let [positive, negative, ..] = numbers(files, layers)?;
    Ok([positive, negative].concat())
}

/// The function of each layer.
fn functions(files: &Files<'_>, layers: usize) -> Result<Vec<Xielu>> {
    let [.., linear, bound] = numbers(files, layers)?;
    if let Some(odd) = bound.iter().find(|bound| !(-1e-5..=0.0).contains(*bound)) {
        let expected = format!("{}, as of this architecture", xielu::BOUND);
        return Err(Error::new(files.names.place("blocks.0.mlp.bound"), expected, odd));
    }
    Ok(linear.into_iter().map(|linear| Xielu { linear }).collect())
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
