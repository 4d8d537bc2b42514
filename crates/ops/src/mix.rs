//! Streams made of others: each is a sum of all of them, weighted by numbers of the row. AltUp
//! (Baykal et al. 2023) predicts streams from each other so, and corrects them.
//!
//! ```text
//! y[t, i, d] = sum of c[t, i, j] x[t, j, d] over j
//! ```

use tile::case::{Bench, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::gradient::{Forward, MixBackward, Reverse, Wrt, give, one};
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{every_float, framed, memory, random};
use crate::{Op, Shape, arity, expect};
use formats::{Error, Result};

/// `x[rows, from * any], c[rows, to * from] -> [rows, to * any]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Mix {
    /// Streams of `x`, at most [`MOST`].
    pub from: usize,
    /// Streams of the output, at most [`MOST`].
    pub to: usize,
}

/// Most streams: a thread holds the numbers of all.
pub const MOST: usize = 8;

/// The numbers.
const C: Operand = Operand::Input(1);

impl Operation for Mix {
    fn name(&self) -> &'static str {
        "mix"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("mix", inputs, 2, weights, &[0])?;
        for streams in [self.from, self.to] {
            if !(1..=MOST).contains(&streams) {
                return Err(Error::new("mix", format!("1 to {MOST} streams"), streams));
            }
        }
        expect("mix", "width modulo streams", &[inputs[0].width % self.from], &[0])?;
        expect("mix", "width of the numbers", &[inputs[1].width], &[self.to * self.from])?;
        if inputs[0].rows != inputs[1].rows {
            let [rows, found] = [0, 1].map(|i| format!("{:?}", inputs[i].rows));
            return Err(Error::new("mix: rows of the numbers", rows, found));
        }
        Ok(vec![Shape { width: inputs[0].width / self.from * self.to, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [x, c] = [call.inputs[0], call.inputs[1]];
        self.rows(x, c, call.widths[0] / self.from, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn shares_type(&self, operand: Operand) -> bool {
        operand != C
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let bound = [("x", Bound::Value(X)), ("c", Bound::Value(C)), ("y", Bound::Value(Y))];
        let numbers = numbers(to.rows(X), to.width(X) / self.from);
        to.push(mix(to.scalar(X), to.scalar(C), *self), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let operands = [at.input(0), at.input(1), dy];
        let found = at.record(Op::from(MixBackward(*self)), &operands, &[])?;
        let all = [Wrt::Input(0), Wrt::Input(1)].into_iter().zip(found);
        all.into_iter().try_for_each(|(of, cotangent)| give(at, of, |_| Ok(cotangent)))
    }

    /// It is linear in both of its operands.
    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let (x, c) = (at.input(0), at.input(1));
        if let Some(dx) = at.tangent(0) {
            let dy = one(at, *self, &[dx, c], &[])?;
            at.add(0, dy)?;
        }
        let Some(dc) = at.tangent(1) else { return Ok(()) };
        let dy = one(at, *self, &[x, dc], &[])?;
        at.add(0, dy)
    }
}

impl Mix {
    /// One row, without an allocation.
    ///
    /// # Panics
    /// When lengths differ from those that [`Operation::infer`] allows.
    pub fn row(&self, x: &[f32], c: &[f32], y: &mut [f32]) {
        let width = x.len() / self.from;
        for (y, c) in y.chunks_exact_mut(width).zip(c.chunks_exact(self.from)) {
            y.fill(0.0);
            for (x, c) in x.chunks_exact(width).zip(c) {
                y.iter_mut().zip(x).for_each(|(y, x)| *y = c.mul_add(*x, *y));
            }
        }
    }

    /// Rows of streams of `width` elements, in f64.
    fn rows(&self, x: &[f32], c: &[f32], width: usize, y: &mut [f32]) {
        let (from, to) = (self.from, self.to);
        for (at, y) in y.iter_mut().enumerate() {
            let (t, i, d) = (at / (to * width), at / width % to, at % width);
            let part = |j: usize| {
                let by = f64::from(c[(t * to + i) * from + j]);
                by * f64::from(x[(t * from + j) * width + d])
            };
            *y = (0..from).map(part).sum::<f64>() as f32;
        }
    }
}

/// The numbers of a launch over streams of `width` elements.
pub(crate) fn numbers(rows: usize, width: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32)
}

/// `y[t, i, d] = sum of c[t, i, j] x[t, j, d]` over the streams `j`, on the device; a stream has
/// `width` elements.
#[kernel]
pub fn mix(
    x: In<{ scalar }>,
    c: In<{ factors }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    scalar: Scalar,
    factors: Scalar,
    streams: Mix,
) {
    let [from, to] = [streams.from as u32, streams.to as u32];
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("width") * fixed(from));
    holds("c", dim("rows") * fixed(to * from));
    holds("y", dim("rows") * dim("width") * fixed(to));
    begin();
    let row = group_id();
    let factors: Vec<Val<f32>> =
        (0..to * from).map(|i| c.get(row * (to * from) + i).f32()).collect();
    strided(width).each(|d| {
        let read = |j: u32| x.get((row * from + j) * width + d).f32();
        let values: Vec<Val<f32>> = (0..from).map(read).collect();
        factors.chunks(streams.from).zip(0u32..).for_each(|(by, i)| {
            let mut parts = values.iter().zip(by).map(|(x, by)| (*x, *by));
            let first = parts.next().map(|(x, by)| x * by);
            let sum = first.map(|first| parts.fold(first, |sum, (x, by)| x.fma(by, sum)));
            sum.into_iter().for_each(|sum| y.set((row * to + i) * width + d, sum.cast()));
        });
    });
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "mix", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(from, to, width, why): (usize, usize, usize, &str)| {
            let (op, rows) = (Mix { from, to }, 3);
            let x = random(scalar, 3, rows * from * width);
            let c = random(Scalar::F32, 4, rows * to * from);
            let mut y = vec![0.0; rows * to * width];
            op.rows(&x.to_f32(), &c.to_f32(), width, &mut y);
            let label = format!("{from} streams of {width} {scalar} into {to}: {why}");
            let kernel = mix(scalar, Scalar::F32, op);
            framed(kernel, label, numbers(rows, width), vec![x, c], &[(scalar, &y)])
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
        Fill::Zeros(Scalar::F32, n),
    ];
    let kernel = mix(Scalar::F32, Scalar::F32, op);
    vec![memory(kernel, "2048 x 4 x 2048", numbers(rows, width), buffers, 8 * n as u64)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn each_stream_is_a_sum_of_all() {
        let op = Mix { from: 2, to: 3 };
        let (x, c) = ([1.0, 2.0, 10.0, 20.0], [1.0, 0.0, 0.0, 1.0, 2.0, -1.0]);
        let mut y = [0.0; 6];
        op.row(&x, &c, &mut y);
        assert_eq!(y, [1.0, 2.0, 10.0, 20.0, -8.0, -16.0]);
        let shapes = [Shape::tokens(4), Shape::tokens(6)];
        assert_eq!(op.infer(&shapes, &[]).unwrap(), [Shape::tokens(6)]);
        assert!(op.infer(&[Shape::tokens(5), shapes[1]], &[]).is_err());
        assert!(op.infer(&[shapes[0], Shape::tokens(4)], &[]).is_err());
        assert!(Mix { from: 2, to: 9 }.infer(&[shapes[0], Shape::tokens(18)], &[]).is_err());
    }
}
