//! A step's arguments on their way to the device while earlier steps still run.
//!
//! Each step's are put into one of three slots of the host's memory, and copied to where kernels
//! read them in the order of the steps. So the host is done with the steps after the next before
//! the device is done with this one, and waits only when it comes to a slot whose copies are not
//! made yet, which the slot's mark tells.
//!
//! Without slots arguments are written at once, which waits until the device is idle.

use formats::Result;

use super::lower::Lowering;
use super::{Backend, Dispatch};

/// Steps whose arguments can be on their way.
pub(super) const SLOTS: usize = 3;
/// Bytes of a slot for what choosing has besides a step's words: tokens that penalties look back
/// on, biases.
const BESIDES: usize = 4096;
/// Where pieces of a slot begin.
const ALIGN: usize = 64;

/// The slots, if there are any.
pub(super) struct Ring<B: Backend> {
    slots: Vec<Slot<B>>,
    /// The one to fill next.
    next: usize,
}

struct Slot<B: Backend> {
    memory: B::Buffer,
    /// After the last copy out of it.
    copied: B::Mark,
}

/// Whether a ring is used: also by graphs, where each step of many sequences has words of its own.
pub(super) fn wanted(lowering: &Lowering, dispatch: Dispatch) -> bool {
    match dispatch {
        Dispatch::Eager => false,
        Dispatch::Arguments => true,
        Dispatch::Graph => lowering.batched,
    }
}

/// Bytes of a slot for steps of so many bytes of words.
pub(super) fn slot(words: usize) -> usize {
    words.next_multiple_of(ALIGN) + BESIDES
}

impl<B: Backend> Ring<B> {
    /// None.
    pub(super) fn none() -> Ring<B> {
        Ring { slots: vec![], next: 0 }
    }

    /// Of three slots for steps of so many bytes of words.
    pub(super) fn new(backend: &B, words: usize) -> Result<Ring<B>> {
        let slot = |_| {
            let memory = backend.mailbox(slot(words) / 4)?;
            Ok(Slot { memory, copied: backend.marker()? })
        };
        Ok(Ring { slots: (0..SLOTS).map(slot).collect::<Result<_>>()?, next: 0 })
    }

    /// Replaces the first bytes of some buffers, for the work that comes after; `room` is what a
    /// slot has.
    pub(super) fn send(
        &mut self,
        backend: &B,
        room: usize,
        pieces: &[(&B::Buffer, &[u8])],
    ) -> Result<()> {
        let pieces = || pieces.iter().filter(|(_, bytes)| !bytes.is_empty());
        let needed: usize = pieces().map(|(_, bytes)| bytes.len().next_multiple_of(ALIGN)).sum();
        // What is longer than usual (penalties over a whole context, thousands of biases) is not
        // worth memory of its own.
        let Some(slot) = self.slots.get(self.next).filter(|_| needed <= room) else {
            return pieces().try_for_each(|(to, bytes)| backend.write(to, bytes));
        };
        backend.reach(&slot.copied)?;
        let mut at = 0;
        for (to, bytes) in pieces() {
            backend.poke(&slot.memory, at / 4, bytes)?;
            backend.copy(&backend.part(&slot.memory, at..at + bytes.len())?, to)?;
            at += bytes.len().next_multiple_of(ALIGN);
        }
        backend.mark(&slot.copied)?;
        self.next = (self.next + 1) % self.slots.len();
        Ok(())
    }
}
