//! CWM (Meta 2025): Llama 3 within a window in three layers of four, the first of which sees
//! everything.

use crate::config::{RMS_EPS, Raw};
use crate::files::Files;
use crate::unsaid::{Unsaid, said};
use crate::{Architecture, Opened, decoder, llama, windows};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "CWM",
    name: "cwm",
    gguf: "",
    class: "CwmForCausalLM",
    unsaid: Unsaid::sizes([6144, 21_504, 64, 48, 8, 8192, 131_072, 128_256])
        .theta(1_000_000.0)
        .rotated(said!({
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }))
        .numbers(&[("head_dim", 128)])
        .eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// One layer of this many sees everything.
const PERIOD: usize = 4;

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    raw.windows = windows::leading(files, &raw.layers, PERIOD)?;
    let mlp_bias = files.bias("mlp_bias")?;
    Ok(decoder::open(raw.check()?, mlp_bias, crate::Config::attention))
}
