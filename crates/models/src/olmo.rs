//! OLMo (Groeneveld et al. 2024): Llama with layer norms that have no weights.

use crate::config::{Config, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened};
use formats::{Result, Source};
use nn::{AttentionOptions, Bias, Builder, Pairing, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp.gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OLMo",
    name: "olmo",
    gguf: "olmo",
    class: "OlmoForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 50_304]).eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let eps = Key("layer_norm_eps", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    if keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let clip = keys.number(Key("clip_qkv", "attention.clamp_kqv"))?;
    let clip = clip.filter(|clip| clip.value != 0.0).map(|clip| clip.positive()).transpose()?;
    let clip = clip.map(|clip| clip as f32);
    let bias = files.bias("attention_bias")?;
    let attention = move |config: &Config, layer: usize| AttentionOptions {
        clip,
        ..decoder::biased(bias)(config, layer)
    };
    let parts = decoder::Parts { norm, ..decoder::Parts::new(Bias::Never, attention) };
    Ok(decoder::open_recipes(raw.check()?, parts, ones))
}

fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<Layer> {
    decoder::layer_norm(builder, name, config, Bias::Never)
}

/// Weights of 1 for the norms.
fn ones(config: &Config, _: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    if !name.ends_with("norm") {
        return Ok(None);
    }
    let shape = vec![config.hidden];
    let source = Source::Plus(Box::new(Source::Zeros(shape.clone())), 1.0);
    Ok(Some(Stored { source, shape }))
}
