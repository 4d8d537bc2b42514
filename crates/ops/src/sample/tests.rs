//! The chain against a naive one that sorts, its distribution, and its edges.

use super::*;
use crate::test::noise;

/// Probabilities after all filters by the definition: sort everything, in f64.
fn naive(logits: &[f32], history: &[u32], options: &Options) -> Vec<f64> {
    let mut logits: Vec<f64> =
        logits.iter().map(|&x| if x.is_nan() { f64::NEG_INFINITY } else { x.into() }).collect();
    for &(token, bias) in &options.logit_bias {
        logits[token as usize] += f64::from(bias);
    }
    let window = &history[history.len().saturating_sub(options.last_n)..];
    for token in 0..logits.len() {
        let count = window.iter().filter(|&&seen| seen as usize == token).count();
        if count > 0 {
            let r = f64::from(options.repetition_penalty);
            logits[token] = if logits[token] > 0.0 { logits[token] / r } else { logits[token] * r };
            logits[token] -= f64::from(options.presence_penalty)
                + f64::from(options.frequency_penalty) * count as f64;
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let mut probabilities = vec![0.0; logits.len()];
    if options.temperature == 0.0 {
        probabilities[order[0]] = 1.0;
        return probabilities;
    }
    let top = logits[order[0]];
    let mut kept: Vec<(usize, f64)> = order
        .iter()
        .map(|&i| (i, ((logits[i] - top) / f64::from(options.temperature)).exp()))
        .collect();
    if options.top_k > 0 {
        kept.truncate(options.top_k);
    }
    if options.top_p < 1.0 {
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let mut sum = 0.0;
        let enough = kept.iter().position(|(_, weight)| {
            sum += weight;
            sum >= total * f64::from(options.top_p)
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    kept.retain(|&(_, weight)| weight >= f64::from(options.min_p));
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    for (token, weight) in kept {
        probabilities[token] = weight / total;
    }
    probabilities
}

fn cases() -> Vec<(&'static str, Options)> {
    let plain = Options { seed: 11, ..Options::default() };
    vec![
        ("plain", plain.clone()),
        ("cold", Options { temperature: 0.3, ..plain.clone() }),
        ("hot", Options { temperature: 3.0, ..plain.clone() }),
        ("greedy", Options { temperature: 0.0, ..plain.clone() }),
        ("top-k 1", Options { top_k: 1, ..plain.clone() }),
        ("top-k 5", Options { top_k: 5, ..plain.clone() }),
        ("top-k of all", Options { top_k: 1000, ..plain.clone() }),
        ("top-p", Options { top_p: 0.7, ..plain.clone() }),
        ("top-p 0", Options { top_p: 0.0, ..plain.clone() }),
        ("min-p", Options { min_p: 0.2, ..plain.clone() }),
        ("min-p 1", Options { min_p: 1.0, ..plain.clone() }),
        (
            "all filters",
            Options { temperature: 1.5, top_k: 20, top_p: 0.8, min_p: 0.1, ..plain.clone() },
        ),
        ("top-p and min-p", Options { temperature: 1.5, top_p: 0.9, min_p: 0.05, ..plain.clone() }),
        ("repetition", Options { repetition_penalty: 1.5, last_n: 8, ..plain.clone() }),
        ("no window", Options { repetition_penalty: 1.5, last_n: 0, ..plain.clone() }),
        ("presence", Options { presence_penalty: 0.9, ..plain.clone() }),
        ("frequency", Options { frequency_penalty: 0.4, last_n: usize::MAX, ..plain.clone() }),
        ("bias", Options { logit_bias: vec![(3, 4.0), (5, f32::NEG_INFINITY)], ..plain.clone() }),
        (
            "everything",
            Options {
                temperature: 0.8,
                top_k: 30,
                top_p: 0.95,
                min_p: 0.02,
                repetition_penalty: 1.2,
                presence_penalty: 0.2,
                frequency_penalty: 0.1,
                last_n: 16,
                logit_bias: vec![(7, 1.0)],
                seed: 3,
                ..plain
            },
        ),
    ]
}

/// The 0.9999 quantile of chi-square, by Wilson and Hilferty's approximation.
fn chi_limit(freedom: f64) -> f64 {
    let a = 2.0 / (9.0 * freedom);
    freedom * (1.0 - a + 3.719 * a.sqrt()).powi(3)
}

#[test]
fn draws_follow_the_exact_probabilities() {
    let mut sampler = Sampler::new();
    let history: Vec<u32> = (0..40).map(|i| (i * i + 3) % 17).collect();
    for n in [1, 9, 64, 65, 300] {
        let logits: Vec<f32> = noise(n as u64, n).iter().map(|x| x * 3.0).collect();
        for (name, mut options) in cases() {
            options.logit_bias.retain(|&(token, _)| (token as usize) < n);
            options.validate(n).unwrap();
            let exact = naive(&logits, &history, &options);
            let draws = 8_000u32;
            let mut counts = vec![0u32; n];
            for position in 0..draws {
                let choice = sampler.sample(&logits, &history, position.into(), &options, None);
                counts[choice.unwrap().token as usize] += 1;
            }
            // Rare tokens go together: the statistic wants five draws or so in each class.
            let (mut chi, mut classes, mut rare) = (0.0, 0.0, (0.0, 0.0));
            for (token, &p) in exact.iter().enumerate() {
                let (count, expected) = (f64::from(counts[token]), p * f64::from(draws));
                assert!(p > 0.0 || count == 0.0, "{name}, {n}: token {token} was filtered out");
                if expected >= 5.0 {
                    chi += (count - expected).powi(2) / expected;
                    classes += 1.0;
                } else {
                    rare = (rare.0 + count, rare.1 + expected);
                }
            }
            if rare.1 >= 5.0 {
                chi += (rare.0 - rare.1).powi(2) / rare.1;
                classes += 1.0;
            }
            if classes > 1.0 {
                assert!(chi < chi_limit(classes - 1.0), "{name}, {n}: {chi} in {classes} classes");
            }
        }
    }
}

#[test]
fn filters_keep_exactly_the_tokens_of_the_definition() {
    let mut sampler = Sampler::new();
    for seed in 0..40 {
        let n = [5, 70, 1000, 5000][seed as usize % 4];
        // Some equal logits, whose order must be that of their ids.
        let logits: Vec<f32> =
            noise(seed + 1, n).iter().map(|x| (x * 40.0).round() / 8.0).collect();
        for (name, mut options) in cases() {
            options.logit_bias.retain(|&(token, _)| (token as usize) < n);
            let filters = options.top_k > 1 || options.top_p < 1.0 || options.min_p > 0.0;
            if !filters || options.penalises() {
                continue;
            }
            let exact = naive(&logits, &[], &options);
            let mut adjusted = logits.clone();
            sampler.adjust(&mut adjusted, &[], &options);
            sampler.choose(&adjusted, 0, &options).unwrap();
            let kept: Vec<u32> = sampler.candidates.iter().map(|c| c.token).collect();
            let expected: Vec<u32> =
                (0..n as u32).filter(|&token| exact[token as usize] > 0.0).collect();
            assert_eq!(kept, expected, "{name}, {n}");
        }
    }
}

#[test]
fn the_same_seed_and_position_give_the_same_token() {
    let logits = noise(5, 1000);
    let options = Options { top_p: 0.9, seed: 5, ..Options::default() };
    let mut used = Sampler::new();
    let tokens: Vec<u32> = (0..50)
        .map(|position| used.token(&logits, &[], position, &options, None).unwrap())
        .collect();
    for position in (0..50).rev() {
        assert_eq!(
            Sampler::new().token(&logits, &[], position, &options, None).unwrap(),
            tokens[position as usize]
        );
    }
    let other = Options { seed: 6, ..options };
    assert!((0..50).any(|position| used.token(&logits, &[], position, &other, None).unwrap()
        != tokens[position as usize]));
}

#[test]
fn log_probabilities_are_the_models_own() {
    let logits: Vec<f32> = noise(9, 777).iter().map(|x| x * 8.0).collect();
    let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    let options = Options {
        temperature: 0.5,
        top_k: 40,
        repetition_penalty: 1.3,
        logit_bias: vec![(4, 5.0)],
        ..Options::default()
    };
    let plain = Options { repetition_penalty: 1.0, logit_bias: vec![], ..options.clone() };
    let mut sampler = Sampler::new();
    for (position, options) in (0..50).flat_map(|n| [(n, &options), (n, &plain)]) {
        let choice = sampler.sample(&logits, &[1, 2, 3], position, options, None).unwrap();
        let expected = f64::from(logits[choice.token as usize]) - total.ln();
        assert!((f64::from(choice.logprob) - expected).abs() < 2e-6, "{choice:?}, {expected}");
        let token = sampler.token(&logits, &[1, 2, 3], position, options, None);
        assert_eq!(token, Some(choice.token));
    }
}

#[test]
fn logits_that_nothing_may_be_chosen_from_are_found() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    for (change, expected, why) in [
        (&[][..], None, "numbers"),
        (&[(3, -infinity), (199, -infinity)], None, "tokens that are ruled out"),
        (&[(0, nan)], Some((0, nan)), "the first"),
        (&[(199, -nan)], Some((199, -nan)), "the last, of the other sign"),
        (&[(64, infinity), (150, nan)], Some((64, infinity)), "infinity"),
        (&[(7, f32::MAX), (8, f32::MIN)], None, "the greatest numbers"),
    ] {
        let mut logits: Vec<f32> = (0..200).map(|i| (i % 7) as f32 - 3.0).collect();
        change.iter().for_each(|&(at, x)| logits[at] = x);
        assert_eq!(format!("{:?}", broken(&logits)), format!("{expected:?}"), "{why}");
    }
    assert_eq!(broken(&[-infinity; 70]), Some((0, -infinity)), "all are ruled out");
    assert_eq!(broken(&[]), None);
}

#[test]
fn edges() {
    let mut sampler = Sampler::new();
    let infinity = f32::INFINITY;
    let options = [
        Options::greedy(),
        Options::default(),
        Options { top_k: 3, top_p: 0.5, min_p: 0.1, ..Options::default() },
    ];
    for options in &options {
        let mut one = |logits: &[f32]| sampler.sample(logits, &[], 1, options, None);
        assert_eq!(one(&[4.0]), Some(Choice { token: 0, logprob: 0.0 }));
        let mut only = vec![-infinity; 500];
        only[321] = -7.0;
        assert_eq!(one(&only), Some(Choice { token: 321, logprob: 0.0 }));
        for impossible in [&[][..], &[-infinity; 9], &[f32::NAN; 9]] {
            assert_eq!(one(impossible), None);
        }
        // A token comes of everything, but no probability.
        only[321] = f32::NAN;
        only[77] = 2.0;
        let Choice { token, logprob } = one(&only).unwrap();
        assert!(token == 77 && logprob.is_nan(), "{token}, {logprob}");
        only[400] = infinity;
        let Choice { token, logprob } = one(&only).unwrap();
        assert!(token == 400 && logprob.is_nan(), "{token}, {logprob}");
    }
    let greedy = Options::greedy();
    assert_eq!(sampler.token(&[1.0, f32::NAN, 3.0, 3.0], &[], 0, &greedy, None), Some(2));
    // Tokens of the history that the vocabulary does not have are nobody's.
    let penalty = Options { repetition_penalty: 2.0, ..Options::greedy() };
    assert_eq!(sampler.token(&[1.0, 3.0], &[1, 99, 1], 0, &penalty, None), Some(1));
    assert_eq!(sampler.token(&[2.0, 3.0], &[1, 99, 1], 0, &penalty, None), Some(0));
}

/// The parts of a line of the fixture, each a list of numbers.
fn parts(line: &str) -> Vec<Vec<f32>> {
    let numbers = |part: &str| part.split_whitespace().map(|n| n.parse().unwrap()).collect();
    line.split('|').skip(1).map(numbers).collect()
}

const FIXTURE: &str = include_str!("../../../../tests/reference/sampling.txt");

#[test]
fn dry_penalises_as_its_definition_does() {
    let (mut lines, mut penalised) = (0, 0);
    for line in FIXTURE.lines().filter(|line| line.starts_with("dry")) {
        let (rest, penalties) = line.rsplit_once('|').unwrap();
        let [settings, breakers, history] = &parts(rest)[..] else { panic!("{line}") };
        let whole = |numbers: &[f32]| numbers.iter().map(|n| *n as u32).collect::<Vec<u32>>();
        let options = Options {
            dry: Dry {
                multiplier: settings[0],
                base: settings[1],
                allowed_length: settings[2] as usize,
                last_n: settings[3] as usize,
                breakers: whole(breakers).into(),
            },
            ..Options::default()
        };
        options.validate(8).unwrap();
        let mut logits = [0.5; 8];
        let mut expected = logits.map(f64::from);
        for penalty in penalties.split_whitespace() {
            let (token, penalty) = penalty.split_once(':').unwrap();
            expected[token.parse::<usize>().unwrap()] -= penalty.parse::<f64>().unwrap();
            penalised += 1;
        }
        let mut sampler = Sampler::new();
        for _ in 0..2 {
            logits = [0.5; 8];
            sampler.adjust(&mut logits, &whole(history), &options);
            for (found, expected) in logits.iter().zip(&expected) {
                let near = (f64::from(*found) - expected).abs() <= 1e-6 * expected.abs().max(1.0);
                assert!(near || expected.abs() > 1e37, "{line}: {logits:?}");
            }
        }
        lines += 1;
    }
    assert!(lines == 60 && penalised > 20, "{lines}, {penalised}");
}

#[test]
fn dry_takes_linear_time_and_stays_finite() {
    let dry = Dry { multiplier: 1.0, ..Dry::default() };
    let options = Options { dry, ..Options::greedy() };
    // With a quadratic search this would take an hour.
    let history = vec![1; 1 << 20];
    let token = Sampler::new().token(&[0.0, 9.0, -3.0], &history, 1 << 20, &options, None);
    assert_eq!(token, Some(0));
}

#[test]
fn xtc_leaves_what_its_definition_leaves() {
    let (mut lines, mut taken) = (0, 0);
    for line in FIXTURE.lines().filter(|line| line.starts_with("xtc")) {
        let [settings, logits, left] = &parts(line)[..] else { panic!("{line}") };
        let xtc = Xtc { probability: 1.0, threshold: settings[1] };
        let options = Options { temperature: settings[0], xtc, ..Options::default() };
        let mut sampler = Sampler::new();
        let mut seen: Vec<u32> = (0..3000)
            .map(|position| sampler.token(logits, &[], position, &options, None).unwrap())
            .collect();
        seen.sort_unstable();
        seen.dedup();
        let left: Vec<u32> = left.iter().map(|n| *n as u32).collect();
        assert!(seen.iter().all(|token| left.contains(token)), "{line}: {seen:?}");
        sampler.choose(logits, 0, &options);
        let kept: Vec<u32> = sampler.candidates.iter().map(|c| c.token).collect();
        assert!(kept == left || settings[1] > 0.5, "{line}: {kept:?}");
        taken += usize::from(left.len() < logits.len());
        lines += 1;
    }
    assert!(lines > 30 && taken > 10, "{lines}, {taken}");
}

#[test]
fn xtc_takes_place_as_often_as_asked() {
    let mut sampler = Sampler::new();
    for probability in [0.0, 0.25, 1.0] {
        let xtc = Xtc { probability, threshold: 0.1 };
        let options = Options { xtc, seed: 9, ..Options::default() };
        // Two tokens of equal probability: where it takes place only the second is left.
        let draws = 20_000u32;
        let first = (0..draws)
            .filter(|&p| sampler.token(&[1.0, 1.0], &[], p.into(), &options, None) == Some(0))
            .count();
        let expected = f64::from(draws) * (1.0 - f64::from(probability)) / 2.0;
        let deviation = (first as f64 - expected).abs();
        assert!(deviation <= 4.0 * f64::from(draws).sqrt() * 0.5, "{probability}: {first}");
        assert!(probability < 1.0 || first == 0);
    }
}

#[test]
fn a_mask_leaves_what_its_bits_say() {
    let logits = noise(4, 100);
    let mut sampler = Sampler::new();
    for options in [Options::greedy(), Options { temperature: 3.0, ..Options::default() }] {
        let mask = [1 << 7, 0, 1 << 31 | 1, 1 << 3];
        for position in 0..200 {
            let choice = sampler.sample(&logits, &[], position, &options, Some(&mask)).unwrap();
            assert!([7, 64, 95, 99].contains(&choice.token), "{choice:?}");
            let free = sampler.sample(&logits, &[], position, &Options::greedy(), None).unwrap();
            assert!(choice.logprob <= free.logprob, "of the model itself, not of the mask");
        }
        assert_eq!(sampler.token(&logits, &[], 0, &options, Some(&[0; 4])), None);
        assert_eq!(sampler.token(&logits, &[], 0, &options, Some(&[])), None, "no bits, no tokens");
        let mut bias = Options { logit_bias: vec![(7, f32::NEG_INFINITY)], ..options };
        assert_eq!(sampler.token(&logits, &[], 0, &bias, Some(&[1 << 7, 0, 0, 0])), None);
        bias.logit_bias = vec![(8, 100.0)];
        assert_eq!(sampler.token(&logits, &[], 0, &bias, Some(&[1 << 7, 0, 0, 0])), Some(7));
    }
}

#[test]
fn nothing_is_allocated_twice() {
    let logits = noise(3, 5000);
    let mut sampler = Sampler::new();
    let capacities = |s: &Sampler| {
        [
            s.adjusted.capacity(),
            s.counts.capacity(),
            s.tops.capacity(),
            s.blocks.capacity(),
            s.sums.capacity(),
            s.candidates.capacity(),
            s.heavy.capacity(),
        ]
    };
    for (_, options) in cases() {
        sampler.sample(&logits, &[3, 3, 4], 0, &options, Some(&[7; 200]));
    }
    let before = capacities(&sampler);
    for position in 0..20 {
        for (_, options) in cases() {
            sampler.sample(&logits, &[3, 3, 4], position, &options, Some(&[7; 200]));
        }
    }
    assert_eq!(capacities(&sampler), before);
}

#[test]
fn options_out_of_range_are_errors() {
    let plain = Options::default();
    let with_dry = |multiplier, base| {
        let dry = Dry { multiplier, base, ..Dry::default() };
        Options { dry, ..plain.clone() }
    };
    let with_xtc =
        |probability, threshold| Options { xtc: Xtc { probability, threshold }, ..plain.clone() };
    for (place, wrong) in [
        ("temperature", Options { temperature: -0.1, ..plain.clone() }),
        ("temperature", Options { temperature: f32::NAN, ..plain.clone() }),
        ("temperature", Options { temperature: f32::INFINITY, ..plain.clone() }),
        ("top_p", Options { top_p: 1.1, ..plain.clone() }),
        ("min_p", Options { min_p: -0.1, ..plain.clone() }),
        ("repetition_penalty", Options { repetition_penalty: 0.0, ..plain.clone() }),
        ("presence_penalty", Options { presence_penalty: f32::NAN, ..plain.clone() }),
        ("frequency_penalty", Options { frequency_penalty: 1e9, ..plain.clone() }),
        ("dry_multiplier", with_dry(-1.0, 1.75)),
        ("dry_base", with_dry(0.8, 0.5)),
        ("xtc_probability", with_xtc(1.5, 0.1)),
        ("xtc_threshold", with_xtc(0.5, f32::NAN)),
        ("logit_bias", Options { logit_bias: vec![(10, 1.0)], ..plain.clone() }),
        ("logit_bias of token 3", Options { logit_bias: vec![(3, f32::NAN)], ..plain.clone() }),
    ] {
        assert_eq!(wrong.validate(10).unwrap_err().place, place);
    }
    plain.validate(10).unwrap();
}

#[test]
fn the_chain_describes_itself() {
    assert_eq!(Options::greedy().describe(), "greatest logit");
    let mut everything = cases().pop().unwrap().1;
    everything.dry.multiplier = 0.8;
    everything.xtc.probability = 0.5;
    assert_eq!(
        everything.describe(),
        "bias of 1 tokens, repetition 1.2, presence 0.2, frequency 0.1 (last 16), DRY 0.8 x 1.75^(length - 2), \
         temperature 0.8, top-k 30, top-p 0.95, min-p 0.02, XTC 0.5 (threshold 0.1), draw (seed 3)"
    );
}
