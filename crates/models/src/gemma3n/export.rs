//! Gemma 3n in the terms of GGUF: matrices of streams in stacks, and what some layers let pass as
//! standard deviations.

use super::{ARCHITECTURE, read, streams};
use crate::files::Files;
use crate::gemma4::each;
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Result, Source};
use program::Weight;

/// Metadata that has no key in `config.json`, or another form there; nothing for other
/// architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(files: &Files<'_>) -> Result<Vec<(&'static str, MetadataValue)>> {
    if files.architecture.gguf != ARCHITECTURE.gguf {
        return Ok(Vec::new());
    }
    let (_, plan) = read(files)?;
    let size = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let deviations = plan.deviations.iter().map(|by| by.unwrap_or(f32::NEG_INFINITY)).collect();
    Ok(vec![
        ("feed_forward_length", each(&plan.feed_forward)),
        ("attention.shared_kv_layers", size(plan.shared.iter().flatten().count())),
        ("embedding_length_per_layer_input", size(plan.input)),
        ("altup.active_idx", size(plan.streams.active)),
        ("altup.num_inputs", size(plan.streams.all)),
        ("activation_sparsity_scale", MetadataValue::Array(MetadataArray::F32(deviations))),
    ])
}

/// The weight `canonical` as GGUF has it, where that is another than the model's: `Some(None)` is
/// none at all.
pub(crate) fn exported(held: &[Weight], canonical: &str) -> Option<Option<(Source, Vec<usize>)>> {
    let find = |name: &str| held.iter().find(|weight| weight.name == name);
    let parts = |stem: &str| -> Vec<Source> {
        let of = |i: usize| find(&format!("{stem}.{i}")).map(|weight| weight.source.clone());
        (0..streams::MOST).map_while(of).collect()
    };
    if ["streams.made", "streams.back"].contains(&canonical) {
        let parts = parts(canonical);
        let hidden = find(&format!("{canonical}.0"))?.shape[0];
        let shape = vec![parts.len(), hidden, hidden];
        return Some(Some((Source::Stack(parts), shape)));
    }
    let (_, part) = canonical.split_once(".streams.")?;
    match part {
        // Readers add these numbers themselves.
        "predict.bias" | "correct.bias" => Some(None),
        "predict" | "correct" => Some(find(canonical).map(|weight| {
            let shape = vec![weight.shape[0], parts("streams.made").len() + 1];
            (streams::unpadded(&weight.source).clone(), shape)
        })),
        _ => None,
    }
}
