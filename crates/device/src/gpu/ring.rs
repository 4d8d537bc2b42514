//! A ring of pinned slots that carry step arguments to the device while earlier steps still run.
//!
//! The arguments of each step are written to one of three slots and copied, in step order, to the
//! words that kernels read. The host can thus prepare two steps ahead of the device; it waits only
//! for a slot whose last copies are not done, which the slot's event tells.
//!
//! Without slots, arguments are written directly, which waits until the device is idle.

use formats::Result;

use super::lower::Lowering;
use super::{Backend, Dispatch};

/// Steps whose arguments can be in flight.
pub(super) const SLOTS: usize = 3;
/// Bytes of a slot for the inputs of sampling beside a step's words: tokens that penalties look
/// back on, and biases.
const BESIDES: usize = 4096;
/// Alignment of pieces in a slot.
const ALIGN: usize = 64;

/// The slots, if there are any.
pub(super) struct Ring<B: Backend> {
    slots: Vec<Slot<B>>,
    /// The slot to fill next.
    next: usize,
}

struct Slot<B: Backend> {
    memory: B::Buffer,
    /// The event after the last copy from it.
    copied: B::Event,
}

/// Whether a ring is used. Graphs use one, too, for steps of many sequences, whose words the host
/// writes in every step.
pub(super) fn wanted(lowering: &Lowering, dispatch: Dispatch) -> bool {
    match dispatch {
        Dispatch::Eager => false,
        Dispatch::Arguments => true,
        Dispatch::Graph => lowering.batched,
    }
}

/// Size of one slot, for steps with `words` bytes of words and `masks` bytes of masks.
pub(super) fn slot(words: usize, masks: usize) -> usize {
    words.next_multiple_of(ALIGN) + masks.next_multiple_of(ALIGN) + BESIDES
}

impl<B: Backend> Ring<B> {
    /// A ring without slots.
    pub(super) fn none() -> Ring<B> {
        Ring { slots: vec![], next: 0 }
    }

    /// A ring of three slots of `room` bytes.
    pub(super) fn new(backend: &B, room: usize) -> Result<Ring<B>> {
        let slot = |_| {
            let memory = backend.pinned(room / 4)?;
            Ok(Slot { memory, copied: backend.event()? })
        };
        Ok(Ring { slots: (0..SLOTS).map(slot).collect::<Result<_>>()?, next: 0 })
    }

    /// Overwrites the first bytes of some buffers before any later work. `room` is the size of a
    /// slot.
    pub(super) fn send(
        &mut self,
        backend: &B,
        room: usize,
        pieces: &[(&B::Buffer, &[u8])],
    ) -> Result<()> {
        let pieces = || pieces.iter().filter(|(_, bytes)| !bytes.is_empty());
        let needed: usize = pieces().map(|(_, bytes)| bytes.len().next_multiple_of(ALIGN)).sum();
        // Rare long pieces (penalties over a whole context, thousands of biases) do not justify
        // larger slots.
        let Some(slot) = self.slots.get(self.next).filter(|_| needed <= room) else {
            return pieces().try_for_each(|(to, bytes)| backend.write(to, bytes));
        };
        backend.wait_event(&slot.copied)?;
        let mut at = 0;
        for (to, bytes) in pieces() {
            backend.write_pinned(&slot.memory, at / 4, bytes)?;
            backend.copy(&backend.part(&slot.memory, at..at + bytes.len())?, to)?;
            at += bytes.len().next_multiple_of(ALIGN);
        }
        backend.record_event(&slot.copied)?;
        self.next = (self.next + 1) % self.slots.len();
        Ok(())
    }
}
