//! A gated delta net (Yang et al. 2024) as in Qwen's hybrids, with a short convolution before it
//! and a gated norm after it.

use crate::{Bias, Builder, Norm, Projection, Tensor};
use formats::Result;
use ops::{Op, ShortConv, Unary};
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
}

/// `[tokens, hidden] -> [tokens, hidden]`, with a recurrent state.
pub struct GatedDeltaNet {
    qkv: Projection, // [hidden] -> [2 * key_heads * key_dim + heads * value_dim]
    z: Projection,   // [hidden] -> [heads * value_dim]
    a: Projection,   // [hidden] -> [heads]
    b: Projection,   // [hidden] -> [heads]
    o: Projection,   // [heads * value_dim] -> [hidden]
    taps: WeightId,
    decay: WeightId,
    dt: WeightId,
    norm: Norm, // of each head
    conv: ShortConv,
    net: ops::DeltaNet,
}

impl GatedDeltaNet {
    /// Takes `name.qkv`, `.z`, `.a`, `.b`, `.o`, `.taps` `[kernel * width of qkv]`, `.decay` and
    /// `.dt` `[heads]`, `.norm` `[value_dim]`; registers a cache layer.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &DeltaNetOptions) -> Result<Self> {
        let &DeltaNetOptions {
            hidden, heads, key_heads, key_dim, value_dim, kernel, tiled, ..
        } = options;
        let mut net =
            ops::DeltaNet { layer: 0, start: 0, heads, key_heads, key_dim, value_dim, tiled };
        let mut conv = ShortConv::new(net.width(), kernel);
        net.start = conv.elements();
        conv.layer = builder.cache_layer(CacheLayer::carried(net.start + net.elements()));
        net.layer = conv.layer;
        let linear = |part: &str, out: usize, input: usize| {
            Projection::new(builder, &format!("{name}.{part}"), [out, input], Bias::Never)
        };
        let weight = |part: &str, len: usize| builder.weight(&format!("{name}.{part}"), &[len]);
        Ok(GatedDeltaNet {
            qkv: linear("qkv", net.width(), hidden)?,
            z: linear("z", heads * value_dim, hidden)?,
            a: linear("a", heads, hidden)?,
            b: linear("b", heads, hidden)?,
            o: linear("o", hidden, heads * value_dim)?,
            taps: weight("taps", kernel * net.width())?,
            decay: weight("decay", heads)?,
            dt: weight("dt", heads)?,
            norm: Norm::rms(builder, &format!("{name}.norm"), value_dim, options.norm_eps)?,
            conv,
            net,
        })
    }

    /// `o(norm(net(silu(conv(qkv(x))), a(x), b(x))) * silu(z(x)))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let (z, a, b) = (self.z.forward(x), self.a.forward(x), self.b.forward(x));
        let qkv = self.qkv.forward(x).apply(Op::from(self.conv), &[], vec![self.taps]);
        let y = qkv.map(Unary::Silu);
        let y = y.apply(Op::from(self.net), &[&a, &b], vec![self.decay, self.dt]);
        self.o.forward(&self.norm.forward(&y).mul(&z.map(Unary::Silu)))
    }
}
