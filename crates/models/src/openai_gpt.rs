//! The first GPT (Radford et al. 2018): GPT-2 whose sums with the residual stream are normed, in the
//! place of what sublayers read, and none behind the last block.

use crate::config::{Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2};
use formats::Result;
use nn::{Bias, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.tokens_embed", ""),
    ("positions", "transformer.positions_embed", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", ""),
    ("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn", ""),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.c_proj", ""),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", ""),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc", ""),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GPT",
    name: "openai-gpt",
    gguf: "",
    class: "OpenAIGPTLMHeadModel",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
pub(crate) const OWN: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_quadrupled(files, Key("layer_norm_epsilon", ""))?;
    raw.rotation = None;
    // As many as n_positions, by an older name, and the tokens that its first training added.
    for key in ["n_ctx", "n_special", "predict_special_tokens"] {
        keys.note(key);
    }
    keys.only(Key("afn", ""), &["gelu", "silu", "swish", "relu"])?;
    let act: &[Unary] = match keys.text(Key("afn", ""))? {
        Some("relu") => &[Unary::Relu],
        Some("silu" | "swish") => &[Unary::Silu],
        // The approximation by tanh goes by the function's name there.
        _ => &[Unary::GeluTanh],
    };
    let parts = decoder::Parts {
        order: Order::NormedSums,
        ..gpt2::parts(act, decoder::biased(Bias::Always))
    };
    let part = |config: &Config, weights: &dyn Weights, name: &str| {
        gpt2::part(config, weights, name, true)
    };
    Ok(decoder::open_recipes(raw.check()?, parts, part))
}
