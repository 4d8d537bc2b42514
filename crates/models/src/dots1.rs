//! dots.llm1 (rednote hilab 2025): Qwen3's attention, and behind the first dense blocks GLM-4.5's
//! mixture.

use crate::config::Raw;
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, experts, llama, qwen3, windows};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "dots.llm1",
    name: "dots1",
    gguf: "dots1",
    class: "Dots1ForCausalLM",
    unsaid: Unsaid::sizes([4608, 10_944, 62, 32, 32, 4096, 2048, 152_064])
        .numbers(&[("moe_intermediate_size", 1408)]),
    names: &[glm4_moe::NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    raw.windows = windows::of_qwen(files, &raw.layers)?;
    // Names of the only rule by which its experts are chosen.
    keys.only(Key("scoring_func", ""), &["sigmoid", "noaux_tc"])?;
    keys.only(Key("topk_method", ""), &["noaux_tc"])?;
    glm4_moe::opened(
        files,
        raw,
        true,
        Usual { normalised: false, output_bias: true, ..Usual::default() },
    )
}
