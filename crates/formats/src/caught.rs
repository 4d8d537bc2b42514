//! Panics of code that is not ours, as errors.
//!
//! A library that panics on a damaged file shall not end the program. Who calls it through [`caught`] gets the panic's words
//! and makes an error of them. The panic hook runs all the same, before anything is caught: a program's own hook asks
//! [`expected`] and is silent then.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// How many calls of [`caught`] this thread is in.
    static WITHIN: Cell<usize> = const { Cell::new(0) };
}

/// Runs `f`; if it panics, the panic's words. What `f` changes must be thrown away then, since it may be half done.
///
/// # Errors
/// The words of the panic, empty if it has none.
pub fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    WITHIN.set(WITHIN.get() + 1);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    WITHIN.set(WITHIN.get() - 1);
    outcome.map_err(|panic| words_of(&*panic).to_owned())
}

/// Whether a panic of this thread is one that [`caught`] will catch.
pub fn expected() -> bool {
    // A thread that is ending has no counter left, and is in no call.
    WITHIN.try_with(Cell::get).is_ok_and(|within| within > 0)
}

/// What a panic says.
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
    fn it_is_expected_inside_alone() {
        let told = || (expected(), caught(|| (expected(), caught(expected))), expected());
        assert_eq!(told(), (false, Ok((true, Ok(true))), false));
        let _ = caught(|| caught(|| panic!("inner")).is_err() && expected());
        assert!(!expected());
        // Another thread's panic is not this one's.
        assert_eq!(caught(|| std::thread::spawn(expected).join().ok()), Ok(Some(false)));
    }
}
