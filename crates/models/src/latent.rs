//! Multi-head latent attention as configurations and files state it.
//!
//! GGUF files of today have the matrices of keys and of values apart, the key matrices transposed
//! for readers that multiply queries with them; files from before April 2025 have both in one, as
//! checkpoints do. Newer ones state sizes of the cached latents under the keys of heads, and of
//! heads under keys of their own.

use crate::config::{Config, LAYERS, Raw};
use crate::decoder::Mixer;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::rope::{Scaling, Yarn};
use crate::scaling::{LOG_MULTIPLIER, yarn_magnitude};
use crate::stated::Stated;
use crate::unsaid::Numbers;
use formats::gguf::MetadataValue;
use formats::{Result, Source};
use nn::{LatentAttention, LatentOptions, Pairing, Stored, Weights};
use program::Weight;

pub(crate) const NAMES: &[Row] = &[
    ("blocks.{}.attention.q_a", "model.layers.{}.self_attn.q_a_proj", "blk.{}.attn_q_a"),
    (
        "blocks.{}.attention.q_a_norm",
        "model.layers.{}.self_attn.q_a_layernorm",
        "blk.{}.attn_q_a_norm",
    ),
    ("blocks.{}.attention.q_b", "model.layers.{}.self_attn.q_b_proj", "blk.{}.attn_q_b"),
    (
        "blocks.{}.attention.kv_a",
        "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "blk.{}.attn_kv_a_mqa",
    ),
    (
        "blocks.{}.attention.kv_a_norm",
        "model.layers.{}.self_attn.kv_a_layernorm",
        "blk.{}.attn_kv_a_norm",
    ),
    ("blocks.{}.attention.kv_b", "model.layers.{}.self_attn.kv_b_proj", "blk.{}.attn_kv_b"),
    // As mlx-lm has them, too.
    ("blocks.{}.attention.k_b", "model.layers.{}.self_attn.embed_q", "blk.{}.attn_k_b"),
    ("blocks.{}.attention.v_b", "model.layers.{}.self_attn.unembed_out", "blk.{}.attn_v_b"),
];

/// Sizes that many classes share.
pub(crate) const NUMBERS: Numbers = &[
    ("kv_lora_rank", 512),
    ("qk_nope_head_dim", 128),
    ("qk_rope_head_dim", 64),
    ("v_head_dim", 128),
];

/// Added in the norms of latents, whatever the other norms add.
const NORM_EPS: f32 = 1e-6;
/// Most elements of a part of a head, and of a latent.
const LIMIT: usize = 1 << 14;

/// Elements of a query or key that turn.
const TURNED: Key = Key("qk_rope_head_dim", "rope.dimension_count");

/// The numbers of a decoder whose attention is latent, of which the rotated part of a head is the
/// head for now.
///
/// # Errors
/// As [`Raw::read`].
pub(crate) fn raw(files: &Files<'_>) -> Result<Raw> {
    let keys = &files.keys;
    // Further names of sizes that follow from others.
    for key in ["head_dim", "qk_head_dim"] {
        if keys.dialect() == Dialect::HuggingFace {
            keys.note(key);
        }
    }
    let turned = keys.needed(TURNED)?;
    let turned_width = turned.within(1..=LIMIT)?;
    let mut raw = Raw::read_turned(files, turned.map(|_| turned_width))?;
    if keys.dialect() == Dialect::HuggingFace && raw.kv_heads.value != raw.heads.value {
        let expected = format!("{}, as many as query heads", raw.heads.value);
        return Err(raw.kv_heads.wrong(expected, raw.kv_heads.value));
    }
    raw.kv_heads = raw.heads.clone();
    Ok(raw)
}

/// The configuration of such a decoder, and of its attention.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn read(files: &Files<'_>, mut raw: Raw) -> Result<(Config, LatentOptions)> {
    let keys = &files.keys;
    let size = |stated: Stated<usize>| stated.within(1..=LIMIT);
    // MiniCPM 3 leaves values of the usual size out.
    let usual_value = || match is_form(files.architecture.gguf) {
        true => None,
        false => Some(raw.hidden.clone().map(|hidden| hidden / raw.heads.value.max(1))),
    };
    let turned = size(keys.needed(TURNED)?)?;
    let (plain, value) = match keys.dialect() {
        Dialect::HuggingFace => {
            let value = keys.size("v_head_dim")?.or_else(usual_value);
            let missing = || keys.wrong("v_head_dim", "a whole number", "nothing");
            (size(keys.needed("qk_nope_head_dim")?)?, size(value.ok_or_else(missing)?)?)
        }
        Dialect::Gguf => {
            let either = |own: &'static str, older: &'static str, usual: Option<Stated<usize>>| {
                let older = keys.size(Key("", older))?.or(usual);
                let missing = || keys.wrong(Key("", own), "a whole number", "nothing");
                keys.size(Key("", own))?.or(older).ok_or_else(missing)
            };
            let key = either("attention.key_length_mla", "attention.key_length", None)?;
            let usual = usual_value();
            let value = either("attention.value_length_mla", "attention.value_length", usual)?;
            if key.value <= turned {
                let expected = format!("more than the {turned} elements that turn");
                return Err(key.wrong(expected, key.value));
            }
            (size(key)? - turned, size(value)?)
        }
    };
    let rank = size(keys.needed(Key("kv_lora_rank", "attention.kv_lora_rank"))?)?;
    let query_rank = keys.size(Key("q_lora_rank", "attention.q_lora_rank"))?;
    let query_rank = query_rank.filter(|rank| rank.value > 0).map(size).transpose()?;
    let scale = scale(files, &mut raw, plain + turned)?;
    let bias = files.bias("attention_bias")?;
    let count = raw.layers.value.min(LAYERS);
    // In hybrids the first blocks have other mixers.
    let stored = |part: &str| -> Result<bool> {
        for i in 0..count {
            if files.names.find(&format!("blocks.{i}.attention.{part}"))?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let stored_apart = !stored("kv_b")? && stored("k_b")?;
    let apart = stored_apart || files.apart && is_form(files.architecture.gguf);
    let mut config = raw.check()?;
    config.head_dim = plain + turned;
    config.latents = true;
    let rope = config.rope.clone();
    let (hidden, heads) = (config.hidden, config.heads);
    let options = LatentOptions {
        hidden,
        heads,
        query_rank,
        rank,
        plain,
        turned,
        value,
        bias,
        norm_eps: NORM_EPS,
        rope,
        scale,
        stretch: None,
        apart,
        shared: false,
        gated: false,
        chosen: None,
    };
    let shared = LatentOptions { shared: true, ..options.clone() };
    let smaller = shared.head_dim() < heads * options.head_dim();
    let fits = files.latents.is_some_and(|most| shared.head_dim() <= most);
    Ok((config, LatentOptions { shared: fits && smaller, ..options }))
}

/// The factor on scores of queries of `width` elements, which a stretched context makes larger.
/// GGUF's number is a tenth of what others of its architectures say under that key, and
/// leaves sines and cosines as they are.
fn scale(files: &Files<'_>, raw: &mut Raw, width: usize) -> Result<f32> {
    let keys = &files.keys;
    let plain = 1.0 / (width as f64).sqrt();
    let Some(rotation) = &mut raw.rotation else { return Ok(plain as f32) };
    let Scaling::Yarn(yarn) = &mut rotation.scaling.value else { return Ok(plain as f32) };
    let weight = match keys.dialect() {
        Dialect::Gguf => {
            let log = keys.number(Key("", LOG_MULTIPLIER))?.map_or(0.0, |log| log.value);
            let usual = yarn_magnitude(yarn.factor, log);
            // Written as a multiple of a tenth in f32.
            let weight = (log * 10.0 * 1e6).round() / 1e6;
            yarn.magnitude *= usual_magnitude(yarn.factor, weight) / usual;
            weight
        }
        Dialect::HuggingFace => weight_of_logarithm(files)?.unwrap_or(0.0),
    };
    let magnitude = Yarn::magnitude(yarn.factor, weight);
    Ok((plain * magnitude * magnitude) as f32)
}

/// The weight of the stretched context's logarithm in the factor on scores, as `config.json` says
/// it; none where it says nothing.
fn weight_of_logarithm(files: &Files<'_>) -> Result<Option<f64>> {
    let rope = match files.keys.object("rope_parameters")? {
        Some(rope) => Some(rope),
        None => files.keys.object("rope_scaling")?,
    };
    let Some(rope) = rope else { return Ok(None) };
    Ok(rope.number(Key("mscale_all_dim", ""))?.map(|number| number.value))
}

/// The magnitude of sines and cosines that readers of GGUF take where the logarithm has this weight
/// in the factor on scores.
pub(crate) fn usual_magnitude(factor: f64, weight: f64) -> f64 {
    if weight == 0.0 { Yarn::magnitude(factor, 1.0) } else { 1.0 }
}

/// GGUF's name of most architectures that have it, and of others of the same form.
pub(crate) const GGUF: &str = "deepseek2";
pub(crate) const MISTRAL4: &str = "mistral4";
pub(crate) const KIMI: &str = "kimi-linear";

/// GGUF's names of those with an indexer.
pub(crate) const DEEPSEEK32: &str = "deepseek32";
pub(crate) const GLM_DSA: &str = "glm-dsa";

/// Whether GGUF has the architecture of this name in the latent form.
pub(crate) fn is_form(name: &str) -> bool {
    [GGUF, MISTRAL4, KIMI, DEEPSEEK32, GLM_DSA].contains(&name)
}

/// GGUF's name of the one that has both matrices in one.
pub(crate) const THIRD: &str = "minicpm3";
/// The same of PLM.
pub(crate) const PLM: &str = "plm";

/// Such attention in every block.
pub(crate) fn mixer(options: LatentOptions) -> Mixer {
    Box::new(move |builder, _, i| {
        let attention = LatentAttention::new(builder, &format!("blocks.{i}.attention"), &options)?;
        Ok(Some(Box::new(move |x| attention.forward(x))))
    })
}

/// How elements turn: side by side, but where `config.json` says that they lie in halves.
///
/// # Errors
/// Something else than true or false.
pub(crate) fn pairing(files: &Files<'_>) -> Result<Pairing> {
    const BESIDE: &str = "rope_interleave";
    let unsaid = !files.keys.is_null(BESIDE); // A null is no.
    let beside = files.keys.flag(Key(BESIDE, ""))?.unwrap_or(unsaid);
    Ok(if beside { Pairing::Adjacent } else { Pairing::Half })
}

/// The numbers of heads, and of the elements of a key that do not turn and of a value.
#[derive(Clone, Copy)]
pub(crate) struct Heads([usize; 3]);

impl Heads {
    pub(crate) fn of(options: &LatentOptions) -> Heads {
        Heads([options.heads, options.plain, options.value])
    }
}

/// The key matrices (`k_b`) or value matrices (`v_b`) of all heads, one below the other, or key
/// matrices transposed (`embed_q`); none for another name. Key matrices that are stored by themselves
/// are stored transposed; quantised ones are decoded to be turned.
///
/// # Errors
/// Tensors that do not fit the name.
pub(crate) fn part(weights: &dyn Weights, name: &str, heads: Heads) -> Result<Option<Stored>> {
    let Some((block, part)) = name.rsplit_once(".attention.") else { return Ok(None) };
    if !["k_b", "v_b", EMBED_Q].contains(&part) {
        return Ok(None);
    }
    let stored = if part == EMBED_Q { "k_b" } else { part };
    let Some(Stored { source, shape }) = weights.find(&format!("{block}.attention.{stored}"))?
    else {
        let whole = weights.find(&format!("{block}.attention.kv_b"))?;
        let taken = whole.and_then(|whole| taken(whole, stored, heads));
        return Ok(match part {
            EMBED_Q => taken.and_then(|keys| transposed(keys, heads)),
            _ => taken,
        });
    };
    let [heads, a, b] = shape[..] else { return Ok(Some(Stored { source, shape })) };
    let (source, rows, columns) = match part {
        "k_b" => (Source::Transpose(Box::new(Source::Decoded(Box::new(source)))), b, a),
        _ => (source, a, b),
    };
    let shape = vec![heads.saturating_mul(rows), columns];
    Ok(Some(Stored { source: Source::Reshape(Box::new(source), shape.clone()), shape }))
}

/// The part of a block's attention that is the key matrices of heads, transposed.
const EMBED_Q: &str = "embed_q";

/// Each head's key matrix, `[plain, rank]`, transposed; quantised ones are decoded.
fn transposed(keys: Stored, Heads([heads, plain, _]): Heads) -> Option<Stored> {
    let [_, rank] = keys.shape[..] else { return None };
    let source = Source::Reshape(Box::new(keys.source), vec![heads, plain, rank]);
    let source = if source.is_quantised() { Source::Decoded(Box::new(source)) } else { source };
    let shape = vec![heads * rank, plain];
    let source = Source::Reshape(Box::new(Source::Transpose(Box::new(source))), shape.clone());
    Some(Stored { source, shape })
}

/// The key rows or the value rows of `kv_b`, in which each head has its keys and then its values;
/// none if its shape is another.
fn taken(whole: Stored, part: &str, Heads([heads, plain, value]): Heads) -> Option<Stored> {
    let [rows, rank] = whole.shape[..] else { return None };
    if rows != heads.checked_mul(plain + value)? {
        return None;
    }
    let (first, count) = if part == "k_b" { (0, plain) } else { (plain, value) };
    let of_head = |h: usize| whole.source.clone().rows(h * (plain + value) + first, count);
    let source = Source::Concat((0..heads).map(of_head).collect());
    Some(Stored { source, shape: vec![heads * count, rank] })
}

/// GGUF's metadata of latent attention, below the prefix: the lengths of keys and values, both in
/// the latent form, in which queries are multiplied with the key matrices, and of single heads;
/// `held` are the model's weights.
pub(crate) fn metadata(
    files: &Files<'_>,
    config: &Config,
    held: &[Weight],
) -> Result<Vec<(&'static str, MetadataValue)>> {
    let architecture = config.architecture.gguf;
    let whole = [THIRD, PLM].contains(&architecture);
    if !is_form(architecture) && !whole {
        return Ok(Vec::new());
    }
    let size = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let find = |part: &str| held.iter().find(|weight| weight.name.ends_with(part));
    let rank = find(".attention.kv_a_norm").map_or(0, |norm| norm.shape.iter().product());
    let value = find(".attention.o").and_then(|o| o.shape.last());
    let value = value.map_or(0, |all| all / config.heads.max(1));
    let turned = find(".attention.kv_a").map_or(0, |both| both.shape[0].saturating_sub(rank));
    if whole {
        return Ok(vec![("attention.value_length", size(value))]);
    }
    let mut all = vec![
        ("attention.key_length", size(rank + turned)),
        ("attention.key_length_mla", size(config.head_dim)),
        ("attention.value_length_mla", size(value)),
    ];
    match (architecture, files.keys.size("head_dim")?) {
        // The converter writes what nothing reads.
        (KIMI, head_dim) => {
            all.push(("attention.value_length", size(head_dim.map_or(rank, |size| size.value))));
        }
        _ => all
            .extend([("attention.head_count_kv", size(1)), ("attention.value_length", size(rank))]),
    }
    if let Some(weight) = weight_of_logarithm(files)? {
        all.push((LOG_MULTIPLIER, MetadataValue::F32((0.1 * weight) as f32)));
    }
    Ok(all)
}

/// A matrix as GGUF stores it, and its shape: key matrices or value matrices, `[heads, rows,
/// columns]`, key matrices transposed; queries and latents with the rows that turn together next to
/// each other, where the model has halves. None for other weights.
pub(crate) fn exported(
    held: &[Weight],
    canonical: &str,
    config: &Config,
) -> Option<(Source, Vec<usize>)> {
    let part = canonical.rsplit_once(".attention.")?.1;
    let weight = held.iter().find(|weight| weight.name == canonical)?;
    let rope = config.rope.as_ref().filter(|rope| rope.pairing == Pairing::Half);
    let halves = rope.filter(|_| is_form(config.architecture.gguf));
    let turned = halves.map(|rope| 2 * rope.frequencies.len());
    match (part.trim_end_matches(".bias"), turned) {
        ("k_b" | "v_b", _) => apart(weight, part, config.heads),
        ("q" | "q_b", Some(turned)) => beside(weight, config.head_dim, turned),
        ("kv_a", Some(turned)) => beside(weight, weight.shape[0], turned),
        _ => None,
    }
}

/// The key matrices or value matrices of each head.
fn apart(weight: &Weight, part: &str, heads: usize) -> Option<(Source, Vec<usize>)> {
    let [rows, rank] = weight.shape[..] else { return None };
    let shape = vec![heads, rows / heads.max(1), rank];
    let source = Source::Reshape(Box::new(weight.source.clone()), shape.clone());
    if part == "v_b" {
        return Some((source, shape));
    }
    let source = if source.is_quantised() { Source::Decoded(Box::new(source)) } else { source };
    Some((Source::Transpose(Box::new(source)), vec![heads, rank, shape[1]]))
}

/// A weight of which the last `turned` rows of each `size` turn, one half of them with the other:
/// these by turns.
fn beside(weight: &Weight, size: usize, turned: usize) -> Option<(Source, Vec<usize>)> {
    let plain = size.checked_sub(turned)?;
    let rows = |start: usize, count: usize| weight.source.clone().rows(start, count);
    let of_head = |start: usize| {
        let halves = Box::new(rows(start + plain, turned));
        [rows(start, plain), Source::Permute(halves, [1, 2, turned / 2, 1])]
    };
    let parts = (0..weight.shape[0]).step_by(size.max(1)).flat_map(of_head);
    Some((Source::Concat(parts.collect()), weight.shape.clone()))
}
