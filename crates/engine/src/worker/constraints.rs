//! Constraints beside the steps: they accept what was chosen, and find what they allow, on threads
//! of their own.

use super::{Chosen, LOOK, Worker, is_end};
use crate::constraint::Constrained;
use crate::follow::{Followed, Job as Ask, Task};
use crate::load::Shared;
use crate::request::Event;
use crate::schedule::{Id, Plan, Work};

impl Worker {
    /// Tells requests what was chosen for them, as far as their constraints are done with it.
    pub(super) fn take_chosen(&mut self, shared: &Shared) {
        let mut chosen = std::mem::take(&mut self.chosen);
        let mut tasks = Vec::new();
        for (id, choice) in chosen.drain(..) {
            match choice {
                Ok(choice) => match self.constraints.remove(&id) {
                    Some(constrained) => tasks.extend(self.task(shared, id, choice, constrained)),
                    None => self.take(shared, id, choice, None),
                },
                Err(error) => self.spoil(id, error),
            }
        }
        self.chosen = chosen;
        let mut followed = std::mem::take(&mut self.followed);
        if !tasks.is_empty() {
            self.followers.follow(tasks.into_iter(), &mut followed);
        }
        self.followed = followed;
        self.take_followed(shared);
    }

    /// The work of a request's constraint after a token was chosen.
    fn task(
        &self,
        shared: &Shared,
        id: Id,
        chosen: Chosen,
        constrained: Constrained,
    ) -> Option<Task<Chosen>> {
        let (job, sequence) = (self.jobs.get(&id)?, self.sequences.get(id)?);
        let token = chosen.choice.token;
        let most = job.options.max_tokens.unwrap_or(usize::MAX);
        let most = most.saturating_sub(job.metrics.generated_tokens + job.ahead.len() + 1);
        let left = most.min(shared.room(sequence.known() + 1) + 1);
        let ends = is_end(shared, job, token);
        let looks = !self.defers || constrained.wary > 0;
        let job = Ask::Accept { token, ends, left, looks, with: chosen };
        Some(Task { id, constrained, job })
    }

    /// Tells requests the tokens that their constraints are done with.
    pub(super) fn take_followed(&mut self, shared: &Shared) {
        let mut followed = std::mem::take(&mut self.followed);
        self.followers.take(&mut followed);
        for Followed { id, mut constrained, accepted } in followed.drain(..) {
            if !self.jobs.contains_key(&id) {
                continue;
            }
            let Some((accepted, with)) = accepted else {
                // It was too late for a step.
                let failed = constrained.failed().cloned();
                self.constraints.insert(id, constrained);
                self.sequences.get_mut(id).into_iter().for_each(|sequence| sequence.hold(false));
                if let Some(error) = failed {
                    self.end(id, Event::Failed(error));
                }
                continue;
            };
            match accepted {
                Ok(accepted) => {
                    let failed = constrained.failed().cloned();
                    let forced: Vec<u32> = constrained.take_forced().collect();
                    self.constraints.insert(id, constrained);
                    if !forced.is_empty() || accepted.0 != with.choice.token {
                        self.pace.missed();
                    }
                    self.take(shared, id, with, Some(accepted));
                    self.put(id, &forced);
                    if let Some(error) = failed {
                        self.end(id, Event::Failed(error));
                    }
                }
                Err(error) => self.end(id, Event::Failed(error)),
            }
        }
        self.followed = followed;
    }

    /// Waits for the constraints of requests that are about to be computed anew, or that alone are
    /// left.
    pub(super) fn await_followed(&mut self, shared: &Shared, plan: &Plan) {
        let idle = plan.decode.is_empty() && plan.prompt.is_empty() && self.flights.is_empty();
        if idle && self.followers.any_away() {
            self.followers.wait(LOOK);
        }
        while plan.preempted.iter().any(|id| self.followers.is_away(*id)) {
            self.followers.wait(LOOK);
            self.take_followed(shared);
        }
    }

    /// Has the constraints of a step that was submitted find what they allow.
    pub(super) fn look(&mut self, works: &[Work]) {
        let mut tasks = Vec::new();
        for Work { id, .. } in works {
            if self.constraints.get(id).is_some_and(Constrained::owes)
                && let Some(constrained) = self.constraints.remove(id)
            {
                tasks.push(Task { id: *id, constrained, job: Ask::Look });
            }
        }
        let mut followed = std::mem::take(&mut self.followed);
        self.followers.follow(tasks.into_iter(), &mut followed);
        // Others are taken before the next step.
        let own = |followed: &mut Followed<Chosen>| {
            followed.accepted.is_none() && works.iter().any(|work| work.id == followed.id)
        };
        for Followed { id, constrained, .. } in followed.extract_if(.., own) {
            self.constraints.insert(id, constrained);
        }
        self.followed = followed;
    }

    /// Goes on with a request for which the step that was submitted last chooses nothing: its
    /// constraint cannot go on, or is not done yet. Then its last row is computed again once it is.
    pub(super) fn leave_out(&mut self, id: Id) {
        if let Some(error) = self.constraints.get(&id).and_then(Constrained::failed).cloned() {
            self.end(id, Event::Failed(error));
        } else if let Some(sequence) = self.sequences.get_mut(id) {
            if sequence.known() < sequence.tokens().len() {
                // The token that the row was computed of is not accepted yet.
                sequence.withdraw();
            } else {
                sequence.recall();
                sequence.hold(true);
            }
        }
    }
}
