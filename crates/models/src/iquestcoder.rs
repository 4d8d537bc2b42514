//! IQuest-Coder (IQuest Lab 2026): Llama under a name of its own. GGUF has it under Llama's.

use crate::config::{RMS_EPS, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "IQuest-Coder",
    name: "iquestcoder",
    gguf: "llama",
    class: "IQuestCoderForCausalLM",
    unsaid: Unsaid::sizes([5120, 27_648, 80, 40, 8, 0, 131_072, 76_800])
        .numbers(&[("head_dim", 128)])
        .eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let raw = Raw::read_normed(files, RMS_EPS)?;
    // What its first code could do besides, and no model does.
    if let Some(most) = keys.number(Key("clip_qkv", ""))? {
        return Err(most.wrong("null: q, k and v are not bounded here", most.value));
    }
    if keys.flag(Key("use_sliding_window", ""))? == Some(true) {
        return Err(keys.wrong("use_sliding_window", "false: no layer has a window", true));
    }
    for key in ["max_window_layers", "sliding_window"] {
        keys.note(key);
    }
    windows::of_types(files, &raw.layers, None)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp_bias, decoder::biased(bias)))
}
