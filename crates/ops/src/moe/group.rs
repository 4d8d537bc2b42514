//! `moe_group`: pairs by expert, and the blocks of rows that [`super::moe_gemm`] computes.
//!
//! A threadgroup for each expert. All count the pairs of every expert, so that none waits for
//! another; then each finds its own pairs in order and writes them behind the pairs of the
//! experts before it, as a stable sort does.

use crate::linear::holds;
use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Extent, Mode, Requirement};

/// As many as there can be: going through all pairs is what takes time.
const THREADS: u32 = 1024;
/// Reads of a lane that are under way together.
const READS: u32 = 4;

/// How many blocks of `rows` there can be, given names for pairs and experts: each expert's last
/// may be partial.
pub fn tiles(pairs: Extent, experts: Extent, rows: impl Into<Extent>) -> Extent {
    pairs.ceil_div(rows) + experts
}

/// `ids` `[pairs]` -> `offsets` `[experts + 1]`: where each expert's pairs begin in `order`
/// `[pairs]`, which holds the numbers of pairs; `blocks` `[tiles, 2]`: expert and first place in
/// `order` of each block of `block_rows` pairs, `experts` where there is no block. At most
/// `capacity` experts.
#[kernel]
pub fn moe_group(
    ids: In<u32>,
    offsets: Out<u32>,
    order: Out<u32>,
    blocks: Out<u32>,
    pairs: Arg<u32>,
    experts: Const<u32>,
    block_rows: Const<u32>,
    capacity: u32,
) {
    launch(Mode::Row, [dim("experts"), fixed(1), fixed(1)], THREADS);
    require(Requirement::AtMost(dim("experts"), capacity));
    holds("ids", dim("pairs"));
    holds("offsets", dim("experts") + 1);
    holds("order", dim("pairs"));
    holds("blocks", tiles(dim("pairs"), dim("experts"), dim("block_rows")) * 2);
    grid_trigger();
    grid_wait();
    let (expert, thread) = (group_id(), thread_id());
    let counts = Shared::<u32>::named("counts", capacity);
    for e in strided(experts) {
        counts[e] = 0u32;
    }
    barrier();
    // An expert that does not exist counts as the last one, so that no place is left out.
    let chosen = |pair: Val<u32>| ids.get(pair.min(pairs - 1u32)).min(experts - 1u32);
    // Each simdgroup has a share of neighbouring pairs, which it goes through several at a time.
    let (simds, step) = (THREADS / 32, 32 * READS);
    let share = (pairs + (simds * step - 1)) / (simds * step) * step;
    let first = simd_id() * share;
    let mut here = Var::new(0u32);
    for at in range(first, first + share).step(step) {
        let lanes: Vec<Val<u32>> = (0..READS).map(|i| at + lane_id() + 32 * i).collect();
        let read: Vec<Val<u32>> = lanes.iter().map(|pair| chosen(*pair)).collect();
        for (pair, id) in lanes.iter().zip(&read) {
            let exists = pair.lt(pairs);
            if exists {
                _ = counts.atomic(AtomicOp::Add, *id, 1u32);
            }
            here += select(exists & id.eq(expert), 1u32, 0u32);
        }
    }
    let found = Shared::<u32>::named("found", simds);
    let own = simd_sum(here.get());
    if lane_id() == 0u32 {
        found[simd_id()] = own;
    }
    barrier();
    let blocks_of = |count: Val<u32>| (count + (block_rows - 1u32)) / block_rows;
    let (mut pairs_before, mut blocks_before) = (Var::new(0u32), Var::new(0u32));
    for e in range(thread, expert).step(THREADS) {
        let count = counts.get(e);
        pairs_before += count;
        blocks_before += blocks_of(count);
    }
    let (begin, first_block) = (group_sum(pairs_before.get()), group_sum(blocks_before.get()));
    let count = counts.get(expert);
    let own_blocks = blocks_of(count);
    for i in range(thread, own_blocks).step(THREADS) {
        blocks[(first_block + i) * 2u32] = expert;
        blocks[(first_block + i) * 2u32 + 1u32] = begin + i * block_rows;
    }
    if thread == 0u32 {
        offsets[expert] = begin;
    }
    if (expert + 1u32).eq(experts) {
        if thread == 0u32 {
            offsets[experts] = begin + count;
        }
        let end = blocks_of(pairs) + experts;
        for i in range(first_block + own_blocks + thread, end).step(THREADS) {
            blocks[i * 2u32] = experts;
            blocks[i * 2u32 + 1u32] = pairs;
        }
    }
    let before = |simd: u32| select(simd_id().gt(simd), found.get(simd), 0u32);
    let mut next = Var::new((0..simds).fold(begin, |sum, simd| sum + before(simd)));
    for at in range(first, first + share).step(step) {
        let lanes: Vec<Val<u32>> = (0..READS).map(|i| at + lane_id() + 32 * i).collect();
        let read: Vec<Val<u32>> = lanes.iter().map(|pair| chosen(*pair)).collect();
        for (pair, id) in lanes.iter().zip(&read) {
            let own = pair.lt(pairs) & id.eq(expert);
            let mask = ballot(own);
            let lower = (1u32.val() << lane_id()) - 1u32;
            if own {
                order[next.get() + (mask & lower).count_ones()] = *pair;
            }
            next += mask.count_ones();
        }
    }
}
