//! The model's configuration in GGUF metadata.

use crate::config::{Config, Raw};
use crate::rope::{Scaling, Yarn};
use crate::{Names, by_name, unknown};
use formats::gguf::Metadata;
use formats::{Error, Result, Tensors};
use nn::{Pairing, Weights};

/// Reads the hyperparameters under `general.architecture`'s prefix.
pub(crate) fn config(
    metadata: &Metadata,
    place: &str,
    names: &Names<'_>,
    tensors: &Tensors,
) -> Result<Config> {
    let name = metadata
        .str("general.architecture")?
        .ok_or_else(|| metadata.missing("general.architecture"))?;
    let architecture = by_name(name).ok_or_else(|| unknown(place, name))?;
    let key = |part: &str| format!("{name}.{part}");
    let size = |part: &str| Ok(metadata.u32(&key(part))?.map(|n| n as usize));
    let need = |part: &str| size(part)?.ok_or_else(|| metadata.missing(&key(part)));
    let number = |part: &str| metadata.f64(&key(part));
    let embed = names
        .find("embed")
        .ok_or_else(|| Error::new(place, "a tensor token_embd.weight", "none"))?;
    let (heads, layers) = (need("attention.head_count")?, need("block_count")?);
    let head_dim = size("attention.key_length")?;
    if let (Some(keys), Some(values)) = (head_dim, size("attention.value_length")?)
        && keys != values
    {
        return Err(Error::new(
            format!("{place}: {}", key("attention.value_length")),
            keys,
            values,
        ));
    }
    let window = size("attention.sliding_window")?.filter(|w| *w > 0);
    Raw {
        architecture,
        place: place.to_owned(),
        hidden: need("embedding_length")?,
        layers,
        heads,
        kv_heads: size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        feed_forward: need("feed_forward_length")?,
        vocab: embed.shape[0],
        norm_eps: number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
        windows: window.map_or_else(Vec::new, |w| vec![Some(w); layers.min(4096)]),
        context: size("context_length")?.unwrap_or(2048),
        tied: names.find("head").is_none(),
        theta: number("rope.freq_base")?.unwrap_or(10_000.0),
        rotary: size("rope.dimension_count")?,
        scaling: scaling(metadata, name, place, names, tensors)?,
        pairing: if architecture.adjacent_rope_in_gguf { Pairing::Adjacent } else { Pairing::Half },
    }
    .check()
}

fn scaling(
    metadata: &Metadata,
    name: &str,
    place: &str,
    names: &Names<'_>,
    tensors: &Tensors,
) -> Result<Scaling> {
    if let Some(tensor) = names.find("rope_factors").and_then(|stored| tensors.get(&stored.name)) {
        // One factor per pair: a larger tensor is a lie, and is not decoded.
        let count: usize = tensor.shape.iter().product();
        if tensor.shape.len() != 1 || count > 1 << 13 {
            let found = format!("{:?}", tensor.shape);
            return Err(Error::new(
                format!("{place}: rope_freqs.weight"),
                "one factor per pair",
                found,
            ));
        }
        return Ok(Scaling::Factors(tensor.to_f32()?));
    }
    let key = format!("{name}.rope.scaling.type");
    let factor = match metadata.f64(&format!("{name}.rope.scaling.factor"))? {
        Some(factor) => Some(factor),
        None => metadata.f64(&format!("{name}.rope.scale_linear"))?,
    };
    match (metadata.str(&key)?, factor) {
        (Some("none"), _) | (_, None) => Ok(Scaling::None),
        (None | Some("linear"), Some(factor)) => Ok(Scaling::Linear { factor }),
        (Some("yarn"), Some(factor)) => {
            let of = |part: &str| metadata.f64(&format!("{name}.rope.scaling.{part}"));
            let original = match of("original_context_length")? {
                Some(original) => original,
                None => metadata.f64(&format!("{name}.context_length"))?.unwrap_or(0.0),
            };
            Ok(Scaling::Yarn(Yarn {
                factor,
                original,
                fast: of("yarn_beta_fast")?.unwrap_or(32.0),
                slow: of("yarn_beta_slow")?.unwrap_or(1.0),
                truncate: true,
                magnitude: of("attn_factor")?.unwrap_or(1.0) * Yarn::magnitude(factor, 1.0),
            }))
        }
        (Some(other), _) => {
            Err(Error::new(format!("{place}: {key}"), "none, linear or yarn", other))
        }
    }
}
