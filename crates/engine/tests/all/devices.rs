//! The same tokens on every device: greedy and sampled, chosen on the device with the words of one
//! step feeding the next.

use crate::common::{cases, load, simulates, wanted};
use delft_engine::{
    CacheType, DeviceSpec, Dispatch, GenerateOptions, LoadOptions, LogitRows, SamplingOptions,
    SplitMode,
};
use std::path::Path;

/// Greedy, and every filter and penalty of the chain.
fn samplings() -> Vec<SamplingOptions> {
    let base = SamplingOptions { seed: 7, ..SamplingOptions::default() };
    vec![
        SamplingOptions::greedy(),
        base.clone(),
        SamplingOptions { top_k: 5, top_p: 0.9, temperature: 0.8, ..base.clone() },
        SamplingOptions { min_p: 0.05, repetition_penalty: 1.2, last_n: 9, ..base.clone() },
        SamplingOptions {
            presence_penalty: 0.3,
            frequency_penalty: 0.2,
            logit_bias: vec![(3, 2.0), (7, f32::NEG_INFINITY)],
            ..base
        },
    ]
}

/// Tokens and their log-probabilities.
fn generate(
    device: DeviceSpec,
    split_mode: SplitMode,
    sampling: &SamplingOptions,
    tokens: usize,
) -> Vec<(u32, f32)> {
    let path = cases().into_iter().find(|p| p.ends_with("llama3")).unwrap();
    let options = LoadOptions {
        device,
        split_mode,
        cache_type: CacheType::F32,
        context: Some(600),
        ..LoadOptions::default()
    };
    let engine = load(&path, &options);
    let mut session = engine.session();
    let options = GenerateOptions {
        sampling: sampling.clone(),
        max_tokens: Some(tokens),
        ignore_end: true,
        logprobs: true,
        ..GenerateOptions::default()
    };
    let prompt: Vec<u32> = (1..12).collect();
    let tokens = session.generate(prompt, &options).unwrap();
    tokens.map(|token| token.map(|t| (t.id, t.logprob.unwrap())).unwrap()).collect()
}

/// A context that forgets its oldest tokens forgets the same ones everywhere.
#[test]
fn a_rotating_context_is_the_cpus() {
    let path = cases().into_iter().find(|p| p.ends_with("llama3")).unwrap();
    let tokens = |device: DeviceSpec| -> Vec<u32> {
        let options = LoadOptions {
            cache_type: CacheType::F32,
            context: Some(100),
            rotate: true,
            chunk: Some(32),
            ..LoadOptions::on(device)
        };
        let engine = load(&path, &options);
        let mut session = engine.session();
        let options = GenerateOptions {
            sampling: SamplingOptions { seed: 3, ..SamplingOptions::default() },
            max_tokens: Some(700),
            ignore_end: true,
            ..GenerateOptions::default()
        };
        let prompt: Vec<u32> = (1..50).collect();
        let tokens = session.generate(prompt, &options).unwrap();
        tokens.map(|token| token.unwrap().id).collect()
    };
    assert_eq!(tokens(DeviceSpec::Cpu), tokens("sim".parse().unwrap()));
}

/// Small caches, for prompts and for single tokens, beside one of f32. The bundled model: its heads
/// are whole blocks.
#[test]
fn a_small_cache_is_near() {
    let logits = |device: &str, cache_type: CacheType| {
        let options = LoadOptions {
            cache_type,
            context: Some(64),
            ..LoadOptions::on(device.parse().unwrap())
        };
        let mut session = load(&crate::common::stories(), &options).session();
        let tokens: Vec<u32> = (0..14).map(|i| (i * 611 + 40) % 4000).collect();
        let mut all = session.logits(&tokens[..12], LogitRows::Last(1)).unwrap().data;
        session.evaluate(&tokens[12..13], 0, &mut |_, row| all.extend_from_slice(row)).unwrap();
        session.evaluate(&tokens[13..], 0, &mut |_, row| all.extend_from_slice(row)).unwrap();
        all
    };
    let bounds = [(CacheType::Q8_0, 3e-2), (CacheType::BF16, 3e-2), (CacheType::Turbo, 2e-1)];
    for device in ["sim", "cpu"] {
        let wanted = logits(device, CacheType::F32);
        for (cache_type, bound) in bounds {
            let worst = crate::common::error(&logits(device, cache_type), &wanted);
            println!("{device} {cache_type:?}: {worst:e}");
            assert!(worst > 0.0 && worst <= bound, "{device} {cache_type:?}: {worst:e}");
        }
    }
}

/// Logits of a prompt in parts, of steps, and tokens that the device chooses, twice in turns.
fn all(path: &Path, device: &str, dispatch: Dispatch) -> (Vec<f32>, Vec<u32>) {
    let on = LoadOptions::on(device.parse().unwrap());
    let engine = load(path, &LoadOptions { dispatch, context: Some(60), chunk: Some(9), ..on });
    let tokens: Vec<u32> = (0..33).map(|i| (i * 37 + 11) % 100).collect();
    let (mut one, mut other) = (engine.session(), engine.session());
    let mut logits = one.logits(&tokens, LogitRows::Last(3)).unwrap().data;
    for token in [3, 14] {
        one.evaluate(&[token], 0, &mut |_, row| logits.extend_from_slice(row)).unwrap();
    }
    let [greedy, drawn] = [SamplingOptions::greedy(), samplings().remove(3)].map(|sampling| {
        let (max_tokens, ignore_end) = (Some(5), true);
        GenerateOptions { sampling, max_tokens, ignore_end, ..GenerateOptions::default() }
    });
    let first = one.generate(tokens[..20].to_vec(), &greedy).unwrap();
    let second = other.generate(tokens[5..18].to_vec(), &drawn).unwrap();
    let turns = first.zip(second).flat_map(|(a, b)| [a.unwrap().id, b.unwrap().id]);
    (logits, turns.collect())
}

fn dispatches_alike(path: &Path, device: &str) {
    if !simulates(device) {
        return;
    }
    let [eager, arguments, graph] = Dispatch::ALL.map(|dispatch| all(path, device, dispatch));
    assert_eq!(eager.1.len(), 10);
    assert!(eager == graph && arguments == graph);
}

/// Fixtures that have every kind of launch between them: products and attention, windows, chunks,
/// learned positions, joined matrices, sinks, experts, states.
const SAMPLE: [&str; 7] =
    ["gemma2", "gpt2", "gpt-oss", "llama4-chunks", "phi3", "qwen3", "qwen3.5-shared"];

fn dispatches_alike_on_sim(path: &Path) {
    if !testing::all_fixtures() && !SAMPLE.iter().any(|name| path.ends_with(name)) {
        return println!("one of several alike: with DELFT_ALL_FIXTURES");
    }
    dispatches_alike(path, "sim");
}
testing::fixtures!(every_dispatch_gives_the_same: dispatches_alike_on_sim);

#[test]
fn every_dispatch_gives_the_same_with_metal_text() {
    dispatches_alike(&crate::common::root().join("llama3"), "sim-metal");
}

/// The same on the device that `DELFT_TEST_DEVICE` names, such as `cuda`: nothing runs without it.
#[test]
fn the_named_device_dispatches_alike() {
    let Ok(device) = std::env::var("DELFT_TEST_DEVICE") else {
        return testing::skipped("DELFT_TEST_DEVICE is not set");
    };
    for path in cases().into_iter().filter(|path| wanted(path)) {
        let [eager, arguments, graph] = Dispatch::ALL.map(|dispatch| all(&path, &device, dispatch));
        for other in [eager, arguments] {
            assert_eq!(other.1, graph.1, "{}", path.display());
            let worst = crate::common::error(&other.0, &graph.0);
            assert!(worst <= 1e-6, "{}: {worst:e}", path.display());
        }
    }
}

#[test]
fn a_thousand_tokens_are_the_cpus() {
    same("sim", 200);
}

/// The last of several chooses; those of one kind hand their rows on by themselves, others by way
/// of the host.
#[test]
fn several_devices_choose_alike() {
    same("sim,sim", 24);
    same("sim,sim,sim", 24);
    same("sim-metal,sim-metal", 4);
}

/// Each rank chooses by itself, from the same logits.
#[test]
fn ranks_choose_alike() {
    same_by("sim,sim", SplitMode::Tensor, 200);
}

/// As [`a_thousand_tokens_are_the_cpus`], through Metal's driver: a process runs every kernel, so
/// fewer.
#[test]
fn metal_text_chooses_alike() {
    same("sim-metal", 24);
}

/// The device that `DELFT_TEST_DEVICE` names, such as `cuda`: nothing runs without it.
#[test]
fn the_named_device_chooses_alike() {
    match std::env::var("DELFT_TEST_DEVICE") {
        Ok(device) => {
            same(&device, 200);
            if device.contains(',') {
                same_by(&device, SplitMode::Tensor, 200);
            }
        }
        Err(_) => testing::skipped("DELFT_TEST_DEVICE is not set"),
    }
}

fn same(device: &str, tokens: usize) {
    same_by(device, SplitMode::Layer, tokens);
}

fn same_by(device: &str, split_mode: SplitMode, tokens: usize) {
    if !simulates(device) {
        return;
    }
    let mut seen = 0;
    for sampling in samplings() {
        let wanted = generate(DeviceSpec::Cpu, SplitMode::Layer, &sampling, tokens);
        let found = generate(device.parse().unwrap(), split_mode, &sampling, tokens);
        for (i, (a, b)) in wanted.iter().zip(&found).enumerate() {
            assert_eq!(a.0, b.0, "token {i} of {sampling:?}");
            assert!((a.1 - b.1).abs() <= 1e-3, "token {i} of {sampling:?}: {} and {}", a.1, b.1);
        }
        seen += found.len();
    }
    assert_eq!(seen, 5 * tokens);
}
