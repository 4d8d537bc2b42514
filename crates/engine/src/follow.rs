//! Constraints beside the worker: each chosen token is given to its text's [`Constraint`] before
//! the next step is planned. What may come behind it is found right then, or, on a device that can
//! wait for it, while that computes the step.
//!
//! Texts know nothing of each other, so several threads do this for several texts. A constraint
//! that takes long twice in a row is one of a grammar that somebody made so: its text sits out the
//! steps until it is done, and others go on. Once may be the system's doing, which ran something
//! else meanwhile; whoever is not in a step makes it no cheaper for the others, so the rest is
//! waited for, [`PATIENCE`] at most. A token that is late is the same token.
//!
//! [`Constraint`]: crate::Constraint

use crate::constraint::Constrained;
use crate::schedule::Id;
use formats::Result;
use std::collections::{HashSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a step waits for constraints that are not known to be slow.
const PATIENCE: Duration = Duration::from_millis(20);
/// The time that a slow constraint takes. After two such tokens it is taken for that for [`WARY`]
/// more.
const SLOW: Duration = Duration::from_millis(4);
const WARY: u32 = 16;
/// Texts that the worker follows alone: to wake a thread takes as long.
const FEW: usize = 3;
/// Threads beside the worker: two at least, so that no text that takes long waits for another one.
const HELPERS: RangeInclusive<usize> = 2..=15;

/// Something that a text's constraint is asked.
pub(crate) struct Task<T> {
    pub(crate) id: Id,
    pub(crate) constrained: Constrained,
    pub(crate) job: Job<T>,
}

pub(crate) enum Job<T> {
    /// Accept a token.
    Accept {
        /// The token that was chosen, and whether the text ends with it.
        token: u32,
        ends: bool,
        /// Tokens that are left behind it.
        left: usize,
        /// Whether to find what may come next at once.
        looks: bool,
        /// Passed on.
        with: T,
    },
    /// Find what may come next.
    Look,
}

/// Its result.
pub(crate) struct Followed<T> {
    pub(crate) id: Id,
    pub(crate) constrained: Constrained,
    /// If a token was to be accepted: the one that the text goes on with, and whether it is there
    /// to bring it to its end; and what was passed on.
    pub(crate) accepted: Option<(Result<(u32, bool)>, T)>,
}

impl<T> Task<T> {
    fn run(self) -> Followed<T> {
        let Task { id, mut constrained, job } = self;
        let began = Instant::now();
        let accepted = match job {
            Job::Accept { token, ends, left, looks, with } => {
                let accepted = constrained.accept(token, ends);
                if accepted.is_ok() && !ends && left > 0 {
                    constrained.advance(left);
                    if looks {
                        constrained.look();
                    }
                }
                Some((accepted, with))
            }
            Job::Look => {
                constrained.look();
                None
            }
        };
        constrained.spent += began.elapsed();
        if !constrained.owes() {
            let slow = std::mem::take(&mut constrained.spent) > SLOW;
            let again = slow && (constrained.slow || constrained.wary > 0);
            constrained.wary = if again { WARY } else { constrained.wary.saturating_sub(1) };
            constrained.slow = slow;
        }
        Followed { id, constrained, accepted }
    }
}

struct State<T> {
    quick: VecDeque<Task<T>>,
    slow: VecDeque<Task<T>>,
    /// Quick tasks that another thread is working on.
    running: usize,
    done: Vec<Followed<T>>,
    closed: bool,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// Told of new tasks.
    begun: Condvar,
    /// Told of each that is done.
    ended: Condvar,
}

impl<T> Shared<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loop of a helper thread.
    fn help(&self) {
        let mut state = self.state();
        while !state.closed {
            let (quick, task) = match state.quick.pop_front() {
                Some(task) => (true, Some(task)),
                None => (false, state.slow.pop_front()),
            };
            let Some(task) = task else {
                state = self.begun.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.running += usize::from(quick);
            drop(state);
            let followed = task.run();
            state = self.state();
            state.running -= usize::from(quick);
            state.done.push(followed);
            self.ended.notify_one();
        }
    }
}

/// The threads that follow texts beside the worker, and the texts that are away with them.
pub(crate) struct Followers<T> {
    shared: Arc<Shared<T>>,
    /// Threads, once one was needed.
    helpers: Option<usize>,
    away: HashSet<Id>,
}

impl<T: Send + 'static> Followers<T> {
    pub(crate) fn new() -> Self {
        let state = State {
            quick: VecDeque::new(),
            slow: VecDeque::new(),
            running: 0,
            done: Vec::new(),
            closed: false,
        };
        let (begun, ended) = Default::default();
        let shared = Arc::new(Shared { state: Mutex::new(state), begun, ended });
        Followers { shared, helpers: None, away: HashSet::new() }
    }

    /// Whether a text is away.
    pub(crate) fn is_away(&self, id: Id) -> bool {
        self.away.contains(&id)
    }

    /// Whether any text is away.
    pub(crate) fn any_away(&self) -> bool {
        !self.away.is_empty()
    }

    /// Follows these texts; those that are done within the time of a step, and others that were
    /// away, are added to `done`.
    pub(crate) fn follow(
        &mut self,
        tasks: impl Iterator<Item = Task<T>>,
        done: &mut Vec<Followed<T>>,
    ) {
        let (mut quick, mut slow) = (VecDeque::new(), VecDeque::new());
        for task in tasks {
            let to = if task.constrained.wary > 0 { &mut slow } else { &mut quick };
            to.push_back(task);
        }
        let helpers = if quick.len() > FEW || !slow.is_empty() { self.helpers() } else { 0 };
        if helpers == 0 || (quick.len() <= FEW && slow.is_empty()) {
            done.extend(quick.drain(..).chain(slow.drain(..)).map(Task::run));
            self.take(done);
            return;
        }
        self.away.extend(quick.iter().chain(&slow).map(|task| task.id));
        let began = Instant::now();
        let mut state = self.shared.state();
        // One of the quick ones is for this thread at once.
        for _ in 0..(quick.len().saturating_sub(1) + slow.len()).min(helpers) {
            self.shared.begun.notify_one();
        }
        state.quick.append(&mut quick);
        state.slow.append(&mut slow);
        while let Some(task) = state.quick.pop_front() {
            drop(state);
            let followed = task.run();
            state = self.shared.state();
            state.done.push(followed);
        }
        while state.running > 0
            && let Some(time) = PATIENCE.checked_sub(began.elapsed())
        {
            let waited = self.shared.ended.wait_timeout(state, time);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.take(done);
    }

    /// Takes those that are done.
    pub(crate) fn take(&mut self, done: &mut Vec<Followed<T>>) {
        if self.away.is_empty() {
            return;
        }
        let from = done.len();
        done.append(&mut self.shared.state().done);
        for followed in &done[from..] {
            self.away.remove(&followed.id);
        }
    }

    /// Waits until a task that is away is done, or for `time` at most.
    pub(crate) fn wait(&self, time: Duration) {
        let state = self.shared.state();
        let none = |state: &mut State<T>| state.done.is_empty();
        drop(self.shared.ended.wait_timeout_while(state, time, none));
    }

    /// The number of threads, which are started the first time.
    fn helpers(&mut self) -> usize {
        *self.helpers.get_or_insert_with(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let start = |_| {
                let shared = self.shared.clone();
                let thread = std::thread::Builder::new().name("delft-follow".to_owned());
                thread.spawn(move || shared.help()).is_ok()
            };
            (0..cores.saturating_sub(1).clamp(*HELPERS.start(), *HELPERS.end()))
                .filter(|i| start(*i))
                .count()
        })
    }
}

impl<T> Drop for Followers<T> {
    fn drop(&mut self) {
        self.shared.state().closed = true;
        self.shared.begun.notify_all();
    }
}
