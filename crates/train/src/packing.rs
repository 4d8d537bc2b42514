//! A batch, row by row.

use crate::Batch;
use formats::{Error, ErrorKind, Result};
use ops::embed::Index;
use ops::{Gradient, Op};
use program::Program;
use std::ops::Range;

/// The sequence and position of each packed row.
#[derive(Debug, Clone, Default)]
pub(crate) struct Packing {
    /// The first row of each row's sequence.
    pub(crate) first: Vec<u32>,
    /// Where each row stands in its sequence.
    pub(crate) positions: Vec<u32>,
    /// How many rows each row's sequence has.
    pub(crate) lengths: Vec<u32>,
    /// Rows whose predictions count, ascending.
    pub(crate) picks: Vec<u32>,
    /// The number of each row in the run.
    pub(crate) draws: Vec<u32>,
}

impl Packing {
    /// # Errors
    /// Parts of other lengths, sequences that do not cover all tokens in order, weights that are
    /// not finite, or a last token that is to predict something.
    pub(crate) fn new(batch: &Batch) -> Result<Packing> {
        let rows = batch.tokens.len();
        if batch.targets.len() != rows || batch.weights.len() != rows || rows > u32::MAX as usize {
            let found = format!("{} and {}", batch.targets.len(), batch.weights.len());
            return Err(Error::new("batch", format!("{rows} targets and weights"), found));
        }
        if let Some(odd) = batch.weights.iter().find(|w| !w.is_finite()) {
            return Err(Error::new("batch", "weights that are finite", odd));
        }
        let mut packing = Packing::default();
        for sequence in &batch.sequences {
            if sequence.start != packing.first.len() || sequence.end <= sequence.start {
                let expected = format!("a sequence from row {}", packing.first.len());
                return Err(Error::new("batch", expected, format!("{sequence:?}")));
            }
            if sequence.end > rows {
                return Err(Error::new("batch", format!("{rows} tokens"), sequence.end));
            }
            if batch.weights[sequence.end - 1] != 0.0 {
                let expected = "a last token of weight 0, since nothing follows it";
                return Err(Error::new("batch", expected, batch.weights[sequence.end - 1]));
            }
            packing.first.extend(sequence.clone().map(|_| sequence.start as u32));
            packing.positions.extend(0..sequence.len() as u32);
            packing.lengths.extend(sequence.clone().map(|_| sequence.len() as u32));
        }
        if packing.first.len() != rows {
            let found = format!("{} of them", packing.first.len());
            return Err(Error::new("batch", format!("sequences of all {rows} tokens"), found));
        }
        let counts = (0..rows).filter(|&row| batch.weights[row] != 0.0);
        packing.picks = counts.map(|row| row as u32).collect();
        packing.draws = (0..rows as u64).map(|row| batch.read.wrapping_add(row) as u32).collect();
        Ok(packing)
    }

    /// The numbers that pick rows of a table.
    pub(crate) fn picked<'a>(&'a self, batch: &'a Batch, index: Index) -> &'a [u32] {
        match index {
            Index::Token => &batch.tokens,
            Index::Position => &self.positions,
        }
    }

    /// Whether tokens and targets are rows of a Program's tables, and sequences as long as its
    /// attention can be trained with: to all positions, where an indexer chooses so many.
    ///
    /// # Errors
    /// The first that is not.
    pub(crate) fn fits(&self, program: &Program, batch: &Batch) -> Result<()> {
        let targets = |row: &u32| batch.targets[*row as usize];
        let longest = batch.sequences.iter().map(Range::len).max().unwrap_or(0);
        for node in &program.nodes {
            if let Op::Gradient(Gradient::Attend(of)) = &node.op
                && let Some(count) = of.0.chosen.filter(|count| longest > *count)
            {
                let expected = format!("sequences of at most {count} tokens");
                let error = Error::new("batch", expected, longest).of(ErrorKind::Unsupported);
                return Err(error.hint("the indexer chooses among more, which is not trained"));
            }
            let rows = |i: usize| program.weights[node.weights[i].0].shape[0] as u32;
            let odd = match &node.op {
                Op::Embed(op) => {
                    self.picked(batch, op.index).iter().find(|t| **t >= rows(0)).copied()
                }
                Op::Gradient(Gradient::CrossEntropy(_)) => {
                    self.picks.iter().map(targets).find(|t| *t >= rows(0))
                }
                _ => None,
            };
            if let Some(odd) = odd {
                return Err(Error::new("batch", format!("numbers below {}", rows(0)), odd));
            }
        }
        Ok(())
    }
}
