//! Slots of a device, in which it keeps what a session carries from step to step: each is lent to
//! one session at a time.

use formats::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Free {
    released: Vec<u32>,
    created: u32,
}

/// The slots that are free.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots(Arc<Mutex<Free>>);

impl Slots {
    fn free(&self) -> MutexGuard<'_, Free> {
        // A panic elsewhere cannot leave the list half-changed: its operations are single ones.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of them.
    ///
    /// # Errors
    /// If there are none left.
    pub(crate) fn take(&self) -> Result<Slot> {
        let mut free = self.free();
        let number = match free.released.pop() {
            Some(number) => number,
            None if (free.created as usize) < device::SLOTS => {
                free.created += 1;
                // Giving back allocates nothing.
                let all = free.created as usize;
                free.released.reserve(all);
                free.created - 1
            }
            None => {
                let expected = format!("at most {} sessions at a time", device::SLOTS);
                let error = Error::new("session", expected, "one more");
                return Err(error.of(ErrorKind::Busy).hint("end other sessions"));
            }
        };
        Ok(Slot { number, slots: self.clone() })
    }
}

/// A slot that a session has; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) number: u32,
    slots: Slots,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.free().released.push(self.number);
    }
}
