//! Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, behind one layer norm
//! or each behind its own; q, k and v in one matrix, in which each key/value head has its query
//! heads, its key and its value below each other; in GGUF all queries are in front of all keys.
//! Some have slopes on scores in the place of rotations, which are divided as scores are; slopes are
//! those of bf16. Transformers rounds their products with positions to bf16 too, which is not done here.

use crate::config::{Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, gpt2, internlm2, phi3, phimoe};
use formats::Result;
use formats::gguf::MetadataValue;
use formats::quant::plain::{bf16_to_f32, f32_to_bf16};
use nn::{AttentionOptions, Stored, Unary, Weights};
use program::Weight;

const NAMES: &[Row] = &[
    ("embed", "transformer.word_embeddings", "token_embd"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_attn", "blk.{}.attn_norm_2"),
    ("blocks.{}.attention_norm", "transformer.h.{}.input_layernorm", ""),
    ("blocks.{}.attention.groups", "transformer.h.{}.self_attention.query_key_value", ""),
    ("blocks.{}.attention.qkv", "", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "transformer.h.{}.self_attention.dense", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_mlp", "blk.{}.attn_norm"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm", ""),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.dense_h_to_4h", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.dense_4h_to_h", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Falcon",
    name: "falcon",
    gguf: "falcon",
    class: "FalconForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// The order of rows of q, k and v in GGUF, after who wrote the first reader of it.
const LAYOUT: &str = "jploski";

/// Names of its own for sizes.
const OWN: &[(&str, &str)] =
    &[("intermediate_size", "ffn_hidden_size"), ("num_key_value_heads", "num_kv_heads")];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw =
        Raw::read_quadrupled(files, Key("layer_norm_epsilon", "attention.layer_norm_epsilon"))?;
    let slopes = keys.flag(Key("alibi", ""))?.unwrap_or(false);
    if slopes {
        raw.rotation = None;
    }
    // For training.
    keys.note("hidden_dropout");
    keys.only(Key("", "tensor_data_layout"), &[LAYOUT])?;
    let gguf = keys.dialect() == Dialect::Gguf;
    let newer = keys.flag(Key("new_decoder_architecture", ""))?.unwrap_or(false);
    let one = keys.flag(Key("multi_query", ""))?.unwrap_or(true);
    let beside = keys.flag(Key("parallel_attn", ""))?.unwrap_or(true);
    let norms =
        keys.size("num_ln_in_parallel_attn")?.map(|norms| norms.within(1..=2)).transpose()?;
    if !newer && !gguf {
        raw.kv_heads = if one { raw.heads.clone().map(|_| 1) } else { raw.heads.clone() };
    }
    let two = match gguf {
        true => files.names.find("blocks.0.attention_norm")?.is_some(),
        false => newer && norms.unwrap_or(2) == 2,
    };
    let order = match (beside, two) {
        (false, _) if newer => {
            return Err(keys.wrong("parallel_attn", "true with new_decoder_architecture", false));
        }
        (false, _) => Order::InTurn,
        (true, true) => Order::Beside,
        (true, false) => Order::BesideOneNorm,
    };
    let act = gpt2::activation(files, "activation", &[Unary::GeluErf])?;
    let bias = files.bias("bias")?;
    let attention = move |config: &Config, layer: usize| AttentionOptions {
        slopes,
        ..decoder::biased(bias)(config, layer)
    };
    let parts = decoder::Parts {
        order,
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, bias)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(bias, attention)
    };
    let mut config = raw.check()?;
    config.gguf_orders = &[".attention.q", ".attention.k", ".attention.v"];
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        let root = (config.head_dim as f32).sqrt();
        let change = |slope: f64| bf16_to_f32(f32_to_bf16(slope as f32)) / root;
        match alibi::part_by(name, config.heads, alibi::USUAL, change) {
            Some(slopes) => Ok(Some(slopes)),
            None if gguf => in_gguf(config, weights, name),
            None => internlm2::part(config, weights, name),
        }
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The weight `name` of a GGUF file. The norm that it names without a number is the block's only
/// one, or else the feed-forward's.
fn in_gguf(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let norm = name.replace(".attention_norm", ".mlp_norm");
    match norm != name && weights.find(name)?.is_none() {
        true => weights.find(&norm),
        false => phi3::part(config, weights, name),
    }
}

/// GGUF's key for the order of rows of q, k and v; none for other architectures.
pub(crate) fn metadata(config: &Config) -> Option<(&'static str, MetadataValue)> {
    let ours = config.architecture.name == ARCHITECTURE.name;
    ours.then(|| ("tensor_data_layout", MetadataValue::String(LAYOUT.to_owned())))
}

/// The name of a weight in GGUF, where most architectures call it `name`: a block's only norm has
/// another.
pub(crate) fn name_in_gguf(architecture: &str, held: &[Weight], name: String) -> String {
    let two = held.iter().any(|weight| weight.name == "blocks.0.mlp_norm");
    match architecture == ARCHITECTURE.gguf && !two {
        true => name.replace(".attn_norm_2.", ".attn_norm."),
        false => name,
    }
}
