//! StableLM (Bellagente et al. 2024): Llama with layer norms, a quarter of each head rotated, and
//! in some models attention and feed-forward side by side, or norms of heads of q and k.

use crate::config::{Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, head_norms, llama, phimoe};
use formats::Result;
use nn::{AttentionOptions, Bias};

const NORMS: &[Row] = &[
    ("blocks.{}.attention.q_norms.{}", "model.layers.{}.self_attn.q_layernorm.norms.{}", ""),
    ("blocks.{}.attention.k_norms.{}", "model.layers.{}.self_attn.k_layernorm.norms.{}", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "StableLM",
    name: "stablelm",
    gguf: "stablelm",
    class: "StableLmForCausalLM",
    unsaid: Unsaid::sizes([2560, 6912, 32, 32, 32, 0, 4096, 50_304]).eps(1e-5),
    names: &[NORMS, head_norms::IN_GGUF, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let eps = Key("layer_norm_eps", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    raw.turns_part(files, 0.25)?;
    let normed = head_norms::has(files, "qk_layernorm")?;
    let beside = keys.flag(Key("use_parallel_residual", "use_parallel_residual"))?;
    let one_norm = files.names.find("blocks.0.mlp_norm")?.is_none();
    let beside = match files.metadata() {
        // The first converted models say that they are side by side, and have both norms.
        Some(_) => one_norm,
        None => beside.unwrap_or(false),
    };
    let bias = files.bias("use_qkv_bias")?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        qk_norm: head_norms::of(config, normed),
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        order: if beside { Order::BesideOneNorm } else { Order::InTurn },
        norm: phimoe::norm,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(raw.check()?, parts, head_norms::part))
}
