//! MiniCPM (Hu et al. 2024), the first, the second and the fourth: Llama with numbers that
//! embeddings, the results of sublayers, and logits are multiplied with. The third has latent
//! attention, too; GGUF takes its numbers for granted.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, latent, llama, phimoe, windows};
use formats::Result;
use formats::gguf::MetadataValue;
use nn::Pairing;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "MiniCPM 1, 2 and 4",
    name: "minicpm",
    gguf: "minicpm",
    class: "MiniCPMForCausalLM",
    unsaid: Unsaid::NOTHING,
    names: &[llama::NAMES, phimoe::FACTORS],
    signs: None,
    experts: false,
    open,
};

/// MiniCPM 3.
pub(crate) const THIRD: Architecture = Architecture {
    title: "MiniCPM 3",
    name: "minicpm3",
    gguf: latent::THIRD,
    class: "MiniCPM3ForCausalLM",
    unsaid: Unsaid::sizes([2560, 6400, 62, 40, 40, 0, 32_768, 73_448]).eps(1e-5).numbers(&[
        ("kv_lora_rank", 256),
        ("qk_nope_head_dim", 64),
        ("qk_rope_head_dim", 32),
    ]),
    names: &[latent::NAMES, llama::NAMES, phimoe::FACTORS],
    open: open_third,
    ..ARCHITECTURE
};

/// GGUF's keys of those numbers.
pub(crate) const FACTORS: &[&str] = &["embedding_scale", "residual_scale", "logit_scale"];

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = Raw::read(files)?;
    windows::of_types(files, &raw.layers, None)?;
    if files.keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let multipliers = multipliers(files, &raw, None)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts =
        decoder::Parts { multipliers, ..decoder::Parts::new(mlp_bias, decoder::biased(bias)) };
    Ok(decoder::open_parts(raw.check()?, parts))
}

fn open_third(files: &Files<'_>) -> Result<Opened> {
    let raw = latent::raw(files)?;
    let third =
        [12.0, 1.4 / (raw.layers.value.max(1) as f64).sqrt(), raw.hidden.value as f64 / 256.0];
    let multipliers = multipliers(files, &raw, Some(third))?;
    let mlp_bias = files.bias("mlp_bias")?;
    let (config, options) = latent::read(files, raw)?;
    let heads = latent::Heads::of(&options);
    let parts = decoder::Parts {
        multipliers,
        mixer: latent::mixer(options),
        ..decoder::Parts::new(mlp_bias, Config::attention)
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights, name| {
        latent::part(weights, name, heads)
    }))
}

/// The factors on embeddings, on the results of sublayers, and on logits; `granted` are the
/// factors of embeddings and sublayers, and the divisor of logits, where nothing is said.
fn multipliers(files: &Files<'_>, raw: &Raw, granted: Option<[f64; 3]>) -> Result<[f32; 3]> {
    let keys = &files.keys;
    let [usual, usual_residual, usual_logits] = granted.unwrap_or([1.0; 3]);
    let number = |key: Key, usual: f64| -> Result<f64> { keys.number_or(key, usual)?.positive() };
    const RESIDUAL: Key = Key("scale_depth", "residual_scale");
    const LOGITS: Key = Key("dim_model_base", "logit_scale");
    let embedding = number(Key("scale_emb", "embedding_scale"), usual)?;
    let (residual, logits) = match keys.dialect() {
        Dialect::Gguf => (number(RESIDUAL, usual_residual)?, number(LOGITS, usual_logits)?),
        // Stated as GGUF has them.
        Dialect::HuggingFace => {
            let layers = raw.layers.value.max(1) as f64;
            let depth =
                keys.number(Key(RESIDUAL.0, ""))?.map(|depth| depth.positive()).transpose()?;
            let base = keys.number(Key(LOGITS.0, ""))?.map(|base| base.positive()).transpose()?;
            // Null is no factor, whatever is granted.
            let granted = |key: Key, usual: f64| if keys.is_null(key.0) { 1.0 } else { usual };
            let (usual_residual, usual_logits) =
                (granted(RESIDUAL, usual_residual), granted(LOGITS, usual_logits));
            let residual = depth.map_or(usual_residual, |depth| depth / layers.sqrt());
            let logits = base.map_or(usual_logits, |base| raw.hidden.value as f64 / base);
            for (key, value) in [(RESIDUAL, residual), (LOGITS, logits)] {
                keys.state(key, Some(MetadataValue::F32(value as f32)));
            }
            (residual, logits)
        }
    };
    // For training.
    keys.note("mup_denominator");
    Ok([embedding as f32, residual as f32, (1.0 / logits) as f32])
}
