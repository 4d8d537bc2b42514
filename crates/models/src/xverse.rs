//! XVERSE (XVERSE Technology 2023): Llama under a name of its own.

use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, llama};
use formats::Result;
use formats::gguf::MetadataValue;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "XVERSE",
    name: "xverse",
    gguf: "xverse",
    class: "XverseForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    state_layout(files);
    files.keys.note("max_tokenizer_truncation");
    llama::open(files)
}

/// States what GGUF says of the order of rows in files that are named so.
pub(crate) fn state_layout(files: &Files<'_>) {
    let layout = MetadataValue::String("Meta AI original pth".to_owned());
    files.keys.state(Key("", "tensor_data_layout"), Some(layout));
}
