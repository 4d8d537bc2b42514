//! ModernBERT's decoder (Weller et al. 2025, the models called Ettin): layer norms in front, of the
//! embeddings too, but not in front of the first attention; a GELU gate; two layers of three within a
//! window, with a rotation of their own; a product and a norm in front of the head.

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::rope::{Rotation, Scaling};
use crate::stated::Stated;
use crate::unsaid::{Unsaid, said};
use crate::{Architecture, Opened, phi3, scaling, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, Builder, Mlp, Pairing, Projection, Unary};

const NAMES: &[Row] = &[
    ("embed", "model.embeddings.tok_embeddings", ""),
    ("embed_norm", "model.embeddings.norm", ""),
    ("norm", "model.final_norm", ""),
    ("head_in", "lm_head.dense", ""),
    ("head_norm", "lm_head.norm", ""),
    ("head", "decoder", ""),
    ("blocks.{}.attention_norm", "model.layers.{}.attn_norm", ""),
    ("blocks.{}.attention.q", "model.layers.{}.attn.q_proj", ""),
    ("blocks.{}.attention.k", "model.layers.{}.attn.k_proj", ""),
    ("blocks.{}.attention.v", "model.layers.{}.attn.v_proj", ""),
    ("blocks.{}.attention.o", "model.layers.{}.attn.Wo", ""),
    ("blocks.{}.mlp_norm", "model.layers.{}.mlp_norm", ""),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.Wi", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.Wo", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "ModernBERT's decoder, Ettin",
    name: "modernbert-decoder",
    gguf: "",
    class: "ModernBertDecoderForCausalLM",
    unsaid: Unsaid::sizes([768, 1152, 22, 12, 0, 0, 8192, 50_368]).eps(1e-5).rotated(said!({
        "full_attention": { "rope_theta": 160_000.0 },
        "sliding_attention": { "rope_theta": 10_000.0 },
    })),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// One layer of this many sees everything, the first among them.
const PERIOD: usize = 3;

/// Positions within which the others would see on both sides, if nothing is said.
const LOCAL: usize = 128;

/// Keys about training, about classifiers, and about forms of computing that give the same.
const NOTED: &[&str] = &[
    "causal_mask",
    "classifier_dropout",
    "classifier_pooling",
    "cls_token_id",
    "deterministic_flash_attn",
    "gradient_checkpointing",
    "initializer_cutoff_factor",
    "is_causal",
    "layer_norm_eps",
    "mask_token_id",
    "mlp_dropout",
    "position_embedding_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sep_token_id",
    "sparse_pred_ignore_index",
    "sparse_prediction",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_ungated(files, Key("norm_eps", ""))?;
    for key in ["hidden_activation", "classifier_activation"] {
        keys.only(Key(key, ""), &["gelu"])?;
    }
    NOTED.iter().for_each(|key| keys.note(key));
    raw.windows = within(files, &raw.layers)?;
    let width = raw.hidden.value.checked_div(raw.heads.value).unwrap_or(0);
    let of = |kind, key, base: f64| {
        let base = keys.number_or(Key(key, ""), base)?.positive()?;
        scaling::of_kind_or(files, kind, width, (base, Scaling::None))
    };
    let global = of("full_attention", "global_rope_theta", 160_000.0)?;
    let local: Rotation = of("sliding_attention", "local_rope_theta", 10_000.0)?;
    raw.rotation = Some(global);
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    // Those that are stored count.
    for key in ["norm_bias", "classifier_bias"] {
        keys.flag(Key(key, ""))?;
    }
    let head_bias = match keys.flag(Key("decoder_bias", ""))? {
        Some(false) => Bias::Never,
        _ => Bias::Always,
    };
    let (loaded, of_heads) = (raw.loaded, raw.hidden.clone());
    let config = raw.check()?;
    let context = loaded.unwrap_or(config.context);
    let local = local.rope(config.head_dim, &of_heads, Pairing::Half, context)?;
    let attention = move |config: &Config, layer: usize| {
        let options = decoder::biased(bias)(config, layer);
        let rope = if options.window.is_some() { Some(local.clone()) } else { options.rope };
        AttentionOptions { rope, ..options }
    };
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        let (name, sizes) = (format!("blocks.{i}.mlp"), [config.hidden, config.feed_forward]);
        let mlp = Mlp::new(builder, &name, sizes, mlp_bias, &[Unary::GeluErf])?;
        Ok(Box::new(move |x| mlp.forward(x)))
    });
    let parts = decoder::Parts {
        feed_forward,
        norm,
        normed_embeddings: true,
        head_bias,
        before_head: Some(before_head),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(config, parts, phi3::part))
}

/// The window of each layer that has one: `local_attention` counts positions on both sides.
fn within(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Option<usize>>> {
    let keys = &files.keys;
    let both = keys.size(Key("local_attention", ""))?.unwrap_or(keys.stated("", LOCAL));
    let window = both.within(2..=LIMIT)? / 2;
    // Transformers states what follows, too.
    keys.note("sliding_window");
    let period = keys.size(Key("global_attn_every_n_layers", ""))?;
    let period = period.map_or(Ok(PERIOD), |period| period.within(1..=LAYERS))?;
    let usual = || {
        let layers = 0..layers.value.min(LAYERS);
        layers.map(|i| (!i.is_multiple_of(period)).then_some(window)).collect()
    };
    Ok(windows::of_types(files, layers, Some(window))?.unwrap_or_else(usual))
}

/// A layer norm, but none in front of the first attention, since embeddings are normed.
fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<Layer> {
    match name {
        "blocks.0.attention_norm" => Ok(Box::new(|x| x.clone())),
        _ => decoder::layer_norm(builder, name, config, Bias::IfStored),
    }
}

/// A product, GELU and a norm.
fn before_head(builder: &Builder<'_>, config: &Config) -> Result<Layer> {
    let shape = [config.hidden; 2];
    let product = Projection::new(builder, "head_in", shape, Bias::IfStored)?;
    let norm = norm(builder, "head_norm", config)?;
    Ok(Box::new(move |x| norm(&product.forward(x).map(Unary::GeluErf))))
}
