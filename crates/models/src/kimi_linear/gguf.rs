//! Kimi Linear in the terms of GGUF.

use super::Family;
use crate::config::Config;
use crate::files::Files;
use crate::keys::Key;
use crate::latent;
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use nn::Forgetting;
use program::Weight;

const KV_HEADS: Key = Key("", "attention.head_count_kv");

/// A GGUF file: layers without keys and values of heads are nets, of as many heads as attention has.
pub(super) fn family(files: &Files<'_>, count: usize) -> Result<Family> {
    let keys = &files.keys;
    let size = |key: &'static str| keys.needed(Key("", key))?.within(1..=1 << 12);
    let heads = keys.of_layers(KV_HEADS, count)?;
    let heads = heads.ok_or_else(|| keys.wrong(KV_HEADS, "a list of layers", "nothing"))?;
    let sizes = [size("attention.head_count")?, size("kda.head_dim")?, size("ssm.conv_kernel")?];
    let forgetting = Forgetting::Elements { rank: Some(sizes[1]), bound: None };
    let nets = heads.into_iter().map(|heads| heads == 0).collect();
    Ok(Family { nets, sizes, forgetting, turned: false, gated: false, scale: 1.0 })
}

/// GGUF's metadata of Kimi Linear's nets; `held` are the model's weights. None for other
/// architectures.
pub(crate) fn metadata(config: &Config, held: &[Weight]) -> Vec<(&'static str, MetadataValue)> {
    let size = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let find = |name: String| held.iter().find(|weight| weight.name == name);
    let net = |i: usize| find(format!("blocks.{i}.delta.norm"));
    let first = |part: &str| {
        let found = (0..config.layers).find_map(|i| find(format!("blocks.{i}.delta.{part}")));
        found.map(|weight| &weight.shape)
    };
    let (Some(norm), Some(taps), Some(rows)) = (first("norm"), first("taps"), first("qkv")) else {
        return Vec::new();
    };
    if config.architecture.gguf != latent::KIMI {
        return Vec::new();
    }
    let heads = (0..config.layers).map(|i| i32::from(net(i).is_none())).collect();
    vec![
        ("attention.head_count_kv", MetadataValue::Array(MetadataArray::I32(heads))),
        ("kda.head_dim", size(norm[0])),
        ("ssm.conv_kernel", size(taps[0] / rows[0].max(1))),
    ]
}
