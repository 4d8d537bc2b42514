//! Gemma 4 in the terms of GGUF: sizes of both kinds of layers, the rotation of heads that turn in
//! part as factors, and factors behind layers, which its Program has as numbers.

use super::{ARCHITECTURE, read};
use crate::export::{Exported, From};
use crate::files::Files;
use crate::hybrid::together;
use crate::rope::{Rotation, Scaling};
use crate::{granite_swa, latent};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{ErrorKind, Result, Source};
use program::Weight;

/// The divisor of the angles of pairs that do not turn.
const STILL: f32 = 1e30;

/// Whether a folder is one of Gemma 4.
fn is_ours(files: &Files<'_>) -> bool {
    files.architecture.gguf == ARCHITECTURE.gguf
}

fn size(n: usize) -> MetadataValue {
    MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX))
}

/// A number of each layer: one where all have the same.
pub(crate) fn each(numbers: &[usize]) -> MetadataValue {
    match numbers {
        [first, rest @ ..] if rest.iter().all(|n| n == first) => size(*first),
        _ => MetadataValue::Array(MetadataArray::I32(numbers.iter().map(|n| *n as i32).collect())),
    }
}

/// Metadata that has no key in `config.json`, or another form there; nothing for other
/// architectures.
///
/// # Errors
/// As of opening the folder.
pub(crate) fn metadata(files: &Files<'_>) -> Result<Vec<(&'static str, MetadataValue)>> {
    if !is_ours(files) {
        return Ok(Vec::new());
    }
    let (config, plan, [local, global]) = read(files)?;
    let kinds = config.windows.iter().map(|window| &plan.kinds[usize::from(window.is_none())]);
    let kv_heads: Vec<usize> = kinds.map(|kind| kind.kv_heads).collect();
    let sizes = plan.kinds.each_ref().map(|kind| kind.head_dim);
    let turned = |rotation: &Rotation, size: usize| match &rotation.rotary {
        Some(rotary) => rotary.value,
        None => size,
    };
    Ok(vec![
        ("feed_forward_length", each(&plan.feed_forward)),
        ("attention.head_count_kv", each(&kv_heads)),
        ("attention.key_length", size(sizes[1])),
        ("attention.value_length", size(sizes[1])),
        ("attention.key_length_swa", size(sizes[0])),
        ("attention.value_length_swa", size(sizes[0])),
        ("attention.shared_kv_layers", size(plan.shared.iter().flatten().count())),
        ("embedding_length_per_layer_input", size(plan.input)),
        ("rope.freq_base", MetadataValue::F32(global.theta.value as f32)),
        ("rope.freq_base_swa", MetadataValue::F32(local.theta.value as f32)),
        ("rope.dimension_count", size(turned(&global, sizes[1]))),
        ("rope.dimension_count_swa", size(turned(&local, sizes[0]))),
    ])
}

/// Tensors of what its Program has as numbers, if it is one of Gemma 4.
///
/// # Errors
/// As of opening the folder; a rotation that has no form in GGUF.
pub(crate) fn tensors(files: &Files<'_>) -> Result<Option<Vec<Exported>>> {
    if !is_ours(files) {
        return Ok(None);
    }
    let (_, plan, [_, global]) = read(files)?;
    let pairs = plan.kinds[1].head_dim / 2;
    let factors = match global.scaling.value {
        Scaling::None => vec![1.0; pairs],
        Scaling::Proportional { part, factor } => {
            let turned = (part * pairs as f64) as usize;
            (0..pairs).map(|i| if i < turned { factor as f32 } else { STILL }).collect()
        }
        _ => {
            let found = "another";
            let error = global.scaling.wrong("a rotation that GGUF can say", found);
            return Err(error.of(ErrorKind::Unsupported));
        }
    };
    let one = |name: String, values: Vec<f32>| Exported {
        name,
        shape: vec![values.len()],
        from: From::Values(values),
    };
    let scale =
        |(i, scale): (usize, &f32)| one(format!("blk.{i}.layer_output_scale.weight"), vec![*scale]);
    let factors = one("rope_freqs.weight".to_owned(), factors);
    Ok(Some([factors].into_iter().chain(plan.scales.iter().enumerate().map(scale)).collect()))
}

/// The weight `canonical` as GGUF has it, where that is another than the model's: `Some(None)` is
/// none at all.
pub(crate) fn exported(
    held: &[Weight],
    canonical: &str,
    experts: usize,
    form: &str,
) -> Option<Option<(Source, Vec<usize>)>> {
    let find = |name: &str| held.iter().find(|weight| weight.name == name);
    let both = |stem: &str| {
        let gate = find(&format!("{stem}.gate"))?;
        let both = together(&gate.source)?;
        let shape = vec![experts, 2 * gate.shape[0] / experts, gate.shape[1]];
        Some((Source::Reshape(Box::new(both.clone()), shape.clone()), shape))
    };
    if let Some(block) = canonical.strip_suffix(".attention.v") {
        // Where values are keys, there is no matrix for them.
        let (v, k) = (find(canonical)?, find(&format!("{block}.attention.k"))?);
        return (v.source == k.source).then_some(None);
    }
    let (stem, part) = canonical.rsplit_once('.')?;
    let beside =
        [latent::MISTRAL4, granite_swa::GGUF].contains(&form) && stem.ends_with(".mlp.experts");
    if !(beside || stem.ends_with(".moe.experts")) || experts == 0 {
        return None;
    }
    match part {
        "gate_up" => Some(both(stem)),
        "gate" | "up" => both(stem).map(|_| None),
        _ => None,
    }
}
