//! From a row's keys and their histogram to its token.

use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Mode, Requirement};

use super::arith::{IMPOSSIBLE, Wide, WideVar, below, weight_of};
use super::weigh::bin_of;
use super::{BINS, MOST_TOKENS, PART, PER_BIN, Row, SETTINGS, add_to, row_peak};
use crate::sweep::begin;

/// How a row is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Threads of the group that has the row: 64 to 1024.
    pub threads: u32,
    /// Keys that each thread loads before it looks at the first.
    pub ahead: u32,
}

/// For real vocabularies.
pub const WIDE: Schedule = Schedule { threads: 1024, ahead: 8 };
/// For a few thousand tokens.
pub const NARROW: Schedule = Schedule { threads: 256, ahead: 2 };

/// A number of tokens and their weight.
#[derive(Debug, Clone, Copy)]
struct Amount {
    count: Val<u32>,
    weight: Wide,
}

impl Amount {
    #[track_caller]
    fn plus(self, other: Amount) -> Amount {
        Amount { count: self.count + other.count, weight: self.weight.plus(other.weight) }
    }

    #[track_caller]
    fn read(from: impl Memory<u32>, first: Val<u32>) -> Amount {
        let word = |i: u32| from.get(first + i);
        Amount { count: word(0), weight: Wide { high: word(1), low: word(2) } }
    }

    #[track_caller]
    fn write(self, to: impl Memory<u32>, first: Val<u32>) {
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

    #[track_caller]
    fn zero() -> Amount {
        Amount { count: 0u32.val(), weight: Wide::from(0u32) }
    }

    /// The number that a filter goes by.
    #[track_caller]
    fn measure(self, by_count: Val<bool>) -> Wide {
        Wide::choose(by_count, Wide::from(self.count), self.weight)
    }
}

/// Which of a thread's bins lie where among all: the amounts before each, and after the last.
struct Scanned {
    /// The thread's first bin.
    first: Val<u32>,
    before: Vec<Amount>,
    total: Amount,
}

/// What the threads of a row's group share.
#[derive(Clone, Copy)]
struct Team {
    threads: u32,
    /// A simdgroup's amounts.
    simds: Shared<u32>,
    /// The bin that was found, the amounts before it and with it.
    found: Shared<u32>,
    /// A histogram.
    bins: Shared<u32>,
}

impl Team {
    /// Sums the bins from the first on. Every thread has its own consecutive ones.
    #[track_caller]
    fn scan(self, bins: impl Memory<u32>, start: Val<u32>) -> Scanned {
        let each = BINS / self.threads;
        let first = thread_id() * each;
        let own: Vec<Amount> =
            (0..each).map(|i| Amount::read(bins, (start + first + i) * PER_BIN)).collect();
        let sum = own.iter().copied().reduce(Amount::plus).expect("a thread has bins");
        let simds = self.threads / 32;
        let upto = sum.simd_prefix();
        barrier();
        when(Order::eq(lane_id(), 31u32), || upto.write(self.simds, simd_id() * PER_BIN));
        barrier();
        let of_simd = Amount::read(self.simds, lane_id().min(simds - 1) * PER_BIN);
        let of_simd = Amount::choose(Order::lt(lane_id(), simds), of_simd, Amount::zero());
        let all = of_simd.simd_prefix();
        let earlier = all.of_lane((simd_id() - 1u32) & 31u32);
        let earlier = Amount::choose(Order::gt(simd_id(), 0u32), earlier, Amount::zero());
        let below = upto.of_lane(below(1));
        let below = Amount::choose(Order::gt(lane_id(), 0u32), below, Amount::zero());
        let mut before = vec![earlier.plus(below)];
        for amount in own {
            before.push(before[before.len() - 1].plus(amount));
        }
        Scanned { first, before, total: all.of_lane(31u32.val()) }
    }

    /// Finds the bin with which `wanted` is reached, where `base` lies before all of them; ends with a barrier.
    #[track_caller]
    fn find(self, scanned: &Scanned, base: Amount, wanted: Wide, by_count: Val<bool>) {
        for (bin, pair) in (0u32..).zip(scanned.before.windows(2)) {
            let (before, with) = (base.plus(pair[0]), base.plus(pair[1]));
            let here = before.measure(by_count).less(wanted) & !with.measure(by_count).less(wanted);
            when(here, || {
                self.found.set(0u32, scanned.first + bin);
                before.write(self.found, 1u32.val());
                with.write(self.found, 4u32.val());
            });
        }
        barrier();
    }
}

#[track_caller]
fn when(cond: Val<bool>, then: impl FnOnce()) {
    test(cond).then(then).otherwise(|| {});
}

/// The last token that is kept: those after it in the order of ranks, then of ids, are not.
#[derive(Clone, Copy)]
struct Cut {
    rank: Var<u32>,
    token: Var<u32>,
}

/// The token of every row, from what [`super::adjust`] and [`super::weigh`] have left. `list` is scratch of twice the size
/// of the keys; `settings` are [`super::settings`].
#[kernel]
pub fn pick(
    keys: In<u32>,
    peaks: In<u32>,
    settings: In<u32>,
    bins: In<u32>,
    list: InOut<u32>,
    tokens: Out<u32>,
    vocab: Const<u32>,
    schedule: Schedule,
) {
    rename(format!("sample_pick_{}", schedule.threads));
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], schedule.threads);
    for (name, size) in [
        ("keys", dim("rows") * dim("vocab")),
        ("peaks", dim("rows") * dim("vocab").ceil_div(PART) * 2u32),
        ("settings", dim("rows") * SETTINGS),
        ("bins", dim("rows") * BINS * PER_BIN),
        ("list", dim("rows") * dim("vocab") * 2u32),
        ("tokens", dim("rows")),
    ] {
        require(Requirement::Length(name.to_owned(), size));
    }
    require(Requirement::Aligned("peaks".to_owned(), 8));
    require(Requirement::Aligned("list".to_owned(), 8));
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let row = group_id();
    let settings = Row::new(settings, row);
    let (top, token) = row_peak(peaks, row, (vocab + (PART - 1)) / PART);
    let answer = Shared::<u32>::named("answer", 2);
    if thread_id() == 0 {
        answer[0u32] = top;
        answer[1u32] = token;
    }
    barrier();
    let top = answer[0u32];
    let possible = Order::gt(top, IMPOSSIBLE);
    if !possible | !settings.draws() {
        if thread_id() == 0 {
            tokens[row] = select(possible, answer[1u32], 0u32);
        }
    } else {
        let cut = Cut { rank: Var::new(u32::MAX), token: Var::new(u32::MAX) };
        let weigh = |key| weight_of(key, top, settings.per_temperature());
        if settings.filters() {
            let team = Team {
                threads: schedule.threads,
                simds: Shared::named("simds", schedule.threads / 32 * PER_BIN),
                found: Shared::named("found", 1 + 2 * PER_BIN),
                bins: Shared::named("digit", BINS * PER_BIN),
            };
            filter(team, schedule, settings, [keys, bins], list, row, vocab, cut, &weigh);
        }
        let kept = |key: Val<u32>, token: Val<u32>| {
            let weight = weigh(key);
            let tie = Order::eq(!key, cut.rank.get()) & Order::le(token, cut.token.get());
            let kept = (Order::lt(!key, cut.rank.get()) | tie)
                & Order::ge(weight, settings.least_weight());
            select(kept, weight, 0u32)
        };
        draw(schedule, settings, keys, row, vocab, &kept, |token| tokens.set(row, token));
    }
}

/// Top-k, then top-p: moves `cut`.
#[track_caller]
fn filter(
    team: Team,
    schedule: Schedule,
    settings: Row,
    [keys, bins]: [In<u32>; 2],
    list: InOut<u32>,
    row: Val<u32>,
    vocab: Val<u32>,
    cut: Cut,
    weigh: &impl Fn(Val<u32>) -> Val<u32>,
) {
    let listed = Shared::<u32>::named("listed", 1);
    let whole = team.scan(bins, row * BINS);
    barrier();
    when(Order::eq(thread_id(), 0u32), || whole.total.write(team.found, 4u32.val()));
    barrier();
    let total = Amount::read(team.found, 4u32.val());
    // What the filters so far have kept.
    let kept = WideVar::new(total.weight);
    range(0u32, 2u32).each(|stage| {
        let by_count = Order::eq(stage, 0u32);
        let limit = select(by_count, settings.top_k(), settings.share());
        when(Order::ne(limit, u32::MAX), || {
            let wanted =
                Wide::choose(by_count, Wide::from(limit.min(total.count)), kept.get().share(limit));
            barrier();
            team.find(&whole, Amount::zero(), wanted, by_count);
            let bin = team.found.get(0u32);
            cut.rank.set(bin << 21u32 | 0x1f_ffffu32);
            cut.token.set(u32::MAX);
            when(Order::gt(remaining(team), 1u32), || {
                gather(schedule, listed, list, keys, row, vocab, bin, weigh);
                let number = listed.get(0u32);
                for level in DIGITS {
                    when(Order::gt(remaining(team), 1u32), || {
                        refine(
                            team,
                            level,
                            list,
                            row * vocab,
                            number,
                            cut,
                            weigh,
                            wanted,
                            by_count,
                        );
                    });
                }
            });
            kept.set(Amount::read(team.found, 4u32.val()).weight);
        });
    });
}

/// How many tokens the bin has that was found.
#[track_caller]
fn remaining(team: Team) -> Val<u32> {
    team.found.get(4u32) - team.found.get(1u32)
}

/// Lists the ranks and ids of the tokens of a bin, in any order; ends with a barrier.
#[track_caller]
fn gather(
    schedule: Schedule,
    listed: Shared<u32>,
    list: InOut<u32>,
    keys: In<u32>,
    row: Val<u32>,
    vocab: Val<u32>,
    bin: Val<u32>,
    weigh: &impl Fn(Val<u32>) -> Val<u32>,
) {
    barrier();
    when(Order::eq(thread_id(), 0u32), || listed.set(0u32, 0u32));
    barrier();
    let (threads, ahead) = (schedule.threads, schedule.ahead);
    range(thread_id(), vocab).step(threads * ahead).each(|i| {
        let at: Vec<Val<u32>> = (0..ahead).map(|u| i + u * threads).collect();
        let loaded: Vec<Val<u32>> =
            at.iter().map(|at| keys.get(row * vocab + (*at).min(vocab - 1u32))).collect();
        for (at, key) in at.into_iter().zip(loaded) {
            when(Order::lt(at, vocab) & Order::eq(bin_of(key), bin), || {
                when(Order::gt(weigh(key), 0u32), || {
                    let slot = listed.atomic(AtomicOp::Add, 0u32, 1u32);
                    list.set_vec((row * vocab + slot) * 2u32, &[!key, at]);
                });
            });
        }
    });
    barrier();
}

/// A digit by which listed tokens are told apart: of the rank, then of the id.
#[derive(Clone, Copy)]
struct Digit {
    of_token: bool,
    shift: u32,
    bits: u32,
}

/// The digits after the upper 11 bits of the rank.
const DIGITS: [Digit; 4] = [
    Digit { of_token: false, shift: 10, bits: 11 },
    Digit { of_token: false, shift: 0, bits: 10 },
    Digit { of_token: true, shift: 11, bits: 11 },
    Digit { of_token: true, shift: 0, bits: 11 },
];

/// Finds the next digit of the last token that is kept.
#[track_caller]
fn refine(
    team: Team,
    digit: Digit,
    list: InOut<u32>,
    start: Val<u32>,
    number: Val<u32>,
    cut: Cut,
    weigh: &impl Fn(Val<u32>) -> Val<u32>,
    wanted: Wide,
    by_count: Val<bool>,
) {
    let base = Amount::read(team.found, 1u32.val());
    let (rank, token) = (cut.rank.get(), cut.token.get());
    strided(BINS * PER_BIN).each(|i| team.bins.set(i, 0u32));
    barrier();
    let upper = digit.shift + digit.bits;
    strided(number).each(|i| {
        let pair = list.get_vec((start + i) * 2u32, 2, tile::ir::Hint::None);
        // Those that share the digits before; at the first digit of a token there is none.
        let same = match (digit.of_token, digit.shift > 0) {
            (false, _) => Order::eq(pair[0] >> upper, rank >> upper),
            (true, true) => Order::eq(pair[0], rank),
            (true, false) => Order::eq(pair[0], rank) & Order::eq(pair[1] >> upper, token >> upper),
        };
        when(same, || {
            let of = if digit.of_token { pair[1] } else { pair[0] };
            let bin = (of >> digit.shift) & ((1 << digit.bits) - 1);
            add_to(team.bins, bin, 1u32.val(), Wide::from(weigh(!pair[0])));
        });
    });
    barrier();
    let scanned = team.scan(team.bins, 0u32.val());
    team.find(&scanned, base, wanted, by_count);
    let found = team.found.get(0u32) << digit.shift;
    let below = (1u32 << digit.shift) - 1;
    match digit.of_token {
        false => {
            cut.rank.set(rank >> upper << upper | found | below);
        }
        true if digit.shift > 0 => cut.token.set(found | below),
        true => cut.token.set(token >> upper << upper | found),
    }
}

/// Finds the first token, in order of ids, up to which the kept weights are more than the random share of their sum.
///
/// The simdgroups sum an equal part of the range each; the part in which the token lies is the next range.
#[track_caller]
fn draw(
    schedule: Schedule,
    settings: Row,
    keys: In<u32>,
    row: Val<u32>,
    vocab: Val<u32>,
    kept: &impl Fn(Val<u32>, Val<u32>) -> Val<u32>,
    answer: impl FnOnce(Val<u32>),
) {
    let simds = schedule.threads / 32;
    let ahead = schedule.ahead;
    let sums = Shared::<u32>::named("sums", simds * 2);
    let next = Shared::<u32>::named("next", 3);
    let random = settings.random();
    let (start, size) = (Var::new(0u32), Var::new(vocab));
    let left = WideVar::new(Wide::from(0u32));
    // Every level divides the range by the number of simdgroups.
    let levels = MOST_TOKENS.ilog2().div_ceil(simds.ilog2());
    range(0u32, levels).each(|level| {
        when(Order::gt(size.get(), 1u32) | Order::eq(level, 0u32), || {
            let part = (size.get() + (simds - 1)) / simds;
            let end = (start.get() + size.get()).min(vocab);
            let first = (start.get() + simd_id() * part).min(end);
            let last = (first + part).min(end);
            let sum = WideVar::new(Wide::from(0u32));
            range(first + lane_id(), last).step(32 * ahead).each(|i| {
                let at: Vec<Val<u32>> = (0..ahead).map(|u| i + u * 32).collect();
                let loaded: Vec<Val<u32>> =
                    at.iter().map(|at| keys.get(row * vocab + (*at).min(last - 1u32))).collect();
                for (at, key) in at.into_iter().zip(loaded) {
                    let weight = select(Order::lt(at, last), kept(key, at), 0u32);
                    sum.set(sum.get().plus(Wide::from(weight)));
                }
            });
            let sum = sum.get().simd_sum();
            barrier();
            when(Order::eq(lane_id(), 0u32), || {
                sums.set(simd_id() * 2u32, sum.high);
                sums.set(simd_id() * 2u32 + 1u32, sum.low);
            });
            barrier();
            let at = lane_id().min(simds - 1) * 2u32;
            let own = Wide { high: sums.get(at), low: sums.get(at + 1u32) };
            let own = Wide::choose(Order::lt(lane_id(), simds), own, Wide::from(0u32));
            let upto = own.simd_prefix();
            let total = upto.of_lane(31u32.val());
            let left_here =
                Wide::choose(Order::eq(level, 0u32), total.fraction(random), left.get());
            let beyond = ballot(left_here.less(upto));
            // The lowest lane whose part, with those before, is more than what is left.
            let lane = 31u32 - (beyond & (0u32 - beyond)).leading_zeros().min(31u32);
            let before = upto.minus(own).of_lane(lane);
            when(Order::eq(thread_id(), 0u32), || {
                let rest = left_here.minus(before);
                next.set(0u32, lane);
                next.set(1u32, rest.high);
                next.set(2u32, rest.low);
            });
            barrier();
            start.set(start.get() + next.get(0u32) * part);
            size.set(part);
            left.set(Wide { high: next.get(1u32), low: next.get(2u32) });
        });
    });
    when(Order::eq(thread_id(), 0u32), || answer(start.get()));
}
