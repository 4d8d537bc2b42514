//! A terminal that shows nothing of what is typed while a model answers.
//!
//! Otherwise the letters would stand in the middle of the answer. They are not lost: the next line
//! begins with them. Ctrl-C still interrupts, and drops them, as terminals do. Nothing happens
//! where no terminal is, or none of Unix's.

#[cfg(unix)]
mod unix {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use nix::sys::termios::{
        LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
    };

    /// How the terminal was, while it is quiet.
    static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

    fn before() -> MutexGuard<'static, Option<Termios>> {
        // The guarded value is replaced whole, so a panic elsewhere cannot leave it half-changed.
        BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin() {
        // An error says that standard input is no terminal.
        let Ok(old) = tcgetattr(std::io::stdin()) else { return };
        let mut quiet = old.clone();
        quiet.local_flags.remove(LocalFlags::ECHO | LocalFlags::ICANON);
        // Without lines a read returns with what there is, from the first byte on.
        quiet.control_chars[SpecialCharacterIndices::VMIN as usize] = 1;
        quiet.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
        let mut before = before();
        if before.is_none() && tcsetattr(std::io::stdin(), SetArg::TCSADRAIN, &quiet).is_ok() {
            *before = Some(old);
        }
    }

    pub(super) fn end() {
        if let Some(old) = before().take() {
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSADRAIN, &old);
        }
    }
}

/// While this lives, what is typed is kept for later and not shown.
pub(crate) struct Quiet(());

impl Quiet {
    pub(crate) fn begin() -> Quiet {
        #[cfg(unix)]
        unix::begin();
        Quiet(())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        end();
    }
}

/// Shows again what is typed; for ends of the program that drop nothing.
pub(crate) fn end() {
    #[cfg(unix)]
    unix::end();
}
