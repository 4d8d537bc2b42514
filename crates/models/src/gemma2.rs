//! Gemma 2 (Riviere et al. 2024): norms of `1 + w` in front of and behind each sublayer, soft caps
//! on scores and logits, a GELU gate, an embedding times the root of its width, and a window on
//! every other layer, the first among them.

use crate::config::{Config, GATE, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::{Recipes, Row};
use crate::unsaid::Unsaid;
use crate::{Architecture, Ending, Layers, Opened, gpt2, windows};
use formats::{Result, Source};
use nn::{
    AttentionOptions, Bias, Builder, Embedding, ForwardPass, Mlp, Norm, SelfAttention, Stored,
    Tensor, Weights,
};
use ops::Unary;

/// The names that the family shares.
pub(crate) const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    (
        "blocks.{}.after_attention_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    ("blocks.{}.mlp_norm", "model.layers.{}.pre_feedforward_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    (
        "blocks.{}.after_mlp_norm",
        "model.layers.{}.post_feedforward_layernorm",
        "blk.{}.post_ffw_norm",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Gemma 2",
    name: "gemma2",
    gguf: "gemma2",
    class: "Gemma2ForCausalLM",
    unsaid: Unsaid::sizes([2304, 9216, 26, 8, 4, 4096, 8192, 256_000]),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// VaultGemma (Google 2025), trained with differential privacy: the same with norms in front alone.
pub(crate) const VAULT: Architecture = Architecture {
    title: "VaultGemma",
    name: "vaultgemma",
    gguf: "",
    class: "VaultGemmaForCausalLM",
    ..ARCHITECTURE
};

/// The function of the gate where nothing is said.
pub(crate) const GELU: &[Unary] = &[Unary::GeluTanh];

/// The numbers that most decoders share, and the gate by the name that it has here.
///
/// # Errors
/// As [`Raw::read`].
pub(crate) fn read(files: &Files<'_>) -> Result<Raw> {
    // A name that the class does not read.
    files.keys.only(GATE, &["gelu_pytorch_tanh"])?;
    let gate = gpt2::activation(files, "hidden_activation", GELU)?;
    Ok(Raw { gate, ..Raw::read(files)? })
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = read(files)?;
    raw.windows = windows::alternating(files, &raw.layers)?;
    // The first name of the window, which stands beside the other.
    keys.note("sliding_window_size");
    // `null` is no cap; the class has one where nothing is said.
    let silent = |key: Key| keys.dialect() == Dialect::HuggingFace && !keys.is_null(key.0);
    let cap = |key, usual| match keys.number(key)? {
        Some(cap) => Ok(Some(cap.positive()? as f32)),
        None => Ok(silent(key).then_some(usual)),
    };
    let score_cap = cap(Key("attn_logit_softcapping", "attn_logit_softcapping"), 50.0)?;
    let logit_cap = cap(Key("final_logit_softcapping", "final_logit_softcapping"), 30.0)?;
    let scalar = keys.number(Key("query_pre_attn_scalar", ""))?;
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let scalar = match scalar {
        Some(scalar) => scalar.positive()? as f32,
        None if keys.dialect() == Dialect::HuggingFace => 256.0,
        // GGUF does not say it. The largest of the family, of 46 layers, divides by the width that
        // its heads would have.
        None if config.layers == 46 => (config.hidden / config.heads) as f32,
        None => config.head_dim as f32,
    };
    let scale = 1.0 / scalar.sqrt();
    let attention = move |config: &Config, layer| AttentionOptions {
        scale: Some(scale),
        cap: score_cap,
        ..decoder::biased(bias)(config, layer)
    };
    Ok(opened(files, config, attention, logit_cap))
}

/// A model of the family's layers: `attention` gives the options of each, `logit_cap` bounds
/// logits.
pub(crate) fn opened(
    files: &Files<'_>,
    config: Config,
    attention: impl Fn(&Config, usize) -> AttentionOptions + 'static,
    logit_cap: Option<f32>,
) -> Opened {
    let (of, stored_less_one) = (config.clone(), files.keys.dialect() == Dialect::HuggingFace);
    let build = move |weights: &dyn Weights, ending| {
        let change = |weights: &dyn Weights, name: &str| norm(weights, name, stored_less_one);
        layers(&Recipes { weights, change }, &of, &attention, logit_cap, ending)
    };
    Opened { config, build: Box::new(build) }
}

/// A norm's weight: Hugging Face stores it less 1.
pub(crate) fn norm(
    weights: &dyn Weights,
    name: &str,
    stored_less_one: bool,
) -> Result<Option<Stored>> {
    if !stored_less_one || !name.ends_with("norm") {
        return Ok(None);
    }
    let stored = weights.find(name)?;
    Ok(stored.map(|Stored { source, shape }| Stored {
        source: Source::Plus(Box::new(source), 1.0),
        shape,
    }))
}

struct Block {
    attention_norm: Norm,
    attention: SelfAttention,
    after_attention_norm: Option<Norm>,
    mlp_norm: Norm,
    mlp: Mlp,
    after_mlp_norm: Option<Norm>,
}

impl Block {
    fn new(
        builder: &Builder<'_>,
        config: &Config,
        options: AttentionOptions,
        i: usize,
    ) -> Result<Block> {
        let (hidden, eps) = (config.hidden, config.norm_eps);
        let norm = |name: &str| Norm::rms(builder, &format!("blocks.{i}.{name}"), hidden, eps);
        let (sizes, gate) = ([hidden, config.feed_forward], config.gate);
        let behind = config.architecture.name != VAULT.name;
        let behind = |name: &str| behind.then(|| norm(name)).transpose();
        Ok(Block {
            attention_norm: norm("attention_norm")?,
            attention: SelfAttention::new(builder, &format!("blocks.{i}.attention"), options)?,
            after_attention_norm: behind("after_attention_norm")?,
            mlp_norm: norm("mlp_norm")?,
            mlp: Mlp::new(builder, &format!("blocks.{i}.mlp"), sizes, Bias::Never, gate)?,
            after_mlp_norm: behind("after_mlp_norm")?,
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let behind = |norm: &Option<Norm>, y: Tensor| match norm {
            Some(norm) => norm.forward(&y),
            None => y,
        };
        let y = self.attention.forward(&self.attention_norm.forward(x));
        let x = x.add(&behind(&self.after_attention_norm, y));
        let y = self.mlp.forward(&self.mlp_norm.forward(&x));
        x.add(&behind(&self.after_mlp_norm, y))
    }
}

fn layers(
    weights: &dyn Weights,
    config: &Config,
    attention: impl Fn(&Config, usize) -> AttentionOptions,
    logit_cap: Option<f32>,
    ending: Ending,
) -> Result<Layers> {
    let builder = &Builder::new(weights);
    let hidden = config.hidden;
    let embed = Embedding::new(builder, "embed", config.vocab, hidden)?;
    let blocks: Vec<Block> = (0..config.layers)
        .map(|i| Block::new(builder, config, attention(config, i), i))
        .collect::<Result<_>>()?;
    let norm = Norm::rms(builder, "norm", hidden, config.norm_eps)?;
    let head = || head(builder, config, &embed, logit_cap);
    let head = (ending == Ending::Logits).then(head).transpose()?;
    let hidden = move |step: &ForwardPass| {
        let mut x = embed.forward(step).scale((hidden as f32).sqrt()).trace("embed");
        for (i, block) in blocks.iter().enumerate() {
            x = block.forward(&x).trace(format!("blocks.{i}"));
        }
        norm.forward(&x.select()).trace("norm")
    };
    Ok(Layers { blank: builder.program(), hidden: Box::new(hidden), head })
}

/// The product that makes logits of hidden states, within `cap` of zero.
///
/// # Errors
/// A matrix that is missing, or does not fit the configuration.
pub(crate) fn head(
    builder: &Builder<'_>,
    config: &Config,
    embed: &Embedding,
    cap: Option<f32>,
) -> Result<Layer> {
    let head = decoder::head(builder, config, embed, Bias::Never)?;
    Ok(Box::new(move |hidden| decoder::capped(head.forward(hidden), cap)))
}
