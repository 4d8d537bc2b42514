//! Kernels as the language records them, for the properties that all kernels have.

use tile::dsl::*;
use tile::ir::{AtomicOp, Kernel, LoadHint, Reduce};
use tile::launch::{Mode, Requirement};

/// Rows, reduced by a group: shared memory, barriers, registers.
#[kernel]
fn softmax(x: In<{ scalar }>, y: Out<{ scalar }>, width: Const<u32>, scalar: Scalar) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 128);
    require(Requirement::Length("x".to_owned(), dim("rows") * dim("width")));
    let row = group_id() * width;
    let largest = Var::new(f32::NEG_INFINITY);
    for i in strided(width) {
        largest.set(largest.get().max(x[row + i]));
    }
    let largest = group_max(largest.get());
    let mut sum = Var::new(0.0);
    for i in strided(width) {
        sum += (x[row + i] - largest).exp();
    }
    let sum = group_sum(sum.get());
    for i in strided(width) {
        y[row + i] = (x[row + i] - largest).exp() / sum;
    }
}

/// A simdgroup's tile of `a b^T`, masked and reduced: every kind of tile.
#[kernel]
fn scores(a: In<{ scalar }>, b: In<{ scalar }>, c: Out<{ scalar }>, k: Const<u32>, scalar: Scalar) {
    launch(Mode::Tile, [dim("rows"), fixed(1), fixed(1)], 64);
    let row = (group_id() * 2 + simd_id()) * 16;
    let sums = Frags::accumulators(1, 0.0);
    for at in range(0, k).step(16).unroll() {
        let left = Frag::left(a, row * k + at, k);
        sums.set(0, sums.get(0).mma(left, Frag::right_transposed(b, at, k)));
    }
    let below = Frag::col_numbers().le(Frag::row_numbers());
    let masked = below.select(sums.get(0), Frag::filled(-1e30));
    let shifted = masked - masked.reduce_rows(Reduce::Max).across();
    shifted.store(c, row * 16, 16u32);
}

/// The last group to finish adds up: atomics, a fence, a vote carried through shared memory.
#[kernel]
fn last_adds(x: In<f32>, partial: InOut<f32>, done: InOut<u32>, n: Arg<u32>) {
    launch(Mode::Element, [dim("groups"), fixed(1), fixed(1)], 32);
    let values = x.get_vec(thread_id() * 4, 4, LoadHint::Stream);
    let sum = simd_sum(values[0] + values[1] + values[2] + values[3]);
    let last = Shared::<u32>::named("last", 1);
    if lane_id() == 0 {
        partial[group_id()] = sum;
        fence();
        last.set(0u32, done.atomic(AtomicOp::Add, 0u32, 1u32));
    }
    barrier();
    if last.get(0u32) == n {
        barrier();
        partial[0u32] = simd_max(partial.get_with(lane_id(), LoadHint::Coherent));
    }
}

/// A value leaves the loop that defines it.
#[kernel]
fn leaves(x: InOut<f32>, n: Arg<u32>) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    let mut kept = vec![];
    range(0, n).each(|i| kept.push(x[i]));
    x[0u32] = kept[0]; // the fault is here
}

/// Good ones.
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![
        softmax(Scalar::F16).record(),
        softmax(Scalar::F32).record(),
        scores(Scalar::BF16).record(),
        last_adds().record(),
    ]
}

/// A bad one.
pub(crate) fn escaping() -> Kernel {
    leaves().record()
}
