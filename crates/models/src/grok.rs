//! Grok 1 and 2 (xAI 2024, 2025), as GGUF files have them: norms in front of sublayers and behind them,
//! bounds on scores and logits, numbers that embeddings and logits are multiplied with, and a mixture in
//! every block, whose odds sum to one. Grok 2 has a feed-forward beside it, and takes the sum of both
//! over the root of two.
//!
//! The bound on a router's scores that files state is read by no reader of them.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Gate, MixtureOfExperts, Mlp, Unary};
use std::f32::consts::FRAC_1_SQRT_2;

const NAMES: &[Row] = &[
    ("blocks.{}.after_attention_norm", "model.layers.{}.post_attn_norm", "blk.{}.attn_output_norm"),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_moe_norm", "blk.{}.layer_output_norm"),
    ("blocks.{}.mlp.dense.gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.dense.up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.dense.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    ("blocks.{}.mlp.router", "model.layers.{}.block_sparse_moe.gate", "blk.{}.ffn_gate_inp"),
    // Newer files'.
    ("blocks.{}.newer_norm", "", "blk.{}.post_ffw_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Grok 1 and 2, from GGUF files",
    name: "grok",
    gguf: "grok",
    class: "Grok1ForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES, llama::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Numbers of the first model, which its files do not state.
const EMBEDDING: f64 = 78.383_671_769_061_69;
const LOGITS: f64 = 0.577_350_269_189_625_7;
const SCORES: f64 = 0.088_388_347_648_318_45;
const CAP: f64 = 30.0;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    if keys.dialect() == Dialect::HuggingFace {
        let expected = "a GGUF file, of which this architecture is read";
        let error = keys.wrong("architectures", expected, "a folder of Grok");
        return Err(error.of(ErrorKind::Unsupported));
    }
    let raw = Raw::read(files)?;
    // What no reader takes.
    for key in ["router_logit_softcapping", "attention.temperature_length"] {
        keys.note(key);
    }
    let number = |key: &'static str, usual: f64| -> Result<f32> {
        Ok(keys.number_or(Key("", key), usual)?.positive()? as f32)
    };
    let (embedding, logits) =
        (number("embedding_scale", EMBEDDING)?, number("logit_scale", LOGITS)?);
    let scale = number("attention.output_scale", SCORES)?;
    let cap = number("attn_logit_softcapping", CAP)?;
    let most = keys.number(Key("", "final_logit_softcapping"))?.filter(|most| most.value != 0.0);
    let most = most.map(|most| most.positive()).transpose()?.map(|most| most as f32);
    let mut config = raw.check()?;
    config.gate = &[Unary::GeluTanh];
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = true;
    options.gate = Gate::Plain(Unary::GeluTanh);
    let beside = files.names.find("blocks.0.mlp.dense.up")?.is_some();
    let newer = files.names.find("blocks.0.newer_norm")?.is_some();
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        let name = format!("blocks.{i}.mlp");
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        if !beside {
            return Ok(Box::new(move |x| experts.forward(x)));
        }
        let (name, sizes) = (format!("{name}.dense"), [config.hidden, config.feed_forward]);
        let dense = Mlp::new(builder, &name, sizes, Bias::Never, config.gate)?;
        Ok(Box::new(move |x| dense.forward(x).add(&experts.forward(x)).scale(FRAC_1_SQRT_2)))
    });
    let attention = move |config: &Config, layer| AttentionOptions {
        scale: Some(scale),
        cap: Some(cap),
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward,
        normed: decoder::both(true, true),
        multipliers: [embedding, 1.0, logits],
        logit_cap: most,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let count = options.experts;
    Ok(decoder::open_recipes(config, parts, move |_, weights, name| {
        match name.strip_suffix(".after_mlp_norm").filter(|_| newer) {
            Some(block) => weights.find(&format!("{block}.newer_norm")),
            None => experts::joined(weights, name, count),
        }
    }))
}
