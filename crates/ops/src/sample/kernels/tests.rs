//! Every case, the pieces of arithmetic, and a thousand tokens through all the kernels.

use tile::case::{Buffer, noise};
use tile::types::Scalar;

use super::cases::{Trial, options};
use super::*;
use crate::sample::{philox, wide};

#[test]
fn kernels_agree_with_the_chain() {
    crate::trial::check(KERNELS);
}

/// Random words, fractions and weights, a thread each: `[seed, position, total, share]` in pairs,
/// then a logit.
#[kernel]
fn pieces(x: In<u32>, y: Out<u32>) {
    launch(tile::launch::Mode::Element, [dim("n").ceil_div(32u32), fixed(1), fixed(1)], 32);
    let i = group_id() * 32 + thread_id();
    let wide = |at: u32| Wide { high: x.get(i * 8 + at), low: x.get(i * 8 + at + 1) };
    let random = arith::random(wide(0), wide(2));
    let part = wide(4).fraction(random);
    let share = wide(4).share(x[i * 8 + 6]);
    let top = arith::key_of(0.0f32.val());
    let weight = arith::weight_of(arith::key_of(x[i * 8 + 7].bits()), top, 0.7f32.val());
    for (j, word) in (0u32..).zip([random, part, share]) {
        y[i * 7 + 2 * j] = word.high;
        y[i * 7 + 2 * j + 1] = word.low;
    }
    y[i * 7 + 6] = weight;
}

#[test]
fn arithmetic_is_the_cpus_bit_for_bit() {
    let n = 4096u32;
    let (mut x, mut want) = (vec![], vec![]);
    let split = |wide: u64| [(wide >> 32) as u32, wide as u32];
    for (i, logit) in (0..n).zip(noise(8, n as usize)) {
        let bits = |j: u32| philox::philox([i, j, 0, 0], [5, 6]);
        let [a, b, c, d] = bits(0);
        let (seed, position) =
            (u64::from(a) << 32 | u64::from(b), u64::from(c) << 32 | u64::from(d));
        let [e, f, share, _] = bits(1);
        // Totals below 2^53, sometimes of one word only.
        let total = if i % 3 == 0 { u64::from(f) } else { u64::from(e >> 11) << 32 | u64::from(f) };
        // Down to where weights end.
        let logit =
            [0.0, -0.0, -16.0 + 16.0 * logit, f32::NAN, f32::NEG_INFINITY, -16.0 * logit.abs()]
                [i as usize % 6];
        x.extend(split(seed).into_iter().chain(split(position)).chain(split(total)));
        x.extend([share, logit.to_bits()]);
        let random = philox::bits(seed, position);
        want.extend(split(random));
        want.extend(split(crate::sample::fraction(total, random)));
        want.extend(split(crate::sample::share_of(total, share)));
        want.push(wide::weight(logit, 0.0, 0.7));
    }
    let numbers = tile::launch::Numbers::new().with("n", n);
    let mut buffers = [Buffer::words(&x), Buffer::zeros(Scalar::U32, want.len())];
    tile::interp::run(&pieces().record(), &numbers, &mut buffers).unwrap();
    assert_eq!(buffers[1], Buffer::words(&want));
}

#[test]
fn a_thousand_tokens_are_the_cpus() {
    let (vocab, steps) = (200, 40);
    let table = noise(77, vocab * vocab);
    let all = options(vocab);
    let rows = 25;
    // Every row is a sequence whose next logits depend on its last token.
    let mut last: Vec<usize> = (0..rows).collect();
    let (mut checked, mut history) = (0, vec![]);
    for step in 0..steps {
        let logits: Vec<f32> = last
            .iter()
            .flat_map(|token| table[token * vocab..][..vocab].iter().map(|x| x * 5.0))
            .collect();
        let trial = Trial::new(Scalar::F32, vocab, &logits, &history, &all, step * rows as u64);
        let keep = |case: tile::case::Case, before: &[(usize, Buffer)]| {
            let mut buffers = case.buffers;
            for (at, buffer) in before {
                buffers[*at] = buffer.clone();
            }
            tile::interp::run(&case.kernel, &case.numbers, &mut buffers).unwrap();
            buffers
        };
        let adjusted = keep(trial.adjust(Scalar::F32, ""), &[]);
        let [keys, peaks, bins] = [5, 6, 7].map(|at: usize| adjusted[at].clone());
        let row = [(1, keys.clone()), (2, peaks.clone())];
        let weighed = keep(trial.weigh(""), &[row.clone().as_slice(), &[(4, bins)]].concat());
        let before = [row.as_slice(), &[(4, weighed[4].clone())]].concat();
        let cut = keep(trial.cut(super::NARROW, ""), &before);
        let before = [row.as_slice(), &[(4, cut[6].clone())]].concat();
        let drawn = keep(trial.draw(""), &before);
        assert_eq!(drawn[7], Buffer::words(&trial.tokens), "step {step}");
        last = drawn[7].to_f64().into_iter().map(|token| token as usize).collect();
        history.push(last[step as usize % rows] as u32);
        checked += rows;
    }
    assert_eq!(checked, 1000);
}
