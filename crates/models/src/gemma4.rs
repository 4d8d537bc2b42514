//! Gemma 4 (Gemma Team 2026), its decoder of text: Gemma 3 with norms of values too, scores that are
//! not scaled, and layers that see everything with heads of their own size, whose keys may be their
//! values. The small ones add a part of a second embedding in every layer (Gemma 3n), and their
//! last layers attend to the keys and values of earlier ones; the mixture has experts beside the
//! feed-forward.

mod export;
pub(crate) mod inputs;
mod layers;
mod mixture;
mod sizes;

use crate::config::{LAYERS, LIMIT};
use crate::files::Files;
use crate::keys::Key;
use crate::names::{Recipes, Row};
use crate::rope::Rotation;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Config, Opened, gemma2, gemma3, windows};
pub(crate) use export::{each, exported, metadata, tensors};
use formats::Result;
use layers::{Kind, Plan};
use nn::{Pairing, Weights};
use sizes::{head_sizes, kv_heads, rotations};

const NAMES: &[Row] = &[
    ("blocks.{}.scale", "model.layers.{}.layer_scalar!", "blk.{}.layer_output_scale"),
    ("rope_factors", "", "rope_freqs"),
    ("blocks.{}.moe.router", "model.layers.{}.router.proj", "blk.{}.ffn_gate_inp"),
    ("blocks.{}.moe.router_norm", "model.layers.{}.router.scale!", "blk.{}.ffn_gate_inp.scale!"),
    (
        "blocks.{}.moe.experts.gate_up",
        "model.layers.{}.experts.gate_up_proj!",
        "blk.{}.ffn_gate_up_exps",
    ),
    (
        "blocks.{}.moe.experts.gate",
        "model.layers.{}.experts.switch_glu.gate_proj",
        "blk.{}.ffn_gate_exps",
    ),
    (
        "blocks.{}.moe.experts.up",
        "model.layers.{}.experts.switch_glu.up_proj",
        "blk.{}.ffn_up_exps",
    ),
    ("blocks.{}.moe.experts.down", "model.layers.{}.experts.down_proj!", "blk.{}.ffn_down_exps"),
    ("blocks.{}.moe.experts.down", "model.layers.{}.experts.switch_glu.down_proj", ""),
    (
        "blocks.{}.moe.router.factors",
        "model.layers.{}.router.per_expert_scale!",
        "blk.{}.ffn_down_exps.scale!",
    ),
    ("blocks.{}.moe_norm", "model.layers.{}.pre_feedforward_layernorm_2", "blk.{}.pre_ffw_norm_2"),
    (
        "blocks.{}.after_moe_norm",
        "model.layers.{}.post_feedforward_layernorm_2",
        "blk.{}.post_ffw_norm_2",
    ),
    (
        "blocks.{}.after_dense_norm",
        "model.layers.{}.post_feedforward_layernorm_1",
        "blk.{}.post_ffw_norm_1",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Gemma 4, its text",
    name: "gemma4",
    gguf: "gemma4",
    class: "Gemma4ForCausalLM",
    unsaid: Unsaid::sizes([2304, 9216, 30, 8, 4, 512, 131_072, 262_144])
        .numbers(SIZES)
        .numbers(&[("hidden_size_per_layer_input", 256)]),
    names: &[NAMES, inputs::NAMES, gemma2::NAMES, gemma3::NORMS],
    signs: None,
    experts: true,
    open,
};

/// The one of 12 billion weights, which has no towers.
pub(crate) const UNIFIED: Architecture = Architecture {
    title: "Gemma 4 12B, its text",
    name: "gemma4_unified",
    class: "Gemma4UnifiedForCausalLM",
    unsaid: Unsaid::sizes([2304, 9216, 30, 8, 4, 1024, 262_144, 262_144]).numbers(SIZES),
    ..ARCHITECTURE
};

/// Every sixth layer sees all positions; the others have a window.
const PERIOD: usize = 6;

/// Values that configurations may omit.
const SIZES: Numbers = &[("head_dim", 256), ("global_head_dim", 512)];

const KV_HEADS: Key = Key("num_key_value_heads", "attention.head_count_kv");
const FEED_FORWARD: Key = Key("intermediate_size", "feed_forward_length");

fn open(files: &Files<'_>) -> Result<Opened> {
    let (config, plan, _) = read(files)?;
    let of = config.clone();
    let build = move |weights: &dyn Weights, ending| {
        let change = |weights: &dyn Weights, name: &str| layers::values(&plan, weights, name);
        layers::build(&Recipes { weights, change }, &of, &plan, ending)
    };
    Ok(Opened { config, build: Box::new(build) })
}

/// The numbers of a model, and the rotations of layers within a window and of those that see
/// everything.
fn read(files: &Files<'_>) -> Result<(Config, Plan, [Rotation; 2])> {
    let files = &files.with_lists(&[KV_HEADS.1, FEED_FORWARD.1]);
    let keys = &files.keys;
    let mut raw = gemma2::read(files)?;
    keys.only(Key("hidden_activation", ""), &["gelu_pytorch_tanh"])?;
    // Images see what is behind them; texts do not.
    keys.only(Key("use_bidirectional_attention", ""), &["vision"])?;
    let count = raw.layers.within(1..=LAYERS)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    // The last layer sees everything, whatever its list says.
    raw.windows.resize(count, None);
    raw.windows[count - 1] = None;
    let sizes = head_sizes(files, &raw)?;
    let kv_heads = kv_heads(files, &raw)?;
    let [local, global] = rotations(files, &raw, &sizes)?;
    let feed_forward = keys.of_layers(FEED_FORWARD, count)?;
    let width = raw.feed_forward.clone();
    raw.head_dim = Some(sizes[0].clone());
    raw.kv_heads = kv_heads[0].clone();
    raw.rotation = Some(local.clone());
    let heads = raw.heads.value;
    let loaded = raw.loaded;
    let mut config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let kind = |i: usize, rotation: &Rotation| -> Result<Kind> {
        let (head_dim, kv_heads) = (sizes[i].within(1..=1 << 14)?, kv_heads[i].clone());
        if !heads.is_multiple_of(kv_heads.within(1..=1 << 16)?) {
            let expected = format!("a divisor of the {heads} query heads");
            return Err(kv_heads.wrong(expected, kv_heads.value));
        }
        let rope = rotation.rope(head_dim, &sizes[i], Pairing::Half, context)?;
        Ok(Kind { head_dim, kv_heads: kv_heads.value, rope })
    };
    let kinds = [kind(0, &local)?, kind(1, &global)?];
    let shared = shared(files, &config)?;
    config.spare = spare(&shared);
    let wide = keys.flag(Key("use_double_wide_mlp", ""))? == Some(true);
    let feed_forward = feed_forward.unwrap_or_else(|| {
        let twice = |shared: &Option<usize>| if wide && shared.is_some() { 2 } else { 1 };
        shared.iter().map(|shared| config.feed_forward * twice(shared)).collect()
    });
    if let Some(odd) = feed_forward.iter().find(|width| !(1..=LIMIT).contains(*width)) {
        return Err(width.wrong(format!("numbers from 1 to {LIMIT}"), odd));
    }
    let input = Key("hidden_size_per_layer_input", "embedding_length_per_layer_input");
    let input = keys.size(input)?.filter(|input| input.value > 0);
    let input = input.map_or(Ok(0), |input| input.within(1..=1 << 14))?;
    keys.size(Key("vocab_size_per_layer_input", ""))?;
    let cap = keys.number(Key("final_logit_softcapping", "final_logit_softcapping"))?;
    let plan = Plan {
        kinds,
        feed_forward,
        shared,
        scales: scales(files, count)?,
        input,
        logit_cap: cap.map(|cap| cap.positive()).transpose()?.map(|cap| cap as f32),
        bias: files.bias("attention_bias")?,
        mixture: mixture::read(files, config.hidden)?,
    };
    Ok((config, plan, [local, global]))
}

/// For each layer, the earlier one to whose keys and values it attends, if it has none: the last
/// one of its kind that has.
///
/// # Errors
/// More layers than there are, or a kind of which none has some.
pub(crate) fn shared(files: &Files<'_>, config: &Config) -> Result<Vec<Option<usize>>> {
    let window = |layer: usize| config.windows.get(layer).copied().flatten();
    let windows: Vec<Option<usize>> = (0..config.layers).map(window).collect();
    let shared = Key("num_kv_shared_layers", "attention.shared_kv_layers");
    let stated = files.keys.size(shared)?;
    let own = windows.len() - stated.as_ref().map_or(Ok(0), |n| n.within(0..=windows.len()))?;
    let of = |(i, window): (usize, &Option<usize>)| {
        if i < own {
            return Ok(None);
        }
        let alike = |at: &usize| windows[*at].is_some() == window.is_some();
        let none = || {
            let expected = "layers of both kinds that have keys of their own";
            files.keys.wrong(shared, expected, windows.len() - own)
        };
        (0..own).rev().find(alike).map(Some).ok_or_else(none)
    };
    windows.iter().enumerate().map(of).collect()
}

/// Weights of keys and values that checkpoints have, of no use, in layers that attend to those of
/// others.
pub(crate) fn spare(shared: &[Option<usize>]) -> Vec<String> {
    let layers = shared.iter().enumerate().filter(|(_, shared)| shared.is_some());
    let of = |i: usize| ["k", "v", "k_norm"].map(|part| format!("blocks.{i}.attention.{part}"));
    layers.flat_map(|(i, _)| of(i)).collect()
}

/// The factor on the residual stream behind each layer, which the weights say.
fn scales(files: &Files<'_>, count: usize) -> Result<Vec<f32>> {
    let one = |i: usize| Ok(files.number(&format!("blocks.{i}.scale"))?.unwrap_or(1.0));
    (0..count).map(one).collect()
}
