//! Refact (Small Magellanic Cloud AI 2023): slopes on scores in the place of positions, one head of keys
//! and values, gated feed-forwards. Folders have layer norms without biases; readers of GGUF take
//! RMS norms with the same weights, so that a file computes another model.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, decoder, openai_gpt, phi3};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Builder, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("norm", "ln_f", ""),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "transformer.h.{}.attn.q", "blk.{}.attn_q"),
    ("blocks.{}.attention.kv", "transformer.h.{}.attn.kv", ""),
    ("blocks.{}.attention.k", "", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.c_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "transformer.h.{}.mlp.gate_up_proj", ""),
    ("blocks.{}.mlp.gate", "", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Refact",
    name: "gpt_refact",
    gguf: "refact",
    class: "GPTRefactForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5).numbers(&[("num_key_value_heads", 1)]),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Feed-forwards are as wide as a multiple of this.
const STEP: usize = 256;

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(openai_gpt::OWN);
    let keys = &files.keys;
    let gguf = keys.dialect() == Dialect::Gguf;
    let eps = match gguf {
        true => Key("", "attention.layer_norm_rms_epsilon"),
        false => Key("layer_norm_epsilon", ""),
    };
    check(files)?;
    let mut raw = Raw::read_quadrupled(files, eps)?;
    raw.rotation = None;
    if !gguf {
        // Two thirds of four times the width, rounded up.
        let width = raw.hidden.value.saturating_mul(8) / 3;
        raw.feed_forward = raw.hidden.clone().map(|_| width.div_ceil(STEP).saturating_mul(STEP));
    }
    let attention =
        |config: &Config, layer| AttentionOptions { slopes: true, ..config.attention(layer) };
    let parts = decoder::Parts {
        norm: if gguf { decoder::rms_norm } else { norm },
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(raw.check()?, parts, stored))
}

/// Refuses settings that no published model has.
fn check(files: &Files<'_>) -> Result<()> {
    let keys = &files.keys;
    // Sums in f32, as all are here, the longest texts of its training, and widths that are not read.
    for key in ["attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "n_inner"] {
        keys.note(key);
    }
    for key in ["do_sample", "attention_bias_in_fp32", "activation_function"] {
        keys.note(key);
    }
    for key in ["multi_query", "scale_attn_weights"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            let error = keys.wrong(key, "true, as of published models", false);
            return Err(error.of(ErrorKind::Unsupported));
        }
    }
    Ok(())
}

/// A layer norm without a bias.
fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<decoder::Layer> {
    decoder::layer_norm(builder, name, config, Bias::Never)
}

/// Slopes, and the rows of matrices that hold two.
fn stored(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    if let Some(slopes) = alibi::part(name, config.heads, alibi::USUAL) {
        return Ok(Some(slopes));
    }
    let width = config.kv_heads * config.head_dim;
    let start = match name.rsplit_once('.') {
        Some((_, "k")) => 0,
        Some((_, "v")) => width,
        _ => return phi3::part(config, weights, name),
    };
    let both = format!("{}kv", &name[..name.len() - 1]);
    phi3::rows(weights, &both, &[2 * width, config.hidden], start, width)
}
