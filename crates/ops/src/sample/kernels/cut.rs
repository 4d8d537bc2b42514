//! Where top-k and top-p end.

use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Mode, Requirement};

use super::amount::{Amount, Scan};
use super::arith::{IMPOSSIBLE, Wide, WideVar, weight_of};
use super::weigh::bin_of;
use super::{BINS, Keys, MOST_TOKENS, PART, PER_BIN, Row, SETTINGS, add_to, row_peak};
use crate::sweep::{begin, require_lengths, when};

/// How a row is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutSchedule {
    /// Threads of the group that has the row: 64 to 1024.
    pub threads: u32,
    /// Keys that each thread loads before it looks at the first.
    pub ahead: u32,
}

/// For real vocabularies.
pub const WIDE: CutSchedule = CutSchedule { threads: 1024, ahead: 8 };
/// For a few thousand tokens.
pub const NARROW: CutSchedule = CutSchedule { threads: 256, ahead: 2 };

/// Which of a thread's bins lie where among all: the amounts before each, and after the last.
struct Scanned {
    /// The thread's first bin.
    first: Val<u32>,
    before: Vec<Amount>,
    total: Amount,
}

/// Shared state of the threads of a row's group.
#[derive(Clone, Copy)]
struct Team {
    threads: u32,
    scan: Scan,
    /// The bin that was found, the amounts before it and with it.
    found: Shared<u32>,
    /// A histogram.
    bins: Shared<u32>,
}

impl Team {
    /// Sums the bins from the first on. Every thread has its own consecutive ones.
    #[track_caller]
    fn scan(self, bins: impl Elements<u32>, start: Val<u32>) -> Scanned {
        let each = BINS / self.threads;
        let first = thread_id() * each;
        let own: Vec<Amount> =
            (0..each).map(|i| Amount::read(bins, (start + first + i) * PER_BIN)).collect();
        let sum = own.iter().copied().reduce(Amount::plus).expect("a thread has bins");
        let (earlier, total) = self.scan.before(sum);
        let mut before = vec![earlier];
        for amount in own {
            before.push(before[before.len() - 1].plus(amount));
        }
        Scanned { first, before, total }
    }

    /// Finds the bin with which `wanted` is reached, where `base` lies before all of them; ends
    /// with a barrier.
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

/// The last token that is kept: those after it in the order of ranks, then of ids, are not.
#[derive(Clone, Copy)]
struct Cut {
    rank: Var<u32>,
    token: Var<u32>,
}

/// The rank and the id of the last token that top-k and top-p keep, to `cuts` `[rows, 2]`, for rows
/// that have such a filter and a possible token; the others are left alone. `keys`, `peaks` and
/// `bins` are from [`super::adjust`] and [`super::weigh`]; `list` is scratch of twice the size of
/// the keys; `settings` are [`super::settings`].
#[kernel]
pub fn cut(
    logits: In<f32>,
    keys: In<u32>,
    peaks: In<u32>,
    settings: In<u32>,
    bins: In<u32>,
    list: InOut<u32>,
    cuts: Out<u32>,
    vocab: Const<u32>,
    schedule: CutSchedule,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], schedule.threads);
    require_lengths(&[
        ("logits", dim("rows") * dim("vocab")),
        ("keys", dim("rows") * dim("vocab")),
        ("peaks", dim("rows") * dim("vocab").ceil_div(PART) * 2u32),
        ("settings", dim("rows") * SETTINGS),
        ("bins", dim("rows") * BINS * PER_BIN),
        ("list", dim("rows") * dim("vocab") * 2u32),
        ("cuts", dim("rows") * 2u32),
    ]);
    require(Requirement::Aligned("peaks".to_owned(), 8));
    require(Requirement::Aligned("list".to_owned(), 8));
    require(Requirement::Aligned("cuts".to_owned(), 8));
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let row = group_id();
    let settings = Row::new(settings, row);
    if settings.filters() {
        let (top, _) = row_peak(peaks, row, vocab);
        let answer = Shared::<u32>::named("answer", 1);
        if thread_id() == 0 {
            answer[0u32] = top;
        }
        barrier();
        let top = answer[0u32];
        if Order::gt(top, IMPOSSIBLE) {
            let cut = Cut { rank: Var::new(u32::MAX), token: Var::new(u32::MAX) };
            let weigh = |key| weight_of(key, top, settings.per_temperature());
            let team = Team {
                threads: schedule.threads,
                scan: Scan::new(schedule.threads),
                found: Shared::named("found", 1 + 2 * PER_BIN),
                bins: Shared::named("digit", BINS * PER_BIN),
            };
            let keys = Keys::new(logits, keys, settings, row, vocab);
            filter(team, schedule, settings, keys, bins, list, cut, &weigh);
            if thread_id() == 0 {
                cuts.set_vec(row * 2, &[cut.rank.get(), cut.token.get()]);
            }
        }
    }
}

/// Top-k, then top-p: moves `cut`.
#[track_caller]
fn filter(
    team: Team,
    schedule: CutSchedule,
    settings: Row,
    keys: Keys,
    bins: In<u32>,
    list: InOut<u32>,
    cut: Cut,
    weigh: &impl Fn(Val<u32>) -> Val<u32>,
) {
    let listed = Shared::<u32>::named("listed", 1);
    let whole = team.scan(bins, group_id() * BINS);
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
                gather(schedule, listed, list, keys, bin, weigh);
                let number = listed.get(0u32);
                for level in DIGITS {
                    when(Order::gt(remaining(team), 1u32), || {
                        refine(team, level, list, keys.first, number, cut, weigh, wanted, by_count);
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
    schedule: CutSchedule,
    listed: Shared<u32>,
    list: InOut<u32>,
    keys: Keys,
    bin: Val<u32>,
    weigh: &impl Fn(Val<u32>) -> Val<u32>,
) {
    barrier();
    when(Order::eq(thread_id(), 0u32), || listed.set(0u32, 0u32));
    barrier();
    let (threads, ahead) = (schedule.threads, schedule.ahead);
    range(thread_id(), keys.vocab).step(threads * ahead).each(|i| {
        let at: Vec<Val<u32>> = (0..ahead).map(|u| i + u * threads).collect();
        let loaded = keys.of(&at);
        for (at, key) in at.into_iter().zip(loaded) {
            when(Order::lt(at, keys.vocab) & Order::eq(bin_of(key), bin), || {
                when(Order::gt(weigh(key), 0u32), || {
                    let slot = listed.atomic(AtomicOp::Add, 0u32, 1u32);
                    list.set_vec((keys.first + slot) * 2u32, &[!key, at]);
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
        let pair = list.get_vec((start + i) * 2u32, 2, tile::ir::LoadHint::None);
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
