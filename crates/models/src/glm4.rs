//! GLM-4 (GLM Team 2024): a part of each head rotated in adjacent pairs, gate and up in one matrix,
//! biases on q, k and v; norms in front of each sublayer, and in the models of 2025 behind it too.

use crate::config::{Config, RMS_EPS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, phi3, qwen_vl};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Pairing};

const NAMES: &[Row] = &[
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
        "model.layers.{}.post_self_attn_layernorm",
        "blk.{}.post_attention_norm",
    ),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    ("blocks.{}.after_mlp_norm", "model.layers.{}.post_mlp_layernorm", "blk.{}.post_ffw_norm"),
];

/// The names of 2024, when there were norms in front alone, and GGUF had q, k and v in one.
const FRONT: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.qkv", "", "blk.{}.attn_qkv"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate_up", "model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
];

/// The authors' own names, of folders alone.
const AUTHORS: &[Row] = &[
    ("embed", "transformer.embedding.word_embeddings", ""),
    ("norm", "transformer.encoder.final_layernorm", ""),
    ("head", "transformer.output_layer", ""),
    ("blocks.{}.attention_norm", "transformer.encoder.layers.{}.input_layernorm", ""),
    ("blocks.{}.attention.qkv", "transformer.encoder.layers.{}.self_attention.query_key_value", ""),
    ("blocks.{}.attention.o", "transformer.encoder.layers.{}.self_attention.dense", ""),
    ("blocks.{}.mlp_norm", "transformer.encoder.layers.{}.post_attention_layernorm", ""),
    ("blocks.{}.mlp.gate_up", "transformer.encoder.layers.{}.mlp.dense_h_to_4h", ""),
    ("blocks.{}.mlp.down", "transformer.encoder.layers.{}.mlp.dense_4h_to_h", ""),
];

/// ChatGLM 2 and 3, and GLM-4 of 2024 in the folders that came before Transformers' class.
pub(crate) const CHATGLM: Architecture = Architecture {
    title: "ChatGLM 2 and 3, and the first GLM-4",
    name: "chatglm",
    gguf: "",
    class: "ChatGLMModel",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[AUTHORS],
    open: open_authors,
    ..ARCHITECTURE
};

/// GLM-4 of 2024.
pub(crate) const GLM: Architecture = Architecture {
    title: "GLM-4 of 2024",
    name: "glm",
    gguf: "chatglm",
    class: "GlmForCausalLM",
    unsaid: Unsaid::sizes([4096, 13_696, 40, 32, 2, 0, 131_072, 151_552]).eps(1.5625e-7),
    names: &[FRONT],
    open: |files| open_normed(files, false),
    ..ARCHITECTURE
};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GLM-4 of 2025",
    name: "glm4",
    gguf: "glm4",
    class: "Glm4ForCausalLM",
    unsaid: Unsaid::sizes([4096, 13_696, 40, 32, 2, 0, 131_072, 151_552]).eps(1.5625e-7),
    names: &[NAMES],
    signs: None,
    experts: false,
    open: |files| open_normed(files, true),
};

/// GLM-4.1V (GLM Team 2025), its decoder of text: all of each head rotated where nothing is said, and
/// positions in three axes, which a text has alike.
pub(crate) const VISION: Architecture = Architecture {
    title: "GLM-4.1V and GLM-4.6V-Flash, their text",
    name: "glm4v",
    gguf: "",
    class: "Glm4vForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 13_696, 40, 32, 2, 0, 32_768, 151_552]).eps(1e-5),
    open: |files| open_vision(files, Bias::Always),
    ..ARCHITECTURE
};

/// GLM-OCR (GLM Team 2026), its decoder of text: the same without biases.
pub(crate) const OCR: Architecture = Architecture {
    title: "GLM-OCR, its text",
    name: "glm_ocr",
    class: "GlmOcrForConditionalGeneration",
    unsaid: Unsaid::sizes([1024, 4096, 16, 16, 8, 0, 131_072, 59_392]).eps(1e-5),
    open: |files| open_vision(files, Bias::Never),
    ..VISION
};

/// The authors' names of sizes.
const OWN: &[(&str, &str)] = &[
    ("num_hidden_layers", "num_layers"),
    ("intermediate_size", "ffn_hidden_size"),
    ("vocab_size", "padded_vocab_size"),
    ("max_position_embeddings", "seq_length"),
    ("head_dim", "kv_channels"),
    ("num_key_value_heads", "multi_query_group_num"),
];

/// How the authors' program computes the same, and what it is trained with.
const NOTED: &[&str] = &[
    "apply_query_key_layer_scaling",
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "fp32_residual_connection",
    "hidden_dropout",
    "num_hidden_layers",
    "prefix_projection",
];

fn open_authors(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    for (key, only) in [
        ("add_bias_linear", false),
        ("apply_residual_connection_post_layernorm", false),
        ("interleaved_qkv", false),
        ("original_rope", true),
        ("post_layer_norm", true),
        ("rmsnorm", true),
    ] {
        if keys.flag(Key(key, ""))? == Some(!only) {
            return Err(keys.wrong(key, only, !only).of(ErrorKind::Unsupported));
        }
    }
    if let Some(bits) = keys.size("quantization_bit")?.filter(|bits| bits.value > 0) {
        let error = bits.wrong("0: matrices as they are", bits.value);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let mut raw = Raw::read_normed(files, Key("layernorm_epsilon", ""))?;
    raw.pairing = Pairing::Adjacent;
    raw.turns_part(files, 0.5)?;
    if keys.flag(Key("multi_query_attention", ""))? != Some(true) {
        raw.kv_heads = raw.heads.clone();
    }
    // A factor on the base, by which the longer contexts are reached.
    let ratio = keys.number_or(Key("rope_ratio", ""), 1.0)?.positive()?;
    if let Some(rotation) = &mut raw.rotation {
        rotation.theta.value *= ratio;
    }
    let bias = files.bias("add_qkv_bias")?;
    opened(raw.check()?, bias, false)
}

fn open_vision(files: &Files<'_>, bias: Bias) -> Result<Opened> {
    qwen_vl::note_tower(files)?;
    files.keys.flag(Key("attention_bias", ""))?;
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    raw.pairing = Pairing::Adjacent;
    opened(raw.check()?, bias, true)
}

/// Opens a model with norms behind sublayers, or without.
fn open_normed(files: &Files<'_>, behind: bool) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    raw.pairing = Pairing::Adjacent;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    // Half of each head, where nothing is said.
    raw.turns_part(files, 0.5)?;
    let stated = keys.flag(Key("attention_bias", ""))?;
    let bias = match (hugging_face, stated) {
        (true, Some(false)) => Bias::Never,
        (true, _) => Bias::Always,
        (false, _) => Bias::IfStored,
    };
    opened(raw.check()?, bias, behind)
}

/// A model with such biases of q, k and v, and norms behind sublayers if `behind`.
fn opened(config: Config, bias: Bias, behind: bool) -> Result<Opened> {
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        normed: decoder::both(true, behind),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(config, parts, phi3::part))
}
