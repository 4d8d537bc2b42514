//! Qwen, the first (Bai et al. 2023): Llama with q, k and v in one matrix, which alone has a bias,
//! under GPT-2's names. A feed-forward is half as wide as is stated.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, phi3};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias};

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.c_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "transformer.h.{}.mlp.w2", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.w1", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen 1",
    name: "qwen",
    gguf: "qwen",
    class: "QWenLMHeadModel",
    unsaid: Unsaid::NOTHING,
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own.
const OWN: &[(&str, &str)] = &[("head_dim", "kv_channels")];

/// How its own program computes the same, and dropouts.
const NOTED: &[&str] = &[
    "attn_dropout_prob",
    "emb_dropout_prob",
    "onnx_safe",
    "rotary_pct",
    "softmax_in_fp32",
    "use_cache_kernel",
    "use_cache_quantization",
    "use_dynamic_ntk",
    "use_flash_attn",
    "use_logn_attn",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    let eps = Key("layer_norm_epsilon", "attention.layer_norm_rms_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    for (key, only) in [("no_bias", true), ("scale_attn_weights", true)] {
        if keys.flag(Key(key, ""))? == Some(!only) {
            return Err(keys.wrong(key, only, !only).of(ErrorKind::Unsupported));
        }
    }
    raw.feed_forward.value /= 2;
    if let (Some(rotation), Some(base)) =
        (&mut raw.rotation, keys.number(Key("rotary_emb_base", "rope.freq_base"))?)
    {
        rotation.theta = base;
    }
    raw.turns_part(files, keys.number(Key("rotary_pct", ""))?.map_or(1.0, |part| part.value))?;
    // Beyond what it was trained for its program stretches rotations and queries.
    if let (Dialect::HuggingFace, Some(length)) = (keys.dialect(), keys.size("seq_length")?) {
        raw.context = length;
    }
    let attention = |config: &Config, layer: usize| AttentionOptions {
        qkv_bias: Bias::Always,
        ..config.attention(layer)
    };
    let parts = decoder::Parts::new(Bias::Never, attention);
    Ok(decoder::open_recipes(raw.check()?, parts, phi3::part))
}

/// GGUF's metadata of the feed-forward, which is twice as wide there as well; none for other
/// architectures.
pub(crate) fn metadata(config: &Config) -> Option<(&'static str, MetadataValue)> {
    let ours = config.architecture.name == ARCHITECTURE.name;
    ours.then(|| ("feed_forward_length", MetadataValue::U32(2 * config.feed_forward as u32)))
}
