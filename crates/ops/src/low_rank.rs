//! Low-rank adaptation (LoRA, Hu et al. 2021) beside a product: `y + scale up (down x)`, row by
//! row.
//!
//! Each row has the adapter of its sequence, or none, and then keeps its bits. DoRA (Liu and others
//! 2024) also scales the result of the base matrix and the factors:
//! `residual + gain (y - residual + scale up (down x)) + offset`. At a table of embeddings `down x`
//! is the token's row of `down`.
//!
//! The factors are no weights of a Program: a device keeps them on numbered seats, which change
//! without a compile.

mod cases;
pub mod kernels;
pub mod pairs;

use formats::{DType, Error, Result};
use std::ops::Range;

use crate::operation::{ActivationPrecision, Operation, ReferenceCall, Sharding};
use crate::{Shape, arity};

/// `y -> y'` at a table of embeddings, `y, x -> y'` behind a product of `x`, or
/// `y, x, residual -> y'` where `y` is such a product plus `residual`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LowRank {
    /// Index of the site, by which devices find an adapter's factors.
    pub site: usize,
}

/// The change that an adapter makes at one site. Where the site is a stack of experts' matrices,
/// each expert has factors of its own, of one rank, one expert's behind the other's.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Delta {
    /// Columns of `up`.
    pub rank: usize,
    /// `[rank, in]` row-major, for each expert if there are several; at a table of embeddings
    /// `[tokens, rank]`.
    pub down: Vec<f32>,
    /// `[out, rank]` row-major, for each expert if there are several.
    pub up: Vec<f32>,
    /// The factor on the product of both.
    pub scale: f32,
    /// DoRA's.
    pub gain: Option<Gain>,
    /// The type that holds all of both factors exactly: f32 or bf16.
    pub element: DType,
}

/// DoRA's change of each output: `y` becomes `gain * y + offset`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Gain {
    /// Magnitude over norm, `[out]`.
    pub gain: Vec<f32>,
    /// `(1 - gain) * bias`, `[out]`: the base's bias is not scaled.
    pub offset: Vec<f32>,
}

impl Delta {
    /// The change of some outputs, for a rank that has these rows of the matrix, or of each of
    /// `matrices` experts'.
    pub fn rows(&self, matrices: usize, rows: Range<usize>) -> Delta {
        let own = |values: &[f32], width: usize| -> Vec<f32> {
            let each = values.chunks_exact((values.len() / matrices.max(1)).max(1));
            each.flat_map(|of| &of[rows.start * width..rows.end * width]).copied().collect()
        };
        let gain = |of: &Gain| Gain { gain: own(&of.gain, 1), offset: own(&of.offset, 1) };
        Delta {
            down: self.down.clone(),
            up: own(&self.up, self.rank),
            gain: self.gain.as_ref().map(gain),
            ..*self
        }
    }

    /// A summand of the change, for a rank that has these columns of the matrix, or of each of
    /// `matrices` experts'. The offset belongs to the rank that adds the bias.
    pub fn columns(&self, matrices: usize, columns: Range<usize>, adds_bias: bool) -> Delta {
        let input = self.down.len() / (self.rank * matrices).max(1);
        let down = self.down.chunks_exact(input.max(1));
        let gain = |of: &Gain| Gain {
            gain: of.gain.clone(),
            offset: if adds_bias { of.offset.clone() } else { vec![0.0; of.offset.len()] },
        };
        Delta {
            down: down.flat_map(|row| &row[columns.clone()]).copied().collect(),
            up: self.up.clone(),
            gain: self.gain.as_ref().map(gain),
            ..*self
        }
    }

    /// Checks that the parts have the sizes that a site of `matrices` matrices of these widths
    /// wants.
    ///
    /// # Errors
    /// The part that has not, by `site`.
    pub fn check(&self, site: &str, matrices: usize, [input, output]: [usize; 2]) -> Result<()> {
        let ranks = self.rank.checked_mul(matrices);
        let sizes = [
            ("down", self.down.len(), ranks.and_then(|ranks| ranks.checked_mul(input))),
            ("up", self.up.len(), ranks.and_then(|ranks| ranks.checked_mul(output))),
            ("gain", self.gain.as_ref().map_or(output, |g| g.gain.len()), Some(output)),
            ("offset", self.gain.as_ref().map_or(output, |g| g.offset.len()), Some(output)),
        ];
        for (part, found, wanted) in sizes {
            if self.rank == 0 || wanted != Some(found) {
                let expected = format!("rank {} of {input} to {output}", self.rank);
                return Err(Error::new(format!("{site}: {part}"), expected, found));
            }
        }
        Ok(())
    }
}

impl Operation for LowRank {
    fn name(&self) -> &'static str {
        "low_rank"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("low_rank", inputs, inputs.len().clamp(1, 3), weights, &[0])?;
        let y = inputs[0];
        let rows = inputs.get(1).is_none_or(|x| x.rows == y.rows);
        if !rows || inputs.get(2).is_some_and(|residual| *residual != y) {
            let expected = format!("operands with the rows of {y:?}");
            return Err(Error::new("low_rank", expected, format!("{:?}", &inputs[1..])));
        }
        Ok(vec![y])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        for (t, y) in call.outputs[0].chunks_exact_mut(width).enumerate() {
            let base = &call.inputs[0][t * width..][..width];
            let Some(delta) = call.deltas.get(t).copied().flatten() else {
                y.copy_from_slice(base);
                continue;
            };
            let rank = delta.rank;
            let low: Vec<f64> = match call.inputs.get(1) {
                Some(x) => {
                    let x = &x[t * call.widths[1]..][..call.widths[1]];
                    let row = |r: &[f32]| formats::dot(r, x);
                    delta.down.chunks_exact(x.len()).map(row).collect()
                }
                None => {
                    let row = &delta.down[call.tokens[t] as usize * rank..][..rank];
                    row.iter().map(|v| f64::from(*v)).collect()
                }
            };
            for (o, y) in y.iter_mut().enumerate() {
                let residual =
                    call.inputs.get(2).map_or(0.0, |residual| f64::from(residual[t * width + o]));
                let up = delta.up[o * rank..][..rank].iter().zip(&low);
                let up = up.map(|(u, l)| f64::from(*u) * l).sum::<f64>();
                let mut sum = f64::from(base[o]) + f64::from(delta.scale) * up;
                if let Some(Gain { gain, offset }) = &delta.gain {
                    sum = residual + f64::from(gain[o]) * (sum - residual) + f64::from(offset[o]);
                }
                *y = sum as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        // Whoever shares out a model's matrices would have to share out each adapter's too.
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn site(&self) -> Option<usize> {
        Some(self.site)
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }
}
