//! The state of weight updates, and the kernels that apply them.

use std::ops::Range;

use formats::{Error, Result};
use ops::Binary;
use ops::gradient::adamw::{PART, Rule, adamw, squares};
use ops::gradient::elements::fill;
use ops::zip::zip;
use program::WeightId;
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::GpuTrainer;
use crate::Kept;
use crate::gpu::Backend;

/// Gradient sums and moments, allocated at the first update. Each is as long as the values of all
/// trained weights.
pub(super) struct Updates<B: Backend> {
    sums: B::Buffer,
    first: B::Buffer,
    second: B::Buffer,
    /// Partial sums of squares of the gradient sums.
    squares: B::Buffer,
}

impl<B: Backend> GpuTrainer<B> {
    /// Elements of all trained weights, including the padding between them.
    fn elements(&self) -> Result<u32> {
        let more = |_| Error::new("train", "trained weights of 2^32 elements at most", "more");
        u32::try_from(self.ends[1] / 4).map_err(more)
    }

    fn updates(&mut self) -> Result<&Updates<B>> {
        if self.updates.is_none() {
            let parts = self.elements()?.div_ceil(PART) as usize;
            let buffer = || self.backend.buffer(self.ends[1].max(4));
            let [sums, first, second] = [buffer()?, buffer()?, buffer()?];
            let squares = self.backend.buffer(4 * parts.max(1))?;
            self.updates = Some(Updates { sums, first, second, squares });
        }
        self.updates.as_ref().ok_or_else(|| Error::new("train", "sums of gradients", "none"))
    }

    /// The buffer of a value that is kept for a trained weight of `elements` elements.
    pub(super) fn place(
        &mut self,
        weight: WeightId,
        kept: Kept,
        elements: usize,
    ) -> Result<B::Buffer> {
        let known = self.trained.iter().find(|(id, _)| *id == weight);
        let range = known.map_or(0..0, |(_, range)| range.clone());
        if range.len() != 4 * elements || range.is_empty() {
            let expected = format!("{} values of a trained weight", range.len() / 4);
            return Err(Error::new("train", expected, elements));
        }
        let of = match kept {
            Kept::Values => self.master.clone(),
            Kept::Gradient => self.arena.clone(),
            Kept::Sum => self.updates()?.sums.clone(),
            Kept::First => self.updates()?.first.clone(),
            Kept::Second => self.updates()?.second.clone(),
        };
        self.backend.part(&of, range)
    }

    /// Binds a kernel to buffers.
    pub(super) fn bound(
        &mut self,
        recipe: Recipe,
        numbers: &Numbers,
        buffers: &[B::Buffer],
    ) -> Result<B::Launch> {
        let (kernel, _) = self.kernels.get(recipe, numbers, self.lowerings[0].facts)?;
        self.kernels.load(&*self.backend, &mut self.pipelines)?;
        self.backend.bind(&self.pipelines[kernel], numbers, buffers)
    }

    /// Binds and launches a single kernel.
    pub(super) fn launch(
        &mut self,
        recipe: Recipe,
        numbers: &Numbers,
        buffers: &[B::Buffer],
    ) -> Result<()> {
        let launch = self.bound(recipe, numbers, buffers)?;
        self.backend.submit(&[launch])
    }

    /// See [`Trainer::accumulate`](crate::Trainer::accumulate).
    pub(super) fn add_gradients(&mut self, first: bool) -> Result<()> {
        let own =
            self.classes.last().is_some_and(|c| self.lowerings[c.number].program.results.len() > 1);
        if !own {
            return Err(Error::new("train", "a batch with gradients", "one without"));
        }
        let (n, end) = (self.elements()?, self.ends[1]);
        let sums = self.updates()?.sums.clone();
        let gradients = self.backend.part(&self.arena, 0..end)?;
        if first {
            return self.backend.copy(&gradients, &sums);
        }
        let buffers = [sums.clone(), gradients, sums];
        self.launch(zip(Scalar::F32, Binary::Add), &Numbers::new().with("n", n), &buffers)
    }

    /// See [`Trainer::reduce`](crate::Trainer::reduce).
    pub(super) fn reduce_sums(&mut self) -> Result<()> {
        let count = self.ends[1] / 4;
        let sums = self.updates()?.sums.clone();
        let launch = self.backend.all_reduce(&sums, &sums, count)?;
        self.backend.submit(&[launch])
    }

    /// See [`Trainer::clear`](crate::Trainer::clear).
    pub(super) fn clear_sums(&mut self) -> Result<()> {
        let n = self.elements()?;
        let sums = self.updates()?.sums.clone();
        let numbers = Numbers::new().with("n", n).with_f32("value", 0.0);
        self.launch(fill(Scalar::F32), &numbers, &[sums])
    }

    /// See [`Trainer::squares`](crate::Trainer::squares).
    pub(super) fn add_squares(&mut self) -> Result<f64> {
        let n = self.elements()?;
        let updates = self.updates()?;
        let buffers = [updates.sums.clone(), updates.squares.clone()];
        self.launch(squares(), &Numbers::new().with("n", n), &buffers)?;
        let mut bytes = vec![0; 4 * n.div_ceil(PART) as usize];
        self.backend.read(&buffers[1], &mut bytes)?;
        let parts = bytes.as_chunks().0.iter().map(|part| f64::from(f32::from_le_bytes(*part)));
        Ok(parts.sum())
    }

    /// See [`Trainer::update`](crate::Trainer::update).
    pub(super) fn apply(&mut self, rule: &Rule) -> Result<()> {
        let ([matrices, end], scalar) = (self.ends, self.lowerings[0].scalar);
        self.due = true;
        self.part_of_update(0..matrices, rule, scalar)?;
        self.part_of_update(matrices..end, &Rule { keep: 1.0, ..*rule }, Scalar::F32)
    }

    /// Updates the weights in a byte range, whose operands have this type.
    fn part_of_update(&mut self, range: Range<usize>, rule: &Rule, operand: Scalar) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let Updates { sums, first, second, .. } = self.updates()?;
        let of = [None, Some(sums.clone()), Some(first.clone()), Some(second.clone())];
        let mut buffers = Vec::with_capacity(5);
        for own in of {
            let own = own.unwrap_or_else(|| self.master.clone());
            buffers.push(self.backend.part(&own, range.clone())?);
        }
        if operand != Scalar::F32 {
            let half = |at: usize| at / 4 * operand.bytes();
            let range = half(range.start)..half(range.end);
            buffers.push(self.backend.part(&self.operands, range)?);
        }
        let numbers = rule.numbers((range.len() / 4) as u32);
        self.launch(adamw(operand), &numbers, &buffers)
    }
}
