//! Rows as long as others: streams that are made of an embedding, or made one again, as AltUp's
//! are in Gemma 3n (Gemma Team 2025).
//!
//! ```text
//! y[t, g] = x[t, g] sqrt(mean(like[t]^2)) / sqrt(max(mean(x[t, g]^2), floor))
//! ```

use tile::case::{Bench, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::gradient::{Forward, MatchRmsBackward, MatchRmsTangent, Reverse, Wrt, give, one, zeros};
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{every_float, framed, memory, scaled};
use crate::{Op, Shape, arity, expect};
use formats::{Error, Result};

/// `x[rows, groups * width], like[rows, width] -> [rows, groups * width]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MatchRms {
    /// The least mean square of a group that it is divided by.
    pub floor: f32,
}

/// The rows whose length counts.
const LIKE: Operand = Operand::Input(1);

impl Operation for MatchRms {
    fn name(&self) -> &'static str {
        "match_rms"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("match_rms", inputs, 2, weights, &[0])?;
        let width = inputs[1].width.max(1);
        expect("match_rms", "width modulo that of the other", &[inputs[0].width % width], &[0])?;
        if inputs[0].rows != inputs[1].rows {
            let [rows, found] = [0, 1].map(|i| format!("{:?}", inputs[i].rows));
            return Err(Error::new("match_rms: rows of the other", rows, found));
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [wide, width] = [call.widths[0], call.widths[1]];
        let rows = call.inputs[0].chunks_exact(wide).zip(call.inputs[1].chunks_exact(width));
        for ((x, like), y) in rows.zip(call.outputs[0].chunks_exact_mut(wide)) {
            y.copy_from_slice(x);
            self.row(y, like);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let (width, wide) = (to.width(LIKE), to.width(X));
        let bound = [("x", Bound::Value(X)), ("like", Bound::Value(LIKE)), ("y", Bound::Value(Y))];
        let numbers = self.numbers(to.rows(X), wide / width, width);
        to.push(match_rms(to.scalar(X)), numbers, &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let operands = [at.input(0), at.input(1), dy];
        let found = at.record(Op::from(MatchRmsBackward(*self)), &operands, &[])?;
        let all = [Wrt::Input(0), Wrt::Input(1)].into_iter().zip(found);
        all.into_iter().try_for_each(|(of, cotangent)| give(at, of, |_| Ok(cotangent)))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let inputs = [at.input(0), at.input(1)];
        let mut operands = inputs.to_vec();
        for (i, input) in inputs.into_iter().enumerate() {
            let tangent = at.tangent(i);
            operands.push(tangent.map_or_else(|| zeros(at, input), Ok)?);
        }
        let dy = one(at, MatchRmsTangent(*self), &operands, &[])?;
        at.add(0, dy)
    }
}

impl MatchRms {
    /// One row in place, whose groups are as wide as `like`; sums are in f64.
    pub fn row(&self, x: &mut [f32], like: &[f32]) {
        let square = |x: &[f32]| {
            x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len().max(1) as f64
        };
        let wanted = square(like).sqrt();
        for x in x.chunks_exact_mut(like.len().max(1)) {
            let by = wanted / square(x).max(f64::from(self.floor)).sqrt();
            x.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
        }
    }

    /// The numbers of a launch.
    pub(crate) fn numbers(&self, rows: usize, groups: usize, width: usize) -> Numbers {
        Numbers::new()
            .with("rows", rows as u32)
            .with("groups", groups as u32)
            .with("width", width as u32)
            .with_f32("floor", self.floor)
    }
}

/// Groups of `width` elements, `groups` of each row of `like`, made as long as that row, on the
/// device.
#[kernel]
pub fn match_rms(
    x: In<{ scalar }>,
    like: In<{ scalar }>,
    y: Out<{ scalar }>,
    groups: Const<u32>,
    width: Const<u32>,
    floor: Const<f32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows") * dim("groups"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("groups") * dim("width"));
    holds("like", dim("rows") * dim("width"));
    holds("y", dim("rows") * dim("groups") * dim("width"));
    begin();
    let (own, other) = (group_id() * width, group_id() / groups * width);
    let square = |of: In, first: Val<u32>| {
        let sum = Var::new(0.0);
        strided(width).each(|i| {
            let x = of.get(first + i).f32();
            sum.set(x.fma(x, sum.get()));
        });
        group_sum(sum.get()) / width.f32()
    };
    let wanted = square(like, other).sqrt();
    let by = wanted * square(x, own).max(floor).rsqrt();
    strided(width).each(|i| y.set(own + i, (x.get(own + i).f32() * by).cast()));
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "match_rms", cases, benches }];

/// Gemma 3n's.
pub(crate) const USUAL: MatchRms = MatchRms { floor: 1e-5 };

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(groups, width, by, why): (usize, usize, f32, &str)| {
            let rows = 2;
            let x = scaled(scalar, 5, rows * groups * width, by);
            let like = scaled(scalar, 6, rows * width, 2.0);
            let mut y = x.to_f32();
            for (y, like) in y.chunks_exact_mut(groups * width).zip(like.to_f32().chunks(width)) {
                USUAL.row(y, like);
            }
            let label = format!("{rows} x {groups} x {width} {scalar}: {why}");
            let numbers = USUAL.numbers(rows, groups, width);
            framed(match_rms(scalar), label, numbers, vec![x, like], &[(scalar, &y)])
        };
        [
            (3, 600, 3.0, "longer than a group"),
            (1, 5, 0.5, "a short row"),
            (2, 40, 1e-3, "shorter than the least"),
        ]
        .map(case)
        .to_vec()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    let (rows, groups, width) = (2048, 3, 2048);
    let n = rows * groups * width;
    let buffers = vec![
        Fill::Noise(Scalar::F32, n),
        Fill::Noise(Scalar::F32, rows * width),
        Fill::Zeros(Scalar::F32, n),
    ];
    let numbers = USUAL.numbers(rows, groups, width);
    vec![memory(match_rms(Scalar::F32), "2048 x 3 x 2048", numbers, buffers, 5 * n as u64)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn groups_become_as_long_as_the_other_row() {
        let mut x = [3.0, 4.0, 0.0, 0.0, 0.0, 2.0];
        MatchRms { floor: 1e-5 }.row(&mut x, &[6.0, 8.0]);
        for (x, want) in x.iter().zip([6.0, 8.0, 0.0, 0.0, 0.0, 10.0]) {
            assert!((x - want).abs() < 1e-6, "{x} {want}");
        }
    }
}
