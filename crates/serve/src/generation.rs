//! Between HTTP and the engine: texts are submitted to the engine's worker, which computes all of
//! them together, and their tokens are polled; dropping a request gives its place up within a step.
//!
//! As many requests run at a time as a model was loaded for, on all of its engines together
//! (`replicas.rs`). Those beyond wait in a queue of bounded length. What a prompt shares with
//! earlier ones is found in the engine's prefix tree.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use delft::{Adapter, Engine, Finish, GenerateOptions, Metrics, Request, Token};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::metrics::Texts;
use crate::problem::Problem;
use crate::replicas::{Place, Replicas};
use crate::task;
use crate::watch::{Trail, Written};

/// A text to write: tokens to continue, and how.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) prompt: Vec<u32>,
    pub(crate) options: GenerateOptions,
}

/// A step of a text on its way.
#[derive(Debug)]
pub(crate) enum Event {
    Token(Token),
    /// It ended.
    Done(Done),
}

/// The end of a text.
#[derive(Debug, Clone)]
pub(crate) struct Done {
    pub(crate) finish: Finish,
    pub(crate) metrics: Metrics,
    /// Why no more of the prompt was found computed.
    pub(crate) missed: Option<String>,
    /// Its tokens, where the request asks to be told of them.
    pub(crate) told: Option<Arc<Written>>,
}

impl Done {
    /// Tells in an object how many tokens of the prompt were found computed, and why no more; and
    /// its tokens, where the request asks for them.
    pub(crate) fn tell_cache(&self, object: &mut Value) {
        let (cached, why) = (self.metrics.reused_tokens, &self.missed);
        object["delft"] = json!({ "cached_tokens": cached, "cache": why });
        if let Some(written) = &self.told {
            object["delft"]["text"] = written.to_json();
        }
    }

    /// Says in an object of an answer where a text was brought to its end before a limit.
    pub(crate) fn note_closing(&self, object: &mut Value) {
        if self.finish.closed_early(&self.metrics) {
            object["closed_early"] = true.into();
        }
    }
}

/// A model's engines with an adapter or none, and who may use them.
pub(crate) struct Generator {
    /// Shared by all that use the engines.
    replicas: Arc<Replicas>,
    /// On each engine; none: the model as it is.
    adapters: Vec<Adapter>,
    /// Likewise.
    permits: Arc<Semaphore>,
    limits: GenerationLimits,
    running: AtomicUsize,
    waiting: AtomicUsize,
    /// Counts of the texts that were written.
    pub(crate) texts: Arc<Texts>,
}

/// Bounds on what runs and waits.
#[derive(Debug, Clone, Copy)]
pub struct GenerationLimits {
    /// Requests that are answered at the same time by each engine of a model.
    pub parallel: usize,
    /// Requests that wait for their turn at most; those beyond are refused.
    pub queue: usize,
    /// The longest that a request may take, waiting included.
    pub time: Duration,
    /// Tokens that a text may have at most, whatever its request says; unset: as many as there is
    /// room for.
    pub tokens: Option<usize>,
}

impl Generator {
    pub(crate) fn new(engines: Vec<Engine>, limits: GenerationLimits, texts: Arc<Texts>) -> Self {
        Generator {
            permits: Arc::new(Semaphore::new(limits.parallel.saturating_mul(engines.len()))),
            replicas: Arc::new(Replicas::new(engines, limits.parallel)),
            limits,
            running: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            texts,
            adapters: Vec::new(),
        }
    }

    /// The same engines with an adapter, which has a handle on each. Requests of both take turns.
    pub(crate) fn with(&self, adapters: Vec<Adapter>, texts: Arc<Texts>) -> Self {
        let (permits, replicas) = (self.permits.clone(), self.replicas.clone());
        let (running, waiting) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Generator { replicas, adapters, permits, limits: self.limits, running, waiting, texts }
    }

    /// A place on the engine that has the least to do for these tokens.
    pub(crate) fn place(&self, tokens: &[u32]) -> Place {
        self.replicas.place(tokens, &self.adapters)
    }

    /// Requests that run, and requests that wait.
    pub(crate) fn load(&self) -> (usize, usize) {
        (self.running.load(Ordering::Relaxed), self.waiting.load(Ordering::Relaxed))
    }

    /// Starts to write texts as soon as it is their turn.
    ///
    /// # Errors
    /// A queue that is full, or in which the time ran out; a text that the engine refuses.
    pub(crate) async fn start(
        self: &Arc<Self>,
        work: Vec<Work>,
        trail: &Arc<Trail>,
    ) -> Result<Generating, Problem> {
        let came = Instant::now();
        let deadline = came + self.limits.time;
        let turn = self.turn(deadline).await?;
        let (trail, texts) = (trail.clone(), self.texts.clone());
        let mut generating = Generating {
            turn,
            count: Count { trail, texts, came, queued: came.elapsed() },
            running: VecDeque::with_capacity(work.len()),
            later: Vec::new(),
            deadline,
        };
        let mut last: Option<Vec<u32>> = None;
        for (index, work) in work.into_iter().enumerate() {
            // Texts of one prompt wait for the first of them, and then find the prompt computed.
            if last.as_ref() == Some(&work.prompt) {
                generating.later.push((index, work));
            } else {
                last = Some(work.prompt.clone());
                generating.submit(index, work)?;
            }
        }
        Ok(generating)
    }

    /// Bounds on what runs and waits.
    pub(crate) fn limits(&self) -> GenerationLimits {
        self.limits
    }

    /// The right to be one of those that run, as soon as there is room.
    ///
    /// # Errors
    /// A queue that is full, or in which the time ran out.
    pub(crate) async fn turn(self: &Arc<Self>, deadline: Instant) -> Result<Turn, Problem> {
        let permit = match self.permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => self.queue(deadline).await?,
        };
        self.running.fetch_add(1, Ordering::Relaxed);
        Ok(Turn { generator: self.clone(), _permit: permit })
    }

    /// The tokens of a text with their log-probabilities and the `top` likeliest ones in their
    /// places, as [`Engine::score`] tells them.
    ///
    /// # Errors
    /// As [`Generator::start`].
    pub(crate) async fn score(
        self: &Arc<Self>,
        text: &[u32],
        top: usize,
    ) -> Result<Vec<Token>, Problem> {
        let _turn = self.turn(Instant::now() + self.limits.time).await?;
        let (place, text) = (self.place(text), text.to_vec());
        let score = move || place.engine().score(&[text], top, place.adapter());
        Ok(computed(score).await?.concat())
    }

    /// Waits for its turn.
    async fn queue(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, Problem> {
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting(&self.waiting);
        if before >= self.limits.queue {
            drop(waiting);
            return Err(busy(format!("{before} requests wait already")));
        }
        let turn = tokio::time::timeout_at(deadline, self.permits.clone().acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or_else(|| {
            busy(format!("it was nobody's turn to end within {} s", self.limits.time.as_secs()))
        })
    }
}

/// The result of work of an engine that is waited for as a whole, on a thread that may wait.
pub(crate) async fn computed<T: Send + 'static>(
    work: impl FnOnce() -> delft::Result<T> + Send + 'static,
) -> Result<T, Problem> {
    let computed = task::blocking(work).await;
    let computed = computed.map_err(|_| Problem::failed("a panic ended it"))?;
    computed.map_err(|error| Problem::of_work(&error))
}

pub(crate) fn busy(why: String) -> Problem {
    let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", why);
    Problem { retry_after: Some(5), ..problem }
}

/// The right of a request to run, until it is dropped.
pub(crate) struct Turn {
    generator: Arc<Generator>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.generator.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a request that waits.
pub(crate) struct Waiting<'a>(pub(crate) &'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Texts that are being written; dropping it cancels them.
pub(crate) struct Generating {
    turn: Turn,
    /// The one that was heard last is the last to be asked.
    running: VecDeque<Text>,
    /// Texts that start when another one has begun.
    later: Vec<(usize, Work)>,
    deadline: Instant,
    count: Count,
}

/// A text that is being written.
struct Text {
    index: usize,
    running: delft::Generating,
    /// Counts it among its engine's texts.
    _place: Place,
    /// Its tokens, where they are recorded or told.
    written: Option<Written>,
}

/// Counts the texts of a request.
struct Count {
    /// The request, which is told what they took.
    trail: Arc<Trail>,
    /// The counters of the model's texts.
    texts: Arc<Texts>,
    /// When the request came to the queue.
    came: Instant,
    /// How long it waited there.
    queued: Duration,
}

impl Count {
    /// Counts a text that has ended, or was given up.
    fn add(&self, metrics: &Metrics, finish: &Finish) {
        self.texts.count(metrics, finish, self.queued, self.came.elapsed());
        self.trail.counts(metrics, finish, self.queued);
    }

    /// Keeps the tokens of a text that has ended or was given up, where they are recorded, and
    /// returns them where the answer tells them.
    fn keep(&self, written: Option<Written>, metrics: &Metrics) -> Option<Arc<Written>> {
        let written = Written { cached: metrics.reused_tokens, ..written? };
        self.trail.keep(Arc::new(written))
    }
}

impl Generating {
    fn submit(&mut self, index: usize, work: Work) -> Result<(), Problem> {
        let Work { prompt, mut options } = work;
        if let Some(most) = self.turn.generator.limits.tokens {
            options.max_tokens = Some(options.max_tokens.map_or(most, |own| own.min(most)));
        }
        let place = self.turn.generator.place(&prompt);
        let (engine, adapter) = (place.engine(), place.adapter().cloned());
        let written = self.count.trail.keeps_tokens().then(|| Written {
            index,
            seed: options.sampling.seed,
            prompt: prompt.clone(),
            tokens: Vec::new(),
            cached: 0,
        });
        let running = engine.submit(Request { adapter, ..Request::new(prompt, options) })?;
        self.running.push_back(Text { index, running, _place: place, written });
        Ok(())
    }

    /// The next event, with the index of its text; `None` after the last.
    ///
    /// # Errors
    /// A generation that failed, or took too long. No event follows.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Event)>, Problem> {
        let next = match tokio::time::timeout_at(self.deadline, self.event()).await {
            Ok(Ok(next)) => next,
            Ok(Err(problem)) => {
                self.give_up();
                return Err(problem);
            }
            Err(_) => {
                self.give_up();
                return Err(Problem::late());
            }
        };
        for (index, work) in std::mem::take(&mut self.later) {
            self.submit(index, work)?;
        }
        Ok(next)
    }

    /// Gives up what is running, and counts it as far as it came.
    fn give_up(&mut self) {
        for Text { running, written, .. } in self.running.drain(..) {
            let metrics = running.metrics();
            self.count.add(&metrics, running.finish().unwrap_or(&Finish::Cancelled));
            self.count.keep(written, &metrics);
        }
        self.later.clear();
    }

    /// The next event of any text.
    async fn event(&mut self) -> Result<Option<(usize, Event)>, Problem> {
        let Generating { running, count, .. } = self;
        poll_fn(move |context| {
            for _ in 0..running.len() {
                let Some(mut text) = running.pop_front() else { break };
                let index = text.index;
                let event = match text.running.poll_next(context) {
                    Poll::Pending => {
                        running.push_back(text);
                        continue;
                    }
                    Poll::Ready(Some(Ok(token))) => {
                        text.written.iter_mut().for_each(|own| own.tokens.push(token.id));
                        running.push_back(text);
                        Event::Token(token)
                    }
                    Poll::Ready(Some(Err(error))) => {
                        let metrics = text.running.metrics();
                        count.add(&metrics, &Finish::Failed);
                        count.keep(text.written, &metrics);
                        return Poll::Ready(Err(Problem::of_work(&error)));
                    }
                    Poll::Ready(None) => {
                        let Text { running, written, .. } = text;
                        let metrics = running.metrics();
                        let finish = running.finish().cloned().unwrap_or(Finish::Cancelled);
                        count.add(&metrics, &finish);
                        // What a constraint put behind the prompt is no part of it.
                        let whole = metrics.reused_tokens >= metrics.prompt_tokens;
                        let missed = running.missed().filter(|_| !whole);
                        let missed = missed.map(|missed| missed.to_string());
                        let told = count.keep(written, &metrics);
                        Event::Done(Done { finish, metrics, missed, told })
                    }
                };
                return Poll::Ready(Ok(Some((index, event))));
            }
            if running.is_empty() { Poll::Ready(Ok(None)) } else { Poll::Pending }
        })
        .await
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.give_up();
    }
}
