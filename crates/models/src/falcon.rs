//! Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, behind one layer norm
//! or each behind its own; q, k and v in one matrix, in which each key/value head has its query
//! heads, its key and its value below each other. Those with ALiBi are refused.

use crate::config::Raw;
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::{Architecture, Opened, gpt2, internlm2, phimoe};
use formats::{ErrorKind, Result};
use nn::Unary;

const NAMES: &[Row] = &[
    ("embed", "transformer.word_embeddings", ""),
    ("norm", "transformer.ln_f", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_attn", ""),
    ("blocks.{}.attention_norm", "transformer.h.{}.input_layernorm", ""),
    ("blocks.{}.attention.groups", "transformer.h.{}.self_attention.query_key_value", ""),
    ("blocks.{}.attention.o", "transformer.h.{}.self_attention.dense", ""),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_mlp", ""),
    ("blocks.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm", ""),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.dense_h_to_4h", ""),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.dense_4h_to_h", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Falcon",
    name: "falcon",
    gguf: "",
    class: "FalconForCausalLM",
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] =
    &[("intermediate_size", "ffn_hidden_size"), ("num_key_value_heads", "num_kv_heads")];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_quadrupled(files, Key("layer_norm_epsilon", ""), 1e-5)?;
    if keys.flag(Key("alibi", ""))? == Some(true) {
        let error = keys.wrong("alibi", "false: slopes on scores are not supported", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    // For training.
    keys.note("hidden_dropout");
    let newer = keys.flag(Key("new_decoder_architecture", ""))?.unwrap_or(false);
    let one = keys.flag(Key("multi_query", ""))?.unwrap_or(true);
    let beside = keys.flag(Key("parallel_attn", ""))?.unwrap_or(true);
    let norms =
        keys.size("num_ln_in_parallel_attn")?.map(|norms| norms.within(1..=2)).transpose()?;
    if !newer {
        raw.kv_heads = if one { raw.heads.clone().map(|_| 1) } else { raw.heads.clone() };
    }
    let order = match (beside, newer && norms.unwrap_or(2) == 2) {
        (false, _) if newer => {
            return Err(keys.wrong("parallel_attn", "true with new_decoder_architecture", false));
        }
        (false, _) => Order::InTurn,
        (true, true) => Order::Beside,
        (true, false) => Order::BesideOneNorm,
    };
    let act = gpt2::activation(files, "activation", &[Unary::GeluErf])?;
    let bias = files.bias("bias")?;
    let parts = decoder::Parts {
        order,
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, bias)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(bias, decoder::biased(bias))
    };
    Ok(decoder::open_recipes(raw.check()?, parts, internlm2::part))
}
