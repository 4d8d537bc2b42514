//! Gemma 3n (Gemma Team 2025), its decoder of text: Gemma 3 with norms of values, scores that are
//! not scaled, last layers that attend to keys and values of earlier ones, and inputs of each layer
//! from a second embedding. The residual is several streams, of which each layer computes one and
//! predicts and corrects the others (AltUp, Baykal et al. 2023); a product of low rank stands beside
//! attention (LAuReL, Menghani et al. 2024); and the first layers let few of a gate's elements pass.

mod export;
mod layers;
mod streams;

use crate::config::LIMIT;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::{Recipes, Row};
use crate::rope::{Rotation, Scaling};
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Config, Opened, gemma2, gemma3, gemma4, scaling, windows};
pub(crate) use export::{exported, metadata};
use formats::Result;
use layers::Plan;
use nn::{Pairing, Weights};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Gemma 3n, its text",
    name: "gemma3n",
    gguf: "gemma3n",
    class: "Gemma3nForCausalLM",
    unsaid: Unsaid::sizes([2048, 16_384, 35, 8, 2, 512, 32_768, 262_400]).numbers(NUMBERS),
    names: &[NAMES, streams::NAMES, gemma4::inputs::NAMES, gemma2::NAMES, gemma3::NORMS],
    signs: None,
    experts: false,
    open,
};

/// The product of low rank beside attention.
const NAMES: &[Row] = &[
    ("blocks.{}.laurel.down", "model.layers.{}.laurel.linear_left", "blk.{}.laurel_l"),
    ("blocks.{}.laurel.up", "model.layers.{}.laurel.linear_right", "blk.{}.laurel_r"),
    ("blocks.{}.laurel.norm", "model.layers.{}.laurel.post_laurel_norm", "blk.{}.laurel_post_norm"),
];

/// Every fifth layer sees all positions; the others have a window.
const PERIOD: usize = 5;

/// Values that configurations may omit.
const NUMBERS: Numbers = &[
    ("head_dim", 256),
    ("hidden_size_per_layer_input", 256),
    ("num_kv_shared_layers", 15),
    ("altup_num_inputs", 4),
    ("laurel_rank", 64),
];

/// The first of the layers that let few elements pass, where nothing is said, of models with more.
const SPARSE: usize = 10;
/// The part of a gate's elements that they stop.
const STOPPED: f64 = 0.95;

const FEED_FORWARD: Key = Key("intermediate_size", "feed_forward_length");

fn open(files: &Files<'_>) -> Result<Opened> {
    let (config, plan) = read(files)?;
    let of = config.clone();
    let build = move |weights: &dyn Weights, ending| {
        let change = |weights: &dyn Weights, name: &str| layers::stored(&of, &plan, weights, name);
        layers::build(&Recipes { weights, change }, &of, &plan, ending)
    };
    Ok(Opened { config, build: Box::new(build) })
}

/// The numbers of a model.
fn read(files: &Files<'_>) -> Result<(Config, Plan)> {
    let files = &files.with_lists(&[FEED_FORWARD.1]);
    let keys = &files.keys;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    let mut raw = gemma2::read(files)?;
    keys.only(Key("hidden_activation", ""), &["gelu_pytorch_tanh"])?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    let width = raw.head_dim.clone().unwrap_or_else(|| raw.hidden.clone());
    let plain = keys.number("rope_theta")?.is_none() && hugging_face;
    if let Some(global) = scaling::of_kind(files, "full_attention", width.value)? {
        raw.rotation = Some(global);
    } else if let (Some(rotation), true) = (&mut raw.rotation, plain) {
        rotation.theta = keys.stated("rope_theta", 1_000_000.0);
    }
    let local = match scaling::of_kind(files, "sliding_attention", width.value)? {
        Some(local) => local,
        None => Rotation {
            theta: keys.number_or(Key("rope_local_base_freq", "rope.freq_base_swa"), 10_000.0)?,
            rotary: None,
            scaling: keys.stated("rope_local_base_freq", Scaling::None),
        },
    };
    let (bias, loaded, ff) = (files.bias("attention_bias")?, raw.loaded, raw.feed_forward.clone());
    let mut config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let shared = gemma4::shared(files, &config)?;
    config.spare = gemma4::spare(&shared);
    let listed = keys.of_layers(FEED_FORWARD, config.layers)?;
    let feed_forward = listed.unwrap_or_else(|| vec![config.feed_forward; config.layers]);
    if let Some(odd) = feed_forward.iter().find(|width| !(1..=LIMIT).contains(*width)) {
        return Err(ff.wrong(format!("numbers from 1 to {LIMIT}"), odd));
    }
    let input = Key("hidden_size_per_layer_input", "embedding_length_per_layer_input");
    let rank = match hugging_face {
        true => keys.needed("laurel_rank")?.within(1..=LIMIT)?,
        // GGUF does not say it, but for the rows of the weight.
        false => files.names.find("blocks.0.laurel.down")?.map_or(1, |down| down.shape[0]),
    };
    keys.size(Key("vocab_size_per_layer_input", ""))?;
    // Settings of training, and one of Gemma 3 that this class does not read.
    for key in ["altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"] {
        keys.note(key);
    }
    let count = keys.needed(Key("altup_num_inputs", "altup.num_inputs"))?;
    let count = count.within(2..=streams::MOST)?;
    let active = keys.size(Key("altup_active_idx", "altup.active_idx"))?;
    let plan = Plan {
        local: local.rope(config.head_dim, &width, Pairing::Half, context)?,
        feed_forward,
        deviations: deviations(files, config.layers)?,
        shared,
        input: keys.needed(input)?.within(1..=1 << 14)?,
        rank,
        streams: streams::Count {
            all: count,
            active: active.map_or(Ok(0), |active| active.within(0..=count - 1))?,
            scaled: keys.flag(Key("altup_correct_scale", ""))?.unwrap_or(true),
        },
        logit_cap: logit_cap(files)?,
        bias,
    };
    Ok((config, plan))
}

/// The bound on logits, which the class has where nothing is said.
fn logit_cap(files: &Files<'_>) -> Result<Option<f32>> {
    const CAP: Key = Key("final_logit_softcapping", "final_logit_softcapping");
    const USUAL: f64 = 30.0;
    let cap = match files.keys.mentions(CAP) {
        true => files.keys.number(CAP)?,
        false => Some(files.keys.number_or(CAP, USUAL)?),
    };
    cap.map(|cap| Ok(cap.positive()? as f32)).transpose()
}

/// For each layer, how many standard deviations above the mean of a gate's elements those are that
/// pass; none where all do.
fn deviations(files: &Files<'_>, layers: usize) -> Result<Vec<Option<f32>>> {
    const PARTS: Key = Key("activation_sparsity_pattern", "activation_sparsity_scale");
    let keys = &files.keys;
    if keys.dialect() == Dialect::Gguf {
        let listed = keys.gguf_numbers(PARTS)?;
        let listed = listed.ok_or_else(|| keys.wrong(PARTS, "a list of numbers", "nothing"))?;
        if listed.len() != layers {
            return Err(keys.wrong(PARTS, format!("{layers} entries"), listed.len()));
        }
        // Minus infinity where all pass.
        return Ok(listed.into_iter().map(|by| Some(by).filter(|by| by.is_finite())).collect());
    }
    let parts = match keys.get(PARTS).filter(|parts| !parts.is_array()) {
        // One for all.
        Some(_) => keys.number(PARTS)?.map(|part| vec![part.value as f32; layers]),
        None => keys.numbers(PARTS.0)?,
    };
    let sparse = if layers > SPARSE { SPARSE } else { 0 };
    let usual = || (0..layers).map(|i| if i < sparse { STOPPED as f32 } else { 0.0 }).collect();
    let parts: Vec<f32> = parts.unwrap_or_else(usual);
    if parts.len() != layers {
        return Err(keys.wrong(PARTS, format!("{layers} entries"), parts.len()));
    }
    let one = |part: &f32| match *part {
        part if part <= 0.0 => Ok(None),
        part if part < 1.0 => Ok(Some(quantile(f64::from(part)))),
        part => Err(keys.wrong(PARTS, "parts from 0 to below 1", part)),
    };
    parts.iter().map(one).collect()
}

/// The number below which the part `part` of a standard normal distribution lies, by bisection.
fn quantile(part: f64) -> f32 {
    let below =
        |x: f64| 0.5 * (1.0 + formats::elementwise::erf(x * std::f64::consts::FRAC_1_SQRT_2));
    let (mut low, mut high) = (-40.0, 40.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        if below(middle) < part { low = middle } else { high = middle }
    }
    low as f32
}

#[cfg(test)]
mod tests {
    use super::quantile;

    /// Values of `statistics.NormalDist().inv_cdf` of Python.
    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (part, expected) in
            [(0.95, 1.644_853_6), (0.5, 0.0), (0.9, 1.281_551_6), (0.01, -2.326_347_9)]
        {
            let found = quantile(part);
            assert!((found - expected as f32).abs() < 1e-6, "{part}: {found}");
        }
    }
}
