//! Qwen's hybrids in the terms of GGUF: keys that `config.json` does not have, weights that are
//! stored as one, and the order of heads that share keys.

use super::NEXT;
use crate::files::Files;
use crate::keys::Key;
use crate::latent;
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Result, Source};
use program::Weight;

/// Metadata of a hybrid's GGUF file that has no key in `config.json`, or another form there: `held`
/// are the model's weights.
///
/// # Errors
/// Values of another type, by key.
pub(crate) fn metadata(
    files: &Files<'_>,
    held: &[Weight],
) -> Result<Vec<(&'static str, MetadataValue)>> {
    let width = |weight: &Weight| weight.name.ends_with(".delta.z").then(|| weight.shape[0]);
    let elements = files.architecture.gguf == latent::KIMI;
    let Some(inner) = held.iter().find_map(width).filter(|_| !elements) else {
        return Ok(Vec::new());
    };
    let size = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let interval = files.keys.size(Key("full_attention_interval", ""))?;
    let block = |i: usize| format!("blocks.{i}.");
    let layers = (0..).take_while(|i| held.iter().any(|w| w.name.starts_with(&block(*i))));
    let net = |i: usize| held.iter().any(|w| w.name == format!("{}delta.decay", block(i)));
    let mut all = vec![
        ("ssm.inner_size", size(inner)),
        (
            "attention.recurrent_layers",
            MetadataValue::Array(MetadataArray::Bool(layers.map(net).collect())),
        ),
        ("full_attention_interval", size(interval.map_or(4, |interval| interval.value))),
    ];
    if files.architecture.name != NEXT {
        all.push(sections(files)?);
    }
    Ok(all)
}

/// How many pairs turn by each axis of an image's positions. Of a text all positions are one;
/// llama.cpp wants it said.
///
/// # Errors
/// Something else than numbers.
pub(crate) fn sections(files: &Files<'_>) -> Result<(&'static str, MetadataValue)> {
    let mut stated = None;
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = files.keys.object(key)? else { continue };
        stated = stated.or(rope.numbers("mrope_section")?);
    }
    let mut sections = stated.unwrap_or_else(|| vec![11.0, 11.0, 10.0]);
    sections.resize(4, 0.0);
    let sections = sections.into_iter().map(|n| n as i32).collect();
    Ok(("rope.dimension_sections", MetadataValue::Array(MetadataArray::I32(sections))))
}

/// Two weights that are stored as one, heads by turns: that one.
pub(crate) fn together(source: &Source) -> Option<&Source> {
    let Source::Rows { of, .. } = source else { return None };
    match &**of {
        Source::Permute(both, [1, _, 2, _]) => Some(both),
        _ => None,
    }
}

/// A weight of a hybrid as GGUF has it, and its shape; `None` where it is as in any model. What is
/// stored as one stays one; heads that share keys lie apart, but for Qwen3-Next's.
pub(crate) fn exported(
    held: &[Weight],
    canonical: &str,
    key_heads: Option<usize>,
) -> Option<Option<(Source, Vec<usize>)>> {
    let find = |name: &str| held.iter().find(|weight| weight.name == name);
    let both = |name: &str| {
        let half = find(name)?;
        let mut shape = half.shape.clone();
        shape[0] *= 2;
        Some((together(&half.source)?.clone(), shape))
    };
    let (stem, bias) = match canonical.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (canonical, ""),
    };
    if let Some(block) = stem.strip_suffix(".attention.q_gate") {
        return Some(both(&format!("{block}.attention.q{bias}")));
    }
    let (block, part) = canonical.split_once(".delta.")?;
    let name = |part: &str| format!("{block}.delta.{part}");
    if part == "ba" {
        return Some(both(&name("b")));
    }
    let part = if part == "conv" { "taps" } else { part };
    let Some(weight) = find(&name(part)) else { return Some(None) };
    if matches!(part, "a" | "b") && together(&weight.source).is_some() {
        return Some(None);
    }
    let (mut source, mut shape) = (weight.source.clone(), weight.shape.clone());
    if let (Source::Reshape(turned, _), "taps") = (&weight.source, part)
        && let Source::Transpose(flat) = &**turned
        && let Source::Reshape(_, own) = &**flat
    {
        (source, shape) = ((**flat).clone(), own.clone());
    }
    let (Some(decay), Some(norm)) = (find(&name("decay")), find(&name("norm"))) else {
        return Some(None);
    };
    let (heads, each) = (decay.shape[0], norm.shape[0]);
    let Some(key_heads) = key_heads.filter(|count| heads != *count) else {
        return Some(Some((source, shape)));
    };
    let apart = |source: Source, each| {
        Source::Permute(Box::new(source), [1, key_heads, heads / key_heads, each])
    };
    let source = match part {
        "a" | "b" | "decay" | "dt" => apart(source, 1),
        "z" => apart(source, each),
        "qkv" | "taps" => {
            let values = heads * each;
            let keys = shape[0] - values;
            let front = source.clone().rows(0, keys);
            Source::Concat(vec![front, apart(source.rows(keys, values), each)])
        }
        "o" => {
            let turned = apart(Source::Transpose(Box::new(source)), each);
            Source::Transpose(Box::new(turned))
        }
        _ => source,
    };
    Some(Some((source, shape)))
}
