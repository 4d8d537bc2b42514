//! llama.cpp's adapters: GGUF files whose `general.type` is `adapter` and `adapter.type` `lora`.
//!
//! A matrix `M` has `M.weight.lora_a` `[r, in]` and `M.weight.lora_b` `[out, r]`; the table of
//! embeddings `[tokens, r]` and `[width, r]`, a stack of experts one of each for every expert. The change is `adapter.lora.alpha / r` of their
//! product, or the product itself where alpha is 0.

use crate::{AdapterFormat, Change, File, Parts, Stack, Stored, pairs};
use formats::{Error, Gguf, Result};
use std::path::Path;

pub(crate) fn open(path: &Path) -> Result<File> {
    let file = Gguf::open(path)?;
    let metadata = file.metadata();
    for (key, wanted) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let found = metadata.str(key)?.unwrap_or("nothing");
        if found != wanted {
            let found: String = found.chars().take(60).collect();
            return Err(Error::new(metadata.at(key), wanted, found));
        }
    }
    const ALPHA: &str = "adapter.lora.alpha";
    let alpha = metadata.f32(ALPHA)?.ok_or_else(|| metadata.missing(ALPHA))?;
    if !alpha.is_finite() || alpha < 0.0 {
        return Err(Error::new(metadata.at(ALPHA), "a number, 0 or above", alpha));
    }
    let tensors = Stored::Gguf(file);
    let parts = Parts { down: ".weight.lora_a", up: ".weight.lora_b", magnitude: &[] };
    let (pairs, rest) = pairs(path, &tensors.names(), &parts)?;
    let path = path.to_owned();
    let mut adapter = File {
        kind: AdapterFormat::Gguf,
        path,
        tensors,
        changes: Vec::new(),
        renewed: Vec::new(),
        made_for: None,
    };
    if let Some(name) = rest.first() {
        return Err(adapter.wrong(name, "factors of LoRA", "another tensor"));
    }
    for pair in &pairs {
        let up = adapter.tensors.get(&pair.name(1));
        let rank = up.and_then(|tensor| tensor.shape.last().copied()).unwrap_or(0);
        let stack = up.is_some_and(|tensor| tensor.shape.len() == 3).then_some(Stack::Each);
        let change = Change {
            matrix: pair.stem.clone(),
            down: pair.name(0),
            up: pair.name(1),
            turned: false,
            stack,
            gathers: pair.stem == "token_embd",
            magnitude: None,
            bias: None,
            scale: if alpha == 0.0 { 1.0 } else { f64::from(alpha) / rank.max(1) as f64 },
        };
        adapter.changes.push(change);
    }
    if adapter.changes.is_empty() {
        return Err(Error::new(adapter.path.display(), "factors of LoRA", "none"));
    }
    Ok(adapter)
}

/// The architecture that the adapter says it is for.
pub(crate) fn architecture(file: &Gguf) -> Result<Option<&str>> {
    file.metadata().str("general.architecture")
}
