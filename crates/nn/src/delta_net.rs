//! A gated delta net (Yang et al. 2024) as in Qwen's hybrids, with a short convolution before it
//! and a gated norm after it.

use crate::{Bias, Builder, Norm, Projection, Tensor};
use formats::Result;
use ops::{Op, ScaleColumns, ShortConv, Unary};
use program::{CacheLayer, WeightId};

/// The configuration of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaNetOptions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of value heads.
    pub heads: usize,
    /// Number of query and key heads; divides `heads`.
    pub key_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Number of rows that the convolution mixes.
    pub kernel: usize,
    /// eps of the norm of a head's output.
    pub norm_eps: f32,
    /// Which value heads share a query and key head; see [`ops::DeltaNet::tiled`].
    pub tiled: bool,
    /// Whether corrections are twice as strong; see [`ops::DeltaNet::doubled`].
    pub doubled: bool,
    /// How what a head carries is forgotten.
    pub forgetting: Forgetting,
    /// The function of the gate on what heads give.
    pub gate: Unary,
}

/// How what a head carries is forgotten: the logarithms of the factors that remain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Forgetting {
    /// `decay softplus(a(x) + dt)`, a number for each head.
    Heads,
    /// The same for each element of a key (Kimi Team 2025, Kimi Linear), or with a bound
    /// `bound sigmoid(decay (a(x) + dt))`.
    Elements {
        /// Width of the row that these numbers, and the gate, are made of; `None`: of the residual
        /// stream itself.
        rank: Option<usize>,
        /// The least that a logarithm can be.
        bound: Option<f32>,
    },
}

/// `[tokens, hidden] -> [tokens, hidden]`, with a recurrent state.
pub struct GatedDeltaNet {
    qkv: Projection, // [hidden] -> [2 * key_heads * key_dim + heads * value_dim]
    z: Through,      // [hidden] -> [heads * value_dim]
    a: Through,      // [hidden] -> [heads], or [heads * key_dim]
    b: Projection,   // [hidden] -> [heads]
    o: Projection,   // [heads * value_dim] -> [hidden]
    taps: WeightId,
    decay: WeightId,
    dt: Option<WeightId>,
    forgetting: Forgetting,
    gate: Unary,
    norm: Norm, // of each head
    conv: ShortConv,
    net: ops::DeltaNet,
}

/// A product, or one after the other.
struct Through(Option<Projection>, Projection);

impl Through {
    /// Takes `name`, and `name_in` where there is a rank.
    fn new(
        builder: &Builder<'_>,
        name: &str,
        [out, input]: [usize; 2],
        rank: Option<usize>,
        bias: Bias,
    ) -> Result<Through> {
        let narrow =
            |rank| Projection::new(builder, &format!("{name}_in"), [rank, input], Bias::Never);
        let first = rank.map(narrow).transpose()?;
        let shape = [out, rank.unwrap_or(input)];
        Ok(Through(first, Projection::new(builder, name, shape, bias)?))
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        match &self.0 {
            Some(first) => self.1.forward(&first.forward(x)),
            None => self.1.forward(x),
        }
    }
}

impl GatedDeltaNet {
    /// Takes `name.qkv`, `.z`, `.a`, `.b`, `.o`, `.taps` `[kernel * width of qkv]`, `.decay` and
    /// `.dt` `[heads]`, `.norm` `[value_dim]`; registers a cache layer. Where each element of a key
    /// is forgotten at a rate of its own, `.decay` is `[heads * key_dim]`, `.a.bias` stands in the
    /// place of `.dt`, and a rank has `.a_in` and `.z_in`.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &DeltaNetOptions) -> Result<Self> {
        let &DeltaNetOptions { hidden, heads, value_dim, kernel, forgetting, .. } = options;
        let (rank, by_element, bias) = match forgetting {
            Forgetting::Heads => (None, false, Bias::Never),
            Forgetting::Elements { rank, .. } => (rank, true, Bias::Always),
        };
        let sizes = [heads, options.key_heads, options.key_dim, value_dim];
        let (tiled, doubled) = (options.tiled, options.doubled);
        let mut net = ops::DeltaNet { tiled, doubled, by_element, ..ops::DeltaNet::new(sizes) };
        let mut conv = ShortConv::new(net.width(), kernel);
        net.start = conv.elements();
        conv.layer = builder.cache_layer(CacheLayer::carried(net.start + net.elements()));
        net.layer = conv.layer;
        let linear = |part: &str, out: usize, input: usize| {
            Projection::new(builder, &format!("{name}.{part}"), [out, input], Bias::Never)
        };
        let through = |part: &str, out: usize, bias| {
            Through::new(builder, &format!("{name}.{part}"), [out, hidden], rank, bias)
        };
        let weight = |part: &str, len: usize| builder.weight(&format!("{name}.{part}"), &[len]);
        Ok(GatedDeltaNet {
            qkv: linear("qkv", net.width(), hidden)?,
            z: through("z", heads * value_dim, Bias::Never)?,
            a: through("a", net.gates(), bias)?,
            b: linear("b", heads, hidden)?,
            o: linear("o", hidden, heads * value_dim)?,
            taps: weight("taps", kernel * net.width())?,
            decay: weight("decay", net.gates())?,
            dt: (!by_element).then(|| weight("dt", heads)).transpose()?,
            forgetting,
            gate: options.gate,
            norm: Norm::rms(builder, &format!("{name}.norm"), value_dim, options.norm_eps)?,
            conv,
            net,
        })
    }

    /// `o(norm(net(silu(conv(qkv(x))), a(x), b(x))) * gate(z(x)))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let (z, a, b) = (self.z.forward(x), self.a.forward(x), self.b.forward(x));
        let (a, weights) = self.kept(a);
        let qkv = self.qkv.forward(x).apply(Op::from(self.conv), &[], vec![self.taps]);
        let y = qkv.map(Unary::Silu);
        let y = y.apply(Op::from(self.net), &[&a, &b], weights);
        self.o.forward(&self.norm.forward(&y).mul(&z.map(self.gate)))
    }

    /// The rows that the net reads in the place of `a`, and its weights.
    fn kept(&self, a: Tensor) -> (Tensor, Vec<WeightId>) {
        let by_decay = |x: &Tensor| x.apply(Op::from(ScaleColumns), &[], vec![self.decay]);
        match self.forgetting {
            Forgetting::Heads => (a, std::iter::once(self.decay).chain(self.dt).collect()),
            Forgetting::Elements { bound: None, .. } => {
                (by_decay(&a.map(Unary::Softplus)), Vec::new())
            }
            Forgetting::Elements { bound: Some(bound), .. } => {
                (by_decay(&a).map(Unary::Sigmoid).scale(bound), Vec::new())
            }
        }
    }
}
