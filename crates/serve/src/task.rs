//! Tasks, and work on threads that may wait, of one type each: whatever surrounds a task is
//! compiled for every type of future and of closure.

use std::pin::Pin;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A future without a result.
pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Begins a task.
pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    begin(Box::pin(task))
}

fn begin(task: Task) -> JoinHandle<()> {
    tokio::spawn(task)
}

/// Begins work on a thread that may wait. Its result is an error if it panicked.
pub(crate) fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (result, done) = oneshot::channel();
    on_a_thread(Box::new(move || {
        // Nobody may wait for it.
        let _ = result.send(work());
    }));
    done
}

fn on_a_thread(work: Box<dyn FnOnce() + Send>) {
    tokio::task::spawn_blocking(work);
}
