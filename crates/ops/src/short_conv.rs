//! A short causal convolution, each element by itself: `y[p, i] = sum_j taps[j, i] x[p - kernel + 1 + j, i]`, where
//! `x` is 0 in front of the sequence. What it carries are the last `kernel - 1` rows of `x`.

use formats::{Error, Result};

use crate::operation::{Access, CacheUse, Call, Operation, Precision, Sharding};
use crate::{Shape, arity, expect};

/// `x[tokens, width]; taps[kernel * width] -> [tokens, width]`; the last `width` taps are those of a row itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConv {
    /// Index of the cache layer.
    pub layer: usize,
    /// Where its part of the layer's state begins, `[kernel - 1, width]`: the rows before the next one, the oldest
    /// first.
    pub start: usize,
    /// Elements in a row.
    pub width: usize,
    /// Rows that are mixed, the row itself among them: at least 2.
    pub kernel: usize,
}

impl ShortConv {
    /// Elements of its part of the state.
    pub fn elements(&self) -> usize {
        self.kernel.saturating_sub(1) * self.width
    }
}

impl Operation for ShortConv {
    fn name(&self) -> &'static str {
        "short_conv"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("short_conv", inputs, 1, weights, &[1])?;
        if self.kernel < 2 {
            return Err(Error::new("short_conv", "a kernel of 2 rows or more", self.kernel));
        }
        expect("short_conv", "width", &[inputs[0].width], &[self.width])?;
        expect("short_conv", "taps", weights[0], &[self.kernel * self.width])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let width = self.width;
        let x = call.cache[self.layer].note(self.start, call.positions, width, call.inputs[0]);
        let taps = &call.weights[0];
        for (t, &position) in call.positions.iter().enumerate() {
            for i in 0..width {
                let tap = |j: usize| {
                    let at = (position as usize + j).checked_sub(self.kernel - 1)?;
                    Some(f64::from(taps[j * width + i]) * f64::from(x[at * width + i]))
                };
                let sum: f64 = (0..self.kernel).filter_map(tap).sum();
                call.outputs[0][t * width + i] = sum as f32;
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

    fn precision(&self) -> Precision {
        Precision::Full
    }
}
