//! Labels judged behind prompts, against logits that a session computes one after the other.

use crate::common::{load, root};
use delft_engine::models::Ending;
use delft_engine::{CacheType, Engine, LoadOptions, LogitRows};

/// The log-probability of each label behind each prompt, by whole sequences.
fn expected(engine: &Engine, prompts: &[Vec<u32>], labels: &[Vec<u32>]) -> Vec<Vec<f64>> {
    let mut session = engine.session();
    let mut one = |prompt: &Vec<u32>, label: &Vec<u32>| -> f64 {
        let whole = [&prompt[..], label].concat();
        session.clear();
        let logits = session.logits(&whole, LogitRows::All).unwrap();
        let rows = logits.rows().skip(prompt.len() - 1);
        let judged = rows.zip(label).map(|(row, &id)| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            f64::from(row[id as usize]) - sum.ln()
        });
        judged.sum()
    };
    prompts.iter().map(|p| labels.iter().map(|label| one(p, label)).collect()).collect()
}

fn prompts() -> Vec<Vec<u32>> {
    [1, 30, 7, 100].map(|n| (0..n).map(|i| 3 + (i * 7 + n) % 90).collect()).to_vec()
}

#[test]
fn labels_have_the_probabilities_of_whole_sequences() {
    let labels = vec![vec![5], vec![9, 4, 77], vec![5, 6], vec![80]];
    // The last has a window that is shorter than prompts.
    for case in ["llama3", "qwen3", "mistral-long", "qwen3.5-long"] {
        for (device, chunk, sessions) in [("cpu", 512, 16), ("cpu", 7, 2), ("sim", 512, 1)] {
            let options = LoadOptions {
                device: device.parse().unwrap(),
                cache_type: CacheType::F32,
                chunk: Some(chunk),
                sessions,
                ..LoadOptions::default()
            };
            let engine = load(&root().join(case), &options);
            let prompts = prompts();
            let found = engine.classify(&prompts, &labels, None).unwrap();
            for (found, expected) in found.iter().zip(expected(&engine, &prompts, &labels)) {
                for (found, expected) in found.iter().zip(expected) {
                    let of = format!("{case} {device} {chunk}");
                    assert!((found - expected).abs() < 1e-4, "{of}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_judged_is_refused() {
    let engine = load(&root().join("llama3"), &LoadOptions::default());
    let refused = |prompts: &[Vec<u32>], labels: &[Vec<u32>]| {
        engine.classify(prompts, labels, None).unwrap_err().to_string()
    };
    let (prompt, label) = (vec![3, 4], vec![5]);
    for (prompts, labels, expected) in [
        (vec![prompt.clone()], vec![], "labels: expected labels of at least one token each"),
        (vec![prompt.clone()], vec![vec![]], "labels: expected labels of at least one token"),
        (vec![prompt.clone()], vec![vec![128]], "label 0: tokens: expected ids below 128"),
        (vec![prompt.clone(), vec![]], vec![label.clone()], "prompt 1: prompt: expected at least"),
        (vec![vec![3; 255]], vec![vec![5, 6, 7]], "prompt 0: context: expected at most 254"),
    ] {
        let found = refused(&prompts, &labels);
        assert!(found.starts_with(expected), "{found}");
    }
    assert_eq!(
        engine.classify(&[], std::slice::from_ref(&label), None).unwrap(),
        Vec::<Vec<f64>>::new()
    );
    let hidden = LoadOptions { ending: Ending::Hidden, ..LoadOptions::default() };
    let found = load(&root().join("llama3"), &hidden).classify(&[prompt], &[label], None);
    let found = found.unwrap_err().to_string();
    assert!(found.contains("generation: expected a model that ends in logits"), "{found}");
}
