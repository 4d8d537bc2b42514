//! Hunyuan (Tencent 2025): Llama with norms of each head behind the rotation, whose base is
//! stretched once and for all; or the same with a mixture in every block, normalised among the
//! chosen, beside an expert that every token goes through.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key, Keys};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, qwen_vl};
use formats::Result;
use formats::gguf::MetadataValue;
use nn::{AttentionOptions, Bias, MixtureOfExperts, Mlp, QkNorm, Weights};

const NORMS: &[Row] = &[
    (
        "blocks.{}.attention.q_norm",
        "model.layers.{}.self_attn.query_layernorm",
        "blk.{}.attn_q_norm",
    ),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.key_layernorm", "blk.{}.attn_k_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Hunyuan, dense",
    name: "hunyuan_v1_dense",
    gguf: "hunyuan-dense",
    class: "HunYuanDenseV1ForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 290_943]).eps(1e-5),
    names: &[llama::NAMES, NORMS],
    signs: None,
    experts: true,
    open,
};

/// HunyuanOCR (Tencent 2025), its decoder of text: positions in four axes, which a text has alike.
pub(crate) const VISION: Architecture = Architecture {
    title: "HunyuanOCR, its text",
    name: "hunyuan_vl",
    gguf: "",
    class: "HunYuanVLForConditionalGeneration",
    open: |files| {
        qwen_vl::note_tower(files)?;
        for key in ["image_start_token_id", "image_end_token_id", "image_newline_token_id"] {
            files.keys.note(key);
        }
        open(files)
    },
    ..ARCHITECTURE
};

/// The mixture and the expert beside it.
const MIXED: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.gate.wg", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.mlp.shared_mlp.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    ("blocks.{}.mlp.shared.up", "model.layers.{}.mlp.shared_mlp.up_proj", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.mlp.shared_mlp.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
];

/// With a mixture.
pub(crate) const MIXTURE: Architecture = Architecture {
    title: "Hunyuan, mixtures",
    name: "hunyuan_v1_moe",
    gguf: "hunyuan-moe",
    class: "HunYuanMoEV1ForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 290_943])
        .eps(1e-5)
        .numbers(&[("moe_topk", 1), ("num_experts", 1)]),
    names: &[MIXED, llama::NAMES, NORMS, experts::STACKS, experts::SWITCHED],
    open: open_mixture,
    ..ARCHITECTURE
};

/// Keys of the published configurations about what these models do not have, or about tokens.
const NOTED: &[&str] = &[
    "attention_head_dim",
    "anyres_pooling_size",
    "anyres_vit_max_image_size",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "image_token_id",
    "mask_init_id",
    // The mixtures' training, and the name of what all of them are.
    "moe_layer_num_skipped",
    "num_media_embeds",
    "num_shared_expert",
    "use_mixed_mlp_moe",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "text_end_id",
    "text_start_id",
    "video_end_id",
    "video_start_id",
];

/// How many experts a token goes through, and the width of the one that every token does.
const USED: Key = Key("moe_topk", "expert_used_count");
const SHARED: Key = Key("", "expert_shared_feed_forward_length");

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let raw = read(files)?;
    // One expert is none.
    if let Some(count) = keys.size(Key("num_experts", "expert_count"))?.filter(|n| n.value > 1) {
        return Err(count.wrong("1: this architecture has no experts", count.value));
    }
    let (attention, mlp_bias) = (attention(files)?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp_bias, attention))
}

fn open_mixture(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let (raw, attention) = (read(files)?, attention(files)?);
    let own = raw.feed_forward.clone();
    let config = raw.check()?;
    let (hidden, width) = (config.hidden, config.feed_forward);
    let mut options = match keys.dialect() {
        Dialect::Gguf => experts::read(files, hidden, width)?,
        Dialect::HuggingFace => {
            if let Some(other) = for_all(keys, "moe_intermediate_size")?
                && other.value != own.value
            {
                let expected = format!("{}, as {} says", own.value, own.key());
                return Err(other.wrong(expected, other.value));
            }
            let used = for_all(keys, "moe_topk")?;
            keys.state(USED, used.as_ref().map(|used| MetadataValue::U32(used.value as u32)));
            keys.state(SHARED, Some(MetadataValue::U32(width as u32)));
            experts::read_used(files, hidden, width, used)?
        }
    };
    options.routing.normalised = true;
    let shared = keys.size(SHARED)?.map(|width| width.within(1..=1 << 20)).transpose()?;
    let shared = shared.unwrap_or(width);
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        let (name, hidden) = (format!("blocks.{i}.mlp"), options.hidden);
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        let (name, sizes) = (format!("{name}.shared"), [hidden, shared]);
        let one = Mlp::new(builder, &name, sizes, Bias::Never, config.gate)?;
        Ok(Box::new(move |x| experts.forward(x).add(&one.forward(x))))
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    let count = options.experts;
    let stored =
        move |_: &Config, weights: &dyn Weights, name: &str| experts::stacked(weights, name, count);
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The number that `config.json` states once, or in a list with the same for every layer.
fn for_all(keys: &Keys<'_>, key: &'static str) -> Result<Option<Stated<usize>>> {
    if !keys.get(key).is_some_and(serde_json::Value::is_array) {
        return keys.size(Key(key, ""));
    }
    let list = keys.numbers(key)?.unwrap_or_default();
    let first = list.first().copied().unwrap_or(0.0);
    match list.iter().find(|n| **n != first) {
        Some(other) => Err(keys.wrong(key, format!("{first} for every layer"), other)),
        None => Ok(Some(keys.stated(key, first as usize))),
    }
}

/// Reads the keys that dense models and mixtures share.
fn read(files: &Files<'_>) -> Result<Raw> {
    let keys = &files.keys;
    let raw = Raw::read(files)?;
    NOTED.iter().for_each(|key| keys.note(key));
    keys.only(Key("norm_type", ""), &["rms"])?;
    for key in ["use_qk_norm", "use_rotary_pos_emb"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            return Err(keys.wrong(key, "true, as of this architecture", false));
        }
    }
    if keys.flag(Key("use_cla", ""))? == Some(true) {
        return Err(keys.wrong("use_cla", "false: each layer has keys of its own", true));
    }
    Ok(raw)
}

/// Attention with norms of each head behind the rotation.
fn attention(files: &Files<'_>) -> Result<impl Fn(&Config, usize) -> AttentionOptions + 'static> {
    let bias = files.bias("attention_bias")?;
    Ok(move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Heads(config.norm_eps),
        rotates_first: true,
        ..config.attention(layer)
    })
}
