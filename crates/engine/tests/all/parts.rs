//! The parts of a model on one device: what each computes is what an engine of its own computes,
//! weights count once, and what comes and goes leaves memory as it was.

use crate::common::{load, root};
use delft_engine::models::Ending;
use delft_engine::{
    CacheType, Capability, EmbedOptions, Engine, Events, Finish, GenerateOptions, LoadOptions,
    Request, SplitMode, Stage,
};
use std::path::Path;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn options(device: &str, ending: Ending) -> LoadOptions {
    let cache_type = CacheType::F32;
    let (device, context, sessions) = (device.parse().unwrap(), Some(256), 2);
    let split_mode =
        if device == "sim,sim".parse().unwrap() { SplitMode::Tensor } else { SplitMode::Layer };
    // Else a GPU's bits follow from how much of a prompt is cached.
    let batched = true;
    let options = LoadOptions { ending, cache_type, context, sessions, ..LoadOptions::on(device) };
    LoadOptions { split_mode, batched, ..options }
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + i * 7 % 50).collect()
}

fn generated(engine: &Engine) -> Vec<(u32, Option<u32>)> {
    let options = GenerateOptions {
        max_tokens: Some(6),
        ignore_end: true,
        logprobs: true,
        ..GenerateOptions::default()
    };
    let mut outcomes = engine.batch_generate([Request::new(tokens(9), options)]);
    let outcome = outcomes.pop().unwrap();
    assert_eq!(outcome.error, None);
    outcome.tokens.iter().map(|token| (token.id, token.logprob.map(f32::to_bits))).collect()
}

fn embedded(engine: &Engine) -> Vec<Vec<u32>> {
    let found = engine.embed(&[tokens(5), tokens(30)], &EmbedOptions::default()).unwrap();
    found.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

fn nothing() -> impl FnMut(u64, u64) {
    |_, _| {}
}

#[test]
fn one_engine_generates_and_embeds_over_weights_that_count_once() {
    for (case, device) in
        [("qwen3-untied", "cpu"), ("llama3", "cpu"), ("qwen3-untied", "sim"), ("llama3", "sim,sim")]
    {
        let path = root().join(case);
        let alone =
            [Ending::Logits, Ending::Hidden].map(|ending| load(&path, &options(device, ending)));
        let (text, vectors) = (generated(&alone[0]), embedded(&alone[1]));
        // Either may be the first.
        for first in [Ending::Logits, Ending::Hidden] {
            let of = format!("{case} {device} {first:?}");
            let engine = load(&path, &options(device, first));
            let other = match first {
                Ending::Logits => Capability::Embed,
                Ending::Hidden => Capability::Generate,
            };
            let before = engine.memory().weights;
            assert_eq!(engine.capabilities().len(), 1, "{of}");
            engine.enable(other, &mut nothing()).unwrap();
            assert_eq!(engine.capabilities().len(), 2, "{of}");
            assert_eq!((generated(&engine), embedded(&engine)), (text.clone(), vectors.clone()));
            // Only the head, and norms that one of them has fused, are the other's alone.
            let (both, sum) = (
                engine.memory().weights,
                alone.iter().map(|engine| engine.memory().weights).sum::<usize>(),
            );
            assert!(both < sum * 3 / 4, "{of}: {both} of {sum}");
            for capability in [Capability::Generate, Capability::Embed] {
                assert!(engine.disable(capability, SOON));
                assert!(!engine.capabilities().contains(&capability));
                let refused = match capability {
                    Capability::Generate => {
                        let request = Request::new(tokens(3), GenerateOptions::default());
                        engine.submit(request).err().unwrap()
                    }
                    Capability::Embed => {
                        engine.embed(&[tokens(3)], &EmbedOptions::default()).unwrap_err()
                    }
                };
                assert!(refused.to_string().contains("one that is disabled"), "{refused}");
                match capability {
                    Capability::Generate => assert_eq!(embedded(&engine), vectors, "{of}"),
                    Capability::Embed => assert_eq!(generated(&engine), text, "{of}"),
                }
                engine.enable(capability, &mut nothing()).unwrap();
                assert_eq!(
                    (generated(&engine), embedded(&engine)),
                    (text.clone(), vectors.clone())
                );
            }
            assert_eq!(engine.memory().weights, both, "{of}");
            assert!(engine.disable(other, SOON));
            assert_eq!(engine.memory().weights, before, "{of}");
            assert!(engine.unload(SOON));
        }
    }
}

#[test]
fn what_is_under_way_is_waited_for_and_sessions_begin_anew() {
    let engine = load(&root().join("llama-long"), &options("cpu", Ending::Logits));
    let endless = GenerateOptions { ignore_end: true, ..GenerateOptions::default() };
    let mut running = engine.submit(Request::new(tokens(9), endless)).unwrap();
    running.next().unwrap().unwrap();
    assert!(!engine.disable(Capability::Generate, Duration::ZERO));
    assert_eq!(engine.capabilities(), [Capability::Generate]);
    running.cancel();
    assert_eq!(running.by_ref().filter(Result::is_err).count(), 0);
    assert_eq!(running.finish(), Some(&Finish::Cancelled));
    let mut session = engine.session();
    session.evaluate(&tokens(9), 8, &mut |_, _| {}).unwrap();
    assert!(engine.disable(Capability::Generate, SOON));
    assert_eq!(engine.memory().weights, 0);
    let error = session.evaluate(&[3], 0, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("9 tokens from before"), "{error}");
    let error = session.evaluate(&[3], 0, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("one that is disabled"), "{error}");
    engine.enable(Capability::Generate, &mut nothing()).unwrap();
    session.evaluate(&[3], 0, &mut |_, _| {}).unwrap();
    assert_eq!(session.tokens(), [3]);
}

#[test]
fn another_models_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &str| {
        for name in ["config.json", "model.safetensors"] {
            let aside = folder.path().join("aside");
            std::fs::copy(root().join(from).join(name), &aside).unwrap();
            std::fs::rename(aside, folder.path().join(name)).unwrap();
        }
    };
    copy("llama3");
    let engine = load(folder.path(), &options("cpu", Ending::Logits));
    let text = generated(&engine);
    copy("qwen3");
    let error = engine.enable(Capability::Embed, &mut nothing()).unwrap_err().to_string();
    assert!(error.contains("expected the model that is loaded"), "{error}");
    assert_eq!(generated(&engine), text);
    copy("llama3");
    engine.enable(Capability::Embed, &mut nothing()).unwrap();
}

#[test]
fn stages_are_told_with_their_capability() {
    let events = Events::default();
    let told = events.subscribe();
    let load_with = |path: &Path| {
        Engine::load(
            path,
            &LoadOptions { events: events.clone(), ..options("cpu", Ending::Logits) },
        )
    };
    let stages = || -> Vec<(Capability, Stage)> {
        told.try_iter().map(|event| (event.capability, event.stage)).collect()
    };
    let loading = [
        Stage::Opening,
        Stage::Planned,
        Stage::Loading,
        Stage::Packing,
        Stage::Compiling,
        Stage::Ready,
    ];
    let engine = load_with(&root().join("llama3")).unwrap();
    assert_eq!(stages(), loading.map(|stage| (Capability::Generate, stage)));
    let late = engine.events().subscribe();
    engine.enable(Capability::Embed, &mut nothing()).unwrap();
    assert_eq!(stages(), loading.map(|stage| (Capability::Embed, stage)));
    assert_eq!(late.try_iter().count(), loading.len());
    assert!(engine.disable(Capability::Embed, SOON));
    let end = [Stage::Draining, Stage::Unloaded];
    assert_eq!(stages(), end.map(|stage| (Capability::Embed, stage)));
    assert!(engine.unload(SOON));
    assert_eq!(stages(), end.map(|stage| (Capability::Generate, stage)));
    assert!(load_with(Path::new("/nowhere")).is_err());
    let failed: Vec<_> = told.try_iter().collect();
    assert_eq!(failed.last().unwrap().stage, Stage::Failed);
    assert!(failed.last().unwrap().why.as_ref().unwrap().contains("/nowhere"));
}

/// Resident bytes of this process.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * text.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
}

/// What the child of [`a_hundred_rounds_leave_memory_as_it_was`] does: alone in its process, so
/// that nobody else's memory is counted.
#[cfg(target_os = "linux")]
#[test]
fn with_a_hundred_rounds_in_a_process_of_its_own() {
    const ROUNDS: usize = 100;
    if std::env::var_os("DELFT_TEST_ROUNDS").is_none() {
        return;
    }
    let path = root().join("llama3");
    let bound = |what: &str, round: &mut dyn FnMut()| {
        // The first ones leave what is kept for ever: heaps and tables of the program.
        (0..10).for_each(|_| round());
        let before = resident();
        (0..ROUNDS).for_each(|_| round());
        let grown = resident().saturating_sub(before);
        assert!(grown < 1 << 20, "{what}: {grown} bytes more after {ROUNDS} rounds");
    };
    let mut load_and_unload = || {
        let engine = load(&path, &options("cpu", Ending::Logits));
        generated(&engine);
        assert!(engine.unload(SOON));
    };
    bound("load, unload", &mut load_and_unload);
    for device in ["cpu", "sim"] {
        let engine = load(&path, &options(device, Ending::Logits));
        generated(&engine);
        let text = generated(&engine);
        let active = |engine: &Engine| engine.memory().device.map(|usage| usage.active);
        let alone = active(&engine);
        let mut round = || {
            engine.enable(Capability::Embed, &mut nothing()).unwrap();
            if device == "cpu" {
                embedded(&engine);
            }
            assert!(engine.disable(Capability::Embed, SOON));
            assert_eq!(active(&engine), alone);
        };
        bound(device, &mut round);
        assert_eq!(generated(&engine), text);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_hundred_rounds_leave_memory_as_it_was() {
    let name = "parts::with_a_hundred_rounds_in_a_process_of_its_own";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env("DELFT_TEST_ROUNDS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_model_is_loaded_again_when_its_device_is_lost() {
    let path = root().join("llama3");
    let whole = load(&path, &options("sim", Ending::Logits));
    whole.enable(Capability::Embed, &mut nothing()).unwrap();
    let (text, vectors) = (generated(&whole), embedded(&whole));
    for embeds in [false, true] {
        device::gpu::sim::break_next(400);
        let engine = load(&path, &options("sim", Ending::Logits));
        let told = engine.events().subscribe();
        engine.enable(Capability::Embed, &mut nothing()).unwrap();
        let mut session = engine.session();
        session.evaluate(&tokens(2), 1, &mut |_, _| {}).unwrap();
        let mut failures = Vec::new();
        // Whatever comes upon it fails with one line, and what comes behind that is answered.
        let mut after = 0;
        while after < 3 {
            let found = match embeds {
                true => engine.embed(&[tokens(5)], &EmbedOptions::default()).map(drop),
                false => {
                    let options = GenerateOptions {
                        max_tokens: Some(6),
                        ignore_end: true,
                        ..GenerateOptions::default()
                    };
                    let request = Request::new(tokens(9), options);
                    let outcomes = engine.batch_generate([request.clone(), request]);
                    let failed = outcomes.into_iter().find_map(|outcome| outcome.error);
                    failed.map_or(Ok(()), Err)
                }
            };
            failures.extend(found.err().map(|error| error.to_string()));
            after += failures.len().min(1);
        }
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert!(failures[0].starts_with("sim: expected a device that works"), "{failures:?}");
        assert!(!failures[0].contains('\n'));
        assert_eq!((generated(&engine), embedded(&engine)), (text.clone(), vectors.clone()));
        let stages: Vec<_> = told.try_iter().map(|event| (event.capability, event.stage)).collect();
        for capability in [Capability::Generate, Capability::Embed] {
            let count =
                |wanted| stages.iter().filter(|stage| **stage == (capability, wanted)).count();
            assert_eq!(count(Stage::Lost), 1, "{stages:?}");
            let expected = if capability == Capability::Embed { 2 } else { 1 };
            assert_eq!(count(Stage::Ready), expected, "{stages:?}");
        }
        let error = session.evaluate(&[3], 0, &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains("2 tokens from before"), "{error}");
        let memory = engine.memory();
        assert_eq!(memory.weights, whole.memory().weights);
    }
}
