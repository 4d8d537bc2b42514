//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen2.5-Omni and Qwen3-Omni (Qwen Team 2024, 2025), their decoders
//! of text: Qwen2, Qwen3 and Qwen3-MoE, whose positions in three axes a text has alike.

use crate::files::Files;
use crate::names::Recipes;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama, qwen2, qwen3, qwen3_moe};
use formats::{Result, Source};
use nn::{Stored, Weights};

pub(crate) const QWEN2_5: Architecture = Architecture {
    title: "Qwen2.5-VL, its text",
    name: "qwen2_5_vl",
    gguf: "qwen2vl",
    class: "Qwen2_5_VLForConditionalGeneration",
    unsaid: Unsaid::sizes([8192, 29_568, 80, 64, 8, 4096, 32_768, 152_064])
        .theta(1_000_000.0)
        .eps(1e-5),
    signs: None,
    open: |files| open(files, qwen2::open),
    ..qwen2::ARCHITECTURE
};

pub(crate) const QWEN2: Architecture = Architecture {
    title: "Qwen2-VL, its text",
    name: "qwen2_vl",
    class: "Qwen2VLForConditionalGeneration",
    unsaid: Unsaid::sizes([8192, 29_568, 80, 64, 8, 4096, 32_768, 152_064])
        .theta(1_000_000.0)
        .eps(1e-5),
    ..QWEN2_5
};

pub(crate) const QWEN3: Architecture = Architecture {
    title: "Qwen3-VL, its text",
    name: "qwen3_vl",
    gguf: "qwen3vl",
    class: "Qwen3VLForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 22_016, 32, 32, 32, 0, 128_000, 151_936]).theta(500_000.0),
    signs: None,
    open: |files| open(files, qwen3::open_beside),
    ..qwen3::ARCHITECTURE
};

pub(crate) const QWEN3_MOE: Architecture = Architecture {
    title: "Qwen3-VL-MoE, its text",
    name: "qwen3_vl_moe",
    gguf: "qwen3vlmoe",
    class: "Qwen3VLMoeForConditionalGeneration",
    unsaid: Unsaid::sizes([2048, 5632, 24, 16, 16, 0, 128_000, 151_936]).theta(500_000.0).numbers(
        &[("moe_intermediate_size", 1408), ("num_experts", 60), ("num_experts_per_tok", 4)],
    ),
    names: &[llama::NAMES, qwen3::NORMS, experts::STACKS, experts::SWITCHED],
    signs: None,
    open: |files| open(files, mixture),
    ..qwen3_moe::ARCHITECTURE
};

pub(crate) const OMNI2_5: Architecture = Architecture {
    title: "Qwen2.5-Omni, its text",
    name: "qwen2_5_omni",
    class: "Qwen2_5OmniForConditionalGeneration",
    unsaid: Unsaid::sizes([3584, 18_944, 28, 28, 4, 32_768, 32_768, 152_064]).theta(1_000_000.0),
    ..QWEN2_5
};

pub(crate) const OMNI3: Architecture = Architecture {
    title: "Qwen3-Omni, its text",
    name: "qwen3_omni_moe",
    class: "Qwen3OmniMoeForConditionalGeneration",
    unsaid: Unsaid::sizes([2048, 18_944, 28, 28, 4, 0, 32_768, 3584]).theta(1_000_000.0).numbers(
        &[("moe_intermediate_size", 768), ("num_experts", 128), ("num_experts_per_tok", 8)],
    ),
    ..QWEN3_MOE
};

/// Keys of the tower, which the first configurations have beside the decoder's, of what GGUF says of
/// it, and of training.
const TOWER: &[&str] = &[
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "n_deepstack_layers",
    "rope.dimension_sections",
    // How weights were drawn.
    "init_std",
];

fn open(files: &Files<'_>, decoder: fn(&Files<'_>) -> Result<Opened>) -> Result<Opened> {
    note_tower(files)?;
    decoder(files)
}

/// Notes what configurations say of a tower beside the decoder, and how a rotation has positions in
/// several axes, which a text has alike.
///
/// # Errors
/// A rotation that is no object.
pub(crate) fn note_tower(files: &Files<'_>) -> Result<()> {
    TOWER.iter().for_each(|key| files.keys.note(key));
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = files.keys.object(key)? else { continue };
        for name in ["mrope_section", "mrope_interleaved", "interleaved", "xdrope_section"] {
            rope.note(name);
        }
    }
    Ok(())
}

/// Qwen3-MoE, whose experts are stacks: published ones hold them as they are multiplied with from
/// the left.
fn mixture(files: &Files<'_>) -> Result<Opened> {
    let (config, parts, count) = qwen3_moe::read(files, true)?;
    Ok(decoder::open_recipes(config, parts, move |config, weights, name| {
        let turned = |weights: &dyn Weights, name: &str| turned(weights, name, config.hidden);
        experts::stacked(&Recipes { weights, change: turned }, name, count)
    }))
}

/// A stack of experts, if its matrices lie the other way round: all of a block do if the downs'
/// rows are as wide as the residual stream, or, where those tell nothing, the gates' and ups' are
/// not.
fn turned(weights: &dyn Weights, name: &str, hidden: usize) -> Result<Option<Stored>> {
    let stack =
        name.rsplit_once(".experts.").filter(|(_, part)| matches!(*part, "gate_up" | "down"));
    let Some((block, _)) = stack else { return Ok(None) };
    let shape = |part: &str| Ok(weights.find(&format!("{block}.experts.{part}"))?.map(|s| s.shape));
    let (down, both) = (shape("down")?, shape("gate_up")?);
    let (Some(&[_, rows, columns]), Some(&[_, _, width])) = (down.as_deref(), both.as_deref())
    else {
        return Ok(None);
    };
    let turns = if rows == columns { width != hidden } else { columns == hidden };
    let Some(Stored { source, mut shape }) = weights.find(name)?.filter(|_| turns) else {
        return Ok(None);
    };
    shape.swap(1, 2);
    Ok(Some(Stored { source: Source::Transpose(Box::new(source)), shape }))
}
