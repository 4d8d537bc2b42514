//! Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): attention and feed-forward side by side behind one
//! layer norm, biases everywhere, half of each head rotated; heads of q and k may be normed.

use crate::config::{Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2, phi3, phimoe};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm, Unary};

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.final_layernorm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_layernorm", ""),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_layernorm", ""),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.dense", "blk.{}.attn_output"),
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.fc1", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.fc2", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Phi-1, Phi-1.5 and Phi-2",
    name: "phi",
    gguf: "phi2",
    class: "PhiForCausalLM",
    unsaid: Unsaid::sizes([2048, 8192, 24, 32, 0, 0, 2048, 51_200]).eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let eps = Key("layer_norm_eps", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    raw.turns_part(files, 0.5)?;
    let act = gpt2::activation(files, "hidden_act", &[Unary::GeluTanh])?;
    let normed = keys.flag(Key("qk_layernorm", ""))?.unwrap_or(false);
    let bias = Bias::Always;
    let attention = move |config: &Config, layer: usize| {
        let norm = QkNorm::Layer { eps: config.norm_eps, bias, apart: false };
        let qk_norm = if normed { norm } else { QkNorm::None };
        AttentionOptions { qk_norm, ..decoder::biased(bias)(config, layer) }
    };
    let parts = decoder::Parts {
        order: Order::BesideOneNorm,
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, bias)
        }),
        norm: phimoe::norm,
        head_bias: bias,
        ..decoder::Parts::new(bias, attention)
    };
    Ok(decoder::open_recipes(raw.check()?, parts, phi3::part))
}
