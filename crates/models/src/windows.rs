//! Which layers attend within a window, as configurations say it.

use crate::config::{LAYERS, LIMIT};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::stated::Stated;
use formats::Result;

/// The window of every layer: the rule of Mistral and Phi-3, and of GGUF files where no
/// architecture has its own. Empty if there is no window.
///
/// # Errors
/// A window that is none.
pub(crate) fn of_all(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Option<usize>>> {
    let window = files.keys.size(Key("sliding_window", "attention.sliding_window"))?;
    let Some(window) = window.filter(|window| window.value > 0) else {
        of_types(files, layers, None)?;
        return Ok(Vec::new());
    };
    let window = window.within(1..=LIMIT)?;
    let each = vec![Some(window); layers.value.min(LAYERS)];
    Ok(of_types(files, layers, Some(window))?.unwrap_or(each))
}

/// A window on every other layer, the first among them, unless `layer_types` lists others.
///
/// # Errors
/// As [`of_all`].
pub(crate) fn alternating(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Option<usize>>> {
    let keys = &files.keys;
    let mut windows = of_all(files, layers)?;
    if keys.dialect() == Dialect::Gguf || keys.get("layer_types").is_none() {
        windows.iter_mut().skip(1).step_by(2).for_each(|window| *window = None);
    }
    Ok(windows)
}

/// Windows on all layers but every `period`-th, if the configuration has a window, unless it says
/// another period, or lists the layers: `layer_types`, or a list of GGUF's.
///
/// # Errors
/// As [`of_all`]; a list of another length.
pub(crate) fn periodic(
    files: &Files<'_>,
    layers: &Stated<usize>,
    period: usize,
) -> Result<Vec<Option<usize>>> {
    let keys = &files.keys;
    let mut windows = of_all(files, layers)?;
    let listed = match keys.dialect() {
        Dialect::HuggingFace => keys.get(Key("layer_types", "")).is_some(),
        Dialect::Gguf => false,
    };
    if listed || windows.is_empty() {
        // What a pattern says beside a list, the list says too.
        for name in [PATTERN.0, "_sliding_window_pattern", PATTERN.1] {
            keys.note(name);
        }
        return Ok(windows);
    }
    if of_list(files, layers, &mut windows)? {
        return Ok(windows);
    }
    let other = keys.size(Key("_sliding_window_pattern", ""))?;
    let stated = keys.size(PATTERN)?.or(other);
    let period = stated.map_or(Ok(period), |period| period.within(1..=LAYERS))?;
    windows.iter_mut().skip(period - 1).step_by(period).for_each(|window| *window = None);
    Ok(windows)
}

const PATTERN: Key = Key("sliding_window_pattern", "attention.sliding_window_pattern");

/// Takes the window from layers for which GGUF's list says so; false if there is no list.
fn of_list(
    files: &Files<'_>,
    layers: &Stated<usize>,
    windows: &mut [Option<usize>],
) -> Result<bool> {
    let Some(local) = files.keys.gguf_flags(PATTERN)? else { return Ok(false) };
    if local.len() != layers.value {
        let expected = format!("{} entries, as {} says", layers.value, layers.key());
        return Err(files.keys.wrong(PATTERN, expected, local.len()));
    }
    let windowed = windows.iter_mut().zip(local).filter(|(_, local)| !local);
    windowed.for_each(|(window, _)| *window = None);
    Ok(true)
}

/// Windows on all layers but the first of every `period`, unless a list says others.
///
/// # Errors
/// As [`of_all`].
pub(crate) fn leading(
    files: &Files<'_>,
    layers: &Stated<usize>,
    period: usize,
) -> Result<Vec<Option<usize>>> {
    let mut windows = of_all(files, layers)?;
    let listed = of_list(files, layers, &mut windows)?;
    if !listed && files.keys.get(Key("layer_types", "")).is_none() {
        windows.iter_mut().step_by(period).for_each(|window| *window = None);
    }
    Ok(windows)
}

/// Windows by `layer_types`, if the configuration has such a list: a kind of attention for each
/// layer.
///
/// # Errors
/// A list of another length, another kind, or a window where none is stated.
pub(crate) fn of_types(
    files: &Files<'_>,
    layers: &Stated<usize>,
    window: Option<usize>,
) -> Result<Option<Vec<Option<usize>>>> {
    const TYPES: Key = Key("layer_types", "");
    let keys = &files.keys;
    let Some(types) = keys.get(TYPES) else { return Ok(None) };
    let list = types.as_array().ok_or_else(|| keys.odd(TYPES, "a list", types))?;
    if list.len() != layers.value {
        let expected = format!("{} entries, as {} says", layers.value, layers.key());
        return Err(keys.wrong(TYPES, expected, list.len()));
    }
    let one = |kind: &serde_json::Value| match (kind.as_str(), window) {
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (Some("full_attention"), _) => Ok(None),
        (_, Some(_)) => Err(keys.odd(TYPES, "full_attention or sliding_attention", kind)),
        (_, None) => Err(keys.odd(TYPES, "full_attention, where no window is stated", kind)),
    };
    list.iter().map(one).collect::<Result<_>>().map(Some)
}

/// Qwen's rule: a window that a switch, off by default, turns on for the layers from
/// `max_window_layers` up, or for those that `layer_types` lists. GGUF has no switch.
///
/// # Errors
/// As [`of_all`].
pub(crate) fn of_qwen(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Option<usize>>> {
    let first = files.keys.size("max_window_layers")?.map_or(layers.value, |first| first.value);
    of_switch(files, layers, |layer| layer >= first)
}

/// The rule of those where the switch turns the window on for the layers that `within` tells, if
/// `layer_types` lists no others.
///
/// # Errors
/// As [`of_all`].
pub(crate) fn of_switch(
    files: &Files<'_>,
    layers: &Stated<usize>,
    within: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    if files.keys.dialect() == Dialect::Gguf {
        return of_all(files, layers);
    }
    files.keys.note("max_window_layers");
    let window = switched(files)?;
    let listed = of_types(files, layers, window)?;
    let Some(window) = window else { return Ok(Vec::new()) };
    let told = || (0..layers.value.min(LAYERS)).map(|i| within(i).then_some(window)).collect();
    Ok(listed.unwrap_or_else(told))
}

/// The rule of decoders beside towers, whose class does not read what `config.json` says of a
/// window.
///
/// # Errors
/// As [`of_all`].
pub(crate) fn of_gguf(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Option<usize>>> {
    if files.keys.dialect() == Dialect::Gguf {
        return of_all(files, layers);
    }
    for key in ["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"] {
        files.keys.note(key);
    }
    Ok(Vec::new())
}

/// The window of `config.json`, where `use_sliding_window` turns it on.
fn switched(files: &Files<'_>) -> Result<Option<usize>> {
    let keys = &files.keys;
    let window = keys.size("sliding_window")?;
    let used = keys.flag("use_sliding_window")?.unwrap_or(false);
    window.filter(|_| used).map(|window| window.within(1..=LIMIT)).transpose()
}
