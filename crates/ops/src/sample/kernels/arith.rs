//! The kernels' arithmetic: logits as ordered whole numbers, weights, 64-bit sums, Philox.
//!
//! Everything mirrors the chain on the CPU, bit for bit: [`super::super::wide`] and
//! [`super::super::philox`].

use tile::dsl::*;

use crate::sample::philox::{MULTIPLIERS, ROUNDS, WEYL};
use crate::sample::wide::{FAINTEST, LN_2, ONE, POLYNOMIAL};

/// The key of minus infinity: tokens with this key or a lower one, NaN's, are impossible.
pub(crate) const IMPOSSIBLE: u32 = !f32::NEG_INFINITY.to_bits();

/// A whole number that orders as the logit does: both zeros alike, NaN below everything.
#[track_caller]
pub(crate) fn key_of(logit: Val<f32>) -> Val<u32> {
    let bits = logit.bits::<u32>();
    let size = bits & 0x7fff_ffff;
    let bits = select(Order::eq(size, 0u32), 0u32, bits);
    let key = select(Order::eq(bits >> 31u32, 1u32), !bits, bits | 0x8000_0000u32);
    select(Order::gt(size, f32::INFINITY.to_bits()), 0u32, key)
}

/// The logit of a key.
#[track_caller]
pub(crate) fn logit_of(key: Val<u32>) -> Val<f32> {
    select(Order::eq(key >> 31u32, 1u32), key & 0x7fff_ffffu32, !key).bits()
}

/// The logarithm of a key's weight; the greatest key has 0.
#[track_caller]
fn exponent(key: Val<u32>, top: Val<u32>, factor: Val<f32>) -> Val<f32> {
    (logit_of(key) - logit_of(top)) * factor
}

/// Whether a key's weight may be more than 0.
#[track_caller]
pub(crate) fn weighs(key: Val<u32>, top: Val<u32>, factor: Val<f32>) -> Val<bool> {
    Order::ge(exponent(key, top, factor), FAINTEST) | Order::eq(key, top)
}

/// The weight of a key, a whole number: `floor(2^31 e^((logit - top) factor))`.
#[track_caller]
pub(crate) fn weight_of(key: Val<u32>, top: Val<u32>, factor: Val<f32>) -> Val<u32> {
    let x = exponent(key, top, factor);
    // What is too faint, and NaN, is computed as 0 lest a shift be out of range.
    let seen = Order::ge(x, FAINTEST);
    let x = select(seen, x, 0.0);
    let n = (x * std::f32::consts::LOG2_E).round();
    // Every product that is added to something is fused by name, so that no compiler has a choice.
    let r = n.fma(-LN_2[1], n.fma(-LN_2[0], x));
    let p = POLYNOMIAL[1..].iter().fold(POLYNOMIAL[0].val(), |p, &c| p.fma(r, c));
    let e = p.fma(r * r, r) + 1.0;
    let bits = e.bits::<u32>() + (n.i32().bits::<u32>() << 23u32);
    let mantissa = (bits & 0x7f_ffffu32 | 0x80_0000u32) << 8u32;
    let scaled = mantissa >> (127u32 - (bits >> 23u32)).min(31u32);
    select(Order::eq(key, top), ONE, select(seen, scaled, 0u32))
}

/// A 64-bit number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wide {
    pub(super) high: Val<u32>,
    pub(super) low: Val<u32>,
}

impl Wide {
    #[track_caller]
    pub(super) fn from(low: impl IntoVal<u32>) -> Wide {
        Wide { high: 0u32.val(), low: low.val() }
    }

    #[track_caller]
    pub(super) fn plus(self, other: Wide) -> Wide {
        let low = self.low + other.low;
        let carry = select(Order::lt(low, other.low), 1u32, 0u32);
        Wide { high: self.high + other.high + carry, low }
    }

    #[track_caller]
    pub(super) fn minus(self, other: Wide) -> Wide {
        let borrow = select(Order::lt(self.low, other.low), 1u32, 0u32);
        Wide { high: self.high - other.high - borrow, low: self.low - other.low }
    }

    #[track_caller]
    pub(super) fn less(self, other: Wide) -> Val<bool> {
        let low = Order::eq(self.high, other.high) & Order::lt(self.low, other.low);
        Order::lt(self.high, other.high) | low
    }

    #[track_caller]
    pub(super) fn choose(cond: Val<bool>, yes: Wide, no: Wide) -> Wide {
        Wide { high: select(cond, yes.high, no.high), low: select(cond, yes.low, no.low) }
    }

    /// The 64-bit product of two words.
    #[track_caller]
    fn product(a: Val<u32>, b: Val<u32>) -> Wide {
        Wide { high: a.mul_hi(b), low: a * b }
    }

    /// `self * fraction / 2^64`, rounded down.
    #[track_caller]
    pub(super) fn fraction(self, fraction: Wide) -> Wide {
        let lowest = self.low.mul_hi(fraction.low);
        let middle = Wide::product(self.low, fraction.high).plus(Wide::from(lowest));
        let other = Wide::product(self.high, fraction.low);
        let low = middle.low + other.low;
        let carry = select(Order::lt(low, other.low), 1u32, 0u32);
        let highest = Wide::product(self.high, fraction.high);
        highest.plus(Wide::from(middle.high)).plus(Wide::from(other.high)).plus(Wide::from(carry))
    }

    /// `self * share / 2^32`, rounded up, and at least 1.
    #[track_caller]
    pub(super) fn share(self, share: Val<u32>) -> Wide {
        let up = select(Order::ne(self.low * share, 0u32), 1u32, 0u32);
        let sum = Wide::product(self.high, share)
            .plus(Wide::from(self.low.mul_hi(share)))
            .plus(Wide::from(up));
        Wide { high: sum.high, low: select(Order::eq(sum.high, 0u32), sum.low.max(1u32), sum.low) }
    }

    /// The sum of this lane and those below.
    #[track_caller]
    pub(super) fn simd_prefix(self) -> Wide {
        [1u32, 2, 4, 8, 16].iter().fold(self, |sum, &by| {
            let below = self::below(by);
            let (high, low) = (shuffle(sum.high, below), shuffle(sum.low, below));
            Wide::choose(Order::ge(lane_id(), by), sum.plus(Wide { high, low }), sum)
        })
    }

    /// The number of another lane.
    #[track_caller]
    pub(super) fn of_lane(self, lane: Val<u32>) -> Wide {
        Wide { high: shuffle(self.high, lane), low: shuffle(self.low, lane) }
    }
}

/// The lane `by` below this one, around the corner.
#[track_caller]
pub(super) fn below(by: u32) -> Val<u32> {
    (lane_id() - by) & 31u32
}

/// A [`Wide`] that can change.
#[derive(Debug, Clone, Copy)]
pub(super) struct WideVar {
    high: Var<u32>,
    low: Var<u32>,
}

impl WideVar {
    #[track_caller]
    pub(super) fn new(value: Wide) -> WideVar {
        WideVar { high: Var::new(value.high), low: Var::new(value.low) }
    }

    #[track_caller]
    pub(super) fn get(self) -> Wide {
        Wide { high: self.high.get(), low: self.low.get() }
    }

    #[track_caller]
    pub(super) fn set(self, value: Wide) {
        self.high.set(value.high);
        self.low.set(value.low);
    }
}

/// Ten rounds of Philox4x32 on the counter `[position, 0, 0]` under the key `seed`; the first two
/// words.
#[track_caller]
pub(super) fn random(seed: Wide, position: Wide) -> Wide {
    let zero = 0u32.val();
    let counter = [position.low, position.high, zero, zero];
    let [a, b, ..] = philox(counter, [seed.low, seed.high]);
    Wide { high: a, low: b }
}

/// Ten rounds of Philox4x32 on `counter` under `key`.
#[track_caller]
pub(crate) fn philox(counter: [Val<u32>; 4], key: [Val<u32>; 2]) -> [Val<u32>; 4] {
    let (words, _) = (0..ROUNDS).fold((counter, key), |([a, b, c, d], [k, l]), _| {
        let (first, second) = (MULTIPLIERS[0].val(), MULTIPLIERS[1].val());
        let words = [c.mul_hi(second) ^ b ^ k, c * second, a.mul_hi(first) ^ d ^ l, a * first];
        (words, [k + WEYL[0], l + WEYL[1]])
    });
    words
}

/// The greatest of the threads' keys, and the lowest token that has it: in every thread.
#[track_caller]
pub(crate) fn group_peak(key: Val<u32>, token: Val<u32>) -> (Val<u32>, Val<u32>) {
    let top = group_max(key);
    let token = select(Order::eq(key, top), token, u32::MAX);
    (top, group_reduce(tile::ir::Reduce::Min, token))
}

/// The greater of two keys with its token; the lower token among equals.
#[track_caller]
pub(crate) fn peak(a: (Val<u32>, Val<u32>), b: (Val<u32>, Val<u32>)) -> (Val<u32>, Val<u32>) {
    let better = Order::gt(b.0, a.0) | (Order::eq(b.0, a.0) & Order::lt(b.1, a.1));
    (select(better, b.0, a.0), select(better, b.1, a.1))
}
