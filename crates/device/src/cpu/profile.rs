//! The profile of a replay: the time of every node, beside the least that it must read and compute.

use super::executor::Loaded;
use super::products::path;
use super::weights::Weight;
use crate::work::{self, Costs};
use crate::{Profile, Timing};
use cpu_kernels::matmul::ROWS;
use cpu_kernels::team::{SharedSlice, Worker};
use formats::Encoding;
use program::{BLOCK_TOKENS, Node, Step, WeightId};
use std::slice::Chunks;
use std::time::Instant;

/// When a worker began and ended a node, in seconds since the start of the replay. An `end` of 0
/// means that the node did not run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span {
    begin: f64,
    end: f64,
}

/// Where the workers of a timed replay record their spans: `[nodes][workers]`.
pub(super) struct Spans<'a> {
    origin: Instant,
    slots: SharedSlice<'a, Span>,
}

impl<'a> Spans<'a> {
    /// Starts the clock, with one slot for each node and worker.
    pub(super) fn new(slots: &'a mut [Span]) -> Self {
        slots.fill(Span::default());
        Spans { origin: Instant::now(), slots: SharedSlice::new(slots) }
    }

    /// Seconds since the start of the replay.
    pub(super) fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Records that this worker computed node `index` from `begin` until now.
    pub(super) fn note(&self, index: usize, worker: &Worker<'_>, begin: f64) {
        let at = index * worker.count + worker.index;
        // SAFETY: every worker has a slot of its own for each node.
        unsafe { self.slots.slice_mut(at..at + 1)[0] = Span { begin, end: self.now() } };
    }
}

/// The profile of a replay that took `seconds` and left these spans of its workers for each node.
/// `blocks` holds the bytes of
/// each layer in one cache block.
pub(super) fn profile(
    loaded: &Loaded,
    blocks: &[usize],
    step: &Step<'_>,
    spans: Chunks<'_, Span>,
    seconds: f64,
) -> Profile {
    let mut operations = Vec::with_capacity(loaded.program.nodes.len());
    let (mut barriers, mut last) = (0.0, None);
    let matrix = |weight: WeightId, rows| match &*loaded.weights[weight.0] {
        Weight::Vector(_) => None,
        Weight::Matrix(matrix) => Some(work::Matrix {
            bytes: matrix.resident_bytes(),
            row_bytes: matrix.resident_bytes() / (matrix.panels() * ROWS).max(1),
            elements: matrix.rows() * matrix.cols(),
            unit: matrix.unit(loaded.isa, path(step.kind, rows)),
        }),
    };
    let position = |layer: usize| blocks[layer] / BLOCK_TOKENS;
    let (program, groups) = (&loaded.program, &loaded.groups[..]);
    let costs = Costs { program, groups, matrix: &matrix, position: &position };
    for (node, spans) in loaded.program.nodes.iter().zip(spans) {
        let begin = spans.iter().map(|s| s.begin).fold(f64::MAX, f64::min);
        let end = spans.iter().map(|s| s.end).fold(0.0, f64::max);
        if end == 0.0 {
            continue;
        }
        barriers += last.map_or(0.0, |last| begin - last);
        last = Some(end);
        operations.push(Timing {
            name: work::name(&loaded.program, node),
            format: format(loaded, node),
            work: costs.of(step, node),
            seconds: end - begin,
            busy: spans.iter().map(|s| s.end - s.begin).sum::<f64>() / spans.len() as f64,
        });
    }
    Profile { operations, barriers, seconds }
}

/// The encoding of a node's matrices, if it has any and all are encoded alike.
fn format(loaded: &Loaded, node: &Node) -> Option<Encoding> {
    let mut all = node.weights.iter().filter_map(|w| match &*loaded.weights[w.0] {
        Weight::Matrix(matrix) => Some(matrix.encoding()),
        Weight::Vector(_) => None,
    });
    let first = all.next()?;
    all.all(|encoding| encoding == first).then_some(first)
}
