//! Rotary embedding (Su et al. 2021): pair `i` of a head turns by `position * frequency[i]`.
//!
//! Half-split pairing couples elements `(i, i + n)`, as Hugging Face checkpoints store q and k; adjacent pairing
//! couples `(2i, 2i + 1)`, as the original Llama weights and GGUF's `llama` rows do.

use crate::{Shape, arity, expect};
use formats::Result;
use std::sync::Arc;

/// Which elements of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// `(i, i + n)`, n pairs.
    Half,
    /// `(2i, 2i + 1)`.
    Adjacent,
}

/// A rotation of every head of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Elements per head. The first `2 * frequencies.len()` turn; the rest pass through.
    pub head_dim: usize,
    /// Which elements turn together.
    pub pairing: Pairing,
    /// Radians per position of each pair, scaling included.
    pub frequencies: Arc<[f32]>,
    /// Multiplies sine and cosine (YaRN's attention factor; 1 otherwise).
    pub magnitude: f32,
}

impl Rope {
    /// `x[tokens, heads * head_dim] -> same`.
    pub fn shape(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("rope", inputs, 1, weights, &[0])?;
        self.check(inputs[0].width)?;
        Ok(vec![inputs[0]])
    }

    pub(crate) fn check(&self, width: usize) -> Result<()> {
        let head_dim = self.head_dim.max(1);
        expect("rope", "width modulo head_dim", &[width % head_dim], &[0])?;
        let turned = 2 * self.frequencies.len();
        expect("rope", "elements that turn", &[turned.min(self.head_dim)], &[turned])
    }

    /// The two element indices of pair `i` within a head.
    pub fn pair(&self, i: usize) -> (usize, usize) {
        match self.pairing {
            Pairing::Half => (i, i + self.frequencies.len()),
            Pairing::Adjacent => (2 * i, 2 * i + 1),
        }
    }

    /// Cosine and sine of every pair at `position`: `cos` and `sin` hold `frequencies.len()` elements.
    ///
    /// The angle is an f32 product, as reference implementations compute it; its sine is taken in f64.
    pub fn angles(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        for (i, &frequency) in self.frequencies.iter().enumerate() {
            let (s, c) = f64::from(position as f32 * frequency).sin_cos();
            cos[i] = c as f32 * self.magnitude;
            sin[i] = s as f32 * self.magnitude;
        }
    }

    /// Rotates `x` `[tokens, width]` in place.
    pub fn reference(&self, positions: &[u32], width: usize, x: &mut [f32]) {
        let n = self.frequencies.len();
        let (mut cos, mut sin) = (vec![0.0; n], vec![0.0; n]);
        for (&position, row) in positions.iter().zip(x.chunks_exact_mut(width)) {
            self.angles(position, &mut cos, &mut sin);
            for head in row.chunks_exact_mut(self.head_dim) {
                for i in 0..n {
                    let (a, b) = self.pair(i);
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                    head[a] = (x * c - y * s) as f32;
                    head[b] = (y * c + x * s) as f32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairings_differ_by_a_permutation_only() {
        let half = Rope {
            head_dim: 4,
            pairing: Pairing::Half,
            frequencies: Arc::from([1.0, 0.01]),
            magnitude: 1.0,
        };
        let adjacent = Rope { pairing: Pairing::Adjacent, ..half.clone() };
        let mut a = [1.0, 2.0, 3.0, 4.0];
        let mut b = [1.0, 3.0, 2.0, 4.0];
        half.reference(&[7], 4, &mut a);
        adjacent.reference(&[7], 4, &mut b);
        assert_eq!(a, [b[0], b[2], b[1], b[3]]);
        let (s, c) = 7f32.sin_cos();
        assert!((a[0] - (c - 3.0 * s)).abs() < 1e-6);
    }
}
