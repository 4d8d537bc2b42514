//! Command R (Cohere 2024): attention and feed-forward side by side behind one layer norm without a
//! bias, heads rotated in adjacent pairs, and logits times a factor. Command R7B (2024) has windows
//! in three layers of four, which alone are rotated. Command R+ norms heads of q and k.

use crate::config::{Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, head_norms, llama, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, Builder, Pairing};

const NORMS: &[Row] = &[
    ("blocks.{}.attention.q_scale", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_scale", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Command R and R+",
    name: "cohere",
    gguf: "command-r",
    class: "CohereForCausalLM",
    unsaid: Unsaid::sizes([8192, 22_528, 40, 64, 0, 0, 8192, 256_000]).theta(500_000.0).eps(1e-5),
    names: &[NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// Command R7B and its successors.
pub(crate) const COHERE2: Architecture = Architecture {
    title: "Command R7B and Command A",
    name: "cohere2",
    gguf: "cohere2",
    class: "Cohere2ForCausalLM",
    unsaid: Unsaid::sizes([8192, 22_528, 40, 64, 0, 4096, 8192, 256_000]).eps(1e-5),
    open: open_windowed,
    ..ARCHITECTURE
};

/// One layer of this many sees everything, and is not rotated.
const PERIOD: usize = 4;

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = read(files)?;
    // What the first models were trained for in the end.
    if let Some(context) = files.keys.size(Key("model_max_length", ""))? {
        raw.context.value = raw.context.value.max(context.value);
    }
    // The largest of the first models has them.
    opened(files, raw, false, head_norms::has(files, "use_qk_norm")?)
}

fn open_windowed(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = read(files)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    // What these models have, by keys of the first configurations.
    keys.only(Key("order_of_interleaved_layers", ""), &["local_attn_first"])?;
    keys.only(Key("position_embedding_type", ""), &["rope_gptj"])?;
    for key in ["use_embedding_sharing", "use_gated_activation", "use_parallel_block"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            return Err(keys.wrong(key, "true, as of this architecture", false));
        }
    }
    for key in ["layer_switch", "use_parallel_embedding"] {
        keys.note(key);
    }
    if let Some(part) = keys.number(Key("rotary_pct", ""))?.filter(|part| part.value != 1.0) {
        return Err(part.wrong("1, all of each head", part.value));
    }
    opened(files, raw, true, false)
}

fn read(files: &Files<'_>) -> Result<Raw> {
    let eps = Key("layer_norm_eps", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    raw.pairing = Pairing::Adjacent;
    Ok(raw)
}

/// A model whose layers without a window are not rotated, if it is `windowed`, and whose heads of q
/// and k are, if they are `normed`.
fn opened(files: &Files<'_>, raw: Raw, windowed: bool, normed: bool) -> Result<Opened> {
    let bias = files.bias("attention_bias")?;
    let logits =
        files.keys.number_or(Key("logit_scale", "logit_scale"), 0.0625)?.positive()? as f32;
    let attention = move |config: &Config, layer| {
        let options = config.attention(layer);
        let rotated = !windowed || options.window.is_some();
        AttentionOptions {
            qkv_bias: bias,
            output_bias: bias,
            qk_norm: head_norms::of(config, normed),
            rope: options.rope.clone().filter(|_| rotated),
            ..options
        }
    };
    let parts = decoder::Parts {
        order: Order::BesideOneNorm,
        norm,
        multipliers: [1.0, 1.0, logits],
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(raw.check()?, parts, head_norms::part))
}

/// A layer norm without a bias.
pub(crate) fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<decoder::Layer> {
    decoder::layer_norm(builder, name, config, Bias::Never)
}
