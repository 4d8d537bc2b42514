//! Command A+ (Cohere 2026): Command A with a mixture in the blocks behind the first, and an expert
//! beside it that every token goes through.

use crate::cohere;
use crate::config::{Config, RMS_EPS, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, deepseek, experts, glm4_moe, llama, mixtral, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, MixtureOfExperts, Mlp, Odds, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Command A+",
    name: "cohere2_moe",
    gguf: "",
    class: "Cohere2MoeForCausalLM",
    unsaid: Unsaid::sizes([8192, 22_528, 40, 64, 0, 4096, 8192, 256_000]),
    names: &[glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Numbers that configurations may leave out.
const USUAL: &[(&str, usize)] =
    &[("head_dim", 128), ("num_experts", 8), ("num_experts_per_tok", 2)];

/// One layer of this many sees everything.
const PERIOD: usize = 4;

/// The blocks without experts.
struct Dense {
    /// Which they are.
    blocks: Vec<bool>,
    /// Their width.
    width: usize,
    /// One of this many sees everything.
    period: usize,
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_usual(USUAL);
    let keys = &files.keys;
    keys.only(Key("hidden_act", ""), &["silu"])?;
    // RMS norms where they have a number, layer norms else.
    let rms = keys.number(RMS_EPS)?.is_some();
    let eps = Key("layer_norm_eps", "");
    keys.number(eps)?;
    let mut raw = Raw::read_normed(files, if rms { RMS_EPS } else { eps }, 1e-5)?;
    raw.pairing = Pairing::Adjacent;
    let dense = dense(files, &mut raw)?;
    keys.note("num_nextn_predict_layers");
    let bias = files.bias("attention_bias")?;
    let logits = keys.number_or(Key("logit_scale", ""), 0.0625)?.positive()? as f32;
    let shared = keys.size(Key("num_shared_experts", ""))?;
    let shared = shared.map_or(Ok(0), |shared| shared.within(0..=64))?;
    const TOGETHER: Key = Key("shared_expert_combination_strategy", "");
    const ODDS: Key = Key("expert_selection_fn", "");
    keys.only(TOGETHER, &["average", "sum"])?;
    keys.only(ODDS, &["softmax", "sigmoid"])?;
    let share = if keys.text(TOGETHER)? == Some("sum") { 1.0 } else { 0.5 };
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    options.routing.normalised = keys.flag(Key("norm_topk_prob", ""))?.unwrap_or(true);
    match keys.text(ODDS)? {
        Some("sigmoid") => options.routing.odds = Odds::Sigmoid,
        _ => options.routing.normalised = true,
    }
    let rotated: Vec<bool> = dense.blocks.iter().map(|block| *block && dense.period == 1).collect();
    let attention = move |config: &Config, layer: usize| {
        let options = config.attention(layer);
        let turns = options.window.is_some() || rotated[layer];
        AttentionOptions {
            qkv_bias: bias,
            output_bias: bias,
            rope: options.rope.filter(|_| turns),
            ..options
        }
    };
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        let (name, hidden) = (format!("blocks.{i}.mlp"), config.hidden);
        if dense.blocks[i] {
            let mlp = Mlp::new(builder, &name, hidden, dense.width, Bias::Never)?;
            return Ok(Box::new(move |x| mlp.forward(x)));
        }
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        if shared == 0 {
            return Ok(Box::new(move |x| experts.forward(x)));
        }
        let width = shared * options.feed_forward;
        let one = Mlp::new(builder, &format!("{name}.shared"), hidden, width, Bias::Never)?;
        Ok(Box::new(move |x| decoder::scaled(experts.forward(x).add(&one.forward(x)), share)))
    });
    let parts = decoder::Parts {
        order: Order::BesideOneNorm,
        norm: if rms { decoder::rms_norm } else { cohere::norm },
        multipliers: [1.0, 1.0, logits],
        feed_forward,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(mixtral::opened(config, parts, options.experts))
}

/// Reads which blocks have no experts, and the windows, which begin anew behind these.
fn dense(files: &Files<'_>, raw: &mut Raw) -> Result<Dense> {
    let keys = &files.keys;
    let count = raw.layers.within(1..=crate::config::LAYERS)?;
    let number = |key: &'static str, usual: usize| {
        keys.size(Key(key, ""))?.map_or(Ok(usual), |n| n.within(0..=count))
    };
    let first = number("first_k_dense_replace", 0)?;
    let period = number("prefix_dense_sliding_window_pattern", 1)?.max(1);
    let behind = keys.size(Key("sliding_window_pattern", ""))?;
    let behind = behind.map_or(Ok(PERIOD), |n| n.within(1..=crate::config::LAYERS))?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    if keys.get(Key("layer_types", "")).is_none() {
        let front = first.min(raw.windows.len());
        let (front, rest) = raw.windows.split_at_mut(front);
        for (windows, period) in [(front, period), (rest, behind)] {
            windows.iter_mut().skip(period - 1).step_by(period).for_each(|window| *window = None);
        }
    }
    let width = keys.size(Key("prefix_dense_intermediate_size", ""))?;
    let width = width.unwrap_or_else(|| raw.feed_forward.clone());
    let blocks = deepseek::listed(files, count)?;
    let blocks = blocks.unwrap_or_else(|| (0..count).map(|i| i < first).collect());
    Ok(Dense { blocks, width: width.within(1..=crate::config::LIMIT)?, period })
}
