//! Causal attention over a layer's cache: `y = softmax(q k^T * scale) v` per head, each query at position `p` seeing
//! the keys at positions `p - window + 1 ..= p`. Query heads share key/value heads in groups (Ainslie et al. 2023).

use crate::{Shape, arity, expect};
use formats::{Error, Result};

/// The constants of one attention layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Index of the cache layer.
    pub layer: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Multiplies the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// How many positions a query sees, itself included; `None`: all.
    pub window: Option<usize>,
}

/// `k, v ->` nothing: both `[tokens, kv_heads * head_dim]`.
pub(crate) fn write_shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("kv_write", inputs, 2, weights, &[0])?;
    if inputs[0] != inputs[1] {
        return Err(Error::new("kv_write", format!("{:?}", inputs[0]), format!("{:?}", inputs[1])));
    }
    Ok(vec![])
}

impl Attention {
    /// `q[tokens, heads * head_dim] -> same`.
    pub fn shape(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("attention", inputs, 1, weights, &[0])?;
        expect("attention", "heads modulo kv_heads", &[self.heads % self.kv_heads.max(1)], &[0])?;
        expect("attention", "query width", &[inputs[0].width], &[self.heads * self.head_dim])?;
        Ok(vec![inputs[0]])
    }

    /// Attends `q` `[tokens, heads * head_dim]` to `keys` and `values` `[positions, kv_heads * head_dim]`, which hold
    /// every position from 0, into `y`, in f64.
    pub fn reference(
        &self,
        positions: &[u32],
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        y: &mut [f32],
    ) {
        let (d, kv_width, group) =
            (self.head_dim, self.kv_heads * self.head_dim, self.heads / self.kv_heads);
        for (t, &position) in positions.iter().enumerate() {
            let last = position as usize;
            let first = self.window.map_or(0, |window| (last + 1).saturating_sub(window));
            for h in 0..self.heads {
                let q = &q[(t * self.heads + h) * d..][..d];
                let at = |p: usize| p * kv_width + h / group * d;
                let score = |p: usize| {
                    let k = &keys[at(p)..][..d];
                    q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>()
                        * f64::from(self.scale)
                };
                let scores: Vec<f64> = (first..=last).map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..d {
                    let mixed: f64 = (first..=last)
                        .map(|p| weights[p - first] * f64::from(values[at(p) + i]))
                        .sum();
                    y[(t * self.heads + h) * d + i] = (mixed / sum) as f32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::noise;

    #[test]
    fn a_window_of_one_returns_the_value_itself() {
        let attention =
            Attention { layer: 0, heads: 4, kv_heads: 2, head_dim: 3, scale: 1.0, window: Some(1) };
        let (q, keys, values) = (noise(1, 24), noise(2, 12), noise(3, 12));
        let mut y = vec![0.0; 24];
        attention.reference(&[0, 1], &q, &keys, &values, &mut y);
        for t in 0..2 {
            for h in 0..4 {
                assert_eq!(y[(t * 4 + h) * 3..][..3], values[t * 6 + h / 2 * 3..][..3]);
            }
        }
    }

    #[test]
    fn equal_scores_average_the_values_seen() {
        let attention =
            Attention { layer: 0, heads: 1, kv_heads: 1, head_dim: 1, scale: 1.0, window: None };
        let mut y = [0.0; 2];
        attention.reference(&[0, 3], &[0.0; 2], &[5.0; 4], &[1.0, 2.0, 3.0, 6.0], &mut y);
        assert_eq!(y, [1.0, 3.0]);
    }
}
