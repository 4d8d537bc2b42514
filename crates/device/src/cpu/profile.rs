//! What a replay spends where: the time of every node, and the least that it must read and compute.

use super::executor::{Loaded, Weight};
use super::replay::path;
use crate::{Profile, Timing, Work};
use cpu_kernels::matmul::{ROWS, Unit};
use cpu_kernels::team::{SharedSlice, Worker};
use formats::Encoding;
use ops::Rows;
use ops::operation::{Access, CacheUse};
use program::{BLOCK_TOKENS, Node, Step};
use std::time::Instant;

/// What the operation that makes the logits is called, whatever was fused into it.
const HEAD: &str = "head";

/// When a worker began and ended a node, in seconds of the replay; no node takes none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span {
    begin: f64,
    end: f64,
}

/// Where the workers of a timed replay note their spans: `[nodes][workers]`.
pub(super) struct Spans<'a> {
    origin: Instant,
    slots: SharedSlice<'a, Span>,
}

impl<'a> Spans<'a> {
    /// Times from now on, into a slot for each node and worker.
    pub(super) fn new(slots: &'a mut [Span]) -> Self {
        slots.fill(Span::default());
        Spans { origin: Instant::now(), slots: SharedSlice::new(slots) }
    }

    /// Seconds of the replay so far.
    pub(super) fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Notes that this worker did node `index` from `begin` until now.
    pub(super) fn note(&self, index: usize, worker: &Worker<'_>, begin: f64) {
        let at = index * worker.count + worker.index;
        // SAFETY: every worker has a slot of its own for each node.
        unsafe { self.slots.slice_mut(at..at + 1)[0] = Span { begin, end: self.now() } };
    }
}

/// The replay that left these spans and took so many seconds. `blocks`: the bytes of each layer in a block of cache.
pub(super) fn profile(
    loaded: &Loaded,
    blocks: &[usize],
    step: &Step<'_>,
    spans: &[Span],
    seconds: f64,
) -> Profile {
    let mut operations = Vec::with_capacity(loaded.program.nodes.len());
    let (mut barriers, mut last) = (0.0, None);
    let logits = loaded.program.results.first();
    for (node, spans) in loaded.program.nodes.iter().zip(spans.chunks(loaded.team.count())) {
        let begin = spans.iter().map(|s| s.begin).fold(f64::MAX, f64::min);
        let end = spans.iter().map(|s| s.end).fold(0.0, f64::max);
        if end == 0.0 {
            continue;
        }
        barriers += last.map_or(0.0, |last| begin - last);
        last = Some(end);
        operations.push(Timing {
            name: if logits.is_some_and(|value| node.outputs.contains(value)) {
                HEAD
            } else {
                node.op.name()
            },
            format: format(loaded, node),
            work: work(loaded, blocks, step, node),
            seconds: end - begin,
            busy: spans.iter().map(|s| s.end - s.begin).sum::<f64>() / spans.len() as f64,
        });
    }
    Profile { operations, barriers, seconds }
}

/// How a node's matrices are encoded, where it has any and all are encoded alike.
fn format(loaded: &Loaded, node: &Node) -> Option<Encoding> {
    let mut all = node.weights.iter().filter_map(|w| match &loaded.weights[w.0] {
        Weight::Matrix(matrix) => Some(matrix.encoding()),
        Weight::Vector(_) => None,
    });
    let first = all.next()?;
    all.all(|encoding| encoding == first).then_some(first)
}

/// What a node has to read and compute, whatever the device does besides.
fn work(loaded: &Loaded, blocks: &[usize], step: &Step<'_>, node: &Node) -> Work {
    let tokens = step.tokens.len();
    let shape = |value: &program::ValueId| loaded.program.values[value.0];
    let rows = |rows: Rows| rows.count(tokens, step.outputs.len());
    let mut work = Work::default();
    let shapes: Vec<ops::Shape> = node.inputs.iter().map(shape).collect();
    let mixture = node.op.experts(&shapes);
    for weight in &node.weights {
        let Weight::Matrix(matrix) = &loaded.weights[weight.0] else { continue };
        if node.op.gathers().is_some() {
            let row = matrix.resident_bytes() / (matrix.panels() * ROWS).max(1);
            work.bytes += (row * tokens) as u64;
            continue;
        }
        let of = node.inputs.first().map_or(Rows::Tokens, |x| shape(x).rows);
        let (share, each) = mixture.map_or((1.0, 1.0), |(used, count)| {
            let part = used as f64 / count as f64;
            // A row reads the experts that it goes through; of many rows, each adds what those before it left.
            (1.0 - (1.0 - part).powf(rows(of) as f64), part)
        });
        let operations = (2 * rows(of) * matrix.rows() * matrix.cols()) as f64 * each;
        let operations = operations as u64;
        work.bytes += (matrix.resident_bytes() as f64 * share) as u64;
        *match matrix.unit(loaded.isa, path(step.kind, of)) {
            Unit::Bytes => &mut work.bytes_dot,
            Unit::Narrow => &mut work.narrow_dot,
            Unit::Tiles => &mut work.tiles,
            Unit::Floats => &mut work.floats,
        } += operations;
    }
    if let Some(CacheUse { layer, access }) = node.op.cache()
        && !matches!(access, Access::Append { .. })
    {
        for sequence in step.sequences {
            let oldest = sequence.tables[loaded.groups[layer]].oldest;
            let positions: Vec<u32> = (sequence.start..sequence.end()).collect();
            let cached = node.op.cached_work(&positions, oldest);
            work.bytes += match access {
                // A state is read once, whatever the number of rows.
                Access::Carry { elements, .. } => (elements * size_of::<f32>()) as u64,
                _ => (cached.positions * (blocks[layer] / BLOCK_TOKENS)) as u64,
            };
            work.floats += cached.operations;
        }
    } else if work.bytes == 0 {
        // A selection reads the rows that it writes.
        let out = node.outputs.first().map(|value| shape(value).rows);
        let read =
            |value| rows(out.unwrap_or(shape(value).rows)) * shape(value).width * size_of::<f32>();
        work.bytes = node.inputs.iter().map(read).sum::<usize>() as u64;
    }
    work
}
