//! Products of blocks by warpgroups: four simdgroups multiply 64 rows by all columns of a block,
//! straight from shared memory.
//!
//! A product begins while the one before is under way, so that the matrix unit waits for no
//! barrier. When that one has ended its stage is filled anew, a whole ring ahead: how long copies
//! may take decides the speed.

use super::multiply::{EDGE, Results, spread};
use super::stage::Ring;
use tile::dsl::*;
use tile::ir::ROW;

/// Rows that a warpgroup multiplies.
const ROWS: u32 = 64;

/// Records the product of a block by warpgroups: see [`super::multiply::product`].
#[track_caller]
pub(super) fn product(ring: &Ring, finish: impl FnMut(Results)) {
    let s = ring.schedule;
    let ahead = s.stages - 1;
    let sums = Frags::accumulators(s.bn / EDGE, 0.0);
    for step in 0..ahead {
        ring.copy(step.val(), step.val());
    }
    ring.fetch(0u32.val());
    ring.put(0u32.val());
    ring.fetch(1u32.val());
    range(0u32, ring.steps()).each(|step| {
        if ring.copies() {
            copy_wait((ahead - 1) as u8);
        }
        async_fence();
        // This step is there.
        barrier();
        wgmma_fence();
        let stage = step % s.stages;
        let rows = stage * s.bm + simd_id() / 4u32 * ROWS;
        sums.wgmma((ring.a.shared, rows * ROW), (ring.b.shared, stage * (s.bn * ROW)));
        wgmma_commit();
        wgmma_wait(1);
        // Nobody multiplies the step before any more.
        barrier();
        ring.copy(step + ahead, (step + ahead) % s.stages);
        ring.put(step + 1u32);
        ring.fetch(step + 2u32);
    });
    wgmma_wait(0);
    ring.finish();
    spread(ring, sums, finish);
}
