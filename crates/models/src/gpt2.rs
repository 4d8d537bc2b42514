//! GPT-2 (Radford et al. 2019): learned positions, layer norms with biases, q, k and v in one
//! matrix, a feed-forward without a gate. Checkpoints hold matrices `[in, out]`; GGUF files and
//! MLX's folders hold them as all others are.

use crate::config::{Config, Raw, SILU, rows_of_embedding, tied};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, phimoe};
use formats::{Error, Result, Source, shape};
use nn::{AttentionOptions, Bias, Pairing, Stored, Unary, Weights};

pub(crate) const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("positions", "transformer.wpe", "position_embd"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.c_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GPT-2",
    name: "gpt2",
    gguf: "gpt2",
    class: "GPT2LMHeadModel",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: Some(&["positions", "blocks.0.attention.qkv", "blocks.0.mlp.up"]),
    experts: false,
    open,
};

const EPS: Key = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let hidden = keys.needed(Key("n_embd", "embedding_length"))?;
    let heads = keys.needed(Key("n_head", "attention.head_count"))?;
    let inner = keys.size(Key("n_inner", "feed_forward_length"))?;
    // As many as n_positions, by an older name.
    keys.size(Key("n_ctx", ""))?;
    keys.size(Key("", "attention.head_count_kv"))?;
    // Sums in f32, as all are here.
    keys.flag(Key("reorder_and_upcast_attn", ""))?;
    let scaled = keys.flag(Key("scale_attn_weights", ""))?.unwrap_or(true);
    let by_layer = keys.flag(Key("scale_attn_by_inverse_layer_idx", ""))?.unwrap_or(false);
    let act = activation(files, "activation_function", &[Unary::GeluTanh])?;
    let config = Raw {
        architecture: files.architecture,
        layers: keys.needed(Key("n_layer", "block_count"))?,
        kv_heads: heads.clone(),
        heads,
        head_dim: None,
        feed_forward: inner.unwrap_or_else(|| hidden.clone().map(|n| n.saturating_mul(4))),
        hidden,
        vocab: match rows_of_embedding(files)? {
            Some(rows) => keys.stated("vocab_size", rows),
            None => keys.needed("vocab_size")?,
        },
        norm_eps: keys.number_or(EPS, files.architecture.unsaid.eps)?,
        windows: Vec::new(),
        gate: SILU,
        context: keys.needed(Key("n_positions", "context_length"))?,
        tied: tied(files)?,
        rotation: None,
        pairing: Pairing::Half,
        warnings: Vec::new(),
        loaded: files.context,
    }
    .check()?;
    let attention = move |config: &Config, layer: usize| {
        let scale = if scaled { 1.0 / (config.head_dim as f32).sqrt() } else { 1.0 };
        let by = if by_layer { (layer + 1) as f32 } else { 1.0 };
        let (qkv_bias, output_bias) = (Bias::Always, Bias::Always);
        let scale = Some(scale / by);
        AttentionOptions { qkv_bias, output_bias, scale, ..config.attention(layer) }
    };
    let parts = parts(act, attention);
    let transposed = keys.dialect() == Dialect::HuggingFace;
    let part = move |config: &Config, weights: &dyn Weights, name: &str| {
        part(config, weights, name, transposed)
    };
    Ok(decoder::open_recipes(config, parts, part))
}

/// Parts that its kin share: learned positions, layer norms, a feed-forward without a gate, biases.
pub(crate) fn parts(
    act: &'static [Unary],
    attention: impl Fn(&Config, usize) -> AttentionOptions + 'static,
) -> decoder::Parts {
    decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, Bias::Always)
        }),
        norm: phimoe::norm,
        learned_positions: true,
        ..decoder::Parts::new(Bias::Always, attention)
    }
}

/// The function between the matrices of a feed-forward, or of its gate, by Transformers' names;
/// `usual` where nothing is said.
///
/// # Errors
/// Another function, by key.
pub(crate) fn activation(
    files: &Files<'_>,
    key: &'static str,
    usual: &'static [Unary],
) -> Result<&'static [Unary]> {
    const KNOWN: &[(&str, &[Unary])] = &[
        ("gelu_new", &[Unary::GeluTanh]),
        ("gelu_pytorch_tanh", &[Unary::GeluTanh]),
        ("gelu_fast", &[Unary::GeluTanh]),
        ("gelu", &[Unary::GeluErf]),
        ("quick_gelu", &[Unary::QuickGelu]),
        ("relu", &[Unary::Relu]),
        ("relu2", &[Unary::Relu, Unary::Square]),
        ("silu", &[Unary::Silu]),
        ("swish", &[Unary::Silu]),
        ("tanh", &[Unary::Tanh]),
        ("sigmoid", &[Unary::Sigmoid]),
    ];
    let key = Key(key, "");
    let Some(name) = files.keys.text(key)? else { return Ok(usual) };
    let found = KNOWN.iter().find(|(known, _)| *known == name);
    let known = || KNOWN.iter().map(|(known, _)| *known).collect::<Vec<_>>();
    found
        .map(|(_, functions)| *functions)
        .ok_or_else(|| files.keys.wrong(key, known().join(", "), crate::keys::clipped(name)))
}

/// The weight `name`, if it is not stored as it is: rows of a fused matrix or bias, and matrices
/// that are `transposed`.
///
/// # Errors
/// A matrix or bias of another shape.
pub(crate) fn part(
    config: &Config,
    weights: &dyn Weights,
    name: &str,
    transposed: bool,
) -> Result<Option<Stored>> {
    let (matrix, suffix) = match name.strip_suffix(".bias") {
        Some(matrix) => (matrix, ".bias"),
        None => (name, ""),
    };
    let Some((stem, part)) = matrix.rsplit_once('.') else { return Ok(None) };
    let transposed = transposed && suffix.is_empty() && {
        // Other matrices may be square: the first tells which way round they all are.
        let first = weights.find("blocks.0.attention.qkv")?;
        first.is_none_or(|first| first.shape != [3 * config.hidden, config.hidden])
    };
    let at = ["q", "k", "v"].iter().position(|one| *one == part);
    let stored = match (at, part) {
        (Some(_), _) => format!("{stem}.qkv{suffix}"),
        (None, "o" | "gate" | "up" | "down") if transposed => name.to_owned(),
        _ => return Ok(None),
    };
    let Some(Stored { mut source, shape: mut dims }) = weights.find(&stored)? else {
        return Ok(None);
    };
    if transposed {
        dims.reverse();
        source = Source::Transpose(Box::new(source));
    }
    let Some(at) = at else { return Ok(Some(Stored { source, shape: dims })) };
    let hidden = config.hidden;
    let expected = if suffix.is_empty() { vec![3 * hidden, hidden] } else { vec![3 * hidden] };
    if dims != expected {
        let error = Error::new(weights.place(&stored), shape(&expected), shape(&dims));
        return Err(error.hint("the configuration does not fit these weights"));
    }
    dims[0] = hidden;
    Ok(Some(Stored { source: source.rows(at * hidden, hidden), shape: dims }))
}
