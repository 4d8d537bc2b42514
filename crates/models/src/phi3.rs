//! Phi-3 (Abdin et al. 2024): Llama with q, k and v in one matrix, gate and up in another, a
//! window, and LongRoPE, whose factors follow the context that is loaded.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, decoder, windows};
use formats::{Error, Result};
use nn::{Bias, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("rope_factors_long", "rope_factors_long", "rope_factors_long"),
    ("rope_factors_short", "rope_factors_short", "rope_factors_short"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "model.layers.{}.self_attn.qkv_proj", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
];

/// The context that rotations are stretched from, where nothing is said beside them.
const ORIGINAL: Numbers = &[("original_max_position_embeddings", 4096)];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Phi-3 and Phi-3.5",
    name: "phi3",
    gguf: "phi3",
    class: "Phi3ForCausalLM",
    unsaid: Unsaid::sizes([3072, 8192, 32, 32, 0, 0, 4096, 32_064]).eps(1e-5).numbers(ORIGINAL),
    names: &[NAMES],
    signs: Some(&["blocks.0.attention.qkv", "blocks.0.mlp.gate_up"]),
    experts: false,
    open,
};

/// Matrices that lie beside adapters, which a text does without.
const BESIDE_ADAPTERS: &[Row] = &[
    ("blocks.{}.attention.qkv", "model.layers.{}.self_attn.qkv_proj.base_layer", ""),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj.base_layer", ""),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_up_proj.base_layer", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj.base_layer", ""),
];

/// Phi-4-multimodal (Microsoft 2025), its text.
pub(crate) const MULTIMODAL: Architecture = Architecture {
    title: "Phi-4-multimodal, its text",
    name: "phi4_multimodal",
    class: "Phi4MultimodalForCausalLM",
    unsaid: Unsaid::sizes([3072, 8192, 32, 32, 8, 0, 131_072, 200_064]).eps(1e-5).numbers(ORIGINAL),
    names: &[NAMES, BESIDE_ADAPTERS],
    signs: None,
    open: |files| {
        // Towers, and adapters for what they give.
        let beside = ["audio_config", "audio_processor", "embd_layer", "img_processor"];
        let adapters = ["speech_lora", "vision_config", "vision_lora"];
        beside.iter().chain(&adapters).for_each(|key| files.keys.note(key));
        open(files)
    },
    ..ARCHITECTURE
};

/// The same in the folders of its authors.
pub(crate) const AUTHORS: Architecture = Architecture {
    title: "Phi-4-multimodal, as its authors publish it",
    name: "phi4mm",
    class: "Phi4MMForCausalLM",
    ..MULTIMODAL
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    if files.keys.flag(Key("attention_bias", ""))? == Some(true) {
        return Err(files.keys.wrong("attention_bias", "false: this architecture has none", true));
    }
    let config = raw.check()?;
    let parts = decoder::Parts::new(Bias::Never, Config::attention);
    Ok(decoder::open_recipes(config, parts, part))
}

/// The rows of a fused matrix, or the elements of its bias, that are the weight `name`: q, k and v
/// one below the other, and gate and up.
pub(crate) fn part(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let (wide, narrow) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let ff = config.feed_forward;
    let (matrix, suffix) = match name.strip_suffix(".bias") {
        Some(matrix) => (matrix, ".bias"),
        None => (name, ""),
    };
    let Some((stem, part)) = matrix.rsplit_once('.') else { return Ok(None) };
    let (fused, start, count, all) = match part {
        "q" => ("qkv", 0, wide, wide + 2 * narrow),
        "k" => ("qkv", wide, narrow, wide + 2 * narrow),
        "v" => ("qkv", wide + narrow, narrow, wide + 2 * narrow),
        "gate" => ("gate_up", 0, ff, 2 * ff),
        "up" => ("gate_up", ff, ff, 2 * ff),
        _ => return Ok(None),
    };
    let fused = format!("{stem}.{fused}{suffix}");
    let expected: &[usize] = if suffix.is_empty() { &[all, config.hidden] } else { &[all] };
    rows(weights, &fused, expected, start, count)
}

/// `count` rows of the matrix or bias `fused`, from `start` on, if it is stored.
///
/// # Errors
/// Another shape than `expected`.
pub(crate) fn rows(
    weights: &dyn Weights,
    fused: &str,
    expected: &[usize],
    start: usize,
    count: usize,
) -> Result<Option<Stored>> {
    let Some(Stored { source, mut shape }) = weights.find(fused)? else { return Ok(None) };
    if shape != expected {
        let error =
            Error::new(weights.place(fused), formats::shape(expected), formats::shape(&shape));
        return Err(error.hint("the configuration does not fit these weights"));
    }
    shape[0] = count;
    Ok(Some(Stored { source: source.rows(start, count), shape }))
}
