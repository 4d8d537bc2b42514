//! MPT (MosaicML 2023): slopes on scores in the place of positions, layer norms, a feed-forward
//! without a gate, and no biases unless a checkpoint brings them. q, k and v are one matrix, and may
//! be bounded.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, alibi, decoder, phi3};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Builder, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("norm", "transformer.norm_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.blocks.{}.norm_1", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "transformer.blocks.{}.attn.Wqkv", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "transformer.blocks.{}.attn.out_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.blocks.{}.norm_2", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.up", "transformer.blocks.{}.ffn.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.blocks.{}.ffn.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "MPT",
    name: "mpt",
    gguf: "mpt",
    class: "MptForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("hidden_size", "d_model"),
    ("max_position_embeddings", "max_seq_len"),
];

/// How the authors' own program computes the same, and how it trains. Learned positions are there
/// only where slopes are not, which are refused.
const NOTED: &[&str] = &[
    "embedding_fraction",
    "emb_pdrop",
    "init_config",
    "init_device",
    "learned_pos_emb",
    "norm_type",
    "tokenizer_name",
    "verbose",
];

/// The bound on q, k and v.
const CLIP: Key = Key("clip_qkv", "attention.clamp_kqv");
/// The exponent of the last slope.
const STEEPEST: Key = Key("alibi_bias_max", "attention.max_alibi_bias");

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    // Those that are stored count.
    keys.flag(Key("no_bias", ""))?;
    let eps = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_quadrupled(files, eps)?;
    raw.rotation = None;
    if let Some(times) = keys.size(Key("expansion_ratio", ""))? {
        raw.feed_forward = raw.hidden.clone().map(|width| width.saturating_mul(times.value));
    }
    if let Some(scale) = keys.get(Key("logit_scale", "")) {
        let error = keys.odd("logit_scale", "null: logits as they are", scale);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let own = keys.object("attn_config")?;
    let own = own.as_ref().unwrap_or(keys);
    own.note("attn_impl");
    own.only(Key("attn_type", ""), &["multihead_attention"])?;
    for key in ["prefix_lm", "qk_ln", "attn_uses_sequence_id"] {
        if own.flag(Key(key, ""))? == Some(true) {
            let error = own.wrong(key, "false", true);
            return Err(error.of(ErrorKind::Unsupported));
        }
    }
    let steepest = match keys.dialect() {
        Dialect::Gguf => keys.number_or(STEEPEST, 0.0)?,
        Dialect::HuggingFace => {
            let steepest = own.number_or(STEEPEST, alibi::USUAL)?;
            keys.state(STEEPEST, Some(MetadataValue::F32(steepest.value as f32)));
            steepest
        }
    };
    let slopes = own.flag(Key("alibi", ""))?.unwrap_or(true) && steepest.value > 0.0;
    if !slopes {
        let error = own.wrong(Key("alibi", STEEPEST.1), "slopes on scores", "none");
        return Err(error.of(ErrorKind::Unsupported).hint("learned positions are not supported"));
    }
    let clip = own.number(CLIP)?.filter(|clip| clip.value != 0.0);
    let clip = clip.map(|clip| clip.positive()).transpose()?.map(|clip| clip as f32);
    let scale = own.number(Key("softmax_scale", ""))?.map(|scale| scale.value as f32);
    let attention = move |config: &Config, layer: usize| {
        let options = decoder::biased(Bias::IfStored)(config, layer);
        AttentionOptions { slopes: true, clip, scale, ..options }
    };
    let parts = decoder::Parts {
        feed_forward: Box::new(|builder, config, i| {
            decoder::ungated(builder, config, i, &[Unary::GeluErf], Bias::IfStored)
        }),
        norm,
        ..decoder::Parts::new(Bias::IfStored, attention)
    };
    let steepest = steepest.value;
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match alibi::part(
        name,
        config.heads,
        steepest,
    ) {
        Some(slopes) => Ok(Some(slopes)),
        None => phi3::part(config, weights, name),
    };
    Ok(decoder::open_recipes(raw.check()?, parts, stored))
}

fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<decoder::Layer> {
    decoder::layer_norm(builder, name, config, Bias::IfStored)
}
