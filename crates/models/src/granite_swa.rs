//! Granite Swash (IBM 2026): Granite, dense or with a mixture in every block, whose heads have sinks;
//! three layers of four have a window, and each layer a base of its rotation, or none.

use crate::config::{Config, RMS_EPS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::Rotation;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, granite, granitemoe, llama, windows};
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use nn::{AttentionOptions, Pairing, Rope};

/// GGUF's name of both.
pub(crate) const GGUF: &str = "granite_swa";

const NAMES: &[Row] =
    &[("blocks.{}.attention.sinks", "model.layers.{}.self_attn.sinks!", "blk.{}.attn_sinks")];

/// Experts as these models have them, in stacks of their own, or as Granite's mixtures do. GGUF has
/// gates on top of ups under the name of ups.
const MIXED: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.block_sparse_moe.router", "blk.{}.ffn_gate_inp"),
    ("blocks.{}.mlp.router", "model.layers.{}.block_sparse_moe.router.layer", ""),
    (
        "blocks.{}.mlp.experts.gate_up",
        "model.layers.{}.block_sparse_moe.experts.gate_up_proj!",
        "blk.{}.ffn_gate_up_exps",
    ),
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.block_sparse_moe.input_linear", ""),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.block_sparse_moe.experts.down_proj!",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.block_sparse_moe.output_linear", ""),
    (
        "blocks.{}.mlp.shared.gate_up",
        "model.layers.{}.shared_mlp.input_linear",
        "blk.{}.ffn_up_shexp",
    ),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.shared_mlp.output_linear",
        "blk.{}.ffn_down_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Granite Swash",
    name: "granite_swa",
    gguf: GGUF,
    class: "GraniteSWAForCausalLM",
    unsaid: Unsaid::sizes([2560, 8192, 24, 20, 4, 128, 8192, 100_352]).eps(1e-5),
    names: &[NAMES, MIXED, llama::NAMES, experts::SPARSE_BLOCK],
    signs: None,
    experts: true,
    open,
};

/// With a mixture in every block.
pub(crate) const MIXTURE: Architecture = Architecture {
    title: "Granite Swash, mixtures",
    name: "granitemoe_swa",
    class: "GraniteMoeSWAForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 128, 2048, 32_000]).numbers(&[
        ("num_attention_heads", 32),
        ("num_experts_per_tok", 2),
        ("num_local_experts", 8),
    ]),
    open: open_mixture,
    ..ARCHITECTURE
};

fn open(files: &Files<'_>) -> Result<Opened> {
    if files.keys.dialect() == Dialect::Gguf && experts::are_stated(&files.keys)? {
        let (keys, outer) = (files.keys.clone(), files.outer.clone());
        return open_mixture(&Files { architecture: &MIXTURE, keys, outer, ..*files });
    }
    experts::check(&files.keys)?;
    let granite::Open { config, parts } = read(files)?;
    Ok(decoder::open_parts(config, parts))
}

fn open_mixture(files: &Files<'_>) -> Result<Opened> {
    const SHARED: Key = Key("shared_intermediate_size", "expert_shared_feed_forward_length");
    let shared = files.keys.size(SHARED)?.filter(|width| width.value > 0);
    let shared = shared.map(|width| width.within(1..=1 << 20)).transpose()?;
    granitemoe::opened(files, read(files)?, shared, |_, _| Ok(None))
}

/// One layer of this many sees everything.
const PERIOD: usize = 4;

/// The base of each layer's rotation, 0 of those that are not rotated; of these alone, GGUF says
/// which they are.
const BASES: &str = "layer_rope_theta";
const ROTATED: Key = Key("", "attention.rope_pattern");

/// What both have in common.
fn read(files: &Files<'_>) -> Result<granite::Open> {
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    raw.windows = windows::leading(files, &raw.layers, PERIOD)?;
    let width = raw.head_dim.clone().unwrap_or_else(|| {
        let heads = raw.heads.value.max(1);
        raw.hidden.clone().map(|hidden| hidden / heads)
    });
    let (rotation, loaded, count) = (raw.rotation.clone(), raw.loaded, raw.layers.clone());
    let bases = match (keys.gguf_flags(ROTATED)?, &rotation) {
        (Some(rotated), Some(rotation)) => {
            let base = rotation.theta.value as f32;
            Some(rotated.into_iter().map(|rotated| if rotated { base } else { 0.0 }).collect())
        }
        _ => keys.numbers(BASES)?,
    };
    if let Some(bases) = bases.as_ref().filter(|bases: &&Vec<f32>| bases.len() != count.value) {
        let expected = format!("{} entries, as {} says", count.value, count.key());
        return Err(keys.wrong(BASES, expected, bases.len()));
    }
    let granite::Open { config, mut parts } = granite::read(files, raw)?;
    let context = loaded.unwrap_or(config.context);
    let rope = |base: &f32| -> Result<Option<Rope>> {
        let Some(rotation) = rotation.clone().filter(|_| *base != 0.0) else { return Ok(None) };
        let turned = Rotation { theta: keys.stated(BASES, f64::from(*base)), ..rotation };
        turned.rope(config.head_dim, &width, Pairing::Half, context).map(Some)
    };
    let ropes =
        bases.map(|bases| bases.iter().map(rope).collect::<Result<Vec<_>>>()).transpose()?;
    let attention = parts.attention;
    parts.attention = Box::new(move |config: &Config, layer| {
        let options = attention(config, layer);
        let rope = ropes.as_ref().map_or(options.rope, |ropes| ropes[layer].clone());
        AttentionOptions { sinks: true, rope, ..options }
    });
    Ok(granite::Open { config, parts })
}

/// GGUF's metadata of layers that are not rotated; none where all are, and for other architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
) -> Result<Option<(&'static str, MetadataValue)>> {
    let bases = files.keys.numbers(BASES)?.filter(|_| config.architecture.gguf == GGUF);
    let bases = bases.filter(|bases| bases.contains(&0.0));
    let list = |bases: Vec<f32>| bases.into_iter().map(|base| base != 0.0).collect();
    let list = |bases| (ROTATED.1, MetadataValue::Array(MetadataArray::Bool(list(bases))));
    Ok(bases.map(list))
}
