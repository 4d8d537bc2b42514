//! Maincoder (Maincode 2025): Llama whose heads are normed behind the rotation.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, qwen3, windows};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Pairing, QkNorm};

const NAMES: &[Row] = &[
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Maincoder",
    name: "maincoder",
    gguf: "maincoder",
    class: "MaincoderForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES, llama::NAMES, qwen3::NORMS],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(&[("intermediate_size", "intermediate_size_mlp")]);
    let mut raw = Raw::read(files)?;
    raw.pairing = Pairing::Adjacent;
    windows::of_types(files, &raw.layers, None)?;
    const NORMED: &str = "use_qk_norm";
    if files.keys.flag(Key(NORMED, ""))? == Some(false) {
        let error = files.keys.wrong(NORMED, "true, as of published models", false);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let attention = |config: &Config, layer| AttentionOptions {
        qk_norm: QkNorm::Heads(config.norm_eps),
        rotates_first: true,
        ..config.attention(layer)
    };
    Ok(decoder::open(raw.check()?, Bias::Never, attention))
}
