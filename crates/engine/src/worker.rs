//! The worker: one thread that computes all requests, a step of the [scheduler](crate::schedule) at
//! a time.
//!
//! On a device that computes while the host does something else, a step is submitted before it is
//! known what the one before it chose: a request's next token is then promised to it, and told when
//! it is known. Constraints, which follow from the tokens, are followed on several threads, and
//! none is waited for longer than others' tokens may wait ([`follow`](crate::follow)).
//!
//! On a device that can choose apart from computing logits ([`Executor::defers`](device::Executor)),
//! requests with constraints are in such steps, too:
//! 1. A step is planned with the tokens that are promised, and submitted without its choices.
//! 2. The tokens of the step before it are waited for. Constraints accept them, and say what comes
//!    behind them in any case; requests are told of both.
//! 3. While the device computes the step's logits, the constraints of all requests in it find what
//!    they allow, which is what takes most of their time.
//! 4. The step's choices are submitted with that, then a prompt's step, if there is one.
//!
//! A step chooses nothing for a request whose constraint went on by more or other tokens than the
//! one that was chosen, and the request goes on in the next. Where that loses more than is won
//! ([`Pace`]), 2 goes before 1 and nothing is promised. A constraint that is not done in time is left
//! out of the choices, and the row that was computed for it is computed again once it is; one that
//! is known to be slow finds what it allows before its request is in a step at all. If anybody else
//! has a step computed between 1 and 4, the device has forgotten the choices, and the rows are
//! computed again.
//!
//! On a device that cannot, a request with a constraint waits until its token is known.
//!
//! It starts with the first request and ends with its engine. A panic while a token is chosen, or
//! of a request's constraint, ends the request that it belongs to; a step that fails, or panics,
//! ends all requests that are in it.

mod constraints;
mod inbox;
mod pace;
mod rows;
mod steps;

pub(crate) use self::inbox::{Inbox, start};

use self::inbox::Delivery;
use self::pace::Pace;
use self::rows::Memory;
use crate::adapters::{self, Adapter};
use crate::constraint::{self, Constrained};
use crate::follow::{Followed, Followers};
use crate::generate::{Finish, GenerateOptions, Metrics, refused};
use crate::load::Shared;
use crate::request::{Event, Outlet, Request};
use crate::schedule::{Arrival, Id, Limits, Plan, Scheduler, Work};
use crate::sequences::{Sequence, Sequences};
use crate::slots::Slot;
use device::Ticket;
use formats::{Error, ErrorKind, Result, caught};
use ops::sample::Choice;
use program::StepKind;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a prompt's step beside decoding requests shall take: it is what their next tokens wait.
const GAP: Duration = Duration::from_millis(100);
/// Rows of a prompt's step that are taken however long they last.
const LEAST_ROWS: usize = 32;
/// Rows of a sequence that recomputes its generated tokens, in one step.
const CATCH_UP: usize = 8;
/// Decode steps that a short prompt waits for others at most on a device that runs ahead, and how
/// long that may take.
const GATHER_STEPS: u64 = 16;
const GATHER: Duration = Duration::from_millis(100);
/// Rows of prompts that such a device computes in about the time in which it reads the weights.
const GATHER_ROWS: usize = 256;
/// How long the worker waits for constraints alone before it looks for requests.
const LOOK: Duration = Duration::from_millis(20);
/// Steps that a request waits behind others of higher priority.
const PATIENCE: u64 = 200;

/// A request in the worker's hands.
struct Job {
    outlet: Arc<Outlet>,
    options: GenerateOptions,
    arrived: Instant,
    deadline: Option<Instant>,
    metrics: Metrics,
    /// When its last token was chosen.
    last: Instant,
    /// Its place on the device, from its first step on.
    slot: Option<Slot>,
    adapter: Option<Adapter>,
    /// Tokens that are being chosen.
    awaited: usize,
    /// Tokens that its constraint put in front of the first that is chosen, with which they are
    /// told.
    ahead: Vec<u32>,
}

/// A step that was submitted and not yet waited for.
struct Flight {
    ticket: Ticket,
    submitted: Instant,
    kind: StepKind,
    works: Vec<Work>,
    /// The requests that choose, in the step's order, with the positions from which they do.
    choosing: Vec<(Id, usize)>,
}

/// How a step was submitted.
struct Submitted {
    ticket: Ticket,
    at: Instant,
    /// Whether its choices are still to be submitted.
    deferred: bool,
    /// Whether it was submitted before the tokens of the step before it are known to its
    /// constraints.
    leading: bool,
}

impl Job {
    fn is_cancelled(&self) -> bool {
        self.outlet.cancelled.load(Ordering::Relaxed) || self.options.cancel.is_cancelled()
    }

    /// Gives its place on the device and its adapter back, then tells of its end: who hears of it
    /// may take the place, or the adapter's seat, at once.
    fn end(self, event: Event) {
        let Job { outlet, metrics, slot, adapter, .. } = self;
        drop((slot, adapter));
        outlet.tell(event, &metrics);
    }
}

/// A token that was chosen, and the likeliest ones in its place with their log-probabilities, as
/// many as were asked for.
struct Chosen {
    choice: Choice,
    likeliest: Vec<(u32, f32)>,
}

/// Whether a request's text ends with this token.
fn is_end(shared: &Shared, job: &Job, token: u32) -> bool {
    !job.options.ignore_end && shared.ends.contains(&token)
}

/// The work of a step, and the requests that choose a token in it, each with the position of its
/// last row.
type Parts = (Vec<Work>, Vec<(Id, usize)>);

struct Worker {
    /// The executor's: see [`Shared::executor_of`].
    epoch: u64,
    /// Whether the device computes while the host does something else.
    ahead: bool,
    /// Whether steps are submitted apart from their choices, where constraints take part.
    defers: bool,
    scheduler: Scheduler,
    sequences: Sequences,
    jobs: HashMap<Id, Job>,
    /// The constraints of requests that have one. They are apart from `jobs`, which the threads
    /// that compute look at.
    constraints: HashMap<Id, Constrained>,
    followers: Followers<Chosen>,
    followed: Vec<Followed<Chosen>>,
    pace: Pace,
    /// The requests of a step that was submitted without its choices, in its order.
    placed: Vec<Id>,
    next: Id,
    start: Instant,
    plan: Plan,
    /// The parts of a step, kept so that no step allocates.
    memory: Memory,
    /// Steps under way, in their order, and memory for others.
    flights: VecDeque<Flight>,
    spare: Vec<Parts>,
    /// The choices of the latest step.
    chosen: Vec<(Id, Result<Chosen>)>,
    cancelled: Vec<Id>,
    chunk: usize,
    /// Seconds that a row of a prompt took lately.
    row_seconds: f64,
    /// Seconds that a decode step took lately.
    step_seconds: f64,
    /// When it was last known that a step was done; rows of prompts since, and when the first of
    /// them were submitted.
    last_done: Instant,
    rows_since: usize,
    rows_from: Option<Instant>,
}

impl Worker {
    fn new(shared: &Shared) -> Worker {
        let (context, chunk) = (shared.info.context, shared.options.chunk());
        let groups: Vec<_> =
            shared.groups.iter().map(|&group| shared.options.span(group, context)).collect();
        let sequences = shared.options.sessions.clamp(1, chunk);
        // A state that has gone on does not come back, where a row is to be computed again.
        let stays = shared.groups.iter().all(|group| !group.carried);
        let (epoch, pool, prefixes) =
            (shared.epoch(), shared.pool.clone(), shared.prefixes.clone());
        let limits = Limits {
            sequences,
            decode_rows: (sequences + CATCH_UP).min(chunk),
            prompt_rows: chunk,
            shared_rows: chunk,
            patience: PATIENCE,
            gather: 0,
            gather_rows: GATHER_ROWS,
        };
        let (ahead, defers) = {
            let executor = shared.executor();
            (executor.ahead() > 0, stays && executor.defers())
        };
        Worker {
            epoch,
            ahead,
            defers,
            scheduler: Scheduler::new(limits),
            sequences: Sequences::new(pool, prefixes, epoch, &groups, chunk),
            jobs: HashMap::new(),
            constraints: HashMap::new(),
            followers: Followers::new(),
            followed: Vec::new(),
            pace: Pace::default(),
            placed: Vec::with_capacity(sequences),
            next: 0,
            start: Instant::now(),
            plan: Plan::default(),
            memory: Memory::default(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            chosen: Vec::with_capacity(sequences),
            cancelled: Vec::new(),
            chunk,
            row_seconds: 0.0,
            step_seconds: 0.0,
            last_done: Instant::now(),
            rows_since: 0,
            rows_from: None,
        }
    }

    /// Computes until there is nothing left to do.
    fn serve(&mut self, shared: &Shared, inbox: &Inbox) {
        loop {
            self.receive(shared, inbox);
            if self.jobs.is_empty() {
                // Nobody is left who wants to know.
                self.flights.clear();
                self.pace.pause();
                return;
            }
            self.give_up_cancelled();
            self.step(shared);
            if self.is_stale(shared) {
                return;
            }
        }
    }

    /// Whether its device was lost.
    fn is_stale(&self, shared: &Shared) -> bool {
        shared.is_lost() || self.epoch != shared.epoch()
    }

    fn receive(&mut self, shared: &Shared, inbox: &Inbox) {
        for Delivery { request, prompt, constraint, outlet } in inbox.take() {
            let (id, now) = (self.next, Instant::now());
            self.next += 1;
            let Request { options, caller, priority, deadline, exact_prefix, adapter, .. } =
                request;
            let at = deadline.map(|at| at.saturating_duration_since(self.start).as_millis() as u64);
            let prompt_tokens = prompt.len();
            let room = shared.room(prompt_tokens).min(options.max_tokens.unwrap_or(usize::MAX));
            let own = adapters::number(adapter.as_ref());
            let mut sequence = Sequence::new(own, prompt, room, exact_prefix);
            let mut constraint = constraint;
            let forced = constraint.as_mut().into_iter().flat_map(Constrained::take_forced);
            let ahead: Vec<u32> = forced.inspect(|token| sequence.push(*token)).collect();
            self.sequences.insert(id, sequence);
            self.scheduler.submit(Arrival { id, caller, priority, deadline: at });
            let metrics = Metrics { prompt_tokens, ..Metrics::default() };
            let job = Job {
                outlet,
                options,
                arrived: now,
                deadline,
                metrics,
                last: now,
                slot: None,
                adapter,
                awaited: 0,
                ahead,
            };
            self.constraints.extend(constraint.map(|constraint| (id, constraint)));
            let nothing = job.options.max_tokens == Some(0);
            self.jobs.insert(id, job);
            if nothing {
                self.end(id, Event::End(Finish::Length));
            }
        }
    }

    fn give_up_cancelled(&mut self) {
        let mut cancelled = std::mem::take(&mut self.cancelled);
        cancelled.extend(self.jobs.iter().filter(|(_, job)| job.is_cancelled()).map(|(id, _)| *id));
        for id in cancelled.drain(..) {
            self.end(id, Event::End(Finish::Cancelled));
        }
        self.cancelled = cancelled;
    }

    /// Ends a request.
    fn end(&mut self, id: Id, event: Event) {
        self.scheduler.remove(id, &mut self.sequences);
        self.sequences.remove(id);
        self.constraints.remove(&id);
        if let Some(job) = self.jobs.remove(&id) {
            job.end(event);
        }
    }

    fn fail_all(&mut self, error: &Error) {
        self.flights.clear();
        self.jobs.drain().for_each(|(_, job)| job.end(Event::Failed(error.clone())));
    }

    /// Decides on a step, and computes it.
    fn step(&mut self, shared: &Shared) {
        if self.row_seconds > 0.0 {
            let rows = (GAP.as_secs_f64() / self.row_seconds) as usize;
            self.scheduler.share(rows.clamp(LEAST_ROWS.min(self.chunk), self.chunk));
        }
        if self.ahead && self.step_seconds > 0.0 {
            let steps = (GATHER.as_secs_f64() / self.step_seconds) as u64;
            self.scheduler.gather(steps.min(GATHER_STEPS));
        }
        let now = self.start.elapsed().as_millis() as u64;
        self.recall_forgotten(shared);
        self.take_followed(shared);
        if !self.leads() {
            self.gather(shared);
        }
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.next(now, &mut self.sequences);
        self.scheduler.swap(&mut plan);
        for id in &plan.preempted {
            let job = self.jobs.get_mut(id);
            job.into_iter().for_each(|job| job.metrics.preemptions += 1);
        }
        for id in plan.expired.drain(..) {
            let late = self.jobs.get(&id).and_then(|job| job.deadline).map(|at| at.elapsed());
            let found = format!("none, {:.1} s after it", late.unwrap_or_default().as_secs_f64());
            let error = Error::new("request", "an answer before its deadline", found);
            self.forget(id, error.of(ErrorKind::Busy));
        }
        for id in plan.refused.drain(..) {
            let error = Error::new("cache", "blocks for a request", "all of them in use");
            let error = error.of(ErrorKind::Busy);
            self.forget(id, error.hint("end other sessions, or load the model for more of them"));
        }
        self.await_followed(shared, &plan);
        let ahead = self.ahead;
        let mut own = 0;
        for (works, kind) in [(&plan.decode, StepKind::Decode), (&plan.prompt, StepKind::Prompt)] {
            own += usize::from(self.compute(shared, works, kind));
            // The device computes this step while requests are told what the one before it chose.
            let keep = if ahead { own } else { 0 };
            while (kind == StepKind::Prompt || !ahead) && self.flights.len() > keep {
                self.settle(shared);
            }
        }
        self.plan = plan;
    }

    /// Whether steps are submitted before the tokens of the step before them are known to
    /// constraints.
    fn leads(&self) -> bool {
        self.defers && self.ahead && self.pace.leads()
    }

    /// Waits for the steps under way that choose for requests with constraints. Where such a request
    /// is in no step before its token is known, those that waited for different steps would never
    /// share one again, and each half would have all weights read for itself.
    fn gather(&mut self, shared: &Shared) {
        let Worker { flights, constraints, .. } = &*self;
        let led = |(id, _): &(Id, usize)| constraints.get(id).is_some_and(|c| c.wary == 0);
        let last = flights.iter().rposition(|flight| flight.choosing.iter().any(led));
        (0..last.map_or(0, |last| last + 1)).for_each(|_| self.settle(shared));
    }

    /// Fails a request that the scheduler has given up.
    fn forget(&mut self, id: Id, error: Error) {
        self.sequences.remove(id);
        self.constraints.remove(&id);
        if let Some(job) = self.jobs.remove(&id) {
            job.end(Event::Failed(error));
        }
    }

    /// Submits a step; whether it is under way. If it fails, so do all requests in it.
    fn compute(&mut self, shared: &Shared, works: &[Work], kind: StepKind) -> bool {
        if works.is_empty() {
            return false;
        }
        let mut step = self.attempt(shared, works, |own| own.replay(shared, works, kind)).flatten();
        if let Some(Submitted { ticket, deferred: true, leading, .. }) = step {
            while leading && !self.flights.is_empty() {
                self.settle(shared);
            }
            let choose = |own: &mut Worker| {
                let began = Instant::now();
                own.look(works);
                own.pace.beside(began.elapsed());
                own.choose(shared, ticket)
            };
            step = self.attempt(shared, works, choose).and(step);
        }
        let submitted = step.is_some();
        if let Some(step) = step {
            self.submitted(shared, works, kind, step);
        }
        self.take_chosen(shared);
        submitted
    }

    /// Does something for a step. If it fails, so do all requests in it.
    fn attempt<T>(
        &mut self,
        shared: &Shared,
        works: &[Work],
        f: impl FnOnce(&mut Worker) -> Result<T>,
    ) -> Option<T> {
        let done = caught(|| f(self)).unwrap_or_else(|words| {
            let error = Error::new("step", "its results", format!("a panic: {words}"));
            Err(error.of(ErrorKind::Internal))
        });
        done.inspect_err(|error| {
            shared.failed();
            works.iter().for_each(|work| self.spoil(work.id, error.clone()));
        })
        .ok()
    }

    /// Waits for the earliest step under way, and takes what it chose. If it fails, so do all
    /// requests in it.
    fn settle(&mut self, shared: &Shared) {
        self.recall_forgotten(shared);
        let Some(mut flight) = self.flights.pop_front() else { return };
        if let Err(error) = self.wait(shared, &flight) {
            shared.failed();
            self.chosen.clear();
            for work in &flight.works {
                self.spoil(work.id, error.clone());
            }
        }
        if flight.kind == StepKind::Prompt {
            self.rows_since += flight.works.iter().map(|work| work.rows).sum::<usize>();
            self.rows_from.get_or_insert(flight.submitted);
        }
        // A device that runs ahead is waited for where something is chosen alone.
        if !flight.choosing.is_empty() || !self.ahead {
            self.measure(flight.submitted);
        }
        flight.works.clear();
        flight.choosing.clear();
        self.spare.push((flight.works, flight.choosing));
        self.take_chosen(shared);
    }

    /// Notes how long the rows of prompts took that are known to be done now, or the decode step
    /// submitted at `submitted` if there were none.
    fn measure(&mut self, submitted: Instant) {
        let now = Instant::now();
        let rows = std::mem::take(&mut self.rows_since);
        let from = self.rows_from.take();
        let seconds = (now - self.last_done.max(from.unwrap_or(submitted))).as_secs_f64();
        let (lately, seconds) = match from {
            Some(_) => (&mut self.row_seconds, seconds / rows.max(1) as f64),
            None => (&mut self.step_seconds, seconds),
        };
        let weight = if *lately > 0.0 { 0.3 } else { 1.0 };
        *lately += weight * (seconds - *lately);
        self.last_done = now;
    }

    /// Has computed again what the device has forgotten of the steps under way, since somebody
    /// else's work failed.
    fn recall_forgotten(&mut self, shared: &Shared) {
        // Work on an executor that was replaced fails as a whole.
        let Ok(executor) = shared.executor_of(self.epoch) else { return };
        let Worker { flights, jobs, sequences, .. } = self;
        flights.retain(|flight| {
            let kept = flight.choosing.is_empty() || executor.keeps(flight.ticket);
            for (id, _) in flight.choosing.iter().filter(|_| !kept) {
                if let (Some(job), Some(sequence)) = (jobs.get_mut(id), sequences.get_mut(*id)) {
                    job.awaited = job.awaited.saturating_sub(1);
                    sequence.recall();
                }
            }
            kept
        });
    }

    /// Waits for what a step chose.
    fn wait(&mut self, shared: &Shared, flight: &Flight) -> Result<()> {
        for (id, _) in &flight.choosing {
            if let Some(job) = self.jobs.get_mut(id) {
                job.awaited = job.awaited.saturating_sub(1);
            }
        }
        if flight.choosing.is_empty() {
            return Ok(());
        }
        let mut executor = shared.executor_of(self.epoch)?;
        let began = Instant::now();
        let outcome = executor.wait(flight.ticket)?;
        self.pace.beside(began.elapsed());
        for (i, &(id, position)) in flight.choosing.iter().enumerate() {
            let likeliest = outcome.likeliest(i).iter();
            let likeliest = likeliest.map(|found| (found.token, found.logprob)).collect();
            let choice = outcome.choice(i).map(|choice| Chosen { choice, likeliest });
            self.chosen.push((id, choice.map_err(|refusal| refused(refusal, position))));
        }
        Ok(())
    }

    /// Fails a request whose cache may hold what nobody should reuse.
    fn spoil(&mut self, id: Id, error: Error) {
        if let Some(sequence) = self.sequences.get_mut(id) {
            sequence.spoil();
        }
        self.end(id, Event::Failed(error));
    }

    /// Tells a request its token, and ends it if that was the last: the one that was chosen, or
    /// that its constraint `accepted`, with whether that is there to bring the text to its end.
    fn take(&mut self, shared: &Shared, id: Id, chosen: Chosen, accepted: Option<(u32, bool)>) {
        let (Some(job), Some(sequence)) = (self.jobs.get_mut(&id), self.sequences.get_mut(id))
        else {
            return;
        };
        let Chosen { choice, likeliest } = chosen;
        let (token, closing) = accepted.unwrap_or((choice.token, false));
        let ended = is_end(shared, job, token);
        let logprob = constraint::logprob(token, &choice, &likeliest);
        let logprob = logprob.filter(|_| job.options.logprobs);
        let limit = job.options.max_tokens.unwrap_or(usize::MAX);
        let metrics = &mut job.metrics;
        let first = metrics.generated_tokens == 0;
        let now = Instant::now();
        let time = if first { &mut metrics.prefill } else { &mut metrics.decode };
        *time += now - std::mem::replace(&mut job.last, now);
        for id in job.ahead.drain(..) {
            metrics.generated_tokens += 1;
            job.outlet.tell(Event::forced(id), metrics);
        }
        metrics.generated_tokens += 1;
        metrics.closing_tokens += usize::from(closing);
        metrics.recomputed_tokens = sequence.recomputed();
        if token != choice.token {
            // The next row may be under way with the one that was chosen.
            sequence.withdraw();
        }
        sequence.push(token);
        let full = !shared.options.rotate && sequence.known() > shared.info.context;
        let last = if ended {
            Some(Finish::End(token))
        } else if metrics.generated_tokens >= limit {
            Some(Finish::Length)
        } else {
            full.then_some(Finish::ContextFull)
        };
        let ends = last.is_some();
        let event = Event::Token { id: token, logprob, likeliest, last };
        if ends {
            return self.end(id, event);
        }
        job.outlet.tell(event, metrics);
        if first {
            // Others may begin with the same prompt.
            self.sequences.keep(id);
        }
    }

    /// Tells a request the tokens that its constraint put behind the last, of which there is room
    /// for one more: they are computed together with it.
    fn put(&mut self, id: Id, forced: &[u32]) {
        let (Some(job), Some(sequence)) = (self.jobs.get_mut(&id), self.sequences.get_mut(id))
        else {
            return;
        };
        for &token in forced {
            job.metrics.generated_tokens += 1;
            sequence.push(token);
            job.outlet.tell(Event::forced(token), &job.metrics);
        }
    }
}
