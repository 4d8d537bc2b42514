//! From a row's keys to its token.

use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Mode, Requirement};

use super::amount::{Amount, Scan};
use super::arith::{IMPOSSIBLE, Wide, WideVar, weighs, weight_of};
use super::{BLOCK, Keys, MOST_TOKENS, NOTHING, PART, Row, SETTINGS, THREADS, row_peak};
use crate::sweep::{begin, require_lengths, when};

/// The token of every row, from what [`super::adjust`] and, where rows have filters, [`super::cut`]
/// have left; [`NOTHING`](super::NOTHING) where none is possible. `totals` `[rows, ceil(vocab /
/// BLOCK), 2]` is scratch; `arrived` (`[rows]`) is zero before and after.
///
/// Every group sums the weights that are kept in its block. The one that is done last finds the
/// first token, in order of ids, up to which they are more than the random share of their sum: its
/// block, then the token. Rows that take the greatest logit need its place alone.
#[kernel]
pub fn draw(
    logits: In<f32>,
    keys: In<u32>,
    peaks: In<u32>,
    settings: In<u32>,
    cuts: In<u32>,
    totals: InOut<u32>,
    arrived: InOut<u32>,
    tokens: Out<u32>,
    vocab: Const<u32>,
) {
    launch(Mode::Row, [dim("vocab").ceil_div(BLOCK), dim("rows"), fixed(1)], THREADS);
    require_lengths(&[
        ("logits", dim("rows") * dim("vocab")),
        ("keys", dim("rows") * dim("vocab")),
        ("peaks", dim("rows") * dim("vocab").ceil_div(PART) * 2u32),
        ("settings", dim("rows") * SETTINGS),
        ("cuts", dim("rows") * 2u32),
        ("totals", dim("rows") * dim("vocab").ceil_div(BLOCK) * 2u32),
        ("arrived", dim("rows")),
        ("tokens", dim("rows")),
    ]);
    for name in ["peaks", "cuts", "totals"] {
        require(Requirement::Aligned(name.to_owned(), 8));
    }
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let row = group_id_of(1);
    let settings = Row::new(settings, row);
    if !settings.draws() {
        if group_id() == 0 {
            let (top, greatest) = row_peak(peaks, row, vocab);
            if thread_id() == 0 {
                tokens[row] = select(Order::gt(top, IMPOSSIBLE), greatest, NOTHING);
            }
        }
    } else {
        let keys = Keys::new(logits, keys, settings, row, vocab);
        let own = keys.block();
        let (top, _) = row_peak(peaks, row, vocab);
        let answer = Shared::<u32>::named("answer", 2);
        if thread_id() == 0 {
            answer[0u32] = top;
        }
        barrier();
        let top = answer[0u32];
        if top <= IMPOSSIBLE {
            if Order::eq(thread_id(), 0u32) & Order::eq(group_id(), 0u32) {
                tokens[row] = NOTHING;
            }
        } else {
            let (rank, token) = (Var::new(u32::MAX), Var::new(u32::MAX));
            if settings.filters() {
                let cut = cuts.get_vec(row * 2, 2, tile::ir::LoadHint::None);
                rank.set(cut[0]);
                token.set(cut[1]);
            }
            // Whether top-k and top-p keep a token: few are, and the others need no weight.
            let stays = |key: Val<u32>, of: Val<u32>| {
                let tie = Order::eq(!key, rank.get()) & Order::le(of, token.get());
                Order::lt(!key, rank.get()) | tie
            };
            let weigh = |key: Val<u32>| {
                let weight = weight_of(key, top, settings.per_temperature());
                Wide::from(select(Order::ge(weight, settings.least_weight()), weight, 0u32))
            };
            let sum = WideVar::new(Wide::from(0u32));
            for (i, key) in own {
                // Most simdgroups have nothing of weight, and pass on.
                let seen = weighs(key, top, settings.per_temperature());
                let counts = Order::lt(i, vocab) & seen & stays(key, i);
                when(counts, || sum.set(sum.get().plus(weigh(key))));
            }
            let kept = |key: Val<u32>, of: Val<u32>| {
                Wide::choose(stays(key, of), weigh(key), Wide::from(0u32))
            };
            let scan = Scan::new(THREADS);
            let (_, block) = scan.before(Amount::weighing(sum.get()));
            if thread_id() == 0 {
                let at = (row * groups(0) + group_id()) * 2;
                totals.set_vec(at, &[block.weight.high, block.weight.low]);
                fence();
                answer[1u32] = arrived.atomic(AtomicOp::Add, row, 1u32);
                fence();
            }
            barrier();
            if answer[1u32] == groups(0) - 1 {
                let search = Search {
                    scan,
                    next: Shared::named("next", 3),
                    first: Var::new(0u32),
                    size: Var::new(groups(0)),
                    left: WideVar::new(Wide::from(0u32)),
                };
                let total = |block: Val<u32>| {
                    let pair =
                        totals.get_vec((row * groups(0) + block) * 2, 2, tile::ir::LoadHint::None);
                    Wide { high: pair[0], low: pair[1] }
                };
                search.narrow(&total, |all| all.fraction(settings.random()));
                // More blocks than threads: those of the thread that was found.
                if search.size.get() > 1 {
                    search.narrow(&total, |_| search.left.get());
                }
                let first = search.first.get() * BLOCK;
                search.first.set(first);
                search.size.set((vocab - first).min(BLOCK));
                let weight = |token: Val<u32>| kept(keys.of(&[token])[0], token);
                search.narrow(&weight, |_| search.left.get());
                search.narrow(&weight, |_| search.left.get());
                if thread_id() == 0 {
                    tokens[row] = search.first.get();
                    arrived[row] = 0;
                }
            }
        }
    }
}

/// A search for the first of some items up to which their weights are more than what is `left`.
#[derive(Clone, Copy)]
struct Search {
    scan: Scan,
    next: Shared<u32>,
    /// The items among which it is, all in one order.
    first: Var<u32>,
    size: Var<u32>,
    /// Weight up to it, from the first of these on.
    left: WideVar,
}

impl Search {
    /// Goes on among the items of one thread, of which each has as many as it takes; `left` is made
    /// of the sum of all.
    #[track_caller]
    fn narrow(self, weight: &impl Fn(Val<u32>) -> Wide, left: impl FnOnce(Wide) -> Wide) {
        let each = (self.size.get() + (THREADS - 1)) / THREADS;
        let end = self.first.get() + self.size.get();
        let start = (self.first.get() + thread_id() * each).min(end);
        let sum = WideVar::new(Wide::from(0u32));
        range(start, (start + each).min(end)).each(|item| sum.set(sum.get().plus(weight(item))));
        let own = sum.get();
        let (before, all) = self.scan.before(Amount::weighing(own));
        let left = left(all.weight);
        let before = before.weight;
        when(!left.less(before) & left.less(before.plus(own)), || {
            let rest = left.minus(before);
            self.next.set(0u32, start);
            self.next.set(1u32, rest.high);
            self.next.set(2u32, rest.low);
        });
        barrier();
        self.first.set(self.next.get(0u32));
        self.size.set(each);
        self.left.set(Wide { high: self.next.get(1u32), low: self.next.get(2u32) });
    }
}
