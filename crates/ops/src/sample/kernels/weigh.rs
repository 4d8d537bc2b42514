//! The histogram of a row's keys, for top-k and top-p.

use tile::dsl::*;
use tile::launch::{Mode, Requirement};

use super::arith::{IMPOSSIBLE, Wide, weighs, weight_of};
use super::{
    BINS, BLOCK, Keys, MOST_TOKENS, PART, PER_BIN, Row, SETTINGS, THREADS, add_to, row_peak,
};
use crate::sweep::{begin, require_lengths};

/// The bin of a key, the greatest keys first.
#[track_caller]
pub(super) fn bin_of(key: Val<u32>) -> Val<u32> {
    !key >> 21u32
}

/// Adds to `bins` `[rows, BINS, PER_BIN]`, which [`super::adjust`] has cleared, every token that
/// weighs anything: how many there are and their weight. Rows without top-k and top-p are left
/// alone.
#[kernel]
pub fn weigh(
    logits: In<f32>,
    keys: In<u32>,
    peaks: In<u32>,
    settings: In<u32>,
    bins: InOut<u32>,
    vocab: Const<u32>,
) {
    launch(Mode::Row, [dim("vocab").ceil_div(BLOCK), dim("rows"), fixed(1)], THREADS);
    require_lengths(&[
        ("logits", dim("rows") * dim("vocab")),
        ("keys", dim("rows") * dim("vocab")),
        ("peaks", dim("rows") * dim("vocab").ceil_div(PART) * 2u32),
        ("settings", dim("rows") * SETTINGS),
        ("bins", dim("rows") * BINS * PER_BIN),
    ]);
    require(Requirement::Aligned("peaks".to_owned(), 8));
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let row = group_id_of(1);
    let settings = Row::new(settings, row);
    let own = Shared::<u32>::named("own", BINS * PER_BIN);
    if settings.filters() {
        let block = Keys::new(logits, keys, settings, row, vocab).block();
        let (top, _) = row_peak(peaks, row, vocab);
        for i in strided(BINS * PER_BIN) {
            own[i] = 0;
        }
        barrier();
        for (i, key) in block {
            // Of a row without a possible token even the greatest weighs nothing.
            let counts = Order::lt(i, vocab) & Order::gt(top, IMPOSSIBLE);
            if counts & weighs(key, top, settings.per_temperature()) {
                let weight = weight_of(key, top, settings.per_temperature());
                if weight > 0 {
                    add_to(own, bin_of(key), 1u32.val(), Wide::from(weight));
                }
            }
        }
        barrier();
        for bin in strided(BINS) {
            let count = own[bin * PER_BIN];
            if count > 0 {
                let weight = Wide { high: own[bin * PER_BIN + 1], low: own[bin * PER_BIN + 2] };
                add_to(bins, row * BINS + bin, count, weight);
            }
        }
    }
}
