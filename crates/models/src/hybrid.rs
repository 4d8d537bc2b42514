//! The parts that Qwen's hybrids share: most layers are gated delta nets, the others attention
//! whose output goes through a gate; norms of `1 + w`, except in the nets; a quarter of each head
//! rotated.

use crate::config::{Config, LAYERS, Raw};
use crate::decoder::{self, Layer, Mixer};
use crate::files::Files;
use crate::gemma2::norm;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Numbers;
use formats::{Error, Result, Source, shape};
use nn::{
    AttentionOptions, Bias, DeltaNetOptions, Forgetting, GatedDeltaNet, QkNorm, Stored, Unary,
    Weights,
};
use std::sync::Arc;

mod export;

pub(crate) use export::{exported, metadata, sections, together};

/// The names of the nets, of attention's joined matrix, and of what GGUF calls otherwise here.
pub(crate) const NAMES: &[Row] = &[
    (
        "blocks.{}.mlp_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    ("blocks.{}.attention.q_gate", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.delta.qkvz", "model.layers.{}.linear_attn.in_proj_qkvz", ""),
    ("blocks.{}.delta.ba", "model.layers.{}.linear_attn.in_proj_ba", "blk.{}.ssm_ba"),
    ("blocks.{}.delta.qkv", "model.layers.{}.linear_attn.in_proj_qkv", "blk.{}.attn_qkv"),
    ("blocks.{}.delta.z", "model.layers.{}.linear_attn.in_proj_z", "blk.{}.attn_gate"),
    ("blocks.{}.delta.a", "model.layers.{}.linear_attn.in_proj_a", "blk.{}.ssm_alpha"),
    ("blocks.{}.delta.b", "model.layers.{}.linear_attn.in_proj_b", "blk.{}.ssm_beta"),
    ("blocks.{}.delta.conv", "model.layers.{}.linear_attn.conv1d", "blk.{}.ssm_conv1d"),
    ("blocks.{}.delta.log_decay", "model.layers.{}.linear_attn.A_log!", ""),
    ("blocks.{}.delta.decay", "", "blk.{}.ssm_a!"),
    ("blocks.{}.delta.dt", "model.layers.{}.linear_attn.dt_bias!", "blk.{}.ssm_dt.bias!"),
    ("blocks.{}.delta.norm", "model.layers.{}.linear_attn.norm", "blk.{}.ssm_norm"),
    ("blocks.{}.delta.o", "model.layers.{}.linear_attn.out_proj", "blk.{}.ssm_out"),
];

/// Sizes that their classes share.
pub(crate) const NUMBERS: Numbers = &[
    ("head_dim", 256),
    ("linear_conv_kernel_dim", 4),
    ("linear_key_head_dim", 128),
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("linear_value_head_dim", 128),
];

/// The hybrid whose projections are stored together.
pub(crate) const NEXT: &str = "qwen3_next";

/// A hybrid's configuration.
pub(crate) struct Hybrid {
    pub(crate) config: Config,
    /// The nets.
    net: DeltaNetOptions,
    /// Whether each layer is a net.
    nets: Arc<[bool]>,
    /// Biases of attention.
    bias: Bias,
    /// Whether the file is GGUF, whose norms are stored as they are used.
    gguf: bool,
}

impl Hybrid {
    /// Reads all but the feed-forwards.
    ///
    /// # Errors
    /// A key that is missing or out of range.
    pub(crate) fn read(files: &Files<'_>) -> Result<Hybrid> {
        let keys = &files.keys;
        let mut raw = Raw::read_silu(files)?;
        let rotation = raw.rotation.as_mut().filter(|rotation| rotation.is_open());
        if let (Some(rotation), Some(head_dim)) = (rotation, &raw.head_dim) {
            rotation.rotary = Some(head_dim.clone().map(|head_dim| head_dim / 4));
        }
        for key in ["rope_parameters", "rope_scaling"] {
            // Which pairs turn by an image's rows and columns: in a text all positions are one.
            let Some(rope) = keys.object(key)? else { continue };
            rope.note("mrope_section");
            rope.note("mrope_interleaved");
        }
        if keys.flag(Key("attn_output_gate", ""))? == Some(false) {
            return Err(keys.wrong("attn_output_gate", "true, as of this architecture", false));
        }
        keys.only(Key("mamba_ssm_dtype", ""), &["float32"])?;
        // Further heads, which guess tokens ahead: GGUF counts theirs among the blocks.
        keys.note("mtp_num_hidden_layers");
        if let Some(guessing) = keys.size(Key("", "nextn_predict_layers"))? {
            let guessing = guessing.within(0..=raw.layers.value.saturating_sub(1))?;
            raw.layers.value -= guessing;
        }
        keys.note("rope.dimension_sections");
        let nets = nets(files, &raw.layers)?;
        let gguf = keys.dialect() == Dialect::Gguf;
        let bias = files.bias("attention_bias")?;
        let mut config = raw.check()?;
        let net = net(files, config.hidden, config.norm_eps)?;
        // llama.cpp's converter takes them apart, or reorders heads that share keys.
        if config.architecture.name == NEXT || net.heads != net.key_heads {
            config.gguf_orders = &[".delta."];
        }
        Ok(Hybrid { config, net, nets, bias, gguf })
    }

    /// The parts of its decoder, with gated feed-forwards.
    pub(crate) fn parts(&self) -> decoder::Parts {
        let bias = self.bias;
        let attention = move |config: &Config, layer| AttentionOptions {
            qkv_bias: bias,
            output_bias: bias,
            qk_norm: QkNorm::Heads(config.norm_eps),
            output_gate: Some((Unary::Sigmoid, bias)),
            ..config.attention(layer)
        };
        let mixer = mixer(self.net, self.nets.clone());
        decoder::Parts { mixer, ..decoder::Parts::new(Bias::Never, attention) }
    }

    /// How weights are made of those that are stored.
    pub(crate) fn recipes(&self) -> impl Fn(&dyn Weights, &str) -> Result<Option<Stored>> + use<> {
        let (net, heads, head_dim) = (self.net, self.config.heads, self.config.head_dim);
        let (gguf, nets) = (self.gguf, self.nets.clone());
        move |weights: &dyn Weights, name: &str| {
            // GGUF and MLX have norms as they are used. MLX's folders are told by their taps,
            // `[channels, kernel, 1]` where Hugging Face has `[channels, 1, kernel]`.
            let less_one = || -> Result<bool> {
                let Some(net) = nets.iter().position(|net| *net) else { return Ok(!gguf) };
                let taps = weights.find(&format!("blocks.{net}.delta.conv"))?;
                Ok(!gguf && taps.is_none_or(|taps| taps.shape.last() != Some(&1)))
            };
            let Some((stem, part)) = name.rsplit_once('.') else {
                return norm(weights, name, less_one()?);
            };
            if let Some(block) = stem.strip_suffix(".delta") {
                return delta(weights, block, part, &net);
            }
            match (part, stem.strip_suffix(".attention")) {
                ("q" | "gate", Some(_)) => {
                    let part = if part == "q" { 0 } else { 1 };
                    by_turns(weights, &format!("{stem}.q_gate"), part, [heads, head_dim])
                }
                ("bias", None) if stem.ends_with(".attention.q") => {
                    by_turns(weights, &format!("{stem}_gate.bias"), 0, [heads, head_dim])
                }
                ("bias", None) if stem.ends_with(".attention.gate") => {
                    let name = stem.replace(".attention.gate", ".attention.q_gate.bias");
                    by_turns(weights, &name, 1, [heads, head_dim])
                }
                _ => norm(weights, name, less_one()?),
            }
        }
    }
}

/// The sizes of the nets of a model whose residual stream is `hidden` wide.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn net(files: &Files<'_>, hidden: usize, norm_eps: f32) -> Result<DeltaNetOptions> {
    let keys = &files.keys;
    let gguf = keys.dialect() == Dialect::Gguf;
    let heads = keys.needed(Key("linear_num_value_heads", "ssm.time_step_rank"))?;
    let key_heads = keys.needed(Key("linear_num_key_heads", "ssm.group_count"))?;
    let key_heads_within = key_heads.within(1..=1 << 12)?;
    if !heads.within(1..=1 << 12)?.is_multiple_of(key_heads_within) {
        let expected = format!("a multiple of {} = {key_heads_within}", key_heads.key());
        return Err(heads.wrong(expected, heads.value));
    }
    let value_dim = match gguf {
        false => keys.needed(Key("linear_value_head_dim", ""))?,
        true => {
            let all = keys.needed(Key("", "ssm.inner_size"))?;
            if !all.value.is_multiple_of(heads.value) {
                let expected = format!("a multiple of {} = {}", heads.key(), heads.value);
                return Err(all.wrong(expected, all.value));
            }
            all.map(|all| all / heads.value)
        }
    };
    let key_dim = keys.needed(Key("linear_key_head_dim", "ssm.state_size"))?;
    let kernel = keys.needed(Key("linear_conv_kernel_dim", "ssm.conv_kernel"))?;
    // llama.cpp's converter reorders the heads of Qwen3.5 alone.
    let tiled = gguf && heads.value != key_heads.value && files.architecture.name != NEXT;
    Ok(DeltaNetOptions {
        hidden,
        heads: heads.value,
        key_heads: key_heads.value,
        key_dim: key_dim.within(1..=1 << 12)?,
        value_dim: value_dim.within(1..=1 << 12)?,
        kernel: kernel.within(2..=1 << 8)?,
        norm_eps,
        tiled,
        doubled: false,
        forgetting: Forgetting::Heads,
        gate: Unary::Silu,
    })
}

/// The mixer of a model some of whose layers are nets.
pub(crate) fn mixer(net: DeltaNetOptions, nets: Arc<[bool]>) -> Mixer {
    Box::new(move |builder, _, i| {
        let made = || GatedDeltaNet::new(builder, &format!("blocks.{i}.delta"), &net);
        let layer = |net: GatedDeltaNet| Box::new(move |x: &nn::Tensor| net.forward(x)) as Layer;
        Ok(nets[i].then(made).transpose()?.map(layer))
    })
}

/// Whether each layer is a net: by `layer_types`, or all but every fourth; in GGUF by its weights.
///
/// # Errors
/// A list of another length, or of other kinds.
pub(crate) fn nets(files: &Files<'_>, layers: &Stated<usize>) -> Result<Arc<[bool]>> {
    let keys = &files.keys;
    if keys.dialect() == Dialect::Gguf {
        // The weights say it; the keys say it again.
        keys.note("full_attention_interval");
        keys.note("attention.recurrent_layers");
        let net = |layer: usize| files.names.find(&format!("blocks.{layer}.delta.decay"));
        let layers = 0..layers.value.min(LAYERS);
        return layers.map(|layer| Ok(net(layer)?.is_some())).collect();
    }
    let interval = keys.size(Key("full_attention_interval", ""))?;
    let interval = interval.map_or(Ok(4), |interval| interval.within(1..=LAYERS))?;
    let usual = || {
        let layers = layers.value.min(LAYERS);
        (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect()
    };
    Ok(listed_nets(files, layers)?.unwrap_or_else(usual))
}

/// Whether each layer is a net, where `layer_types` says it.
///
/// # Errors
/// A list of another length, or of other kinds.
pub(crate) fn listed_nets(
    files: &Files<'_>,
    layers: &Stated<usize>,
) -> Result<Option<Arc<[bool]>>> {
    const TYPES: Key = Key("layer_types", "");
    let keys = &files.keys;
    let Some(types) = keys.get(TYPES) else { return Ok(None) };
    let list = types.as_array().ok_or_else(|| keys.odd(TYPES, "a list", types))?;
    if list.len() != layers.value {
        let expected = format!("{} entries, as {} says", layers.value, layers.key());
        return Err(keys.wrong(TYPES, expected, list.len()));
    }
    let one = |kind: &serde_json::Value| match kind.as_str() {
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(keys.odd(TYPES, "full_attention or linear_attention", kind)),
    };
    list.iter().map(one).collect::<Result<_>>().map(Some)
}

/// A stored weight, which must have `rows` rows.
fn found(weights: &dyn Weights, name: &str, rows: usize) -> Result<Option<Stored>> {
    let Some(stored) = weights.find(name)? else { return Ok(None) };
    if stored.shape.first() != Some(&rows) {
        let error = Error::new(weights.place(name), format!("{rows} rows"), shape(&stored.shape));
        return Err(error.hint("the configuration does not fit these weights"));
    }
    Ok(Some(stored))
}

/// One of two weights whose heads are stored by turns: `[heads, 2, each]` rows.
fn by_turns(
    weights: &dyn Weights,
    name: &str,
    part: usize,
    [heads, each]: [usize; 2],
) -> Result<Option<Stored>> {
    let rows = heads * each;
    let Some(Stored { source, mut shape }) = found(weights, name, 2 * rows)? else {
        return Ok(None);
    };
    shape[0] = rows;
    let source = Source::Permute(Box::new(source), [1, heads, 2, each]).rows(part * rows, rows);
    Ok(Some(Stored { source, shape }))
}

/// A weight of a net. Qwen3-Next stores what belongs to a key head side by side: its query, its
/// key, the values that share it and as many gates; and how they are written, and forgotten.
pub(crate) fn delta(
    weights: &dyn Weights,
    block: &str,
    part: &str,
    net: &DeltaNetOptions,
) -> Result<Option<Stored>> {
    let &DeltaNetOptions { heads, key_heads, key_dim, value_dim, kernel, .. } = net;
    let (each, values) = (heads / key_heads, heads / key_heads * value_dim);
    let name = |part: &str| format!("{block}.delta.{part}");
    let direct = weights.find(&name(part))?;
    if direct.is_some() {
        return Ok(direct);
    }
    let width = 2 * key_heads * key_dim + heads * value_dim;
    match part {
        "qkv" | "z" => {
            let head = 2 * key_dim + 2 * values;
            let Some(stored) = found(weights, &name("qkvz"), key_heads * head)? else {
                return Ok(None);
            };
            let parts: &[[usize; 2]] = match part {
                "z" => &[[2 * key_dim + values, values]],
                _ => &[[0, key_dim], [key_dim, key_dim], [2 * key_dim, values]],
            };
            let rows = |[start, count]: &[usize; 2]| {
                let (start, count) = (*start, *count);
                let source = &stored.source;
                (0..key_heads).map(move |h| source.clone().rows(h * head + start, count))
            };
            let source = Source::Concat(parts.iter().flat_map(rows).collect());
            let mut shape = stored.shape.clone();
            shape[0] = if part == "z" { heads * value_dim } else { width };
            Ok(Some(Stored { source, shape }))
        }
        "decay" => Ok(weights.find(&name("log_decay"))?.map(|Stored { source, shape }| Stored {
            source: Source::NegExp(Box::new(source)),
            shape,
        })),
        "b" => by_turns(weights, &name("ba"), 0, [key_heads, each]),
        "a" => by_turns(weights, &name("ba"), 1, [key_heads, each]),
        "taps" => {
            let Some(Stored { source, .. }) = found(weights, &name("conv"), width)? else {
                return Ok(None);
            };
            let flat = Source::Reshape(Box::new(source), vec![width, kernel]);
            let turned = Source::Transpose(Box::new(flat));
            let shape = vec![kernel * width];
            Ok(Some(Stored { source: Source::Reshape(Box::new(turned), shape.clone()), shape }))
        }
        _ => Ok(None),
    }
}
