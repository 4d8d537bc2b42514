//! Bamba (IBM 2024): state spaces (Mamba-2), and attention with a part of each head rotated in the
//! layers that a list states.

use crate::config::{LAYERS, Raw};
use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, falcon_h1, mamba};
use formats::Result;
use nn::Weights;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Bamba",
    name: "bamba",
    gguf: "",
    class: "BambaForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 0, 262_144, 128_000])
        .eps(1e-5)
        .numbers(mamba::NUMBERS),
    names: &[falcon_h1::NAMES, mamba::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    for key in ["attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient"] {
        keys.note(key);
    }
    let mut raw = Raw::read_silu(files)?;
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
