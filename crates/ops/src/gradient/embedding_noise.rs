//! Noise on embeddings in training (NEFTune, Jain et al. 2024): `y = x + alpha u / sqrt(n d)`, where
//! `u` is uniform from -1 to 1, `n` the length of the row's sequence and `d` the width. Gradients
//! pass as they are.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use super::draws::{self, Draws, each_of_row};
use super::{Forward, Reverse, Wrt, give};
use crate::Shape;
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{PackedRows, every_float, memory, near, random};
use formats::Result;

/// `x[tokens, width] -> same`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingNoise {
    /// The noise of a whole sequence: `alpha / sqrt(3)` long, whatever its length.
    pub alpha: f32,
    /// Where its numbers come from.
    pub draws: Draws,
}

impl EmbeddingNoise {
    /// Changes a row of a sequence of `length` rows; it has this number in the run.
    #[inline(always)]
    pub fn row(&self, number: u32, length: usize, row: &mut [f32]) {
        let size = self.alpha / (length as f32 * row.len() as f32).sqrt();
        self.draws.each(number, row, |x, word| *x = unit(word).mul_add(size, *x));
    }

    fn numbers(&self, rows: usize, width: usize) -> Numbers {
        let numbers = Numbers::new()
            .with("rows", rows as u32)
            .with("width", width as u32)
            .with_f32("alpha", self.alpha);
        self.draws.numbers(numbers)
    }
}

/// A number from -1 to 1, uniform on the multiples of 2^-23.
#[inline(always)]
fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 8_388_608.0) - 1.0
}

impl Operation for EmbeddingNoise {
    fn name(&self) -> &'static str {
        "embedding_noise"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        draws::infer(self.name(), inputs, weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let (width, first) = (call.widths[0], call.packed.first);
        call.outputs[0].copy_from_slice(call.inputs[0]);
        for (t, row) in call.outputs[0].chunks_exact_mut(width).enumerate() {
            let length = first.iter().filter(|start| **start == first[t]).count();
            self.row(call.packed.draws[t], length, row);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let numbers = self.numbers(to.rows(X), to.width(X));
        let bound = [
            ("x", Bound::Value(X)),
            ("draws", Bound::Draws),
            ("first", Bound::Firsts),
            ("ends", Bound::Ends),
            ("y", Bound::Value(Y)),
        ];
        to.push(embedding_noise(to.scalar(X)), numbers, &bound)?;
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

/// `y[r, i] = x[r, i] + alpha u / sqrt((ends[r] - first[r]) width)`, `u` from -1 to 1 by the random
/// word of row `draws[r]` and column `i`, on the device. `y` may be `x`.
#[kernel]
pub fn embedding_noise(
    x: In<{ scalar }>,
    draws: In<u32>,
    first: In<u32>,
    ends: In<u32>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    alpha: Arg<f32>,
    seed_low: Arg<u32>,
    seed_high: Arg<u32>,
    stream: Arg<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    for name in ["draws", "first", "ends"] {
        holds(name, dim("rows"));
    }
    holds("x", dim("rows") * dim("width"));
    holds("y", dim("rows") * dim("width"));
    begin();
    let row = group_id();
    let number = draws.get(row);
    let length = ends.get(row) - first.get(row);
    let size = alpha / (length.f32() * width.f32()).sqrt();
    each_of_row([row, number, width], stream, [seed_low, seed_high], |at, word| {
        let unit = (word >> 8u32).f32() * (1.0 / 8_388_608.0) - 1.0;
        y.set(at, unit.fma(size, x.get(at).f32()).cast());
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "embedding_noise", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(alpha, width, why): (f32, usize, &str)| {
            let op = EmbeddingNoise { alpha, draws: Draws { seed: 99, stream: 1 } };
            let lengths = [3, 1, 2];
            let rows = PackedRows::new(&lengths);
            let ends: Vec<u32> =
                lengths.iter().zip([3, 4, 6]).flat_map(|(n, end)| vec![end; *n]).collect();
            let numbers: Vec<u32> = (1000..).take(rows.len()).collect();
            let x = random(scalar, 3, rows.len() * width);
            let mut y = x.to_f32();
            for (t, row) in y.chunks_exact_mut(width).enumerate() {
                op.row(numbers[t], (ends[t] - rows.first[t]) as usize, row);
            }
            let words = [&numbers, &rows.first, &ends].map(|words| Buffer::words(words));
            let mut buffers = vec![x];
            buffers.extend(words);
            buffers.push(Buffer::zeros(scalar, y.len()));
            Case {
                kernel: embedding_noise(scalar).record(),
                label: format!("{} x {width} {scalar}, {alpha}: {why}", rows.len()),
                numbers: op.numbers(rows.len(), width),
                buffers,
                expected: vec![(4, near(scalar, &y))],
            }
        };
        let all = [
            (1.0, 1, "one element"),
            (5.0, 13, "a block that is not whole"),
            (15.0, 2052, "more blocks than threads"),
        ];
        all.map(case).to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    let (rows, width) = (4096, 4096);
    let op = EmbeddingNoise { alpha: 5.0, draws: Draws { seed: 1, stream: 0 } };
    let ends = Buffer::words(&vec![rows as u32; rows]);
    let buffers = vec![
        Fill::Noise(Scalar::BF16, rows * width),
        Fill::Zeros(Scalar::U32, rows),
        Fill::Zeros(Scalar::U32, rows),
        Fill::These(ends),
        Fill::Zeros(Scalar::BF16, rows * width),
    ];
    let size = 2 * (rows * width) as u64;
    let kernel = embedding_noise(Scalar::BF16);
    vec![memory(kernel, "4096 x 4096", op.numbers(rows, width), buffers, size)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }

    /// Mean and variance are those of a uniform number, and the bounds are kept.
    #[test]
    fn noise_is_uniform_within_its_size() {
        let op = EmbeddingNoise { alpha: 5.0, draws: Draws { seed: 4, stream: 0 } };
        let (rows, width) = (200, 128);
        let mut all = vec![0.0; rows * width];
        let each = all.chunks_exact_mut(width).zip(0u32..);
        each.for_each(|(row, number)| op.row(number, rows, row));
        let size = 5.0 / ((rows * width) as f64).sqrt();
        let n = all.len() as f64;
        let mean = all.iter().map(|x| f64::from(*x)).sum::<f64>() / n / size;
        let square = all.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n / size / size;
        assert!(mean.abs() < 5.0 / (3.0 * n).sqrt(), "{mean}");
        assert!((square - 1.0 / 3.0).abs() < 5.0 * (4.0 / 45.0 / n).sqrt(), "{square}");
        assert!(all.iter().all(|x| f64::from(x.abs()) <= size * 1.0001));
    }
}
