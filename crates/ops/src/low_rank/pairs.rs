//! Adapters of experts on GPUs: `t = down x` in front of a product of experts, `y += scale up t`
//! behind it, a pair of a token and an expert at a time, with the factors that the token's seat has
//! for that expert.
//!
//! Of a seat, every expert has the factors of its sites as a seat of
//! [other matrices](super::kernels) has them. A pair's sums have one order, however many there are.

use tile::case::Spec;
use tile::dsl::*;
use tile::launch::{Mode, Requirement};

use super::cases::pairs as cases;
use super::kernels::{Factors, Held};
use crate::linear::holds;
use crate::sweep::{self, when};

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "low_rank_pairs_down", cases: cases::downs, benches: cases::down_benches },
    Spec { name: "low_rank_pairs_up", cases: cases::ups, benches: cases::up_benches },
];

/// Threads of a pair's group.
const THREADS: u32 = 128;

/// `t[p, j] = sum_i down[s, ids[p], j, i] x[p / share, i]`, `s` the seat of the token `p / used`. A
/// pair whose token has no adapter has the sums of some seat, which are not read.
///
/// `t` `[pairs, ranks]`, `ids` `[pairs]`, `seats` `[tokens]`, `down` `[count, experts, ranks,
/// width]`.
#[kernel]
pub fn low_rank_pairs_down(
    x: In<{ from }>,
    ids: In<u32>,
    seats: In<u32>,
    down: In<{ element }>,
    t: Out<f32>,
    width: Const<u32>,
    ranks: Const<u32>,
    experts: Const<u32>,
    count: Const<u32>,
    share: Const<u32>,
    from: Scalar,
    element: Scalar,
    used: u32,
) {
    launch(Mode::Row, [dim("pairs"), fixed(1), fixed(1)], THREADS);
    holds("x", dim("pairs").ceil_div(dim("share")) * dim("width"));
    holds("ids", dim("pairs"));
    holds("seats", dim("pairs").ceil_div(used));
    holds("down", dim("count") * dim("experts") * dim("ranks") * dim("width"));
    holds("t", dim("pairs") * dim("ranks"));
    sweep::begin();
    let pair = group_id();
    let seat = seats.get(pair / used).max(1u32).min(count) - 1u32;
    let matrix = seat * experts + ids.get(pair).min(experts - 1u32);
    let row = pair / share * width;
    range(simd_id(), ranks).step(THREADS / 32).each(|j| {
        let (from, sum) = ((matrix * ranks + j) * width, Var::new(0.0f32));
        range(lane_id(), width).step(32u32).each(|i| {
            let (factor, x) = (down.get(from + i).f32(), x.get(row + i).f32());
            sum.set(factor.fma(x, sum.get()));
        });
        let sum = simd_sum(sum.get());
        when(Order::eq(lane_id(), 0u32), || t.set(pair * ranks + j, sum));
    });
}

/// `yJ[p, o] += scales[s, J, 0] sum_k up[s, ids[p], o of J, k] t[p, k of J]`, `s` the seat of the
/// token `p / used`, for each of `sites` outputs `yJ` `[pairs, out]`. A pair whose token has no
/// adapter, or one that leaves the experts, stays as it is.
///
/// `t` `[pairs, sites * rank]`, `up` `[count, experts, sites * out, rank]`, `scales` `[count,
/// sites, 2]`, of which the second numbers say nothing here.
#[kernel]
pub fn low_rank_pairs_up(
    t: In<f32>,
    ids: In<u32>,
    seats: In<u32>,
    up: In<{ element }>,
    scales: In<f32>,
    out: Const<u32>,
    experts: Const<u32>,
    count: Const<u32>,
    element: Scalar,
    rank: u32,
    sites: u32,
    used: u32,
) {
    let ys: Vec<InOut> = (0..sites).map(|j| InOut::stored(&format!("y{j}"), Scalar::F32)).collect();
    let columns = dim("out").ceil_div(THREADS);
    launch(Mode::Row, [columns, dim("pairs"), fixed(1)], THREADS);
    for name in ["t", "up"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    holds("t", dim("pairs") * (sites * rank));
    holds("ids", dim("pairs"));
    holds("seats", dim("pairs").ceil_div(used));
    holds("up", dim("count") * dim("experts") * dim("out") * (sites * rank));
    holds("scales", dim("count") * (2 * sites));
    for j in 0..sites {
        holds(&format!("y{j}"), dim("pairs") * dim("out"));
    }
    sweep::begin();
    let (pair, column) = (group_id_of(1), group_id() * THREADS + thread_id());
    let at = seats.get(pair / used);
    let factors = Factors { t, up, rank, sites, all: out * sites };
    when(Order::gt(at, 0u32) & Order::lt(column, out), || {
        let seat = at.min(count) - 1u32;
        let matrix = seat * experts + ids.get(pair).min(experts - 1u32);
        let held = Held::Nothing;
        for (j, y) in (0..sites).zip(&ys) {
            let scale = scales.get((seat * sites + j) * 2u32);
            when(Order::ne(scale, 0.0f32), || {
                let low = factors.sum(pair, matrix, j, out * j + column, &held);
                let place = pair * out + column;
                y.set(place, scale.fma(low, y.get(place).f32()).cast());
            });
        }
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(super::KERNELS);
    }
}
