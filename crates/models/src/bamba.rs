//! Bamba (IBM 2024): state spaces (Mamba-2), and attention with a part of each head rotated in the
//! layers that a list states.

use crate::config::{LAYERS, Raw};
use crate::files::Files;
use crate::names::Row;
use crate::{Architecture, Opened, decoder, mamba};
use formats::Result;
use nn::Weights;

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.final_layernorm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.pre_ff_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Bamba",
    name: "bamba",
    gguf: "",
    class: "BambaForCausalLM",
    names: &[NAMES, mamba::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    for key in ["attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient"] {
        keys.note(key);
    }
    let mut raw = Raw::read(files, &["silu"])?;
    raw.turns_part(files, 0.5)?;
    let attention = keys.numbers("attn_layer_indices")?.unwrap_or_default();
    let layers = raw.layers.within(1..=LAYERS)?;
    if let Some(odd) = attention.iter().find(|i| !(0..layers).any(|layer| layer as f32 == **i)) {
        let expected = format!("numbers of layers, below {layers}");
        return Err(keys.wrong("attn_layer_indices", expected, odd));
    }
    let mambas = (0..layers).map(|i| !attention.contains(&(i as f32))).collect();
    let options = mamba::read(files, &raw.hidden, raw.norm_eps.value as f32)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts = decoder::Parts {
        mixer: mamba::mixer(options, mambas),
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    Ok(decoder::open_recipes(raw.check()?, parts, move |_, weights: &dyn Weights, name: &str| {
        mamba::part(weights, name, &options)
    }))
}
