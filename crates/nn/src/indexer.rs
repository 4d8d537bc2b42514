//! The lightning indexer (DeepSeek-AI, DeepSeek-V3.2, 2025): chooses the positions that latent
//! attention sees, by a few small heads that share their keys.
//!
//! The keys have a layer norm, and the first elements of queries and keys turn. They are cached in a
//! layer of their own, whose values are the keys once more, since a layer has both.

use crate::{Bias, Builder, Norm, Projection, Tensor};
use formats::Result;
use ops::{Op, Rope};
use program::CacheLayer;

/// The configuration of an indexer.
#[derive(Debug, Clone)]
pub struct IndexerOptions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the row that queries are made of.
    pub query_rank: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Positions that are chosen.
    pub count: usize,
    /// eps of the keys' layer norm.
    pub norm_eps: f32,
    /// The rotation of heads.
    pub rope: Rope,
}

/// `[tokens, hidden], [tokens, query_rank] -> [tokens, count]`.
pub struct LightningIndexer {
    q: Projection, // [query_rank] -> [heads * head_dim]
    k: Projection, // [hidden] -> [head_dim]
    norm: Norm,
    heads: Projection, // [hidden] -> [heads]
    rope: Rope,
    choose: ops::Indexer,
}

impl LightningIndexer {
    /// Takes `name.q`, `.k`, `.k_norm`, `.k_norm.bias` and `.heads`. Registers a cache layer.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &IndexerOptions) -> Result<Self> {
        let &IndexerOptions { hidden, query_rank, heads, head_dim, count, norm_eps, .. } = options;
        let linear = |part: &str, shape| {
            Projection::new(builder, &format!("{name}.{part}"), shape, Bias::Never)
        };
        let norm = format!("{name}.k_norm");
        Ok(LightningIndexer {
            q: linear("q", [heads * head_dim, query_rank])?,
            k: linear("k", [head_dim, hidden])?,
            norm: Norm::layer(builder, &norm, head_dim, norm_eps, Bias::Always)?,
            heads: linear("heads", [heads, hidden])?,
            rope: options.rope.clone(),
            choose: ops::Indexer {
                layer: builder.cache_layer(CacheLayer::keys(1, head_dim)),
                heads,
                head_dim,
                count,
                window: None,
            },
        })
    }

    /// Caches keys of `x`, and chooses positions by queries made of `row`.
    pub fn forward(&self, x: &Tensor, row: &Tensor) -> Tensor {
        let turn = |x: &Tensor| x.apply(Op::Rope(self.rope.clone()), &[], vec![]);
        let k = turn(&self.norm.forward(&self.k.forward(x)));
        k.sink(Op::from(ops::KvWrite { layer: self.choose.layer }), &[]);
        let q = turn(&self.q.forward(row));
        q.apply(Op::from(self.choose.clone()), &[&self.heads.forward(x)], vec![])
    }
}
