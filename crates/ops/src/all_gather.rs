//! Gathers the columns of all ranks: each of a group of devices gives its columns of some rows and
//! gets the columns of every rank, one rank after the other: `y = x_0 ++ x_1 ++ ..`, where `x_r` is
//! `[rows, columns of rank r]`. So `y` has the elements of `[rows, width]` in another order, which
//! [`join_columns`](crate::join_columns) puts right. A device has no kernel for it: the group that
//! joins the ranks does the gathering.

use formats::Result;

use crate::operation::{ActivationPrecision, Operation, ReferenceCall, Sharding};
use crate::{Partition, Shape, arity, expect};

/// `x[rows, columns of the rank] -> y[rows, width]`, in the order of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AllGather {
    /// Which columns each rank gives.
    pub partition: Partition,
    /// The rank that this is.
    pub rank: usize,
}

impl Operation for AllGather {
    fn name(&self) -> &'static str {
        "all_gather"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("all_gather", inputs, 1, weights, &[0])?;
        let own = self.partition.range(self.rank).len();
        expect("all_gather", "columns of the rank", &[inputs[0].width], &[own])?;
        Ok(vec![Shape { width: self.partition.width, ..inputs[0] }])
    }

    /// The reference of a single rank. The interpreter of several ranks joins their contributions.
    fn reference(&self, call: &mut ReferenceCall<'_>) {
        reference(&[call.inputs[0]], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Exact
    }
}

/// Puts what the ranks give one after the other; `y` is as long as all parts together.
pub fn reference(parts: &[&[f32]], y: &mut [f32]) {
    let mut rest = y;
    for part in parts {
        let (own, behind) = rest.split_at_mut(part.len());
        own.copy_from_slice(part);
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_one_another() {
        let mut y = [0.0; 5];
        reference(&[&[1.0, 2.0, 3.0], &[4.0, 5.0]], &mut y);
        assert_eq!(y, [1.0, 2.0, 3.0, 4.0, 5.0]);
        let partition = Partition { width: 5, block: 1, ranks: 2 };
        let [first, second] = [0, 1].map(|rank| AllGather { partition, rank });
        let whole = vec![Shape::tokens(5)];
        assert_eq!(first.infer(&[Shape::tokens(3)], &[]).unwrap(), whole);
        assert_eq!(second.infer(&[Shape::tokens(2)], &[]).unwrap(), whole);
        assert!(second.infer(&[Shape::tokens(3)], &[]).is_err(), "the columns of another rank");
    }
}
