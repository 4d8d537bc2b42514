//! Ministral 3 (Mistral AI 2025): Mistral with YaRN, whose queries grow with their positions beyond
//! the context that was trained first.

use crate::config::{LIMIT, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::{Unsaid, said};
use crate::{Architecture, Opened, decoder, llama, mistral, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, Stretch};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Ministral 3",
    name: "ministral3",
    gguf: "mistral3",
    class: "Ministral3ForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 34, 32, 8, 0, 262_144, 131_072])
        .rotated(said!({
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16_384,
            "llama_4_scaling_beta": 0.1,
        }))
        .eps(1e-5),
    names: &[llama::NAMES, mistral::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    raw.pairing = mistral::pairing(files);
    let stretch = stretch(files)?;
    Ok(decoder::open(raw.check()?, Bias::Never, move |config, layer| AttentionOptions {
        stretch,
        ..config.attention(layer)
    }))
}

/// How queries grow with their positions, if they do: by a step for each length of the context that
/// was trained first. GGUF has Mistral Small 3.1, whose queries do not grow, under this name too.
///
/// # Errors
/// A key that is of another type or out of range.
pub(crate) fn stretch(files: &Files<'_>) -> Result<Option<Stretch>> {
    const BY: Key = Key("llama_4_scaling_beta", "attention.temperature_scale");
    const ORIGINAL: Key =
        Key("original_max_position_embeddings", "rope.scaling.original_context_length");
    let keys = match files.keys.dialect() {
        Dialect::HuggingFace => match files.keys.object("rope_parameters")? {
            Some(rope) => Some(rope),
            None => files.keys.object("rope_scaling")?,
        },
        Dialect::Gguf => Some(files.keys.clone()),
    };
    let Some(keys) = keys else { return Ok(None) };
    if keys.dialect() == Dialect::HuggingFace {
        // The same as beside the rotation.
        keys.note("max_position_embeddings");
        // What the rotation's magnitude is made of, which GGUF states too.
        keys.number(Key("mscale_all_dim", "rope.scaling.yarn_log_multiplier"))?;
    }
    let Some(by) = keys.number(BY)?.filter(|by| by.value != 0.0) else { return Ok(None) };
    let step = match keys.size(Key("", "attention.temperature_length"))? {
        Some(step) => step,
        None => keys.needed(ORIGINAL)?,
    };
    let step = step.within(1..=LIMIT)? as u32;
    Ok(Some(Stretch { by: by.value as f32, step, ahead: 0 }))
}
