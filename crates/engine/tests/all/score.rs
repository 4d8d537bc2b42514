//! Log-probabilities of given texts, against logits that a session computes one text after the
//! other.

use crate::common::{load, root};
use delft_engine::{CacheType, LoadOptions, LogitRows, log_sum_exp};

fn texts() -> Vec<Vec<u32>> {
    [2, 1, 60, 9, 100].map(|n| (0..n).map(|i| 3 + (i * 7 + n) % 90).collect()).to_vec()
}

#[test]
fn tokens_have_the_probabilities_of_whole_sequences() {
    // The last two have windows and states.
    for case in ["llama3", "mistral-long", "qwen3.5-long"] {
        for (device, chunk, sessions) in [("cpu", 512, 16), ("cpu", 7, 2), ("sim", 512, 1)] {
            let options = LoadOptions {
                device: device.parse().unwrap(),
                cache_type: CacheType::F32,
                chunk: Some(chunk),
                sessions,
                ..LoadOptions::default()
            };
            let (engine, texts) = (load(&root().join(case), &options), texts());
            let scored = engine.score(&texts, 3, None).unwrap();
            assert_eq!(scored.len(), texts.len());
            for (text, scored) in texts.iter().zip(&scored) {
                assert!(text.iter().eq(scored.iter().map(|token| &token.id)));
                assert!(scored[0].logprob.is_none() && scored[0].top_logprobs.is_empty());
                let logits = engine.session().logits(text, LogitRows::All).unwrap();
                for (row, token) in logits.rows().zip(&scored[1..]) {
                    let of = format!("{case} {device} {chunk}: {token:?}");
                    let all = log_sum_exp(row);
                    let expected = |id: u32| (f64::from(row[id as usize]) - all) as f32;
                    let near = |found: f32, id: u32| (found - expected(id)).abs() < 1e-4;
                    assert!(token.logprob.is_some_and(|found| near(found, token.id)), "{of}");
                    assert_eq!(token.top_logprobs.len(), 3, "{of}");
                    assert!(token.top_logprobs.iter().all(|&(id, found)| near(found, id)), "{of}");
                    let greatest = row.iter().copied().fold(f32::MIN, f32::max);
                    let first = token.top_logprobs[0].0 as usize;
                    assert!(greatest - row[first] < 1e-4, "{of}");
                    assert!(token.top_logprobs.is_sorted_by(|a, b| a.1 >= b.1), "{of}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let engine = load(&root().join("llama3"), &LoadOptions::default());
    for (texts, expected) in [
        (vec![vec![3, 4], vec![]], "text 1: prompt: expected at least one token"),
        (vec![vec![128]], "text 0: tokens: expected ids below 128"),
        (vec![vec![3; 257]], "text 0: context: expected at most 256"),
    ] {
        let found = engine.score(&texts, 1, None).unwrap_err().to_string();
        assert!(found.starts_with(expected), "{found}");
    }
    assert!(engine.score(&[], 1, None).unwrap().is_empty());
}
