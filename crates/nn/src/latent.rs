//! Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024): keys and values of all heads are
//! made of one latent row, and a part of each key, which turns with its position, is the same for
//! all heads.
//!
//! Either each head's keys and values are cached as it reads them, or the latents and the part that
//! turns, one row for all heads ([`LatentOptions::shared`]). Queries are taken into the space of
//! latents then, and what heads attended to is taken back, so that no head's keys or values are ever
//! made: the same sums in another order.

use crate::{Bias, BlockProjection, Builder, Norm, Projection, Tensor};
use formats::Result;
use ops::{Op, Rope, Splice, Stretch, Unary};
use program::CacheLayer;

/// The configuration of a latent attention layer.
#[derive(Debug, Clone)]
pub struct LatentOptions {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of the row that queries are made of; `None`: of the residual stream itself.
    pub query_rank: Option<usize>,
    /// Width of the row that keys and values are made of.
    pub rank: usize,
    /// Elements of a query or key that do not turn.
    pub plain: usize,
    /// Elements of a query or key that turn, behind the others.
    pub turned: usize,
    /// Elements of a value.
    pub value: usize,
    /// Biases of the matrices that read the residual stream, but for whole queries, and of the
    /// output projection.
    pub bias: Bias,
    /// eps of the norms of both rows.
    pub norm_eps: f32,
    /// The rotation of `turned` elements, if they turn.
    pub rope: Option<Rope>,
    /// The factor on scores.
    pub scale: f32,
    /// A factor on queries that depends on their position.
    pub stretch: Option<Stretch>,
    /// Whether the matrix of keys and the one of values are apart, where each head's keys and values
    /// are cached.
    pub apart: bool,
    /// Whether latents are cached, one row for all heads.
    pub shared: bool,
    /// Whether the attention output is multiplied with `sigmoid(name.gate x)` before the output
    /// projection.
    pub gated: bool,
    /// How many positions each query sees, where others choose them
    /// ([`LatentAttention::forward_chosen`]).
    pub chosen: Option<usize>,
}

impl LatentOptions {
    /// Heads that a cache layer has.
    pub fn kv_heads(&self) -> usize {
        if self.shared { 1 } else { self.heads }
    }

    /// Elements of a cached key, and of a value: of one width, which vectors divide, with zeros
    /// behind the shorter ones.
    pub fn head_dim(&self) -> usize {
        let width = match self.shared {
            true => self.rank + self.turned,
            false => (self.plain + self.turned).max(self.value),
        };
        width.next_multiple_of(8)
    }
}

/// `[tokens, hidden] -> [tokens, hidden]`.
pub struct LatentAttention {
    q: Queries,
    kv_a: Projection, // [hidden] -> [rank + turned]
    norm: Norm,
    kv: KeysValues,
    gate: Option<Projection>, // [hidden] -> [heads * value]
    o: Projection,            // [heads * value] -> [hidden]
    rope: Option<Rope>,
    stretch: Option<Stretch>,
    sizes: [usize; 4], // plain, turned, value, rank
    attend: ops::Attention,
}

enum Queries {
    /// `[hidden] -> [heads * (plain + turned)]`.
    Whole(Projection),
    /// The same through a normed row of less elements.
    LowRank(Projection, Norm, Projection),
}

enum KeysValues {
    /// `[rank] -> [heads * (plain + value)]`.
    Together(Projection),
    /// `[rank] -> [heads * plain]` and `[rank] -> [heads * value]`.
    Apart(Projection, Projection),
    /// Of each head, `[plain] -> [rank]` for queries, and `[rank] -> [value]`.
    Shared(BlockProjection, BlockProjection),
}

impl LatentAttention {
    /// Takes `name.q`, or `.q_a`, `.q_a_norm` and `.q_b`; `.kv_a`, `.kv_a_norm`; `.kv_b`, or `.k_b`
    /// and `.v_b`, or, where latents are cached, `.embed_q` `[heads * rank, plain]`, the key matrices
    /// of heads transposed, and `.v_b`; `.o`; if present, an output gate `.gate`. Registers a cache
    /// layer.
    ///
    /// # Errors
    /// Weights that are missing, or of another shape.
    pub fn new(builder: &Builder<'_>, name: &str, options: &LatentOptions) -> Result<Self> {
        let &LatentOptions { hidden, heads, rank, plain, turned, value, bias, .. } = options;
        let linear = |part: &str, shape, bias| {
            Projection::new(builder, &format!("{name}.{part}"), shape, bias)
        };
        let norm = |part: &str, width: usize| {
            Norm::rms(builder, &format!("{name}.{part}"), width, options.norm_eps)
        };
        let queries = heads * (plain + turned);
        let q = match options.query_rank {
            None => Queries::Whole(linear("q", [queries, hidden], Bias::Never)?),
            Some(rank) => Queries::LowRank(
                linear("q_a", [rank, hidden], bias)?,
                norm("q_a_norm", rank)?,
                linear("q_b", [queries, rank], Bias::Never)?,
            ),
        };
        let kv_a = linear("kv_a", [rank + turned, hidden], bias)?;
        let kv_norm = norm("kv_a_norm", rank)?;
        let block = |part: &str, shape| {
            BlockProjection::new(builder, &format!("{name}.{part}"), shape, heads)
        };
        let kv = match (options.shared, options.apart) {
            (true, _) => KeysValues::Shared(
                block("embed_q", [heads * rank, plain])?,
                block("v_b", [heads * value, rank])?,
            ),
            (false, false) => {
                KeysValues::Together(linear("kv_b", [heads * (plain + value), rank], Bias::Never)?)
            }
            (false, true) => KeysValues::Apart(
                linear("k_b", [heads * plain, rank], Bias::Never)?,
                linear("v_b", [heads * value, rank], Bias::Never)?,
            ),
        };
        let gate = || linear("gate", [heads * value, hidden], Bias::Never);
        let gate = options.gated.then(gate).transpose()?;
        let (kv_heads, head_dim) = (options.kv_heads(), options.head_dim());
        let cached = match options.shared {
            true => CacheLayer::keys(kv_heads, head_dim),
            false => CacheLayer::keys_values(kv_heads, head_dim, None),
        };
        Ok(LatentAttention {
            q,
            kv_a,
            norm: kv_norm,
            kv,
            gate,
            o: linear("o", [hidden, heads * value], bias)?,
            rope: options.rope.clone(),
            stretch: options.stretch,
            sizes: [plain, turned, value, rank],
            attend: ops::Attention {
                layer: builder.cache_layer(cached),
                heads,
                kv_heads,
                head_dim,
                scale: options.scale,
                window: None,
                chunked: false,
                cap: None,
                sinks: false,
                slopes: false,
                chosen: options.chosen,
            },
        })
    }

    /// Projects, rotates, caches, attends and projects back.
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.forward_chosen(x, |_| None)
    }

    /// The same, where each query sees only the positions that `choose` gives, of the row that
    /// queries are made of.
    pub fn forward_chosen(
        &self,
        x: &Tensor,
        choose: impl FnOnce(&Tensor) -> Option<Tensor>,
    ) -> Tensor {
        let [plain, turned, value, rank] = self.sizes;
        let ops::Attention { layer, heads, head_dim: width, .. } = self.attend;
        let cut = |x: &Tensor, heads, start, count, width| {
            // All of it is itself.
            if start == 0 && count == width && heads * width == x.width() {
                return x.clone();
            }
            x.apply(Op::from(Splice { heads, start, count, shared: false, width }), &[], vec![])
        };
        // The first elements of each head, and what is behind them: a head's own, or one for all.
        let joined = |x: &Tensor, other: &Tensor, (heads, count), shared| {
            let splice = Splice { heads, start: 0, count, shared, width };
            x.apply(Op::from(splice), &[other], vec![])
        };
        let turn = |x: Tensor| match &self.rope {
            Some(rope) => x.apply(Op::Rope(rope.clone()), &[], vec![]),
            None => x,
        };
        let (q, chosen) = match &self.q {
            Queries::Whole(q) => (q.forward(x), choose(x)),
            Queries::LowRank(a, norm, b) => {
                let row = norm.forward(&a.forward(x));
                (b.forward(&row), choose(&row))
            }
        };
        let turned_query = || turn(cut(&q, heads, plain, turned, turned));
        // All of a query as it is, where none of it turns.
        let splits = self.rope.is_some() || width != plain + turned;
        let q = match &self.kv {
            KeysValues::Shared(embed, _) => {
                let among = embed.forward(&cut(&q, heads, 0, plain, plain));
                joined(&among, &turned_query(), (heads, rank), false)
            }
            _ if splits => joined(&q, &turned_query(), (heads, plain), false),
            _ => q,
        };
        let q = match self.stretch {
            Some(stretch) => q.apply(Op::from(stretch), &[], vec![]),
            None => q,
        };
        let kv = self.kv_a.forward(x);
        let latent = self.norm.forward(&cut(&kv, 1, 0, rank, rank));
        let key = turn(cut(&kv, 1, rank, turned, turned));
        let (k, v) = match &self.kv {
            KeysValues::Together(both) => {
                let both = both.forward(&latent);
                let v = cut(&both, heads, plain, value, width);
                (joined(&both, &key, (heads, plain), true), Some(v))
            }
            KeysValues::Apart(k, v) => {
                let (k, v) = (k.forward(&latent), v.forward(&latent));
                let v = cut(&v, heads, 0, value, width);
                (joined(&k, &key, (heads, plain), true), Some(v))
            }
            KeysValues::Shared(..) => (joined(&latent, &key, (1, rank), false), None),
        };
        k.sink(Op::from(ops::KvWrite { layer }), &v.iter().collect::<Vec<_>>());
        let chosen: Vec<&Tensor> = chosen.iter().collect();
        let y = q.apply(Op::Attention(self.attend.clone()), &chosen, vec![]);
        let y = match &self.kv {
            KeysValues::Shared(_, back) => back.forward(&cut(&y, heads, 0, rank, rank)),
            _ => cut(&y, heads, 0, value, value),
        };
        match &self.gate {
            Some(gate) => self.o.forward(&y.mul(&gate.forward(x).map(Unary::Sigmoid))),
            None => self.o.forward(&y),
        }
    }
}
