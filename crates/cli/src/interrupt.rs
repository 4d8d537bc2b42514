//! Ctrl-C: the first ends a running generation, the next (or one when nothing runs) ends the program with 130.

use std::sync::{Mutex, Once, PoisonError};

use delft::CancelToken;

static HANDLER: Once = Once::new();
static RUNNING: Mutex<Option<CancelToken>> = Mutex::new(None);

/// The exit status of a program that SIGINT ended, as shells count it.
pub(crate) const INTERRUPTED: u8 = 130;

fn running() -> std::sync::MutexGuard<'static, Option<CancelToken>> {
    // The guarded value is replaced whole, so a panic elsewhere cannot leave it half-changed.
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While this lives, the first Ctrl-C cancels its token instead of ending the program.
pub(crate) struct Generating(pub(crate) CancelToken);

impl Generating {
    pub(crate) fn begin() -> Self {
        HANDLER.call_once(|| {
            // Without a handler Ctrl-C just ends the program: nothing is lost but the metrics.
            let _ = ctrlc::set_handler(|| match &*running() {
                Some(token) if !token.is_cancelled() => token.cancel(),
                _ => std::process::exit(i32::from(INTERRUPTED)),
            });
        });
        let token = CancelToken::default();
        *running() = Some(token.clone());
        Generating(token)
    }
}

impl Drop for Generating {
    fn drop(&mut self) {
        *running() = None;
    }
}
