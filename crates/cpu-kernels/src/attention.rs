//! Attention over a cache in blocks: `softmax(q k^T * scale) v` with a running softmax, so that no
//! score matrix is ever stored (Dao et al., FlashAttention, 2022; Milakov and Gimelshein, 2018).
//! [`run`] is one step of a team's job. A decode query reads the cache once, at memory speed: its
//! keys are split into chunks of [`CHUNK`], whose results are merged in a fixed order, so that the
//! result depends neither on the number of workers nor on the rest of the batch. Prompt queries are
//! blocked: a tile of keys and values is converted once and multiplied with all query heads of a
//! group and a block of tokens. All query heads of a KV head share every read.

mod cache;
mod decode;
pub mod indexer;
mod prefill;
mod softmax;
mod store;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use cache::{Geometry, LayerCache};

use super::isa::Isa;
use super::math::lanes::WIDEST;
use super::team::{SharedSlice, Worker};
use formats::CacheType;
use std::ops::Range;

/// Keys that a decode step processes as one work item; items begin at multiples of it.
pub const CHUNK: usize = 256;

/// Keys whose scores are in flight at once; divides [`CHUNK`].
const TILE: usize = 64;

/// The same for the tile unit, which is more efficient with deeper products.
const DEEP: usize = 2 * TILE;

/// Rows (tokens times heads of a group) of a prefill block, unless one group has more.
const ROWS: usize = 192;

/// The longest head: latents of 512 elements, and 64 that turn.
pub const MAX_HEAD_DIM: usize = 576;

/// Distance between the rows of queries in scratch: not a power of two, which would map them to few
/// cache sets.
const Q_STRIDE: usize = MAX_HEAD_DIM + WIDEST;

/// Distance between the rows of scores in scratch.
const P_STRIDE: usize = DEEP + WIDEST;

/// The parameters of attention, independent of its operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads: a multiple of `groups`. Query head `h` is of group `h / (heads / groups)`.
    pub heads: usize,
    /// Groups of query heads that share every read of a KV head: as many as there are KV heads, or
    /// a multiple where several groups read one ([`AttentionShape::split`]).
    pub groups: usize,
    /// Elements of a head, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Gemma 2's limit: a score `s` becomes `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// A query at `p` sees no key at or before `p - window`.
    pub window: Option<usize>,
    /// Whether the window does not slide: a query sees the positions of its own chunk of `window`,
    /// up to itself.
    pub chunked: bool,
}

/// The queries of one sequence, at consecutive positions. Their keys and values are in the cache
/// already.
#[derive(Debug, Clone, Copy)]
pub struct QuerySequence<'a> {
    /// Whether this is a single decode query, whose keys are split into chunks.
    pub decodes: bool,
    /// The session's blocks: position `p` is in block `table[(p / block_tokens) % table.len()]`.
    pub table: &'a [u32],
    /// Row of its first query in `q` and `out`.
    pub row: usize,
    /// Number of queries.
    pub tokens: usize,
    /// Position of the first query.
    pub position: usize,
    /// The lowest position still in the cache: lower ones were overwritten by the ring, or never
    /// stored.
    pub oldest: usize,
}

/// One attention step of one layer.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall<'a> {
    /// The geometry.
    pub shape: AttentionShape,
    /// The layer's keys and values.
    pub cache: &'a LayerCache,
    /// The batch.
    pub sequences: &'a [QuerySequence<'a>],
    /// Queries: row `r` is `q[r * q_stride..][..heads * head_dim]`.
    pub q: &'a [f32],
    /// Distance between rows of `q`.
    pub q_stride: usize,
    /// One more logit per query head in the softmax, without a value (gpt-oss).
    pub sinks: Option<&'a [f32]>,
    /// How much the scores of each query head fall with each position from the query back to the key
    /// (ALiBi), behind the limit.
    pub slopes: Option<&'a [f32]>,
    /// The only positions that each query sees, of those that it could: `[rows, count]`, in
    /// ascending order; negative numbers are none. There are no slopes then.
    pub chosen: Option<ChosenPositions<'a>>,
    /// Whether products of many queries may round both operands to bf16 where that is faster, as
    /// products with quantised weights do.
    pub rounded: bool,
}

/// Positions that were chosen for each query.
#[derive(Debug, Clone, Copy)]
pub struct ChosenPositions<'a> {
    /// Those of row `r` are `positions[r * count..][..count]`.
    pub positions: &'a [f32],
    /// Positions of a row.
    pub count: usize,
}

impl<'a> ChosenPositions<'a> {
    /// Those of a row.
    fn row(&self, row: usize) -> &'a [f32] {
        &self.positions[row * self.count..][..self.count]
    }
}

/// The chosen positions from `start` on.
fn from(chosen: &[f32], start: usize) -> &[f32] {
    &chosen[chosen.partition_point(|position| *position < start as f32)..]
}

impl AttentionShape {
    /// The same with groups cut in parts, where a step has too few work items for `workers`: at
    /// short contexts, of heads that nearly all share one KV head. What is computed is the same, to
    /// the bit. Parts have four heads at least, since each reads the keys and values again.
    pub fn split(self, workers: usize, sequences: &[QuerySequence<'_>]) -> AttentionShape {
        let pieces: usize = sequences.iter().map(|each| pieces(&self, each)).sum();
        let suits = |parts: &usize| self.group().is_multiple_of(*parts);
        let mut parts = (1..=self.group() / 4).filter(suits);
        let enough = |parts: &usize| pieces * self.groups * parts >= 2 * workers;
        let parts = parts.clone().find(enough).or_else(|| parts.next_back()).unwrap_or(1);
        AttentionShape { groups: self.groups * parts, ..self }
    }

    /// Query heads of a group.
    fn group(&self) -> usize {
        self.heads / self.groups
    }

    /// Tokens of a prefill block.
    fn block(&self) -> usize {
        (ROWS / self.group()).max(1)
    }

    /// Elements of a head, rounded up to whole vectors.
    fn width(&self) -> usize {
        self.head_dim.next_multiple_of(WIDEST)
    }

    /// Rows of a worker's own scratch, however groups are cut: whole pairs of tiles for the tile
    /// unit.
    fn rows(&self) -> usize {
        ROWS.max(self.group()).next_multiple_of(2 * WIDEST)
    }

    /// Floats of a worker's own scratch.
    fn work(&self) -> usize {
        let row = Q_STRIDE + P_STRIDE + DEEP + self.width() + 2;
        let floats = self.rows() * row + DEEP * (self.head_dim + self.width());
        floats.next_multiple_of(2 * WIDEST)
    }

    /// Floats of one chunk's result: sums, maximum and weight of every head in a group.
    fn partial(&self) -> usize {
        self.group() * (self.width() + 2)
    }

    /// Floats of scratch that [`run`] needs for a team of `threads`, with at most `decodes` decode
    /// queries over at most `keys` keys each.
    pub fn scratch_len(&self, threads: usize, decodes: usize, keys: usize) -> usize {
        let chunks = if keys > 1 { keys.div_ceil(CHUNK) + 1 } else { 0 };
        WIDEST + threads * self.work() + decodes * self.groups * chunks * self.partial()
    }

    /// How many of these sequences, from the first, fit into `scratch` floats: at least one.
    pub fn fitting(
        &self,
        threads: usize,
        scratch: usize,
        sequences: &[QuerySequence<'_>],
    ) -> usize {
        let mut left = scratch.saturating_sub(threads * self.work());
        let fits = |sequence: &&QuerySequence<'_>| {
            let chunks = if sequence.decodes { chunks(self, sequence).len() } else { 0 };
            let needed = chunks * self.groups * self.partial();
            let fits = needed <= left;
            left = left.saturating_sub(needed);
            fits
        };
        sequences.iter().take_while(fits).count().max(1)
    }
}

/// The positions that a query at `position` sees; never empty if the query's own key is in the
/// cache.
fn visible(
    shape: &AttentionShape,
    sequence: &QuerySequence<'_>,
    position: usize,
) -> std::ops::Range<usize> {
    let first = match shape.window {
        Some(chunk) if shape.chunked => position / chunk.max(1) * chunk,
        Some(window) => (position + 1).saturating_sub(window),
        None => 0,
    };
    first.max(sequence.oldest).min(position)..position + 1
}

/// Writes the queries of a group from a row of `q` to `to`, [`Q_STRIDE`] apart, scaled,
/// and rotated if the cache's keys are.
///
/// # Safety
/// `to` has room for a group.
#[inline(always)]
unsafe fn queries(call: &AttentionCall<'_>, row: usize, group: usize, to: *mut f32) {
    let (heads, dim) = (call.shape.group(), call.shape.head_dim);
    let q = &call.q[row * call.q_stride + group * heads * dim..][..heads * dim];
    for g in 0..heads {
        // SAFETY: the caller's promise.
        let to = unsafe { std::slice::from_raw_parts_mut(to.add(g * Q_STRIDE), dim) };
        for i in 0..dim {
            to[i] = q[g * dim + i] * call.shape.scale;
        }
        if call.cache.geometry().element.rotates() {
            CacheType::rotate(to);
        }
    }
}

/// How the scores of one row of a tile fall.
#[derive(Clone, Copy)]
struct Fall {
    /// With each position.
    slope: f32,
    /// Positions from the query back to the tile's first key; negative if that comes behind it.
    distance: f32,
}

/// Which scores of a row of a tile count, and how they fall.
#[derive(Clone, Copy)]
struct Kept<'a> {
    /// The position of the tile's first key.
    start: usize,
    /// How they fall.
    fall: Option<Fall>,
    /// The only positions that count, where some are chosen.
    chosen: Option<&'a [f32]>,
}

impl<'a> AttentionCall<'a> {
    /// The KV head that a group reads.
    #[inline(always)]
    fn kv_head(&self, group: usize) -> usize {
        group / (self.shape.groups / self.cache.geometry().kv_heads)
    }

    /// The scores that count in the tile that begins at `start`, of a head of row `row`, whose query
    /// is at `position`.
    #[inline(always)]
    fn kept(&self, head: usize, row: usize, position: usize, start: usize) -> Kept<'a> {
        let fall =
            |slopes: &[f32]| Fall { slope: slopes[head], distance: position as f32 - start as f32 };
        let chosen = self.chosen.map(|chosen| chosen.row(row));
        Kept { start, fall: self.slopes.map(fall), chosen }
    }

    /// Whether none of these positions was chosen for a row.
    #[inline(always)]
    fn skips(&self, row: usize, positions: Range<usize>) -> bool {
        self.chosen.is_some_and(|chosen| {
            let next = from(chosen.row(row), positions.start).first();
            next.is_none_or(|next| *next >= positions.end as f32)
        })
    }
}

/// A worker's scratch, cut up. Rows: token-major, the heads of the group inner.
#[derive(Clone, Copy)]
struct Work {
    /// Queries times scale: `[rows][Q_STRIDE]`.
    q: *mut f32,
    /// Scores, then probabilities: `[rows][P_STRIDE]`.
    p: *mut f32,
    /// Sums of values: `[rows][width]`.
    sums: *mut f32,
    /// The greatest score of every row so far.
    top: *mut f32,
    /// The sum of every row's probabilities so far, relative to `top`.
    weight: *mut f32,
    /// A tile of keys: `[head_dim][TILE]`, or in the tile unit's layout.
    keys: *mut f32,
    /// A tile of values: `[TILE][width]`, or in the tile unit's layout.
    values: *mut f32,
    #[cfg(target_arch = "x86_64")]
    tiles: Tiles,
}

/// Additional scratch of the tile unit.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Tiles {
    /// Probabilities in the tile unit's layout.
    weights: *mut f32,
    /// Number of rows.
    rows: usize,
}

impl Work {
    /// Cuts up `scratch` of [`AttentionShape::work`] floats.
    fn new(shape: &AttentionShape, scratch: &mut [f32]) -> Work {
        let rows = shape.rows();
        let mut rest = scratch;
        let mut take =
            |n: usize| rest.split_off_mut(..n).map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr);
        Work {
            keys: take(DEEP * shape.head_dim),
            values: take(DEEP * shape.width()),
            #[cfg(target_arch = "x86_64")]
            tiles: Tiles { weights: take(rows * DEEP), rows },
            sums: take(rows * shape.width()),
            q: take(rows * Q_STRIDE),
            p: take(rows * P_STRIDE),
            top: take(rows),
            weight: take(rows),
        }
    }
}

/// A work item.
#[derive(Clone, Copy)]
enum Unit {
    /// One chunk of one query's keys: the sequence, the group, and the chunk counted from the first
    /// visible one.
    Decode { sequence: usize, group: usize, chunk: usize },
    /// A block of queries: the sequence, the group, the block.
    Prefill { sequence: usize, group: usize, block: usize },
}

/// The chunks that contain the keys visible to `sequence`'s one query.
fn chunks(shape: &AttentionShape, sequence: &QuerySequence<'_>) -> std::ops::Range<usize> {
    let visible = visible(shape, sequence, sequence.position);
    visible.start / CHUNK..visible.end.div_ceil(CHUNK)
}

/// Work items per group of a sequence.
fn pieces(shape: &AttentionShape, sequence: &QuerySequence<'_>) -> usize {
    if sequence.decodes {
        chunks(shape, sequence).len()
    } else {
        sequence.tokens.div_ceil(shape.block())
    }
}

/// Work item `index` of the batch.
fn unit(call: &AttentionCall<'_>, mut index: usize) -> Unit {
    for (sequence, each) in call.sequences.iter().enumerate() {
        let pieces = pieces(&call.shape, each);
        if index < pieces * call.shape.groups {
            // Group by group, so that data shared by the items of a group stays in cache.
            let (group, piece) = (index / pieces, index % pieces);
            return if each.decodes {
                Unit::Decode { sequence, group, chunk: piece }
            } else {
                // The last block sees the most keys: begin with it, so that small ones fill the
                // gaps at the end.
                Unit::Prefill { sequence, group, block: pieces - 1 - piece }
            };
        }
        index -= pieces * call.shape.groups;
    }
    unreachable!("a unit beyond the batch")
}

/// The index of the first chunk result of a decode sequence; its results are stored as
/// `[group][chunk]`.
fn first_partial(call: &AttentionCall<'_>, sequence: usize) -> usize {
    let split = call.sequences[..sequence].iter().filter(|each| each.decodes);
    split.map(|each| chunks(&call.shape, each).len() * call.shape.groups).sum()
}

/// Attention of every query of the batch: row `r` of `out` (`heads * head_dim`, contiguous) from
/// row `r` of `q`. Every worker of the team calls it with the same arguments. It starts without a
/// barrier, so the caller provides one after writing the cache, and it ends without one. It uses
/// [`Worker::claim`]. `scratch` holds [`AttentionShape::scratch_len`] floats of any content.
///
/// # Safety
/// From the first worker's call until a barrier after the last one's return, no other code accesses
/// `scratch` or the rows of `out` that belong to the batch, and none writes the cache blocks in the
/// sequences' tables. No claim loop lies between the last barrier and this call.
///
/// # Panics
/// If shapes, lengths, or a table's entries do not fit.
pub unsafe fn run(
    worker: &Worker<'_>,
    isa: Isa,
    call: &AttentionCall<'_>,
    out: SharedSlice<'_, f32>,
    scratch: SharedSlice<'_, f32>,
) {
    check(call, &out);
    let shape = &call.shape;
    let units: usize = call.sequences.iter().map(|each| pieces(shape, each) * shape.groups).sum();
    let work = shape.work();
    let start = worker.index * work;
    let partials = worker.count * work;
    // SAFETY: each worker has a part of its own.
    let work = Work::new(shape, unsafe { scratch.slice_mut(start..start + work) });
    let partial = shape.partial();
    while let Some(claimed) = worker.claim(units, 1) {
        match unit(call, claimed.start) {
            Unit::Prefill { sequence, group, block } => {
                // SAFETY: `check` holds; a unit belongs to one worker, and so do its rows and heads
                // of `out`.
                unsafe {
                    prefill::block(isa, call, &call.sequences[sequence], group, block, work, out)
                }
            }
            Unit::Decode { sequence: index, group, chunk } => {
                let sequence = &call.sequences[index];
                let range = chunks(shape, sequence);
                let part = decode::Part { group, chunk: range.start + chunk };
                // The likely next item, if all workers are equally fast.
                let next = match unit(call, (claimed.start + worker.count).min(units - 1)) {
                    Unit::Decode { sequence, group, chunk } if sequence == index => {
                        decode::Part { group, chunk: range.start + chunk }
                    }
                    _ => part,
                };
                // SAFETY: `check` holds; the work is this worker's own.
                unsafe { decode::chunk(isa, call, sequence, part, next, work) };
                if range.len() == 1 {
                    // SAFETY: as above: the item is this unit alone.
                    unsafe { softmax::finish(call, sequence.row, 1, group, &work, out) };
                } else {
                    let at = partials
                        + (first_partial(call, index) + group * range.len() + chunk) * partial;
                    // SAFETY: every chunk of the batch has a part of its own.
                    unsafe { softmax::save(shape, &work, scratch.slice_mut(at..at + partial)) };
                }
            }
        }
    }
    if !call.sequences.iter().any(|each| each.decodes && chunks(shape, each).len() > 1) {
        return;
    }
    worker.barrier();
    for item in worker.split(call.sequences.len() * shape.groups) {
        let (index, group) = (item / shape.groups, item % shape.groups);
        let sequence = &call.sequences[index];
        let count = if sequence.decodes { chunks(shape, sequence).len() } else { 0 };
        if count > 1 {
            let at = partials + (first_partial(call, index) + group * count) * partial;
            // SAFETY: all chunks are written, on the other side of the barrier; an item belongs to
            // one worker.
            unsafe {
                softmax::merge(shape, scratch.slice(at..at + count * partial), &work);
                softmax::finish(call, sequence.row, 1, group, &work, out);
            }
        }
    }
}

/// Checks what the kernels rely on, besides the safety conditions of [`run`].
fn check(call: &AttentionCall<'_>, out: &SharedSlice<'_, f32>) {
    let (shape, geometry) = (&call.shape, call.cache.geometry());
    assert!(
        shape.groups.is_multiple_of(geometry.kv_heads) && geometry.head_dim == shape.head_dim,
        "attention: a cache of {} heads of {} for {shape:?}",
        geometry.kv_heads,
        geometry.head_dim,
    );
    assert!(
        shape.heads > 0 && shape.heads.is_multiple_of(shape.groups),
        "attention: whole groups of heads: {shape:?}"
    );
    let width = shape.heads * shape.head_dim;
    for (vector, what) in [(call.sinks, "sink"), (call.slopes, "slope")] {
        let fits = vector.is_none_or(|vector| vector.len() == shape.heads);
        assert!(fits, "attention: a {what} per head");
    }
    assert!(
        call.chosen.is_none() || call.slopes.is_none(),
        "attention: slopes of chosen positions"
    );
    for sequence in call.sequences {
        let rows = sequence.row + sequence.tokens;
        let chosen = call.chosen.is_none_or(|it| rows * it.count <= it.positions.len());
        assert!(chosen, "attention: positions for every row");
        assert!(
            sequence.tokens == 0 || (rows - 1) * call.q_stride + width <= call.q.len(),
            "attention: rows of q"
        );
        assert!(rows * width <= out.len(), "attention: rows of out");
        assert!(!sequence.decodes || sequence.tokens == 1, "attention: one query that decodes");
        assert!(!sequence.table.is_empty() || sequence.tokens == 0, "attention: a block table");
        assert!(
            sequence.table.iter().all(|&block| (block as usize) < geometry.blocks),
            "attention: a table within {} blocks",
            geometry.blocks
        );
    }
}
