//! EXAONE 4.0 (LG AI Research 2025): norms behind sublayers in place of those in front, norms of
//! each head, and a window in three layers of four; the fourth sees everything and knows no
//! positions. Small models have no windows, and rotate all layers.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, olmo2, windows};
use formats::Result;
use nn::{AttentionOptions, Bias, QkNorm};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "EXAONE 4.0",
    name: "exaone4",
    gguf: "exaone4",
    class: "Exaone4ForCausalLM",
    unsaid: Unsaid::sizes([4096, 16_384, 32, 32, 32, 4096, 2048, 102_400]).eps(1e-5),
    names: &[olmo2::NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// One layer of this many sees everything.
pub(crate) const PERIOD: usize = 4;

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    let attention = |config: &Config, layer| {
        let options = config.attention(layer);
        let turns = config.windows.is_empty() || options.window.is_some();
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            rope: options.rope.filter(|_| turns),
            ..options
        }
    };
    let parts = decoder::Parts {
        normed: decoder::both(false, true),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}
