//! Hunyuan, dense (Tencent 2025): Llama with norms of each head behind the rotation, whose base is
//! stretched once and for all.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::{Architecture, Opened, decoder, llama};
use formats::Result;
use nn::{AttentionOptions, QkNorm};

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
    names: &[llama::NAMES, NORMS],
    signs: None,
    experts: true,
    open,
};

/// Keys of the published configurations about what these models do not have, or about tokens.
const NOTED: &[&str] = &[
    "attention_head_dim",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "image_token_id",
    "mask_init_id",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "text_end_id",
    "text_start_id",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let raw = Raw::read(files, &["silu"])?;
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
    // One expert is none.
    if let Some(count) = keys.size(Key("num_experts", "expert_count"))?.filter(|n| n.value > 1) {
        return Err(count.wrong("1: this architecture has no experts", count.value));
    }
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp_bias, move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Heads(config.norm_eps),
        rotates_first: true,
        ..config.attention(layer)
    }))
}
