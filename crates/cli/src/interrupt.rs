//! Ctrl-C: the first ends a running generation, or has a command tell what it has so far; the next
//! (or one when nothing runs) ends the program at once. Both end it with 130, as shells count it.

use std::sync::{Arc, Mutex, Once, PoisonError};

use delft::CancelToken;

use crate::terminal::{Outcome, Stop, line, report};

/// The exit status of a program that SIGINT ended.
pub(crate) const INTERRUPTED: u8 = 130;

static HANDLER: Once = Once::new();
static RUNNING: Mutex<Running> = Mutex::new(Running::Nothing);

/// The state in which Ctrl-C finds the program.
enum Running {
    Nothing,
    Generation(CancelToken),
    Command(Box<dyn FnOnce() -> Outcome + Send>),
    /// Last words are being said.
    Ending,
}

fn running() -> std::sync::MutexGuard<'static, Running> {
    // The guarded value is replaced whole, so a panic elsewhere cannot leave it half-changed.
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set(now: Running) {
    HANDLER.call_once(|| {
        // Without a handler Ctrl-C just ends the program: nothing is lost but the last words.
        let _ = ctrlc::set_handler(interrupted);
    });
    *running() = now;
}

fn end() -> ! {
    crate::quiet::end();
    std::process::exit(INTERRUPTED.into())
}

fn interrupted() {
    let mut running = running();
    match std::mem::replace(&mut *running, Running::Nothing) {
        Running::Nothing | Running::Ending => end(),
        Running::Generation(token) => token.cancel(),
        Running::Command(words) => {
            *running = Running::Ending;
            // On a thread of its own: whoever reads may be slow, and the next Ctrl-C shall not have
            // to wait.
            let speaker = std::thread::Builder::new().spawn(|| {
                if let Err(Stop::Error(error)) = words() {
                    report(&line(&error));
                }
                end()
            });
            if speaker.is_err() {
                end()
            }
        }
    }
}

/// While this lives, the first Ctrl-C cancels its token instead of ending the program.
pub(crate) struct Generating(pub(crate) CancelToken);

impl Generating {
    pub(crate) fn begin() -> Self {
        let token = CancelToken::default();
        set(Running::Generation(token.clone()));
        Generating(token)
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        *running() = Running::Nothing;
    }
}

/// The findings of a command so far: for itself, and for its last words.
#[derive(Debug, Default, Clone)]
pub(crate) struct SoFar<T>(Arc<Mutex<T>>);

impl<T: Clone> SoFar<T> {
    pub(crate) fn get(&self) -> T {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// While this lives, the first Ctrl-C has a command's last words said, at once and beside whatever
/// is computed, before it ends the program.
pub(crate) struct LastWords;

impl LastWords {
    pub(crate) fn prepare(words: impl FnOnce() -> Outcome + Send + 'static) -> Self {
        set(Running::Command(Box::new(words)));
        LastWords
    }
}

impl Drop for LastWords {
    fn drop(&mut self) {
        let mut running = running();
        if matches!(*running, Running::Ending) {
            // The program ends as soon as they are said; nothing shall come after them.
            drop(running);
            loop {
                std::thread::park();
            }
        }
        *running = Running::Nothing;
    }
}
