//! Panics of code that is not ours, as errors.
//!
//! A library that panics on a damaged file shall not end the program. Who calls it through
//! [`caught`] gets the panic's words and makes an error of them, and nothing is written to standard
//! error meanwhile.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// How many calls of [`caught`] this thread is in.
    static WITHIN: Cell<usize> = const { Cell::new(0) };
}

/// Runs `work`; if it panics, the panic's words. What `work` changes must be thrown away then,
/// since it may be half done.
///
/// The process's panic hook runs before anything is caught. So it is wrapped, once, in one that
/// does nothing for a thread that is in here. Programs that abort at a panic have no such net.
///
/// # Errors
/// The words of the panic, empty if it has none.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // A thread that panics already may not change the hook, and would not be caught.
    if cfg!(panic = "abort") || std::thread::panicking() {
        return Ok(work());
    }
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if WITHIN.get() == 0 {
                before(panic);
            }
        }));
    });
    WITHIN.set(WITHIN.get() + 1);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    WITHIN.set(WITHIN.get() - 1);
    outcome.map_err(|panic| words_of(&*panic).to_owned())
}

/// The message of a panic.
pub fn words_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_words() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| panic!("as it is")), Err::<(), _>("as it is".to_owned()));
        assert_eq!(caught(|| panic!("of {}", 2)), Err::<(), _>("of 2".to_owned()));
        assert_eq!(caught(|| std::panic::panic_any(7)), Err::<(), _>(String::new()));
    }

    #[test]
    fn calls_in_calls_are_counted() {
        let inner = caught(|| caught(|| panic!("inner")).is_err_and(|words| words == "inner"));
        assert_eq!((inner, WITHIN.get()), (Ok(true), 0));
        let outer = caught(|| {
            let _ = caught(|| WITHIN.get());
            panic!("{}", WITHIN.get())
        });
        assert_eq!((outer, WITHIN.get()), (Err::<(), _>("1".to_owned()), 0));
    }
}
