//! The block that several layers share: attention from the residual stream beside the embedding, and
//! a feed-forward. Matrices are added to its projections, of lower rank, which each use has for itself.

use crate::config::Config;
use crate::names::Row;
use crate::phi3;
use formats::Result;
use nn::{
    AttentionOptions, Bias, Builder, Norm, Projection, SelfAttention, Stored, Tensor, Unary,
    Weights,
};

/// Names of its weights, which files have under the first of the layers that share it. The second
/// number counts its uses.
pub(super) const NAMES: &[Row] = &[
    ("blocks.{}.shared.norm", "model.layers.{}.shared_transformer.input_layernorm", ""),
    ("blocks.{}.shared.q", "model.layers.{}.shared_transformer.self_attn.q_proj", ""),
    ("blocks.{}.shared.k", "model.layers.{}.shared_transformer.self_attn.k_proj", ""),
    ("blocks.{}.shared.v", "model.layers.{}.shared_transformer.self_attn.v_proj", ""),
    ("blocks.{}.shared.o", "model.layers.{}.shared_transformer.self_attn.o_proj", ""),
    ("blocks.{}.shared.mlp_norm", "model.layers.{}.shared_transformer.pre_ff_layernorm", ""),
    (
        "blocks.{}.shared.gate_up",
        "model.layers.{}.shared_transformer.feed_forward.gate_up_proj",
        "",
    ),
    ("blocks.{}.shared.down", "model.layers.{}.shared_transformer.feed_forward.down_proj", ""),
    (
        "blocks.{}.shared.q_down.{}",
        "model.layers.{}.shared_transformer.self_attn.linear_q_adapter_list.{}.0",
        "",
    ),
    (
        "blocks.{}.shared.q_up.{}",
        "model.layers.{}.shared_transformer.self_attn.linear_q_adapter_list.{}.1",
        "",
    ),
    (
        "blocks.{}.shared.k_down.{}",
        "model.layers.{}.shared_transformer.self_attn.linear_k_adapter_list.{}.0",
        "",
    ),
    (
        "blocks.{}.shared.k_up.{}",
        "model.layers.{}.shared_transformer.self_attn.linear_k_adapter_list.{}.1",
        "",
    ),
    (
        "blocks.{}.shared.v_down.{}",
        "model.layers.{}.shared_transformer.self_attn.linear_v_adapter_list.{}.0",
        "",
    ),
    (
        "blocks.{}.shared.v_up.{}",
        "model.layers.{}.shared_transformer.self_attn.linear_v_adapter_list.{}.1",
        "",
    ),
    (
        "blocks.{}.shared.first.{}",
        "model.layers.{}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.0",
        "",
    ),
    (
        "blocks.{}.shared.second.{}",
        "model.layers.{}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.1",
        "",
    ),
];

/// How layers share blocks.
pub(super) struct Options {
    /// The layers in front of which a block is, in order.
    pub(super) uses: Vec<usize>,
    /// How many blocks take turns.
    pub(super) count: usize,
    /// The rank of what is added to projections.
    pub(super) rank: usize,
    /// Whether q, k and v have such additions, too.
    pub(super) attends: bool,
    /// Biases of the feed-forward.
    pub(super) bias: Bias,
}

/// One use of a block.
pub(super) struct Shared {
    norm: Norm,
    attention: SelfAttention, // [2 * hidden] -> [hidden]
    mlp_norm: Norm,
    first: Projection, // [hidden] -> [rank]
    gate: Added,       // [hidden] -> [ff]
    up: Added,         // [hidden] -> [ff]
    down: Projection,
    functions: &'static [Unary],
}

/// A projection, and the second of the two matrices that are added to it.
struct Added {
    whole: Projection,
    second: Projection,
}

impl Added {
    /// The sum of both products; `low` is what the first of the two matrices gives.
    fn forward(&self, x: &Tensor, low: &Tensor) -> Tensor {
        self.whole.forward(x).add(&self.second.forward(low))
    }
}

impl Shared {
    /// The block in front of layer `i`.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub(super) fn new(
        builder: &Builder<'_>,
        config: &Config,
        options: &Options,
        i: usize,
    ) -> Result<Shared> {
        let (hidden, ff, rank) = (config.hidden, config.feed_forward, options.rank);
        let name = format!("blocks.{i}.shared");
        let biased = |part: &str, shape, bias| {
            Projection::new(builder, &format!("{name}.{part}"), shape, bias)
        };
        let linear = |part: &str, shape| biased(part, shape, Bias::Never);
        let norm = |part: &str, width| {
            Norm::rms(builder, &format!("{name}.{part}"), width, config.norm_eps)
        };
        let added = |part: &str| -> Result<Added> {
            let second = linear(&format!("{part}_second"), [ff, rank])?;
            Ok(Added { whole: biased(part, [ff, hidden], options.bias)?, second })
        };
        let attention = AttentionOptions {
            hidden: 2 * hidden,
            output: Some(hidden),
            factors: options.attends.then_some(rank),
            scale: Some((config.head_dim as f32 / 2.0).sqrt().recip()),
            ..config.attention(i)
        };
        Ok(Shared {
            norm: norm("norm", 2 * hidden)?,
            attention: SelfAttention::new(builder, &name, attention)?,
            mlp_norm: norm("mlp_norm", hidden)?,
            first: linear("first", [rank, hidden])?,
            gate: added("gate")?,
            up: added("up")?,
            down: biased("down", [hidden, ff], options.bias)?,
            functions: config.gate,
        })
    }

    /// The block's result, from the residual stream and the embedding.
    pub(super) fn forward(&self, x: &Tensor, embedding: &Tensor) -> Tensor {
        let y = self.attention.forward(&self.norm.forward(&x.beside(embedding)));
        let y = self.mlp_norm.forward(&y);
        let low = self.first.forward(&y);
        let gate = self.gate.forward(&y, &low);
        let gate = self.functions.iter().fold(gate, |gate, f| gate.map(*f));
        self.down.forward(&gate.mul(&self.up.forward(&y, &low)))
    }
}

/// The weight `name` of a use of a block: that of the first layer under which files have it.
///
/// # Errors
/// A weight of another shape.
pub(super) fn part(
    config: &Config,
    options: &Options,
    weights: &dyn Weights,
    name: &str,
) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".shared.") else { return Ok(None) };
    let layer = block.strip_prefix("blocks.").and_then(|layer| layer.parse::<usize>().ok());
    let at = |layer: usize| Some((layer, options.uses.iter().position(|of| *of == layer)?));
    let Some((layer, at)) = layer.and_then(at) else { return Ok(None) };
    let (ff, count) = (config.feed_forward, options.count);
    let (part, suffix) = part.strip_suffix(".bias").map_or((part, ""), |part| (part, ".bias"));
    let own = ["_down", "_up"].iter().any(|end| part.ends_with(end)) || part == "first";
    let (part, half) = match part {
        "gate" => ("gate_up".to_owned(), Some((0, config.hidden))),
        "up" => ("gate_up".to_owned(), Some((ff, config.hidden))),
        "gate_second" => (format!("second.{at}"), Some((0, options.rank))),
        "up_second" => (format!("second.{at}"), Some((ff, options.rank))),
        part if own => (format!("{part}.{at}"), None),
        part => (part.to_owned(), None),
    };
    // Transformers shares nothing where the head is apart from the embedding: a layer's own weights
    // come before those of the same block's other uses.
    let uses = options.uses.iter().skip(at % count).step_by(count);
    for layer in std::iter::once(&layer).chain(uses) {
        let name = format!("blocks.{layer}.shared.{part}{suffix}");
        let found = match half {
            Some((start, _)) if !suffix.is_empty() => {
                phi3::rows(weights, &name, &[2 * ff], start, ff)?
            }
            Some((start, width)) => phi3::rows(weights, &name, &[2 * ff, width], start, ff)?,
            None => weights.find(&name)?,
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}
