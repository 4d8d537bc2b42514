//! The worker: one thread that computes all requests, a step of the [scheduler](crate::schedule) at a time.
//!
//! It starts with the first request and ends with its engine. A panic while a token is chosen ends the request that it belongs
//! to; a step that fails, or panics, ends all requests that are in it.

use crate::generate::{Finish, GenerateOptions, Metrics, no_number, nothing_possible};
use crate::load::Shared;
use crate::request::{Event, Outlet, Request};
use crate::schedule::{Arrival, Id, Limits, Plan, Scheduler, Work};
use crate::sequences::{Sequence, Sequences};
use crate::session::{GROUPS, tables};
use crate::slots::Slot;
use device::Watch;
use formats::{Error, ErrorKind, Result, caught};
use ops::sample::{Sampler, broken};
use program::{Kind, Step};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a prompt's step beside decoding requests shall take: it is what their next tokens wait.
const GAP: Duration = Duration::from_millis(100);
/// Rows of a prompt's step that are taken however long they last.
const LEAST_ROWS: usize = 32;
/// Rows of a sequence that recomputes its generated tokens, in one step.
const CATCH_UP: usize = 8;
/// Steps that a request waits behind others of higher priority.
const PATIENCE: u64 = 200;

/// A request on its way to the worker.
struct Delivery {
    request: Request,
    prompt: Vec<u32>,
    outlet: Arc<Outlet>,
}

#[derive(Default)]
struct Waiting {
    deliveries: Vec<Delivery>,
    closed: bool,
}

/// Where requests wait for the worker to look.
#[derive(Default)]
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Inbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a request over.
    pub(crate) fn send(&self, request: Request, prompt: Vec<u32>, outlet: Arc<Outlet>) {
        let mut waiting = self.waiting();
        if waiting.closed {
            let error = Error::new("worker", "a thread that computes", "none");
            let error = error.of(ErrorKind::Internal);
            return outlet.tell(Event::Failed(error), &Metrics::default());
        }
        waiting.deliveries.push(Delivery { request, prompt, outlet });
        self.changed.notify_one();
    }

    /// Ends the worker once it has nothing to do.
    pub(crate) fn close(&self) {
        self.waiting().closed = true;
        self.changed.notify_one();
    }

    /// Waits for a request; false if there will be none.
    fn wait(&self) -> bool {
        let mut waiting = self.waiting();
        while waiting.deliveries.is_empty() && !waiting.closed {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        !waiting.closed
    }
}

/// Starts the worker of an engine, and returns where it looks for requests.
pub(crate) fn start(shared: &Arc<Shared>) -> Arc<Inbox> {
    let inbox = Arc::new(Inbox::default());
    let (own, engine) = (inbox.clone(), Arc::downgrade(shared));
    let thread = std::thread::Builder::new().name("delft-worker".to_owned());
    if thread.spawn(move || run(&own, &engine)).is_err() {
        inbox.close();
    }
    inbox
}

fn run(inbox: &Inbox, engine: &Weak<Shared>) {
    let mut worker = None;
    while inbox.wait() {
        // Requests hold their engine: if it is gone, so are they.
        let Some(shared) = engine.upgrade() else { return };
        let own = worker.get_or_insert_with(|| Worker::new(&shared));
        if let Err(words) = caught(|| own.serve(&shared, inbox)) {
            // Nothing of its own can be trusted any more.
            shared.prefixes.tree().clear();
            let error = Error::new("worker", "an answer", format!("a panic: {words}"));
            own.fail_all(&error.of(ErrorKind::Internal));
            worker = None;
        }
    }
}

/// A request in the worker's hands.
struct Job {
    outlet: Arc<Outlet>,
    options: GenerateOptions,
    arrived: Instant,
    deadline: Option<Instant>,
    metrics: Metrics,
    /// When its last token was chosen.
    last: Instant,
}

impl Job {
    fn is_cancelled(&self) -> bool {
        self.outlet.cancelled.load(Ordering::Relaxed) || self.options.cancel.is_cancelled()
    }

    fn fail(&self, error: Error) {
        self.outlet.tell(Event::Failed(error), &self.metrics);
    }
}

struct Worker {
    scheduler: Scheduler,
    sequences: Sequences,
    jobs: HashMap<Id, Job>,
    next: Id,
    start: Instant,
    plan: Plan,
    sampler: Sampler,
    /// Its place on the device, unless sessions have all of them.
    slot: Option<Slot>,
    cancelled: Vec<Id>,
    chunk: usize,
    /// Seconds that a row of a prompt took lately.
    row_seconds: f64,
}

impl Worker {
    fn new(shared: &Shared) -> Worker {
        let (context, chunk) = (shared.info.context, shared.options.chunk());
        let groups: Vec<_> =
            shared.groups.iter().map(|&window| shared.options.span(window, context)).collect();
        let sequences = shared.options.sessions.max(1);
        let limits = Limits {
            sequences,
            decode_rows: sequences + CATCH_UP,
            prompt_rows: chunk,
            shared_rows: chunk,
            patience: PATIENCE,
        };
        Worker {
            scheduler: Scheduler::new(limits),
            sequences: Sequences::new(
                shared.pool.clone(),
                shared.prefixes.clone(),
                &groups,
                chunk,
                false,
            ),
            jobs: HashMap::new(),
            next: 0,
            start: Instant::now(),
            plan: Plan::default(),
            sampler: Sampler::new(),
            slot: shared.slots.take().ok(),
            cancelled: Vec::new(),
            chunk,
            row_seconds: 0.0,
        }
    }

    /// Computes until there is nothing left to do.
    fn serve(&mut self, shared: &Shared, inbox: &Inbox) {
        loop {
            self.receive(shared, inbox);
            if self.jobs.is_empty() {
                return;
            }
            self.give_up_cancelled();
            self.step(shared);
        }
    }

    fn receive(&mut self, shared: &Shared, inbox: &Inbox) {
        let deliveries = std::mem::take(&mut inbox.waiting().deliveries);
        for Delivery { request, prompt, outlet } in deliveries {
            let (id, now) = (self.next, Instant::now());
            self.next += 1;
            let Request { options, caller, priority, deadline, exact_prefix, .. } = request;
            let at = deadline.map(|at| at.saturating_duration_since(self.start).as_millis() as u64);
            let prompt_tokens = prompt.len();
            let room = shared.room(prompt_tokens).min(options.max_tokens.unwrap_or(usize::MAX));
            let sequence = Sequence::new(0, prompt, room, exact_prefix);
            self.sequences.insert(id, sequence);
            self.scheduler.submit(Arrival { id, caller, priority, deadline: at });
            let metrics = Metrics { prompt_tokens, ..Metrics::default() };
            let job = Job { outlet, options, arrived: now, deadline, metrics, last: now };
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
        if let Some(job) = self.jobs.remove(&id) {
            job.outlet.tell(event, &job.metrics);
        }
    }

    fn fail_all(&mut self, error: &Error) {
        self.jobs.drain().for_each(|(_, job)| job.fail(error.clone()));
    }

    /// Decides on a step, and computes it.
    fn step(&mut self, shared: &Shared) {
        if self.row_seconds > 0.0 {
            let rows = (GAP.as_secs_f64() / self.row_seconds) as usize;
            self.scheduler.share(rows.clamp(LEAST_ROWS.min(self.chunk), self.chunk));
        }
        let now = self.start.elapsed().as_millis() as u64;
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.next(now, &mut self.sequences);
        self.scheduler.swap(&mut plan);
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
        for work in plan.decode.drain(..) {
            self.compute(shared, work, false);
        }
        let (mut rows, start) = (0, Instant::now());
        for work in plan.prompt.drain(..) {
            rows += work.rows;
            self.compute(shared, work, true);
        }
        if rows > 0 {
            let seconds = start.elapsed().as_secs_f64() / rows as f64;
            let weight = if self.row_seconds > 0.0 { 0.3 } else { 1.0 };
            self.row_seconds += weight * (seconds - self.row_seconds);
        }
        self.plan = plan;
    }

    /// Fails a request that the scheduler has given up.
    fn forget(&mut self, id: Id, error: Error) {
        self.sequences.remove(id);
        if let Some(job) = self.jobs.remove(&id) {
            job.fail(error);
        }
    }

    /// Computes a request's rows, and chooses its next token if they were the last that it has.
    fn compute(&mut self, shared: &Shared, work: Work, is_prompt: bool) {
        let Work { id, .. } = work;
        let done = match caught(|| self.replay(shared, work, is_prompt)) {
            Ok(done) => done,
            Err(words) => {
                let error = Error::new("step", "its results", format!("a panic: {words}"));
                Err(error.of(ErrorKind::Internal))
            }
        };
        match done {
            Ok(None) => {}
            Ok(Some((token, logprob))) => self.take(shared, id, token, logprob),
            Err(error) => {
                if let Some(sequence) = self.sequences.get_mut(id) {
                    sequence.spoil();
                }
                self.end(id, Event::Failed(error));
            }
        }
    }

    fn replay(
        &mut self,
        shared: &Shared,
        work: Work,
        is_prompt: bool,
    ) -> Result<Option<(u32, Option<f32>)>> {
        let Work { id, rows } = work;
        let (Some(sequence), Some(job)) = (self.sequences.get(id), self.jobs.get_mut(&id)) else {
            return Ok(None);
        };
        let end = sequence.computed();
        let start = end - rows;
        let tokens = sequence.tokens();
        if let Some((reused, missed)) =
            sequence.reused().filter(|_| job.metrics.computed_tokens == 0)
        {
            job.metrics.reused_tokens = reused;
            job.outlet.found(&job.metrics, missed);
        }
        let last = [rows as u32 - 1];
        let (tables, groups) = (tables(sequence.tables()), sequence.tables().len());
        let tables = &tables[..groups.min(GROUPS)];
        let slot = self.slot.as_ref().map_or(0, |slot| slot.number);
        let sequence = program::Sequence { slot, ..program::Sequence::new(rows, start, tables) };
        let step = Step {
            kind: if is_prompt { Kind::Prompt } else { Kind::Decode },
            tokens: &tokens[start..end],
            sequences: &[sequence],
            outputs: if end == tokens.len() { &last } else { &[] },
            input: &[],
        };
        let (prompt, reused) = (job.metrics.prompt_tokens, job.metrics.reused_tokens);
        let stop = AtomicBool::new(false);
        let progress = job.options.progress.as_ref().filter(|_| is_prompt && end <= prompt);
        // The caller's own code: a panic of it must not reach the threads that compute.
        let panicked = OnceLock::new();
        let tell = |done: usize| {
            let Some(progress) = progress else { return };
            if let Err(words) = caught(|| progress.tell(done, prompt - reused)) {
                let _ = panicked.set(words);
            }
        };
        let watch = |part: f64| {
            tell(start.saturating_sub(reused) + (rows as f64 * part) as usize);
            if job.is_cancelled() || panicked.get().is_some() {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let mut executor = shared.executor();
        let watch = Watch { stop: &stop, progress: &watch };
        let ticket = executor.submit_watched(&step, &watch)?;
        if ticket.is_some() {
            tell(end.saturating_sub(reused));
        }
        if let Some(words) = panicked.get() {
            return Err(Error::new("progress", "no panic", words).of(ErrorKind::Internal));
        }
        let Some(ticket) = ticket else { return Ok(None) };
        if is_prompt && end <= prompt {
            job.metrics.computed_tokens = end.saturating_sub(reused);
            job.metrics.computing = job.arrived.elapsed();
        }
        if end < tokens.len() {
            self.sequences.submitted(id);
            return Ok(None);
        }
        let logits = &executor.read(ticket, 0)?[..shared.config.vocab];
        if let Some((_, value)) = broken(logits) {
            return Err(no_number(end - 1, value));
        }
        let (position, sampling) = (end as u64, &job.options.sampling);
        let chosen = if job.options.logprobs {
            let choice = self.sampler.sample(logits, tokens, position, sampling, None);
            choice.map(|choice| (choice.token, Some(choice.logprob)))
        } else {
            let token = self.sampler.token(logits, tokens, position, sampling, None);
            token.map(|token| (token, None))
        };
        self.sequences.submitted(id);
        chosen.ok_or_else(nothing_possible).map(Some)
    }

    /// Tells a request its token, and ends it if that was the last.
    fn take(&mut self, shared: &Shared, id: Id, token: u32, logprob: Option<f32>) {
        let (Some(job), Some(sequence)) = (self.jobs.get_mut(&id), self.sequences.get_mut(id))
        else {
            return;
        };
        let limit = job.options.max_tokens.unwrap_or(usize::MAX);
        let metrics = &mut job.metrics;
        let first = metrics.generated_tokens == 0;
        let now = Instant::now();
        let time = if first { &mut metrics.prefill } else { &mut metrics.decode };
        *time += now - std::mem::replace(&mut job.last, now);
        metrics.generated_tokens += 1;
        sequence.push(token);
        let full = !shared.options.rotate && sequence.tokens().len() > shared.info.context;
        let last = if !job.options.ignore_end && shared.ends.contains(&token) {
            Some(Finish::End(token))
        } else if metrics.generated_tokens >= limit {
            Some(Finish::Length)
        } else {
            full.then_some(Finish::ContextFull)
        };
        let ends = last.is_some();
        let event = Event::Token { id: token, logprob, last };
        if ends {
            return self.end(id, event);
        }
        job.outlet.tell(event, metrics);
        if first {
            // Others may begin with the same prompt.
            self.sequences.keep(id);
        }
    }
}
