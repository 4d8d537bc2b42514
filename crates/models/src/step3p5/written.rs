//! What GGUF says of Step 3.5's layers.

use super::{ARCHITECTURE, OWN, lists};
use crate::config::Config;
use crate::export::{Exported, From};
use crate::files::Files;
use crate::scaling;
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use program::Weight;

/// GGUF's metadata of heads and bounds by layer, of dense blocks and of both rotations; none for other
/// architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
    held: &[Weight],
) -> Result<Vec<(&'static str, MetadataValue)>> {
    if config.architecture.name != ARCHITECTURE.name {
        return Ok(Vec::new());
    }
    let layers = config.layers;
    let find = |name: String| held.iter().find(|weight| weight.name == name);
    let heads = |i| {
        let rows = find(format!("blocks.{i}.attention.q")).map_or(0, |q| q.shape[0]);
        (rows / config.head_dim) as i32
    };
    let whole = |list: Vec<i32>| MetadataValue::Array(MetadataArray::I32(list));
    let dense = (0..layers).take_while(|i| find(format!("blocks.{i}.mlp.router")).is_none());
    let mut all = vec![
        (lists::HEADS, whole((0..layers).map(heads).collect())),
        (lists::GROUPS, whole(vec![config.kv_heads as i32; layers])),
        ("leading_dense_block_count", MetadataValue::U32(dense.count() as u32)),
    ];
    let files = &files.with_names(OWN).with_lists(lists::BY_LAYER);
    for (key, name) in lists::LIMITS {
        let limits = lists::limits(files, key, layers)?.into_iter().map(Option::unwrap_or_default);
        let limits: Vec<f32> = limits.collect();
        if limits.iter().any(|limit| *limit > 0.0) {
            all.push((name, MetadataValue::Array(MetadataArray::F32(limits))));
        }
    }
    Ok(all)
}

/// The rotation of layers that see everything, as factors on that of the whole head, of which they
/// turn half; and its metadata. None for other architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn rotation(
    files: &Files<'_>,
    config: &Config,
    metadata: &mut Vec<(String, MetadataValue)>,
) -> Result<Option<Vec<Exported>>> {
    let Some(rope) = config.rope.as_ref() else { return Ok(None) };
    if config.architecture.name != ARCHITECTURE.name {
        return Ok(None);
    }
    let files = &files.with_names(OWN).with_lists(lists::BY_LAYER);
    let base = |kind, within: bool| -> Result<f64> {
        if let Some(rotation) = scaling::of_kind(files, kind, config.head_dim)? {
            return Ok(rotation.theta.value);
        }
        let layer = config.windows.iter().position(|window| window.is_some() == within);
        Ok(lists::number(files, "rope_theta", layer, 10_000.0)?.value)
    };
    let (theta, local) = (base("full_attention", false)?, base("sliding_attention", true)?);
    let number = |n: f64| MetadataValue::F32(n as f32);
    let own = [
        ("freq_base", number(theta)),
        ("freq_base_swa", number(local)),
        ("dimension_count", MetadataValue::U32(config.head_dim as u32)),
    ];
    for (key, value) in own {
        let key = format!("{}.rope.{key}", ARCHITECTURE.gguf);
        metadata.retain(|(known, _)| *known != key);
        metadata.push((key, value));
    }
    let pairs = rope.frequencies.len();
    let plain = |i: usize| theta.powf(-(i as f64) / pairs as f64);
    let factor = |(i, f): (usize, &f32)| (plain(i) / f64::from(*f)) as f32;
    let mut factors: Vec<f32> = rope.frequencies.iter().enumerate().map(factor).collect();
    if factors.iter().all(|factor| (factor - 1.0).abs() < 1e-6) {
        return Ok(Some(Vec::new()));
    }
    factors.resize(config.head_dim / 2, 1.0);
    let (name, shape) = ("rope_freqs.weight".to_owned(), vec![factors.len()]);
    Ok(Some(vec![Exported { name, shape, from: From::Values(factors) }]))
}
