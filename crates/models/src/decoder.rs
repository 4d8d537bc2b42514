//! The decoder that most architectures share: embed; for every block, attention and a feed-forward,
//! each normed in front, behind or both, and added to the residual stream; norm; head. [`Parts`]
//! says what they differ in.

use crate::names::Recipes;
use crate::{Config, Ending, Layers, Opened};
use formats::Result;
use nn::{
    AttentionOptions, Bias, Builder, Embedding, ForwardPass, Mlp, Norm, Projection, SelfAttention,
    Stored, Tensor, Unary, Weights,
};

/// A layer from the residual stream to itself, or from hidden states to logits.
pub(crate) type Layer = Box<dyn Fn(&Tensor) -> Tensor>;

/// Makes block `i`'s feed-forward of the weights below `blocks.{i}.mlp`.
pub(crate) type FeedForward = Box<dyn Fn(&Builder<'_>, &Config, usize) -> Result<Layer>>;

/// A sublayer behind a block's others: it reads the block's own input and what they leave, and its
/// result is added.
pub(crate) type Behind = Box<dyn Fn(&Tensor, &Tensor) -> Tensor>;

/// Makes block `i`'s sublayer behind the others.
pub(crate) type MakeBehind = Box<dyn Fn(&Builder<'_>, &Config, usize) -> Result<Behind>>;

/// Makes what block `i` has in the place of attention, if it has.
pub(crate) type Mixer = Box<dyn Fn(&Builder<'_>, &Config, usize) -> Result<Option<Layer>>>;

/// The options of each layer's attention.
pub(crate) type AttentionOf = Box<dyn Fn(&Config, usize) -> AttentionOptions>;

/// Whether the sublayers of a block are normed in front, and behind.
pub(crate) type Normed = Box<dyn Fn(usize) -> (bool, bool)>;

/// Whether a block has attention, or a mixer in its place, and a feed-forward.
pub(crate) type Holds = Box<dyn Fn(usize) -> [bool; 2]>;

/// Makes a layer of the weights that it is for.
pub(crate) type MakeLayer = fn(&Builder<'_>, &Config) -> Result<Layer>;

/// Makes a norm of the weight of a name.
pub(crate) type MakeNorm = fn(&Builder<'_>, &str, &Config) -> Result<Layer>;

/// How attention and feed-forward follow each other in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The feed-forward reads what attention leaves in the residual stream.
    InTurn,
    /// Both read the block's input, each through a norm of its own.
    Beside,
    /// Both read the block's input through attention's norm.
    BesideOneNorm,
    /// Attention, or the mixer in its place, is all that a block has.
    Alone,
    /// In turn, and each sum with the residual stream is normed, in the place of what a sublayer
    /// reads; nothing is normed behind the last block.
    NormedSums,
}

/// The parts in which architectures differ.
pub(crate) struct Parts {
    /// The options of each layer's attention.
    pub(crate) attention: AttentionOf,
    /// The mixer that some blocks have in place of attention.
    pub(crate) mixer: Mixer,
    /// The feed-forward of each block.
    pub(crate) feed_forward: FeedForward,
    /// Which sublayers each block has, where they follow each other in turn.
    pub(crate) holds: Holds,
    /// A sublayer behind the others of each block, if there is one.
    pub(crate) behind: Option<MakeBehind>,
    /// The number of blocks in a round, where all are passed several times: the last norm is behind
    /// each round.
    pub(crate) round: Option<usize>,
    /// How norms are made.
    pub(crate) norm: MakeNorm,
    /// Whether the sublayers of each block are normed in front, and behind.
    pub(crate) normed: Normed,
    /// How the sublayers follow each other.
    pub(crate) order: Order,
    /// Whether the head has a bias.
    pub(crate) head_bias: Bias,
    /// What hidden states go through in front of the head, if anything.
    pub(crate) before_head: Option<MakeLayer>,
    /// Whether a learned embedding of each token's position, `positions`, is added to its own.
    pub(crate) learned_positions: bool,
    /// The factors on embeddings, on the results of sublayers, and on logits.
    pub(crate) multipliers: [f32; 3],
    /// Whether embeddings are normed, by `embed_norm`.
    pub(crate) normed_embeddings: bool,
    /// The width of embeddings, if the residual stream has another: the matrix `embed_in` is behind
    /// the embedding, and `embed_out` in front of the head.
    pub(crate) embed_width: Option<usize>,
    /// The bound on logits.
    pub(crate) logit_cap: Option<f32>,
}

impl Parts {
    /// Llama's: RMS norms in front, a gated feed-forward.
    pub(crate) fn new(
        mlp_bias: Bias,
        attention: impl Fn(&Config, usize) -> AttentionOptions + 'static,
    ) -> Parts {
        Parts {
            attention: Box::new(attention),
            mixer: Box::new(|_, _, _| Ok(None)),
            feed_forward: Box::new(move |builder, config, i| gated(builder, config, i, mlp_bias)),
            holds: Box::new(|_| [true; 2]),
            behind: None,
            round: None,
            norm: rms_norm,
            normed: both(true, false),
            order: Order::InTurn,
            head_bias: Bias::Never,
            before_head: None,
            learned_positions: false,
            multipliers: [1.0; 3],
            normed_embeddings: false,
            embed_width: None,
            logit_cap: None,
        }
    }
}

/// All blocks are normed alike: in front, and behind.
pub(crate) fn both(front: bool, behind: bool) -> Normed {
    Box::new(move |_| (front, behind))
}

/// A gated feed-forward.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
pub(crate) fn gated(builder: &Builder<'_>, config: &Config, i: usize, bias: Bias) -> Result<Layer> {
    let name = format!("blocks.{i}.mlp");
    let sizes = [config.hidden, config.feed_forward];
    let mlp = Mlp::new(builder, &name, sizes, bias, config.gate)?;
    Ok(Box::new(move |x| mlp.forward(x)))
}

/// Attention as the configuration has it, with such biases of q, k and v and of the output.
pub(crate) fn biased(bias: Bias) -> impl Fn(&Config, usize) -> AttentionOptions {
    move |config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        ..config.attention(layer)
    }
}

/// A feed-forward without a gate: `down(f(up(x)))`, where `functions` are applied one after the
/// other.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
pub(crate) fn ungated(
    builder: &Builder<'_>,
    config: &Config,
    i: usize,
    functions: &'static [Unary],
    bias: Bias,
) -> Result<Layer> {
    let (hidden, ff) = (config.hidden, config.feed_forward);
    let linear = |part: &str, shape| {
        Projection::new(builder, &format!("blocks.{i}.mlp.{part}"), shape, bias)
    };
    let (up, down) = (linear("up", [ff, hidden])?, linear("down", [hidden, ff])?);
    Ok(Box::new(move |x| {
        let y = functions.iter().fold(up.forward(x), |y, f| y.map(*f));
        down.forward(&y)
    }))
}

/// A layer norm, with a bias or without.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
pub(crate) fn layer_norm(
    builder: &Builder<'_>,
    name: &str,
    config: &Config,
    bias: Bias,
) -> Result<Layer> {
    let norm = Norm::layer(builder, name, config.hidden, config.norm_eps, bias)?;
    Ok(Box::new(move |x| norm.forward(x)))
}

/// An RMS norm.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
pub(crate) fn rms_norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<Layer> {
    let norm = Norm::rms(builder, name, config.hidden, config.norm_eps)?;
    Ok(Box::new(move |x| norm.forward(x)))
}

/// A model that is such a stack; `attention` gives the options of each layer, where the
/// architectures differ.
pub(crate) fn open(
    config: Config,
    mlp_bias: Bias,
    attention: impl Fn(&Config, usize) -> AttentionOptions + 'static,
) -> Opened {
    open_parts(config, Parts::new(mlp_bias, attention))
}

/// A model of these parts.
pub(crate) fn open_parts(config: Config, parts: Parts) -> Opened {
    let of = config.clone();
    let build = move |weights: &dyn Weights, ending| layers(weights, &of, &parts, ending);
    Opened { config, build: Box::new(build) }
}

/// A model of these parts, some of whose weights `change` makes of those that are stored.
pub(crate) fn open_recipes(
    config: Config,
    parts: Parts,
    change: impl Fn(&Config, &dyn Weights, &str) -> Result<Option<Stored>> + 'static,
) -> Opened {
    let of = config.clone();
    let build = move |weights: &dyn Weights, ending| {
        let change = |weights: &dyn Weights, name: &str| change(&of, weights, name);
        layers(&Recipes { weights, change }, &of, &parts, ending)
    };
    Opened { config, build: Box::new(build) }
}

/// The layers of such a stack.
///
/// # Errors
/// Weights that are missing, or do not fit the configuration.
fn layers(weights: &dyn Weights, config: &Config, parts: &Parts, ending: Ending) -> Result<Layers> {
    let builder = &Builder::new(weights);
    let decoder = Decoder::new(builder, config, parts)?;
    let (logits, cap) = (parts.multipliers[2], parts.logit_cap);
    let head = || -> Result<Layer> {
        let out =
            |width| Projection::new(builder, "embed_out", [width, config.hidden], Bias::Never);
        let out = parts.embed_width.map(out).transpose()?;
        let before = parts.before_head.map(|make| make(builder, config)).transpose()?;
        let config = &Config { hidden: decoder.width, ..config.clone() };
        let head = head(builder, config, &decoder.embed, parts.head_bias)?;
        Ok(Box::new(move |hidden| {
            let logits_of = |hidden: &Tensor| capped(scaled(head.forward(hidden), logits), cap);
            let hidden = before.as_ref().map_or_else(|| hidden.clone(), |before| before(hidden));
            match &out {
                Some(out) => logits_of(&out.forward(&hidden)),
                None => logits_of(&hidden),
            }
        }))
    };
    let head = (ending == Ending::Logits).then(head).transpose()?;
    let hidden = Box::new(move |step: &ForwardPass| decoder.forward(step));
    Ok(Layers { blank: builder.program(), hidden, head })
}

/// The product that makes logits of hidden states.
///
/// # Errors
/// A matrix that is missing, or does not fit the configuration.
pub(crate) fn head(
    builder: &Builder<'_>,
    config: &Config,
    embed: &Embedding,
    bias: Bias,
) -> Result<Projection> {
    match config.tied {
        true => embed.tied(builder, "head", config.vocab, bias),
        false => Projection::new(builder, "head", [config.vocab, config.hidden], bias),
    }
}

/// A stack of blocks between an embedding and a norm.
struct Decoder {
    embed: Embedding,
    /// The width of embeddings.
    width: usize,
    /// The matrix from embeddings to the residual stream, where widths differ.
    embed_in: Option<Projection>,
    embed_norm: Option<Layer>,
    positions: Option<Embedding>,
    blocks: Vec<Block>,
    norm: Option<Layer>,
    multipliers: [f32; 3],
    round: Option<usize>,
}

struct Block {
    attention: Option<Sublayer>,
    mlp: Option<Sublayer>,
    order: Order,
    behind: Option<Behind>,
}

impl Block {
    /// The residual stream behind the block, which gets `share` of each sublayer's result.
    fn forward(&self, x: &Tensor, share: f32) -> Tensor {
        let y = self.sublayers(x, share);
        self.behind.as_ref().map_or_else(|| y.clone(), |behind| y.add(&behind(x, &y)))
    }

    /// The residual stream behind all sublayers but that one.
    fn sublayers(&self, x: &Tensor, share: f32) -> Tensor {
        let with =
            |layer: &Sublayer, x: &Tensor| x.add(&scaled(layer.result(&layer.normed(x)), share));
        let (attention, mlp) = match (&self.attention, &self.mlp) {
            (Some(attention), Some(mlp)) => (attention, mlp),
            (Some(layer), None) | (None, Some(layer)) => return with(layer, x),
            (None, None) => return x.clone(),
        };
        let both = |y: Tensor, z: Tensor| x.add(&scaled(y, share)).add(&scaled(z, share));
        match self.order {
            Order::InTurn | Order::Alone => with(mlp, &with(attention, x)),
            // The norm in front of a sublayer elsewhere is behind its sum.
            Order::NormedSums => {
                let sum = |layer: &Sublayer, x: &Tensor| {
                    layer.normed(&x.add(&scaled(layer.result(x), share)))
                };
                sum(mlp, &sum(attention, x))
            }
            Order::Beside => {
                both(attention.result(&attention.normed(x)), mlp.result(&mlp.normed(x)))
            }
            Order::BesideOneNorm => {
                let normed = attention.normed(x);
                both(attention.result(&normed), mlp.result(&normed))
            }
        }
    }
}

/// A layer and its norms.
struct Sublayer {
    in_front: Option<Layer>,
    layer: Layer,
    behind: Option<Layer>,
}

impl Sublayer {
    /// The layer's input from the residual stream.
    fn normed(&self, x: &Tensor) -> Tensor {
        self.in_front.as_ref().map_or_else(|| x.clone(), |norm| norm(x))
    }

    /// The layer's addition to the residual stream.
    fn result(&self, x: &Tensor) -> Tensor {
        let y = (self.layer)(x);
        self.behind.as_ref().map_or_else(|| y.clone(), |norm| norm(&y))
    }
}

impl Decoder {
    fn new(builder: &Builder<'_>, config: &Config, parts: &Parts) -> Result<Self> {
        let hidden = config.hidden;
        let width = parts.embed_width.unwrap_or(hidden);
        let embed = Embedding::new(builder, "embed", config.vocab, width)?;
        let embed_in = || Projection::new(builder, "embed_in", [hidden, width], Bias::Never);
        let embed_in = parts.embed_width.map(|_| embed_in()).transpose()?;
        let embed_norm = || (parts.norm)(builder, "embed_norm", config);
        let embed_norm = parts.normed_embeddings.then(embed_norm).transpose()?;
        let positions = || Embedding::of_positions(builder, "positions", config.context, hidden);
        let positions = parts.learned_positions.then(positions).transpose()?;
        let block = |i: usize| -> Result<Block> {
            let (front, behind) = (parts.normed)(i);
            let norm = |wanted: bool, name: &str| {
                let norm = || (parts.norm)(builder, &format!("blocks.{i}.{name}"), config);
                wanted.then(norm).transpose()
            };
            let attention = || -> Result<Layer> {
                let (name, options) =
                    (format!("blocks.{i}.attention"), (parts.attention)(config, i));
                let attention = SelfAttention::new(builder, &name, options)?;
                Ok(Box::new(move |x| attention.forward(x)))
            };
            let [attends, feeds] = (parts.holds)(i);
            let attention = || -> Result<Sublayer> {
                Ok(Sublayer {
                    in_front: norm(front, "attention_norm")?,
                    layer: (parts.mixer)(builder, config, i)?.map_or_else(attention, Ok)?,
                    behind: norm(behind, "after_attention_norm")?,
                })
            };
            let attention = attends.then(attention).transpose()?;
            let mlp = || -> Result<Sublayer> {
                Ok(Sublayer {
                    in_front: norm(front && parts.order != Order::BesideOneNorm, "mlp_norm")?,
                    layer: (parts.feed_forward)(builder, config, i)?,
                    behind: norm(behind, "after_mlp_norm")?,
                })
            };
            let mlp = (parts.order != Order::Alone && feeds).then(mlp).transpose()?;
            let behind = parts.behind.as_ref().map(|make| make(builder, config, i)).transpose()?;
            Ok(Block { attention, mlp, order: parts.order, behind })
        };
        let blocks = (0..config.layers).map(block).collect::<Result<_>>()?;
        let norm = || (parts.norm)(builder, "norm", config);
        let norm = (parts.order != Order::NormedSums).then(norm).transpose()?;
        let (multipliers, round) = (parts.multipliers, parts.round);
        Ok(Decoder {
            embed,
            width,
            embed_in,
            embed_norm,
            positions,
            blocks,
            norm,
            multipliers,
            round,
        })
    }

    /// Hidden states `[outputs, hidden]` of the step's tokens, normed.
    fn forward(&self, step: &ForwardPass) -> Tensor {
        let [embedding, residual, _] = self.multipliers;
        let mut x = scaled(self.embed.forward(step), embedding);
        if let Some(embed_in) = &self.embed_in {
            x = embed_in.forward(&x);
        }
        if let Some(positions) = &self.positions {
            x = x.add(&positions.forward(step));
        }
        if let Some(norm) = &self.embed_norm {
            x = norm(&x);
        }
        x = x.trace("embed");
        for (i, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, residual).trace(format!("blocks.{i}"));
            let ends = |round: usize| (i + 1).is_multiple_of(round) && i + 1 < self.blocks.len();
            if let Some(norm) = self.norm.as_ref().filter(|_| self.round.is_some_and(ends)) {
                x = norm(&x);
            }
        }
        let x = x.select();
        self.norm.as_ref().map_or_else(|| x.clone(), |norm| norm(&x)).trace("norm")
    }
}

/// `by * x`, of which most architectures want no product.
pub(crate) fn scaled(x: Tensor, by: f32) -> Tensor {
    if by == 1.0 { x } else { x.scale(by) }
}

/// `x` within `cap` of zero, if it is bounded.
pub(crate) fn capped(x: Tensor, cap: Option<f32>) -> Tensor {
    match cap {
        Some(cap) => x.scale(1.0 / cap).map(Unary::Tanh).scale(cap),
        None => x,
    }
}
