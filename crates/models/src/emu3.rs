//! Emu3 (Wang et al. 2024), its text: Llama, whose vocabulary has the codes of images, too.

use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, llama};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Emu3, its text",
    name: "emu3",
    gguf: "",
    class: "Emu3ForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 0, 9216, 184_622]).theta(1_000_000.0).eps(1e-5),
    signs: None,
    open,
    ..llama::ARCHITECTURE
};

/// The same in the folders of its authors.
pub(crate) const AUTHORS: Architecture = Architecture {
    title: "Emu3, as its authors publish it",
    name: "Emu3",
    class: "Emu3ForCausalLM",
    ..ARCHITECTURE
};

fn open(files: &Files<'_>) -> Result<Opened> {
    // Sizes of images, and tokens around them.
    let images = ["image_area", "boi_token_id", "eoi_token_id", "eof_token_id", "eol_token_id"];
    images.iter().chain(&["img_token_id"]).for_each(|key| files.keys.note(key));
    llama::open(files)
}
