//! How many tokens and of what weight: sums over a group, in the order of its threads.

use tile::dsl::*;

use super::PER_BIN;
use super::arith::{Wide, below};
use crate::sweep::when;

/// A number of tokens and their weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Amount {
    pub(super) count: Val<u32>,
    pub(super) weight: Wide,
}

impl Amount {
    #[track_caller]
    pub(super) fn plus(self, other: Amount) -> Amount {
        Amount { count: self.count + other.count, weight: self.weight.plus(other.weight) }
    }

    #[track_caller]
    pub(super) fn read(from: impl Elements<u32>, first: Val<u32>) -> Amount {
        let word = |i: u32| from.get(first + i);
        Amount { count: word(0), weight: Wide { high: word(1), low: word(2) } }
    }

    #[track_caller]
    pub(super) fn write(self, to: impl Elements<u32>, first: Val<u32>) {
        to.set(first, self.count);
        to.set(first + 1u32, self.weight.high);
        to.set(first + 2u32, self.weight.low);
    }

    #[track_caller]
    fn choose(cond: Val<bool>, yes: Amount, no: Amount) -> Amount {
        let weight = Wide::choose(cond, yes.weight, no.weight);
        Amount { count: select(cond, yes.count, no.count), weight }
    }

    #[track_caller]
    fn of_lane(self, lane: Val<u32>) -> Amount {
        Amount { count: shuffle(self.count, lane), weight: self.weight.of_lane(lane) }
    }

    #[track_caller]
    fn simd_prefix(self) -> Amount {
        let count = simd_prefix_sum(self.count) + self.count;
        Amount { count, weight: self.weight.simd_prefix() }
    }

    /// Tokens without a number: only their weight matters.
    #[track_caller]
    pub(super) fn weighing(weight: Wide) -> Amount {
        Amount { count: 0u32.val(), weight }
    }

    #[track_caller]
    pub(super) fn zero() -> Amount {
        Amount::weighing(Wide::from(0u32))
    }

    /// The number that a filter goes by.
    #[track_caller]
    pub(super) fn measure(self, by_count: Val<bool>) -> Wide {
        Wide::choose(by_count, Wide::from(self.count), self.weight)
    }
}

/// Sums over a group of threads.
#[derive(Clone, Copy)]
pub(super) struct Scan {
    simds: u32,
    /// An amount of every simdgroup.
    sums: Shared<u32>,
}

impl Scan {
    /// In a group of `threads` threads, at most 1024.
    #[track_caller]
    pub(super) fn new(threads: u32) -> Scan {
        let simds = threads / 32;
        Scan { simds, sums: Shared::named("simds", simds * PER_BIN) }
    }

    /// The amounts of the threads before this one, and of all. All threads take part, at any
    /// time.
    #[track_caller]
    pub(super) fn before(self, own: Amount) -> (Amount, Amount) {
        let upto = own.simd_prefix();
        barrier();
        when(Order::eq(lane_id(), 31u32), || upto.write(self.sums, simd_id() * PER_BIN));
        barrier();
        let of_simd = Amount::read(self.sums, lane_id().min(self.simds - 1) * PER_BIN);
        let of_simd = Amount::choose(Order::lt(lane_id(), self.simds), of_simd, Amount::zero());
        let all = of_simd.simd_prefix();
        let earlier = all.of_lane((simd_id() - 1u32) & 31u32);
        let earlier = Amount::choose(Order::gt(simd_id(), 0u32), earlier, Amount::zero());
        let lower = upto.of_lane(below(1));
        let lower = Amount::choose(Order::gt(lane_id(), 0u32), lower, Amount::zero());
        (earlier.plus(lower), all.of_lane(31u32.val()))
    }
}
