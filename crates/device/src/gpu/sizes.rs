//! The device memory of an executor: computed before anything is allocated, and allocated by the
//! same figures.

use formats::Result;
use ops::packed::Format;
use program::{Limits, StepKind};
use tile::types::Scalar;

use super::arena::{Layout, decode_bucket};
use super::lower::{Lowering, Room, SEATS, Sampling, Scratch, Words, mask_words};
use super::run::STEPS;
use super::{Backend, Dispatch, kv, ring, weights};
use crate::{ExecutorOptions, Plan};

/// Bytes of everything but weights and cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) arena: usize,
    /// The words of a step that the host writes.
    pub(super) words: usize,
    /// The words of each run.
    pub(super) seat: usize,
    /// One slot of the ring.
    pub(super) slot: usize,
    pub(super) scratch: Scratch,
    /// Length of the array of numbers 0, 1, 2, .., of four bytes each.
    pub(super) numbers: usize,
    /// The buffer that matrices are unpacked to.
    pub(super) unpacked: usize,
}

/// Width of a block table, in blocks. A table that does not wrap is rounded up, so that its class
/// serves longer contexts.
pub(super) fn stride(blocks: usize, wraps: bool) -> usize {
    if wraps { blocks } else { blocks.next_power_of_two().max(16) }
}

/// Most rows of a decode step, if the lowering is for many sequences.
pub(super) fn decode_rows(limits: &Limits) -> usize {
    decode_bucket((2 * limits.sequences).max(64)).min(limits.tokens)
}

/// Initial room for sampling, which usual settings do not exceed.
pub(super) fn room(lowering: &Lowering, limits: &Limits) -> Room {
    let history = 2 * STEPS;
    match lowering.batched {
        true => Room { rows: limits.outputs, slots: limits.slots, history, biases: 16 },
        false => Room { rows: 1, slots: 0, history, biases: 1 },
    }
}

/// The part of a GPU's memory that everything else leaves free, of which unpacked copies of
/// matrices may take one.
const LEFT: usize = 4;

/// Most bytes of a step's masks.
pub(super) fn masks(lowering: &Lowering, limits: &Limits) -> usize {
    let rows = if lowering.batched { limits.outputs } else { 1 };
    let words = match lowering.chooses() {
        true => mask_words(lowering.program.shape(lowering.program.results[0]).width),
        false => 0,
    };
    4 * rows * words
}

impl Sizes {
    pub(super) fn new(lowering: &Lowering, limits: &Limits, dispatch: Dispatch) -> Sizes {
        let arena = |kind, tokens| Layout::new(lowering, kind, tokens, limits.outputs).bytes;
        let vendors = lowering.facts.products.is_some() && lowering.half != Scalar::F32;
        let (elements, rows) = if vendors { lowering.unpacked } else { (1, 1) };
        let wide = lowering.wide;
        let packed = lowering.formats.iter().flatten().any(|f| *f != Format::Dense(wide));
        // A table is as wide as its group has blocks, rounded up.
        let tables = || limits.blocks.iter().map(|blocks| stride(*blocks, false));
        let adapted = lowering.adapters.count > 0;
        let words = |tokens, sequences| {
            let outputs = limits.outputs.min(tokens);
            Words::new([lowering.batched, adapted], tokens, outputs, sequences, tables()).bytes
        };
        let decode = if lowering.batched { decode_rows(limits) } else { 1 };
        let words = words(limits.tokens, limits.sequences).max(words(decode, decode));
        Sizes {
            arena: arena(StepKind::Prompt, limits.tokens).max(arena(StepKind::Decode, decode)),
            words,
            seat: match lowering.batched {
                true => 4,
                false => Words::new([false, adapted], 1, 1, 1, tables()).bytes,
            },
            slot: match ring::wanted(lowering, dispatch) {
                true => ring::slot(words, masks(lowering, limits)),
                false => 0,
            },
            scratch: lowering.scratch(limits.tokens, decode_rows(limits), &limits.blocks),
            numbers: rows.max(limits.tokens),
            unpacked: if packed { wide.bytes() * elements } else { 4 },
        }
    }

    /// All but the arena.
    pub(super) fn working(&self) -> usize {
        let steps = self.words + SEATS * self.seat + ring::SLOTS * self.slot;
        steps + self.scratch.iter().sum::<usize>() + 4 * self.numbers + self.unpacked
    }
}

/// Memory that the Program takes with a full context.
///
/// # Errors
/// A device that does not report its free memory.
pub(super) fn plan<B: Backend>(
    backend: &B,
    lowering: &Lowering,
    options: &ExecutorOptions,
    wanted: &weights::Stored<'_, B>,
) -> Result<Plan> {
    let program = &lowering.program;
    let limits = options.limits(program);
    let sizes = Sizes::new(lowering, &limits, options.dispatch);
    let context = |layer: usize| options.context.get(lowering.groups[layer]).copied().unwrap_or(1);
    let idle = lowering.idle_blocks();
    let blocks = |layer: usize| context(layer) + idle;
    let most = |layer: usize| {
        let most = options.blocks.get(lowering.groups[layer]).copied().unwrap_or(1);
        most.max(context(layer)).saturating_add(idle)
    };
    let layers = || program.layers.iter().enumerate();
    let copied = |blocks: &dyn Fn(usize) -> usize| {
        let copied = layers().map(|(i, layer)| kv::copied(options.cache_type, layer, blocks(i)));
        copied.max().filter(|_| backend.page().is_none()).unwrap_or(0)
    };
    let cache = |blocks: &dyn Fn(usize) -> usize| {
        let layer = |(i, layer)| {
            // One block, and that of rows of no sequence, are there from the start.
            let page = backend.page().filter(|_| most(i) > 1 + idle).unwrap_or(1);
            kv::bytes(options.cache_type, layer, blocks(i), page)
        };
        layers().map(layer).fold(0, usize::saturating_add)
    };
    let one = cache(&blocks).saturating_add(copied(&blocks));
    let all = cache(&most).saturating_add(copied(&most));
    let rotations: usize = lowering.ropes.iter().map(|rope| 4 * rope.frequencies.len()).sum();
    let sampling: usize = match lowering.chooses() {
        false => 0,
        true => {
            let vocab = program.shape(program.results[0]).width;
            let room = room(lowering, &limits);
            let words = |part: &Sampling| part.copies(room) * part.words(vocab, room);
            4 * Sampling::ALL.iter().map(words).sum::<usize>()
        }
    };
    let mut plan = Plan {
        host: false,
        copies: 0,
        weights: weights::missing::<B>(program, &lowering.formats, &lowering.joined, wanted)
            + lowering.adapters.bytes(),
        cache: cache(&blocks),
        pool: all.saturating_sub(one),
        arena: sizes.arena,
        working: sizes.working() + rotations + sampling + copied(&blocks),
        active: backend.usage().map_or(0, |usage| usage.active),
        free: backend.free()?,
    };
    let copies = if options.copies { lowering.copies() } else { 0 };
    let left = plan.free.map_or(0, |free| free.saturating_sub(plan.most()));
    if copies <= left / LEFT {
        plan.copies = copies;
        plan.weights += copies;
    }
    Ok(plan)
}
