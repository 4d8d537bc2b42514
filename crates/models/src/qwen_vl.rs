//! Qwen2.5-VL and Qwen3-VL (Qwen Team 2025), their decoders of text: Qwen2 and Qwen3, whose positions
//! in three axes a text has alike.

use crate::files::Files;
use crate::{Architecture, Opened, qwen2, qwen3};
use formats::Result;

pub(crate) const QWEN2_5: Architecture = Architecture {
    title: "Qwen2.5-VL, its text",
    name: "qwen2_5_vl",
    gguf: "qwen2vl",
    class: "Qwen2_5_VLForConditionalGeneration",
    signs: None,
    open: |files| open(files, qwen2::open),
    ..qwen2::ARCHITECTURE
};

pub(crate) const QWEN3: Architecture = Architecture {
    title: "Qwen3-VL, its text",
    name: "qwen3_vl",
    gguf: "qwen3vl",
    class: "Qwen3VLForConditionalGeneration",
    signs: None,
    open: |files| open(files, qwen3::open),
    ..qwen3::ARCHITECTURE
};

/// Keys of the tower, which the first configurations have beside the decoder's, and of what GGUF
/// says of it.
const TOWER: &[&str] = &[
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "n_deepstack_layers",
    "rope.dimension_sections",
];

fn open(files: &Files<'_>, decoder: fn(&Files<'_>) -> Result<Opened>) -> Result<Opened> {
    TOWER.iter().for_each(|key| files.keys.note(key));
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = files.keys.object(key)? else { continue };
        rope.note("mrope_section");
        rope.note("mrope_interleaved");
    }
    decoder(files)
}
