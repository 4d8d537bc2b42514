//! The sampling chain on a device: the tokens of [`Sampler`](super::Sampler), bit for bit.
//!
//! Three to five kernels a step, since each needs something of the whole row that the one before
//! finds:
//! - [`adjust`]: mask, bias and penalties; each logit that may have changed as an ordered key; the
//!   greatest key of each part of a row;
//! - [`weigh`]: a histogram of the keys' upper bits, with the weights of each bin: only where rows
//!   have top-k or top-p;
//! - [`cut`]: where those end: likewise;
//! - [`draw`]: sums what is kept, part by part, and finds the token;
//! - [`mod@advance`]: what was drawn becomes the next step's token, and a note to the host. Where
//!   rows of many sequences come and go, [`take`] and [`mod@hand_on`] do that, slot by slot.
//!
//! Every filter keeps a prefix of the tokens in order of descending logit (the lower id first among
//! equals), so that all of them come down to one question: which is the smallest prefix that has so
//! many tokens, or so much weight? It is answered digit by digit, with a histogram of the next
//! digit among the tokens that share those before: nothing is sorted. Sums are of whole numbers, so
//! it does not matter that threads add in no particular order.

mod adjust;
pub mod advance;
mod amount;
pub(crate) mod arith;
mod cases;
mod cut;
mod draw;
pub mod hand_on;
mod weigh;

pub use adjust::adjust;
pub use advance::advance;
pub use cut::{CutSchedule, NARROW, WIDE, cut};
pub use draw::draw;
pub use hand_on::{hand_on, take};
pub use weigh::weigh;

use std::ops::Range;

use tile::case::Spec;
use tile::dsl::*;

use super::Options;
use arith::{Wide, key_of};

/// Tokens of a row per group of [`adjust`], which notes the greatest of them.
pub const PART: u32 = 2048;
/// Tokens of a row per group of [`weigh`] and [`draw`], each of which looks through the peaks of
/// all parts first.
pub const BLOCK: u32 = 2 * PART;
/// Bins of the histogram of [`weigh`], for the upper bits of a key.
pub const BINS: u32 = 2048;
/// Numbers per bin: how many tokens, and the upper and lower half of their weight.
pub const PER_BIN: u32 = 3;
/// Words of a row's settings.
pub const SETTINGS: u32 = 17;
/// In the place of a token: none is possible.
pub const NOTHING: u32 = u32::MAX;
/// The largest vocabulary.
pub const MOST_TOKENS: u32 = 1 << 22;

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "sample_adjust", cases: cases::adjust, benches: cases::adjust_benches },
    Spec { name: "sample_weigh", cases: cases::weigh, benches: cases::weigh_benches },
    Spec { name: "sample_cut", cases: cases::cut, benches: cases::cut_benches },
    Spec { name: "sample_draw", cases: cases::draw, benches: cases::draw_benches },
    Spec { name: "sample_advance", cases: advance::cases, benches: advance::benches },
    Spec { name: "sample_take", cases: hand_on::take_cases, benches: hand_on::take_benches },
    Spec { name: "sample_hand_on", cases: hand_on::cases, benches: hand_on::benches },
];

/// A row's settings, [`SETTINGS`] words: what the kernels need to know of `options` for the token
/// at `position`.
///
/// `window` is where the tokens lie that penalties look at (at most `last_n`, the caller has cut
/// them) in the buffer of histories, `biases` where the row's pairs of token and bias lie, counted
/// in pairs, `mask` where its mask begins in the buffer of masks, counted in words; none allows all
/// tokens.
pub fn settings(
    options: &Options,
    position: u64,
    window: Range<u32>,
    biases: Range<u32>,
    mask: Option<u32>,
) -> [u32; SETTINGS as usize] {
    let repetition = options.repetition_penalty;
    let top_k = u32::try_from(options.top_k).unwrap_or(u32::MAX);
    [
        options.per_temperature().to_bits(),
        if top_k == 0 { u32::MAX } else { top_k },
        options.share(),
        options.least_weight(),
        (1.0 / repetition).to_bits(),
        repetition.to_bits(),
        options.presence_penalty.to_bits(),
        options.frequency_penalty.to_bits(),
        (options.seed >> 32) as u32,
        options.seed as u32,
        (position >> 32) as u32,
        position as u32,
        window.start,
        if options.penalises() { window.end.saturating_sub(window.start) } else { 0 },
        biases.start,
        biases.end.saturating_sub(biases.start),
        // Rows whose settings are all zero have no mask.
        mask.map_or(0, |first| first + 1),
    ]
}

/// A row's settings in a kernel: the words of [`settings`], in their order.
#[derive(Debug, Clone, Copy)]
struct Row {
    of: In<u32>,
    first: Val<u32>,
}

impl Row {
    #[track_caller]
    fn new(of: In<u32>, row: Val<u32>) -> Row {
        Row { of, first: row * SETTINGS }
    }

    #[track_caller]
    fn word(self, i: u32) -> Val<u32> {
        self.of.get(self.first + i)
    }

    #[track_caller]
    fn float(self, i: u32) -> Val<f32> {
        self.word(i).bits()
    }

    /// 0 where the greatest logit is all that is wanted.
    #[track_caller]
    fn per_temperature(self) -> Val<f32> {
        self.float(0)
    }

    /// [`u32::MAX`] is off.
    #[track_caller]
    fn top_k(self) -> Val<u32> {
        self.word(1)
    }

    /// In units of `2^-32`; [`u32::MAX`] is off.
    #[track_caller]
    fn share(self) -> Val<u32> {
        self.word(2)
    }

    #[track_caller]
    fn least_weight(self) -> Val<u32> {
        self.word(3)
    }

    /// Factors of a penalised logit that is positive, and of one that is not.
    #[track_caller]
    fn repetition(self) -> [Val<f32>; 2] {
        [self.float(4), self.float(5)]
    }

    #[track_caller]
    fn presence(self) -> Val<f32> {
        self.float(6)
    }

    #[track_caller]
    fn frequency(self) -> Val<f32> {
        self.float(7)
    }

    /// The random bits of its position.
    #[track_caller]
    fn random(self) -> Wide {
        let wide = |i| Wide { high: self.word(i), low: self.word(i + 1) };
        arith::random(wide(8), wide(10))
    }

    /// Start and length of its window.
    #[track_caller]
    fn window(self) -> [Val<u32>; 2] {
        [self.word(12), self.word(13)]
    }

    /// Start and length of its biases.
    #[track_caller]
    fn biases(self) -> [Val<u32>; 2] {
        [self.word(14), self.word(15)]
    }

    /// One more than the index of its mask's first word; 0 where it has none.
    #[track_caller]
    fn mask(self) -> Val<u32> {
        self.word(16)
    }

    /// Whether neither mask, bias nor penalty changes its logits, of which [`adjust`] then writes
    /// no keys.
    #[track_caller]
    fn plain(self) -> Val<bool> {
        Order::eq(self.word(13) | self.word(15) | self.mask(), 0u32)
    }

    /// Whether it draws.
    #[track_caller]
    fn draws(self) -> Val<bool> {
        Order::ne(self.word(0), 0u32)
    }

    /// Whether it needs [`weigh`] and [`cut`].
    #[track_caller]
    fn filters(self) -> Val<bool> {
        let filter = Order::ne(self.top_k(), u32::MAX) | Order::ne(self.share(), u32::MAX);
        self.draws() & filter
    }
}

/// Threads of a group of [`weigh`] and [`draw`].
const THREADS: u32 = 256;

/// Where the keys of a row are from: those that [`adjust`] has written, or its logits where it is
/// [`Row::plain`].
#[derive(Debug, Clone, Copy)]
struct Keys {
    logits: In<f32>,
    written: In<u32>,
    plain: Val<bool>,
    first: Val<u32>,
    vocab: Val<u32>,
}

impl Keys {
    #[track_caller]
    fn new(
        logits: In<f32>,
        written: In<u32>,
        settings: Row,
        row: Val<u32>,
        vocab: Val<u32>,
    ) -> Keys {
        Keys { logits, written, plain: settings.plain(), first: row * vocab, vocab }
    }

    /// The keys of these tokens, all of which are asked for before the first is looked at; beyond
    /// the end of the vocabulary, the key of the last token.
    #[track_caller]
    fn of(self, tokens: &[Val<u32>]) -> Vec<Val<u32>> {
        let at: Vec<Val<u32>> =
            tokens.iter().map(|token| self.first + (*token).min(self.vocab - 1)).collect();
        let keys: Vec<Var<u32>> = at.iter().map(|_| Var::new(0u32)).collect();
        test(self.plain)
            .then(|| {
                let loaded: Vec<Val<f32>> = at.iter().map(|at| self.logits.get(*at)).collect();
                loaded.into_iter().zip(&keys).for_each(|(logit, key)| key.set(key_of(logit)));
            })
            .otherwise(|| {
                let loaded: Vec<Val<u32>> = at.iter().map(|at| self.written.get(*at)).collect();
                loaded.into_iter().zip(&keys).for_each(|(loaded, key)| key.set(loaded));
            });
        keys.into_iter().map(|key| key.get()).collect()
    }

    /// This thread's tokens of its group's [`BLOCK`], each with its key.
    #[track_caller]
    fn block(self) -> Vec<(Val<u32>, Val<u32>)> {
        let first = group_id() * BLOCK + thread_id();
        let own: Vec<Val<u32>> = (0..BLOCK / THREADS).map(|i| first + i * THREADS).collect();
        let keys = self.of(&own);
        own.into_iter().zip(keys).collect()
    }
}

/// The greatest key of the row and the lowest token that has it, from the `peaks` of its parts.
#[track_caller]
fn row_peak(peaks: In<u32>, row: Val<u32>, vocab: Val<u32>) -> (Val<u32>, Val<u32>) {
    let parts = (vocab + (PART - 1)) / PART;
    let (best, whose) = (Var::new(0u32), Var::new(u32::MAX));
    strided(parts).each(|i| {
        let pair = peaks.get_vec((row * parts + i) * 2u32, 2, tile::ir::LoadHint::None);
        let (key, token) = arith::peak((best.get(), whose.get()), (pair[0], pair[1]));
        best.set(key);
        whose.set(token);
    });
    arith::group_peak(best.get(), whose.get())
}

/// Adds tokens and their weight to a histogram of [`PER_BIN`] words a bin.
#[track_caller]
fn add_to(bins: impl Elements<u32>, bin: Val<u32>, count: Val<u32>, weight: Wide) {
    let add =
        |word: u32, by: Val<u32>| bins.atomic(tile::ir::AtomicOp::Add, bin * PER_BIN + word, by);
    add(0, count);
    let before = add(2, weight.low);
    // Of all additions that pass 2^32 each sees its own passing.
    let carry = select(Order::lt(before + weight.low, weight.low), 1u32, 0u32);
    let high = weight.high + carry;
    test(Order::ne(high, 0u32))
        .then(|| {
            add(1, high);
        })
        .otherwise(|| {});
}

#[cfg(test)]
mod tests;
