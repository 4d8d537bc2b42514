//! Jais (Sengupta et al. 2023): GPT-2 with slopes on scores in the place of positions, a gated
//! feed-forward, and factors on embeddings and logits, which GGUF has in the weights. Scores are
//! divided by the size of a head.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, decoder, gpt2, phimoe};
use formats::{ErrorKind, Result, Source};
use nn::{AttentionOptions, Bias, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.c_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "transformer.h.{}.mlp.c_fc2", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Jais",
    name: "jais",
    gguf: "jais",
    class: "JAISLMHeadModel",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("intermediate_size", "n_inner"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
];

const EPS: Key = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");
/// The exponent of the last slope.
const STEEPEST: Key = Key("", "attention.max_alibi_bias");

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    // Sums in f32, as all are here, and as many as n_positions.
    for key in ["reorder_and_upcast_attn", "n_ctx"] {
        keys.note(key);
    }
    keys.only(Key("activation_function", ""), &["swiglu"])?;
    keys.only(Key("position_embedding_type", ""), &["alibi"])?;
    for (key, only) in [("scale_attn_weights", true), ("scale_attn_by_inverse_layer_idx", false)] {
        if keys.flag(Key(key, ""))? == Some(!only) {
            return Err(keys.wrong(key, only, !only).of(ErrorKind::Unsupported));
        }
    }
    let mut raw = Raw::read_quadrupled(files, EPS)?;
    raw.rotation = None;
    let gguf = keys.dialect() == Dialect::Gguf;
    let newer = keys.flag(Key("mup_scale_qk_dot_by_d", ""))?;
    let by_size = newer.or(keys.flag(Key("scale_qk_dot_by_d", ""))?).unwrap_or(gguf);
    let steepest = keys.number_or(STEEPEST, alibi::USUAL)?.value;
    let [embedding, logits] = factors(files)?;
    // In the weights, where these are read as GGUF has them.
    let within = files.apart;
    raw.tied &= !within;
    let attention = move |config: &Config, layer: usize| {
        let size = config.head_dim as f32;
        let scale = Some(if by_size { size.recip() } else { size.sqrt().recip() });
        let options = decoder::biased(Bias::Always)(config, layer);
        AttentionOptions { slopes: true, scale, ..options }
    };
    let parts = decoder::Parts {
        norm: phimoe::norm,
        multipliers: if within { [1.0; 3] } else { [embedding, 1.0, logits] },
        ..decoder::Parts::new(Bias::Always, attention)
    };
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        if let Some(slopes) = alibi::part(name, config.heads, steepest) {
            return Ok(Some(slopes));
        }
        let times = |name: &str, by: f32| -> Result<Option<Stored>> {
            let times =
                |of: Stored| Stored { source: Source::Times(Box::new(of.source), by), ..of };
            Ok(weights.find(name)?.map(times))
        };
        match name {
            "embed" if within => times("embed", embedding),
            "head" if within => Ok(times("head", logits)?.or(times("embed", logits)?)),
            _ => gpt2::part(config, weights, name, !gguf),
        }
    };
    Ok(decoder::open_recipes(raw.check()?, parts, stored))
}

/// The factors on embeddings and on logits, by either of their names.
fn factors(files: &Files<'_>) -> Result<[f32; 2]> {
    let number = |key: &'static str| -> Result<Option<f32>> {
        Ok(files.keys.number(Key(key, ""))?.map(|number| number.value as f32))
    };
    let embedding = number("mup_embeddings_scale")?.or(number("embeddings_scale")?);
    let (alpha, width) = (number("mup_output_alpha")?, number("mup_width_scale")?);
    let newer = alpha.zip(width).map(|(alpha, width)| alpha * width);
    let logits = newer.or(number("width_scale")?);
    Ok([embedding.unwrap_or(1.0), logits.unwrap_or(1.0)])
}
