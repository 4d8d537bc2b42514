//! The profile of a step on a GPU: each launch timed by the device's clock, summed by operation.
//!
//! Timed launches do not overlap, so that together they take longer than an untimed step.

use cpu_kernels::matmul::Unit;
use formats::{Encoding, Result};
use ops::Rows;
use program::{BLOCK_TOKENS, Node, Step, WeightId};
use tile::types::Scalar;

use super::Backend;
use super::arena::Layout;
use super::executor::GpuExecutor;
use super::kv;
use super::lower::Key;
use super::peaks;
use super::run::Staged;
use crate::work::{self, Costs};
use crate::{ComputePeaks, Peaks, Profile, Ticket, Timing};

/// A class's launches, each with the number of its node, or `None`.
pub(super) struct Timed<B: Backend> {
    launches: Vec<B::Launch>,
    nodes: Vec<Option<usize>>,
}

impl<B: Backend> GpuExecutor<B> {
    /// Replays a step launch by launch; `None`, with nothing replayed, if the device cannot time
    /// launches.
    ///
    /// # Errors
    /// As an untimed replay.
    pub(super) fn replay_timed(
        &mut self,
        step: &Step<'_>,
        ticket: Ticket,
    ) -> Result<Option<Profile>> {
        self.chooser.outcomes.begin(ticket);
        step.sequences.iter().for_each(|sequence| self.chooser.end(sequence.slot));
        self.prepare(step)?;
        let wanted = self.key(step);
        let (key, mut class) = self.class(&wanted)?;
        let timed = match class.timed.take() {
            Some(timed) => timed,
            None => self.timed(&key)?,
        };
        self.stage(&class, step, Staged::Nothing)?;
        let Some(seconds) = self.backend.time(&timed.launches)? else { return Ok(None) };
        self.note_results(&class, step.tokens.len(), step.outputs.len());
        let profile = self.profile(step, &timed, &seconds);
        class.timed = Some(timed);
        self.keep(key, class);
        Ok(Some(profile))
    }

    /// Measures peak compute throughput.
    ///
    /// # Errors
    /// As [`peaks::floats`] and [`peaks::products`].
    pub(super) fn peaks(&self) -> Result<ComputePeaks> {
        let (backend, wide) = (&*self.backend, self.lowering.wide);
        let used = Peaks {
            isa: backend.about().name,
            bytes_dot: 0.0,
            narrow_dot: 0.0,
            tiles: if wide == Scalar::F32 { 0.0 } else { peaks::products(backend, wide)? },
            floats: peaks::floats(backend)?,
        };
        Ok(ComputePeaks { cores: backend.about().threads, used, best: used })
    }

    /// The launches of a class, bound one by one.
    fn timed(&mut self, key: &Key) -> Result<Timed<B>> {
        let layout = Layout::new(&self.lowering, key.kind, key.tokens, key.outputs);
        let (steps, nodes) = self.lowering.launches(key, &layout, &mut self.kernels)?;
        Ok(Timed { launches: self.bind(&steps, key)?, nodes })
    }

    fn profile(&self, step: &Step<'_>, timed: &Timed<B>, seconds: &[f64]) -> Profile {
        let lowering = &self.lowering;
        let matrix = |weight: WeightId, _: Rows| {
            lowering.formats[weight.0]?;
            let shape = &lowering.program.weights[weight.0].shape;
            let (bytes, rows) = (self.weights[weight.0].bytes, shape.first().copied().unwrap_or(1));
            let exact = lowering.wide == Scalar::F32;
            Some(work::Matrix {
                bytes,
                row_bytes: bytes / rows.max(1),
                elements: shape.iter().product(),
                unit: if exact { Unit::Floats } else { Unit::Tiles },
            })
        };
        let program = &lowering.program;
        let position =
            |layer: usize| kv::block_bytes(lowering.cache, &program.layers[layer]) / BLOCK_TOKENS;
        let groups = &lowering.groups[..];
        let costs = Costs { program, groups, matrix: &matrix, position: &position };
        let mut took = vec![0.0; program.nodes.len()];
        for (node, seconds) in timed.nodes.iter().zip(seconds) {
            node.iter().for_each(|node| took[*node] += seconds);
        }
        let ran = program.nodes.iter().zip(&took).filter(|(_, seconds)| **seconds > 0.0);
        let operations: Vec<Timing> = ran
            .map(|(node, &seconds)| Timing {
                name: work::name(program, node),
                format: self.format(node),
                work: costs.of(step, node),
                seconds,
                busy: seconds,
            })
            .collect();
        let all: f64 = seconds.iter().sum();
        Profile { barriers: all - took.iter().sum::<f64>(), operations, seconds: all }
    }

    /// The encoding of a node's matrices in memory, if it has any and all are encoded alike.
    fn format(&self, node: &Node) -> Option<Encoding> {
        let mut all = node.weights.iter().filter_map(|w| self.weights[w.0].encoding);
        let first = all.next()?;
        all.all(|encoding| encoding == first).then_some(first)
    }
}
