//! Queries times a number that grows with the logarithm of the position, so that attention over
//! long contexts stays as peaked as over short ones (Nakanishi, Scalable-Softmax, 2025, as Llama 4
//! and Ministral 3 have it): `y[t] = x[t] (1 + by ln(1 + floor((p[t] + ahead) / step)))`.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::gradient::{Forward, Reverse, Wrt, give, linear_in_x, one};
use crate::linear::holds;
use crate::operation::{
    ActivationPrecision, Bound, Launches, Operation, ReferenceCall, Sharding, X, Y,
};
use crate::sweep::begin;
use crate::trial::{every_float, memory, random};
use crate::{Shape, arity};
use formats::Result;

/// `x[tokens, width] -> same`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Stretch {
    /// Multiplies the logarithm.
    pub by: f32,
    /// Positions after which it grows, more than 0.
    pub step: u32,
    /// Positions by which it grows early: 1 for Llama 4, none for Ministral 3.
    pub ahead: u32,
}

impl Operation for Stretch {
    fn name(&self) -> &'static str {
        "stretch"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("stretch", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        self.rows(call.positions, call.widths[0], call.inputs[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Queries
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let numbers = self.numbers(to.rows(X), to.width(X));
        let bound =
            [("x", Bound::Value(X)), ("positions", Bound::Positions), ("y", Bound::Value(Y))];
        to.push(stretch(to.scalar(X)), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, *self, &[dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        linear_in_x(at, *self)
    }
}

impl Stretch {
    /// The factor at a position.
    pub fn factor(&self, position: u32) -> f32 {
        let steps = (u64::from(position) + u64::from(self.ahead)) / u64::from(self.step.max(1));
        ((steps as f64).ln_1p() * f64::from(self.by) + 1.0) as f32
    }

    fn rows(&self, positions: &[u32], width: usize, x: &[f32], y: &mut [f32]) {
        for (i, y) in y.iter_mut().enumerate() {
            *y = x[i] * self.factor(positions[i / width]);
        }
    }

    fn numbers(&self, rows: usize, width: usize) -> Numbers {
        Numbers::new()
            .with("rows", rows as u32)
            .with("width", width as u32)
            .with("step", self.step.max(1))
            .with("ahead", self.ahead)
            .with_f32("by", self.by)
    }
}

/// `y[t, i] = x[t, i] (1 + by ln(1 + floor((positions[t] + ahead) / step)))`, on the device.
#[kernel]
pub fn stretch(
    x: In<{ scalar }>,
    positions: In<u32>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    step: Const<u32>,
    ahead: Const<u32>,
    by: Const<f32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("width"));
    holds("positions", dim("rows"));
    holds("y", dim("rows") * dim("width"));
    begin();
    let row = group_id();
    let steps = (positions.get(row) + ahead) / step;
    let factor = (steps.f32() + 1.0).ln() * by + 1.0;
    for i in strided(width) {
        y[row * width + i] = (x.get(row * width + i).f32() * factor).cast();
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "stretch", cases, benches }];

/// Llama 4's.
const USUAL: Stretch = Stretch { by: 0.1, step: 8192, ahead: 1 };

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(op, width, why): (Stretch, usize, &str)| {
            let positions = [0, 6, 7, 8190, 8191, 16_383, 10_000_000];
            let rows = positions.len();
            let x = random(scalar, 3, rows * width);
            let mut y = vec![0.0; rows * width];
            op.rows(&positions, width, &x.to_f32(), &mut y);
            let want = y.into_iter().map(f64::from).collect();
            Case {
                kernel: stretch(scalar).record(),
                label: format!("{rows} x {width} {scalar}: {why}"),
                numbers: op.numbers(rows, width),
                buffers: vec![x, Buffer::words(&positions), Buffer::zeros(scalar, rows * width)],
                expected: vec![(2, Expected::Near(want, tolerance(scalar)))],
            }
        };
        let small = Stretch { by: 0.5, step: 7, ahead: 0 };
        [(small, 5, "a short row"), (USUAL, 600, "rows longer than a group")].map(case).to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    let (rows, width) = (4096, 4096);
    let buffers = vec![
        Fill::Noise(Scalar::BF16, rows * width),
        Fill::Zeros(Scalar::U32, rows),
        Fill::Zeros(Scalar::BF16, rows * width),
    ];
    let size = 2 * (rows * width) as u64;
    vec![memory(stretch(Scalar::BF16), "4096 x 4096", USUAL.numbers(rows, width), buffers, size)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn the_factor_grows_by_steps() {
        assert_eq!([0, 8190].map(|position| USUAL.factor(position)), [1.0; 2]);
        assert_eq!(USUAL.factor(8191), (1.0 + 0.1 * 2f64.ln()) as f32);
        assert_eq!(USUAL.factor(16_383), (1.0 + 0.1 * 3f64.ln()) as f32);
    }
}
