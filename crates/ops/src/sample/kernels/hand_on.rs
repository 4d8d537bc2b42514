//! Tokens that go from one step to the next on the device, where rows belong to slots and any of
//! them may be in either step: [`take`] in front of a step, [`hand_on`] behind it.

use tile::case::{Bench, Buffer, Case, Expected, Fill, noise};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

use super::advance::{EMPTY, Picks, SHARE, tell};
use super::{MOST_TOKENS, NOTHING};
use crate::sweep::{begin, require_lengths};

/// Threads of a group of [`take`], one of which has work, and of [`hand_on`].
const FEW_THREADS: u32 = 32;
const THREADS: u32 = 256;
/// Words of a row's targets: its slot, its place in the histories, and the place of its note.
pub const TARGETS: u32 = 3;
/// In the place of a target: there is none.
pub const NONE: u32 = u32::MAX;
/// In the place of a token: what the row's slot chose last.
pub const CHOSEN: u32 = u32::MAX;

/// Replaces each of `tokens` `[rows]` that is [`CHOSEN`] by what its slot chose last:
/// `latest[slots[row]]`.
#[kernel]
pub fn take(slots: In<u32>, latest: In<u32>, tokens: InOut<u32>) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], FEW_THREADS);
    require_lengths(&[("slots", dim("rows")), ("tokens", dim("rows"))]);
    begin();
    let row = group_id();
    if thread_id() == 0 {
        if tokens[row] == CHOSEN {
            tokens[row] = latest[slots[row]];
        }
    }
}

/// Hands the `picked` token of every row on, to where `targets` `[rows, TARGETS]` says: to its slot
/// in `latest`, for the next step's [`take`]; to a place in `history`; and, with the bits of its
/// log-probability under `logits` `[rows, vocab]` as they came, to a place in `mail` `[notes, 2]`,
/// in one store. The log-probability is NaN if a logit is NaN or infinity. [`NOTHING`] is handed on
/// as token 0 of log-probability minus infinity. A target that is [`NONE`] is left out. `sums`
/// (`[rows, ceil(vocab / SHARE), 2]`) is scratch; `arrived` (`[rows]`) is zero before and after.
#[kernel]
pub fn hand_on(
    logits: In<f32>,
    picked: In<u32>,
    targets: In<u32>,
    latest: InOut<u32>,
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
        ("targets", dim("rows") * TARGETS),
        ("sums", parts * 2u32),
        ("arrived", dim("rows")),
    ]);
    require(Requirement::Aligned("mail".to_owned(), 8));
    require(Requirement::AtMost(dim("vocab"), MOST_TOKENS));
    begin();
    let picks = Picks { logits, picked, sums, arrived, vocab };
    tell(picks, |row, token, told| {
        let slot = targets[row * TARGETS];
        if slot != NONE {
            latest[slot] = token;
        }
        let place = targets[row * TARGETS + 1];
        if place != NONE {
            history[place] = token;
        }
        let note = targets[row * TARGETS + 2];
        if note != NONE {
            mail.set_vec(note * 2, &[token, told]);
        }
    });
}

pub(super) fn take_cases() -> Vec<Case> {
    let (tokens, slots) = ([CHOSEN, 7, CHOSEN, 0], [3, 0, 1, 2]);
    vec![Case {
        kernel: take().record(),
        label: "four rows, two of which chose".to_owned(),
        numbers: Numbers::new().with("rows", 4),
        buffers: vec![
            Buffer::words(&slots),
            Buffer::words(&[10, 11, 12, 13, 14]),
            Buffer::words(&tokens),
        ],
        expected: vec![(2, Expected::Exact(vec![13.0, 7.0, 11.0, 0.0]))],
    }]
}

/// Four rows: one with every target, one with none, one whose logits are spoilt, one of which
/// nothing was possible.
pub(super) fn cases() -> Vec<Case> {
    let case = |vocab: usize| {
        let mut logits: Vec<f32> = noise(3, 4 * vocab).iter().map(|x| x * 9.0).collect();
        logits[2 * vocab + 5] = f32::NAN;
        let picked = [vocab as u32 - 1, 1, 2, NOTHING];
        let targets = [4, 2, 1, NONE, NONE, NONE, 0, NONE, 3, 1, 1, 2];
        let row: Vec<f64> = logits[..vocab].iter().map(|x| f64::from(*x)).collect();
        let greatest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let all: f64 = row.iter().map(|x| (x - greatest).exp()).sum();
        let logprob = (row[vocab - 1] - greatest - all.ln()) as f32;
        let mut mail = vec![EMPTY; 8];
        mail[2..4].copy_from_slice(&[picked[0], logprob.to_bits()]);
        mail[4..6].copy_from_slice(&[0, f32::NEG_INFINITY.to_bits()]);
        mail[6..8].copy_from_slice(&[picked[2], f32::NAN.to_bits()]);
        let exact = |words: &[u32]| Expected::Exact(Buffer::words(words).to_f64());
        let parts = 4 * vocab.div_ceil(SHARE as usize);
        Case {
            kernel: hand_on().record(),
            label: format!("4 rows of {vocab} tokens"),
            numbers: Numbers::new().with("rows", 4).with("vocab", vocab as u32),
            buffers: vec![
                Buffer::floats(Scalar::F32, &logits),
                Buffer::words(&picked),
                Buffer::words(&targets),
                Buffer::words(&[50, 51, 52, 53, 54]),
                Buffer::words(&[60, 61, 62]),
                Buffer::words(&[EMPTY; 8]),
                Buffer::zeros(Scalar::F32, 2 * parts),
                Buffer::words(&[0; 4]),
            ],
            expected: vec![
                (3, exact(&[picked[2], 0, 52, 53, picked[0]])),
                (4, exact(&[60, 0, picked[0]])),
                // As in `advance`: this much of a note's bits is 1e-5 of a log-probability.
                (5, Expected::Near(Buffer::words(&mail).to_f64(), 1e-8)),
                (7, exact(&[0; 4])),
            ],
        }
    };
    [200, 9000].map(case).into()
}

pub(super) fn take_benches() -> Vec<Bench> {
    let words = |count| Fill::Zeros(Scalar::U32, count);
    let numbers = Numbers::new().with("rows", 128);
    let buffers = vec![words(128), words(1), Fill::These(Buffer::words(&[CHOSEN; 128]))];
    vec![crate::trial::memory(take(), "128", numbers, buffers, 0)]
}

pub(super) fn benches() -> Vec<Bench> {
    let (rows, vocab) = (128, 128_256);
    let words = |count| Fill::Zeros(Scalar::U32, count);
    let targets: Vec<u32> = (0..rows as u32).flat_map(|row| [row, NONE, row]).collect();
    let buffers = vec![
        Fill::Noise(Scalar::F32, rows * vocab),
        words(rows),
        Fill::These(Buffer::words(&targets)),
        words(rows),
        words(1),
        words(2 * rows),
        Fill::Zeros(Scalar::F32, 2 * rows * vocab.div_ceil(SHARE as usize)),
        words(rows),
    ];
    let numbers = Numbers::new().with("rows", rows as u32).with("vocab", vocab as u32);
    vec![crate::trial::memory(hand_on(), &format!("{rows} x {vocab}"), numbers, buffers, 0)]
}
