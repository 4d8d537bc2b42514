//! Jamba (AI21 2024): state spaces as Mamba's, whose `B`, `C` and steps are normed, attention without
//! positions in every so many layers, and a mixture of experts in every so many feed-forwards.

use crate::config::{LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, mamba1, mixtral};
use formats::Result;
use nn::{Bias, Weights};
use std::sync::Arc;

const NAMES: &[Row] = &[
    ("norm", "model.final_layernorm", "output_norm"),
    ("blocks.{}.mlp_norm", "model.layers.{}.pre_ff_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.down_proj", "blk.{}.ffn_down"),
    ("blocks.{}.mamba.in", "model.layers.{}.mamba.in_proj", "blk.{}.ssm_in"),
    ("blocks.{}.mamba.conv", "model.layers.{}.mamba.conv1d", "blk.{}.ssm_conv1d"),
    ("blocks.{}.mamba.dbc", "model.layers.{}.mamba.x_proj", "blk.{}.ssm_x"),
    ("blocks.{}.mamba.dt", "model.layers.{}.mamba.dt_proj", "blk.{}.ssm_dt"),
    ("blocks.{}.mamba.log_decay", "model.layers.{}.mamba.A_log!", ""),
    ("blocks.{}.mamba.decay", "", "blk.{}.ssm_a!"),
    ("blocks.{}.mamba.skip", "model.layers.{}.mamba.D!", "blk.{}.ssm_d!"),
    ("blocks.{}.mamba.dt_norm", "model.layers.{}.mamba.dt_layernorm", "blk.{}.ssm_dt_norm"),
    ("blocks.{}.mamba.b_norm", "model.layers.{}.mamba.b_layernorm", "blk.{}.ssm_b_norm"),
    ("blocks.{}.mamba.c_norm", "model.layers.{}.mamba.c_layernorm", "blk.{}.ssm_c_norm"),
    ("blocks.{}.mamba.o", "model.layers.{}.mamba.out_proj", "blk.{}.ssm_out"),
];

/// Mixtures.
const EXPERTS: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.feed_forward.router", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.experts.gate",
        "model.layers.{}.feed_forward.switch_mlp.gate_proj",
        "blk.{}.ffn_gate_exps",
    ),
    (
        "blocks.{}.mlp.experts.up",
        "model.layers.{}.feed_forward.switch_mlp.up_proj",
        "blk.{}.ffn_up_exps",
    ),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.feed_forward.switch_mlp.down_proj",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.{}.gate", "model.layers.{}.feed_forward.experts.{}.gate_proj", ""),
    ("blocks.{}.mlp.experts.{}.up", "model.layers.{}.feed_forward.experts.{}.up_proj", ""),
    ("blocks.{}.mlp.experts.{}.down", "model.layers.{}.feed_forward.experts.{}.down_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Jamba",
    name: "jamba",
    gguf: "jamba",
    class: "JambaForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 0, 262_144, 65_536]).numbers(&[
        ("attn_layer_offset", 4),
        ("attn_layer_period", 8),
        ("expert_layer_offset", 1),
        ("expert_layer_period", 2),
        ("mamba_d_conv", 4),
        ("mamba_d_state", 16),
        ("num_experts", 16),
        ("num_experts_per_tok", 2),
    ]),
    names: &[NAMES, EXPERTS, llama::NAMES],
    signs: None,
    experts: true,
    open,
};

/// Keys about forms of computing that give the same.
const NOTED: &[&str] = &["calc_logits_for_entire_prompt", "num_logits_to_keep"];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    let mut raw = Raw::read_silu(files)?;
    raw.rotation = None;
    if keys.flag(Key("mamba_inner_layernorms", ""))? == Some(false) {
        let expected = "true, as of this architecture";
        return Err(keys.wrong("mamba_inner_layernorms", expected, false));
    }
    let attends = every(files, &raw.layers, ["attn_layer_period", "attn_layer_offset"], |i| {
        format!("blocks.{i}.attention.q")
    })?;
    let mambas: Arc<[bool]> = attends.iter().map(|attends| !attends).collect();
    let sparse = every(files, &raw.layers, ["expert_layer_period", "expert_layer_offset"], |i| {
        format!("blocks.{i}.mlp.router")
    })?;
    const COUNT: Key = Key("num_experts", "expert_count");
    let some = keys.size(COUNT)?.is_some_and(|count| count.value > 1) && sparse.contains(&true);
    keys.note(if keys.dialect() == Dialect::Gguf {
        "expert_used_count"
    } else {
        "num_experts_per_tok"
    });
    let options = mamba1::read(files, &raw.hidden, Some(raw.norm_eps.value as f32))?;
    let config = raw.check()?;
    let mixture = || experts::read(files, config.hidden, config.feed_forward);
    let mixture = some.then(mixture).transpose()?;
    let count = mixture.map_or(0, |mixture| mixture.experts);
    let mixture = mixture.map(mixtral::mixture);
    let parts = decoder::Parts {
        mixer: mamba1::mixer(options, mambas),
        feed_forward: Box::new(move |builder, config, i| match &mixture {
            Some(mixture) if sparse[i] => mixture(builder, config, i),
            _ => decoder::gated(builder, config, i, Bias::Never),
        }),
        ..decoder::Parts::new(Bias::Never, decoder::biased(Bias::Never))
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        match mamba1::part(weights, name, &options)? {
            Some(made) => Ok(Some(made)),
            None => experts::joined(weights, name, count),
        }
    }))
}

/// The layers of `layers` that are of a kind: those with a remainder of their number by a period, or in
/// GGUF those that have the weight `sign`.
///
/// # Errors
/// A period or a remainder that is none, by key.
fn every(
    files: &Files<'_>,
    layers: &Stated<usize>,
    [period, offset]: [&'static str; 2],
    sign: impl Fn(usize) -> String,
) -> Result<Vec<bool>> {
    let (keys, count) = (&files.keys, layers.within(1..=LAYERS)?);
    if keys.dialect() == Dialect::Gguf {
        return (0..count).map(|i| Ok(files.names.find(&sign(i))?.is_some())).collect();
    }
    let period = keys.needed(Key(period, ""))?.within(1..=LAYERS)?;
    let offset = keys.needed(Key(offset, ""))?.within(0..=period - 1)?;
    Ok((0..count).map(|i| i % period == offset).collect())
}
