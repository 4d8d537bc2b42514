//! mlx-lm: `adapter_config.json` and `adapters.safetensors`.
//!
//! A matrix `M` has `M.lora_a` `[in, r]` and `M.lora_b` `[r, out]`, a table of embeddings
//! `[tokens, r]` and `[r, width]`. The change is `scale` of their product. DoRA adds `M.m` `[out]`.

use crate::settings::Settings;
use crate::{Change, File, Kind, Parts, Stored, pairs};
use formats::{Error, Result, Safetensors};
use std::path::Path;

const WEIGHTS: &str = "adapters.safetensors";

pub(crate) fn open(folder: &Path, settings: &Settings) -> Result<File> {
    let kind = settings.text("fine_tune_type").unwrap_or("lora");
    if !["lora", "dora"].contains(&kind) {
        return Err(settings.lacks("fine_tune_type", "lora or dora"));
    }
    let parameters = settings.object("lora_parameters")?;
    let parameters = parameters.ok_or_else(|| {
        settings.wrong("lora_parameters", "the settings of mlx-lm or PEFT", "nothing")
    })?;
    let missing = |key| parameters.wrong(key, "a number", "nothing");
    let scale = parameters.positive("scale")?.ok_or_else(|| missing("scale"))?;
    let rank = parameters.positive("rank")?.ok_or_else(|| missing("rank"))?;
    let file = folder.join(WEIGHTS);
    let tensors = Stored::Safetensors(Safetensors::open(&file)?);
    let parts = Parts { down: ".lora_a", up: ".lora_b", magnitude: &[".m"] };
    let (pairs, rest) = pairs(&file, &tensors.names(), &parts)?;
    let mut adapter = File {
        kind: Kind::Mlx,
        path: file,
        tensors,
        changes: vec![],
        copies: vec![],
        made_for: None,
    };
    if let Some(name) = rest.first() {
        return Err(adapter.wrong(name, "factors of LoRA or DoRA", "another tensor"));
    }
    for pair in &pairs {
        let down = adapter.tensors.get(&pair.name(0));
        let found = down.and_then(|tensor| tensor.shape.last().copied()).unwrap_or(0);
        if found as f64 != rank {
            let expected = format!("rank {rank}, as lora_parameters say");
            return Err(adapter.wrong(&pair.name(0), expected, format!("rank {found}")));
        }
        if (kind == "dora") != pair.names[2].is_some() {
            let expected = format!("what fine_tune_type {kind} has");
            let found = if kind == "dora" { "no magnitudes" } else { "magnitudes" };
            return Err(adapter.wrong(&pair.stem, expected, found));
        }
        let change = Change {
            matrix: pair.stem.clone(),
            down: pair.name(0),
            up: pair.name(1),
            turned: true,
            gathers: pair.stem.ends_with("embed_tokens"),
            magnitude: pair.names[2].clone(),
            scale,
        };
        adapter.changes.push(change);
    }
    if adapter.changes.is_empty() {
        return Err(Error::new(adapter.path.display(), "factors of LoRA or DoRA", "none"));
    }
    Ok(adapter)
}
