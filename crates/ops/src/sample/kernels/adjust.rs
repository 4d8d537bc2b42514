//! Mask, bias and penalties, and what the logits become: keys, with the greatest of each part.

use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Mode, Requirement};

use super::arith::{group_peak, key_of, peak};
use super::{BINS, MOST_TOKENS, PART, PER_BIN, Row, SETTINGS};
use crate::sweep::{begin, require_lengths};

/// Threads of a group.
const THREADS: u32 = 256;
/// Tokens of a thread.
const EACH: u32 = PART / THREADS;

/// From `logits` `[rows, vocab]` to `keys` of the same shape, but for rows that have neither mask,
/// biases nor a window, whose keys are left alone; with the `peaks` `[rows, ceil(vocab / PART), 2]`
/// (key and token) of every part. `bins` `[rows, BINS, PER_BIN]` become zero. A row's mask in
/// `masks` has a bit for each token, the lowest of its first word for token 0: those whose bits are
/// not set become impossible. `biases` holds pairs of a token and the bits of its bias, which apply
/// in their order; then the tokens of the row's window in `history` are penalised, each once.
#[kernel]
pub fn adjust(
    logits: In<{ scalar }>,
    settings: In<u32>,
    history: In<u32>,
    biases: In<u32>,
    masks: In<u32>,
    keys: Out<u32>,
    peaks: Out<u32>,
    bins: Out<u32>,
    vocab: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("vocab").ceil_div(PART), dim("rows"), fixed(1)], THREADS);
    require_lengths(&[
        ("logits", dim("rows") * dim("vocab")),
        ("settings", dim("rows") * SETTINGS),
        ("keys", dim("rows") * dim("vocab")),
        ("peaks", dim("rows") * dim("vocab").ceil_div(PART) * 2u32),
        ("bins", dim("rows") * BINS * PER_BIN),
    ]);
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let values = Shared::<f32>::named("values", PART);
    let counts = Shared::<u32>::named("counts", PART);
    let row = group_id_of(1);
    let settings = Row::new(settings, row);
    let first = group_id() * PART;
    let size = (vocab - first).min(PART);
    let zeros = BINS * PER_BIN;
    for i in range(group_id() * THREADS + thread_id(), zeros).step(groups(0) * THREADS) {
        bins[row * zeros + i] = 0;
    }
    let own: Vec<Val<u32>> = (0..EACH).map(|i| i * THREADS + thread_id()).collect();
    // Beyond the end the last token is read again, and does not count.
    let loaded: Vec<Val<f32>> =
        own.iter().map(|i| logits[row * vocab + first + (*i).min(size - 1)].f32()).collect();
    let adjusted: Vec<Var<f32>> = loaded.iter().map(|logit| Var::new(*logit)).collect();
    // Most rows have nothing to change, and their threads need not meet.
    if !settings.plain() {
        for (&i, &logit) in own.iter().zip(&loaded) {
            values[i] = logit;
            counts[i] = 0;
        }
        let mask = settings.mask();
        if mask > 0 {
            let of = |i: Val<u32>| masks.get(mask - 1 + (first + i.min(size - 1)) / 32u32);
            let words: Vec<Val<u32>> = own.iter().map(|i| of(*i)).collect();
            for ((&i, &logit), word) in own.iter().zip(&loaded).zip(words) {
                let allowed = Order::ne((word >> (i & 31u32)) & 1u32, 0u32);
                values[i] = select(allowed, logit, f32::NEG_INFINITY);
            }
        }
        barrier();
        let [start, number] = settings.biases();
        for i in strided(number) {
            let token = biases[(start + i) * 2];
            if token - first < size {
                // The first pair of a token applies all of them, in their order.
                let mut leads = Var::new(true);
                for j in range(0, i) {
                    leads &= Order::ne(biases.get((start + j) * 2), token);
                }
                if leads.get() {
                    let mut sum = Var::new(values[token - first]);
                    for j in range(i, number) {
                        if biases[(start + j) * 2] == token {
                            sum += biases.get((start + j) * 2 + 1).bits::<f32>();
                        }
                    }
                    values[token - first] = sum.get();
                }
            }
        }

        let [start, number] = settings.window();
        for i in strided(number) {
            let token = history[start + i];
            if token - first < size {
                counts.atomic(AtomicOp::Add, token - first, 1);
            }
        }
        barrier();
        for i in strided(number) {
            let token = history[start + i];
            if token - first < size {
                // Taking the count leaves zero: a token that comes again is not penalised again.
                let count = counts.atomic(AtomicOp::Exchange, token - first, 0);
                if count > 0 {
                    let logit = values[token - first];
                    let [positive, other] = settings.repetition();
                    let factor = select(Order::gt(logit, 0.0), positive, other);
                    let less = settings.frequency().fma(count.f32(), settings.presence());
                    values[token - first] = logit.fma(factor, -less);
                }
            }
        }
        barrier();
        for (&i, logit) in own.iter().zip(&adjusted) {
            logit.set(values[i]);
            if i < size {
                keys[row * vocab + first + i] = key_of(logit.get());
            }
        }
    }

    let (best, whose) = (Var::new(0u32), Var::new(u32::MAX));
    for (i, logit) in own.into_iter().zip(adjusted) {
        let key = select(Order::lt(i, size), key_of(logit.get()), 0u32);
        let (key, token) = peak((best.get(), whose.get()), (key, first + i));
        best.set(key);
        whose.set(token);
    }
    let (key, token) = group_peak(best.get(), whose.get());
    if thread_id() == 0 {
        let part = (row * groups(0) + group_id()) * 2;
        peaks[part] = key;
        peaks[part + 1] = token;
    }
}
