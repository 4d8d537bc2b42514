//! The rows of a step, as the device is given them.

use super::{Constrained, Job};
use crate::adapters;
use crate::pool::BlockTable;
use crate::schedule::{Id, Work};
use crate::sequences::{Sequence, Sequences};
use program::{Choose, Sequence as Rows, Step, StepKind, Table, recycle};
use std::collections::HashMap;

/// Memory for the parts of a step, kept from one to the next.
#[derive(Default)]
pub(super) struct Memory {
    tokens: Vec<u32>,
    outputs: Vec<u32>,
    tables: Vec<Table<'static>>,
    chooses: Vec<Choose<'static>>,
    rows: Vec<Rows<'static>>,
    choices: Vec<Option<Choose<'static>>>,
}

/// A step's requests that are still there.
pub(super) fn parts<'a, 'b>(
    works: &'b [Work],
    sequences: &'a Sequences,
    jobs: &'a HashMap<Id, Job>,
) -> impl Iterator<Item = (&'b Work, &'a Sequence, &'a Job)> + use<'a, 'b> {
    let part = move |work: &'b Work| Some((work, sequences.get(work.id)?, jobs.get(&work.id)?));
    works.iter().filter_map(part)
}

/// The requests of which a step is made.
#[derive(Clone, Copy)]
pub(super) struct Requests<'a> {
    pub(super) sequences: &'a Sequences,
    pub(super) jobs: &'a HashMap<Id, Job>,
    pub(super) constraints: &'a HashMap<Id, Constrained>,
}

impl Requests<'_> {
    /// Whether a step computes a request's last row, from which a token is chosen.
    pub(super) fn ends(self, id: Id) -> bool {
        let sequence = self.sequences.get(id);
        sequence.is_some_and(|sequence| sequence.computed() == sequence.tokens().len())
    }

    /// Whether a token can be chosen from it: the request's constraint, if it has one, is not away,
    /// and has not failed.
    pub(super) fn chooses(self, id: Id) -> bool {
        let free = self.jobs.get(&id).is_some_and(|job| job.options.constraint.is_none());
        let constrained = self.constraints.get(&id);
        free || constrained.is_some_and(|constrained| constrained.failed().is_none())
    }

    /// How a request's next token is chosen.
    fn choice<'b>(&'b self, id: Id, sequence: &'b Sequence, job: &'b Job) -> Choose<'b> {
        let likeliest = job.options.top_logprobs;
        let logprobs = (job.options.logprobs || likeliest > 0).then_some(likeliest);
        let mask = self.constraints.get(&id).and_then(Constrained::mask);
        Choose { options: &job.options.sampling, history: sequence.tokens(), mask, logprobs }
    }

    /// Calls `f` with how the requests of a step choose, in its order.
    pub(super) fn choices<T>(
        self,
        placed: &[Id],
        memory: &mut Memory,
        f: impl FnOnce(&[Option<Choose<'_>>]) -> T,
    ) -> T {
        let mut choices: Vec<Option<Choose<'_>>> = recycle(std::mem::take(&mut memory.choices));
        choices.extend(placed.iter().map(|id| {
            let (sequence, job) = (self.sequences.get(*id)?, self.jobs.get(id)?);
            let chooses = self.ends(*id) && self.chooses(*id);
            chooses.then(|| self.choice(*id, sequence, job))
        }));
        let result = f(&choices);
        memory.choices = recycle(choices);
        result
    }

    /// Calls `f` with the step.
    pub(super) fn step<T>(
        self,
        works: &[Work],
        kind: StepKind,
        memory: &mut Memory,
        f: impl FnOnce(&Step<'_>) -> T,
    ) -> T {
        let mut tables: Vec<Table<'_>> = recycle(std::mem::take(&mut memory.tables));
        let mut chooses: Vec<Choose<'_>> = recycle(std::mem::take(&mut memory.chooses));
        let mut rows: Vec<Rows<'_>> = recycle(std::mem::take(&mut memory.rows));
        memory.tokens.clear();
        memory.outputs.clear();
        for (work, sequence, job) in parts(works, self.sequences, self.jobs) {
            let end = sequence.computed();
            memory.tokens.extend(&sequence.tokens()[end - work.rows..end]);
            tables.extend(sequence.tables().iter().map(BlockTable::table));
            if self.ends(work.id) {
                memory.outputs.push(memory.tokens.len() as u32 - 1);
                chooses.push(self.choice(work.id, sequence, job));
            }
        }
        let (mut own_tables, mut own_chooses) = (&tables[..], chooses.iter());
        for (work, sequence, job) in parts(works, self.sequences, self.jobs) {
            let (tables, others) = own_tables.split_at(sequence.tables().len());
            own_tables = others;
            let start = (sequence.computed() - work.rows) as u32;
            let choose = if self.ends(work.id) { own_chooses.next() } else { None };
            rows.push(Rows {
                rows: work.rows as u32,
                start,
                position: start,
                tables,
                slot: job.slot.as_ref().map_or(0, |slot| slot.number),
                adapter: adapters::seat(job.adapter.as_ref()),
                choose: choose.filter(|_| self.chooses(work.id)),
            });
        }
        let (tokens, outputs) = (&memory.tokens, &memory.outputs);
        let result = f(&Step { kind, tokens, sequences: &rows, outputs, input: &[] });
        memory.rows = recycle(rows);
        memory.chooses = recycle(chooses);
        memory.tables = recycle(tables);
        result
    }
}
