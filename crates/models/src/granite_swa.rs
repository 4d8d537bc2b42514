//! Granite Swash (IBM 2026): Granite, dense or with a mixture in every block, whose heads have sinks;
//! three layers of four have a window, and each layer a base of its rotation, or none.

use crate::config::{Config, RMS_EPS, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::rope::Rotation;
use crate::unsaid::Unsaid;
use crate::{Architecture, decoder, experts, granite, granitemoe, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Pairing, Rope};

const NAMES: &[Row] = &[("blocks.{}.attention.sinks", "model.layers.{}.self_attn.sinks!", "")];

/// Experts as these models have them, in stacks of their own.
const STACKS: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.block_sparse_moe.router", ""),
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.block_sparse_moe.experts.gate_up_proj!", ""),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.block_sparse_moe.experts.down_proj!", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Granite Swash",
    name: "granite_swa",
    gguf: "",
    class: "GraniteSWAForCausalLM",
    unsaid: Unsaid::sizes([2560, 8192, 24, 20, 4, 128, 8192, 100_352]).eps(1e-5),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open: |files| {
        let granite::Open { config, parts } = read(files)?;
        Ok(decoder::open_parts(config, parts))
    },
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
    names: &[NAMES, STACKS, granitemoe::NAMES, llama::NAMES, experts::SPARSE_BLOCK],
    experts: true,
    open: |files| {
        let shared = files.keys.size(Key("shared_intermediate_size", ""))?;
        let shared = shared.filter(|width| width.value > 0);
        let shared = shared.map(|width| width.within(1..=1 << 20)).transpose()?;
        granitemoe::opened(files, read(files)?, shared, |_, _| Ok(None))
    },
    ..ARCHITECTURE
};

/// One layer of this many sees everything.
const PERIOD: usize = 4;

/// What both have in common.
fn read(files: &Files<'_>) -> Result<granite::Open> {
    const BASES: &str = "layer_rope_theta";
    let keys = &files.keys;
    keys.only(Key("hidden_act", ""), &["silu"])?;
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    raw.windows = windows::leading(files, &raw.layers, PERIOD)?;
    let width = raw.head_dim.clone().unwrap_or_else(|| {
        let heads = raw.heads.value.max(1);
        raw.hidden.clone().map(|hidden| hidden / heads)
    });
    let (rotation, loaded, count) = (raw.rotation.clone(), raw.loaded, raw.layers.clone());
    let bases = keys.numbers(BASES)?;
    if let Some(bases) = bases.as_ref().filter(|bases| bases.len() != count.value) {
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
