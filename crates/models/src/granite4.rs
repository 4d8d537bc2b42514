//! Granite 4 without state spaces (IBM 2025): Granite 3 whose feed-forward is the expert that every
//! token goes through, beside a mixture where there is one. Its models with state spaces are
//! refused.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Key, Keys};
use crate::names::Row;
use crate::{Architecture, Opened, decoder, experts, granite, granitemoe, llama, phi3};
use formats::{ErrorKind, Result};

/// The feed-forward where there is no mixture.
const NAMES: &[Row] = &[
    ("blocks.{}.mlp.gate_up", "model.layers.{}.shared_mlp.input_linear", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.shared_mlp.output_linear", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Granite 4 without state spaces",
    name: "granitemoehybrid",
    gguf: "granite",
    class: "GraniteMoeHybridForCausalLM",
    names: &[NAMES, granitemoe::NAMES, llama::NAMES],
    signs: None,
    experts: true,
    open,
};

/// Keys about state spaces, which no layer has.
const NOTED: &[&str] = &[
    "init_method",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files, &["silu"])?;
    check(keys, raw.layers.value)?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("normalization_function", ""), &["rmsnorm"])?;
    keys.only(Key("position_embedding_type", ""), &["rope", "nope"])?;
    if keys.text(Key("position_embedding_type", ""))? != Some("rope") {
        raw.rotation = None;
    }
    let shared = keys.needed(Key("shared_intermediate_size", ""))?;
    if !experts::are_stated(keys)? {
        raw.feed_forward = shared;
        let granite::Open { config, parts } = granite::read(files, raw)?;
        return Ok(decoder::open_recipes(config, parts, phi3::part));
    }
    let width = Some(shared.within(1..=1 << 20)?);
    granitemoe::opened(files, granite::read(files, raw)?, width)
}

/// Refuses layers that are not attention; where nothing is said, none is.
fn check(keys: &Keys<'_>, layers: usize) -> Result<()> {
    const TYPES: Key = Key("layer_types", "");
    let expected = "attention in all layers: selective state spaces (Mamba) are not supported";
    let Some(types) = keys.get(TYPES) else {
        return Err(keys.wrong(TYPES, expected, "nothing").of(ErrorKind::Unsupported));
    };
    let list = types.as_array().ok_or_else(|| keys.odd(TYPES, "a list", types))?;
    if list.len() != layers {
        return Err(keys.wrong(TYPES, format!("{layers} entries, one for each layer"), list.len()));
    }
    // Both names are Transformers'.
    let other =
        |kind: &&serde_json::Value| !matches!(kind.as_str(), Some("attention" | "full_attention"));
    match list.iter().find(other) {
        Some(kind) => Err(keys.odd(TYPES, expected, kind).of(ErrorKind::Unsupported)),
        None => Ok(()),
    }
}
