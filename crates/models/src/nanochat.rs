//! nanochat (Karpathy 2025): norms without weights, of embeddings too, norms of each head behind a
//! rotation the other way round, a feed-forward of the square of what is positive, and a bound on
//! logits.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, llama, nemotron, windows};
use formats::{Result, Source};
use nn::{AttentionOptions, Bias, QkNorm, Rope, Stored, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.fc1", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.fc2", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "nanochat",
    name: "nanochat",
    gguf: "",
    class: "NanoChatForCausalLM",
    unsaid: Unsaid::sizes([768, 8192, 12, 6, 0, 0, 2048, 50_304])
        .numbers(&[("num_attention_heads", 6)]),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    const CAP: Key = Key("final_logit_softcapping", "");
    const USUAL: f64 = 15.0;
    let keys = &files.keys;
    let raw = Raw::read_normed(files, crate::config::RMS_EPS)?;
    windows::of_types(files, &raw.layers, None)?;
    let act = gpt2::activation(files, "hidden_act", nemotron::SQUARED)?;
    let cap = match keys.mentions(CAP) {
        true => keys.number(CAP)?,
        false => Some(keys.number_or(CAP, USUAL)?),
    };
    let cap = cap.map(|cap| cap.positive()).transpose()?.map(|cap| cap as f32);
    let bias = files.bias("attention_bias")?;
    let mut config = raw.check()?;
    config.rope = config.rope.map(|rope| Rope {
        frequencies: rope.frequencies.iter().map(|turns| -turns).collect(),
        ..rope
    });
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Heads(config.norm_eps),
        rotates_first: true,
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, Bias::Never)
        }),
        normed_embeddings: true,
        logit_cap: cap,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(config, parts, ones))
}

/// The weights of norms, which are not stored.
fn ones(config: &Config, _: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    if !name.ends_with("norm") {
        return Ok(None);
    }
    let heads = name.ends_with(".q_norm") || name.ends_with(".k_norm");
    let shape = vec![if heads { config.head_dim } else { config.hidden }];
    let source = Source::Plus(Box::new(Source::Zeros(shape.clone())), 1.0);
    Ok(Some(Stored { source, shape }))
}
