//! The sizes of Gemma 4's heads and their rotations, as configurations state them for layers within
//! a window and for layers that see everything.

use super::KV_HEADS;
use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::rope::{Rotation, Scaling};
use crate::scaling;
use crate::stated::Stated;
use formats::{ErrorKind, Result};

/// The settings of full-attention layers in `per_layer_config`, as recent Transformers writes it:
/// layers that it does not name have what all others have, `base`. None where the key is absent.
fn of_globals(
    files: &Files<'_>,
    raw: &Raw,
    key: &'static str,
    base: &Stated<usize>,
) -> Result<Option<Stated<usize>>> {
    const OWN: &str = "per_layer_config";
    let keys = &files.keys;
    let Some(layers) = keys.get(OWN).filter(|_| keys.dialect() == Dialect::HuggingFace) else {
        return Ok(None);
    };
    let layers = layers.as_object().ok_or_else(|| keys.odd(OWN, "an object", layers))?;
    let usual = base.value as u64;
    let unlike = |found: &serde_json::Value| {
        let expected = "sizes of heads and counts of keys, alike in all layers without a window";
        keys.odd(OWN, expected, found).of(ErrorKind::Unsupported)
    };
    let mut found = Vec::new();
    for (layer, settings) in layers {
        let window = layer.parse().ok().and_then(|i: usize| raw.windows.get(i));
        let whole = settings.as_object().is_some_and(|settings| {
            let known = |(key, value): (&String, &serde_json::Value)| {
                ["head_dim", "num_key_value_heads"].contains(&key.as_str()) && value.is_u64()
            };
            settings.iter().all(known)
        });
        if window != Some(&None) || !whole {
            return Err(unlike(settings));
        }
        found.push(settings.get(key).and_then(serde_json::Value::as_u64).unwrap_or(usual));
    }
    let unnamed = raw.windows.iter().filter(|window| window.is_none()).count() > found.len();
    found.extend(unnamed.then_some(usual));
    let first = found.first().copied().unwrap_or(usual);
    if found.iter().any(|other| *other != first) {
        return Err(unlike(&layers.clone().into()));
    }
    Ok(Some(keys.stated(OWN, usize::try_from(first).unwrap_or(usize::MAX))))
}

/// Elements of a head in layers within a window, and in those that see everything.
pub(super) fn head_sizes(files: &Files<'_>, raw: &Raw) -> Result<[Stated<usize>; 2]> {
    let keys = &files.keys;
    if keys.dialect() == Dialect::HuggingFace {
        let (local, global) = (keys.needed("head_dim")?, keys.needed("global_head_dim")?);
        let own = of_globals(files, raw, "head_dim", &local)?;
        return Ok([local, own.unwrap_or(global)]);
    }
    let local = keys.needed(Key("", "attention.key_length_swa"))?;
    let values = keys.needed(Key("", "attention.value_length_swa"))?;
    if values.value != local.value {
        let expected = format!("{}, as {} says", local.value, local.key());
        return Err(values.wrong(expected, values.value));
    }
    Ok([local, keys.needed(Key("", "attention.key_length"))?])
}

/// Key/value heads of layers within a window, and of those that see everything.
pub(super) fn kv_heads(files: &Files<'_>, raw: &Raw) -> Result<[Stated<usize>; 2]> {
    let keys = &files.keys;
    if let Some(list) = keys.of_layers(KV_HEADS, raw.windows.len())? {
        let of = |local: bool| {
            let kind = || raw.windows.iter().zip(&list).filter(|(w, _)| w.is_some() == local);
            let first = kind().next().map_or(raw.kv_heads.value, |(_, n)| *n);
            match kind().find(|(_, n)| **n != first) {
                Some((_, other)) => {
                    let expected = "the same number in all layers of a kind";
                    Err(keys.wrong(KV_HEADS, expected, format!("{first} and {other}")))
                }
                None => Ok(keys.stated(KV_HEADS, first)),
            }
        };
        return Ok([of(true)?, of(false)?]);
    }
    let own = keys.size(Key("num_global_key_value_heads", ""))?;
    let same = keys.flag(Key("attention_k_eq_v", ""))? == Some(true);
    let listed = of_globals(files, raw, "num_key_value_heads", &raw.kv_heads)?;
    let own = listed.or(own.filter(|_| same));
    Ok([raw.kv_heads.clone(), own.unwrap_or_else(|| raw.kv_heads.clone())])
}

/// The rotations of layers within a window, and of those that see everything.
pub(super) fn rotations(
    files: &Files<'_>,
    raw: &Raw,
    [local_size, global_size]: &[Stated<usize>; 2],
) -> Result<[Rotation; 2]> {
    let keys = &files.keys;
    let plain = |theta, rotary| {
        let scaling = keys.stated("rope_parameters", Scaling::None);
        Rotation { theta, rotary, scaling }
    };
    if let (Dialect::Gguf, Some(global)) = (keys.dialect(), &raw.rotation) {
        let theta = keys.number_or(Key("", "rope.freq_base_swa"), 10_000.0)?;
        let rotary = keys.size(Key("", "rope.dimension_count_swa"))?;
        return Ok([plain(theta, rotary), global.clone()]);
    }
    let of = |kind, size: &Stated<usize>| scaling::of_kind(files, kind, size.value);
    let usual = |theta: f64| plain(keys.stated("rope_parameters", theta), None);
    let local = of("sliding_attention", local_size)?.unwrap_or_else(|| usual(10_000.0));
    let global = of("full_attention", global_size)?.unwrap_or_else(|| {
        let scaling = Scaling::Proportional { part: 0.25, factor: 1.0 };
        Rotation { scaling: keys.stated("rope_parameters", scaling), ..usual(1_000_000.0) }
    });
    Ok([local, global])
}
