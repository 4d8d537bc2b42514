//! What each layer of Nemotron-H is.

use crate::config::LAYERS;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::stated::Stated;
use formats::Result;

/// What a layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Mamba,
    Attention,
    FeedForward,
    Experts,
}

/// What each layer is: by letters or by names, in GGUF by its weights.
///
/// # Errors
/// Other letters or names, or another number of them.
pub(super) fn read(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<Kind>> {
    const PATTERN: Key = Key("hybrid_override_pattern", "");
    let (keys, count) = (&files.keys, layers.within(1..=LAYERS)?);
    if keys.dialect() == Dialect::Gguf {
        let of = |i: usize| -> Result<Kind> {
            for (name, kind) in [
                ("mamba.decay", Kind::Mamba),
                ("mlp.experts.up", Kind::Experts),
                ("mlp.up", Kind::FeedForward),
            ] {
                if files.names.find(&format!("blocks.{i}.{name}"))?.is_some() {
                    return Ok(kind);
                }
            }
            Ok(Kind::Attention)
        };
        return (0..count).map(of).collect();
    }
    let pattern = keys.text(PATTERN)?;
    let list =
        ["layers_block_type", "layer_types"].map(|key| keys.get(Key(key, "")).map(|v| (key, v)));
    let (key, kinds): (Key, Option<Vec<Kind>>) = match (list.into_iter().flatten().next(), pattern)
    {
        (Some((key, list)), _) => {
            let one = |kind: &serde_json::Value| match kind.as_str()? {
                "mamba" | "linear_attention" => Some(Kind::Mamba),
                "attention" | "full_attention" => Some(Kind::Attention),
                "mlp" => Some(Kind::FeedForward),
                "moe" => Some(Kind::Experts),
                _ => None,
            };
            (Key(key, ""), list.as_array().and_then(|list| list.iter().map(one).collect()))
        }
        (None, pattern) => {
            let one = |letter: char| match letter {
                'M' => Some(Kind::Mamba),
                '*' => Some(Kind::Attention),
                '-' => Some(Kind::FeedForward),
                'E' => Some(Kind::Experts),
                _ => None,
            };
            (PATTERN, pattern.and_then(|letters| letters.chars().map(one).collect()))
        }
    };
    let kinds = kinds.ok_or_else(|| {
        let expected = "a kind of each layer: M or mamba, * or attention, - or mlp, E or moe";
        match keys.get(key) {
            Some(value) => keys.odd(key, expected, value),
            None => keys.wrong(key, expected, "nothing"),
        }
    })?;
    if kinds.len() != count {
        return Err(keys.wrong(
            key,
            format!("{count} layers, as {} says", layers.key()),
            kinds.len(),
        ));
    }
    Ok(kinds)
}
