//! The layers of a decoder.

use crate::{Bias, Builder, ForwardPass, Tensor};
use formats::Result;
use ops::embed::Index;
use ops::{Op, Rope, RoundRows, Splice, Stretch, Unary};
use program::{CacheLayer, WeightId};

/// `[tokens] -> [tokens, hidden]`.
pub struct Embedding {
    table: WeightId,
    index: Index,
}

impl Embedding {
    /// Takes `name`, a table `[vocab, hidden]`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn new(builder: &Builder<'_>, name: &str, vocab: usize, hidden: usize) -> Result<Self> {
        Ok(Embedding { table: builder.weight(name, &[vocab, hidden])?, index: Index::Token })
    }

    /// Takes `name`, a table `[positions, hidden]` of learned positions.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn of_positions(
        builder: &Builder<'_>,
        name: &str,
        positions: usize,
        hidden: usize,
    ) -> Result<Self> {
        let table = builder.weight(name, &[positions, hidden])?;
        Ok(Embedding { table, index: Index::Position })
    }

    /// The rows of the step's tokens, or of their positions.
    pub fn forward(&self, step: &ForwardPass) -> Tensor {
        step.record(Op::from(ops::Embed { index: self.index }), &[], vec![self.table])
            .swap_remove(0)
    }

    /// The output head that shares this table of `vocab` rows, with `name.bias` `[vocab]` depending on
    /// `bias`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn tied(
        &self,
        builder: &Builder<'_>,
        name: &str,
        vocab: usize,
        bias: Bias,
    ) -> Result<Projection> {
        Ok(Projection { weight: self.table, bias: bias.weight(builder, name, vocab)? })
    }
}

/// `[rows, in] -> [rows, out]`.
#[derive(PartialEq, Eq)]
pub struct Projection {
    weight: WeightId,
    bias: Option<WeightId>,
}

impl Projection {
    /// Takes `name` `[out, in]` and, depending on `bias`, `name.bias` `[out]`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn new(
        builder: &Builder<'_>,
        name: &str,
        [out, input]: [usize; 2],
        bias: Bias,
    ) -> Result<Self> {
        let weight = builder.weight(name, &[out, input])?;
        Ok(Projection { weight, bias: bias.weight(builder, name, out)? })
    }

    /// `x weight^T + bias`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        x.apply(Op::from(ops::Linear), &[], std::iter::once(self.weight).chain(self.bias).collect())
    }
}

/// `[rows, blocks * in] -> [rows, blocks * out]`: each block of columns by a matrix of its own.
pub struct BlockProjection {
    weight: WeightId,
    blocks: usize,
}

impl BlockProjection {
    /// Takes `name` `[blocks * out, in]`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn new(
        builder: &Builder<'_>,
        name: &str,
        shape: [usize; 2],
        blocks: usize,
    ) -> Result<Self> {
        Ok(BlockProjection { weight: builder.weight(name, &shape)?, blocks })
    }

    /// The products of blocks with their matrices.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let op = ops::BlockLinear { blocks: self.blocks };
        x.apply(Op::from(op), &[], vec![self.weight])
    }
}

/// A norm: of groups as wide as its weight, or of whole rows.
pub struct Norm {
    op: Op,
    weights: Vec<WeightId>,
}

impl Norm {
    /// RMS norm `x / rms(x) * weight` of each group of `width` columns; takes `name` `[width]`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn rms(builder: &Builder<'_>, name: &str, width: usize, eps: f32) -> Result<Self> {
        let weight = builder.weight(name, &[width])?;
        Ok(Norm { op: Op::from(ops::RmsNorm { eps }), weights: vec![weight] })
    }

    /// Layer norm `(x - mean) / deviation * weight + bias` of each group of `width` columns; takes
    /// `name` `[width]` and, depending on `bias`, `name.bias` `[width]`.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn layer(
        builder: &Builder<'_>,
        name: &str,
        width: usize,
        eps: f32,
        bias: Bias,
    ) -> Result<Self> {
        let weight = builder.weight(name, &[width])?;
        let bias = bias.weight(builder, name, width)?;
        let weights = std::iter::once(weight).chain(bias).collect();
        Ok(Norm { op: Op::from(ops::LayerNorm { eps }), weights })
    }

    /// `x`, normed.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        x.apply(self.op.clone(), &[], self.weights.clone())
    }
}

/// Norms of q and k.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum QkNorm {
    /// No norm.
    None,
    /// RMS norms of each head by itself, with this eps.
    Heads(f32),
    /// An RMS norm of all heads together, with this eps.
    Rows(f32),
    /// Layer norms of each head by itself, with this eps; `apart`: each has a weight of its own, in
    /// `name.q_scale` and `name.k_scale`, and the norms' own weights are ones.
    Layer {
        /// Added to the variance.
        eps: f32,
        /// Biases of the norms.
        bias: Bias,
        /// Whether heads have weights of their own.
        apart: bool,
    },
}

/// A norm of q or of k.
struct HeadNorm {
    norm: Norm,
    scale: Option<WeightId>, // [heads * head_dim]
}

impl HeadNorm {
    /// The norm of `part`, q or k, of a row of `row` elements; none if there is none.
    fn new(
        builder: &Builder<'_>,
        name: &str,
        part: &str,
        (row, options): (usize, &AttentionOptions),
    ) -> Result<Option<HeadNorm>> {
        let (width, norm) = (options.head_dim, format!("{name}.{part}_norm"));
        let rms = |width, eps| Norm::rms(builder, &norm, width, eps);
        let (norm, apart) = match options.qk_norm {
            QkNorm::None => return Ok(None),
            QkNorm::Heads(eps) => (rms(width, eps)?, false),
            QkNorm::Rows(eps) => (rms(row, eps)?, false),
            QkNorm::Layer { eps, bias, apart } => {
                (Norm::layer(builder, &norm, width, eps, bias)?, apart)
            }
        };
        let scale = || builder.weight(&format!("{name}.{part}_scale"), &[row]);
        Ok(Some(HeadNorm { norm, scale: apart.then(scale).transpose()? }))
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let x = self.norm.forward(x);
        match self.scale {
            Some(scale) => x.apply(Op::from(ops::ScaleColumns), &[], vec![scale]),
            None => x,
        }
    }
}

/// The configuration of an attention layer.
#[derive(Debug, Clone)]
pub struct AttentionOptions {
    /// Width of what is attended from.
    pub hidden: usize,
    /// Width of the result; `None`: the same.
    pub output: Option<usize>,
    /// The width between two matrices, `name.q_down` and `name.q_up` and so on, whose product is
    /// added to each of those of q, k and v, if there are any.
    pub factors: Option<usize>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements per head of queries and keys.
    pub head_dim: usize,
    /// Elements per head of values, at most as many; `None`: as many.
    pub value_dim: Option<usize>,
    /// Biases of q, k and v.
    pub qkv_bias: Bias,
    /// Bias of the output projection.
    pub output_bias: Bias,
    /// Norms of q and k.
    pub qk_norm: QkNorm,
    /// Whether these come behind the rotation, not in front of it.
    pub rotates_first: bool,
    /// Number of positions that a query sees, itself included.
    pub window: Option<usize>,
    /// Whether the window does not slide: a query sees the positions of its own chunk of `window`,
    /// up to itself.
    pub chunked: bool,
    /// The rotation of q and k; `None` for a layer without positions.
    pub rope: Option<Rope>,
    /// A factor on queries that depends on their position.
    pub stretch: Option<Stretch>,
    /// Whether each head has a sink: a score `name.sinks` `[heads]` that takes part in the softmax
    /// and has no value.
    pub sinks: bool,
    /// Whether each head has a slope, `name.slopes` `[heads]`, by which scores fall with each position
    /// from the query back to the key.
    pub slopes: bool,
    /// How far from zero elements of queries, keys and values may be; those beyond are there.
    pub clip: Option<f32>,
    /// The eps of an RMS norm over what attention gives, `name.o_norm`, in front of the output
    /// projection, if it has one.
    pub output_norm: Option<f32>,
    /// How the rows that the output projection reads are rounded, if they are.
    pub output_rounding: Option<RoundRows>,
    /// The factor on scores; `None` means `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Soft cap of the scaled scores: `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// The function `f` of the gate `f(name.gate x)` that the attention output is multiplied with
    /// before the output projection, if it has one, and whether its matrix has a bias.
    pub output_gate: Option<(Unary, Bias)>,
    /// The eps of an RMS norm over each head of the values, if they have one.
    pub value_norm: Option<f32>,
    /// The cache layer whose keys and values are attended to; `None`: the layer's own.
    pub shared: Option<usize>,
}

/// A projection to q, k or v, and two matrices whose product is added to its own.
#[derive(PartialEq, Eq)]
struct HeadProjection {
    whole: Projection,
    factors: Option<[Projection; 2]>,
}

impl HeadProjection {
    fn forward(&self, x: &Tensor) -> Tensor {
        let y = self.whole.forward(x);
        match &self.factors {
            Some([down, up]) => y.add(&up.forward(&down.forward(x))),
            None => y,
        }
    }
}

/// Causal self-attention with grouped key/value heads: `[tokens, hidden] -> [tokens, output]`.
pub struct SelfAttention {
    q: HeadProjection, // [hidden] -> [heads * head_dim]
    own: Option<KeysValues>,
    gate: Option<(Projection, Unary)>, // [hidden] -> [heads * value_dim]
    o: Projection,                     // [heads * value_dim] -> [output]
    value_dim: usize,
    q_norm: Option<HeadNorm>,
    rotates_first: bool,
    rope: Option<Rope>,
    stretch: Option<Stretch>,
    vectors: Vec<WeightId>, // sinks and slopes, [heads] each
    clip: Option<f32>,
    o_norm: Option<Norm>,
    rounding: Option<RoundRows>,
    attend: ops::Attention,
}

/// `x`, but no element farther than `most` from zero.
fn clipped(x: Tensor, most: Option<f32>) -> Tensor {
    match most {
        Some(most) => x.scale(1.0 / most).map(Unary::HardTanh).scale(most),
        None => x,
    }
}

/// The projections to keys and values of a layer that has some of its own.
struct KeysValues {
    k: HeadProjection, // [hidden] -> [kv_heads * head_dim]
    v: HeadProjection, // [hidden] -> [kv_heads * value_dim]
    k_norm: Option<HeadNorm>,
    v_norm: Option<Norm>,
}

impl KeysValues {
    /// Keys before their norm, and values; elements of both within `clip` of zero.
    fn project(&self, x: &Tensor, clip: Option<f32>) -> (Tensor, Tensor) {
        let k = clipped(self.k.forward(x), clip);
        // One matrix for both is multiplied once.
        let v = if self.v == self.k { k.clone() } else { clipped(self.v.forward(x), clip) };
        let v = self.v_norm.as_ref().map_or_else(|| v.clone(), |norm| norm.forward(&v));
        (k, v)
    }
}

impl SelfAttention {
    /// Takes `name.q`, `.k`, `.v`, `.o`; if present, norms `.q_norm`, `.k_norm` and `.v_norm`,
    /// weights of heads `.q_scale` and `.k_scale`, sinks `.sinks`, slopes `.slopes`, and an output
    /// gate `.gate`. Registers a cache layer, and takes no `.k` and `.v` where another layer's is
    /// shared.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn new(builder: &Builder<'_>, name: &str, options: AttentionOptions) -> Result<Self> {
        let AttentionOptions { hidden, heads, kv_heads, head_dim, window, .. } = options;
        let value_dim = options.value_dim.unwrap_or(head_dim);
        let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
        let (values, narrow_values) = (heads * value_dim, kv_heads * value_dim);
        let linear = |part: &str, shape, bias| {
            Projection::new(builder, &format!("{name}.{part}"), shape, bias)
        };
        let norm = |part: &str, row: usize| HeadNorm::new(builder, name, part, (row, &options));
        let vector = |part: &str| builder.weight(&format!("{name}.{part}"), &[heads]);
        let vectors = [(options.sinks, "sinks"), (options.slopes, "slopes")];
        let vectors = vectors.into_iter().filter(|(has, _)| *has).map(|(_, part)| vector(part));
        let vectors = vectors.collect::<Result<Vec<_>>>()?;
        let head_part = |part: &str, rows| -> Result<HeadProjection> {
            let factor = |end: &str, shape| linear(&format!("{part}_{end}"), shape, Bias::Never);
            let pair = |rank| Ok([factor("down", [rank, hidden])?, factor("up", [rows, rank])?]);
            Ok(HeadProjection {
                whole: linear(part, [rows, hidden], options.qkv_bias)?,
                factors: options.factors.map(pair).transpose()?,
            })
        };
        let q = head_part("q", wide)?;
        let own = match options.shared {
            None => Some((head_part("k", narrow)?, head_part("v", narrow_values)?)),
            Some(_) => None,
        };
        let gate = |(f, bias)| Ok((linear("gate", [values, hidden], bias)?, f));
        let gate = options.output_gate.map(gate).transpose()?;
        let output = options.output.unwrap_or(hidden);
        let o = linear("o", [output, values], options.output_bias)?;
        let q_norm = norm("q", wide)?;
        let o_norm = |eps| Norm::rms(builder, &format!("{name}.o_norm"), values, eps);
        let o_norm = options.output_norm.map(o_norm).transpose()?;
        let normed = |(k, v)| -> Result<KeysValues> {
            let v_norm = |eps| Norm::rms(builder, &format!("{name}.v_norm"), value_dim, eps);
            let v_norm = options.value_norm.map(v_norm).transpose()?;
            Ok(KeysValues { k, v, k_norm: norm("k", narrow)?, v_norm })
        };
        let new = || builder.cache_layer(CacheLayer::keys_values(kv_heads, head_dim, window));
        Ok(SelfAttention {
            q,
            own: own.map(normed).transpose()?,
            gate,
            o,
            value_dim,
            q_norm,
            rotates_first: options.rotates_first,
            attend: ops::Attention {
                layer: options.shared.unwrap_or_else(new),
                heads,
                kv_heads,
                head_dim,
                scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
                window,
                chunked: options.chunked,
                cap: options.cap,
                sinks: options.sinks,
                slopes: options.slopes,
                chosen: None,
            },
            vectors,
            clip: options.clip,
            o_norm,
            rounding: options.output_rounding,
            rope: options.rope,
            stretch: options.stretch,
        })
    }

    /// Projects, rotates, caches, attends and projects back.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let q = clipped(self.q.forward(x), self.clip);
        let own = self.own.as_ref().map(|own| (own, own.project(x, self.clip)));
        let q = self.turn(&self.q_norm, &q);
        let q = match self.stretch {
            Some(stretch) => q.apply(Op::from(stretch), &[], Vec::new()),
            None => q,
        };
        if let Some((own, (k, v))) = own {
            let k = self.turn(&own.k_norm, &k);
            // A cache layer has keys and values of one width: zeros behind the values.
            let v = self.spliced(&v, self.attend.kv_heads, self.attend.head_dim);
            k.sink(Op::from(ops::KvWrite { layer: self.attend.layer }), &[&v]);
        }
        let y = q.apply(Op::Attention(self.attend.clone()), &[], self.vectors.clone());
        let y = self.spliced(&y, self.attend.heads, self.value_dim);
        let y = self.o_norm.as_ref().map_or_else(|| y.clone(), |norm| norm.forward(&y));
        let y = match self.rounding {
            Some(rounding) => y.apply(Op::from(rounding), &[], Vec::new()),
            None => y,
        };
        match &self.gate {
            Some((gate, f)) => self.o.forward(&y.mul(&gate.forward(x).map(*f))),
            None => self.o.forward(&y),
        }
    }

    /// The elements of values of each of `heads` heads, and zeros up to `width`.
    fn spliced(&self, x: &Tensor, heads: usize, width: usize) -> Tensor {
        if self.value_dim == self.attend.head_dim {
            return x.clone();
        }
        let splice = Splice { heads, start: 0, count: self.value_dim, shared: false, width };
        x.apply(Op::from(splice), &[], Vec::new())
    }

    fn turn(&self, norm: &Option<HeadNorm>, x: &Tensor) -> Tensor {
        let normed = |x: &Tensor| norm.as_ref().map_or_else(|| x.clone(), |norm| norm.forward(x));
        let turned = |x: &Tensor| match &self.rope {
            Some(rope) => x.apply(Op::Rope(rope.clone()), &[], Vec::new()),
            None => x.clone(),
        };
        if self.rotates_first { normed(&turned(x)) } else { turned(&normed(x)) }
    }
}

/// The gated feed-forward: `down(f(gate(x)) * up(x))`.
pub struct Mlp {
    gate: Projection, // [hidden] -> [ff]
    up: Projection,   // [hidden] -> [ff]
    down: Projection, // [ff] -> [hidden]
    functions: &'static [Unary],
    bound: Option<f32>,
}

impl Mlp {
    /// Takes `name.gate` and `.up` `[ff, hidden]` and `.down` `[hidden, ff]`; the gate goes through
    /// `functions`, one after the other.
    ///
    /// # Errors
    /// As [`Builder::weight`].
    pub fn new(
        builder: &Builder<'_>,
        name: &str,
        [hidden, ff]: [usize; 2],
        bias: Bias,
        functions: &'static [Unary],
    ) -> Result<Self> {
        let linear =
            |part: &str, shape| Projection::new(builder, &format!("{name}.{part}"), shape, bias);
        Ok(Mlp {
            gate: linear("gate", [ff, hidden])?,
            up: linear("up", [ff, hidden])?,
            down: linear("down", [hidden, ff])?,
            functions,
            bound: None,
        })
    }

    /// The same, where both factors lie within `bound` of zero, if there is one.
    pub fn within(self, bound: Option<f32>) -> Self {
        Mlp { bound, ..self }
    }

    /// `down(f(gate(x)) * up(x))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let gate = self.functions.iter().fold(self.gate.forward(x), |gate, f| gate.map(*f));
        let gate = clipped(gate, self.bound);
        self.down.forward(&gate.mul(&clipped(self.up.forward(x), self.bound)))
    }
}
