//! A trained model of the real world, as GGUF version 1: ids, logits and likelihoods computed
//! elsewhere in float64.

use delft_engine::{CacheType, Engine, GenerateOptions, LoadOptions, LogitRows, SamplingOptions};
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
fn stories260k_matches_its_golden_file() {
    let Some(folder) = testing::data("weights/stories260K") else { return };
    let golden: Value =
        serde_json::from_slice(&std::fs::read(folder.join("golden_stories260K.bin.json")).unwrap())
            .unwrap();
    let options = LoadOptions { cache_type: CacheType::F32, ..Default::default() };
    let engine = Engine::load(folder.join("tinyllamas-stories-260k-f32.gguf"), &options).unwrap();
    assert_eq!(engine.info().architecture, "llama");

    let greedy = ids(&golden["greedy_from_bos"]);
    let mut session = engine.session();
    let settings = GenerateOptions {
        sampling: SamplingOptions::greedy(),
        max_tokens: Some(greedy.len()),
        ignore_end: true,
        ..Default::default()
    };
    let tokens: Vec<_> =
        session.generate(vec![1], &settings).unwrap().map(Result::unwrap).collect();
    assert_eq!(tokens.iter().map(|t| t.id).collect::<Vec<_>>(), greedy);
    let text: String = tokens.iter().map(|t| t.text.as_str()).collect();
    assert_eq!(text.trim_start(), golden["greedy_text"].as_str().unwrap().trim_start());

    let sequence = [&[1], &greedy[..]].concat();
    for row in golden["logits"].as_array().unwrap() {
        let (position, want) =
            (row["pos"].as_u64().unwrap() as usize, row["logits"].as_array().unwrap());
        assert_eq!(sequence[position], row["input_token"].as_u64().unwrap() as u32);
        let got = engine.session().logits(&sequence[..=position], LogitRows::Last(1)).unwrap();
        for (got, want) in got.data.iter().zip(want) {
            assert!(
                (f64::from(*got) - want.as_f64().unwrap()).abs() < 2e-4,
                "position {position}: {got} {want}"
            );
        }
    }

    for case in golden["nll"].as_array().unwrap() {
        let tokens = ids(&case["tokens"]);
        let text = case["text"].as_str().unwrap();
        let special = tokens::Special { add: true, parse: false };
        assert_eq!(engine.tokenizer().unwrap().encode(text, special).unwrap(), tokens);
        let mut sum = 0.0;
        let mut visit = |i: usize, row: &[f32]| {
            if let Some(&next) = tokens.get(i + 1) {
                let top = row.iter().copied().fold(f32::MIN, f32::max);
                let total: f64 = row.iter().map(|&x| f64::from(x - top).exp()).sum();
                sum += total.ln() - f64::from(row[next as usize] - top);
            }
        };
        engine.session().evaluate(&tokens, 0, &mut visit).unwrap();
        let want = case["sum_nll_nats"].as_f64().unwrap();
        assert!((sum - want).abs() < 1e-4 * want, "{sum} {want}");
    }
}
