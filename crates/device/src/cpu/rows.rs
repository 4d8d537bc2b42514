//! The rows of a step as a replay reads them: tokens, places in the cache, and the sequences that
//! attention takes.

use crate::choose::{Carried, chosen};
use cpu_kernels::attention::QuerySequence;
use formats::Result;
use program::{CHOSEN, Step, StepKind};

/// The sequence and position of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// The number of its sequence, and that sequence's first row.
    pub(super) sequence: usize,
    pub(super) first: usize,
    /// Index in the sequence's cache.
    pub(super) index: usize,
    /// Rotary position.
    pub(super) position: u32,
}

/// A step's rows as a replay reads them; the buffers are reused by every step.
#[derive(Default)]
pub(super) struct Rowed {
    pub(super) tokens: Vec<u32>,
    pub(super) rows: Vec<Row>,
    pub(super) queries: Vec<Vec<QuerySequence<'static>>>,
}

impl Rowed {
    /// Takes a step's rows, replacing [`CHOSEN`] by the token that the sequence's slot chose last.
    pub(super) fn set(&mut self, step: &Step<'_>, slots: &[Carried]) -> Result<()> {
        self.tokens.clear();
        self.tokens.extend_from_slice(step.tokens);
        self.rows.clear();
        for (number, (first, sequence)) in step.placed().enumerate() {
            let row = |i: u32| Row {
                sequence: number,
                first,
                index: (sequence.start + i) as usize,
                position: sequence.position + i,
            };
            self.rows.extend((0..sequence.rows).map(row));
            if self.tokens[first] == CHOSEN {
                let carried = slots.get(sequence.slot as usize);
                self.tokens[first] = chosen(carried, sequence.slot)?;
            }
        }
        Ok(())
    }
}

/// The sequences of a step as attention takes them for a cache group: one entry for each row that
/// decodes, one for each prompt.
pub(super) fn queries<'a>(step: &Step<'a>, group: usize, into: &mut Vec<QuerySequence<'a>>) {
    for (first, sequence) in step.placed() {
        let table = &sequence.tables[group];
        let (rows, start) = (sequence.rows as usize, sequence.start as usize);
        let each = if step.kind == StepKind::Decode { 1 } else { rows };
        into.extend((0..rows).step_by(each).map(|row| QuerySequence {
            decodes: step.kind == StepKind::Decode,
            table: table.blocks,
            row: first + row,
            tokens: each,
            position: start + row,
            oldest: table.oldest as usize,
        }));
    }
}
