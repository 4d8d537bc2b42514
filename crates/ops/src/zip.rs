//! Functions of two elements of equal shapes: `y[i] = f(a[i], b[i])`. The residual stream is `add`.

use tile::case::{Bench, Case, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use crate::gradient::{Forward, Reverse, Wrt, give, mul, one};
use crate::operation::{Launches, Operation, ReferenceCall, Sharding, X, launch_flat};
use crate::sweep;
use crate::trial::{every_float, flat, flat_bench};
use crate::{Scale, Shape, alike, arity, real};
use formats::{Error, ErrorKind, Result};

pub use formats::elementwise::Binary;

/// `a, b -> f(a, b)`, all of one shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Zip(pub Binary);

impl Operation for Zip {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[0])?;
        alike(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(self.0, call.inputs[0], call.inputs[1], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Alike
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = zip(to.scalar(X), self.0);
        launch_flat(to, kernel, Numbers::new(), &["a", "b"])
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let (a, b) = (Wrt::Input(0), Wrt::Input(1));
        match self.0 {
            Binary::Add => {
                give(at, a, |_| Ok(dy))?;
                give(at, b, |_| Ok(dy))
            }
            Binary::Sub => {
                give(at, a, |_| Ok(dy))?;
                give(at, b, |at| one(at, Scale { by: -1.0 }, &[dy], &[]))
            }
            Binary::Mul => {
                let (x, y) = (at.input(0), at.input(1));
                give(at, a, |at| mul(at, dy, y))?;
                give(at, b, |at| mul(at, dy, x))
            }
            Binary::Max | Binary::Min => {
                let expected = "an operation that has a gradient";
                Err(Error::new(self.name(), expected, "none").of(ErrorKind::Unsupported))
            }
        }
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        for i in [0, 1] {
            let Some(dx) = at.tangent(i) else { continue };
            let other = at.input(1 - i);
            let dy = match (self.0, i) {
                (Binary::Add, _) | (Binary::Sub, 0) => dx,
                (Binary::Sub, _) => one(at, Scale { by: -1.0 }, &[dx], &[])?,
                (Binary::Mul, _) => mul(at, dx, other)?,
                (Binary::Max | Binary::Min, _) => {
                    let expected = "an operation that has a tangent";
                    let error = Error::new(self.name(), expected, "none");
                    return Err(error.of(ErrorKind::Unsupported));
                }
            };
            at.add(0, dy)?;
        }
        Ok(())
    }
}

/// `y = f(a, b)`, in f64.
pub fn reference(f: Binary, a: &[f32], b: &[f32], y: &mut [f32]) {
    for i in 0..y.len() {
        y[i] = f.apply(f64::from(a[i]), f64::from(b[i])) as f32;
    }
}

/// `y = f(a, b)`, on the device: `n` elements.
#[kernel]
pub fn zip(
    a: In<{ scalar }>,
    b: In<{ scalar }>,
    y: Out<{ scalar }>,
    n: Arg<u32>,
    scalar: Scalar,
    f: Binary,
) {
    sweep::map(["a", "b"], [a, b], y, n, |[a, b]| real::binary(f, a, b));
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "zip", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = |&f: &Binary| {
            flat(scalar, zip(scalar, f), &Numbers::new(), 2, 2.0, move |x, y| {
                reference(f, &x[0], &x[1], y);
            })
        };
        Binary::ALL.iter().flat_map(of).collect()
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let of = |f| flat_bench(scalar, zip(scalar, f), Numbers::new(), 2, 1);
        [Binary::Add, Binary::Mul].map(of).to_vec()
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
