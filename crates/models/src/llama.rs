//! Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): grouped-query attention, rotary
//! positions with `llama3` or `linear` scaling, SwiGLU, no window. Biases only where a checkpoint
//! brings them.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Dialect;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, mixtral, windows};
use formats::Result;
use nn::{AttentionOptions, Pairing};

/// The names that most decoders share.
pub(crate) const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("rope_factors", "rope_factors", "rope_freqs"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Llama 2 and 3",
    name: "llama",
    gguf: "llama",
    class: "LlamaForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 32_000]),
    names: &[NAMES, experts::SPARSE_BLOCK],
    signs: Some(&["blocks.0.attention.q"]),
    experts: true,
    open,
};

/// Opens a model that is Llama, whatever its name.
///
/// # Errors
/// A key that is missing or of another type.
pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    if files.keys.dialect() == Dialect::Gguf && experts::are_stated(&files.keys)? {
        return mixtral::open(files);
    }
    experts::check(&files.outer)?;
    experts::check(&files.keys)?;
    let mut raw = Raw::read(files)?;
    if files.keys.dialect() == Dialect::Gguf {
        // Rows of q and k lie there so that adjacent elements rotate together; and Mistral's files
        // go by this name.
        raw.pairing = Pairing::Adjacent;
        raw.windows = windows::of_all(files, &raw.layers)?;
    } else {
        windows::of_types(files, &raw.layers, None)?;
    }
    let (attention, mlp) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp, move |config, layer| AttentionOptions {
        qkv_bias: attention,
        output_bias: attention,
        ..config.attention(layer)
    }))
}
