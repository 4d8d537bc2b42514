//! Baichuan (Yang et al. 2023): Llama with q, k and v in one matrix. The larger models, of 40 layers,
//! have slopes on scores in the place of rotations, as llama.cpp tells them. The second version's head
//! has rows of one length in folders, which GGUF files have as they are multiplied.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, decoder, llama, phi3};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Pairing, Weights};

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

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files, &["silu"])?;
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
    } else if raw.vocab.value == SECOND {
        let error = raw.vocab.wrong("another number: heads of one length are not made", SECOND);
        return Err(error.of(ErrorKind::Unsupported).hint("a GGUF file of it runs"));
    }
    let slopes = raw.layers.value == SLOPED;
    if slopes {
        raw.rotation = None;
    }
    let attention =
        move |config: &Config, layer: usize| AttentionOptions { slopes, ..config.attention(layer) };
    let parts = decoder::Parts::new(Bias::Never, attention);
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match alibi::part(
        name,
        config.heads,
        alibi::USUAL,
    ) {
        Some(slopes) => Ok(Some(slopes)),
        None => phi3::part(config, weights, name),
    };
    Ok(decoder::open_recipes(raw.check()?, parts, stored))
}
