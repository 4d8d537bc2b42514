//! BioGPT (Luo et al. 2022): OPT with an exact GELU and an embedding times the root of its width.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, opt};
use formats::Result;
use nn::{Bias, Unary};

const NAMES: &[Row] = &[
    ("embed", "biogpt.embed_tokens", ""),
    ("table", "biogpt.embed_positions", ""),
    ("norm", "biogpt.layer_norm", ""),
    ("head", "output_projection", ""),
    ("blocks.{}.attention_norm", "biogpt.layers.{}.self_attn_layer_norm", ""),
    ("blocks.{}.attention.q", "biogpt.layers.{}.self_attn.q_proj", ""),
    ("blocks.{}.attention.k", "biogpt.layers.{}.self_attn.k_proj", ""),
    ("blocks.{}.attention.v", "biogpt.layers.{}.self_attn.v_proj", ""),
    ("blocks.{}.attention.o", "biogpt.layers.{}.self_attn.out_proj", ""),
    ("blocks.{}.mlp_norm", "biogpt.layers.{}.final_layer_norm", ""),
    ("blocks.{}.mlp.up", "biogpt.layers.{}.fc1", ""),
    ("blocks.{}.mlp.down", "biogpt.layers.{}.fc2", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "BioGPT",
    name: "biogpt",
    gguf: "",
    class: "BioGptForCausalLM",
    unsaid: Unsaid::sizes([1024, 4096, 24, 16, 0, 0, 1024, 42_384]).eps(1e-12),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// The number that norms add to a variance in Transformers' class.
const NORM_EPS: f64 = 1e-5;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, Key("layer_norm_eps", ""))?;
    raw.rotation = None;
    // Its norms add this, whatever is stated: published folders say 1e-12.
    raw.norm_eps.value = NORM_EPS;
    // For training.
    keys.note("layerdrop");
    let scaled = keys.flag(Key("scale_embedding", ""))?.unwrap_or(true);
    let act = gpt2::activation(files, "hidden_act", &[Unary::GeluErf])?;
    let config = raw.check()?;
    let root = if scaled { (config.hidden as f32).sqrt() } else { 1.0 };
    let parts = decoder::Parts {
        multipliers: [root, 1.0, 1.0],
        ..gpt2::parts(act, decoder::biased(Bias::Always))
    };
    Ok(decoder::open_recipes(config, parts, opt::positions))
}
