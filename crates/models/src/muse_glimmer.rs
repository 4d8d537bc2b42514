//! Muse Glimmer (Meta 2026), its text: embeddings are normed, and sublayers in front and behind; queries
//! and keys have norms without weights, queries a factor, and what attention gives a gate. Three
//! layers of four have a window and a rotation; the fourth has neither. Logits are bounded.

use crate::config::{Config, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gemma2, windows};
use formats::{ErrorKind, Result, Source};
use nn::{AttentionOptions, Bias, Builder, Norm, Pairing, QkNorm, Stored, Unary, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.gate", "model.layers.{}.self_attn.gate_proj", "blk.{}.attn_gate"),
    // GGUF has the factor on queries there, and ones.
    ("blocks.{}.attention.q_norm", "", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "", "blk.{}.attn_k_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Muse Glimmer, its text",
    name: "muse_glimmer",
    gguf: "muse-glimmer",
    class: "MuseGlimmerForConditionalGeneration",
    unsaid: Unsaid::sizes([6656, 19_968, 52, 32, 2, 2048, 131_072, 202_048])
        .eps(1e-5)
        .numbers(&[("head_dim", 128)]),
    names: &[NAMES, gemma2::NAMES],
    signs: None,
    experts: false,
    open,
};

/// One layer of this many sees everything, counted from the last.
const PERIOD: usize = 4;

/// The number that norms behind sublayers add, which GGUF does not say.
const EPS_BEHIND: f64 = 1e-8;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let gguf = keys.dialect() == Dialect::Gguf;
    let mut raw = Raw::read_silu(files)?;
    keys.only(Key("hidden_activation", ""), &["silu"])?;
    raw.windows = match gguf {
        true => windows::periodic(files, &raw.layers, PERIOD)?,
        false => windows::of_all(files, &raw.layers)?,
    };
    if !gguf && keys.get(Key("layer_types", "")).is_none() {
        raw.windows.iter_mut().rev().step_by(PERIOD).for_each(|window| *window = None);
    }
    if gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let theta = raw.rotation.as_ref().map(|rotation| rotation.theta.clone());
    let turned = turned(files, &raw.layers, theta)?;
    let behind = keys.number_or(Key("post_norm_eps", ""), EPS_BEHIND)?;
    if behind.value != EPS_BEHIND {
        let error = behind.wrong(format!("{EPS_BEHIND:e}, as of published models"), behind.value);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let read = |key, usual: f64| -> Result<Option<f32>> {
        let stated = if gguf { keys.number(key)? } else { Some(keys.number_or(key, usual)?) };
        stated.map(|number| Ok(number.positive()? as f32)).transpose()
    };
    let queries = read(Key("qk_scale_factor", ""), 3.87)?.unwrap_or(1.0);
    let logits = read(Key("output_multiplier", "logit_scale"), 0.196_116_135_131_840_4)?;
    let cap = read(Key("final_logit_softcapping", "final_logit_softcapping"), 20.0)?;
    let bias = files.bias("attention_bias")?;
    let attention = move |config: &Config, layer: usize| {
        let options = decoder::biased(bias)(config, layer);
        let turns = turned.as_ref().map_or(options.window.is_some(), |turned| turned[layer]);
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            output_gate: Some((Unary::Sigmoid, Bias::Never)),
            rope: options.rope.filter(|_| turns),
            ..options
        }
    };
    let parts = decoder::Parts {
        norm,
        normed: decoder::both(true, true),
        normed_embeddings: true,
        multipliers: [1.0, 1.0, logits.unwrap_or(1.0)],
        logit_cap: cap,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let apart = files.apart;
    Ok(decoder::open_recipes(raw.check()?, parts, move |config, weights: &dyn Weights, name| {
        if name == "embed_norm" {
            return Ok(Some(alike(config.hidden, 1.0, 0)));
        }
        let Some((block, part)) = name.rsplit_once('.').filter(|_| !gguf) else { return Ok(None) };
        // GGUF has one for each block.
        let layer = block.split('.').nth(1).and_then(|layer| layer.parse().ok()).unwrap_or(0);
        let spare = if apart { layer } else { 0 };
        match part {
            "q_norm" => Ok(Some(alike(config.head_dim, queries, spare))),
            "k_norm" => Ok(Some(alike(config.head_dim, 1.0, spare))),
            _ => gemma2::norm(weights, name, true),
        }
    }))
}

/// Which layers rotate, where bases are listed by layer: those whose base is not 0.
fn turned(
    files: &Files<'_>,
    layers: &Stated<usize>,
    theta: Option<Stated<f64>>,
) -> Result<Option<Vec<bool>>> {
    const BASES: &str = "layer_rope_theta";
    let Some(bases) = files.keys.numbers(BASES)? else { return Ok(None) };
    if bases.len() != layers.value {
        let expected = format!("{} entries, as {} says", layers.value, layers.key());
        return Err(files.keys.wrong(BASES, expected, bases.len()));
    }
    let base = theta.map_or(0.0, |theta| theta.value as f32);
    if let Some(other) = bases.iter().find(|other| **other != 0.0 && **other != base) {
        let expected = format!("0 or {base}, the base of the rotation");
        return Err(files.keys.wrong(BASES, expected, other).of(ErrorKind::Unsupported));
    }
    Ok(Some(bases.into_iter().map(|base| base != 0.0).collect()))
}

/// A vector of `width` elements that are all `number`: the first of `spare` more, since equal recipes
/// are one weight.
fn alike(width: usize, number: f32, spare: usize) -> Stored {
    let source = Source::Plus(Box::new(Source::Zeros(vec![width + spare])), number);
    let source = if spare == 0 { source } else { source.rows(0, width) };
    Stored { source, shape: vec![width] }
}

/// An RMS norm, which adds less behind a sublayer.
fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<Layer> {
    let behind = name.contains(".after_");
    let eps = if behind { EPS_BEHIND as f32 } else { config.norm_eps };
    let norm = Norm::rms(builder, name, config.hidden, eps)?;
    Ok(Box::new(move |x| norm.forward(x)))
}
