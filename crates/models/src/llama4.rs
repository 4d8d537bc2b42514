//! Llama 4's text (Meta 2025): Llama with a mixture in some blocks, whose experts read rows
//! multiplied by their odds, beside one that every token goes through. Rows of q and k are made of
//! one length, and every fourth layer knows no positions. Rotated layers attend in chunks of 8,192
//! positions, and the others stretch their queries by position.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, llama};
use formats::{Error, Result, Source};
use nn::{
    AttentionOptions, Bias, MixtureOfExperts, Mlp, Odds, Pairing, QkNorm, Stored, Stretch, Weights,
};

const NAMES: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.feed_forward.router", "blk.{}.ffn_gate_inp"),
    ("blocks.{}.mlp.experts.gate_up", "model.layers.{}.feed_forward.experts.gate_up_proj!", ""),
    (
        "blocks.{}.mlp.experts.gate",
        "model.layers.{}.feed_forward.experts.gate_proj",
        "blk.{}.ffn_gate_exps",
    ),
    (
        "blocks.{}.mlp.experts.up",
        "model.layers.{}.feed_forward.experts.up_proj",
        "blk.{}.ffn_up_exps",
    ),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.feed_forward.experts.down_proj!",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.down", "model.layers.{}.feed_forward.experts.down_proj", ""),
    (
        "blocks.{}.mlp.shared.gate",
        "model.layers.{}.feed_forward.shared_expert.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    (
        "blocks.{}.mlp.shared.up",
        "model.layers.{}.feed_forward.shared_expert.up_proj",
        "blk.{}.ffn_up_shexp",
    ),
    (
        "blocks.{}.mlp.shared.down",
        "model.layers.{}.feed_forward.shared_expert.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Llama 4, its text",
    name: "llama4",
    gguf: "llama4",
    class: "Llama4ForCausalLM",
    unsaid: Unsaid::sizes([5120, 8192, 48, 40, 8, 0, 131_072, 202_048])
        .theta(500_000.0)
        .eps(1e-5)
        .numbers(&[
            ("intermediate_size_mlp", 16_384),
            ("num_experts_per_tok", 1),
            ("num_local_experts", 16),
        ]),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: true,
    open,
};

/// The chunk size of all published models, which GGUF does not state.
const CHUNK: usize = 8192;
const STRETCH: f64 = 0.1;
const EVERY: usize = 4;
/// The larger model's experts, by which GGUF's readers tell that it has no norms of q and k.
const MAVERICK: usize = 128;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let hugging_face = keys.dialect() == Dialect::HuggingFace;
    let mut raw = Raw::read(files)?;
    raw.pairing = Pairing::Adjacent;
    let width = raw.feed_forward.clone();
    if hugging_face {
        raw.feed_forward = keys.needed("intermediate_size_mlp")?;
    }
    let layers = raw.layers.within(1..=LAYERS)?;
    let (turned, sparse) = (rotated(files, layers)?, sparse(files, layers)?);
    let bias = files.bias("attention_bias")?;
    // Noise on scores, for training.
    keys.number(Key("router_jitter_noise", ""))?;
    let (chunks, stretch) = (chunks(files, &turned)?, stretch(files)?);
    let config = raw.check()?;
    let count = experts::count(keys)?;
    let normed = match hugging_face {
        true => keys.flag("use_qk_norm")?.unwrap_or(true),
        false => count != MAVERICK,
    };
    let mut options = experts::read(files, config.hidden, width.within(1..=1 << 20)?)?;
    options.routing.odds = Odds::Sigmoid;
    options.weighs_inputs = true;
    let attention = move |config: &Config, layer: usize| {
        let (plain, normed) = (config.attention(layer), normed && turned[layer]);
        let rope = plain.rope.clone().filter(|_| turned[layer]);
        AttentionOptions {
            qkv_bias: bias,
            output_bias: bias,
            qk_norm: if normed { QkNorm::Heads(config.norm_eps) } else { QkNorm::None },
            // A rotation leaves lengths as they are, unless it has a magnitude.
            rotates_first: rope.as_ref().is_some_and(|rope| rope.magnitude != 1.0),
            rope,
            window: chunks[layer],
            chunked: chunks[layer].is_some(),
            stretch: stretch.filter(|_| !turned[layer]),
            ..plain
        }
    };
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        if !sparse[i] {
            return decoder::gated(builder, config, i, Bias::Never);
        }
        let (name, sizes) = (format!("blocks.{i}.mlp"), [options.hidden, options.feed_forward]);
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        let one = Mlp::new(builder, &format!("{name}.shared"), sizes, Bias::Never, config.gate)?;
        Ok(Box::new(move |x| experts.forward(x).add(&one.forward(x))))
    });
    let parts = decoder::Parts { feed_forward, ..decoder::Parts::new(Bias::Never, attention) };
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| {
        made(weights, name, (count, config.head_dim), hugging_face)
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// Which layers are rotated.
fn rotated(files: &Files<'_>, layers: usize) -> Result<Vec<bool>> {
    let keys = &files.keys;
    let usual = |every: usize| (0..layers).map(|i| !(i + 1).is_multiple_of(every)).collect();
    if keys.dialect() == Dialect::Gguf {
        let chunked = keys.size(Key("", "attention.sliding_window"))?;
        let none = chunked.is_some_and(|chunk| chunk.value == 0);
        return Ok(usual(if none { LAYERS + 1 } else { EVERY }));
    }
    let every = keys.size("no_rope_layer_interval")?;
    let every = every.map_or(Ok(EVERY), |every| every.within(1..=LAYERS))?;
    match keys.numbers("no_rope_layers")? {
        Some(list) if list.len() == layers => Ok(list.iter().map(|turns| *turns != 0.0).collect()),
        Some(list) if !list.is_empty() => {
            let expected = format!("{layers} entries, one for each layer");
            Err(keys.wrong("no_rope_layers", expected, list.len()))
        }
        _ => Ok(usual(every)),
    }
}

/// Which blocks have experts.
fn sparse(files: &Files<'_>, layers: usize) -> Result<Vec<bool>> {
    const STEP: Key = Key("interleave_moe_layer_step", "interleave_moe_layer_step");
    let keys = &files.keys;
    let step = keys.size(STEP)?.map_or(Ok(1), |step| step.within(1..=LAYERS))?;
    let by_step = |i: usize| (i + 1).is_multiple_of(step);
    let listed = match keys.dialect() {
        Dialect::HuggingFace => keys.numbers("moe_layers")?,
        Dialect::Gguf => None,
    };
    let has = |i: usize| match &listed {
        Some(list) => list.contains(&(i as f32)),
        None => by_step(i),
    };
    Ok((0..layers).map(has).collect())
}

/// The chunk of each layer that attends in chunks: those that are rotated, unless `layer_types`
/// lists others.
fn chunks(files: &Files<'_>, turned: &[bool]) -> Result<Vec<Option<usize>>> {
    let keys = &files.keys;
    let size = keys.size(Key("attention_chunk_size", ""))?;
    let size = size.map_or(Ok(CHUNK), |size| size.within(1..=1 << 28))?;
    let none = keys.dialect() == Dialect::Gguf && turned.iter().all(|turned| *turned);
    let listed = keys.get("layer_types").and_then(|list| list.as_array());
    if let Some(list) = listed.filter(|list| list.len() != turned.len()) {
        let expected = format!("{} entries, one for each layer", turned.len());
        return Err(keys.wrong("layer_types", expected, list.len()));
    }
    let in_chunks = |i: usize| match listed {
        Some(list) => list[i].as_str() == Some("chunked_attention"),
        None => turned[i] && !none,
    };
    Ok((0..turned.len()).map(|i| in_chunks(i).then_some(size)).collect())
}

/// How queries of layers that are not rotated grow with their positions, if they do.
fn stretch(files: &Files<'_>) -> Result<Option<Stretch>> {
    let keys = &files.keys;
    let step = keys.size(Key("floor_scale", ""))?;
    let step = step.map_or(Ok(CHUNK), |step| step.within(1..=1 << 28))? as u32;
    let by = keys.number_or(Key("attn_scale", ""), STRETCH)?.value as f32;
    // Older files have a number there.
    let on = keys.get("attn_temperature_tuning");
    let on = on.is_none_or(|on| on.as_bool().unwrap_or(on.as_f64() != Some(0.0)));
    Ok(on.then_some(Stretch { by, step, ahead: 1 }))
}

/// Weights that are made of others: lengths of q and k, which are 1; experts, which Hugging Face
/// stores the other way round than everywhere else, each one's gate beside its up. MLX's folders
/// have three stacks, as GGUF does.
fn made(
    weights: &dyn Weights,
    name: &str,
    (count, head_dim): (usize, usize),
    hugging_face: bool,
) -> Result<Option<Stored>> {
    if name.ends_with(".q_norm") || name.ends_with(".k_norm") {
        let source = Source::Plus(Box::new(Source::Zeros(vec![head_dim])), 1.0);
        return Ok(Some(Stored { source, shape: vec![head_dim] }));
    }
    let Some((block, part)) = name.split_once(".experts.").filter(|_| hugging_face) else {
        return experts::joined(weights, name, count);
    };
    if weights.find(&format!("{block}.experts.gate"))?.is_some() {
        return experts::joined(weights, name, count);
    }
    let gate_up = matches!(part, "gate" | "up");
    let stored = match gate_up {
        true => weights.find(&format!("{block}.experts.gate_up"))?,
        false => weights.find(name)?,
    };
    let Some(Stored { source, mut shape }) = stored.filter(|stored| stored.shape.len() == 3) else {
        return Ok(None);
    };
    shape.swap(1, 2);
    let turned = Stored { source: Source::Transpose(Box::new(source)), shape };
    let Stored { source, mut shape } = experts::flat(weights, name, turned)?;
    if !gate_up {
        return Ok(Some(Stored { source, shape }));
    }
    let each = shape[0] / 2 / count.max(1);
    if shape[0] != 2 * each * count {
        let expected = format!("the gates and ups of {count} experts");
        return Err(Error::new(weights.place(name), expected, formats::shape(&shape)));
    }
    shape[0] = count * each;
    let apart = Source::Permute(Box::new(source), [1, count, 2, each]);
    let start = if part == "gate" { 0 } else { shape[0] };
    Ok(Some(Stored { source: apart.rows(start, shape[0]), shape }))
}
