//! Command A+ (Cohere 2026): Command A with a mixture in the blocks behind the first, and an expert
//! beside it that every token goes through.

use crate::cohere;
use crate::config::{Config, RMS_EPS, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, deepseek, experts, glm4_moe, llama, mixtral, windows};
use formats::Result;
use formats::gguf::MetadataValue;
use nn::{AttentionOptions, Bias, MixtureOfExperts, Mlp, Odds, Pairing};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Command A+",
    name: "cohere2_moe",
    gguf: "cohere2moe",
    class: "Cohere2MoeForCausalLM",
    unsaid: Unsaid::sizes([8192, 22_528, 40, 64, 0, 4096, 8192, 256_000])
        .numbers(NUMBERS)
        .eps(1e-5),
    names: &[glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[("head_dim", 128), ("num_experts", 8), ("num_experts_per_tok", 2)];

/// GGUF's numbers of the softmax and of the logistic function, which give experts their odds.
const SOFTMAX: u32 = 1;
const LOGISTIC: u32 = 2;

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
    let keys = &files.keys;
    // RMS norms where they have a number, layer norms else.
    let rms = keys.number(RMS_EPS)?.is_some();
    let eps = Key("layer_norm_eps", "attention.layer_norm_epsilon");
    keys.number(eps)?;
    let mut raw = Raw::read_normed(files, if rms { RMS_EPS } else { eps })?;
    raw.pairing = Pairing::Adjacent;
    glm4_moe::guesses(files, &mut raw)?;
    let dense = dense(files, &mut raw)?;
    let bias = files.bias("attention_bias")?;
    let logits = keys.number_or(Key("logit_scale", "logit_scale"), 0.0625)?.positive()? as f32;
    const SHARED: Key = Key("num_shared_experts", "expert_shared_count");
    let shared = keys.size(SHARED)?.map_or(Ok(0), |shared| shared.within(0..=64))?;
    keys.state(SHARED, Some(MetadataValue::U32(shared as u32)));
    const TOGETHER: Key = Key("shared_expert_combination_strategy", "");
    const ODDS: Key = Key("expert_selection_fn", "");
    keys.only(TOGETHER, &["average", "sum"])?;
    keys.only(ODDS, &["softmax", "sigmoid"])?;
    let share = if keys.text(TOGETHER)? == Some("sum") { 1.0 } else { 0.5 };
    let mut config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    config.feed_forward = dense.width;
    const NORMALISED: Key = Key("norm_topk_prob", "expert_weights_norm");
    const GATING: Key = Key("", "expert_gating_func");
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    options.routing.normalised = keys.flag(NORMALISED)?.unwrap_or(hugging_face);
    let logistic = match hugging_face {
        true => keys.text(ODDS)? == Some("sigmoid"),
        false => keys.size(GATING)?.is_none_or(|odds| odds.value == LOGISTIC as usize),
    };
    match logistic {
        true => options.routing.odds = Odds::Sigmoid,
        // Odds among the chosen experts sum to one.
        false if hugging_face => options.routing.normalised = true,
        false => {}
    }
    let gating = if logistic { LOGISTIC } else { SOFTMAX };
    keys.state(GATING, Some(MetadataValue::U32(gating)));
    keys.state(NORMALISED, Some(MetadataValue::Bool(options.routing.normalised)));
    const WIDTH: Key = Key("", "expert_shared_feed_forward_length");
    keys.size(WIDTH)?;
    keys.state(WIDTH, Some(MetadataValue::U32((shared * options.feed_forward) as u32)));
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
            let mlp = Mlp::new(builder, &name, [hidden, dense.width], Bias::Never, config.gate)?;
            return Ok(Box::new(move |x| mlp.forward(x)));
        }
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        if shared == 0 {
            return Ok(Box::new(move |x| experts.forward(x)));
        }
        let (name, sizes) = (format!("{name}.shared"), [hidden, shared * options.feed_forward]);
        let one = Mlp::new(builder, &name, sizes, Bias::Never, config.gate)?;
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
    const DENSE: Key = Key("first_k_dense_replace", "leading_dense_block_count");
    let number =
        |key: Key, usual: usize| keys.size(key)?.map_or(Ok(usual), |n| n.within(0..=count));
    let first = number(DENSE, 0)?;
    let period = number(Key("prefix_dense_sliding_window_pattern", ""), 1)?.max(1);
    let behind = keys.size(Key("sliding_window_pattern", ""))?;
    let behind = behind.map_or(Ok(PERIOD), |n| n.within(1..=crate::config::LAYERS))?;
    let listed = keys.get(Key("layer_types", "")).is_some();
    raw.windows = match keys.dialect() {
        Dialect::Gguf => windows::periodic(files, &raw.layers, PERIOD)?,
        Dialect::HuggingFace => windows::of_all(files, &raw.layers)?,
    };
    if keys.dialect() == Dialect::HuggingFace && !listed {
        let front = first.min(raw.windows.len());
        let (front, rest) = raw.windows.split_at_mut(front);
        for (windows, period) in [(front, period), (rest, behind)] {
            windows.iter_mut().skip(period - 1).step_by(period).for_each(|window| *window = None);
        }
    }
    let width = keys.size(Key("prefix_dense_intermediate_size", ""))?;
    let width = width.unwrap_or_else(|| raw.feed_forward.clone());
    let blocks = deepseek::listed(files, count)?;
    let blocks: Vec<bool> = blocks.unwrap_or_else(|| (0..count).map(|i| i < first).collect());
    let leading = blocks.iter().take_while(|dense| **dense).count();
    keys.state(DENSE, Some(MetadataValue::U32(leading as u32)));
    Ok(Dense { blocks, width: width.within(1..=crate::config::LIMIT)?, period })
}
