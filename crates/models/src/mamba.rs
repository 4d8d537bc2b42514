//! The state spaces that hybrids share (Mamba-2; Dao & Gu 2024): their names, sizes and weights in
//! both dialects, and what GGUF files say about them.

use crate::config::Config;
use crate::decoder::{Layer, Mixer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::mamba1;
use crate::names::Row;
use crate::phi3;
use crate::stated::Stated;
use crate::unsaid::Numbers;
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Error, Result, Source, shape};
use nn::{Bias, GatedNorm, Mamba, MambaMultipliers, MambaOptions, Stored, UNLIMITED, Weights};
use program::Weight;
use std::sync::Arc;

/// The names of a layer's weights.
pub(crate) const NAMES: &[Row] = &[
    ("blocks.{}.mamba.in", "model.layers.{}.mamba.in_proj", "blk.{}.ssm_in"),
    ("blocks.{}.mamba.conv", "model.layers.{}.mamba.conv1d", "blk.{}.ssm_conv1d"),
    ("blocks.{}.mamba.log_decay", "model.layers.{}.mamba.A_log!", ""),
    ("blocks.{}.mamba.decay", "", "blk.{}.ssm_a!"),
    ("blocks.{}.mamba.step", "model.layers.{}.mamba.dt_bias!", "blk.{}.ssm_dt.bias!"),
    ("blocks.{}.mamba.skip", "model.layers.{}.mamba.D!", "blk.{}.ssm_d!"),
    ("blocks.{}.mamba.norm", "model.layers.{}.mamba.norm", "blk.{}.ssm_norm"),
    ("blocks.{}.mamba.o", "model.layers.{}.mamba.out_proj", "blk.{}.ssm_out"),
];

/// The same where a layer is nothing else.
pub(crate) const MIXERS: &[Row] = &[
    ("blocks.{}.mamba.in", "backbone.layers.{}.mixer.in_proj", "blk.{}.ssm_in"),
    ("blocks.{}.mamba.conv", "backbone.layers.{}.mixer.conv1d", "blk.{}.ssm_conv1d"),
    ("blocks.{}.mamba.log_decay", "backbone.layers.{}.mixer.A_log!", ""),
    ("blocks.{}.mamba.decay", "", "blk.{}.ssm_a!"),
    ("blocks.{}.mamba.step", "backbone.layers.{}.mixer.dt_bias!", "blk.{}.ssm_dt.bias!"),
    ("blocks.{}.mamba.skip", "backbone.layers.{}.mixer.D!", "blk.{}.ssm_d!"),
    ("blocks.{}.mamba.norm", "backbone.layers.{}.mixer.norm", "blk.{}.ssm_norm"),
    ("blocks.{}.mamba.o", "backbone.layers.{}.mixer.out_proj", "blk.{}.ssm_out"),
];

/// Sizes that classes of hybrids share.
pub(crate) const NUMBERS: Numbers =
    &[("mamba_d_conv", 4), ("mamba_d_state", 256), ("mamba_n_heads", 128)];

/// The object of `config.json` that has the sizes of a state space where its authors wrote it.
pub(crate) const AUTHORS: &str = "ssm_cfg";

/// Keys about training, and about the chunks in which others compute.
const NOTED: &[&str] = &[
    "chunk_size",
    "mamba_chunk_size",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_mamba_kernels",
];

/// Reads the sizes of the state spaces of a model with norms of `eps`, which are behind the gate.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn read(files: &Files<'_>, hidden: &Stated<usize>, eps: f32) -> Result<MambaOptions> {
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    let [heads, head_dim] = heads(files, hidden)?;
    let count = heads.within(1..=1 << 14)?;
    let groups = match keys.size(Key("mamba_n_groups", "ssm.group_count"))? {
        Some(groups) => groups.within(1..=1 << 14)?,
        None => 1,
    };
    if !count.is_multiple_of(groups) {
        return Err(heads.wrong(format!("a multiple of the {groups} groups"), count));
    }
    let head_dim = head_dim.within(1..=1 << 14)?;
    let bias = files.bias("mamba_proj_bias")?;
    let state = keys.needed(Key("mamba_d_state", "ssm.state_size"))?.within(1..=1 << 14)?;
    let kernel = keys.needed(Key("mamba_d_conv", "ssm.conv_kernel"))?.within(2..=1 << 8)?;
    Ok(MambaOptions {
        hidden: hidden.value,
        heads: count,
        groups,
        head_dim,
        state,
        kernel,
        limit: limit(files)?,
        bias,
        output_bias: bias,
        conv_bias: match keys.flag(Key("mamba_conv_bias", ""))? {
            Some(false) => Bias::Never,
            _ => Bias::IfStored,
        },
        norm: Some(GatedNorm { eps, groups, norm_first: false }),
        multipliers: MambaMultipliers::default(),
    })
}

/// The number of heads and the elements of a head: stated, or one of them what the other leaves of
/// the inner width.
fn heads(files: &Files<'_>, hidden: &Stated<usize>) -> Result<[Stated<usize>; 2]> {
    const HEADS: Key = Key("mamba_n_heads", "ssm.time_step_rank");
    const EACH: Key = Key("mamba_d_head", "");
    let keys = &files.keys;
    let inner = inner(files, hidden)?;
    let each = match keys.get(EACH).and_then(|value| value.as_str()) {
        Some("auto") => None,
        _ => keys.size(EACH)?,
    };
    let parts_of = |one: &Stated<usize>| match inner.value.is_multiple_of(one.value.max(1)) {
        true => Ok(inner.clone().map(|inner| inner / one.value.max(1))),
        false => {
            let expected = format!("a multiple of {} = {}", one.key(), one.value);
            Err(inner.wrong(expected, inner.value))
        }
    };
    Ok(match (keys.size(HEADS)?, each) {
        (Some(heads), Some(each)) => [heads, each],
        (Some(heads), None) => {
            let each = parts_of(&heads)?;
            [heads, each]
        }
        (None, Some(each)) => [parts_of(&each)?, each],
        (None, None) => [keys.needed(HEADS)?, inner],
    })
}

/// The inner width: stated, or a multiple of the residual stream's width.
///
/// # Errors
/// Values of another type, by key.
pub(crate) fn inner(files: &Files<'_>, hidden: &Stated<usize>) -> Result<Stated<usize>> {
    let keys = &files.keys;
    let stated = keys.size(Key("mamba_d_ssm", "ssm.inner_size"))?;
    let expand = keys.number_or(Key("mamba_expand", ""), 2.0)?;
    match stated {
        Some(inner) => Ok(inner),
        None => {
            let wide = expand.positive()? * hidden.value as f64;
            Ok(expand.map(|_| wide as usize))
        }
    }
}

/// The bounds of a step.
fn limit(files: &Files<'_>) -> Result<[f32; 2]> {
    const LIMIT: Key = Key("time_step_limit", "");
    let keys = &files.keys;
    let Some(value) = keys.get(LIMIT) else { return Ok(UNLIMITED) };
    let odd = || keys.odd(LIMIT, "the least and the greatest step", value);
    let one = |bound: &serde_json::Value| match bound.as_f64() {
        // As Transformers writes what JSON has no number for.
        None if bound.get("__float__").and_then(|n| n.as_str()) == Some("Infinity") => {
            Some(f32::MAX)
        }
        bound => bound.map(|bound| (bound as f32).clamp(0.0, f32::MAX)),
    };
    let bounds = value.as_array().map(|list| list.iter().map(one).collect::<Option<Vec<f32>>>());
    match bounds.flatten().as_deref() {
        Some(&[least, most]) if least <= most => Ok([least, most]),
        _ => Err(odd()),
    }
}

/// The layers of `layers` that are state spaces, by the names `kinds` of `layer_types`, or in GGUF
/// by their weights; all, where nothing is said.
///
/// # Errors
/// A list of another length, or with other names than these and those of attention.
pub(crate) fn layers(files: &Files<'_>, layers: &Stated<usize>) -> Result<Arc<[bool]>> {
    const TYPES: Key = Key("layer_types", "");
    let (keys, count) = (&files.keys, layers.within(1..=crate::config::LAYERS)?);
    if keys.dialect() == Dialect::Gguf {
        let held = |i: usize| files.names.find(&format!("blocks.{i}.mamba.decay"));
        return (0..count).map(|i| Ok(held(i)?.is_some())).collect();
    }
    let Some(types) = keys.get(TYPES) else { return Ok(vec![true; count].into()) };
    let list = types.as_array().ok_or_else(|| keys.odd(TYPES, "a list", types))?;
    if list.len() != count {
        return Err(keys.wrong(TYPES, format!("{count} entries, one for each layer"), list.len()));
    }
    // Both names of either are Transformers'.
    let one = |kind: &serde_json::Value| match kind.as_str() {
        Some("mamba" | "linear_attention") => Ok(true),
        Some("attention" | "full_attention") => Ok(false),
        _ => Err(keys.odd(TYPES, "mamba or attention", kind)),
    };
    list.iter().map(one).collect()
}

/// The mixer of a model some of whose `layers` are state spaces.
pub(crate) fn mixer(options: MambaOptions, layers: Arc<[bool]>) -> Mixer {
    Box::new(move |builder, _, i| {
        let mamba = || Mamba::new(builder, &format!("blocks.{i}.mamba"), &options);
        let layer = |mamba: Mamba| Box::new(move |x: &nn::Tensor| mamba.forward(x)) as Layer;
        Ok(layers[i].then(mamba).transpose()?.map(layer))
    })
}

/// A weight of a state space that is stored in another form: rows of one matrix, taps by channel,
/// logarithms, vectors as matrices.
///
/// # Errors
/// A weight that is stored in another shape.
pub(crate) fn part(
    weights: &dyn Weights,
    name: &str,
    options: &MambaOptions,
) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".mamba.") else { return Ok(None) };
    let (inner, groups) = (options.heads * options.head_dim, options.groups);
    let mixed = inner + 2 * groups * options.state;
    let all = inner + mixed + options.heads;
    let stored = |part: &str| format!("{block}.mamba.{part}");
    let (stem, suffix) = match part.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (part, ""),
    };
    let flat = |name: String, len: usize| {
        let Some(Stored { source, shape: dims }) = weights.find(&name)? else { return Ok(None) };
        if dims.iter().product::<usize>() != len {
            let error = Error::new(weights.place(&name), format!("{len} numbers"), shape(&dims));
            return Err(error.hint("the configuration does not fit these weights"));
        }
        Ok(Some(Stored { source: Source::Reshape(Box::new(source), vec![len]), shape: vec![len] }))
    };
    let rows = |start: usize, count: usize| {
        let expected: &[usize] = if suffix.is_empty() { &[all, options.hidden] } else { &[all] };
        phi3::rows(weights, &stored(&format!("in{suffix}")), expected, start, count)
    };
    match (stem, suffix) {
        ("z", _) => rows(0, inner),
        ("xbc", _) => rows(inner, mixed),
        ("dt", _) => rows(inner + mixed, options.heads),
        ("taps", ".bias") => weights.find(&stored("conv.bias")),
        ("taps", _) => turned(weights, &stored("conv"), [mixed, options.kernel]),
        ("decay", "") => {
            if let Some(log) = flat(stored("log_decay"), options.heads)? {
                return Ok(Some(Stored { source: Source::NegExp(Box::new(log.source)), ..log }));
            }
            flat(stored("decay"), options.heads)
        }
        ("skip", "") => flat(stored("skip"), options.heads),
        ("norm", "") => flat(stored("norm"), inner),
        _ => Ok(None),
    }
}

/// Numbers of channels `[channels, (1,) each]`, taps of MLX's folders `[channels, each, 1]`, as
/// `[each * channels]`.
///
/// # Errors
/// Numbers that are stored in another shape.
pub(crate) fn turned(
    weights: &dyn Weights,
    name: &str,
    [channels, each]: [usize; 2],
) -> Result<Option<Stored>> {
    let Some(Stored { source, shape: dims }) = weights.find(name)? else { return Ok(None) };
    if dims.first() != Some(&channels) || dims.iter().product::<usize>() != channels * each {
        let expected = format!("{channels} rows of {each}");
        let error = Error::new(weights.place(name), expected, shape(&dims));
        return Err(error.hint("the configuration does not fit these weights"));
    }
    let flat = Source::Reshape(Box::new(source), vec![channels, each]);
    let shape = vec![each * channels];
    let turned = Source::Reshape(Box::new(Source::Transpose(Box::new(flat))), shape.clone());
    Ok(Some(Stored { source: turned, shape }))
}

/// What [`turned`] was made of.
pub(crate) fn unturned(weight: &Weight) -> Option<(Source, Vec<usize>)> {
    let Source::Reshape(turned, _) = &weight.source else { return None };
    let Source::Transpose(flat) = &**turned else { return None };
    let Source::Reshape(_, shape) = &**flat else { return None };
    Some(((**flat).clone(), shape.clone()))
}

/// The taps `[kernel * channels]`, times a factor for the channels of `x`, of `B` and of `C`.
pub(crate) fn multiplied(taps: Stored, options: &MambaOptions, by: [f32; 3]) -> Stored {
    if by == [1.0; 3] {
        return taps;
    }
    let (inner, each) = (options.heads * options.head_dim, options.groups * options.state);
    let Stored { source, shape } = taps;
    let channels = inner + 2 * each;
    let rows = Source::Reshape(Box::new(source), vec![options.kernel, channels]);
    let part = |start, count, by| Source::Times(Box::new(rows.clone().columns(start, count)), by);
    // One below the other by channel, then by rows again.
    let turned = |source| Source::Transpose(Box::new(source));
    let all = [(0, inner, by[0]), (inner, each, by[1]), (inner + each, each, by[2])]
        .map(|(start, count, by)| turned(part(start, count, by)));
    let source = turned(Source::Concat(all.to_vec()));
    Stored { source: Source::Reshape(Box::new(source), shape.clone()), shape }
}

/// The groups of heads that a configuration states.
///
/// # Errors
/// Something else than a number.
pub(crate) fn groups(files: &Files<'_>) -> Result<usize> {
    let own = files.keys.object(AUTHORS)?;
    let all = [(Some(&files.keys), "mamba_n_groups"), (Some(&files.keys), "n_groups")];
    for (keys, key) in all.into_iter().chain([(own.as_ref(), "ngroups")]) {
        let keys = keys.filter(|keys| keys.mentions(key.into()));
        if let Some(groups) = keys.map(|keys| keys.size(key)).transpose()?.flatten() {
            return Ok(groups.value);
        }
    }
    let of_class = files.keys.size("mamba_n_groups")?.filter(|_| own.is_none());
    Ok(of_class.map_or(1, |groups| groups.value))
}

/// A weight of a state space as GGUF has it, and its shape; `None` for another weight. `groups` are
/// those of the norm.
pub(crate) fn exported(
    held: &[Weight],
    canonical: &str,
    groups: usize,
) -> Option<Option<(Source, Vec<usize>)>> {
    let (block, part) = canonical.split_once(".mamba.")?;
    let find = |part: &str| held.iter().find(|w| w.name == format!("{block}.mamba.{part}"));
    let (stem, suffix) = match part.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (part, ""),
    };
    if find("dt_in").is_some() {
        return Some(mamba1::exported(find, part));
    }
    let shaped = |weight: &Weight, shape: Vec<usize>| {
        (Source::Reshape(Box::new(weight.source.clone()), shape.clone()), shape)
    };
    Some(match (stem, suffix) {
        ("in", _) => {
            let one = |part: &str| find(&format!("{part}{suffix}"));
            let parts = ["z", "xbc", "dt"].iter().map(|part| one(part)).collect::<Option<Vec<_>>>();
            parts.map(|parts| {
                let mut shape = parts[0].shape.clone();
                shape[0] = parts.iter().map(|part| part.shape[0]).sum();
                (Source::Concat(parts.iter().map(|part| part.source.clone()).collect()), shape)
            })
        }
        ("conv", ".bias") => find("taps.bias").map(|w| (w.source.clone(), w.shape.clone())),
        ("conv", _) => find("taps").and_then(unturned),
        ("decay" | "skip", "") => find(stem).map(|weight| shaped(weight, vec![weight.shape[0], 1])),
        ("norm", "") => {
            find(stem).map(|weight| shaped(weight, vec![groups, weight.shape[0] / groups.max(1)]))
        }
        _ => find(part).map(|weight| (weight.source.clone(), weight.shape.clone())),
    })
}

/// GGUF's settings of a model with state spaces that have no key in `config.json`, or another form
/// there.
pub(crate) fn metadata(config: &Config, held: &[Weight]) -> Vec<(&'static str, MetadataValue)> {
    let of = |i: usize, part: &str| {
        held.iter().find(|weight| weight.name == format!("blocks.{i}.mamba.{part}"))
    };
    let Some(inner) = (0..config.layers).find_map(|i| of(i, "z")) else { return Vec::new() };
    let mut all = vec![("ssm.inner_size", MetadataValue::U32(inner.shape[0] as u32))];
    // Of heads, or of the row that steps are made of.
    let rank = (0..config.layers).find_map(|i| of(i, "dt_in").or(of(i, "dt")));
    let rank = rank.map(|dt| MetadataValue::U32(dt.shape[0] as u32));
    all.extend(rank.map(|rank| ("ssm.time_step_rank", rank)));
    // Nothing attends.
    if config.heads == 0 {
        return all;
    }
    let attends =
        |i: usize| held.iter().any(|weight| weight.name == format!("blocks.{i}.attention.q"));
    let heads = |i: usize| if attends(i) { config.kv_heads as i32 } else { 0 };
    let heads = (0..config.layers).map(heads).collect();
    let feeds = |i: usize| held.iter().any(|w| w.name.starts_with(&format!("blocks.{i}.mlp.")));
    // A list would say that some do not.
    if (0..config.layers).all(attends) {
        return all;
    }
    all.push(("attention.head_count_kv", MetadataValue::Array(MetadataArray::I32(heads))));
    // Of Jamba it is known that nothing turns.
    if (0..config.layers).any(|i| of(i, "dt_in").is_some()) {
        return all;
    }
    all.push(("rope.scaling.finetuned", MetadataValue::Bool(config.rope.is_some())));
    // Where a block is one thing, this says which have a feed-forward.
    if !(0..config.layers).all(feeds) {
        let width = |i: usize| if feeds(i) { config.feed_forward as i32 } else { 0 };
        let widths = (0..config.layers).map(width).collect();
        all.push(("feed_forward_length", MetadataValue::Array(MetadataArray::I32(widths))));
        let head_dim = MetadataValue::U32(config.head_dim as u32);
        all.push(("attention.key_length", head_dim.clone()));
        all.push(("attention.value_length", head_dim));
    }
    if config.rope.is_none() {
        // Nothing turns; llama.cpp wants it said.
        let width = (config.hidden / config.heads.max(1)) as u32;
        all.push(("rope.dimension_count", MetadataValue::U32(width)));
    }
    all
}
