//! Adapters on a GPU. Every seat's factors have memory from the start, so that bound and recorded
//! launches stay valid when adapters come and go.

use formats::{Error, Result};
use program::{AdapterFactors, Step};

use super::Backend;
use super::executor::GpuExecutor;
use super::lower::{Adapted, Factor, Lowering};

/// The factors of all seats.
pub(super) struct Adapters<B: Backend> {
    /// One buffer for each factor of each group of sites, indexed by [`Factor`].
    buffers: Vec<[B::Buffer; 4]>,
    /// For each seat: `None` if it is empty, else whether its adapter has gains.
    seated: Vec<Option<bool>>,
}

impl<B: Backend> Adapters<B> {
    /// Allocates the seats that the lowering is made for.
    ///
    /// # Errors
    /// Too little memory.
    pub(super) fn new(backend: &B, lowering: &Lowering) -> Result<Self> {
        let room = &lowering.adapters;
        let mut buffers = Vec::with_capacity(room.groups.len());
        for group in &room.groups {
            let [a, b, c, d] = Factor::ALL.map(|factor| {
                let (elements, bytes) = group.size(factor);
                backend.buffer(room.count * elements * bytes)
            });
            buffers.push([a?, b?, c?, d?]);
        }
        Ok(Adapters { buffers, seated: vec![None; room.count] })
    }

    /// One factor of a group, for all seats.
    pub(super) fn buffer(&self, group: usize, factor: Factor) -> B::Buffer {
        self.buffers[group][factor as usize].clone()
    }

    /// The class of these rows with respect to adapters.
    pub(super) fn class(&self, step: &Step<'_>) -> Adapted {
        let seats = step.sequences.iter().map(|sequence| sequence.adapter);
        let gains =
            seats.filter_map(|seat| self.seated.get((seat as usize).checked_sub(1)?).copied());
        gains.fold(Adapted::No, |class, seated| match (class, seated) {
            (Adapted::Gains, _) | (_, Some(true)) => Adapted::Gains,
            _ => Adapted::Plain,
        })
    }

    /// Checks that an adapter is loaded on every seat that the step names.
    pub(super) fn check(&self, step: &Step<'_>) -> Result<()> {
        let empty = |adapter: u32| {
            let seat = (adapter as usize).checked_sub(1);
            seat.is_some_and(|seat| self.seated.get(seat).is_none_or(Option::is_none))
        };
        match step.sequences.iter().find(|sequence| empty(sequence.adapter)) {
            None => Ok(()),
            Some(sequence) => {
                let found = format!("none on seat {}", sequence.adapter);
                Err(Error::new("step", "an adapter that was loaded", found))
            }
        }
    }
}

impl<B: Backend> GpuExecutor<B> {
    /// See [`Executor::seat`](crate::Executor::seat). A refused adapter leaves steps in flight
    /// untouched.
    pub(super) fn put_adapter(
        &mut self,
        seat: u32,
        adapter: Option<&AdapterFactors>,
    ) -> Result<()> {
        let room = &self.lowering.adapters;
        let index = (seat as usize).wrapping_sub(1);
        if index >= room.count {
            let expected = format!("one of {} seats for adapters", room.count);
            return Err(Error::new("adapter", expected, format!("seat {seat}")));
        }
        let Some(adapter) = adapter else {
            self.adapters.seated[index] = None;
            return Ok(());
        };
        adapter.check_room(&self.lowering.program.sites, room.rank)?;
        self.attempt(|executor| executor.write_adapter(index, adapter))
    }

    fn write_adapter(&mut self, index: usize, adapter: &AdapterFactors) -> Result<()> {
        let (room, sites) = (&self.lowering.adapters, &self.lowering.program.sites);
        let gains = adapter.deltas.values().any(|delta| delta.gain.is_some());
        // The seat is empty while its factors are partly written.
        self.adapters.seated[index] = None;
        let mut bytes = Vec::new();
        for (group, buffers) in room.groups.iter().zip(&self.adapters.buffers) {
            for (factor, buffer) in Factor::ALL.into_iter().zip(buffers) {
                let (elements, size) = group.size(factor);
                bytes.clear();
                bytes.resize(elements * size, 0);
                for (place, site, first) in group.sites() {
                    if let Some(delta) = adapter.deltas.get(&sites[site].name) {
                        group.put(factor, (place, first), delta, &mut bytes);
                    }
                }
                let own = index * bytes.len()..(index + 1) * bytes.len();
                self.backend.write(&self.backend.part(buffer, own)?, &bytes)?;
            }
        }
        self.adapters.seated[index] = Some(gains);
        Ok(())
    }
}
