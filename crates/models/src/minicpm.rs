//! MiniCPM (Hu et al. 2024), the first, the second and the fourth: Llama with numbers that
//! embeddings, the results of sublayers, and logits are multiplied with.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::{Architecture, Opened, decoder, llama, phimoe, windows};
use formats::Result;
use formats::gguf::Value;
use nn::Pairing;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "MiniCPM 1, 2 and 4",
    name: "minicpm",
    gguf: "minicpm",
    class: "MiniCPMForCausalLM",
    names: &[llama::NAMES, phimoe::FACTORS],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files, &["silu"])?;
    windows::of_types(files, &raw.layers, None)?;
    let number = |key: Key, usual: f64| -> Result<f64> { keys.number_or(key, usual)?.positive() };
    const RESIDUAL: Key = Key("scale_depth", "residual_scale");
    const LOGITS: Key = Key("dim_model_base", "logit_scale");
    let embedding = number(Key("scale_emb", "embedding_scale"), 1.0)?;
    let (residual, logits) = match keys.dialect() {
        Dialect::Gguf => {
            raw.pairing = Pairing::Adjacent;
            (number(RESIDUAL, 1.0)?, number(LOGITS, 1.0)?)
        }
        // Stated as GGUF has them.
        Dialect::HuggingFace => {
            let layers = raw.layers.value.max(1) as f64;
            let depth =
                keys.number(Key(RESIDUAL.0, ""))?.map(|depth| depth.positive()).transpose()?;
            let base = keys.number(Key(LOGITS.0, ""))?.map(|base| base.positive()).transpose()?;
            let residual = depth.map_or(1.0, |depth| depth / layers.sqrt());
            let logits = base.map_or(1.0, |base| raw.hidden.value as f64 / base);
            for (key, value) in [(RESIDUAL, residual), (LOGITS, logits)] {
                keys.state(key, Some(Value::F32(value as f32)));
            }
            (residual, logits)
        }
    };
    // For training.
    keys.note("mup_denominator");
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts = decoder::Parts {
        multipliers: [embedding as f32, residual as f32, (1.0 / logits) as f32],
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}
