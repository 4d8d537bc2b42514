//! A step on its way to the device: what it is made of, the choices behind its logits, and what
//! follows for the requests in it.

use super::rows::{Requests, parts};
use super::{Flight, Job, Submitted, Worker};
use crate::load::Shared;
use crate::schedule::{Id, Work};
use device::{Ticket, Watch};
use formats::{Error, ErrorKind, Result, caught};
use program::StepKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

impl Worker {
    /// Notes how much of a request's prompt was found in the cache, before its first step, and
    /// takes a slot for it.
    fn begin(&mut self, shared: &Shared, id: Id) -> Result<()> {
        let (Some(sequence), Some(job)) = (self.sequences.get(id), self.jobs.get_mut(&id)) else {
            return Ok(());
        };
        if job.slot.is_none() {
            job.slot = Some(shared.slots.take()?);
            if let Some((reused, missed)) = sequence.reused() {
                // Behind the prompt may be tokens that a constraint put there.
                job.metrics.reused_tokens = reused.min(job.metrics.prompt_tokens);
                job.outlet.found(&job.metrics, missed);
            }
        }
        Ok(())
    }

    /// Submits a step; without its choices if there is a constraint in it that does not know yet what
    /// it allows.
    pub(super) fn replay(
        &mut self,
        shared: &Shared,
        works: &[Work],
        kind: StepKind,
    ) -> Result<Option<Submitted>> {
        works.iter().try_for_each(|work| self.begin(shared, work.id))?;
        let Worker { sequences, jobs, constraints, memory, chosen, placed, pace, epoch, .. } = self;
        let of = Requests { sequences, jobs, constraints };
        let parts = || parts(works, sequences, jobs);
        let (mut deferred, mut leading, mut led) = (false, false, false);
        placed.clear();
        for (work, sequence, _) in parts() {
            placed.push(work.id);
            if let Some(constrained) = constraints.get(&work.id).filter(|_| of.ends(work.id)) {
                let promised = sequence.known() < sequence.tokens().len();
                deferred |= promised || constrained.owes();
                leading |= promised;
                led = true;
            }
        }
        if placed.is_empty() {
            return Ok(None);
        }
        let stop = AtomicBool::new(false);
        // A request's own code: a panic of it must not reach the threads that compute, nor the
        // other requests.
        let panicked = Mutex::new(None);
        let tell = |id: Id, job: &Job, done: usize| {
            let all = job.metrics.prompt_tokens - job.metrics.reused_tokens;
            let Some(progress) = job.options.progress.as_ref().filter(|_| done <= all) else {
                return;
            };
            let mut panicked = panicked.lock().unwrap_or_else(PoisonError::into_inner);
            if panicked.is_none()
                && let Err(words) = caught(|| progress.tell(done, all))
            {
                *panicked = Some((id, words));
            }
        };
        let watch = |part: f64| {
            if kind == StepKind::Prompt {
                for (work, sequence, job) in parts() {
                    let start = sequence.computed() - work.rows;
                    let done = start.saturating_sub(job.metrics.reused_tokens);
                    tell(work.id, job, done + (work.rows as f64 * part) as usize);
                }
            }
            // A step that still has a use for somebody goes on.
            if parts().all(|(_, _, job)| job.is_cancelled()) {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let mut executor = shared.executor_of(*epoch)?;
        let at = Instant::now();
        for copy in sequences.copies.iter() {
            executor.copy_blocks(copy.group, &[(copy.from.number(), copy.to)])?;
        }
        let watch = Watch { stop: &stop, progress: &watch };
        let ticket = of.step(works, kind, memory, |step| match deferred {
            true => executor.forward(step).map(Some),
            false => executor.submit_watched(step, &watch),
        })?;
        let Some(ticket) = ticket else { return Ok(None) };
        if kind == StepKind::Prompt {
            for (work, sequence, job) in parts() {
                tell(work.id, job, sequence.computed().saturating_sub(job.metrics.reused_tokens));
            }
        }
        drop(executor);
        if let Some((id, words)) = panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let error = Error::new("progress", "no panic", words).of(ErrorKind::Internal);
            chosen.push((id, Err(error)));
        }
        sequences.copies.clear();
        if kind == StepKind::Decode {
            match led {
                true => pace.submitted(placed.len(), Instant::now()),
                false => pace.pause(),
            }
        }
        Ok(Some(Submitted { ticket, at, deferred, leading }))
    }

    /// Submits the choices of the step that was submitted last, unless it has been forgotten.
    pub(super) fn choose(&mut self, shared: &Shared, ticket: Ticket) -> Result<()> {
        let Worker { sequences, jobs, constraints, memory, placed, epoch, .. } = self;
        let mut executor = shared.executor_of(*epoch)?;
        if !executor.keeps(ticket) {
            return Ok(());
        }
        let of = Requests { sequences, jobs, constraints };
        of.choices(placed, memory, |choices| executor.choose(ticket, choices))
    }

    /// Notes that a step was submitted with its choices.
    pub(super) fn submitted(
        &mut self,
        shared: &Shared,
        works: &[Work],
        kind: StepKind,
        step: Submitted,
    ) {
        let (ahead, leads) = (self.ahead, self.leads());
        let Worker { sequences, jobs, constraints, flights, spare, .. } = self;
        let of = Requests { sequences, jobs, constraints };
        let (mut own, mut choosing) = spare.pop().unwrap_or_default();
        own.extend_from_slice(works);
        let ends = parts(works, sequences, jobs)
            .filter(|(work, ..)| of.ends(work.id) && of.chooses(work.id));
        choosing.extend(ends.map(|(work, sequence, _)| (work.id, sequence.computed() - 1)));
        let late = |work: &&Work| of.ends(work.id) && !of.chooses(work.id);
        let late: Vec<Id> = works.iter().filter(late).map(|work| work.id).collect();
        let Submitted { ticket, at, .. } = step;
        flights.push_back(Flight { ticket, submitted: at, kind, works: own, choosing });
        for Work { id, rows } in works {
            sequences.submitted(*id);
            if kind == StepKind::Prompt {
                sequences.keep_states(*id, *rows);
            }
            let (Some(sequence), Some(job)) = (sequences.get_mut(*id), jobs.get_mut(id)) else {
                continue;
            };
            if sequence.computed() == sequence.tokens().len() && !late.contains(id) {
                job.awaited += 1;
                let tokens = job.metrics.generated_tokens + job.awaited;
                let room = shared.options.rotate || sequence.tokens().len() < shared.info.context;
                let more = job.options.max_tokens.is_none_or(|most| tokens < most);
                let follows = match constraints.get(id) {
                    Some(constrained) => leads && constrained.wary == 0,
                    None => ahead,
                };
                if follows && room && more {
                    sequence.promise();
                }
            }
            if kind == StepKind::Prompt && sequence.computed() <= job.metrics.prompt_tokens {
                let reused = job.metrics.reused_tokens;
                job.metrics.computed_tokens = sequence.computed().saturating_sub(reused);
                job.metrics.computing = job.arrived.elapsed();
            }
        }
        for id in late {
            self.leave_out(id);
        }
    }
}
