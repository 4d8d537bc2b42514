//! SmolLM3 (Bakouch et al. 2025): Llama whose every fourth layer knows no positions.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "SmolLM3",
    name: "smollm3",
    gguf: "smollm3",
    class: "SmolLM3ForCausalLM",
    unsaid: Unsaid::sizes([2048, 11_008, 36, 16, 4, 0, 32_768, 128_256]).theta(2_000_000.0),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    if !hugging_face {
        raw.pairing = Pairing::Adjacent;
    }
    let every = keys.size(Key("no_rope_layer_interval", ""))?;
    let every = every.map_or(Ok(4), |every| every.within(1..=LAYERS))?;
    // 1 where a layer is rotated.
    let listed = if hugging_face { keys.numbers("no_rope_layers")? } else { None };
    if let Some(found) = listed.as_ref().filter(|list| list.len() != raw.layers.value) {
        let expected = format!("{} entries, as {} says", raw.layers.value, raw.layers.key());
        return Err(keys.wrong("no_rope_layers", expected, found.len()));
    }
    let rotated = move |layer: usize| match &listed {
        Some(list) => list[layer] != 0.0,
        None => !(layer + 1).is_multiple_of(every),
    };
    if hugging_face {
        // Layers without a rotation have the window.
        raw.windows = windows::of_switch(files, &raw.layers, |layer| !rotated(layer))?;
    }
    let (attention, mlp) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp, move |config: &Config, layer| {
        let options = config.attention(layer);
        AttentionOptions {
            qkv_bias: attention,
            output_bias: attention,
            rope: options.rope.filter(|_| rotated(layer)),
            ..options
        }
    }))
}
