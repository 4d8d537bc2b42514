//! A step that fails is its session's alone: it gets one clear error, and the others go on as if
//! nothing had happened.

use crate::common::{load, root};
use delft_engine::{
    CacheType, Dispatch, Engine, GenerateOptions, LoadOptions, SamplingOptions, Session,
};
use device::gpu::sim;

fn engine(dispatch: Dispatch) -> Engine {
    let options = LoadOptions {
        dispatch,
        cache_type: CacheType::F32,
        context: Some(64),
        chunk: Some(8),
        ..LoadOptions::on("sim".parse().unwrap())
    };
    load(&root().join("llama3"), &options)
}

fn options(sampling: SamplingOptions) -> GenerateOptions {
    let (max_tokens, ignore_end) = (Some(9), true);
    GenerateOptions { sampling, max_tokens, ignore_end, ..GenerateOptions::default() }
}

fn sampled() -> GenerateOptions {
    options(SamplingOptions { seed: 5, repetition_penalty: 1.2, ..SamplingOptions::default() })
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 11) % 120).collect()
}

fn all(session: &mut Session, prompt: Vec<u32>, options: &GenerateOptions) -> Vec<u32> {
    session.generate(prompt, options).unwrap().map(|token| token.unwrap().id).collect()
}

#[test]
fn a_failed_step_ends_one_generation_and_no_other() {
    let greedy = options(SamplingOptions::greedy());
    for dispatch in Dispatch::ALL {
        let (wanted, wanted_by_others) = {
            let engine = engine(dispatch);
            let one = all(&mut engine.session(), prompt(11), &greedy);
            (one, all(&mut engine.session(), prompt(17), &sampled()))
        };
        let engine = engine(dispatch);
        let mut failures = 0;
        for after in [0, 3, 11, 24, 40, 63, 90] {
            let (mut failing, mut other) = (engine.session(), engine.session());
            let mut going_on = other.generate(prompt(17), &sampled()).unwrap();
            let mut found: Vec<u32> =
                going_on.by_ref().take(3).map(|token| token.unwrap().id).collect();
            // In the prompt, or in a step that the device chooses in.
            let mut generation = failing.generate(prompt(11), &greedy).unwrap();
            sim::fail_after(Some(after));
            let mut told = Vec::new();
            let error = loop {
                match generation.next() {
                    Some(Ok(token)) => told.push(token.id),
                    Some(Err(error)) => break Some(error.to_string()),
                    None => break None,
                }
            };
            assert_eq!(error.is_some(), sim::fail_after(None).is_none(), "{after}");
            assert_eq!(told, wanted[..told.len()], "{after}: what came before it is right");
            if let Some(error) = error {
                failures += 1;
                assert!(error.contains("made to fail") && error.lines().count() == 1, "{error}");
                assert_eq!(generation.finish().map(|finish| finish.name()), Some("error"));
                assert!(generation.next().is_none());
            }
            drop(generation);
            found.extend(going_on.map(|token| token.unwrap().id));
            assert_eq!(found, wanted_by_others, "{dispatch:?}, after {after} launches");
            // So does the session itself, with what it is asked next.
            assert_eq!(all(&mut failing, prompt(11), &greedy), wanted, "{dispatch:?} {after}");
        }
        assert!(failures >= 5, "{dispatch:?}: {failures}");
    }
}
