//! DeciLM and Llama-Nemotron (Bercovich et al. 2025), which a search has made of Llama: blocks with
//! groups of heads and feed-forwards of their own sizes, without attention, with a single product in
//! its place, or without a feed-forward.

use crate::config::{LAYERS, LIMIT, RMS_EPS, Raw};
use crate::files::Files;
use crate::keys::{Asked, Dialect, Key, Keys};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Config, Opened, decoder, llama, windows};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Mlp, Pairing, Projection};

/// The product in the place of attention, which GGUF calls its output.
const NAMES: &[Row] =
    &[("blocks.{}.attention.o", "model.layers.{}.self_attn.linear_attn", "blk.{}.attn_output")];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Llama-Nemotron (NAS) and DeciLM",
    name: "nemotron-nas",
    gguf: "deci",
    class: "DeciLMForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[llama::NAMES, NAMES],
    signs: None,
    experts: false,
    open,
};

const HEADS: Key = Key("", "attention.head_count");
const KV_HEADS: Key = Key("num_key_value_heads_per_layer", "attention.head_count_kv");
const FEED_FORWARD: Key = Key("", "feed_forward_length");

/// A block's sizes.
#[derive(Debug, Clone, Copy)]
struct Block {
    mixes: Mixes,
    /// Width of the feed-forward; 0: none.
    feed_forward: usize,
}

/// How a block mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mixes {
    Not,
    /// By a product in the place of attention, which mixes none.
    Linear,
    /// By attention with this number of key/value heads.
    Attention(usize),
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_lists(&[HEADS.1, KV_HEADS.1, FEED_FORWARD.1]);
    let mut raw = Raw::read_quadrupled(files, RMS_EPS)?;
    windows::of_types(files, &raw.layers, None)?;
    if files.keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let blocks = blocks(files, &raw)?;
    let groups = blocks.iter().filter_map(|block| match block.mixes {
        Mixes::Attention(heads) => Some(heads),
        _ => None,
    });
    // Those of the layers that have any; layers that have none state 0.
    raw.kv_heads.value = groups.clone().max().unwrap_or(raw.kv_heads.value);
    if let Some(most) = files.keys.of_layers(HEADS, blocks.len())? {
        raw.heads.value = most.into_iter().max().unwrap_or(0);
    }
    let heads = raw.heads.value;
    if let Some(odd) = groups.clone().find(|groups| !heads.is_multiple_of(*groups)) {
        return Err(raw.heads.wrong(format!("a multiple of {odd}, as of all layers"), heads));
    }
    raw.feed_forward.value =
        blocks.iter().map(|block| block.feed_forward).max().filter(|most| *most > 0).unwrap_or(1);
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let (of, held) = (blocks.clone(), blocks.clone());
    let attention = move |config: &Config, layer: usize| AttentionOptions {
        kv_heads: match of[layer].mixes {
            Mixes::Attention(heads) => heads,
            _ => config.kv_heads,
        },
        ..decoder::biased(bias)(config, layer)
    };
    let mixers = blocks.clone();
    let parts = decoder::Parts {
        holds: Box::new(move |i| [held[i].mixes != Mixes::Not, held[i].feed_forward > 0]),
        mixer: Box::new(move |builder, config, i| {
            if mixers[i].mixes != Mixes::Linear {
                return Ok(None);
            }
            let (name, size) = (format!("blocks.{i}.attention.o"), [config.hidden; 2]);
            let linear = Projection::new(builder, &name, size, bias)?;
            Ok(Some(Box::new(move |x| linear.forward(x))))
        }),
        feed_forward: Box::new(move |builder, config, i| {
            let (name, width) = (format!("blocks.{i}.mlp"), blocks[i].feed_forward);
            let mlp = Mlp::new(builder, &name, [config.hidden, width], mlp_bias, config.gate)?;
            Ok(Box::new(move |x| mlp.forward(x)))
        }),
        ..decoder::Parts::new(mlp_bias, attention)
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}

/// The sizes of all blocks.
fn blocks(files: &Files<'_>, raw: &Raw) -> Result<Vec<Block>> {
    let keys = &files.keys;
    let count = raw.layers.within(1..=LAYERS)?;
    if let Some(listed) = keys.get(Key("block_configs", "")) {
        let all = listed.as_array().filter(|all| all.len() == count);
        let all = all.ok_or_else(|| {
            let found = listed.as_array().map_or(0, Vec::len);
            keys.wrong("block_configs", format!("{count} blocks"), found)
        })?;
        let read = |(i, block): (usize, &serde_json::Value)| {
            let (place, asked) = (format!("{}: block_configs.{i}", keys.file), Asked::default());
            let of = Keys::json(&place, block, &asked);
            let block = of_object(&of, raw)?;
            of.refuse_unread(&[]).map(|_| block)
        };
        return all.iter().enumerate().map(read).collect();
    }
    let heads = keys.of_layers(HEADS, count)?.unwrap_or_else(|| vec![raw.heads.value; count]);
    let groups = keys.of_layers(KV_HEADS, count)?;
    let groups = groups.unwrap_or_else(|| vec![raw.kv_heads.value; count]);
    let widths = keys.of_layers(FEED_FORWARD, count)?;
    let widths = widths.unwrap_or_else(|| vec![raw.feed_forward.value; count]);
    let block = |i: usize| Block {
        mixes: match (heads[i], groups[i]) {
            (0, _) => Mixes::Not,
            (_, 0) => Mixes::Linear,
            (_, groups) => Mixes::Attention(groups),
        },
        feed_forward: widths[i],
    };
    Ok((0..count).map(block).collect())
}

/// The sizes of a block of `block_configs`.
fn of_object(of: &Keys<'_>, raw: &Raw) -> Result<Block> {
    let part = |name: &'static str| {
        let found = of.object(name)?;
        found.ok_or_else(|| of.wrong(name, "an object", "nothing"))
    };
    let (attention, ffn) = (part("attention")?, part("ffn")?);
    let says = |keys: &Keys<'_>, key: &'static str| Ok(keys.flag(key)?.unwrap_or(false));
    let each = attention.size("n_heads_in_group")?.map(|each| each.within(1..=1 << 16));
    let mixes = match (says(&attention, "replace_with_linear")?, each.transpose()?) {
        _ if says(&attention, "no_op")? => Mixes::Not,
        (true, _) => Mixes::Linear,
        (false, None) => Mixes::Not,
        (false, Some(each)) => Mixes::Attention((raw.heads.value / each).max(1)),
    };
    if says(&ffn, "replace_with_linear")? {
        let error = ffn.wrong("replace_with_linear", "false: a whole feed-forward", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let (width, by) = (ffn.size("intermediate_size")?, ffn.number("ffn_mult")?);
    let feed_forward = match (says(&ffn, "no_op")?, width, by) {
        (true, ..) | (false, None, None) => 0,
        (false, Some(width), _) => width.within(1..=LIMIT)?,
        (false, None, Some(by)) => {
            let hidden = raw.hidden.within(1..=LIMIT)? as f64;
            let width = (2.0 * by.positive()? * hidden / 3.0).min(LIMIT as f64) as usize;
            width.next_multiple_of(256)
        }
    };
    Ok(Block { mixes, feed_forward })
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
    let blocks = blocks(files, &Raw::read_quadrupled(files, RMS_EPS)?)?;
    let list = |of: &dyn Fn(&Block) -> usize| {
        let all = blocks.iter().map(|block| of(block) as i32).collect();
        MetadataValue::Array(MetadataArray::I32(all))
    };
    let heads = |block: &Block| if block.mixes == Mixes::Not { 0 } else { config.heads };
    let groups = |block: &Block| match block.mixes {
        Mixes::Attention(groups) => groups,
        _ => 0,
    };
    Ok(vec![
        (HEADS.1, list(&heads)),
        (KV_HEADS.1, list(&groups)),
        (FEED_FORWARD.1, list(&|block| block.feed_forward)),
    ])
}
