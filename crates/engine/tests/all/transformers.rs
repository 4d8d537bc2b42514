//! The CPU device against Hugging Face Transformers: logits of a prefill and of ten decode steps, per architecture.

use crate::common::{Expected, cases, error, load};
use delft_engine::{CacheType, Engine, LoadOptions, Place, Rows, SplitMode};

/// Runs a case in chunks of `chunk` and returns the worst error relative to the logit range.
fn worst(path: &std::path::Path, expected: &Expected, options: &LoadOptions) -> f32 {
    let engine = load(path, options);
    let mut session = engine.session();
    let prompt = expected.ids("input_ids");
    let first = expected.ids("first_row")[0] as usize;
    let logits = session.logits(&prompt, Rows::Last(prompt.len() - first)).unwrap();
    let mut worst = error(&logits.data, &expected.floats("logits").unwrap());
    let all = expected.floats("decode.logits").unwrap();
    let vocab = engine.info().vocab;
    for (i, &token) in expected.ids("decode.tokens").iter().enumerate() {
        session
            .evaluate(&[token], 0, &mut |_, row| {
                worst = worst.max(error(row, &all[i * vocab..][..vocab]))
            })
            .unwrap();
    }
    worst
}

#[test]
fn f32_checkpoints_agree_to_1e_4() {
    for case in cases() {
        let expected = Expected::open(&case.join("expected.safetensors"));
        // bf16 and f16 checkpoints are exact in f32 too: products take stored weights as they are.
        for chunk in [512, 7] {
            let options = LoadOptions {
                cache_type: CacheType::F32,
                chunk: Some(chunk),
                ..Default::default()
            };
            let worst = worst(&case, &expected, &options);
            assert!(worst <= 1e-4, "{}: chunks of {chunk}: {worst:e}", case.display());
        }
    }
}

#[test]
fn an_f16_cache_stays_within_2e_3() {
    for case in cases() {
        let expected = Expected::open(&case.join("expected.safetensors"));
        let worst = worst(&case, &expected, &LoadOptions::default());
        assert!(worst <= 2e-3, "{}: {worst:e}", case.display());
    }
}

#[test]
fn bf16_arithmetic_agrees_to_2e_2() {
    let mut seen = 0;
    for case in cases() {
        let expected = Expected::open(&case.join("expected.safetensors"));
        let Some(want) = expected.floats("logits_bf16") else { continue };
        let engine = load(&case, &LoadOptions::default());
        let prompt = expected.ids("input_ids");
        let got = engine.session().logits(&prompt, Rows::All).unwrap();
        let worst = error(&got.data, &want);
        assert!(worst <= 2e-2, "{}: {worst:e}", case.display());
        seen += 1;
    }
    assert!(seen >= 1);
}

#[test]
fn gguf_twins_agree() {
    let mut twins = 0;
    for (path, truth, exact) in crate::common::twins() {
        let expected = Expected::open(&truth);
        let options = LoadOptions { cache_type: CacheType::F32, ..Default::default() };
        let worst = worst(&path, &expected, &options);
        // Quantised products round the activations to eight bits, as llama.cpp's do: see the fixtures' README.
        let bound = if exact { 1e-4 } else { 3e-2 };
        assert!(worst <= bound, "{}: {worst:e}", path.display());
        twins += 1;
    }
    assert!(twins >= 5, "{twins} twins");
}

/// LongRoPE's factors are those of the context that is loaded, and a line says which.
#[test]
fn a_rotation_that_follows_the_context_is_told() {
    let case = crate::common::root().join("phi3");
    for (context, says) in [
        (Some(16), "for 16 positions, of 16 trained: those of the first training"),
        (Some(17), "for 17 positions, of 16 trained: the factors for long contexts"),
        (None, "for 256 positions, of 16 trained: the factors for long contexts"),
    ] {
        let engine = load(&case, &LoadOptions { context, ..Default::default() });
        let told = engine.warnings().iter().any(|line| line.contains(says));
        assert!(told, "{context:?}: {:?}", engine.warnings());
    }
}

/// The shared GPU lowering, kernel by kernel: every fixture and every twin.
fn simulated(device: &str, only: &[&str]) {
    let device: Place = device.parse().unwrap();
    let chosen = |path: &std::path::Path| {
        only.is_empty() || path.components().any(|c| only.iter().any(|o| c.as_os_str() == *o))
    };
    let plain = cases().into_iter().map(|path| {
        let truth = path.join("expected.safetensors");
        (path, truth, true)
    });
    let mut seen = 0;
    for (path, truth, exact) in plain.chain(crate::common::twins()).filter(|c| chosen(&c.0)) {
        let expected = Expected::open(&truth);
        let exact = if exact { 1e-4 } else { 3e-2 };
        for (cache_type, bound, chunk) in [
            (CacheType::F32, exact, 512),
            (CacheType::F32, exact, 7),
            (CacheType::F16, 2e-2_f32.max(exact), 512),
        ] {
            let options =
                LoadOptions { device, cache_type, chunk: Some(chunk), ..Default::default() };
            let worst = worst(&path, &expected, &options);
            let what = format!("{}: {device}, {cache_type:?} in chunks of {chunk}", path.display());
            println!("{what}: {worst:e}");
            assert!(worst <= bound, "{what}: {worst:e}");
            seen += 1;
        }
    }
    assert!(seen >= 6);
}

#[test]
fn a_simulated_gpu_agrees() {
    simulated("sim", &[]);
}

#[test]
fn metal_text_agrees() {
    simulated("sim-metal", &["llama3", "qwen3"]);
}

#[test]
fn cuda_text_agrees() {
    simulated("sim-cuda", &["qwen3"]);
}

/// Two layers and the head on two devices and on three; the device's own tests do this with every fixture.
#[test]
fn layers_on_several_devices_agree() {
    for device in ["sim,sim", "sim,sim,sim"] {
        simulated(device, &["llama3", "mistral-full", "qwen3"]);
    }
}

/// The same, with the value at the cut handed over by the host, as between devices that do not reach each other.
#[test]
fn layers_on_devices_that_do_not_reach_each_other_agree() {
    simulated("sim-metal,sim-metal", &["llama3"]);
}

/// Every layer shared by two ranks. Heads that two cannot share are refused, and so are blocks that a cut would go through.
fn shared_by_two(device: &str) {
    let device: Place = device.parse().unwrap();
    let plain =
        cases().into_iter().map(|path| (path.clone(), path.join("expected.safetensors"), true));
    let (mut agreed, mut refused) = (0, 0);
    for (path, truth, exact) in plain.chain(crate::common::twins()) {
        let expected = Expected::open(&truth);
        let exact = if exact { 1e-4 } else { 3e-2 };
        for (cache_type, bound, chunk) in [
            (CacheType::F32, exact, 512),
            (CacheType::F32, exact, 7),
            (CacheType::F16, 2e-2_f32.max(exact), 512),
        ] {
            let split_mode = SplitMode::Tensor;
            let on = LoadOptions::on(device);
            let options = LoadOptions { split_mode, cache_type, chunk: Some(chunk), ..on };
            if let Err(why) = Engine::prepare(&path, &options) {
                let why = why.to_string();
                let known = ["key/value heads that 2 GPUs can share", "parts of whole blocks of"];
                assert!(known.iter().any(|k| why.contains(k)), "{}: {why}", path.display());
                println!("{}: refused: {why}", path.display());
                refused += 1;
                continue;
            }
            let worst = worst(&path, &expected, &options);
            let what = format!("{}: {cache_type:?} in chunks of {chunk}", path.display());
            println!("{what}: {worst:e}");
            assert!(worst <= bound, "{what}: {worst:e}");
            agreed += 1;
        }
    }
    assert!(agreed >= 30 && refused >= 3, "{agreed} agreed, {refused} refused");
}

#[test]
fn layers_shared_by_two_ranks_agree() {
    shared_by_two("sim,sim");
}

/// The first layer on the CPU, the last on the GPU: as near as on either alone.
fn on_two_devices(device: &str) {
    for case in cases() {
        let expected = Expected::open(&case.join("expected.safetensors"));
        for (cache_type, bound, chunk) in
            [(CacheType::F32, 1e-4, 512), (CacheType::F32, 1e-4, 7), (CacheType::F16, 2e-2, 512)]
        {
            let device = device.parse().unwrap();
            let on = LoadOptions::on(device);
            let options = LoadOptions { gpu_layers: Some(1), cache_type, chunk: Some(chunk), ..on };
            let worst = worst(&case, &expected, &options);
            let what = format!("{}: {cache_type:?} in chunks of {chunk}", case.display());
            assert!(worst <= bound, "{what}: {worst:e}");
        }
    }
}

#[test]
fn a_model_on_two_devices_agrees() {
    on_two_devices("sim");
}

/// A cache of bf16, everywhere: eight bits of keys and values.
#[test]
fn a_bf16_cache_stays_within_3e_2() {
    for case in cases() {
        let expected = Expected::open(&case.join("expected.safetensors"));
        for device in ["cpu", "sim"] {
            let on = LoadOptions::on(device.parse().unwrap());
            let options = LoadOptions { cache_type: CacheType::BF16, ..on };
            let worst = worst(&case, &expected, &options);
            assert!(worst <= 3e-2, "{}: {device}: {worst:e}", case.display());
        }
    }
}

/// The device that `DELFT_TEST_DEVICE` names, such as `cuda`: nothing runs without it.
#[test]
fn the_named_device_agrees() {
    match std::env::var("DELFT_TEST_DEVICE") {
        Ok(device) => {
            simulated(&device, &[]);
            match device.contains(',') {
                true => shared_by_two(&device),
                false => on_two_devices(&device),
            }
        }
        Err(_) => println!("skipped: DELFT_TEST_DEVICE is not set"),
    }
}
