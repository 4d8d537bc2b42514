//! ERNIE 4.5 (Baidu 2025): Llama whose heads rotate in adjacent pairs everywhere; larger models
//! have a mixture behind the first blocks, whose experts are chosen by the softmax over all scores
//! and a correction.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, deepseek, experts, glm4_moe, llama, qwen_vl};
use formats::gguf::MetadataValue;
use formats::{Result, Source};
use nn::{Bias, GroupLimit, MixtureOfExperts, Mlp, Odds, Pairing, Stored, Weights};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "ERNIE 4.5, dense",
    name: "ernie4_5",
    gguf: "ernie4_5",
    class: "Ernie4_5ForCausalLM",
    unsaid: Unsaid::sizes([1024, 3072, 18, 16, 2, 0, 131_072, 103_424]).theta(500_000.0).eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open: |files| opened(files, Pairing::Adjacent),
};

/// PaddleOCR-VL (Baidu 2025), its decoder of text: heads rotated in halves, positions in three axes,
/// which a text has alike.
pub(crate) const PADDLE: Architecture = Architecture {
    title: "PaddleOCR-VL, its text",
    name: "paddleocr_vl",
    gguf: "",
    class: "PaddleOCRVLForConditionalGeneration",
    open: |files| {
        qwen_vl::note_tower(files)?;
        // Names of what all of these models are.
        for key in ["ignored_index", "rope_is_neox_style", "use_3d_rope", "weight_share_add_bias"] {
            files.keys.note(key);
        }
        opened(files, Pairing::Half)
    },
    ..ARCHITECTURE
};

/// The mixtures.
pub(crate) const MIXTURE: Architecture = Architecture {
    title: "ERNIE 4.5, mixtures",
    name: "ernie4_5_moe",
    gguf: "ernie4_5-moe",
    class: "Ernie4_5_MoeForCausalLM",
    unsaid: Unsaid::sizes([2560, 12_288, 28, 20, 4, 0, 131_072, 103_424])
        .theta(500_000.0)
        .eps(1e-5)
        .numbers(&[
            ("moe_intermediate_size", 1536),
            ("moe_num_experts", 64),
            ("n_shared_experts", 2),
            ("num_experts_per_tok", 6),
        ]),
    names: &[CORRECTION, glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    experts: true,
    open: open_mixture,
    ..ARCHITECTURE
};

/// ERNIE 4.5 VL (Baidu 2025), its decoder of text: positions in three axes, which a text has alike,
/// and further experts for tokens of images, which stand behind those of text.
pub(crate) const VISION: Architecture = Architecture {
    title: "ERNIE 4.5 VL, its text",
    name: "ernie4_5_vl_moe",
    gguf: "",
    class: "Ernie4_5_VLMoeForConditionalGeneration",
    open: |files| {
        qwen_vl::note_tower(files)?;
        // Widths of experts for text, and for images.
        open_mixture(&files.with_lists(&["expert_feed_forward_length"]))
    },
    ..MIXTURE
};

/// The corrections of the router's odds, `[1, experts]` in folders.
const CORRECTION: &[Row] = &[(
    "blocks.{}.mlp.router.correction",
    "model.layers.{}.mlp.moe_statics.e_score_correction_bias!",
    "blk.{}.exp_probs_b.bias!",
)];

/// A dense model, whose elements rotate in these pairs.
fn opened(files: &Files<'_>, pairing: Pairing) -> Result<Opened> {
    let mut raw = read(files)?;
    raw.pairing = pairing;
    let bias = files.bias("use_bias")?;
    Ok(decoder::open(raw.check()?, bias, decoder::biased(bias)))
}

/// Reads the keys that dense models and mixtures share.
fn read(files: &Files<'_>) -> Result<Raw> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    raw.pairing = Pairing::Adjacent;
    if let Some(by) = keys.number(Key("compression_ratio", ""))?.filter(|by| by.value != 1.0) {
        return Err(by.wrong("1: positions are not divided", by.value));
    }
    Ok(raw)
}

/// Names of their own for the numbers of experts.
const OWN: &[(&str, &str)] =
    &[("num_experts_per_tok", "moe_k"), ("n_shared_experts", "moe_num_shared_experts")];

fn open_mixture(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let raw = read(files)?;
    // For training, and blocks that guess tokens ahead.
    for key in
        ["moe_capacity", "moe_gate", "moe_use_aux_free", "moe_norm_min", "num_nextn_predict_layers"]
    {
        keys.note(key);
    }
    keys.only(Key("moe_gate_act", ""), &["softmax"])?;
    let bias = files.bias("use_bias")?;
    let config = raw.check()?;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    let layer = |key: Key, unsaid: usize| {
        keys.size(key)?.map_or(Ok(unsaid), |layer| layer.within(0..=LAYERS))
    };
    const FIRST: Key = Key("moe_layer_start_index", "leading_dense_block_count");
    const STEP: Key = Key("moe_layer_interval", "interleave_moe_layer_step");
    let first = layer(FIRST, usize::from(hugging_face))?;
    let step = layer(STEP, 1)?.max(1);
    keys.state(FIRST, Some(MetadataValue::U32(first as u32)));
    keys.state(STEP, Some(MetadataValue::U32(step as u32)));
    // -1 is the last one, whatever there are.
    let last = match keys.get(Key("moe_layer_end_index", "")).and_then(serde_json::Value::as_i64) {
        Some(-1) | None => config.layers,
        Some(_) => layer(Key("moe_layer_end_index", ""), config.layers)?,
    };
    let mut options = experts::read(files, config.hidden, config.feed_forward)?;
    let count = options.experts;
    let used = options.routing.used;
    options.routing.odds = Odds::Sigmoid;
    options.routing.normalised = true;
    options.limit = Some(GroupLimit { used, groups: 1, groups_used: 1, softmax: true });
    const SHARED: Key = Key("n_shared_experts", "expert_shared_count");
    let shared = keys.size(SHARED)?.map_or(Ok(2), |shared| shared.within(0..=64))?;
    keys.state(SHARED, Some(MetadataValue::U32(shared as u32)));
    let shared = shared * options.feed_forward;
    const WIDTH: Key = Key("", "expert_shared_feed_forward_length");
    keys.state(WIDTH, Some(MetadataValue::U32(shared as u32)));
    keys.size(WIDTH)?;
    let dense = deepseek::listed(files, config.layers)?.unwrap_or_else(|| {
        let dense = |i: usize| i < first || i > last || !(i + 1).is_multiple_of(step);
        (0..config.layers).map(dense).collect()
    });
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        if dense[i] {
            return decoder::gated(builder, config, i, bias);
        }
        let (name, hidden) = (format!("blocks.{i}.mlp"), options.hidden);
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        if shared == 0 {
            return Ok(Box::new(move |x| experts.forward(x)));
        }
        let (name, sizes) = (format!("{name}.shared"), [hidden, shared]);
        let one = Mlp::new(builder, &name, sizes, bias, config.gate)?;
        Ok(Box::new(move |x| experts.forward(x).add(&one.forward(x))))
    });
    let parts =
        decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, decoder::biased(bias)) };
    let vision = files.architecture.name == VISION.name;
    let stored = move |_: &Config, weights: &dyn Weights, name: &str| {
        if vision && name.ends_with(".mlp.router") {
            return Ok(weights.find(name)?.map(|stored| turned(stored, count)));
        }
        if !name.ends_with(".mlp.router.correction") {
            return experts::joined(weights, name, count);
        }
        let flat = |stored: Stored| match stored.shape[..] {
            // The first row is that of experts for text.
            [1 | 2, columns] => {
                let (source, shape) = (stored.source.rows(0, 1), vec![columns]);
                Stored { source: Source::Reshape(Box::new(source), shape.clone()), shape }
            }
            _ => stored,
        };
        Ok(weights.find(name)?.map(flat))
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// A router's matrix, if it is stored the other way round.
fn turned(Stored { source, mut shape }: Stored, experts: usize) -> Stored {
    if shape.len() != 2 || shape[1] != experts || shape[0] == experts {
        return Stored { source, shape };
    }
    shape.swap(0, 1);
    Stored { source: Source::Transpose(Box::new(source)), shape }
}
