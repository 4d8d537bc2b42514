//! gpt-oss (OpenAI 2025): attention with sinks, within a window in every other layer, the first
//! among them; a mixture of experts with biases and a clamped gate in every block; YaRN.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::Scaling;
use crate::unsaid::{Unsaid, said};
use crate::{Architecture, Opened, decoder, experts, llama, mixtral, windows};
use formats::{Result, Source};
use nn::{AttentionOptions, Bias, Gate, Stored, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.attention.sinks", "model.layers.{}.self_attn.sinks!", "blk.{}.attn_sinks"),
    (
        "blocks.{}.mlp_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.router", "blk.{}.ffn_gate_inp"),
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.mlp.experts.gate_up_proj!", ""),
    ("blocks.{}.mlp.experts.gate", "model.layers.{}.mlp.experts.gate_proj", "blk.{}.ffn_gate_exps"),
    ("blocks.{}.mlp.experts.up", "model.layers.{}.mlp.experts.up_proj", "blk.{}.ffn_up_exps"),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.mlp.experts.down_proj!",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.mlp.experts.down_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "gpt-oss",
    name: "gpt_oss",
    gguf: "gpt-oss",
    class: "GptOssForCausalLM",
    unsaid: Unsaid::sizes([2880, 2880, 36, 64, 8, 128, 131_072, 201_088])
        .theta(150_000.0)
        .rotated(said!({
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": false,
            "original_max_position_embeddings": 4096,
        }))
        .eps(1e-5)
        .numbers(&[("num_experts_per_tok", 4), ("num_local_experts", 128)]),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: true,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_silu(files)?;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    raw.windows = windows::alternating(files, &raw.layers)?;
    let scaling = raw.rotation.as_mut().map(|rotation| &mut rotation.scaling.value);
    if let (false, Some(Scaling::Yarn(yarn))) = (hugging_face, scaling) {
        // GGUF does not say it: the models' pairs between are not widened to whole numbers.
        yarn.truncate = false;
    }
    let limit = keys.number_or(Key("swiglu_limit", ""), 7.0)?.positive()? as f32;
    let alpha = keys.number_or(Key("swiglu_alpha", ""), 1.702)?.positive()? as f32;
    let stated = keys.flag(Key("attention_bias", ""))?;
    let bias = if stated == Some(false) { Bias::Never } else { Bias::Always };
    // Older spellings of `num_experts_per_tok` and of yarn's original context.
    keys.size(Key("experts_per_token", ""))?;
    keys.size(Key("initial_context_length", ""))?;
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = true;
    options.gate = Gate::Clamped { limit, alpha };
    (options.router_bias, options.biases) = (Bias::Always, true);
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        sinks: true,
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: mixtral::mixture(options),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let stored =
        move |_: &Config, weights: &dyn Weights, name: &str| expert(weights, name, hugging_face);
    Ok(decoder::open_recipes(config, parts, stored))
}

/// All experts' matrices, one below the other. Hugging Face stores the rows of gate and up by
/// turns; matrices of numbers the other way round than everywhere else, blocks not. MLX's folders
/// have three stacks, as GGUF does.
fn expert(weights: &dyn Weights, name: &str, hugging_face: bool) -> Result<Option<Stored>> {
    let (stem, bias) = match name.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (name, ""),
    };
    let Some((block, part)) = stem.split_once(".experts.") else { return Ok(None) };
    let joined = hugging_face && weights.find(&format!("{block}.experts.gate{bias}"))?.is_none();
    let turn = match (joined, part) {
        (true, "gate") => Some(0),
        (true, "up") => Some(1),
        _ => None,
    };
    let stored = match turn {
        Some(_) => weights.find(&format!("{block}.experts.gate_up{bias}"))?,
        None => weights.find(name)?,
    };
    let Some(mut stored) = stored else { return Ok(None) };
    let plain = matches!(stored.source, Source::Tensor(_));
    if joined && plain && bias.is_empty() && stored.shape.len() == 3 {
        stored.shape.swap(1, 2);
        stored.source = Source::Transpose(Box::new(stored.source));
    }
    let Stored { source, mut shape } = experts::flat(weights, name, stored)?;
    let Some(start) = turn else { return Ok(Some(Stored { source, shape })) };
    shape[0] /= 2;
    Ok(Some(Stored { source: source.every(2, start, shape[0]), shape }))
}
