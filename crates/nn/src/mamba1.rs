//! A selective state space of the first kind (Mamba; Gu & Dao 2023): a short convolution, a scan whose
//! steps, `B` and `C` are made of what the convolution gives, and a gate.

use crate::{Bias, Builder, Norm, Projection, Tensor};
use formats::Result;
use ops::{Op, SelectiveScan, ShortConv, Unary};
use program::{CacheLayer, WeightId};

/// The configuration of a [`Mamba1`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba1Options {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Elements of `x`, each of which has a row of the state.
    pub inner: usize,
    /// Elements of `B` and of `C`.
    pub state: usize,
    /// Width of the row that steps are made of.
    pub rank: usize,
    /// Number of rows that the convolution mixes.
    pub kernel: usize,
    /// Biases of the projections of what it reads and gives.
    pub bias: Bias,
    /// Bias of the convolution.
    pub conv_bias: Bias,
    /// eps of the norms of `B`, of `C` and of the row that steps are made of, if they are normed.
    pub norm_eps: Option<f32>,
}

/// `[tokens, hidden] -> [tokens, hidden]`, with a recurrent state.
pub struct Mamba1 {
    z: Projection,     // [hidden] -> [inner]
    x: Projection,     // [hidden] -> [inner]
    dt_in: Projection, // [inner] -> [rank]
    b: Projection,     // [inner] -> [state]
    c: Projection,     // [inner] -> [state]
    dt: Projection,    // [rank] -> [inner]
    o: Projection,     // [inner] -> [hidden]
    norms: Option<[Norm; 3]>,
    conv: ShortConv,
    conv_weights: Vec<WeightId>,
    scan: SelectiveScan,
    scan_weights: Vec<WeightId>,
}

impl Mamba1 {
    /// Takes `name.z`, `.x`, `.dt_in`, `.b`, `.c`, `.dt` with a bias, `.o`, `.taps`
    /// `[kernel * inner]`, `.decay` `[state * inner]`, a row for each element of `B`, and `.skip`
    /// `[inner]`; depending on the options biases, and `.dt_norm` `[rank]`, `.b_norm` and `.c_norm`
    /// `[state]`; registers a cache layer.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &Mamba1Options) -> Result<Self> {
        let &Mamba1Options { hidden, inner, state, rank, kernel, bias, .. } = options;
        let mut conv = ShortConv::new(inner, kernel);
        let mut scan = SelectiveScan {
            start: conv.elements(),
            by_element: true,
            ..SelectiveScan::new([1, 1, inner, state])
        };
        conv.layer = builder.cache_layer(CacheLayer::carried(scan.start + scan.elements()));
        scan.layer = conv.layer;
        let linear = |part: &str, out: usize, input: usize, bias: Bias| {
            Projection::new(builder, &format!("{name}.{part}"), [out, input], bias)
        };
        let weight = |part: &str, len: usize| builder.weight(&format!("{name}.{part}"), &[len]);
        let norm = |part: &str, width: usize, eps: f32| {
            Norm::rms(builder, &format!("{name}.{part}"), width, eps)
        };
        let norms = |eps| -> Result<[Norm; 3]> {
            Ok([
                norm("dt_norm", rank, eps)?,
                norm("b_norm", state, eps)?,
                norm("c_norm", state, eps)?,
            ])
        };
        let taps = weight("taps", kernel * inner)?;
        let conv_bias = options.conv_bias.weight(builder, &format!("{name}.taps"), inner)?;
        Ok(Mamba1 {
            z: linear("z", inner, hidden, bias)?,
            x: linear("x", inner, hidden, bias)?,
            dt_in: linear("dt_in", rank, inner, Bias::Never)?,
            b: linear("b", state, inner, Bias::Never)?,
            c: linear("c", state, inner, Bias::Never)?,
            dt: linear("dt", inner, rank, Bias::Always)?,
            o: linear("o", hidden, inner, bias)?,
            norms: options.norm_eps.map(norms).transpose()?,
            conv,
            conv_weights: std::iter::once(taps).chain(conv_bias).collect(),
            scan,
            scan_weights: vec![weight("decay", scan.elements())?, weight("skip", inner)?],
        })
    }

    /// `o(scan(x', softplus(dt(dt_in(x'))), b(x'), c(x')) * silu(z(x)))` with
    /// `x' = silu(conv(x(x)))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let (z, x) = (self.z.forward(x), self.x.forward(x));
        let x = x.apply(Op::from(self.conv), &[], self.conv_weights.clone()).map(Unary::Silu);
        let mut read = [&self.dt_in, &self.b, &self.c].map(|part| part.forward(&x));
        if let Some(norms) = &self.norms {
            read = std::array::from_fn(|i| norms[i].forward(&read[i]));
        }
        let [dt, b, c] = read;
        let step = self.dt.forward(&dt).map(Unary::Softplus);
        let y = x.apply(Op::from(self.scan), &[&step, &b, &c], self.scan_weights.clone());
        self.o.forward(&y.mul(&z.map(Unary::Silu)))
    }
}
