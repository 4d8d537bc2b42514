//! After a choice: its log-probability, the words of the next step, and a note to the host.

use tile::case::{Bench, Buffer, Case, Expected, Fill, noise};
use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Mode, Numbers, Requirement};

use super::{MOST_TOKENS, NOTHING, SETTINGS};
use crate::sweep::{begin, require_lengths};

/// Threads of a group.
const THREADS: u32 = 256;
/// Elements that each thread loads before it looks at the first.
const EACH: u32 = 16;
/// Logits of a row per group.
pub const SHARE: u32 = THREADS * EACH;
/// Notes that a row's mailbox holds: of the latest positions.
pub const NOTES: u32 = 8;
/// A note that is not there yet: no token.
pub const EMPTY: u32 = u32::MAX;

/// Below every logit, and still a number.
const LEAST: f32 = -3.0e38;
/// Added to a sum of weights, none of which is negative, for a logit that is [`broken`].
const SPOILT: f32 = -1.0e30;

/// Whether a logit is NaN or infinity: by its bits, since a compiler may take all numbers for
/// finite ones.
#[track_caller]
fn broken(x: Val<f32>) -> Val<bool> {
    let (bits, infinity) = (x.bits::<u32>(), f32::INFINITY.to_bits());
    Order::gt(bits & 0x7fff_ffffu32, infinity) | Order::eq(bits, infinity)
}

/// Hands the `picked` token of every row on. For the next step: to `tokens`, `positions`, the
/// position in `settings`, and the row's window in `history`, which keeps its latest `spans[row]`
/// tokens (0: none is kept). For the host: token and the bits of its log-probability under `logits`
/// `[rows, vocab]` as they came, to `mail` `[rows, NOTES, 2]` at the position modulo [`NOTES`], in
/// one store; NaN if a logit is NaN or infinity. [`NOTHING`] is handed on as token 0
/// of log-probability minus infinity. `sums` (`[rows, ceil(vocab / SHARE), 2]`) is
/// scratch; `arrived` (`[rows]`) is zero before and after.
#[kernel]
pub fn advance(
    logits: In<f32>,
    picked: In<u32>,
    spans: In<u32>,
    tokens: Out<u32>,
    positions: InOut<u32>,
    settings: InOut<u32>,
    history: InOut<u32>,
    mail: InOut<u32>,
    sums: InOut<f32>,
    arrived: InOut<u32>,
    vocab: Const<u32>,
) {
    launch(Mode::Row, [dim("vocab").ceil_div(SHARE), dim("rows"), fixed(1)], THREADS);
    let parts = dim("vocab").ceil_div(SHARE) * dim("rows");
    require_lengths(&[
        ("logits", dim("rows") * dim("vocab")),
        ("picked", dim("rows")),
        ("spans", dim("rows")),
        ("tokens", dim("rows")),
        ("positions", dim("rows")),
        ("settings", dim("rows") * SETTINGS),
        ("mail", dim("rows") * (2 * NOTES)),
        ("sums", parts * 2u32),
        ("arrived", dim("rows")),
    ]);
    require(Requirement::Aligned("mail".to_owned(), 8));
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let picks = Picks { logits, picked, sums, arrived, vocab };
    tell(picks, |row, token, told| {
        tokens[row] = token;
        positions[row] = positions[row] + 1;
        let words = row * SETTINGS;
        let position = settings[words + 11];
        settings[words + 11] = position + 1;
        if position == u32::MAX {
            settings[words + 10] = settings[words + 10] + 1;
        }
        let span = spans[row];
        if span > 0 {
            let (from, len) = (settings[words + 12], settings[words + 13]);
            history[from + len] = token;
            let more = len + 1;
            let drop = select(Order::gt(more, span), 1u32, 0u32);
            settings[words + 12] = from + drop;
            settings[words + 13] = more - drop;
        }
        mail.set_vec((row * NOTES + position % NOTES) * 2, &[token, told]);
    });
}

/// The source of each row's token: see [`advance`].
#[derive(Clone, Copy)]
pub(super) struct Picks {
    pub(super) logits: In<f32>,
    pub(super) picked: In<u32>,
    pub(super) sums: InOut<f32>,
    pub(super) arrived: InOut<u32>,
    pub(super) vocab: Val<u32>,
}

/// Calls `hand_on(row, token, logprob)` in one thread for each row, with the bits of the
/// log-probability, once the row's groups have summed its weights.
#[device]
pub(super) fn tell(picks: Picks, hand_on: impl FnOnce(Val<u32>, Val<u32>, Val<u32>)) {
    let Picks { logits, picked, sums, arrived, vocab } = picks;
    let last = Shared::<u32>::named("last", 1);
    let row = group_id_of(1);
    let start = group_id() * SHARE + thread_id();
    // Beyond the end the last logit is looked at again.
    let loaded: Vec<(Val<u32>, Val<f32>)> = (0..EACH)
        .map(|i| {
            let at = start + i * THREADS;
            (at, logits.get(row * vocab + at.min(vocab - 1)))
        })
        .collect();
    let spoilt = loaded.iter().map(|(_, x)| broken(*x));
    let spoilt = spoilt.reduce(|a, b| a | b).expect("a thread has logits");
    // Beyond the end there is what weighs nothing.
    let known = |(at, x): (Val<u32>, Val<f32>)| {
        let counts = Order::lt(at, vocab) & Order::gt(x, LEAST);
        select(broken(x), LEAST, select(counts, x, LEAST))
    };
    let own: Vec<Val<f32>> = loaded.into_iter().map(known).collect();
    let greatest = group_max(own.iter().copied().reduce(Val::max).expect("a thread has logits"));
    let weights = own.into_iter().map(|x| (x - greatest).exp());
    let weights = weights.reduce(|a, b| a + b).expect("a thread has logits");
    let sum = group_sum(select(spoilt, SPOILT, weights));
    let part = (row * groups(0) + group_id()) * 2;
    if thread_id() == 0 {
        sums[part] = greatest;
        sums[part + 1] = sum;
        fence();
        last[0u32] = arrived.atomic(AtomicOp::Add, row, 1u32);
        fence();
    }
    barrier();
    if last[0u32] == groups(0) - 1 {
        let (top, total) = (Var::new(LEAST.val()), Var::new(0.0f32));
        let spoilt = Var::new(0u32);
        for i in strided(groups(0)) {
            let part = (row * groups(0) + i) * 2;
            let (greatest, sum) = (sums[part], sums[part + 1]);
            spoilt.set(select(Order::lt(sum, 0.0), 1u32, spoilt.get()));
            let higher = top.get().max(greatest);
            let before = total.get() * (top.get() - higher).exp();
            total.set(before + sum * (greatest - higher).exp());
            top.set(higher);
        }
        let highest = group_max(top.get());
        let total = total.get() * (top.get() - highest).exp();
        // Set, and not added, since the factor before it may be zero.
        let all = group_sum(select(Order::gt(spoilt.get(), 0u32), SPOILT, total));
        if thread_id() == 0 {
            let picked = picked[row];
            let any = Order::ne(picked, NOTHING);
            let token = select(any, picked, 0u32);
            let logit = logits[row * vocab + token];
            let possible = any & Order::gt(logit, LEAST) & Order::gt(highest, LEAST);
            // The greatest logit alone weighs 1.
            let logprob = logit - highest - all.max(1.0).ln();
            let logprob = select(possible, logprob, f32::NEG_INFINITY);
            let told = select(Order::lt(all, 0.0), f32::NAN.to_bits(), logprob.bits());
            hand_on(row, token, told);
            arrived[row] = 0;
        }
    }
}

/// The values that a step hands on, on the CPU: the next words and the note's log-probability.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Next {
    token: u32,
    settings: Vec<u32>,
    history: Vec<u32>,
    logprob: f64,
}

/// [`advance`] of one row.
pub(crate) fn reference(
    logits: &[f32],
    picked: u32,
    span: u32,
    settings: &[u32],
    history: &[u32],
) -> Next {
    let (mut settings, mut history) = (settings.to_vec(), history.to_vec());
    let token = if picked == NOTHING { 0 } else { picked };
    let position = (u64::from(settings[10]) << 32 | u64::from(settings[11])) + 1;
    (settings[10], settings[11]) = ((position >> 32) as u32, position as u32);
    if span > 0 {
        let end = settings[12] + settings[13];
        history[end as usize] = token;
        settings[13] += 1;
        if settings[13] > span {
            settings[12] += 1;
            settings[13] -= 1;
        }
    }
    let wide = |&x: &f32| f64::from(x);
    let possible = logits.iter().filter(|x| !x.is_nan());
    let greatest = possible.clone().map(wide).fold(f64::NEG_INFINITY, f64::max);
    let all: f64 = possible.map(|x| (wide(x) - greatest).exp()).sum();
    let logit = wide(&logits[token as usize]);
    let known = picked != NOTHING && logit > f64::from(LEAST) && greatest > f64::from(LEAST);
    let logprob = match crate::sample::broken(logits) {
        Some((_, x)) if x != f32::NEG_INFINITY => f64::NAN,
        _ if known => logit - greatest - all.ln(),
        _ => f64::NEG_INFINITY,
    };
    Next { token, settings, history, logprob }
}

/// One row: vocabulary, token, tokens kept and how many there are, the position before, a change,
/// and why.
type Row = (usize, u32, u32, u32, u64, fn(&mut [f32]), &'static str);

const ROWS: [Row; 13] = [
    (1, 0, 0, 0, 0, |_| (), "one token"),
    (200, 7, 5, 5, 11, |_| (), "a window that is full"),
    (200, 199, 5, 2, 7, |_| (), "a window that grows"),
    (4096, 4000, 0, 0, u32::MAX as u64, |_| (), "a position of two words"),
    (4097, 4096, 64, 63, 9, |x| x[4096] = 14.0, "the only one in its part"),
    (9000, 3, 1, 1, 3, |x| x[5..900].fill(f32::NAN), "NaN beside it"),
    (9000, 3, 1, 1, 3, |x| x[8999] = f32::NAN, "NaN in the last place, in another part"),
    (9000, 4, 0, 0, 3, |x| (x[4], x[5000]) = (f32::INFINITY, 90.0), "infinity is chosen"),
    (9000, 4, 0, 0, 3, |x| (x[0], x[8000]) = (-f32::NAN, 1e30), "the spoilt part weighs nothing"),
    (300, 0, 0, 0, 5, |x| x[9..].fill(f32::NEG_INFINITY), "most of it ruled out"),
    (300, 0, 0, 0, 5, |x| x.fill(f32::NEG_INFINITY), "nothing possible"),
    (300, NOTHING, 4, 2, 5, |_| (), "nothing left of what is possible"),
    (300, NOTHING, 0, 0, 5, |x| x[7] = f32::NAN, "nothing left beside NaN"),
];

pub(super) fn cases() -> Vec<Case> {
    let case = |&(vocab, picked, span, kept, position, change, why): &Row| {
        let mut logits: Vec<f32> = noise(vocab as u64, vocab).iter().map(|x| x * 12.0).collect();
        change(&mut logits);
        let mut settings = vec![3; SETTINGS as usize];
        (settings[10], settings[11]) = ((position >> 32) as u32, position as u32);
        (settings[12], settings[13]) = (1, kept);
        let history: Vec<u32> = (100..100 + kept + 8).collect();
        let next = reference(&logits, picked, span, &settings, &history);
        let mut mail = vec![EMPTY; 2 * NOTES as usize];
        let at = 2 * (position as u32 % NOTES) as usize;
        mail[at] = next.token;
        mail[at + 1] = (next.logprob as f32).to_bits();
        let exact = |words: &[u32]| Expected::Exact(Buffer::words(words).to_f64());
        let parts = vocab.div_ceil(SHARE as usize);
        // The bits of a note are numbers near 2^32: this much of them is 1e-5 of a log-probability.
        let note = Buffer::words(&mail).to_f64();
        let expected = vec![
            (3, exact(&[next.token])),
            (4, exact(&[78])),
            (5, exact(&next.settings)),
            (6, exact(&next.history)),
            (7, Expected::Near(note, 1e-8)),
            (9, exact(&[0])),
        ];
        Case {
            kernel: advance().record(),
            label: format!("{vocab} tokens, {why}"),
            numbers: Numbers::new().with("rows", 1).with("vocab", vocab as u32),
            buffers: vec![
                Buffer::floats(Scalar::F32, &logits),
                Buffer::words(&[picked]),
                Buffer::words(&[span]),
                Buffer::words(&[0]),
                Buffer::words(&[77]),
                Buffer::words(&settings),
                Buffer::words(&history),
                Buffer::words(&[EMPTY; 2 * NOTES as usize]),
                Buffer::zeros(Scalar::F32, 2 * parts),
                Buffer::words(&[0]),
            ],
            expected,
        }
    };
    ROWS.iter().map(case).collect()
}

pub(super) fn benches() -> Vec<Bench> {
    let vocab = 151_936;
    let zeros = |len| Fill::Zeros(Scalar::U32, len);
    let buffers = vec![
        Fill::Noise(Scalar::F32, vocab),
        zeros(1),
        zeros(1),
        zeros(1),
        zeros(1),
        zeros(SETTINGS as usize),
        zeros(8),
        zeros(2 * NOTES as usize),
        Fill::Zeros(Scalar::F32, 2 * vocab.div_ceil(SHARE as usize)),
        zeros(1),
    ];
    let numbers = Numbers::new().with("rows", 1).with("vocab", vocab as u32);
    vec![crate::trial::memory(advance(), &format!("1 x {vocab}"), numbers, buffers, 0)]
}
