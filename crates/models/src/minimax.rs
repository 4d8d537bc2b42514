//! MiniMax-01 and M1 (MiniMax 2025): lightning attention in most layers, Mixtral's experts in all. A
//! sublayer reads its input through a norm, and what it gives is added to the normed input, each
//! times a factor.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::{Recipes, Row};
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Ending, Layers, Opened, decoder, experts, llama, mixtral, phi3};
use formats::{ErrorKind, Result, Source};
use nn::{
    Bias, Builder, Embedding, ExpertsOptions, ForwardPass, LightningAttention, LightningOptions,
    SelfAttention, Stored, Tensor, Weights,
};

const NAMES: &[Row] = &[
    ("blocks.{}.lightning.qkv", "model.layers.{}.self_attn.qkv_proj", ""),
    ("blocks.{}.lightning.gate", "model.layers.{}.self_attn.output_gate", ""),
    ("blocks.{}.lightning.norm", "model.layers.{}.self_attn.norm", ""),
    ("blocks.{}.lightning.o", "model.layers.{}.self_attn.out_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "MiniMax-Text-01, in Transformers' form",
    name: "minimax",
    gguf: "",
    class: "MiniMaxForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 0, 131_072, 32_000])
        .theta(1_000_000.0)
        .eps(1e-5)
        .numbers(&[("num_experts_per_tok", 2), ("num_local_experts", 8)]),
    names: &[NAMES, llama::NAMES, experts::SPARSE_BLOCK],
    signs: None,
    experts: true,
    open,
};

/// The folders that its authors published.
pub(crate) const AUTHORS: Architecture = Architecture {
    title: "MiniMax-Text-01",
    name: "minimax_text_01",
    class: "MiniMaxText01ForCausalLM",
    ..ARCHITECTURE
};

/// The same, trained to reason.
pub(crate) const M1: Architecture = Architecture {
    title: "MiniMax-M1",
    name: "minimax_m1",
    class: "MiniMaxM1ForCausalLM",
    ..ARCHITECTURE
};

/// The authors' names of factors.
const OWN: &[(&str, &str)] = &[
    ("full_attn_alpha_factor", "layernorm_full_attention_alpha"),
    ("full_attn_beta_factor", "layernorm_full_attention_beta"),
    ("linear_attn_alpha_factor", "layernorm_linear_attention_alpha"),
    ("linear_attn_beta_factor", "layernorm_linear_attention_beta"),
    ("mlp_alpha_factor", "layernorm_mlp_alpha"),
    ("mlp_beta_factor", "layernorm_mlp_beta"),
];

/// The number that the norm behind lightning attention adds, whatever others do.
const EPS: f32 = 1e-6;

/// Factors on a normed input, and on what a sublayer makes of it.
type Factors = [f32; 2];

/// The parts of a model.
struct Plan {
    /// Which layers have lightning attention.
    linear: Vec<bool>,
    experts: ExpertsOptions,
    /// The factors of attention, of lightning attention and of experts.
    factors: [Factors; 3],
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    for key in ["block_size", "router_jitter_noise", "shared_moe_mode"] {
        keys.note(key);
    }
    if keys.flag(Key("postnorm", ""))? == Some(false) {
        let error = keys.wrong("postnorm", "true: what is added to is normed", false);
        return Err(error.of(ErrorKind::Unsupported));
    }
    for key in ["shared_intermediate_size", "sliding_window"] {
        if let Some(size) = keys.size(key)?.filter(|size| size.value > 0) {
            return Err(size.wrong("0: this architecture has none", size.value));
        }
    }
    let mut raw = Raw::read_silu(files)?;
    let rotary = keys.size(Key("rotary_dim", ""))?;
    if let Some(rotation) = &mut raw.rotation {
        rotation.rotary = rotation.rotary.take().or(rotary);
    }
    let factor = |key: &'static str| Ok(keys.number_or(Key(key, ""), 1.0)?.value as f32);
    let pair = |alpha, beta| -> Result<Factors> { Ok([factor(alpha)?, factor(beta)?]) };
    let factors = [
        pair("full_attn_alpha_factor", "full_attn_beta_factor")?,
        pair("linear_attn_alpha_factor", "linear_attn_beta_factor")?,
        pair("mlp_alpha_factor", "mlp_beta_factor")?,
    ];
    let linear = linear(files, &raw.layers)?;
    let config = raw.check()?;
    let mut experts = experts::read(files, config.hidden, config.feed_forward)?;
    experts.routing.normalised = true;
    let (of, plan) = (config.clone(), Plan { linear, experts, factors });
    let build = move |weights: &dyn Weights, ending| {
        let change = |weights: &dyn Weights, name: &str| part(&of, &plan, weights, name);
        layers(&Recipes { weights, change }, &of, &plan, ending)
    };
    Ok(Opened { config, build: Box::new(build) })
}

/// Which layers have lightning attention: every other where nothing is said, the second first.
fn linear(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<bool>> {
    const TYPES: Key = Key("layer_types", "");
    const NUMBERS: Key = Key("attn_type_list", "");
    let (keys, count) = (&files.keys, layers.within(1..=LAYERS)?);
    let (key, found) = match keys.get(TYPES).filter(|types| !types.is_null()) {
        Some(types) => (TYPES, Some(types)),
        None => (NUMBERS, keys.get(NUMBERS)),
    };
    let Some(found) = found else { return Ok((0..count).map(|i| i % 2 == 1).collect()) };
    let one = |kind: &serde_json::Value| match (kind.as_str(), kind.as_u64()) {
        (Some("linear_attention"), _) | (_, Some(0)) => Some(true),
        (Some("full_attention"), _) | (_, Some(1)) => Some(false),
        _ => None,
    };
    let all = found.as_array().and_then(|list| list.iter().map(one).collect::<Option<Vec<_>>>());
    let expected = format!("linear_attention or full_attention of {count} layers");
    all.filter(|all| all.len() == count).ok_or_else(|| keys.odd(key, &expected, found))
}

/// Rows of lightning attention in another order, rates of its heads, and experts however stored.
fn part(config: &Config, plan: &Plan, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".lightning.") else {
        return experts::joined(weights, name, plan.experts.experts);
    };
    let (heads, width) = (config.heads, config.head_dim);
    let layer = block.strip_prefix("blocks.").and_then(|layer| layer.parse::<usize>().ok());
    match part {
        "vkq" => {
            let (all, qkv) = (3 * heads * width, format!("{block}.lightning.qkv"));
            let shape = [all, config.hidden];
            let Some(stored) = phi3::rows(weights, &qkv, &shape, 0, all)? else { return Ok(None) };
            // Each head has its query, its key and its value below each other.
            let apart = Source::Permute(Box::new(stored.source), [1, heads, 3, width]);
            let rows = |at: usize| apart.clone().rows(at * heads * width, heads * width);
            let source = Source::Concat(vec![rows(2), rows(1), rows(0)]);
            Ok(Some(Stored { source, ..stored }))
        }
        "zeros" => Ok(Some(Stored { source: Source::Zeros(vec![heads]), shape: vec![heads] })),
        "rates" => {
            let last = config.layers as f64 - 1.0 + 1e-5;
            let slower = 1.0 - layer.unwrap_or(0) as f64 / last + 1e-5;
            let rate = |head: usize| (-8.0 * (head + 1) as f64 / heads as f64).exp2() * slower;
            let one = |head| Source::Plus(Box::new(Source::Zeros(vec![1])), -rate(head) as f32);
            let source = Source::Concat((0..heads).map(one).collect());
            Ok(Some(Stored { source, shape: vec![heads] }))
        }
        _ => Ok(None),
    }
}

/// A norm, the sublayer behind it, and the factors of the sum.
struct Sublayer {
    norm: decoder::Layer,
    layer: decoder::Layer,
    factors: Factors,
}

impl Sublayer {
    fn forward(&self, x: &Tensor) -> Tensor {
        let x = (self.norm)(x);
        let [alpha, beta] = self.factors;
        let y = decoder::scaled((self.layer)(&x), beta);
        decoder::scaled(x, alpha).add(&y)
    }
}

fn layers(weights: &dyn Weights, config: &Config, plan: &Plan, ending: Ending) -> Result<Layers> {
    let builder = &Builder::new(weights);
    let (hidden, heads, head_dim) = (config.hidden, config.heads, config.head_dim);
    let embed = Embedding::new(builder, "embed", config.vocab, hidden)?;
    let mixture = mixtral::mixture(plan.experts);
    let attention = |i: usize| -> Result<decoder::Layer> {
        if plan.linear[i] {
            let options = LightningOptions { hidden, heads, head_dim, eps: EPS };
            let name = format!("blocks.{i}.lightning");
            let attention = LightningAttention::new(builder, &name, &options)?;
            return Ok(Box::new(move |x| attention.forward(x)));
        }
        let name = format!("blocks.{i}.attention");
        let attention = SelfAttention::new(builder, &name, config.attention(i))?;
        Ok(Box::new(move |x| attention.forward(x)))
    };
    let block = |i: usize| -> Result<[Sublayer; 2]> {
        let norm = |part: &str| decoder::rms_norm(builder, &format!("blocks.{i}.{part}"), config);
        let [full, linear, mlp] = plan.factors;
        let factors = if plan.linear[i] { linear } else { full };
        let first = Sublayer { norm: norm("attention_norm")?, layer: attention(i)?, factors };
        let layer = mixture(builder, config, i)?;
        Ok([first, Sublayer { norm: norm("mlp_norm")?, layer, factors: mlp }])
    };
    let blocks = (0..config.layers).map(block).collect::<Result<Vec<_>>>()?;
    let norm = decoder::rms_norm(builder, "norm", config)?;
    let head = || -> Result<decoder::Layer> {
        let head = decoder::head(builder, config, &embed, Bias::Never)?;
        Ok(Box::new(move |hidden| head.forward(hidden)))
    };
    let head = (ending == Ending::Logits).then(head).transpose()?;
    let hidden = Box::new(move |step: &ForwardPass| {
        let mut x = embed.forward(step).trace("embed");
        for (i, block) in blocks.iter().enumerate() {
            x = block.iter().fold(x, |x, layer| layer.forward(&x)).trace(format!("blocks.{i}"));
        }
        norm(&x.select()).trace("norm")
    });
    Ok(Layers { blank: builder.program(), hidden, head })
}
