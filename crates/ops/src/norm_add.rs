//! A residual plus a norm: `y = residual + rms_norm(x) * weight`, as behind the blocks of Gemma and
//! OLMo. See [`crate::rms_norm`].

use tile::case::{Bench, Case, Fill, Spec};
use tile::dsl::*;

use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::rms_norm::{self, SHAPES, launch_numbers, normalise, numbers, scales, team};
use crate::sweep::{RowThreads, begin, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, framed, memory, random, rows_of, scaled};
use crate::{Shape, alike, arity, expect};
use formats::Result;

/// `x[rows, width], residual[rows, width]; weight[width] -> [rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NormAdd {
    /// Added to the mean square.
    pub eps: f32,
}

impl Operation for NormAdd {
    fn name(&self) -> &'static str {
        "norm_add"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("norm_add", inputs, 2, weights, &[1])?;
        alike("norm_add", inputs)?;
        expect("norm_add", "norm weight", weights[0], &[inputs[0].width])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [x, residual] = [call.inputs[0], call.inputs[1]];
        reference(x, residual, &call.weights[0], self.eps, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let (rows, width) = (to.rows(X), to.width(X));
        let bound = [
            ("x", Bound::Value(X)),
            ("residual", Bound::Value(Operand::Input(1))),
            ("weight", Bound::Weight(0)),
            ("y", Bound::Value(Y)),
        ];
        let kernel = norm_add(to.scalar(X), team(width));
        to.push(kernel, launch_numbers(rows, width, self.eps), &bound)?;
        Ok(true)
    }
}

/// `residual` plus every row of `weight.len()` elements of `x`, normalised, in f64.
fn reference(x: &[f32], residual: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    rms_norm::reference(x, weight, eps, y);
    y.iter_mut().zip(residual).for_each(|(y, more)| *y = (f64::from(*y) + f64::from(*more)) as f32);
}

/// `y = residual + rms_norm(x) * weight` on rows of `width` elements, on the device. `y` may be the
/// same buffer as either.
#[kernel]
pub fn norm_add(
    x: In<{ scalar }>,
    residual: In<{ scalar }>,
    weight: In<f32>,
    y: Out<{ scalar }>,
    rows: Arg<u32>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    team: RowThreads,
) {
    team.launch(256);
    let size = || dim("rows") * dim("width");
    require_vectors(&[
        ("x", size()),
        ("residual", size()),
        ("weight", dim("width")),
        ("y", size()),
    ]);
    begin();
    let sizes = (width, team.lanes(lanes_of_both(scalar, Scalar::F32)));
    let own = scales(team, team.rows(rows, width), sizes, eps, x);
    normalise(team, sizes, |i, lanes| load(x, i, lanes), &own, weight, Some(residual), y);
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "norm_add", cases, benches }];

const EPS: f32 = 1e-5;

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(rows, width, team, why): (usize, usize, RowThreads, &str)| {
            let n = rows * width;
            let x = scaled(scalar, rows as u64 * 37 + width as u64, n, 3.0);
            let residual = scaled(scalar, width as u64 + 5, n, 4.0);
            let weight = random(Scalar::F32, width as u64 + 6, width);
            let mut y = vec![0.0; n];
            reference(&x.to_f32(), &residual.to_f32(), &weight.to_f32(), EPS, &mut y);
            let label = format!("{rows} x {width} {scalar}, {why}");
            let kernel = norm_add(scalar, team);
            let buffers = vec![x, residual, weight];
            framed(kernel, label, numbers(rows, width), buffers, &[(scalar, &y)])
        };
        SHAPES.into_iter().step_by(2).chain([SHAPES[5], SHAPES[7]]).map(case).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let bench = |rows: usize, width: usize| {
            let n = rows * width;
            let noise = |scalar, n| Fill::Noise(scalar, n);
            let mut buffers = vec![noise(scalar, n), noise(scalar, n)];
            buffers.extend([noise(Scalar::F32, width), Fill::Zeros(scalar, n)]);
            let kernel = norm_add(scalar, team(width));
            let label = format!("{rows} x {width}");
            memory(kernel, &label, numbers(rows, width), buffers, 6 * n as u64)
        };
        vec![bench(rows_of(scalar, 4096), 4096), bench(1, 2560)]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
