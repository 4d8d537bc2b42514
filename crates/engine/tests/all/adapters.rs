//! Adapters on the CPU: against PEFT, beside each other in one step, and added while an engine runs.

use crate::common::{Expected, error, load, root};
use delft_engine::{
    AdapterFile, Adapters, CacheType, Engine, GenerateOptions, LoadOptions, Request, Rows,
    SamplingOptions, Session,
};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    root().join("../adapters")
}

fn file(path: impl AsRef<Path>) -> AdapterFile {
    AdapterFile { path: fixtures().join(path), scale: 1.0 }
}

fn options(files: &[&str], more: usize) -> LoadOptions {
    let files = files.iter().map(file).collect();
    let adapters = Adapters { files, more, rank: 8 };
    LoadOptions { adapters, cache_type: CacheType::F32, ..LoadOptions::default() }
}

/// A case, its base, and the adapter in each form that it is stored in.
const CASES: &[(&str, &str, &[&str])] = &[
    ("lora", "llama3", &["lora", "lora/mlx", "lora/adapter.gguf"]),
    ("lora", "llama3/model.f32.gguf", &["lora", "lora/mlx", "lora/adapter.gguf"]),
    ("rslora", "llama3", &["rslora"]),
    ("rslora", "llama3/model.f32.gguf", &["rslora"]),
    ("dora", "llama-bias", &["dora", "dora/mlx"]),
    ("tables", "llama3", &["tables"]),
    ("untied", "qwen3-untied", &["untied"]),
    ("fused", "phi3", &["fused"]),
    ("fused", "phi3/model.f32.gguf", &["fused"]),
];

fn session(engine: &Engine, adapter: Option<usize>) -> Session {
    let mut session = engine.session();
    session.set_adapter(adapter.map(|i| engine.adapters()[i].clone())).unwrap();
    session
}

/// Logits of a prompt, and of the same tokens one at a time.
fn both(engine: &Engine, adapter: Option<usize>, tokens: &[u32]) -> [Vec<f32>; 2] {
    let prompt = session(engine, adapter).logits(tokens, Rows::All).unwrap().data;
    let (mut each, mut decoded) = (session(engine, adapter), Vec::new());
    for token in tokens {
        each.evaluate(&[*token], 0, &mut |_, row| decoded.extend_from_slice(row)).unwrap();
    }
    [prompt, decoded]
}

#[test]
fn logits_are_pefts_and_without_an_adapter_the_bits_stay() {
    for (case, base, stored) in CASES {
        let expected = Expected::open(&fixtures().join(case).join("expected.safetensors"));
        let tokens = expected.ids("input_ids");
        let want = expected.floats("logits").unwrap();
        // Phi-3's rotation follows the context, and the prompts fill the shorter one.
        let context = base.starts_with("phi3").then_some(tokens.len());
        let options = |files: &[&str], more| LoadOptions { context, ..options(files, more) };
        let plain = both(&load(&root().join(base), &options(&[], 0)), None, &tokens);
        for stored in *stored {
            for (chunk, more) in [(None, 0), (Some(7), 1)] {
                let options = LoadOptions { chunk, ..options(&[stored], more) };
                let engine = load(&root().join(base), &options);
                for logits in both(&engine, Some(0), &tokens) {
                    let worst = error(&logits, &want);
                    assert!(worst <= 1e-4, "{base}, {stored}: {worst:e}");
                }
                let same = both(&engine, None, &tokens);
                assert!(same == plain, "{base}, {stored}: bits without an adapter");
            }
        }
    }
}

#[test]
fn quantised_bases_keep_their_bits_too() {
    let path = root().join("qwen3/model.q8_0.gguf");
    let tokens: Vec<u32> = (0..30).map(|i| (i * 37 + 11) % 120 + 3).collect();
    let plain = both(&load(&path, &options(&[], 0)), None, &tokens);
    let same = both(&load(&path, &options(&[], 2)), None, &tokens);
    assert!(same == plain, "a model with room for adapters");
}

fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        sampling: SamplingOptions { temperature: 0.0, ..Default::default() },
        max_tokens: Some(max_tokens),
        ignore_end: true,
        ..Default::default()
    }
}

#[test]
fn each_sequence_of_a_step_has_its_own() {
    let engine = load(&root().join("llama3"), &options(&["lora", "rslora"], 0));
    let prompt: Vec<u32> = (0..12).map(|i| i * 7 + 3).collect();
    let adapters = [None, Some(0), Some(1), Some(0), None];
    let mut sessions: Vec<Session> = adapters.iter().map(|a| session(&engine, *a)).collect();
    for session in &mut sessions {
        session.logits(&prompt, Rows::Last(1)).unwrap();
    }
    let options = SamplingOptions::greedy();
    let chosen = Session::generate_together(&mut sessions, &[5; 5], 8, &options).unwrap();
    let mut found = Vec::new();
    for ((adapter, together), chosen) in adapters.iter().zip(&mut sessions).zip(&chosen) {
        let mut alone = session(&engine, *adapter);
        alone.logits(&prompt, Rows::Last(1)).unwrap();
        let one = Session::generate_together(std::slice::from_mut(&mut alone), &[5], 8, &options);
        assert_eq!(*chosen, one.unwrap()[0], "{adapter:?}");
        let [of_all, of_one] = [together, &mut alone].map(|session| {
            let mut row = Vec::new();
            session
                .evaluate(&chosen[7..], 0, &mut |_, logits| row.extend_from_slice(logits))
                .unwrap();
            row
        });
        assert!(of_all == of_one, "{adapter:?}");
        found.push(of_all);
    }
    assert!(found[0] != found[1] && found[1] != found[2]);
    // Requests are computed together, and share nothing that another adapter computed.
    let tokens = |adapter| {
        let mut one = session(&engine, adapter);
        let all = one.generate(prompt.clone(), &greedy(12)).unwrap();
        all.map(|token| token.unwrap().id).collect::<Vec<u32>>()
    };
    for _ in 0..2 {
        let submitted: Vec<_> = adapters
            .iter()
            .map(|adapter| {
                let adapter = adapter.map(|i| engine.adapters()[i].clone());
                let request = Request { adapter, ..Request::new(prompt.clone(), greedy(12)) };
                engine.submit(request).unwrap()
            })
            .collect();
        for (adapter, generating) in adapters.iter().zip(submitted) {
            let found: Vec<u32> = generating.map(|token| token.unwrap().id).collect();
            assert_eq!(found, tokens(*adapter), "{adapter:?}");
        }
    }
}

#[test]
fn adapters_come_and_go_while_an_engine_runs() {
    let engine = load(&root().join("llama3"), &options(&["lora"], 1));
    let tokens: Vec<u32> = (0..9).map(|i| i * 11 + 4).collect();
    let logits = |adapter| {
        let mut session = engine.session();
        session.set_adapter(adapter).unwrap();
        session.logits(&tokens, Rows::All).unwrap().data
    };
    let compiled = {
        logits(None);
        engine.compiled()
    };
    let added = engine.adapt(&file("rslora")).unwrap();
    let fixed = load(&root().join("llama3"), &options(&["rslora"], 0));
    let want = session(&fixed, Some(0)).logits(&tokens, Rows::All).unwrap().data;
    assert!(logits(Some(added.clone())) == want);
    let full = engine.adapt(&file("tables")).unwrap_err().to_string();
    assert!(full.contains("a free seat"), "{full}");
    drop(added);
    let half = AdapterFile { scale: 0.5, ..file("tables") };
    let (one, other) = (engine.adapt(&half).unwrap(), logits(None));
    assert!(logits(Some(one.clone())) != other && logits(None) == other);
    assert_eq!(engine.compiled(), compiled, "shape classes");
    let mut elsewhere = fixed.session();
    let refused = elsewhere.set_adapter(Some(one)).unwrap_err().to_string();
    assert!(refused.contains("one of this engine"), "{refused}");
}

#[test]
fn a_session_that_changes_its_adapter_begins_anew() {
    let engine = load(&root().join("llama3"), &options(&["lora"], 0));
    let tokens: Vec<u32> = (0..9).map(|i| i * 11 + 4).collect();
    let mut one = session(&engine, Some(0));
    let adapted = one.logits(&tokens, Rows::Last(1)).unwrap().data;
    one.set_adapter(Some(engine.adapters()[0].clone())).unwrap();
    assert_eq!(one.tokens().len(), 9, "the same adapter changes nothing");
    one.set_adapter(None).unwrap();
    assert!(one.tokens().is_empty());
    assert!(one.logits(&tokens, Rows::Last(1)).unwrap().data != adapted);
}
