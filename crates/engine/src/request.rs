//! Requests to the worker, and the handles on their answers: many are computed together, each gets
//! the tokens it would get alone.

use crate::adapters::Adapter;
use crate::constraint::Constrained;
use crate::events::Capability;
use crate::generate::{Finish, GenerateOptions, Metrics, Token};
use crate::load::{Engine, Shared};
use crate::parts::Inside;
use crate::prefix::Miss;
use crate::prompt::Prompt;
use crate::text::Text;
use crate::{peak_rss_bytes, worker};
use formats::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// A request to generate; see [`Engine::submit`].
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt that the model continues.
    pub prompt: Prompt,
    /// How. Its progress is told on the worker's thread.
    pub options: GenerateOptions,
    /// For whom: callers share the device evenly. Requests that say nothing are one caller's.
    pub caller: u64,
    /// Higher ones go first.
    pub priority: i32,
    /// When the answer is of no more use: the request then ends with an error, waiting or not.
    pub deadline: Option<Instant>,
    /// Reuses only what a prompt computed. Else what was generated in an earlier turn of a
    /// conversation is reused as it is, which may differ from a prompt's computation in the last
    /// bits.
    pub exact_prefix: bool,
    /// The adapter of the engine that computes it; `None`: the model as it is.
    pub adapter: Option<Adapter>,
}

impl Request {
    /// A request for a prompt's continuation.
    pub fn new(prompt: impl Into<Prompt>, options: GenerateOptions) -> Request {
        Request {
            prompt: prompt.into(),
            options,
            caller: 0,
            priority: 0,
            deadline: None,
            exact_prefix: false,
            adapter: None,
        }
    }
}

/// A message of the worker to a request's handle.
pub(crate) enum Event {
    /// A token; with why it is the last, if it is.
    Token { id: u32, logprob: Option<f32>, likeliest: Vec<(u32, f32)>, last: Option<Finish> },
    /// There are no more tokens.
    End(Finish),
    /// It failed.
    Failed(Error),
}

impl Event {
    /// A token that a constraint put there.
    pub(crate) fn forced(id: u32) -> Event {
        Event::Token { id, logprob: None, likeliest: Vec::new(), last: None }
    }
}

#[derive(Default)]
struct Told {
    events: VecDeque<Event>,
    waker: Option<Waker>,
    metrics: Metrics,
    missed: Option<Miss>,
    /// Until it has ended.
    inside: Option<Inside>,
}

/// Between the worker and a handle.
#[derive(Default)]
pub(crate) struct Outlet {
    told: Mutex<Told>,
    ready: Condvar,
    /// Set by the handle, to end the request.
    pub(crate) cancelled: AtomicBool,
}

impl Outlet {
    /// With room for as many events, of a request that is in its part.
    fn new(events: usize, inside: Inside) -> Outlet {
        let (events, inside) = (VecDeque::with_capacity(events), Some(inside));
        let told = Told { events, inside, ..Told::default() };
        Outlet { told: Mutex::new(told), ..Outlet::default() }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        // No change of it is left half-done by a panic.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the handle an event, and how far the request is.
    pub(crate) fn tell(&self, event: Event, metrics: &Metrics) {
        let goes_on = matches!(event, Event::Token { last: None, .. });
        let mut told = self.told();
        told.events.push_back(event);
        told.metrics = *metrics;
        let waker = told.waker.take();
        let left = if goes_on { None } else { told.inside.take() };
        drop(told);
        drop(left);
        self.ready.notify_one();
        waker.into_iter().for_each(Waker::wake);
    }

    /// Notes how much of the prompt was found in the cache, and why no more.
    pub(crate) fn found(&self, metrics: &Metrics, missed: Option<Miss>) {
        let mut told = self.told();
        (told.metrics, told.missed) = (*metrics, missed);
    }
}

/// A running request: an iterator of its tokens, which may also be polled. Dropping it cancels the
/// request, which gives up its place within a step.
pub struct Generating {
    outlet: Arc<Outlet>,
    /// Keeps the engine.
    _shared: Arc<Shared>,
    text: Text,
    /// Tokens that the caller was given.
    given: usize,
    finish: Option<Finish>,
}

impl Engine {
    /// Has a request computed by the engine's worker, a thread of its own, together with all
    /// others.
    ///
    /// # Errors
    /// A prompt that cannot be encoded, is empty or does not fit the context, and options that make
    /// no sense, a constraint that cannot be followed among them.
    pub fn submit(&self, request: Request) -> Result<Generating> {
        let shared = &self.part(Capability::Generate);
        let prompt = self.encode(&request.prompt)?;
        let Request { options, .. } = &request;
        shared.check_start(&prompt, &options.sampling)?;
        shared.seats.check(request.adapter.as_ref())?;
        shared.check(&prompt, 0)?;
        // What may come first is found while others are computed.
        let room = shared.room(prompt.len()) + 1;
        let constraint = Constrained::start(options, shared.config.vocab, room)?;
        // More make room when they come.
        const EVENTS: usize = 256;
        let events = request.options.max_tokens.map_or(EVENTS, |n| n.min(EVENTS));
        let outlet = Arc::new(Outlet::new(events, shared.enter()?));
        let text = Text::new(shared, &request.options);
        let inbox = shared.worker.get_or_init(|| worker::start(shared));
        inbox.send(request, prompt, constraint, outlet.clone());
        Ok(Generating { outlet, _shared: shared.clone(), text, given: 0, finish: None })
    }
}

/// The outcome of one of several requests; see [`Engine::batch_generate`].
#[derive(Debug, Clone)]
pub struct Generated {
    /// The tokens, the model's end token included; where it failed, those before.
    pub tokens: Vec<Token>,
    /// Why it ended.
    pub finish: Finish,
    /// Its time and tokens.
    pub metrics: Metrics,
    /// Why it failed; the others go on.
    pub error: Option<Error>,
}

impl Generated {
    /// Its text.
    pub fn text(&self) -> String {
        self.tokens.iter().map(|token| token.text.as_str()).collect()
    }

    fn of(submitted: Result<Generating>) -> Generated {
        let (mut tokens, mut error) = (Vec::new(), None);
        let (finish, metrics) = match submitted {
            Ok(mut generating) => {
                for token in generating.by_ref() {
                    match token {
                        Ok(token) => tokens.push(token),
                        Err(why) => error = Some(why),
                    }
                }
                (generating.finish().cloned(), generating.metrics())
            }
            Err(why) => {
                error = Some(why);
                (None, Metrics::default())
            }
        };
        Generated { tokens, finish: finish.unwrap_or(Finish::Failed), metrics, error }
    }
}

impl Engine {
    /// Generates behind several prompts, which are computed together, and waits for all of them:
    /// their outcomes in the same order. A prompt that fails has its error among them.
    pub fn batch_generate(&self, requests: impl IntoIterator<Item = Request>) -> Vec<Generated> {
        let submitted: Vec<_> = requests.into_iter().map(|request| self.submit(request)).collect();
        submitted.into_iter().map(Generated::of).collect()
    }
}

impl Generating {
    /// Why it ended; none while it runs.
    pub fn finish(&self) -> Option<&Finish> {
        self.finish.as_ref()
    }

    /// Counts and times so far.
    pub fn metrics(&self) -> Metrics {
        let mut metrics =
            Metrics { peak_rss_bytes: peak_rss_bytes(), ..self.outlet.told().metrics };
        // The worker goes on until it hears of the stop string.
        if matches!(self.finish, Some(Finish::StopString(_))) {
            metrics.generated_tokens = self.given;
        }
        metrics
    }

    /// Why no more of the prompt was found in the cache; none if all of it was, or it is not known
    /// yet.
    pub fn missed(&self) -> Option<Miss> {
        self.outlet.told().missed
    }

    /// Ends it; tokens that were chosen before may still come.
    pub fn cancel(&self) {
        self.outlet.cancelled.store(true, Ordering::Relaxed);
    }

    /// The next token if there is one by now.
    pub fn try_next(&mut self) -> Poll<Option<Result<Token>>> {
        if self.finish.is_some() {
            return Poll::Ready(None);
        }
        let event = self.outlet.told().events.pop_front();
        event.map_or(Poll::Pending, |event| Poll::Ready(self.take(event)))
    }

    /// As [`Generating::try_next`]; where there is none, the context's waker is woken when there
    /// is.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Token>>> {
        if self.finish.is_some() {
            return Poll::Ready(None);
        }
        let mut told = self.outlet.told();
        let Some(event) = told.events.pop_front() else {
            told.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        drop(told);
        Poll::Ready(self.take(event))
    }

    /// The caller's view of an event.
    fn take(&mut self, event: Event) -> Option<Result<Token>> {
        let (id, logprob, top_logprobs, last) = match event {
            Event::Token { id, logprob, likeliest, last } => (id, logprob, likeliest, last),
            Event::End(finish) => {
                self.finish = Some(finish);
                return None;
            }
            Event::Failed(error) => {
                self.finish = Some(Finish::Failed);
                return Some(Err(error));
            }
        };
        self.given += 1;
        // The model's end token has no text.
        let ends = matches!(last, Some(Finish::End(_)));
        let (mut text, met) = if ends { Default::default() } else { self.text.push(id) };
        if let Some(stop) = met {
            self.finish = Some(Finish::StopString(stop));
            self.cancel();
        } else if let Some(last) = last {
            self.finish = Some(last);
            text += &self.text.end();
        }
        Some(Ok(Token { id, text, logprob, top_logprobs }))
    }
}

impl Iterator for Generating {
    type Item = Result<Token>;

    /// Waits for the next token.
    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        let outlet = self.outlet.clone();
        let mut told = outlet.told();
        let event = loop {
            match told.events.pop_front() {
                Some(event) => break event,
                None => told = outlet.ready.wait(told).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(told);
        self.take(event)
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.cancel();
    }
}
