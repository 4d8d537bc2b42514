//! Persimmon (Elsen et al. 2023): layer norms in front of sublayers and of each head of q and k, half
//! of which is rotated; q, k and v in one matrix, by turns of heads; a feed-forward of the squares of
//! what is positive. Fuyu's decoder of text is one.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt_neox, gpt2};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm, Unary};

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", ""),
    ("norm", "model.final_layernorm", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", ""),
    ("blocks.{}.attention.qkv", "model.layers.{}.self_attn.query_key_value", ""),
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_layernorm", ""),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_layernorm", ""),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.dense", ""),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", ""),
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.dense_h_to_4h", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.dense_4h_to_h", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Persimmon",
    name: "persimmon",
    gguf: "",
    class: "PersimmonForCausalLM",
    unsaid: Unsaid::sizes([4096, 16_384, 36, 64, 0, 0, 16_384, 262_144]).eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, Key("layer_norm_eps", ""))?;
    raw.turns_part(files, 0.5)?;
    keys.note("hidden_dropout");
    let normed = keys.flag(Key("qk_layernorm", ""))?.unwrap_or(true);
    let act = gpt2::activation(files, "hidden_act", &[Unary::Relu, Unary::Square])?;
    let attention = move |config: &Config, layer: usize| {
        let norm = QkNorm::Layer { eps: config.norm_eps, bias: Bias::Always, apart: false };
        let qk_norm = if normed { norm } else { QkNorm::None };
        AttentionOptions { qk_norm, ..decoder::biased(Bias::Always)(config, layer) }
    };
    let parts = decoder::Parts { learned_positions: false, ..gpt2::parts(act, attention) };
    Ok(decoder::open_recipes(raw.check()?, parts, gpt_neox::part))
}
