//! Each column times a number of its own: `y[t, i] = x[t, i] s[i] + b[i]`. DoRA (Liu et al. 2024)
//! does so to the products of matrices whose rows it gives other lengths, in training; AltUp in
//! Gemma 3n to the stream that its layers compute; and heads of q and k that are normed have weights of
//! their own in Command R+.

use crate::gradient::{Forward, Reverse, SumRows, Wrt, bilinear, give, mul, one};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{RowThreads, begin, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, memory, near, random, rows_of};
use crate::{Shape, arity, expect};
use formats::Result;
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// `x[rows, width]; s[width], (b[width]) -> [rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ScaleColumns;

impl Operation for ScaleColumns {
    fn name(&self) -> &'static str {
        "scale_columns"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[1, 2])?;
        for weight in weights {
            expect(self.name(), "weight", weight, &[inputs[0].width])?;
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let bias = call.weights.get(1).map(Vec::as_slice);
        reference(call.inputs[0], &call.weights[0], bias, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Columns
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let biased = to.weight(1).is_some();
        let mut bound =
            vec![("x", Bound::Value(X)), ("s", Bound::Weight(0)), ("y", Bound::Value(Y))];
        bound.extend(biased.then_some(("bias", Bound::Weight(1))));
        to.push(scale_columns(to.scalar(X), biased), numbers(to.rows(X), to.width(X)), &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let (Some(dy), x) = (at.cotangent(0), at.input(0)) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, *self, &[dy], &[0]))?;
        give(at, Wrt::Weight(0), |at| {
            let product = mul(at, dy, x)?;
            one(at, SumRows, &[product], &[])
        })?;
        match at.weight(1) {
            Some(_) => give(at, Wrt::Weight(1), |at| one(at, SumRows, &[dy], &[])),
            None => Ok(()),
        }
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        bilinear(at, *self)
    }
}

/// `y = x s + b`, column by column, in f64.
fn reference(x: &[f32], s: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    for (at, y) in y.iter_mut().enumerate() {
        let i = at % s.len();
        let shift = bias.map_or(0.0, |bias| f64::from(bias[i]));
        *y = (f64::from(x[at]) * f64::from(s[i]) + shift) as f32;
    }
}

/// `y[t, i] = x[t, i] s[i]`, on the device; where `biased`, a last buffer `bias` is added.
#[kernel]
pub fn scale_columns(
    x: In<{ scalar }>,
    s: In<f32>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    scalar: Scalar,
    biased: bool,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("s", dim("width")), ("y", size)]);
    let bias = biased.then(|| {
        require_vectors(&[("bias", dim("width"))]);
        <In>::declare("bias")
    });
    begin();
    let first = group_id() * width;
    RowThreads::Group.sweep(width, lanes_of_both(scalar, Scalar::F32), |at, lanes| {
        for &i in at {
            let each = load(x, first + i, lanes).into_iter().zip(load(s, i, lanes));
            let products: Vec<Val<f32>> = each.map(|(x, s)| x * s).collect();
            let values = match bias {
                Some(bias) => {
                    let shifts = load(bias, i, lanes);
                    products
                        .into_iter()
                        .zip(shifts)
                        .map(|(product, shift)| product + shift)
                        .collect()
                }
                None => products,
            };
            y.set_vec(first + i, &values);
        }
    });
}

fn numbers(rows: usize, width: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32)
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "scale_columns", cases, benches }];

fn cases() -> Vec<Case> {
    let case = |scalar: Scalar, width: usize, biased: bool, why: &str| {
        let (x, s) = (random(scalar, width as u64, 3 * width), random(Scalar::F32, 2, width));
        let bias = biased.then(|| random(Scalar::F32, 3, width));
        let mut y = vec![0.0; 3 * width];
        let shifts = bias.as_ref().map(Buffer::to_f32);
        reference(&x.to_f32(), &s.to_f32(), shifts.as_deref(), &mut y);
        let mut buffers = vec![x, s, Buffer::zeros(scalar, 3 * width)];
        buffers.extend(bias);
        Case {
            kernel: scale_columns(scalar, biased).record(),
            label: format!("3 x {width} {scalar}, {why}"),
            numbers: numbers(3, width),
            buffers,
            expected: vec![(2, near(scalar, &y))],
        }
    };
    every_float(|scalar| {
        vec![
            case(scalar, 1, false, "one column"),
            case(scalar, 129, true, "a width no vector divides, biased"),
            case(scalar, 2048, false, "a vector or two per thread"),
        ]
    })
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let n = rows * width;
        let buffers =
            vec![Fill::Noise(scalar, n), Fill::Noise(Scalar::F32, width), Fill::Zeros(scalar, n)];
        let kernel = scale_columns(scalar, false);
        vec![memory(kernel, &format!("{rows} x {width}"), numbers(rows, width), buffers, n as u64)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
