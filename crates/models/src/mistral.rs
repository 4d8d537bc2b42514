//! Mistral (Jiang et al. 2023): Llama with a sliding attention window. Mistral's own files have
//! names of their own for its weights, and rows of q and k in the order of GGUF.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Dialect;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{Bias, Pairing};

/// The names in Mistral's own files.
pub(crate) const NAMES: &[Row] = &[
    ("embed", "tok_embeddings", "token_embd"),
    ("norm", "norm", "output_norm"),
    ("head", "output", "output"),
    ("blocks.{}.attention_norm", "layers.{}.attention_norm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "layers.{}.attention.wq", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "layers.{}.attention.wk", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "layers.{}.attention.wv", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "layers.{}.attention.wo", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "layers.{}.ffn_norm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "layers.{}.feed_forward.w1", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "layers.{}.feed_forward.w3", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "layers.{}.feed_forward.w2", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mistral",
    name: "mistral",
    gguf: "llama",
    class: "MistralForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 4096, 131_072, 32_000]),
    names: &[llama::NAMES, NAMES],
    signs: None,
    experts: false,
    open,
};

pub(crate) fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    raw.pairing = pairing(files);
    Ok(decoder::open(raw.check()?, Bias::Never, |config, layer| config.attention(layer)))
}

/// How elements of heads are paired in the rows of q and k.
pub(crate) fn pairing(files: &Files<'_>) -> Pairing {
    let folder = files.tensors.and_then(formats::Tensors::folder);
    match files.keys.dialect() == Dialect::Gguf || folder.is_some_and(formats::Folder::is_mistrals)
    {
        true => Pairing::Adjacent,
        false => Pairing::Half,
    }
}
