//! Rows rounded to 8 bits each (BitNet b1.58, Ma et al. 2024): to 127 steps on each side of zero, of
//! which the farthest element has 127.
//!
//! ```text
//! s = 127 / max(max |x|, floor)
//! y = min(max(round(s x), -128), 127) / s
//! ```
//!
//! Halves are rounded to even. The gradient passes as if nothing were rounded, as models that are
//! rounded so were trained.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, Reverse, Wrt, give};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{RowThreads, begin, lanes, load, require_vectors};
use crate::trial::{every_float, memory, rows_of, scaled};
use crate::{Shape, arity};
use formats::Result;

/// `x[rows, width] -> [rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RoundRows {
    /// The least that a row's farthest element counts as.
    pub floor: f32,
}

/// Steps on each side of zero.
const STEPS: f32 = 127.0;

impl Operation for RoundRows {
    fn name(&self) -> &'static str {
        "round_rows"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("round_rows", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        self.rows(call.inputs[0], call.widths[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let bound = [("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        let numbers = self.numbers(to.rows(X), to.width(X));
        to.push(round_rows(to.scalar(X)), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |_| Ok(dy))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let Some(dx) = at.tangent(0) else { return Ok(()) };
        at.add(0, dx)
    }
}

impl RoundRows {
    /// One row in place, in f32.
    pub fn row(&self, x: &mut [f32]) {
        let by = STEPS / x.iter().fold(self.floor, |most, x| most.max(x.abs()));
        for x in x {
            *x = (*x * by).round_ties_even().clamp(-STEPS - 1.0, STEPS) / by;
        }
    }

    /// Rows of `width` elements, in f64.
    fn rows(&self, x: &[f32], width: usize, y: &mut [f32]) {
        let steps = f64::from(STEPS);
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let most = x.iter().fold(f64::from(self.floor), |most, x| most.max(x.abs().into()));
            let by = steps / most;
            for (x, y) in x.iter().zip(y) {
                let step = (f64::from(*x) * by).round_ties_even().clamp(-steps - 1.0, steps);
                *y = (step / by) as f32;
            }
        }
    }

    /// The numbers of a launch.
    fn numbers(&self, rows: usize, width: usize) -> Numbers {
        let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
        numbers.with_f32("floor", self.floor)
    }
}

/// Rows of `width` elements rounded to 8 bits, on the device.
#[kernel]
pub fn round_rows(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    floor: Const<f32>,
    scalar: Scalar,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("y", size)]);
    begin();
    let first = group_id() * width;
    let lanes = lanes(scalar);
    let most = Var::new(floor);
    team.sweep(width, lanes, |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(x, first + i, lanes)).collect();
        for v in loaded.into_iter().flatten() {
            most.set(most.get().max(v.abs()));
        }
    });
    let most = group_max(most.get());
    let (by, back) = (STEPS / most, most * (1.0 / STEPS));
    team.sweep(width, lanes, |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(x, first + i, lanes)).collect();
        for (&i, x) in at.iter().zip(loaded) {
            let step = |x: Val<f32>| (x * by).round().max(-STEPS - 1.0).min(STEPS) * back;
            let values: Vec<Val<f32>> = x.into_iter().map(step).collect();
            y.set_vec(first + i, &values);
        }
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "round_rows", cases, benches }];

/// As BitNet has it.
const USUAL: RoundRows = RoundRows { floor: 1e-5 };

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(rows, width, why): (usize, usize, &str)| {
            let x = scaled(scalar, width as u64 + 9, rows * width, 3.0);
            // Numbers that are nearly between two steps may be rounded to either: these are not.
            let mut numbers = x.to_f32();
            for row in numbers.chunks_exact_mut(width) {
                let by = STEPS / row.iter().fold(0f32, |most, x| most.max(x.abs()));
                for x in row {
                    let step = *x * by;
                    let near = (step - step.floor() - 0.5).abs() < 0.05;
                    *x = if near { step.floor() / by } else { *x };
                }
            }
            let x = Buffer::floats(scalar, &numbers);
            let mut y = vec![0.0; rows * width];
            USUAL.rows(&x.to_f32(), width, &mut y);
            let want = y.into_iter().map(f64::from).collect();
            Case {
                kernel: round_rows(scalar).record(),
                label: format!("{rows} x {width} {scalar}, {why}"),
                numbers: USUAL.numbers(rows, width),
                buffers: vec![x, Buffer::zeros(scalar, rows * width)],
                expected: vec![(1, Expected::Near(want, tolerance(scalar).max(1e-5)))],
            }
        };
        [
            (1, 16, "a short row"),
            (3, 129, "a width no vector divides"),
            (2, 2048, "a vector or two per thread"),
            (1, 7176, "several vectors per thread and a remainder"),
        ]
        .map(case)
        .to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 8192), 8192);
        let n = rows * width;
        let buffers = vec![Fill::Noise(scalar, n), Fill::Zeros(scalar, n)];
        let label = format!("{rows} x {width}");
        let kernel = round_rows(scalar);
        vec![memory(kernel, &label, USUAL.numbers(rows, width), buffers, 5 * n as u64)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn halves_go_to_even_steps_and_zeros_stay() {
        let mut x = [127.0, 2.5, 3.5, -2.5, -127.0, 0.2];
        let mut y = [0.0; 6];
        USUAL.rows(&x, 6, &mut y);
        assert_eq!(y, [127.0, 2.0, 4.0, -2.0, -127.0, 0.0]);
        USUAL.row(&mut x);
        assert_eq!(x, y);
        let mut none = [0.0; 4];
        USUAL.row(&mut none);
        assert_eq!(none, [0.0; 4]);
    }
}
