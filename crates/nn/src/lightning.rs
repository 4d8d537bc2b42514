//! Lightning attention (Qin et al. 2024; MiniMax 2025): attention without a softmax, whose keys and
//! values are forgotten at a rate of each head. A head's matrix is the sum of what it has seen:
//!
//! ```text
//! kv = exp(-rate) kv + k^T v,  y = q kv
//! ```
//!
//! A selective state space computes it, with `v` as its input, `k` as its `B` and `q` as its `C`, all
//! of whose steps are 1.

use crate::{Bias, Builder, Norm, Projection, Tensor};
use formats::Result;
use ops::{Op, SelectiveScan, Splice, Unary};
use program::{CacheLayer, WeightId};

/// The configuration of a [`LightningAttention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LightningOptions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Added to the mean square of the norm of what it gives.
    pub eps: f32,
}

/// `[tokens, hidden] -> [tokens, hidden]`, with a recurrent state.
pub struct LightningAttention {
    vkq: Projection,  // [hidden] -> [3 * heads * head_dim]
    gate: Projection, // [hidden] -> [heads * head_dim]
    o: Projection,    // [heads * head_dim] -> [hidden]
    norm: Norm,
    scan: SelectiveScan,
    scan_weights: Vec<WeightId>,
}

impl LightningAttention {
    /// Takes `name.vkq`, the rows of all heads' values, then keys, then queries; `.gate`, `.o`,
    /// `.norm`; `.rates`, minus the rates of heads, and `.zeros` `[heads]`. Registers a cache layer.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &LightningOptions) -> Result<Self> {
        let &LightningOptions { hidden, heads, head_dim, eps } = options;
        let inner = heads * head_dim;
        let linear = |part: &str, out: usize, input: usize| {
            Projection::new(builder, &format!("{name}.{part}"), [out, input], Bias::Never)
        };
        let vector = |part: &str| builder.weight(&format!("{name}.{part}"), &[heads]);
        let sizes = [heads, heads, head_dim, head_dim];
        let mut scan = SelectiveScan { limit: [1.0; 2], ..SelectiveScan::new(sizes) };
        scan.layer = builder.cache_layer(CacheLayer::carried(scan.elements()));
        let zeros = vector("zeros")?;
        Ok(LightningAttention {
            vkq: linear("vkq", 3 * inner, hidden)?,
            gate: linear("gate", inner, hidden)?,
            o: linear("o", hidden, inner)?,
            norm: Norm::rms(builder, &format!("{name}.norm"), inner, eps)?,
            scan,
            scan_weights: vec![vector("rates")?, zeros, zeros],
        })
    }

    /// `o(sigmoid(gate(x)) * norm(scan(silu(vkq(x)))))`.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let heads = self.scan.heads;
        // Steps are bounded by 1 from both sides, whatever these are.
        let any = Splice { heads: 1, start: 0, count: heads, shared: false, width: heads };
        let any = x.apply(Op::from(any), &[], Vec::new());
        let vkq = self.vkq.forward(x).map(Unary::Silu);
        let y = vkq.apply(Op::from(self.scan), &[&any], self.scan_weights.clone());
        self.o.forward(&self.norm.forward(&y).mul(&self.gate.forward(x).map(Unary::Sigmoid)))
    }
}
