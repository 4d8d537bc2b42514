//! Gradients of rows made as long as others ([`crate::match_rms`]). With `w` the root mean square of
//! `like`, `m` the mean square of a group of `x`, `s = sqrt(max(m, floor))` and `n` elements in each:
//!
//! ```text
//! y = x w / s
//! dx = (dy - x sum(dy x) / (n m)) w / s      where m is above the floor, else dy w / s
//! dlike = like / (n w) times the sum of sum(dy x) / s over all groups
//! ```
//!
//! A row of `like` that is all zeros has no slope.

use tile::case::{Bench, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::Mode;

use crate::linear::holds;
use crate::match_rms::USUAL;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{every_float, framed, memory, random, scaled};
use crate::{MatchRms, Shape, alike, arity};
use formats::{Result, dot};

use super::same_widths;

/// `x, like, dy -> dx, dlike` of [`MatchRms`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatchRmsBackward(pub MatchRms);

/// `x, like, dx, dlike -> dy` of [`MatchRms`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatchRmsTangent(pub MatchRms);

const LIKE: Operand = Operand::Input(1);

/// The root mean square of a row that others are made as long as.
fn length(like: &[f32]) -> f64 {
    (dot(like, like) / like.len() as f64).sqrt()
}

/// `1 / s` of a group, and `1 / (n m)` if its mean square is above the floor, else 0.
fn group(of: &MatchRms, x: &[f32]) -> [f64; 2] {
    let (n, floor) = (x.len() as f64, f64::from(of.floor));
    let mean = dot(x, x) / n;
    [1.0 / mean.max(floor).sqrt(), if mean > floor { 1.0 / (n * mean) } else { 0.0 }]
}

impl MatchRmsBackward {
    /// The gradients of one row of `x` and of `like`, in f64 and without an allocation.
    ///
    /// # Panics
    /// When lengths differ from those that [`Operation::infer`] allows.
    pub fn row(&self, [x, like, dy]: [&[f32]; 3], [dx, dlike]: [&mut [f32]; 2]) {
        let (width, wanted) = (like.len().max(1), length(like));
        let mut total = 0.0;
        let groups = x.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((x, dy), dx) in groups.zip(dx.chunks_exact_mut(width)) {
            let [scale, squares] = group(&self.0, x);
            let along = dot(dy, x);
            for (dx, (x, dy)) in dx.iter_mut().zip(x.iter().zip(dy)) {
                let across = f64::from(*dy) - f64::from(*x) * along * squares;
                *dx = (across * wanted * scale) as f32;
            }
            total += along * scale;
        }
        let by = if wanted > 0.0 { total / (width as f64 * wanted) } else { 0.0 };
        dlike.iter_mut().zip(like).for_each(|(to, like)| *to = (f64::from(*like) * by) as f32);
    }

    /// Rows whose groups have `width` elements, `groups` of them.
    fn rows(
        &self,
        [x, like, dy]: [&[f32]; 3],
        groups: usize,
        width: usize,
        [dx, dlike]: [&mut [f32]; 2],
    ) {
        let wide = groups * width;
        let rows = x.chunks_exact(wide).zip(dy.chunks_exact(wide)).zip(like.chunks_exact(width));
        let to = dx.chunks_exact_mut(wide).zip(dlike.chunks_exact_mut(width));
        for (((x, dy), like), (dx, dlike)) in rows.zip(to) {
            self.row([x, like, dy], [dx, dlike]);
        }
    }
}

impl Operation for MatchRmsBackward {
    fn name(&self) -> &'static str {
        "match_rms_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[0])?;
        self.0.infer(&inputs[..2], weights)?;
        alike(self.name(), &[inputs[0], inputs[2]])?;
        Ok(inputs[..2].to_vec())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[1];
        let groups = call.widths[0] / width;
        let [dx, dlike] = &mut call.outputs[..] else { return };
        self.rows([0, 1, 2].map(|i| call.inputs[i]), groups, width, [dx, dlike]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let (width, wide) = (to.width(LIKE), to.width(X));
        let bound = [
            ("x", Bound::Value(X)),
            ("like", Bound::Value(LIKE)),
            ("dy", Bound::Value(Operand::Input(2))),
            ("dx", Bound::Value(Y)),
            ("dlike", Bound::Value(Operand::Output(1))),
        ];
        let numbers = self.0.numbers(to.rows(X), wide / width, width);
        to.push(match_rms_backward(to.scalar(X)), numbers, &bound)?;
        Ok(true)
    }
}

impl Operation for MatchRmsTangent {
    fn name(&self) -> &'static str {
        "match_rms_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 4, weights, &[0])?;
        same_widths(self.name(), inputs)?;
        self.0.infer(&inputs[..2], weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.widths[1];
        let groups = call.widths[0] / width;
        let [x, like, dx, dlike] = [0, 1, 2, 3].map(|i| call.inputs[i]);
        for (at, y) in call.outputs[0].chunks_exact_mut(width).enumerate() {
            let own = |of: &'_ [f32], row: usize| of[row * width..][..width].to_vec();
            let (x, dx) = (own(x, at), own(dx, at));
            let (like, dlike) = (own(like, at / groups), own(dlike, at / groups));
            let wanted = length(&like);
            let change = match wanted > 0.0 {
                true => dot(&like, &dlike) / (width as f64 * wanted),
                false => 0.0,
            };
            let [scale, squares] = group(&self.0, &x);
            let along = dot(&x, &dx) * squares;
            for (y, (x, dx)) in y.iter_mut().zip(x.into_iter().zip(dx)) {
                let (x, dx) = (f64::from(x), f64::from(dx));
                *y = (((dx - x * along) * wanted + x * change) * scale) as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

/// `dx` and `dlike` of groups of `width` elements, `groups` of each row of `like`, on the device: a
/// threadgroup has a row, and goes through its groups one after the other.
#[kernel]
pub fn match_rms_backward(
    x: In<{ scalar }>,
    like: In<{ scalar }>,
    dy: In<{ scalar }>,
    dx: Out<{ scalar }>,
    dlike: Out<{ scalar }>,
    groups: Const<u32>,
    width: Const<u32>,
    floor: Const<f32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    for name in ["x", "dy", "dx"] {
        holds(name, dim("rows") * dim("groups") * dim("width"));
    }
    holds("like", dim("rows") * dim("width"));
    holds("dlike", dim("rows") * dim("width"));
    begin();
    let first = group_id() * width;
    let sum = Var::new(0.0);
    strided(width).each(|i| {
        let like = like.get(first + i).f32();
        sum.set(like.fma(like, sum.get()));
    });
    let wanted = (group_sum(sum.get()) / width.f32()).sqrt();
    let total = Var::new(0.0);
    range(0u32, groups).each(|g| {
        let own = (group_id() * groups + g) * width;
        let read = |i: Val<u32>| (x.get(own + i).f32(), dy.get(own + i).f32());
        let [squares, along] = [(); 2].map(|()| Var::new(0.0));
        strided(width).each(|i| {
            let (x, dy) = read(i);
            squares.set(x.fma(x, squares.get()));
            along.set(dy.fma(x, along.get()));
        });
        let mean = group_sum(squares.get()) / width.f32();
        let along = group_sum(along.get());
        let scale = mean.max(floor).rsqrt();
        let slope = along * scale * scale / width.f32();
        let slope = select(Order::gt(mean, floor), slope, 0.0);
        let by = wanted * scale;
        strided(width).each(|i| {
            let (x, dy) = read(i);
            dx.set(own + i, ((dy - x * slope) * by).cast());
        });
        total.set(along.fma(scale, total.get()));
    });
    let by = total.get() / (wanted * width.f32());
    let by = select(Order::gt(wanted, 0.0), by, 0.0);
    strided(width).each(|i| dlike.set(first + i, (like.get(first + i).f32() * by).cast()));
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "match_rms_backward", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(groups, width, by, like, why): (usize, usize, f32, f32, &str)| {
            let (op, rows) = (MatchRmsBackward(USUAL), 2);
            let n = rows * groups * width;
            let x = scaled(scalar, 5, n, by);
            let like = scaled(scalar, 6, rows * width, like);
            let dy = random(scalar, 7, n);
            let (mut dx, mut dlike) = (vec![0.0; n], vec![0.0; rows * width]);
            let operands = [&x.to_f32()[..], &like.to_f32(), &dy.to_f32()];
            op.rows(operands, groups, width, [&mut dx, &mut dlike]);
            let label = format!("{rows} x {groups} x {width} {scalar}: {why}");
            let numbers = USUAL.numbers(rows, groups, width);
            let wanted = [(scalar, &dx[..]), (scalar, &dlike)];
            framed(match_rms_backward(scalar), label, numbers, vec![x, like, dy], &wanted)
        };
        [
            (3, 600, 3.0, 2.0, "longer than a group"),
            (1, 5, 0.5, 2.0, "a short row"),
            (2, 40, 1e-3, 2.0, "shorter than the least"),
            (2, 40, 1.0, 0.0, "as long as zeros"),
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
        Fill::Noise(Scalar::F32, n),
        Fill::Zeros(Scalar::F32, n),
        Fill::Zeros(Scalar::F32, rows * width),
    ];
    let numbers = USUAL.numbers(rows, groups, width);
    let kernel = match_rms_backward(Scalar::F32);
    vec![memory(kernel, "2048 x 3 x 2048", numbers, buffers, 8 * n as u64)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
