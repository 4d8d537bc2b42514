//! Trained DoRA vectors, which are divided by the row norms of a matrix: [`Divided`].

use formats::{Error, Result};
use ops::gradient::gains::{numbers, row_gains};
use ops::packed::Format;
use ops::zip::zip;
use ops::{Binary, embed};
use program::{Program, WeightId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::GpuTrainer;
use crate::Divided;
use crate::gpu::Backend;

/// Refuses Programs in which only some trained vectors are divided.
pub(super) fn check(program: &Program, trained: &[WeightId], divided: &[Divided]) -> Result<()> {
    let vectors = trained.iter().filter(|id| program.weights[id.0].shape.len() != 2).count();
    if divided.is_empty() || vectors == divided.len() {
        return Ok(());
    }
    let expected = format!("lengths for all of {vectors} trained vectors, or for none");
    Err(Error::new("train", expected, divided.len()))
}

impl<B: Backend> GpuTrainer<B> {
    /// Computes row norms and the divided vectors, if values have changed.
    pub(super) fn divide(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.due) || self.divided.is_empty() {
            return Ok(());
        }
        if self.gains.is_empty() {
            for own in self.divided.clone() {
                self.bind_gains(&own)?;
            }
        }
        self.backend.submit(&self.gains)
    }

    fn bind_gains(&mut self, own: &Divided) -> Result<()> {
        let (lowering, matrices) = (&self.lowerings[0], self.ends[0]);
        let (scalar, weights) = (lowering.scalar, &lowering.program.weights);
        let matrix = || Error::new("train", "a matrix whose rows have lengths", "another weight");
        let &[rows, width] = weights[own.matrix.0].shape.as_slice() else { return Err(matrix()) };
        let rank = weights[own.down.0].shape.first().copied().unwrap_or(0);
        let format = lowering.formats[own.matrix.0].ok_or_else(matrix)?;
        let mut weight = self.weights[own.matrix.0].buffer.clone();
        if format != Format::Dense(scalar) {
            let unpacked = self.backend.part(&self.unpacked, 0..rows * width * scalar.bytes())?;
            let picks = self.backend.part(&self.numbers, 0..4 * rows)?;
            let buffers = [picks, weight, unpacked.clone()];
            let kernel = embed::kernel(format, scalar);
            let launch = self.bound(kernel, &embed::numbers(rows, width), &buffers)?;
            self.gains.push(launch);
            weight = unpacked;
        }
        let place = |id: WeightId| {
            let known = self.trained.iter().find(|(own, _)| *own == id);
            known.map(|(_, range)| range.clone()).ok_or_else(matrix)
        };
        let vector = place(own.weight)?;
        let value = |range| self.backend.part(&self.master, range);
        let inverses = vector.start - matrices..vector.end - matrices;
        let buffers = [
            weight,
            value(place(own.down)?)?,
            value(place(own.up)?)?,
            value(vector)?,
            self.weights[own.weight.0].buffer.clone(),
            self.backend.part(&self.inverses, inverses)?,
        ];
        let numbers = numbers([rows, width, rank], own.scale);
        let launch = self.bound(row_gains(scalar), &numbers, &buffers)?;
        self.gains.push(launch);
        Ok(())
    }

    /// Divides the gradients of divided vectors, if the Program that ran has gradients.
    pub(super) fn divide_gradients(&mut self, number: usize) -> Result<()> {
        let [matrices, end] = self.ends;
        if self.divided.is_empty() || self.lowerings[number].program.results.len() < 2 {
            return Ok(());
        }
        let gradients = self.backend.part(&self.arena, matrices..end)?;
        let buffers = [gradients.clone(), self.inverses.clone(), gradients];
        let numbers = Numbers::new().with("n", ((end - matrices) / 4) as u32);
        self.launch(zip(Scalar::F32, Binary::Mul), &numbers, &buffers)
    }
}
