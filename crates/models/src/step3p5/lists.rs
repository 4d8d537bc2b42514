//! What configurations of Step 3.5 say of each layer: lists, which published folders continue with
//! the blocks that guess tokens ahead.

use crate::config::{LIMIT, Raw};
use crate::deepseek;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::stated::Stated;
use formats::{ErrorKind, Result};
use serde_json::Value;

/// Numbers that GGUF lists by layer, and the base of the rotation, which folders list.
pub(super) const BY_LAYER: &[&str] = &[HEADS, GROUPS, "rope_theta"];
pub(super) const HEADS: &str = "attention.head_count";
pub(super) const GROUPS: &str = "attention.head_count_kv";

/// The bounds of experts and of other feed-forwards, by their names in both forms.
pub(super) const LIMITS: [(&str, &str); 2] =
    [("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")];

/// The first `layers` entries of the list under `key`, if there is one.
fn list<'a>(files: &Files<'a>, key: &'static str, layers: usize) -> Result<Option<&'a [Value]>> {
    let Some(found) = files.keys.get(Key(key, "")) else { return Ok(None) };
    let entries = found.as_array().and_then(|list| list.get(..layers));
    let expected = format!("a list with an entry for each of {layers} layers");
    entries.map(Some).ok_or_else(|| files.keys.odd(key, &expected, found))
}

/// The window of each layer that has one.
pub(super) fn windows(files: &Files<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    const TYPES: &str = "layer_types";
    let keys = &files.keys;
    let window = keys.size("sliding_window")?.filter(|window| window.value > 0);
    let window = window.map(|window| window.within(1..=LIMIT)).transpose()?;
    let Some(types) = list(files, TYPES, layers)? else { return Ok(vec![None; layers]) };
    let one = |kind: &Value| match (kind.as_str(), window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (_, Some(_)) => Err(keys.odd(TYPES, "full_attention or sliding_attention", kind)),
        (_, None) => Err(keys.odd(TYPES, "full_attention, where no window is stated", kind)),
    };
    types.iter().map(one).collect()
}

/// The query heads of each layer; `all` counts the blocks that guess tokens ahead, too.
pub(super) fn heads(files: &Files<'_>, raw: &Raw, all: usize) -> Result<Vec<usize>> {
    let keys = &files.keys;
    let (layers, groups) = (raw.layers.value, raw.kv_heads.within(1..=1 << 16)?);
    let heads = match keys.dialect() {
        Dialect::Gguf => {
            let of = |key| Ok(keys.of_layers(Key("", key), all)?.unwrap_or_default());
            let others: Vec<usize> = of(GROUPS)?;
            if let Some(other) = others.iter().take(layers).find(|other| **other != groups) {
                let expected = format!("{groups} in every layer");
                return Err(keys
                    .wrong(Key("", GROUPS), expected, other)
                    .of(ErrorKind::Unsupported));
            }
            let listed: Vec<usize> = of(HEADS)?;
            let listed = listed.into_iter().take(layers);
            Some(listed.collect::<Vec<_>>()).filter(|listed| listed.len() == layers)
        }
        Dialect::HuggingFace => {
            let own = within_windows(files, raw)?;
            let one = |window: &Option<usize>| window.map_or(raw.heads.value, |_| own);
            Some(raw.windows.iter().map(one).collect())
        }
    };
    let heads = heads.unwrap_or_else(|| vec![raw.heads.value; layers]);
    let odd = |heads: &&usize| **heads == 0 || **heads > 1 << 16 || !heads.is_multiple_of(groups);
    match heads.iter().find(odd) {
        Some(odd) => {
            let expected = format!("multiples of {} = {groups}", raw.kv_heads.key());
            Err(keys.wrong(Key("num_attention_heads", HEADS), expected, odd))
        }
        None => Ok(heads),
    }
}

/// The query heads of layers within windows.
fn within_windows(files: &Files<'_>, raw: &Raw) -> Result<usize> {
    let keys = &files.keys;
    // Transformers repeats by layer what it says of all of them.
    if let Some(by_layer) = keys.object("per_layer_config")? {
        by_layer.note_all();
    }
    let other = keys.object("attention_other_setting")?;
    let mut heads = keys.size("num_sliding_attention_heads")?;
    if let Some(other) = &other {
        other.only("attention_type", &["sliding_attention"])?;
        heads = heads.or(other.size("num_attention_heads")?);
        other.note("true_head_dim");
        let same =
            [("num_attention_groups", Some(&raw.kv_heads)), ("head_dim", raw.head_dim.as_ref())];
        for (key, whole) in same {
            let own = other.size(key)?.filter(|own| whole.is_some_and(|n| n.value != own.value));
            if let (Some(own), Some(whole)) = (own, whole) {
                let expected = format!("{}, as {} says", whole.value, whole.key());
                return Err(own.wrong(expected, own.value).of(ErrorKind::Unsupported));
            }
        }
    }
    Ok(heads.map_or(raw.heads.value, |heads| heads.value))
}

/// The least bound: SiLU, which may be bounded from below as well, is never as far below zero.
const LEAST: f32 = 0.3;

/// The bound of each layer that has one.
pub(super) fn limits(
    files: &Files<'_>,
    key: &'static str,
    layers: usize,
) -> Result<Vec<Option<f32>>> {
    let keys = &files.keys;
    let gguf = LIMITS.iter().find(|(name, _)| *name == key).map_or("", |(_, gguf)| gguf);
    let named = Key(key, gguf);
    let found: Option<Vec<f32>> = match keys.dialect() {
        Dialect::Gguf => keys.gguf_numbers(named)?,
        Dialect::HuggingFace => {
            let one = |entry: &Value| match entry {
                Value::Null => Ok(0.0),
                other => other
                    .as_f64()
                    .map(|limit| limit as f32)
                    .ok_or_else(|| keys.odd(named, "numbers", other)),
            };
            let entries = list(files, key, layers)?;
            entries.map(|list| list.iter().map(one).collect()).transpose()?
        }
    };
    let Some(found) = found else { return Ok(vec![None; layers]) };
    if found.len() < layers {
        return Err(keys.wrong(named, format!("{layers} entries"), found.len()));
    }
    let one = |limit: f32| match limit {
        0.0 => Ok(None),
        limit if limit >= LEAST && limit.is_finite() => Ok(Some(limit)),
        odd => Err(keys.wrong(named, format!("0, or {LEAST} and more"), odd)),
    };
    found.into_iter().take(layers).map(one).collect()
}

/// Which blocks have no experts: by a list of kinds, by the numbers of those that have some, or, in
/// GGUF, by their routers.
pub(super) fn dense(files: &Files<'_>, layers: usize) -> Result<Vec<bool>> {
    const SPARSE: &str = "moe_layers_enum";
    let keys = &files.keys;
    if keys.dialect() == Dialect::Gguf {
        let router = |i: usize| files.names.find(&format!("blocks.{i}.mlp.router"));
        return (0..layers).map(|i| Ok(router(i)?.is_none())).collect();
    }
    if let Some(listed) = deepseek::listed(files, layers)? {
        keys.note(SPARSE);
        return Ok(listed);
    }
    let Some(found) = keys.get(Key(SPARSE, "")) else {
        return Ok((0..layers).map(|i| i < 3).collect());
    };
    let number = |entry: &Value| match entry.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => entry.as_u64(),
    };
    let sparse: Option<Vec<u64>> = match found.as_str() {
        Some(text) => text.split(',').map(|part| part.trim().parse().ok()).collect(),
        None => found.as_array().and_then(|list| list.iter().map(number).collect()),
    };
    let sparse = sparse.ok_or_else(|| keys.odd(SPARSE, "numbers of blocks", found))?;
    Ok((0..layers).map(|i| !sparse.contains(&(i as u64))).collect())
}

/// A number that a folder lists by layer, of one layer; `usual` where it has none.
pub(super) fn number(
    files: &Files<'_>,
    key: &'static str,
    layer: Option<usize>,
    usual: f64,
) -> Result<Stated<f64>> {
    let keys = &files.keys;
    let found = match keys.get(Key(key, "")) {
        Some(Value::Array(list)) => layer.and_then(|layer| list.get(layer)),
        one => one,
    };
    let Some(found) = found else { return Ok(keys.stated(key, usual)) };
    let number = found.as_f64().ok_or_else(|| keys.odd(key, "a number", found))?;
    Ok(keys.stated(key, number))
}
