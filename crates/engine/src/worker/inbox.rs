//! The queue in which requests wait for the worker, and the thread that serves it.

use super::{Constrained, Error, ErrorKind, Event, Metrics, Outlet, Request, Shared, Worker};
use formats::caught;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// A request on its way to the worker.
pub(super) struct Delivery {
    pub(super) request: Request,
    pub(super) prompt: Vec<u32>,
    pub(super) constraint: Option<Constrained>,
    pub(super) outlet: Arc<Outlet>,
}

#[derive(Default)]
struct Waiting {
    deliveries: Vec<Delivery>,
    closed: bool,
}

/// The queue in which requests wait for the worker.
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
    pub(crate) fn send(
        &self,
        request: Request,
        prompt: Vec<u32>,
        constraint: Option<Constrained>,
        outlet: Arc<Outlet>,
    ) {
        let mut waiting = self.waiting();
        if waiting.closed {
            let error = Error::new("worker", "a thread that computes", "none");
            let error = error.of(ErrorKind::Internal);
            return outlet.tell(Event::Failed(error), &Metrics::default());
        }
        waiting.deliveries.push(Delivery { request, prompt, constraint, outlet });
        self.changed.notify_one();
    }

    /// Takes the requests that are there.
    pub(super) fn take(&self) -> Vec<Delivery> {
        std::mem::take(&mut self.waiting().deliveries)
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
        // If the executor was replaced, the cache that an idle worker kept is gone.
        worker = worker.filter(|own: &Worker| own.epoch == shared.epoch());
        let own = worker.get_or_insert_with(|| Worker::new(&shared));
        if let Err(words) = caught(|| own.serve(&shared, inbox)) {
            // Nothing of its own can be trusted any more.
            shared.prefixes.tree().clear();
            let error = Error::new("worker", "an answer", format!("a panic: {words}"));
            own.fail_all(&error.of(ErrorKind::Internal));
            worker = None;
        } else if own.is_stale(&shared) {
            own.fail_all(&shared.reloaded());
            worker = None;
            // A model that cannot be loaded again refuses the next request with the reason.
            let _ = shared.ready();
        }
    }
}
