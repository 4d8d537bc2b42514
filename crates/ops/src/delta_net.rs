//! A gated delta net (Yang et al. 2024, Gated Delta Networks): each head carries a matrix `S` `[key, value]` that
//! maps keys to values, forgets some of it at each position, and corrects what it says of the position's key:
//!
//! ```text
//! S' = g S,  S = S' + k (beta (v - k S')),  y = q S
//! g = exp(-exp(decay) softplus(a + dt)),  beta = sigmoid(b)
//! ```
//!
//! `q` and `k` are divided by their lengths first, and `q` by the root of its number of elements.

use formats::Result;

use crate::operation::{Access, CacheUse, CachedWork, Call, Operation, Precision, Sharding};
use crate::{Shape, arity, expect};

/// `qkv[tokens, 2 * key_heads * key_dim + heads * value_dim], a[tokens, heads], b[tokens, heads];
/// decay[heads], dt[heads] -> [tokens, heads * value_dim]`. Consecutive heads share a head of `q` and `k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNet {
    /// Index of the cache layer.
    pub layer: usize,
    /// Where its part of the layer's state begins, `[heads, key_dim, value_dim]`.
    pub start: usize,
    /// Heads, of which each has values and a matrix.
    pub heads: usize,
    /// Heads of queries and keys; divides `heads`.
    pub key_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

/// Added to the square of the length of a query or key.
const LENGTH_EPS: f32 = 1e-6;

impl DeltaNet {
    /// Elements in a row of queries, keys and values.
    pub fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.heads * self.value_dim
    }

    /// Elements of its part of the state.
    pub fn elements(&self) -> usize {
        self.heads * self.key_dim * self.value_dim
    }

    /// Moves a head's matrix `[key_dim, value_dim]` one position on, and gives `y`; all in f64.
    fn advance(&self, state: &mut [f64], [q, k, v]: [&[f32]; 3], gate: f64, beta: f64) -> Vec<f64> {
        let unit = |x: &[f32]| -> Vec<f64> {
            let square: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let length = (square + f64::from(LENGTH_EPS)).sqrt();
            x.iter().map(|&x| f64::from(x) / length).collect()
        };
        let (q, k) = (unit(q), unit(k));
        let (n, root) = (self.value_dim, (self.key_dim as f64).sqrt());
        state.iter_mut().for_each(|s| *s *= gate);
        (0..n)
            .map(|j| {
                let said: f64 = (0..self.key_dim).map(|i| state[i * n + j] * k[i]).sum();
                let change = (f64::from(v[j]) - said) * beta;
                (0..self.key_dim).for_each(|i| state[i * n + j] += k[i] * change);
                (0..self.key_dim).map(|i| state[i * n + j] * q[i]).sum::<f64>() / root
            })
            .collect()
    }
}

impl Operation for DeltaNet {
    fn name(&self) -> &'static str {
        "delta_net"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("delta_net", inputs, 3, weights, &[2])?;
        let shared = self.heads % self.key_heads.max(1);
        expect("delta_net", "heads modulo key heads", &[shared], &[0])?;
        expect("delta_net", "queries, keys and values", &[inputs[0].width], &[self.width()])?;
        for (operand, input) in [("a", 1), ("b", 2)] {
            expect("delta_net", operand, &[inputs[input].width], &[self.heads])?;
        }
        for (operand, weight) in ["decay", "dt"].into_iter().zip(weights) {
            expect("delta_net", operand, weight, &[self.heads])?;
        }
        Ok(vec![Shape { width: self.heads * self.value_dim, ..inputs[0] }])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let DeltaNet { heads, key_heads, key_dim, value_dim, .. } = *self;
        // A row of the history: queries, keys and values, then a, then b.
        let (width, tokens) = (self.width(), call.positions.len());
        let row = |t: usize| {
            let of = |i: usize, width: usize| &call.inputs[i][t * width..][..width];
            [of(0, width), of(1, heads), of(2, heads)].concat()
        };
        let rows: Vec<f32> = (0..tokens).flat_map(row).collect();
        let each = width + 2 * heads;
        let history = call.cache[self.layer].note(self.start, call.positions, each, &rows);
        let Some(&last) = call.positions.last() else { return };
        let (decay, dt) = (&call.weights[0], &call.weights[1]);
        let mut states = vec![0.0; self.elements()];
        for (position, row) in history.chunks_exact(each).enumerate().take(last as usize + 1) {
            let t = call.positions.iter().position(|&p| p as usize == position);
            for (h, state) in states.chunks_exact_mut(key_dim * value_dim).enumerate() {
                let of = h / (heads / key_heads) * key_dim;
                let (q, k) = (&row[of..][..key_dim], &row[key_heads * key_dim + of..][..key_dim]);
                let v = &row[2 * key_heads * key_dim + h * value_dim..][..value_dim];
                let (a, b) = (f64::from(row[width + h]), f64::from(row[width + heads + h]));
                let step = (a + f64::from(dt[h])).exp().ln_1p();
                let gate = (-f64::from(decay[h]).exp() * step).exp();
                let beta = 1.0 / (1.0 + (-b).exp());
                let y = self.advance(state, [q, k, v], gate, beta);
                let Some(t) = t else { continue };
                let out = &mut call.outputs[0][(t * heads + h) * value_dim..][..value_dim];
                out.iter_mut().zip(y).for_each(|(out, y)| *out = y as f32);
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn cache(&self) -> Option<CacheUse> {
        let access = Access::Carry { start: self.start, elements: self.elements() };
        Some(CacheUse { layer: self.layer, access })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn cached_work(&self, positions: &[u32], _oldest: u32) -> CachedWork {
        // For each element of the state: forgetting, what it says, the change and the answer.
        let operations = 7 * (positions.len() * self.elements()) as u64;
        CachedWork { positions: 0, operations }
    }

    fn precision(&self) -> Precision {
        Precision::Full
    }
}
