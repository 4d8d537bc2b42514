//! Ling 1.5 and Ring (Ling Team 2025): Llama with q, k and v in one matrix and a mixture of experts
//! beside one that every token goes through. Ling 2 has norms of each head, of which half is rotated,
//! and chooses experts by corrected odds in the best groups, behind the first dense blocks.

use crate::config::Raw;
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Config, Opened, decoder, experts, llama, phi3, qwen3};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, MixtureOfExperts, Mlp, Pairing, QkNorm, Weights};

/// Names of both.
const NAMES: &[Row] = &[
    ("embed", "model.word_embeddings", "token_embd"),
    ("blocks.{}.attention.o", "model.layers.{}.attention.dense", "blk.{}.attn_output"),
];

/// The matrix of q, k and v, which GGUF has in parts of the first and whole of the second.
const PARTS: &[Row] =
    &[("blocks.{}.attention.qkv", "model.layers.{}.attention.query_key_value", "")];
const WHOLE: &[Row] = &[
    ("blocks.{}.attention.qkv", "model.layers.{}.attention.query_key_value", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.q", "", ""),
    ("blocks.{}.attention.k", "", ""),
    ("blocks.{}.attention.v", "", ""),
    (
        "blocks.{}.attention.q_norm",
        "model.layers.{}.attention.query_layernorm",
        "blk.{}.attn_q_norm",
    ),
    ("blocks.{}.attention.k_norm", "model.layers.{}.attention.key_layernorm", "blk.{}.attn_k_norm"),
    (
        "blocks.{}.mlp.router.correction",
        "model.layers.{}.mlp.gate.expert_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Ling 1.5",
    name: "bailing_moe",
    gguf: "bailingmoe",
    class: "BailingMoeForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES, PARTS, glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

/// Ling 2.
pub(crate) const SECOND: Architecture = Architecture {
    title: "Ling 2",
    name: "bailing_moe_v2",
    gguf: "bailingmoe2",
    class: "BailingMoeV2ForCausalLM",
    unsaid: Unsaid::NOTHING.numbers(NUMBERS),
    names: &[
        NAMES,
        WHOLE,
        glm4_moe::NAMES,
        llama::NAMES,
        qwen3::NORMS,
        experts::NAMES,
        experts::SWITCHED,
    ],
    open: open_second,
    ..ARCHITECTURE
};

const OWN: &[(&str, &str)] = &[
    ("n_shared_experts", "num_shared_experts"),
    ("attention_bias", "use_qkv_bias"),
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
];

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[("n_group", 1), ("topk_group", 1)];

/// Keys of these models' training, and of properties that all of them have.
const NOTED: &[&str] = &[
    "max_window_layers",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "mtp_loss_scaling_factor",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_dropout",
    "router_dtype",
    "use_rmsnorm",
];

/// Refuses what the authors' program could do, and no model does.
fn check(files: &Files<'_>) -> Result<()> {
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    for key in ["multi_gate", "norm_head", "norm_softmax", "use_bias"] {
        if keys.flag(Key(key, ""))? == Some(true) {
            return Err(keys.wrong(key, "false", true).of(ErrorKind::Unsupported));
        }
    }
    Ok(())
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    check(files)?;
    let mut raw = Raw::read(files)?;
    if keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    const DENSE: Key = Key("first_k_dense_replace", "leading_dense_block_count");
    let dense = keys.size(DENSE)?.filter(|dense| dense.value > 0);
    if let Some(dense) = dense {
        let error = dense.wrong("0: a mixture in every block", dense.value);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    let scale = keys.number_or(Key("routed_scaling_factor", "expert_weights_scale"), 1.0)?;
    options.routing.scale = scale.positive()? as f32;
    keys.state(Key("", "expert_weights_scale"), Some(MetadataValue::F32(options.routing.scale)));
    let shared = keys.size(Key("n_shared_experts", "expert_shared_count"))?;
    let shared = shared.map_or(Ok(0), |shared| shared.within(0..=64))?;
    let (count, width) = (options.experts, options.feed_forward * shared);
    let attention = move |config: &Config, layer: usize| AttentionOptions {
        qkv_bias: bias,
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            let name = format!("blocks.{i}.mlp");
            let experts = MixtureOfExperts::new(builder, &name, &options)?;
            let one = || {
                let name = format!("{name}.shared");
                Mlp::new(builder, &name, [config.hidden, width], Bias::Never, config.gate)
            };
            let one = (width > 0).then(one).transpose()?;
            Ok(Box::new(move |x| match &one {
                Some(one) => experts.forward(x).add(&one.forward(x)),
                None => experts.forward(x),
            }))
        }),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(config, parts, move |config, weights, name| {
        stored(config, weights, name, count)
    }))
}

fn open_second(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    check(files)?;
    let mut raw = Raw::read(files)?;
    raw.turns_part(files, 0.5)?;
    glm4_moe::guesses(files, &mut raw)?;
    open_normed(files, raw)
}

/// A model with norms of each head, unless it says otherwise, and experts that are chosen by
/// corrected odds, as Sarvam's has them too.
pub(crate) fn open_normed(files: &Files<'_>, raw: Raw) -> Result<Opened> {
    let keys = &files.keys;
    keys.only(Key("score_function", ""), &["sigmoid"])?;
    let normed = keys.flag(Key("use_qk_norm", ""))?.unwrap_or(true);
    let usual = Usual { scale: 2.5, ..Usual::default() };
    let (config, mut parts, count) = glm4_moe::parts(files, raw, usual)?;
    let attention = parts.attention;
    parts.attention = Box::new(move |config: &Config, layer| AttentionOptions {
        qk_norm: if normed { QkNorm::Heads(config.norm_eps) } else { QkNorm::None },
        ..attention(config, layer)
    });
    Ok(decoder::open_recipes(config, parts, move |config, weights, name| {
        stored(config, weights, name, count)
    }))
}

/// Rows of the matrix of q, k and v, and experts however they are stored.
fn stored(
    config: &Config,
    weights: &dyn Weights,
    name: &str,
    experts: usize,
) -> Result<Option<nn::Stored>> {
    match name.contains(".attention.") {
        true => phi3::part(config, weights, name),
        false => experts::joined(weights, name, experts),
    }
}
