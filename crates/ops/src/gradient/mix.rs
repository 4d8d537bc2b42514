//! Gradients of sums of streams ([`crate::mix`]): of the streams that are summed, and of the numbers
//! that weigh them.
//!
//! ```text
//! dx[t, j, d] = sum of c[t, i, j] dy[t, i, d] over i
//! dc[t, i, j] = sum of dy[t, i, d] x[t, j, d] over d
//! ```

use tile::case::{Bench, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::Mode;

use crate::linear::holds;
use crate::mix::numbers;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{begin, when};
use crate::trial::{every_float, framed, memory, random};
use crate::{Mix, Shape, alike, arity};
use formats::{Result, dot};

/// `x, c, dy -> dx, dc` of [`Mix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixBackward(pub Mix);

const C: Operand = Operand::Input(1);

impl Operation for MixBackward {
    fn name(&self) -> &'static str {
        "mix_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[0])?;
        let y = self.0.infer(&inputs[..2], weights)?;
        alike(self.name(), &[y[0], inputs[2]])?;
        Ok(inputs[..2].to_vec())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let operands = [0, 1, 2].map(|i| call.inputs[i]);
        let found = self.rows(operands, call.widths[0] / self.0.from);
        call.outputs.iter_mut().zip(found).for_each(|(to, found)| *to = found);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let bound = [
            ("x", Bound::Value(X)),
            ("c", Bound::Value(C)),
            ("dy", Bound::Value(Operand::Input(2))),
            ("dx", Bound::Value(Y)),
            ("dc", Bound::Value(Operand::Output(1))),
        ];
        let numbers = numbers(to.rows(X), to.width(X) / self.0.from);
        to.push(mix_backward(to.scalar(X), to.scalar(C), self.0), numbers, &bound)?;
        Ok(true)
    }
}

impl MixBackward {
    /// The gradients of one row's streams, in f32, and of its numbers, whose sums are in f64,
    /// without an allocation.
    ///
    /// # Panics
    /// When lengths differ from those that [`Operation::infer`] allows.
    pub fn row(&self, [x, c, dy]: [&[f32]; 3], [dx, dc]: [&mut [f32]; 2]) {
        let width = x.len() / self.0.from;
        dx.fill(0.0);
        let each = c.chunks_exact(self.0.from).zip(dc.chunks_exact_mut(self.0.from));
        for (dy, (c, dc)) in dy.chunks_exact(width).zip(each) {
            let streams = x.chunks_exact(width).zip(dx.chunks_exact_mut(width));
            for ((x, dx), (c, dc)) in streams.zip(c.iter().zip(dc)) {
                dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = c.mul_add(*dy, *dx));
                *dc = dot(dy, x) as f32;
            }
        }
    }

    /// Rows of streams of `width` elements, in f64: `dx` and `dc`.
    fn rows(&self, [x, c, dy]: [&[f32]; 3], width: usize) -> [Vec<f32>; 2] {
        let Mix { from, to } = self.0;
        let stream = |of: &'_ [f32], first: usize| of[first * width..][..width].to_vec();
        let of_x = |at: usize| {
            let (t, j, d) = (at / (from * width), at / width % from, at % width);
            let part = |i: usize| {
                let by = f64::from(c[(t * to + i) * from + j]);
                by * f64::from(dy[(t * to + i) * width + d])
            };
            (0..to).map(part).sum::<f64>() as f32
        };
        let of_c = |at: usize| {
            let (t, i, j) = (at / (to * from), at / from % to, at % from);
            dot(&stream(dy, t * to + i), &stream(x, t * from + j)) as f32
        };
        [(0..x.len()).map(of_x).collect(), (0..c.len()).map(of_c).collect()]
    }
}

/// `dx` and `dc` of sums of streams of `width` elements, on the device: a threadgroup has a row, so
/// that the sums `dc` are in an order that follows from the width alone.
#[kernel]
pub fn mix_backward(
    x: In<{ scalar }>,
    c: In<{ factors }>,
    dy: In<{ scalar }>,
    dx: Out<{ scalar }>,
    dc: Out<{ factors }>,
    width: Const<u32>,
    scalar: Scalar,
    factors: Scalar,
    streams: Mix,
) {
    let [from, to] = [streams.from as u32, streams.to as u32];
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    for (name, streams) in [("x", from), ("dx", from), ("dy", to)] {
        holds(name, dim("rows") * dim("width") * fixed(streams));
    }
    holds("c", dim("rows") * fixed(to * from));
    holds("dc", dim("rows") * fixed(to * from));
    begin();
    let row = group_id();
    let numbers: Vec<Val<f32>> =
        (0..to * from).map(|i| c.get(row * (to * from) + i).f32()).collect();
    let sums = Regs::new(to * from, 0.0);
    strided(width).each(|d| {
        let read = |of: In, streams: u32| -> Vec<Val<f32>> {
            (0..streams).map(|i| of.get((row * streams + i) * width + d).f32()).collect()
        };
        let (x, dy) = (read(x, from), read(dy, to));
        for (j, x) in (0..from).zip(x) {
            let each = || (0..to).zip(&dy).map(|(i, dy)| (i * from + j, *dy));
            let sum = each().fold(0.0f32.val(), |sum, (at, dy)| dy.fma(numbers[at as usize], sum));
            dx.set((row * from + j) * width + d, sum.cast());
            each().for_each(|(at, dy)| sums.set(at, dy.fma(x, sums.get(at))));
        }
    });
    for at in 0..to * from {
        let sum = group_sum(sums.get(at));
        when(Order::eq(thread_id(), 0u32), || dc.set(row * (to * from) + at, sum.cast()));
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "mix_backward", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(from, to, width, why): (usize, usize, usize, &str)| {
            let (op, rows) = (MixBackward(Mix { from, to }), 3);
            let x = random(scalar, 3, rows * from * width);
            let c = random(Scalar::F32, 4, rows * to * from);
            let dy = random(scalar, 5, rows * to * width);
            let [dx, dc] = op.rows([&x.to_f32(), &c.to_f32(), &dy.to_f32()], width);
            let label = format!("{from} streams of {width} {scalar} into {to}: {why}");
            let kernel = mix_backward(scalar, Scalar::F32, op.0);
            let wanted = [(scalar, &dx[..]), (Scalar::F32, &dc)];
            framed(kernel, label, numbers(rows, width), vec![x, c, dy], &wanted)
        };
        [
            (4, 4, 600, "longer than a group"),
            (1, 4, 5, "one, several times"),
            (5, 2, 33, "fewer than before"),
        ]
        .map(case)
        .to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    let (rows, width, op) = (2048, 2048, Mix { from: 4, to: 4 });
    let n = rows * width * 4;
    let buffers = vec![
        Fill::Noise(Scalar::F32, n),
        Fill::Noise(Scalar::F32, rows * 16),
        Fill::Noise(Scalar::F32, n),
        Fill::Zeros(Scalar::F32, n),
        Fill::Zeros(Scalar::F32, rows * 16),
    ];
    let kernel = mix_backward(Scalar::F32, Scalar::F32, op);
    vec![memory(kernel, "2048 x 4 x 2048", numbers(rows, width), buffers, 16 * n as u64)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
