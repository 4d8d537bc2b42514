//! Products of blocks in shared memory: with the matrix unit for operands of 16 bits, by fused
//! multiply-adds for f32.
//!
//! Fragments of the next 16 terms are loaded while the present ones are multiplied, across the
//! ends of steps too: a step's last fragments are in registers before its stage is given back, so
//! that one barrier a step is enough. With one stage there are two, and other groups hide them.

use super::stage::Ring;
use super::warpgroup;
use crate::sweep::when;
use tile::dsl::*;
use tile::ir::LoadHint;

/// Neighbouring results of one row, in one thread.
pub(crate) struct Results {
    /// The row in the block.
    pub(crate) row: Val<u32>,
    /// The first column in the block: a multiple of how many values there are.
    pub(crate) col: Val<u32>,
    /// 8, or 1 for operands of f32.
    pub(crate) values: Vec<Val<f32>>,
}

/// Records the product of a block: `finish` is given all results of the block, past the ends of
/// matrices too.
#[track_caller]
pub(crate) fn product(ring: &Ring, finish: impl FnMut(Results)) {
    match ring.operand() {
        Scalar::F32 => plain(ring, finish),
        _ if ring.schedule.warpgroups => warpgroup::product(ring, finish),
        _ => matrix(ring, finish),
    }
}

/// Writes neighbouring results to `y[row, col..]` of rows with `out` columns, as many as there are
/// columns.
#[track_caller]
pub(crate) fn store(y: Out, row: Val<u32>, col: Val<u32>, out: Val<u32>, values: &[Val<f32>]) {
    let values: Vec<Val<Raw>> = values.iter().map(|v| v.to(y.scalar())).collect();
    let (at, lanes) = (row * out + col, (16 / y.scalar().bytes()).min(values.len()));
    let each = || {
        for (i, value) in values.iter().enumerate() {
            let i = i as u32;
            test((col + i).lt(out)).then(|| y.set_raw(at + i, *value)).otherwise(|| {});
        }
    };
    if lanes == 1 {
        return each();
    }
    // Rows of a whole number of vectors: no row ends within one, and all are aligned.
    test((out % values.len() as u32).eq(0u32))
        .then(|| {
            for (i, values) in values.chunks(lanes).enumerate() {
                y.set_raw_vec(at + (i * lanes) as u32, values);
            }
        })
        .otherwise(each);
}

/// A simdgroup's part of a block.
struct Part {
    /// Its first row and column.
    row: Val<u32>,
    col: Val<u32>,
    /// Its size.
    rows: u32,
    cols: u32,
}

#[track_caller]
fn part(ring: &Ring) -> Part {
    let s = ring.schedule;
    let (rows, cols) = (s.bm / s.simds_m, s.bn / s.simds_n);
    let id = || match s.simds_k {
        1 => simd_id(),
        _ => simd_id() % (s.simds_m * s.simds_n),
    };
    let (row, col) = (id() / s.simds_n * rows, id() % s.simds_n * cols);
    Part { row, col, rows, cols }
}

/// Columns of a fragment.
pub(super) const EDGE: u32 = 16;
/// Floats between rows of a simdgroup's own shared memory.
pub(super) const SPARE: u32 = EDGE + 4;

#[track_caller]
fn matrix(ring: &Ring, finish: impl FnMut(Results)) {
    let s = ring.schedule;
    let (part, stride) = (part(ring), s.stride(ring.operand()));
    let (high, wide) = (part.rows / EDGE, part.cols / EDGE);
    let parts = s.bk / EDGE / s.simds_k;
    // Its own terms of a step, where sums are shared.
    let own = (s.simds_k > 1).then(|| simd_id() / (s.simds_m * s.simds_n) * (parts * EDGE));
    let fragments = |stage: Val<u32>, k: u32| {
        let a = stage * (s.bm * stride) + part.row * stride + k * EDGE;
        let b = ring.b.at(stage, part.col, k * EDGE);
        let (a, b) = own.map_or((a, b), |own| (a + own, b + ring.b.terms(own)));
        let left = |i| Frag::left(ring.a.shared, a + i * EDGE * stride, stride);
        let left: Vec<Frag> = (0..high).map(left).collect();
        let right = |j| ring.b.right(b, j * EDGE);
        (left, (0..wide).map(right).collect::<Vec<Frag>>())
    };
    let sums = Frags::accumulators(high * wide, 0.0);
    let multiply = |(left, right): &(Vec<Frag>, Vec<Frag>)| {
        for i in 0..high {
            for j in 0..wide {
                // There and back: each product shares an operand with the one before.
                let j = if i % 2 == 0 { j } else { wide - 1 - j };
                let (a, b) = (left[i as usize], right[j as usize]);
                sums.set(i * wide + j, sums.get(i * wide + j).mma(a, b));
            }
        }
    };
    if s.stages == 1 {
        ring.start_single();
        range(0u32, ring.steps()).each(|step| {
            (0..parts).for_each(|k| multiply(&fragments(0u32.val(), k)));
            ring.replace(step);
        });
        return spread(ring, sums, finish);
    }
    match own {
        Some(_) => ring.start_early(),
        None => ring.start(),
    }
    let (left, right) = fragments(0u32.val(), 0);
    let (left, right) = (Frags::holding(&left), Frags::holding(&right));
    range(0u32, ring.steps()).each(|step| {
        let mut now =
            ((0..high).map(|i| left.get(i)).collect(), (0..wide).map(|j| right.get(j)).collect());
        for k in 0..parts {
            let next = if k + 1 < parts {
                fragments(step % s.stages, k + 1)
            } else {
                ring.advance();
                let next = fragments((step + 1u32) % s.stages, 0);
                ring.refill(step);
                next
            };
            multiply(&now);
            now = next;
        }
        (0..high).for_each(|i| left.set(i, now.0[i as usize]));
        (0..wide).for_each(|j| right.set(j, now.1[j as usize]));
    });
    ring.finish();
    spread(ring, sums, finish);
}

/// Hands out the sums of each simdgroup's part, row after row of fragments: through shared memory,
/// so that a lane has neighbours of one row, and the parts of shared sums meet.
#[track_caller]
pub(super) fn spread(ring: &Ring, sums: Frags, mut finish: impl FnMut(Results)) {
    let (s, part) = (ring.schedule, part(ring));
    let (high, wide) = (part.rows / EDGE, part.cols / EDGE);
    let spare = Shared::<f32>::named("spare", s.threads() / 32 * EDGE * SPARE);
    let own = simd_id() * (EDGE * SPARE);
    // Between the parts of a sum.
    let simds = s.simds_m * s.simds_n;
    let apart = simds * (EDGE * SPARE);
    let (row, col) = (lane_id() / 2u32, lane_id() % 2u32 * 8u32);
    for i in 0..high {
        for j in 0..wide {
            sums.get(i * wide + j).store(spare, own, SPARE);
            let sync = || if s.simds_k == 1 { simd_barrier() } else { barrier() };
            sync();
            let from = own + row * SPARE + col;
            let read = |from: Val<u32>| -> Vec<Val<f32>> {
                let half = |half: u32| spare.get_vec(from + 4 * half, 4, LoadHint::None);
                (0..2).flat_map(half).collect()
            };
            let mut give = || {
                let add = |sum: Vec<Val<f32>>, part: u32| {
                    let more = read(from + part * apart);
                    sum.into_iter().zip(more).map(|(sum, more)| sum + more).collect()
                };
                let values = (1..s.simds_k).fold(read(from), add);
                let (row, col) = (part.row + row + i * EDGE, part.col + col + j * EDGE);
                finish(Results { row, col, values });
            };
            match s.simds_k {
                1 => give(),
                _ => when(Order::lt(simd_id(), simds), give),
            }
            sync();
        }
    }
}

/// Lanes of a simdgroup along the rows and columns of its part.
const LANES: (u32, u32) = (4, 8);

#[track_caller]
fn plain(ring: &Ring, mut finish: impl FnMut(Results)) {
    let s = ring.schedule;
    let (part, stride) = (part(ring), s.stride(ring.operand()));
    let (high, wide) = (part.rows / LANES.0, part.cols / LANES.1);
    // A lane's rows and columns are apart, so that its neighbours read neighbouring rows of shared
    // memory.
    let row = part.row + lane_id() / LANES.1;
    let col = part.col + lane_id() % LANES.1;
    let sums = Regs::<f32>::new(high * wide, 0.0);
    ring.start();
    range(0u32, ring.steps()).each(|step| {
        let stage = step % s.stages;
        let a = stage * (s.bm * stride) + row * stride;
        let b = ring.b.at(stage, col, 0);
        range(0u32, s.bk).step(4u32).each(|k| {
            let right: Vec<_> = (0..wide).map(|j| ring.b.four(b, j * LANES.1, k)).collect();
            for i in 0..high {
                let left = ring.a.four(a, i * LANES.0, k);
                for (j, right) in right.iter().enumerate() {
                    let at = i * wide + j as u32;
                    let terms = left.iter().zip(right);
                    sums.set(at, terms.fold(sums.get(at), |sum, (a, b)| a.fma(*b, sum)));
                }
            }
        });
        ring.advance();
        ring.refill(step);
    });
    ring.finish();
    for i in 0..high {
        for j in 0..wide {
            let (row, col) = (row + i * LANES.0, col + j * LANES.1);
            finish(Results { row, col, values: vec![sums.get(i * wide + j)] });
        }
    }
}
