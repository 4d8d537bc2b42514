//! Looped decoders: Nanbeige 4.2 (Nanbeige LLM Lab 2026), which is Llama, and Ouro (Zhu et al. 2025),
//! whose sublayers are normed in front and behind. All blocks are passed several times, each time
//! with keys and values of their own, and the last norm is behind each round.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key, Keys};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result};
use nn::{Pairing, Stored, Weights};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Nanbeige 4.2",
    name: "nanbeige",
    gguf: "nanbeige",
    class: "NanbeigeForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open: |files| open(files, Key("num_loops", "num_loops"), false),
};

/// The norms of sublayers, of which the second name of a pair is the one in front elsewhere.
const NORMS: &[Row] = &[
    ("blocks.{}.after_attention_norm", "model.layers.{}.input_layernorm_2", ""),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_attention_layernorm_2", ""),
];

/// Ouro.
pub(crate) const OURO: Architecture = Architecture {
    title: "Ouro",
    name: "ouro",
    gguf: "",
    class: "OuroForCausalLM",
    names: &[NORMS, llama::NAMES],
    open: |files| open(files, Key("total_ut_steps", ""), true),
    ..ARCHITECTURE
};

/// Most rounds.
const MOST_ROUNDS: usize = 64;

fn open(files: &Files<'_>, rounds: Key, sandwiched: bool) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    if keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    check(keys)?;
    let usual = if sandwiched { 4 } else { 1 };
    let stated = keys.size(rounds)?.unwrap_or_else(|| keys.stated(rounds, usual));
    let times = stated.within(1..=MOST_ROUNDS)?;
    const SKIPPED: Key = Key("skip_loop_final_norm", "skip_loop_final_norm");
    let skipped = keys.flag(SKIPPED)?.unwrap_or(false);
    let count = raw.layers.within(1..=LAYERS / times)?;
    raw.layers = raw.layers.map(|_| count * times);
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts = decoder::Parts {
        normed: decoder::both(true, sandwiched),
        round: (!skipped && times > 1).then_some(count),
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    Ok(decoder::open_recipes(raw.check()?, parts, move |_, weights, name| {
        first(weights, name, count)
    }))
}

/// Refuses settings of an early end and of what no published model has.
fn check(keys: &Keys<'_>) -> Result<()> {
    // How losses were weighed, and the name of the rounds in another family.
    for key in ["loop_loss_weights", "total_ut_steps", "num_loops", "attention.head_dim"] {
        keys.note(key);
    }
    const THRESHOLD: Key = Key("early_exit_threshold", "");
    match keys.number(THRESHOLD)?.filter(|threshold| threshold.value < 1.0) {
        Some(early) => Err(unsupported(&early)),
        None => Ok(()),
    }
}

fn unsupported(early: &Stated<f64>) -> formats::Error {
    early.wrong("1: all rounds for every token", early.value).of(ErrorKind::Unsupported)
}

/// The weight of a block in a later round, which is that of the first.
fn first(weights: &dyn Weights, name: &str, count: usize) -> Result<Option<Stored>> {
    let block = name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.'));
    let number = block.and_then(|(number, part)| Some((number.parse::<usize>().ok()?, part)));
    match number.filter(|(number, _)| *number >= count) {
        Some((number, part)) => weights.find(&format!("blocks.{}.{part}", number % count)),
        None => Ok(None),
    }
}

/// GGUF's number of blocks, below the prefix, each of which is stored once.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
) -> Result<Vec<(&'static str, MetadataValue)>> {
    if config.architecture.name != ARCHITECTURE.name {
        return Ok(Vec::new());
    }
    let count = files.keys.needed(Key("num_hidden_layers", "block_count"))?.value;
    Ok(vec![("block_count", MetadataValue::U32(u32::try_from(count).unwrap_or(u32::MAX)))])
}
