//! A short convolution between two gates, as in LFM2 (Liquid AI 2025).

use crate::{Bias, Builder, Projection, Tensor};
use formats::Result;
use ops::{Op, ShortConv};
use program::{CacheLayer, WeightId};

/// `[tokens, hidden] -> [tokens, hidden]`, which carries the last rows that it mixes.
pub struct GatedConv {
    x: Projection,        // [hidden] -> [hidden]
    gate: Projection,     // [hidden] -> [hidden]
    out_gate: Projection, // [hidden] -> [hidden]
    o: Projection,        // [hidden] -> [hidden]
    taps: WeightId,
    conv: ShortConv,
}

impl GatedConv {
    /// Takes `name.x`, `.gate`, `.out_gate` and `.o`, and `.taps` `[kernel * hidden]`; registers a
    /// cache layer. `kernel` is the number of rows that are mixed.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, hidden: usize, kernel: usize) -> Result<Self> {
        let mut conv = ShortConv::new(hidden, kernel);
        conv.layer = builder.cache_layer(CacheLayer::carried(conv.elements()));
        let linear = |part: &str| {
            Projection::new(builder, &format!("{name}.{part}"), [hidden, hidden], Bias::Never)
        };
        Ok(GatedConv {
            x: linear("x")?,
            gate: linear("gate")?,
            out_gate: linear("out_gate")?,
            o: linear("o")?,
            taps: builder.weight(&format!("{name}.taps"), &[kernel * hidden])?,
            conv,
        })
    }

    /// `o(out_gate(x) * conv(gate(x) * x(x)))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let y = self.gate.forward(x).mul(&self.x.forward(x));
        let y = y.apply(Op::from(self.conv), &[], vec![self.taps]);
        self.o.forward(&self.out_gate.forward(x).mul(&y))
    }
}
