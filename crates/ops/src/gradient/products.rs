//! What gradients of products are made of: `dx = dy W`, `dW = dy' x`, and sums over rows and columns.

use super::{Forward, Reverse, Var, Wrt, give, one, zeros};
use crate::operation::{Call, Operation, Sharding};
use crate::{Rows, Shape, arity, expect};
use formats::{Error, Result};

/// `dy[rows, out]; weight[out, in] -> [rows, in]`: `dx[t, i] = sum_o dy[t, o] weight[o, i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearBackward;

/// `dy[rows, out], x[rows, in] -> [out, in]`: `dw[o, i] = sum_t dy[t, o] x[t, i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outer;

/// `x[rows, width] -> [1, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumRows;

/// `x[rows, width] -> [rows, 1]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumColumns;

/// The rule of `y = x W' + b`, whose cotangent is `dy`: the weight is the node's first, the bias its second.
pub(crate) fn linear_vjp(at: &mut dyn Reverse, dy: Var) -> Result<()> {
    let x = at.input(0);
    give(at, Wrt::Input(0), |at| one(at, LinearBackward, &[dy], &[0]))?;
    give(at, Wrt::Weight(0), |at| one(at, Outer, &[dy, x], &[]))?;
    match at.weight(1) {
        Some(_) => give(at, Wrt::Weight(1), |at| one(at, SumRows, &[dy], &[])),
        None => Ok(()),
    }
}

/// The tangent of `y = x W' + b`.
pub(crate) fn linear_jvp(at: &mut dyn Forward) -> Result<()> {
    let x = at.input(0);
    let (dx, dw) = (at.tangent(0), at.weight_tangent(0));
    linear_tangent(at, dx, Some(0))?;
    linear_tangent(at, Some(x), dw)?;
    let Some(db) = at.weight_tangent(1) else { return Ok(()) };
    // The bias alone: a product with zeros.
    let none = zeros(at, x)?;
    let dy = one(at, crate::Linear, &[none], &[0, db])?;
    at.add(0, dy)
}

fn linear_tangent(at: &mut dyn Forward, x: Option<Var>, weight: Option<usize>) -> Result<()> {
    let (Some(x), Some(weight)) = (x, weight) else { return Ok(()) };
    let dy = one(at, crate::Linear, &[x], &[weight])?;
    at.add(0, dy)
}

impl Operation for LinearBackward {
    fn name(&self) -> &'static str {
        "linear_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[1])?;
        let width = weights[0].last().copied().unwrap_or(0);
        expect(self.name(), "weight", weights[0], &[inputs[0].width, width])?;
        Ok(vec![Shape { width, ..inputs[0] }])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let (out, weight) = (call.widths[0], &call.weights[0]);
        let width = weight.len() / out;
        let rows = call.inputs[0].chunks_exact(out).zip(call.outputs[0].chunks_exact_mut(width));
        for (dy, dx) in rows {
            for (i, dx) in dx.iter_mut().enumerate() {
                let terms = dy.iter().enumerate();
                let terms = terms.map(|(o, dy)| f64::from(*dy) * f64::from(weight[o * width + i]));
                *dx = terms.sum::<f64>() as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let (Some(ddx), dy) = (at.cotangent(0), at.input(0)) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, crate::Linear, &[ddx], &[0]))?;
        give(at, Wrt::Weight(0), |at| one(at, Outer, &[dy, ddx], &[]))
    }
}

impl Operation for Outer {
    fn name(&self) -> &'static str {
        "outer"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[0])?;
        if inputs[0].rows != inputs[1].rows {
            let [a, b] = [inputs[0], inputs[1]].map(|shape| format!("{shape:?}"));
            return Err(Error::new(self.name(), a, b));
        }
        Ok(vec![Shape { rows: Rows::Fixed(inputs[0].width), width: inputs[1].width }])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let [out, width] = [call.widths[0], call.widths[1]];
        let (dy, x) = (call.inputs[0], call.inputs[1]);
        for (at, dw) in call.outputs[0].iter_mut().enumerate() {
            let (o, i) = (at / width, at % width);
            let rows = 0..dy.len() / out;
            let term = |t: usize| f64::from(dy[t * out + o]) * f64::from(x[t * width + i]);
            *dw = rows.map(term).sum::<f64>() as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for SumRows {
    fn name(&self) -> &'static str {
        "sum_rows"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![Shape { rows: Rows::Fixed(1), width: inputs[0].width }])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let (x, width) = (call.inputs[0], call.widths[0]);
        for (i, y) in call.outputs[0].iter_mut().enumerate() {
            *y = x.iter().skip(i).step_by(width).map(|x| f64::from(*x)).sum::<f64>() as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for SumColumns {
    fn name(&self) -> &'static str {
        "sum_columns"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![Shape { width: 1, ..inputs[0] }])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let rows = call.inputs[0].chunks_exact(call.widths[0]);
        for (x, y) in rows.zip(&mut call.outputs[0]) {
            *y = x.iter().map(|x| f64::from(*x)).sum::<f64>() as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
