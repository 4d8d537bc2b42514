//! Rows that go back where they were taken from: of a table by token, of a value by selection.

use super::{Reverse, Wrt, give, one};
use crate::embed::Index;
use crate::operation::{Call, Operation, Sharding};
use crate::{Rows, Select, Shape, arity};
use formats::{Error, Result};

/// `dy[tokens, width] -> [table, width]`: row `r` is the sum of the rows of `dy` whose tokens picked `r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gathered {
    /// The numbers that picked the table's rows.
    pub index: Index,
    /// Rows of the table.
    pub table: usize,
}

/// `dy[outputs, width] -> [tokens, width]`: rows that were not selected are zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread;

impl Operation for Gathered {
    fn name(&self) -> &'static str {
        "gathered"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![Shape { rows: Rows::Fixed(self.table), width: inputs[0].width }])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let width = call.widths[0];
        let rows = match self.index {
            Index::Token => call.tokens,
            Index::Position => call.positions,
        };
        let mut sums = vec![0f64; call.outputs[0].len()];
        for (&row, dy) in rows.iter().zip(call.inputs[0].chunks_exact(width)) {
            let sums = &mut sums[row as usize * width..][..width];
            sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += f64::from(*dy));
        }
        call.outputs[0].iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for Spread {
    fn name(&self) -> &'static str {
        "spread"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        if inputs[0].rows != Rows::Outputs {
            return Err(Error::new(self.name(), "selected rows", format!("{:?}", inputs[0].rows)));
        }
        Ok(vec![Shape::tokens(inputs[0].width)])
    }

    fn reference(&self, call: &mut Call<'_>) {
        let width = call.widths[0];
        for (&row, dy) in call.picks.iter().zip(call.inputs[0].chunks_exact(width)) {
            call.outputs[0][row as usize * width..][..width].copy_from_slice(dy);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, Select, &[dy], &[]))
    }
}
