//! Dropout (Srivastava et al. 2014), as training has it: each element is zero with a probability,
//! and all others are divided by what is left: `y = m x / (1 - p)`, where `m` is 0 or 1. The mask
//! is computed again for gradients, which go the same way.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use super::draws::{self, Draws, each_of_row};
use super::{Forward, Reverse, Wrt, give, linear_in_x, one};
use crate::Shape;
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{every_float, memory, near, random};
use formats::Result;

/// `x[tokens, width] -> same`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability of a zero: from 0 to less than 1.
    pub p: f32,
    /// Where its numbers come from.
    pub draws: Draws,
}

impl Dropout {
    /// Words below this one make zeros.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.p) * 2f64.powi(32)) as u32
    }

    /// The factor on all others.
    pub fn factor(&self) -> f32 {
        (1.0 / (1.0 - f64::from(self.p))) as f32
    }

    /// Changes a row, which has this number in the run.
    #[inline(always)]
    pub fn row(&self, number: u32, row: &mut [f32]) {
        let (threshold, factor) = (self.threshold(), self.factor());
        self.draws
            .each(number, row, |x, word| *x = if word < threshold { 0.0 } else { *x * factor });
    }

    fn numbers(&self, rows: usize, width: usize) -> Numbers {
        let numbers = Numbers::new()
            .with("rows", rows as u32)
            .with("width", width as u32)
            .with("threshold", self.threshold())
            .with_f32("factor", self.factor());
        self.draws.numbers(numbers)
    }
}

impl Operation for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        draws::infer(self.name(), inputs, weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[0];
        call.outputs[0].copy_from_slice(call.inputs[0]);
        let rows = call.outputs[0].chunks_exact_mut(width);
        rows.zip(call.packed.draws).for_each(|(row, number)| self.row(*number, row));
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let numbers = self.numbers(to.rows(X), to.width(X));
        let bound = [("x", Bound::Value(X)), ("draws", Bound::Draws), ("y", Bound::Value(Y))];
        to.push(dropout(to.scalar(X)), numbers, &bound)?;
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

/// `y[r, i] = x[r, i] factor`, or 0 where the random word of row `draws[r]` and column `i` is below
/// `threshold`, on the device. `y` may be `x`.
#[kernel]
pub fn dropout(
    x: In<{ scalar }>,
    draws: In<u32>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    threshold: Arg<u32>,
    factor: Arg<f32>,
    seed_low: Arg<u32>,
    seed_high: Arg<u32>,
    stream: Arg<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("width"));
    holds("draws", dim("rows"));
    holds("y", dim("rows") * dim("width"));
    begin();
    let row = group_id();
    each_of_row([row, draws.get(row), width], stream, [seed_low, seed_high], |at, word| {
        let kept = x.get(at).f32() * factor;
        y.set(at, select(Order::lt(word, threshold), 0.0, kept).cast());
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "dropout", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(p, width, why): (f32, usize, &str)| {
            let op = Dropout { p, draws: Draws { seed: 0x1234_5678_9abc, stream: 5 } };
            let numbers = [0, 1, 77, 1 << 31, u32::MAX];
            let x = random(scalar, 3, numbers.len() * width);
            let mut y = x.to_f32();
            let rows = y.chunks_exact_mut(width).zip(numbers);
            rows.for_each(|(row, number)| op.row(number, row));
            Case {
                kernel: dropout(scalar).record(),
                label: format!("{} x {width} {scalar}, {p}: {why}", numbers.len()),
                numbers: op.numbers(numbers.len(), width),
                buffers: vec![x, Buffer::words(&numbers), Buffer::zeros(scalar, y.len())],
                expected: vec![(2, near(scalar, &y))],
            }
        };
        let all = [
            (0.5, 1, "one element"),
            (0.1, 13, "a block that is not whole"),
            (0.25, 2052, "more blocks than threads"),
            (0.0, 8, "nothing is dropped"),
        ];
        all.map(case).to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    let (rows, width) = (4096, 4096);
    let op = Dropout { p: 0.1, draws: Draws { seed: 1, stream: 0 } };
    let buffers = vec![
        Fill::Noise(Scalar::BF16, rows * width),
        Fill::Zeros(Scalar::U32, rows),
        Fill::Zeros(Scalar::BF16, rows * width),
    ];
    let size = 2 * (rows * width) as u64;
    vec![memory(dropout(Scalar::BF16), "4096 x 4096", op.numbers(rows, width), buffers, size)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }

    /// The share of zeros is the probability, the mean that of the input, and a row has another
    /// mask in each step.
    #[test]
    fn zeros_are_as_many_as_the_probability_says() {
        for p in [0.05f32, 0.5, 0.9] {
            let op = Dropout { p, draws: Draws { seed: 11, stream: 2 } };
            let (rows, width) = (400, 100);
            let masked = |first: u32| -> Vec<f32> {
                let mut all = vec![1.0; rows * width];
                let each = all.chunks_exact_mut(width).zip(first..);
                each.for_each(|(row, number)| op.row(number, row));
                all
            };
            let [one, other] = [masked(0), masked(1 << 20)];
            let n = one.len() as f64;
            let share = one.iter().filter(|x| **x == 0.0).count() as f64 / n;
            let (q, p) = (1.0 - f64::from(p), f64::from(p));
            assert!((share - p).abs() < 5.0 * (p * q / n).sqrt(), "{p}: {share}");
            let mean = one.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
            assert!((mean - 1.0).abs() < 5.0 * (p / q / n).sqrt(), "{p}: {mean}");
            let square = one.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n;
            assert!((square * q - 1.0).abs() < 5.0 * (p / q / n).sqrt(), "{p}: {square}");
            let both = one.iter().zip(&other).filter(|(a, b)| **a == 0.0 && **b == 0.0).count();
            let both = both as f64 / n;
            assert!((both - p * p).abs() < 5.0 * (p * p * (1.0 - p * p) / n).sqrt(), "{p}: {both}");
        }
    }
}
