//! Each column times a number of its own: `y[t, i] = x[t, i] s[i] + b[i]`. DoRA (Liu et al. 2024) does so to the products of matrices
//! whose rows it gives other lengths.

use super::{Forward, Reverse, SumRows, Wrt, give, mul, one, zeros};
use crate::operation::{Call, Operation, Sharding};
use crate::{Shape, arity, expect};
use formats::Result;

/// `x[rows, width]; s[width], (b[width]) -> [rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleColumns;

impl Operation for ScaleColumns {
    fn name(&self) -> &'static str {
        "scale_columns"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[1, 2])?;
        for weight in weights {
            expect(self.name(), "weight", weight, &[inputs[0].width])?;
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let (x, width) = (call.inputs[0], call.widths[0]);
        let bias = |i: usize| call.weights.get(1).map_or(0.0, |bias| f64::from(bias[i]));
        for (at, y) in call.outputs[0].iter_mut().enumerate() {
            let i = at % width;
            *y = (f64::from(x[at]) * f64::from(call.weights[0][i]) + bias(i)) as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let (Some(dy), x) = (at.cotangent(0), at.input(0)) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, *self, &[dy], &[0]))?;
        give(at, Wrt::Weight(0), |at| {
            let product = mul(at, dy, x)?;
            one(at, SumRows, &[product], &[])
        })?;
        match at.weight(1) {
            Some(_) => give(at, Wrt::Weight(1), |at| one(at, SumRows, &[dy], &[])),
            None => Ok(()),
        }
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let x = at.input(0);
        if let Some(dx) = at.tangent(0) {
            let dy = one(at, *self, &[dx], &[0])?;
            at.add(0, dy)?;
        }
        if let Some(ds) = at.weight_tangent(0) {
            let dy = one(at, *self, &[x], &[ds])?;
            at.add(0, dy)?;
        }
        let Some(db) = at.weight_tangent(1) else { return Ok(()) };
        // The bias alone: columns of zeros.
        let none = zeros(at, x)?;
        let dy = one(at, *self, &[none], &[0, db])?;
        at.add(0, dy)
    }
}
