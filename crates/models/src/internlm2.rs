//! InternLM 2 (Cai et al. 2024): Llama with q, k and v in one matrix, in which each key/value head
//! has its query heads, its key and its value below each other. InternLM 3 (2025) is Llama with a
//! key of its own for biases; GGUF has it as such.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama};
use formats::{Error, Result, Source, shape};
use nn::{AttentionOptions, Pairing, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "model.tok_embeddings", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "output", "output"),
    ("rope_factors", "rope_factors", "rope_freqs"),
    ("blocks.{}.attention_norm", "model.layers.{}.attention_norm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.groups", "model.layers.{}.attention.wqkv", ""),
    ("blocks.{}.attention.q", "", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.attention.wo", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.ffn_norm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.w1", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.w3", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.w2", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "InternLM 2",
    name: "internlm2",
    gguf: "internlm2",
    class: "InternLM2ForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// InternLM: Llama, whose attention has biases. GGUF has it as such.
pub(crate) const FIRST: Architecture = Architecture {
    title: "InternLM",
    name: "internlm",
    gguf: "llama",
    class: "InternLMForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[llama::NAMES],
    open: open_first,
    ..ARCHITECTURE
};

/// InternLM 3.
pub(crate) const INTERNLM3: Architecture = Architecture {
    title: "InternLM 3",
    name: "internlm3",
    gguf: "llama",
    class: "InternLM3ForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[llama::NAMES],
    open: |files| open_biased(files, "qkv_bias"),
    ..ARCHITECTURE
};

fn open_first(files: &Files<'_>) -> Result<Opened> {
    // A base that grows beyond the context that it was trained for is as stated within it.
    if let Some(rotary) = files.keys.object("rotary")? {
        rotary.only("type", &["origin", "dynamic"])?;
        if let Some(base) = rotary.number("base")?.filter(|base| base.value != 10_000.0) {
            return Err(base.wrong("10000, the base of this architecture", base.value));
        }
    }
    llama::open(&files.with_names(&[("attention_bias", "bias")]))
}

fn open(files: &Files<'_>) -> Result<Opened> {
    open_biased(files, "bias")
}

/// Opens a model whose key for biases of q, k and v is `qkv_bias`.
fn open_biased(files: &Files<'_>, qkv_bias: &'static str) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    if files.keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    // A name of what computes attention.
    files.keys.text(Key("attn_implementation", ""))?;
    let (qkv_bias, bias) = (files.bias(qkv_bias)?, files.bias("bias")?);
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias,
        output_bias: bias,
        ..config.attention(layer)
    };
    let parts = decoder::Parts::new(bias, attention);
    Ok(decoder::open_recipes(raw.check()?, parts, part))
}

/// The weight `name`, if it is q, k or v and all groups are stored in one.
///
/// # Errors
/// A matrix or bias of another shape.
pub(crate) fn part(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let (matrix, suffix) = match name.strip_suffix(".bias") {
        Some(matrix) => (matrix, ".bias"),
        None => (name, ""),
    };
    let Some((stem, part)) = matrix.rsplit_once('.') else { return Ok(None) };
    let each = config.heads / config.kv_heads;
    let (first, count) = match part {
        "q" => (0, each),
        "k" => (each, 1),
        "v" => (each + 1, 1),
        _ => return Ok(None),
    };
    let groups = format!("{stem}.groups{suffix}");
    let Some(Stored { source, shape: mut dims }) = weights.find(&groups)? else { return Ok(None) };
    let (width, heads) = (config.head_dim, config.kv_heads);
    let rows = heads * (each + 2) * width;
    let expected = if suffix.is_empty() { vec![rows, config.hidden] } else { vec![rows] };
    if dims != expected {
        let error = Error::new(weights.place(&groups), shape(&expected), shape(&dims));
        return Err(error.hint("the configuration does not fit these weights"));
    }
    let of_group =
        |group: usize| source.clone().rows((group * (each + 2) + first) * width, count * width);
    dims[0] = heads * count * width;
    Ok(Some(Stored { source: Source::Concat((0..heads).map(of_group).collect()), shape: dims }))
}
