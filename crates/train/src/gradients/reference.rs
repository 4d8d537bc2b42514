//! Runs a Program of packed sequences with the operations' own reference loops: what the executor
//! is compared with.

use crate::Batch;
use crate::packing::Packing;
use formats::Result;
use ops::operation::{Packed, ReferenceCall};
use program::{Program, WeightId};

/// Every value of `program` for a batch, by [`program::ValueId`]. `weight` gives a weight's
/// elements, row-major.
///
/// # Errors
/// Those of `weight`, and a batch whose parts do not agree.
pub fn run(
    program: &Program,
    weight: &dyn Fn(WeightId) -> Result<Vec<f32>>,
    batch: &Batch,
) -> Result<Vec<Vec<f32>>> {
    let packing = Packing::new(batch)?;
    let packed = Packed {
        first: &packing.first,
        targets: &batch.targets,
        counts: &batch.weights,
        draws: &packing.draws,
    };
    let shapes = program.values.iter();
    let rows = |shape: &ops::Shape| shape.rows.count(batch.tokens.len(), packing.picks.len());
    let mut values: Vec<Vec<f32>> = shapes.map(|s| vec![0.0; rows(s) * s.width]).collect();
    for node in &program.nodes {
        let weights = node.weights.iter().map(|w| weight(*w)).collect::<Result<Vec<_>>>()?;
        let mut call = ReferenceCall {
            inputs: node.inputs.iter().map(|v| values[v.0].as_slice()).collect(),
            widths: node.inputs.iter().map(|v| program.shape(*v).width).collect(),
            weights: &weights,
            outputs: node.outputs.iter().map(|v| values[v.0].clone()).collect(),
            tokens: &batch.tokens,
            positions: &packing.positions,
            picks: &packing.picks,
            deltas: vec![None; batch.tokens.len()],
            cache: &mut [],
            packed,
        };
        node.op.reference(&mut call);
        let outputs = call.outputs;
        for (value, output) in node.outputs.iter().zip(outputs) {
            values[value.0] = output;
        }
    }
    Ok(values)
}
