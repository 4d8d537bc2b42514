//! Row selection: keeps the rows whose logits were asked for. The row numbers are step arguments.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;

use crate::embed::{PICKS, WIDTHS, gather, numbers};
use crate::gradient::{Forward, Reverse, Spread, Wrt, give, linear_in_x, one};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::trial::{every_float, exact, memory, random, rows_of};
use crate::{Rows, Shape, arity};
use formats::{Error, Result};

/// `x[tokens, width] -> [outputs, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Select;

impl Operation for Select {
    fn name(&self) -> &'static str {
        "select"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("select", inputs, 1, weights, &[0])?;
        if inputs[0].rows != Rows::Tokens {
            return Err(Error::new("select", "a row per token", "rows already selected"));
        }
        Ok(vec![Shape { rows: Rows::Outputs, width: inputs[0].width }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call.inputs[0], call.picks, call.widths[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = select_rows(to.scalar(X));
        let bound = [("picks", Bound::Picks), ("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        to.push(kernel, numbers(to.rows(Y), to.width(Y)), &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, Spread, &[dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        linear_in_x(at, *self)
    }
}

/// `y[i] = x[rows[i]]`.
pub fn reference(x: &[f32], rows: &[u32], width: usize, y: &mut [f32]) {
    crate::embed::reference(rows, x, width, y);
}

/// `y[i] = x[picks[i]]`, on the device. `picks` are row numbers of `x`.
#[kernel]
pub fn select_rows(
    picks: In<u32>,
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    scalar: Scalar,
) {
    gather("picks", picks, "x", x, y, width);
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "select_rows", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(width, why): (usize, &str)| {
            let x = random(scalar, width as u64 + 50, 5 * width);
            let n = PICKS.len() * width;
            let mut y = vec![0.0; n];
            reference(&x.to_f32(), &PICKS, width, &mut y);
            Case {
                kernel: select_rows(scalar).record(),
                label: format!("4 of 5 x {width} {scalar}, {why}"),
                numbers: numbers(PICKS.len(), width),
                buffers: vec![Buffer::words(&PICKS), x, Buffer::zeros(scalar, n)],
                expected: vec![(2, exact(scalar, &y))],
            }
        };
        WIDTHS.into_iter().map(case).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let n = rows * width;
        let picks: Vec<u32> = (0..rows as u32).collect();
        let buffers = vec![
            Fill::These(Buffer::words(&picks)),
            Fill::Noise(scalar, n),
            Fill::Zeros(scalar, n),
        ];
        vec![memory(
            select_rows(scalar),
            &format!("{rows} x {width}"),
            numbers(rows, width),
            buffers,
            0,
        )]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
