//! Baichuan (Yang et al. 2023): Llama with q, k and v in one matrix. The larger models, of 40 layers,
//! have slopes on scores in the place of rotations, as llama.cpp tells them. The second version, which
//! its number of tokens tells, multiplies with rows of its head that are divided by their lengths;
//! GGUF files have such rows.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, decoder, llama, phi3};
use formats::{Result, Source};
use nn::{AttentionOptions, Bias, Pairing, Stored, Weights};

const NAMES: &[Row] = &[("blocks.{}.attention.qkv", "model.layers.{}.self_attn.W_pack", "")];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Baichuan",
    name: "baichuan",
    gguf: "baichuan",
    class: "BaichuanForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// Layers of the models with slopes.
const SLOPED: usize = 40;
/// Tokens of the second version.
const SECOND: usize = 125_696;
/// A key that its configurations alone have.
const SECOND_ALONE: Key = Key("z_loss_weight", "");

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    // The larger models' name for the context.
    if let Some(context) = keys.size(Key("model_max_length", ""))? {
        raw.context = context;
    }
    for key in ["z_loss_weight", "gradient_checkpointing", "_from_model_config"] {
        keys.note(key);
    }
    let gguf = keys.dialect() == Dialect::Gguf;
    if gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let of_one_length = !gguf && (raw.vocab.value == SECOND || keys.mentions(SECOND_ALONE));
    let slopes = raw.layers.value == SLOPED;
    if slopes {
        raw.rotation = None;
    }
    let attention =
        move |config: &Config, layer: usize| AttentionOptions { slopes, ..config.attention(layer) };
    let parts = decoder::Parts::new(Bias::Never, attention);
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        if name == "head" && of_one_length {
            let unit = |head: Stored| Stored {
                source: Source::UnitRows(Box::new(head.source)),
                shape: head.shape,
            };
            return Ok(weights.find(name)?.map(unit));
        }
        match alibi::part(name, config.heads, alibi::USUAL) {
            Some(slopes) => Ok(Some(slopes)),
            None => phi3::part(config, weights, name),
        }
    };
    Ok(decoder::open_recipes(raw.check()?, parts, stored))
}
