//! GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): attention and feed-forward side
//! by side, each behind a layer norm, a quarter of each head rotated; q, k and v in one matrix, by
//! turns for each head. And GPT-NeoX Japanese (ABEJA 2022): one behind the other, all of each head
//! rotated, and no bias but that of the last attention.

use crate::config::{Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2, phi3, phimoe};
use formats::{Error, Result, Source, shape};
use nn::{AttentionOptions, Bias, Stored, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "gpt_neox.embed_in", "token_embd"),
    ("norm", "gpt_neox.final_layer_norm", "output_norm"),
    ("head", "embed_out", "output"),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "gpt_neox.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "gpt_neox.layers.{}.attention.query_key_value", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "gpt_neox.layers.{}.attention.dense", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "gpt_neox.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.up", "gpt_neox.layers.{}.mlp.dense_h_to_4h", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "gpt_neox.layers.{}.mlp.dense_4h_to_h", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GPT-NeoX and Pythia",
    name: "gpt_neox",
    gguf: "gptneox",
    class: "GPTNeoXForCausalLM",
    unsaid: Unsaid::sizes([6144, 24_576, 44, 64, 0, 0, 2048, 50_432]).eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

const JAPANESE_NAMES: &[Row] = &[
    ("embed", "gpt_neox_japanese.embed_in", ""),
    ("norm", "gpt_neox_japanese.final_layer_norm", ""),
    ("head", "embed_out", ""),
    ("blocks.{}.attention_norm", "gpt_neox_japanese.layers.{}.input_layernorm", ""),
    ("blocks.{}.attention.qkv", "gpt_neox_japanese.layers.{}.attention.query_key_value", ""),
    ("blocks.{}.attention.o", "gpt_neox_japanese.layers.{}.attention.dense", ""),
    // Its bias is apart.
    ("blocks.{}.attention.o", "gpt_neox_japanese.layers.{}.attention.dense!", ""),
    ("blocks.{}.mlp_norm", "gpt_neox_japanese.layers.{}.post_attention_layernorm", ""),
    ("blocks.{}.mlp.up", "gpt_neox_japanese.layers.{}.mlp.dense_h_to_4h", ""),
    ("blocks.{}.mlp.down", "gpt_neox_japanese.layers.{}.mlp.dense_4h_to_h", ""),
];

pub(crate) const JAPANESE: Architecture = Architecture {
    title: "GPT-NeoX Japanese",
    name: "gpt_neox_japanese",
    gguf: "",
    class: "GPTNeoXJapaneseForCausalLM",
    unsaid: Unsaid::sizes([2560, 0, 32, 32, 0, 0, 2048, 32_000]).eps(1e-5),
    names: &[JAPANESE_NAMES],
    open: open_japanese,
    ..ARCHITECTURE
};

const EPS: Key = Key("layer_norm_eps", "attention.layer_norm_epsilon");

/// Reads the rotation, of this part of each head where nothing is said.
fn rotation(files: &Files<'_>, raw: &mut Raw, usual: f64) -> Result<()> {
    let number = |key| files.keys.number(Key(key, ""));
    let (turned, base) = (number("rotary_pct")?, number("rotary_emb_base")?);
    if let (Some(rotation), Some(base)) = (&mut raw.rotation, base) {
        rotation.theta = base;
    }
    raw.turns_part(files, turned.map_or(usual, |part| part.value))
}

fn open_japanese(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_quadrupled(files, EPS)?;
    rotation(files, &mut raw, 1.0)?;
    if let Some(times) = keys.size("intermediate_multiple_size")? {
        let times = times.within(1..=64)?;
        raw.feed_forward = raw.hidden.clone().map(|hidden| hidden.saturating_mul(times));
    }
    let act = gpt2::activation(files, "hidden_act", &[Unary::GeluErf])?;
    let attention = |config: &Config, layer: usize| AttentionOptions {
        output_bias: Bias::IfStored,
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, Bias::Never)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(raw.check()?, parts, part))
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, EPS)?;
    rotation(files, &mut raw, 0.25)?;
    let act = gpt2::activation(files, "hidden_act", &[Unary::GeluErf])?;
    let beside = keys.flag(Key("use_parallel_residual", "use_parallel_residual"))?.unwrap_or(true);
    let bias = match keys.flag(Key("attention_bias", ""))? {
        Some(false) => Bias::IfStored,
        _ => Bias::Always,
    };
    // A dropout of a head that classifies.
    keys.note("classifier_dropout");
    let parts = decoder::Parts {
        order: if beside { Order::Beside } else { Order::InTurn },
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, Bias::Always)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(bias, decoder::biased(bias))
    };
    let mut config = raw.check()?;
    // They lie by turns of heads in Hugging Face's form.
    config.gguf_orders = &[".attention.q", ".attention.k", ".attention.v"];
    if config.heads != config.kv_heads {
        let expected = format!("{}, as many as query heads", config.heads);
        return Err(keys.wrong(Key("", "attention.head_count_kv"), expected, config.kv_heads));
    }
    let by_turns = keys.dialect() == Dialect::HuggingFace;
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match by_turns {
        true => part(config, weights, name),
        false => phi3::part(config, weights, name),
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The weight `name`, if it is q, k or v: each head's lie on top of each other.
///
/// # Errors
/// A matrix or bias of another shape.
pub(crate) fn part(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let (matrix, suffix) = match name.strip_suffix(".bias") {
        Some(matrix) => (matrix, ".bias"),
        None => (name, ""),
    };
    let Some((stem, part)) = matrix.rsplit_once('.') else { return Ok(None) };
    let Some(at) = ["q", "k", "v"].iter().position(|one| *one == part) else {
        return Ok(None);
    };
    let fused = format!("{stem}.qkv{suffix}");
    let Some(Stored { source, shape: mut dims }) = weights.find(&fused)? else {
        return Ok(None);
    };
    let (heads, wide) = (config.heads, config.heads * config.head_dim);
    let expected = if suffix.is_empty() { vec![3 * wide, config.hidden] } else { vec![3 * wide] };
    if dims != expected {
        let error = Error::new(weights.place(&fused), shape(&expected), shape(&dims));
        return Err(error.hint("the configuration does not fit these weights"));
    }
    dims[0] = wide;
    let apart = Source::Permute(Box::new(source), [1, heads, 3, config.head_dim]);
    Ok(Some(Stored { source: apart.rows(at * wide, wide), shape: dims }))
}
