//! Exchanges: the points of a step at which its launches stop because another device computes the
//! operations that were [moved](program::Program::offload). Rows move through the host.

use formats::{Error, Result};
use ops::{Rows, Shape};
use program::{Sequence, Step, StepKind, StepMemory};

use super::Backend;
use super::executor::GpuExecutor;
use super::lower::{Key, Slot};
use crate::Executor;

/// One exchange of a class.
pub(super) struct Exchange<B: Backend> {
    number: usize,
    gives: Vec<Rowed<B>>,
    brings: Vec<Rowed<B>>,
}

/// A value of a class.
struct Rowed<B: Backend> {
    buffer: B::Buffer,
    rows: Rows,
    width: usize,
}

impl<B: Backend> Rowed<B> {
    /// Number of its floats in a step.
    fn count(&self, step: &Step<'_>) -> usize {
        self.rows.count(step.tokens.len(), step.outputs.len()) * self.width
    }
}

/// The other device, and the buffers of exchanged values, which are kept so that a step allocates
/// nothing.
pub(super) struct Partner {
    pub(super) executor: Box<dyn Executor>,
    gives: Vec<Vec<f32>>,
    brings: Vec<Vec<f32>>,
    bytes: Vec<u8>,
    /// Stand in for the tokens, which the host may not know.
    tokens: Vec<u32>,
    memory: StepMemory,
}

impl Partner {
    pub(super) fn new(executor: Box<dyn Executor>) -> Partner {
        let (gives, brings, bytes, tokens, memory) = Default::default();
        Partner { executor, gives, brings, bytes, tokens, memory }
    }

    /// Reads the values that an exchange gives, has the partner compute, and writes the values that
    /// it brings.
    fn meet<B: Backend>(
        &mut self,
        backend: &B,
        exchange: &Exchange<B>,
        step: &Step<'_>,
    ) -> Result<()> {
        let Partner { executor, gives, brings, bytes, tokens, memory } = self;
        gives.resize_with(exchange.gives.len(), Vec::new);
        for (from, to) in exchange.gives.iter().zip(&mut *gives) {
            bytes.clear();
            bytes.resize(4 * from.count(step), 0);
            to.clear();
            if !bytes.is_empty() {
                backend.read(&from.buffer, bytes)?;
            }
            let floats = bytes.chunks_exact(4);
            to.extend(floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        tokens.clear();
        tokens.resize(step.tokens.len(), 0);
        let step = Step { tokens, ..*step };
        let other = |step: &Step<'_>| executor.exchange(step, exchange.number, gives, brings);
        memory.part(&step, &[], step.outputs, &[], other)?;
        for (to, from) in exchange.brings.iter().zip(&*brings) {
            bytes.clear();
            bytes.extend(from.iter().flat_map(|x| x.to_le_bytes()));
            if !bytes.is_empty() {
                backend.write(&to.buffer, bytes)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> GpuExecutor<B> {
    /// Resolves the buffers of an exchange for a class.
    pub(super) fn bind_exchange(
        &self,
        number: usize,
        [gives, brings]: [&[(Slot, Shape)]; 2],
        key: &Key,
    ) -> Result<Exchange<B>> {
        let one = |(slot, shape): &(Slot, Shape)| {
            let buffer = self.buffer(slot, key)?;
            Ok(Rowed { buffer, rows: shape.rows, width: shape.width })
        };
        let all = |values: &[(Slot, Shape)]| values.iter().map(one).collect::<Result<Vec<_>>>();
        Ok(Exchange { number, gives: all(gives)?, brings: all(brings)? })
    }

    /// Runs an exchange with the partner.
    pub(super) fn meet(&mut self, exchange: &Exchange<B>, step: &Step<'_>) -> Result<()> {
        let none = || Error::new("exchange", "a device for the operations that were moved", "none");
        self.partner.as_mut().ok_or_else(none)?.meet(&*self.backend, exchange, step)
    }
}

/// Calls `f` with a step of one decode row, as far as the partner needs it.
pub(super) fn one_row<T>(position: usize, f: impl FnOnce(&Step<'_>) -> T) -> T {
    let sequences = &[Sequence::new(1, position, &[])];
    f(&Step { kind: StepKind::Decode, tokens: &[0], sequences, outputs: &[0], input: &[] })
}
