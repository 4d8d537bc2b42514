//! Gradients of Programs, as functions from Program to Program: [`pack`], then [`losses`], then
//! [`differentiate`], and [`checkpoint`] where memory is short. What runs them slowly and obviously
//! is [`mod@reference`]; on the CPU it is a [`CpuExecutor`](crate::cpu::CpuExecutor).

mod checkpoint;
mod differentiate;
mod forward;
mod rewrite;

pub mod reference;

pub use checkpoint::checkpoint;
pub use differentiate::differentiate;
pub use forward::jvp;
pub use rewrite::{
    AdaptedProduct, GradientPart, Module, ModuleFactors, adapt, apart, losses, noisy, pack,
};

use formats::Result;
use ops::{Op, Shape};
use program::{Node, Program, ValueId, WeightId};

/// Appends an operation, and gives its outputs.
pub(crate) fn push(
    program: &mut Program,
    op: Op,
    inputs: Vec<ValueId>,
    weights: Vec<WeightId>,
) -> Result<Vec<ValueId>> {
    let shapes: Vec<Shape> = inputs.iter().map(|v| program.shape(*v)).collect();
    let of = |w: &WeightId| program.weights[w.0].shape.as_slice();
    let found = op.infer(&shapes, &weights.iter().map(of).collect::<Vec<_>>())?;
    let first = program.values.len();
    let outputs: Vec<ValueId> = (first..first + found.len()).map(ValueId).collect();
    program.values.extend(found);
    program.nodes.push(Node { op, inputs, weights, outputs: outputs.clone() });
    Ok(outputs)
}
