//! Keeps memory resident between steps. The system releases a program's memory about a second after
//! its last work, and takes a quarter of a second to bring a large model back. So residency is
//! renewed regularly, for as long as more work is likely.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The interval of renewals, and how long they go on after the last work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) every: Duration,
    pub(crate) after: Duration,
}

impl Default for Span {
    fn default() -> Self {
        Span { every: Duration::from_millis(500), after: Duration::from_secs(180) }
    }
}

/// The time of the last work, and whether the driver has been dropped.
#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    ended: bool,
}

/// A thread that renews residency, and sleeps while there is nothing to keep.
#[derive(Debug, Default)]
pub(super) struct Keeper(Arc<(Mutex<State>, Condvar)>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Keeper {
    /// Records that there is work now.
    pub(super) fn used(&self) {
        let (state, changed) = &*self.0;
        let before = lock(state).last.replace(Instant::now());
        if before.is_none() {
            changed.notify_one();
        }
    }

    /// Starts the thread, which calls `keep` until that returns false.
    pub(super) fn start(&self, span: Span, keep: impl Fn() -> bool + Send + 'static) {
        let shared = Arc::clone(&self.0);
        // Without a thread, the first token after a pause only takes longer.
        let _ = std::thread::Builder::new().name("metal-keep".to_owned()).spawn(move || {
            let (state, changed) = &*shared;
            loop {
                let idle = |state: &mut State| state.last.is_none() && !state.ended;
                let woken = changed.wait_while(lock(state), idle);
                let mut now = woken.unwrap_or_else(PoisonError::into_inner);
                if now.ended {
                    return;
                }
                if now.last.is_some_and(|last| last.elapsed() > span.after) {
                    now.last = None;
                    continue;
                }
                drop(now);
                std::thread::sleep(span.every);
                if !keep() {
                    return;
                }
            }
        });
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let (state, changed) = &*self.0;
        lock(state).ended = true;
        changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn it_keeps_after_work_and_ends_with_its_owner() {
        let (tell, told) = mpsc::channel();
        let keeper = Keeper::default();
        let span = Span { every: Duration::from_millis(1), after: Duration::from_secs(3600) };
        keeper.start(span, move || tell.send(()).is_ok());
        assert!(told.try_recv().is_err(), "no work yet");
        keeper.used();
        for _ in 0..3 {
            told.recv().unwrap();
        }
        drop(keeper);
        // The thread lets go of its end of the channel.
        while told.recv().is_ok() {}
    }

    #[test]
    fn it_sleeps_when_nobody_comes_back() {
        let (tell, told) = mpsc::channel();
        let keeper = Keeper::default();
        keeper.start(Span { every: Duration::ZERO, after: Duration::ZERO }, move || {
            tell.send(()).is_ok()
        });
        for _ in 0..3 {
            keeper.used();
        }
        drop(keeper);
        while told.recv().is_ok() {}
    }
}
