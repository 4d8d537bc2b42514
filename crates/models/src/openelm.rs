//! OpenELM (Mehta et al. 2024): Qwen3's blocks, which have numbers of heads and widths of their own,
//! with q, k and v in one matrix, and gate and up in another.

use crate::config::{Config, LAYERS, LIMIT, Raw, SILU, rows_of_embedding};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, phi3};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Mlp, Pairing, QkNorm, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.token_embeddings", "token_embd"),
    ("norm", "transformer.norm", "output_norm"),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "transformer.layers.{}.attn_norm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "transformer.layers.{}.attn.qkv_proj", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.q_norm", "transformer.layers.{}.attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "transformer.layers.{}.attn.k_norm", "blk.{}.attn_k_norm"),
    ("blocks.{}.attention.o", "transformer.layers.{}.attn.out_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.layers.{}.ffn_norm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "transformer.layers.{}.ffn.proj_1", ""),
    ("blocks.{}.mlp.gate", "", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.layers.{}.ffn.proj_2", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OpenELM",
    name: "openelm",
    gguf: "openelm",
    class: "OpenELMForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

const LAYERS_KEY: Key = Key("num_transformer_layers", "block_count");
const HEADS: Key = Key("num_query_heads", "attention.head_count");
const KV_HEADS: Key = Key("num_kv_heads", "attention.head_count_kv");
const FEED_FORWARD: Key = Key("ffn_multipliers", "feed_forward_length");
const EPS: Key = Key("", "attention.layer_norm_rms_epsilon");

/// Keys that follow from others.
const NOTED: &[&str] = &["num_gqa_groups", "qkv_multipliers", "rope_max_length"];

/// The sizes of a block.
#[derive(Debug, Clone, Copy)]
struct Block {
    heads: usize,
    kv_heads: usize,
    feed_forward: usize,
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("activation_fn_name", ""), &["swish"])?;
    keys.only(Key("normalization_layer_name", ""), &["rms_norm"])?;
    for key in ["ffn_with_glu", "normalize_qk_projections", "share_input_output_layers"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            return Err(keys.wrong(key, true, false).of(ErrorKind::Unsupported));
        }
    }
    let hidden = keys.needed(Key("model_dim", "embedding_length"))?;
    let blocks = blocks(files)?;
    let most = |of: &dyn Fn(&Block) -> usize| blocks.iter().map(of).max().unwrap_or(0);
    let heads = keys.stated(HEADS, most(&|block| block.heads));
    let head_dim = keys.needed(Key("head_dim", "attention.key_length"))?;
    keys.size(Key("", "attention.value_length"))?;
    keys.state(Key("", "attention.value_length"), Some(MetadataValue::U32(head_dim.value as u32)));
    let raw = Raw {
        architecture: files.architecture,
        layers: keys.needed(LAYERS_KEY)?,
        kv_heads: heads.clone(),
        heads,
        head_dim: Some(head_dim.clone()),
        feed_forward: keys.stated(FEED_FORWARD, most(&|block| block.feed_forward)),
        hidden,
        vocab: match rows_of_embedding(files)? {
            Some(rows) => keys.stated("vocab_size", rows),
            None => keys.needed("vocab_size")?,
        },
        norm_eps: keys.number_or(EPS, 1e-6)?,
        windows: Vec::new(),
        gate: SILU,
        context: keys.needed(Key("max_context_length", "context_length"))?,
        tied: true,
        rotation: Some(Rotation {
            theta: keys.number_or(Key("rope_freq_constant", "rope.freq_base"), 10_000.0)?,
            rotary: keys.size(Key("", "rope.dimension_count"))?,
            scaling: keys.stated("", Scaling::None),
        }),
        pairing: Pairing::Half,
        warnings: Vec::new(),
        loaded: files.context,
    };
    let config = raw.check()?;
    let (of, held) = (blocks.clone(), blocks.clone());
    let attention = move |config: &Config, layer: usize| {
        let Block { heads, kv_heads, .. } = of[layer];
        let qk_norm = QkNorm::Heads(config.norm_eps);
        AttentionOptions { heads, kv_heads, qk_norm, ..config.attention(layer) }
    };
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            let (name, width) = (format!("blocks.{i}.mlp"), blocks[i].feed_forward);
            let mlp = Mlp::new(builder, &name, [config.hidden, width], Bias::Never, config.gate)?;
            Ok(Box::new(move |x| mlp.forward(x)))
        }),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let stored =
        move |config: &Config, weights: &dyn Weights, name: &str| -> Result<Option<Stored>> {
            let layer = name.split('.').nth(1).and_then(|layer| layer.parse::<usize>().ok());
            let Some(Block { heads, kv_heads, feed_forward }) = layer.and_then(|i| held.get(i))
            else {
                return Ok(None);
            };
            // The parts of a block, with its own sizes.
            let own = Config {
                heads: *heads,
                kv_heads: *kv_heads,
                feed_forward: *feed_forward,
                ..config.clone()
            };
            phi3::part(&own, weights, name)
        };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The sizes of all blocks.
fn blocks(files: &Files<'_>) -> Result<Vec<Block>> {
    let keys = &files.keys;
    let count = keys.needed(LAYERS_KEY)?.within(1..=LAYERS)?;
    let list = |key: Key| {
        let found = keys.of_layers(key, count)?;
        found.ok_or_else(|| keys.wrong(key, format!("a list of {count} numbers"), "none"))
    };
    let widths = match keys.dialect() {
        Dialect::Gguf => list(FEED_FORWARD)?,
        Dialect::HuggingFace => {
            let hidden = keys.needed(Key("model_dim", "embedding_length"))?.within(1..=LIMIT)?;
            let divisor = keys.size("ffn_dim_divisor")?.map_or(Ok(1), |n| n.within(1..=LIMIT))?;
            let multipliers = keys.numbers(FEED_FORWARD.0)?.unwrap_or_default();
            if multipliers.len() != count {
                let expected = format!("a list of {count} numbers");
                return Err(keys.wrong(FEED_FORWARD, expected, multipliers.len()));
            }
            multipliers.into_iter().map(|by| divisible(by, hidden, divisor)).collect()
        }
    };
    let (heads, groups) = (list(HEADS)?, list(KV_HEADS)?);
    let block = |i: usize| -> Result<Block> {
        let size = |key: Key, size: usize| keys.stated(key, size).within(1..=LIMIT);
        let (heads, kv_heads) = (size(HEADS, heads[i])?, size(KV_HEADS, groups[i])?);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("multiples of the {kv_heads} key/value heads of layer {i}");
            return Err(keys.wrong(HEADS, expected, heads));
        }
        Ok(Block { heads, kv_heads, feed_forward: size(FEED_FORWARD, widths[i])? })
    };
    (0..count).map(block).collect()
}

/// `by * width` in steps of `divisor`, the nearest that is not less than nine tenths of it.
fn divisible(by: f32, width: usize, divisor: usize) -> usize {
    let wanted = f64::from(by) * width as f64;
    let steps = (wanted + divisor as f64 / 2.0) as usize / divisor;
    let near = (steps * divisor).max(divisor);
    if (near as f64) < 0.9 * wanted { near + divisor } else { near }
}

/// GGUF's metadata of blocks, which have sizes of their own; none for other architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
) -> Result<Vec<(&'static str, MetadataValue)>> {
    if config.architecture.name != ARCHITECTURE.name {
        return Ok(Vec::new());
    }
    let blocks = blocks(files)?;
    let list = |of: &dyn Fn(&Block) -> usize| {
        let all = blocks.iter().map(|block| of(block) as i32).collect();
        MetadataValue::Array(MetadataArray::I32(all))
    };
    Ok(vec![
        (HEADS.1, list(&|block| block.heads)),
        (KV_HEADS.1, list(&|block| block.kv_heads)),
        (FEED_FORWARD.1, list(&|block| block.feed_forward)),
    ])
}
