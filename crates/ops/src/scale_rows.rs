//! Each row times a number of its own: `y[t, i] = x[t, i] s[t]`.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::gradient::{Forward, Reverse, SumColumns, Wrt, give, mul, one};
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{every_float, memory, random};
use crate::{Shape, arity, expect};
use formats::Result;

/// `x[rows, width], s[rows, 1] -> [rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ScaleRows;

impl Operation for ScaleRows {
    fn name(&self) -> &'static str {
        "scale_rows"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("scale_rows", inputs, 2, weights, &[0])?;
        expect("scale_rows", "width of the factors", &[inputs[1].width], &[1])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(call.inputs[0], call.inputs[1], call.widths[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn shares_type(&self, operand: Operand) -> bool {
        operand != Operand::Input(1)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let factors = Operand::Input(1);
        let numbers =
            Numbers::new().with("rows", to.rows(X) as u32).with("width", to.width(X) as u32);
        let bound = [("x", Bound::Value(X)), ("s", Bound::Value(factors)), ("y", Bound::Value(Y))];
        to.push(scale_rows(to.scalar(X), to.scalar(factors)), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let (x, s) = (at.input(0), at.input(1));
        give(at, Wrt::Input(0), |at| one(at, *self, &[dy, s], &[]))?;
        give(at, Wrt::Input(1), |at| {
            let product = mul(at, dy, x)?;
            one(at, SumColumns, &[product], &[])
        })
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let (x, s) = (at.input(0), at.input(1));
        if let Some(dx) = at.tangent(0) {
            let dy = one(at, *self, &[dx, s], &[])?;
            at.add(0, dy)?;
        }
        let Some(ds) = at.tangent(1) else { return Ok(()) };
        let dy = one(at, *self, &[x, ds], &[])?;
        at.add(0, dy)
    }
}

/// `y = x s`, row by row.
pub fn reference(x: &[f32], s: &[f32], width: usize, y: &mut [f32]) {
    for (i, y) in y.iter_mut().enumerate() {
        *y = x[i] * s[i / width];
    }
}

/// `y[t, i] = x[t, i] s[t]`, on the device.
#[kernel]
pub fn scale_rows(
    x: In<{ scalar }>,
    s: In<{ factors }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    scalar: Scalar,
    factors: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("width"));
    holds("s", dim("rows"));
    holds("y", dim("rows") * dim("width"));
    begin();
    let row = group_id();
    let factor = s.get(row).f32();
    for i in strided(width) {
        y[row * width + i] = (x.get(row * width + i).f32() * factor).cast();
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "scale_rows", cases, benches }];

fn numbers(rows: usize, width: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32)
}

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(rows, width, why): (usize, usize, &str)| {
            let (x, s) = (random(scalar, 3, rows * width), random(Scalar::F32, 4, rows));
            let mut y = vec![0.0; rows * width];
            reference(&x.to_f32(), &s.to_f32(), width, &mut y);
            let want = y.into_iter().map(f64::from).collect();
            Case {
                kernel: scale_rows(scalar, Scalar::F32).record(),
                label: format!("{rows} x {width} {scalar}: {why}"),
                numbers: numbers(rows, width),
                buffers: vec![x, s, Buffer::zeros(scalar, rows * width)],
                expected: vec![(2, Expected::Near(want, tolerance(scalar)))],
            }
        };
        [(1, 5, "a short row"), (3, 600, "rows longer than a group")].map(case).to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    let (rows, width) = (4096, 2048);
    let buffers = vec![
        Fill::Noise(Scalar::BF16, rows * width),
        Fill::Noise(Scalar::F32, rows),
        Fill::Zeros(Scalar::BF16, rows * width),
    ];
    let kernel = scale_rows(Scalar::BF16, Scalar::F32);
    vec![memory(kernel, "4096 x 2048", numbers(rows, width), buffers, (rows * width) as u64)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
