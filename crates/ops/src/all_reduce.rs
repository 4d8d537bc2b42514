//! The sum over ranks: each of a group of devices gives `x` and gets `y = x_0 + x_1 + ..`, the same
//! on all of them. A device has no kernel for it: ranks meet in whatever joins them.

use formats::Result;

use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Shape, arity};

/// `x -> y`, of any one shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AllReduce;

impl Operation for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("all_reduce", inputs, 1, weights, &[0])?;
        Ok(vec![inputs[0]])
    }

    /// The reference of a single rank. The interpreter of several ranks adds their contributions.
    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(&[call.inputs[0]], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }
}

/// Adds what the ranks give, in their order, in f64. All parts are as long as `y`.
pub fn reference(parts: &[&[f32]], y: &mut [f32]) {
    for (i, y) in y.iter_mut().enumerate() {
        *y = parts.iter().map(|part| f64::from(part[i])).sum::<f64>() as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_counts_once() {
        let mut y = [0.0; 2];
        reference(&[&[1.0, -2.0], &[0.5, 4.0], &[1e-9, 0.0]], &mut y);
        assert_eq!(y, [1.5, 2.0]);
        let shapes = [Shape::tokens(8)];
        assert_eq!(AllReduce.infer(&shapes, &[]).unwrap(), shapes);
        assert!(AllReduce.infer(&shapes, &[&[8]]).is_err() && AllReduce.infer(&[], &[]).is_err());
    }
}
