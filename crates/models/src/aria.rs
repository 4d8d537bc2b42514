//! Aria (Rhymes AI 2024), its text: Llama with a mixture in every block, whose odds are made to sum to
//! one, beside some experts that every token goes through. Experts' matrices are stored turned.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::{Recipes, Row};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, glm4_moe, llama, mixtral};
use formats::{ErrorKind, Result, Source};
use nn::{Bias, Stored, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.router", ""),
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.mlp.experts.fc1", ""),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.mlp.experts.fc2", ""),
    // As Transformers names them.
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.mlp.experts.gate_up_proj!", ""),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.mlp.experts.down_proj!", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Aria, its text",
    name: "aria",
    gguf: "",
    class: "AriaForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 4096, 32, 32, 0, 0, 2048, 32_000]).numbers(&[
        ("moe_num_experts", 8),
        ("n_shared_experts", 2),
        ("num_experts_per_tok", 2),
    ]),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES],
    signs: None,
    experts: true,
    open,
};

/// Names of its own for numbers of experts.
const OWN: &[(&str, &str)] =
    &[("num_experts_per_tok", "moe_topk"), ("n_shared_experts", "moe_num_shared_experts")];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let raw = Raw::read_silu(files)?;
    // What the first configurations repeat, and how it was trained.
    for key in ["num_experts_per_tok", "moe_aux_loss_coeff", "moe_z_loss_coeff"] {
        keys.note(key);
    }
    if keys.flag(Key("mlp_bias", ""))? == Some(true) {
        let error = keys.wrong("mlp_bias", "false, as of published models", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = true;
    let shared = keys.needed("n_shared_experts")?.within(1..=64)? * options.feed_forward;
    let parts = decoder::Parts {
        feed_forward: mixtral::beside_one(options, shared),
        ..decoder::Parts::new(Bias::Never, decoder::biased(bias))
    };
    let count = options.experts;
    let stored = move |_: &Config, weights: &dyn Weights, name: &str| {
        experts::stacked(&Recipes { weights, change: turned }, name, count)
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// A stack of experts, whose matrices are stored as rows are multiplied with them from the left.
fn turned(weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let stack = name.ends_with(".experts.gate_up") || name.ends_with(".experts.down");
    let found = if stack { weights.find(name)? } else { None };
    let Some(Stored { source, mut shape }) = found.filter(|found| found.shape.len() == 3) else {
        return Ok(None);
    };
    shape.swap(1, 2);
    Ok(Some(Stored { source: Source::Transpose(Box::new(source)), shape }))
}
