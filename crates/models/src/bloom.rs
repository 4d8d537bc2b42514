//! BLOOM (BigScience 2022): slopes on scores in the place of positions, layer norms with biases, one
//! of them over the embeddings, and a feed-forward without a gate. q, k and v are one matrix, in
//! folders by turns for each head.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, decoder, gpt_neox, gpt2, phi3};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.word_embeddings", "token_embd"),
    ("embed_norm", "transformer.word_embeddings_layernorm", "token_embd_norm"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.h.{}.input_layernorm", "blk.{}.attn_norm"),
    (
        "blocks.{}.attention.qkv",
        "transformer.h.{}.self_attention.query_key_value",
        "blk.{}.attn_qkv",
    ),
    ("blocks.{}.attention.o", "transformer.h.{}.self_attention.dense", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.dense_h_to_4h", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.dense_4h_to_h", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "BLOOM",
    name: "bloom",
    gguf: "bloom",
    class: "BloomForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("hidden_size", "n_embed"),
    ("max_position_embeddings", "seq_length"),
];

/// How the authors' own program computes the same, and dropouts.
const NOTED: &[&str] = &[
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    let eps = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_quadrupled(files, eps)?;
    raw.rotation = None;
    const NORMED: &str = "apply_residual_connection_post_layernorm";
    if keys.flag(Key(NORMED, ""))? == Some(true) {
        let error = keys.wrong(NORMED, "false: what is added to is not normed", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let attention = |config: &Config, layer: usize| AttentionOptions {
        slopes: true,
        ..decoder::biased(Bias::Always)(config, layer)
    };
    let parts = decoder::Parts {
        normed_embeddings: true,
        learned_positions: false,
        ..gpt2::parts(&[Unary::GeluTanh], attention)
    };
    let mut config = raw.check()?;
    // They lie by turns of heads in Hugging Face's form.
    config.gguf_orders = &[".attention.q", ".attention.k", ".attention.v"];
    let by_turns = keys.dialect() == Dialect::HuggingFace;
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        if let Some(slopes) = alibi::part(name, config.heads, alibi::USUAL) {
            return Ok(Some(slopes));
        }
        match by_turns {
            true => gpt_neox::part(config, weights, name),
            false => phi3::part(config, weights, name),
        }
    };
    Ok(decoder::open_recipes(config, parts, stored))
}
