//! A selective state space (Mamba-2; Dao & Gu 2024), with a short convolution in front of it and a
//! gate behind it, which is normed by groups or not at all.

use crate::{Bias, Builder, Projection, Tensor};
use formats::Result;
use ops::{GatedNorm, Op, SelectiveScan, ShortConv, Unary};
use program::{CacheLayer, WeightId};

/// The configuration of a [`Mamba`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaOptions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of heads.
    pub heads: usize,
    /// Groups of heads that share `B` and `C`; divides `heads`.
    pub groups: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of `B` and of `C`.
    pub state: usize,
    /// Number of rows that the convolution mixes.
    pub kernel: usize,
    /// The least and the greatest step.
    pub limit: [f32; 2],
    /// Biases of the projections of what it reads.
    pub bias: Bias,
    /// Bias of the projection of what it gives.
    pub output_bias: Bias,
    /// Bias of the convolution.
    pub conv_bias: Bias,
    /// The norm behind it; none where the gate alone is.
    pub norm: Option<GatedNorm>,
    /// Factors on what it reads and gives.
    pub multipliers: MambaMultipliers,
}

/// Factors on what a [`Mamba`] reads and gives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaMultipliers {
    /// On the gate.
    pub z: f32,
    /// On the steps, before their bias.
    pub dt: f32,
    /// On the result.
    pub out: f32,
}

impl Default for MambaMultipliers {
    fn default() -> Self {
        MambaMultipliers { z: 1.0, dt: 1.0, out: 1.0 }
    }
}

/// `[tokens, hidden] -> [tokens, hidden]`, with a recurrent state.
pub struct Mamba {
    z: Projection,   // [hidden] -> [heads * head_dim]
    xbc: Projection, // [hidden] -> [heads * head_dim + 2 * groups * state]
    dt: Projection,  // [hidden] -> [heads]
    o: Projection,   // [heads * head_dim] -> [hidden]
    conv: ShortConv,
    conv_weights: Vec<WeightId>,
    scan: SelectiveScan,
    scan_weights: Vec<WeightId>,
    norm: Option<(GatedNorm, WeightId)>,
    multipliers: MambaMultipliers,
}

impl Mamba {
    /// Takes `name.z`, `.xbc`, `.dt`, `.o`, `.taps` `[kernel * width of xbc]`, `.decay`, `.step` and
    /// `.skip` `[heads]`, and depending on the options biases and `.norm` `[heads * head_dim]`;
    /// registers a cache layer.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &MambaOptions) -> Result<Self> {
        let &MambaOptions { hidden, heads, groups, head_dim, state, kernel, limit, .. } = options;
        let sizes = [heads, groups, head_dim, state];
        let mut scan = SelectiveScan { limit, ..SelectiveScan::new(sizes) };
        let mut conv = ShortConv::new(scan.width(), kernel);
        scan.start = conv.elements();
        conv.layer = builder.cache_layer(CacheLayer::carried(scan.start + scan.elements()));
        scan.layer = conv.layer;
        let inner = heads * head_dim;
        let linear = |part: &str, out: usize, input: usize, bias: Bias| {
            Projection::new(builder, &format!("{name}.{part}"), [out, input], bias)
        };
        let weight = |part: &str, len: usize| builder.weight(&format!("{name}.{part}"), &[len]);
        let taps = weight("taps", kernel * scan.width())?;
        let conv_bias = options.conv_bias.weight(builder, &format!("{name}.taps"), scan.width())?;
        let scanned = ["decay", "step", "skip"].map(|part| weight(part, heads));
        let norm = options.norm.map(|norm| Ok((norm, weight("norm", inner)?))).transpose()?;
        Ok(Mamba {
            z: linear("z", inner, hidden, options.bias)?,
            xbc: linear("xbc", scan.width(), hidden, options.bias)?,
            dt: linear("dt", heads, hidden, options.bias)?,
            o: linear("o", hidden, inner, options.output_bias)?,
            conv,
            conv_weights: std::iter::once(taps).chain(conv_bias).collect(),
            scan,
            scan_weights: scanned.into_iter().collect::<Result<_>>()?,
            norm,
            multipliers: options.multipliers,
        })
    }

    /// `o(norm(scan(silu(conv(xbc(x))), dt(x)) * silu(z(x))))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let scaled = |x: Tensor, by: f32| if by == 1.0 { x } else { x.scale(by) };
        let MambaMultipliers { z: on_z, dt: on_dt, out } = self.multipliers;
        let (z, dt) = (self.z.forward(x), self.dt.forward(x));
        let (z, dt) = (scaled(z, on_z), scaled(dt, on_dt));
        let xbc = self.xbc.forward(x).apply(Op::from(self.conv), &[], self.conv_weights.clone());
        let xbc = xbc.map(Unary::Silu);
        let y = xbc.apply(Op::from(self.scan), &[&dt], self.scan_weights.clone());
        let y = match self.norm {
            Some((norm, weight)) => z.apply(Op::from(norm), &[&y], vec![weight]),
            None => y.mul(&z.map(Unary::Silu)),
        };
        scaled(self.o.forward(&y), out)
    }
}
