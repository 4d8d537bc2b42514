//! Between HTTP and the engine: a request for text is started, its tokens come over a channel, and dropping it cancels it.
//!
//! Each model has a fixed number of sessions, and as many requests run at a time, each on a blocking thread. A request takes
//! the idle session that shares the longest prefix with its prompt, so that the next turn of a conversation finds the earlier
//! ones computed. Requests beyond that wait in a queue of bounded length. Sessions share the engine's device step by step.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use delft::{CancelToken, Engine, Error, Finish, GenerateOptions, Metrics, Session, Token};
use hyper::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use crate::log::Line;
use crate::metrics::Texts;
use crate::problem::Problem;

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
    /// It ended, for this reason.
    Done(Finish, Metrics),
}

/// The sessions of one engine, and who may use them.
pub(crate) struct Generator {
    engine: Engine,
    idle: Mutex<Vec<Session>>,
    permits: Arc<Semaphore>,
    limits: Limits,
    waiting: AtomicUsize,
    /// Counts of the texts that were written.
    pub(crate) texts: Texts,
}

/// Bounds on what runs and waits.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests that are answered at the same time, each in a session of its own.
    pub parallel: usize,
    /// Requests that wait for their turn at most; those beyond are refused.
    pub queue: usize,
    /// The longest that a request may take, waiting included.
    pub time: Duration,
}

impl Generator {
    pub(crate) fn new(engine: Engine, limits: Limits) -> Self {
        let idle = (0..limits.parallel).map(|_| engine.session()).collect();
        Generator {
            idle: Mutex::new(idle),
            permits: Arc::new(Semaphore::new(limits.parallel)),
            limits,
            waiting: AtomicUsize::new(0),
            texts: Texts::default(),
            engine,
        }
    }

    /// Requests that run, and requests that wait.
    pub(crate) fn load(&self) -> (usize, usize) {
        let running = self.limits.parallel - self.permits.available_permits();
        (running, self.waiting.load(Ordering::Relaxed))
    }

    /// Starts to write texts, one after the other in the same session, as soon as one is idle.
    ///
    /// # Errors
    /// A queue that is full, or in which the time ran out.
    pub(crate) async fn start(self: &Arc<Self>, work: Vec<Work>) -> Result<Generating, Problem> {
        let deadline = Instant::now() + self.limits.time;
        let permit = match self.permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => self.queue(deadline).await?,
        };
        let cancel = CancelToken::default();
        let (sender, events) = mpsc::unbounded_channel();
        let (generator, own) = (self.clone(), cancel.clone());
        tokio::task::spawn_blocking(move || generator.run(work, &own, &sender, permit));
        Ok(Generating { events, cancel, deadline })
    }

    /// Waits for a session.
    async fn queue(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, Problem> {
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting(&self.waiting);
        if before >= self.limits.queue {
            drop(waiting);
            return Err(busy(format!("{before} requests wait already")));
        }
        let turn = tokio::time::timeout_at(deadline, self.permits.clone().acquire_owned()).await;
        turn.ok().and_then(Result::ok).ok_or_else(|| {
            busy(format!("no session was free within {} s", self.limits.time.as_secs()))
        })
    }

    fn run(
        &self,
        work: Vec<Work>,
        cancel: &CancelToken,
        sender: &mpsc::UnboundedSender<(usize, Result<Event, Problem>)>,
        permit: OwnedSemaphorePermit,
    ) {
        let Some(first) = work.first() else { return };
        let mut session = self.take(&first.prompt);
        for (index, Work { prompt, options }) in work.into_iter().enumerate() {
            let options = GenerateOptions { cancel: cancel.clone(), ..options };
            // A panic is a defect of ours, and this request's alone.
            let outcome = delft::formats::caught(|| {
                // The receiver is gone once the request is dropped, and that cancels.
                let tell = |event| {
                    if let Event::Done(_, metrics) = &event {
                        self.texts.count(metrics);
                    }
                    drop(sender.send((index, Ok(event))));
                };
                write(&mut session, prompt, &options, tell)
            });
            let problem = match outcome {
                Ok(Ok(Finish::Cancelled)) => break,
                Ok(Ok(_)) => continue,
                Ok(Err(error)) => Problem::of_work(&error),
                Err(words) => {
                    session = self.engine.session();
                    Line::about("panic").with("words", &words).write();
                    Problem::failed(format!("internal error: {words}"))
                }
            };
            drop(sender.send((index, Err(problem))));
            break;
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        drop(permit);
    }

    /// The idle session that shares the longest prefix with a prompt, else the one that holds least.
    fn take(&self, prompt: &[u32]) -> Session {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let held =
            |session: &Session| (session.shares(prompt), std::cmp::Reverse(session.tokens().len()));
        let best = (0..idle.len()).max_by_key(|&i| held(&idle[i]));
        // There are as many as permits; were one lost, a new one takes its place.
        best.map_or_else(|| self.engine.session(), |best| idle.swap_remove(best))
    }
}

fn write(
    session: &mut Session,
    prompt: Vec<u32>,
    options: &GenerateOptions,
    tell: impl Fn(Event),
) -> Result<Finish, Error> {
    let mut generation = session.generate(prompt, options)?;
    for token in &mut generation {
        tell(Event::Token(token?));
    }
    let finish = generation.finish().cloned().unwrap_or(Finish::Cancelled);
    tell(Event::Done(finish.clone(), generation.metrics()));
    Ok(finish)
}

fn busy(why: String) -> Problem {
    let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", why);
    Problem { retry_after: Some(5), ..problem }
}

/// Counts a request that waits.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Texts that are being written; dropping it cancels them.
pub(crate) struct Generating {
    events: mpsc::UnboundedReceiver<(usize, Result<Event, Problem>)>,
    cancel: CancelToken,
    deadline: Instant,
}

impl Generating {
    /// The next event, with the index of its text; `None` after the last.
    ///
    /// # Errors
    /// A generation that failed, or took too long. No event follows.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Event)>, Problem> {
        match tokio::time::timeout_at(self.deadline, self.events.recv()).await {
            Ok(None) => Ok(None),
            Ok(Some((index, event))) => event.map(|event| Some((index, event))),
            Err(_) => {
                self.cancel.cancel();
                let message = "the request took longer than this server allows (--timeout)";
                Err(Problem::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message))
            }
        }
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
