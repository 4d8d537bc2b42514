//! Adapters: against PEFT, beside each other in one step, and added while an engine runs; on the
//! CPU and on a GPU, the simulated one unless `DELFT_TEST_DEVICE` names another.

use crate::common::{Expected, error, load, root};
use delft_engine::{
    AdapterFile, Adapters, CacheType, DeviceSpec, Engine, GenerateOptions, LoadOptions, LogitRows,
    Request, SamplingOptions, Session, SplitMode,
};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    root().join("../adapters")
}

fn file(path: impl AsRef<Path>) -> AdapterFile {
    AdapterFile { path: fixtures().join(path), scale: 1.0, any_base: false }
}

fn options(files: &[&str], more: usize) -> LoadOptions {
    let files = files.iter().map(file).collect();
    let adapters = Adapters { files, more, rank: 8, experts: false, tables: false };
    LoadOptions { adapters, cache_type: CacheType::F32, ..LoadOptions::default() }
}

/// The same on a GPU.
fn on_a_gpu(options: LoadOptions) -> LoadOptions {
    let device = std::env::var("DELFT_TEST_DEVICE").unwrap_or_else(|_| "sim".to_owned());
    LoadOptions { device: device.parse::<DeviceSpec>().unwrap(), ..options }
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
    ("transposed", "gpt2", &["transposed"]),
    ("three", "llama2", &["three"]),
    ("hybrid", "qwen3.5-shared", &["hybrid"]),
    // Which has heads of values in another order.
    ("hybrid", "qwen3.5-shared/model.f32.gguf", &["hybrid"]),
    ("next", "qwen3-next", &["next"]),
    ("neox", "gpt-neox", &["neox"]),
    ("pieces", "olmo_hybrid", &["pieces"]),
    ("pieces-some", "kimi_linear", &["pieces-some"]),
    ("anew", "llama3", &["anew"]),
    ("anew", "llama3/model.f32.gguf", &["anew"]),
    ("tokens", "llama3", &["tokens"]),
    ("tokens", "llama3/model.f32.gguf", &["tokens"]),
    ("biased", "llama-bias", &["biased"]),
    ("experts", "mixtral", EXPERTS),
    ("experts", "mixtral/model.f32.gguf", EXPERTS),
    ("experts-ranks", "gemma4-moe", &["experts-ranks"]),
    ("experts-turned", "gpt-oss", &["experts-turned"]),
    ("experts-turned", "gpt-oss/model.f32.gguf", &["experts-turned"]),
    ("experts-weighed", "llama4", &["experts-weighed"]),
];

const EXPERTS: &[&str] = &["experts", "experts/apart", "experts/mlx", "experts/adapter.gguf"];

fn session(engine: &Engine, adapter: Option<usize>) -> Session {
    let mut session = engine.session();
    session.set_adapter(adapter.map(|i| engine.adapters()[i].clone())).unwrap();
    session
}

/// Logits of a prompt, and of the same tokens one at a time.
fn both(engine: &Engine, adapter: Option<usize>, tokens: &[u32]) -> [Vec<f32>; 2] {
    let prompt = session(engine, adapter).logits(tokens, LogitRows::All).unwrap().data;
    let (mut each, mut decoded) = (session(engine, adapter), Vec::new());
    for token in tokens {
        each.evaluate(&[*token], 0, &mut |_, row| decoded.extend_from_slice(row)).unwrap();
    }
    [prompt, decoded]
}

/// An engine's logits with an adapter are PEFT's, and without one those of an engine that has no
/// room for any, to the bit; but a GPU computes experts by other kernels where adapters may change
/// them, and the CPU caches latents in place of heads' keys and values only where none may.
fn compare(
    case: &str,
    base: &str,
    stored: &[&str],
    sizes: &[(Option<usize>, usize)],
    on: fn(LoadOptions) -> LoadOptions,
) {
    let expected = Expected::open(&fixtures().join(case).join("expected.safetensors"));
    let tokens = expected.ids("input_ids");
    let want = expected.floats("logits").unwrap();
    // Phi-3's rotation follows the context, and the prompts fill the shorter one.
    let context = base.starts_with("phi3").then_some(tokens.len());
    let options = |files: &[&str], more| on(LoadOptions { context, ..options(files, more) });
    for (chunk, more) in sizes {
        // What GPUs compute follows from how a prompt is cut.
        let plain = LoadOptions { chunk: *chunk, ..options(&[], 0) };
        let plain = both(&load(&root().join(base), &plain), None, &tokens);
        for stored in stored {
            let options = LoadOptions { chunk: *chunk, ..options(&[stored], *more) };
            let engine = load(&root().join(base), &options);
            for logits in both(&engine, Some(0), &tokens) {
                let worst = error(&logits, &want);
                assert!(worst <= 1e-4, "{base}, {stored}: {worst:e}");
            }
            let same = both(&engine, None, &tokens);
            let other = match options.device == DeviceSpec::default() {
                true => base.starts_with("kimi"),
                false => case.starts_with("experts"),
            };
            let near = same.iter().zip(&plain).all(|(same, plain)| error(same, plain) < 1e-5);
            assert!(same == plain || (other && near), "{base}, {stored}: bits without an adapter");
        }
    }
}

#[test]
fn logits_are_pefts_and_without_an_adapter_the_bits_stay() {
    for (case, base, stored) in CASES {
        compare(case, base, stored, &[(None, 0), (Some(7), 1)], |options| options);
    }
    // The CPU does not round factors that bf16 does not hold.
    compare("floats", "qwen3", &["floats"], &[(None, 0), (Some(7), 1)], |options| options);
}

#[test]
fn logits_on_a_gpu_are_pefts_too() {
    // A GPU rounds factors to bf16: those of these cases, or their products with a ratio of scales,
    // are not exact there.
    let held = |(case, base, _): &&(&str, &str, &[&str])| {
        !base.contains('/') && !["pieces", "pieces-some"].contains(case)
    };
    for (case, base, stored) in CASES.iter().filter(held) {
        compare(case, base, &stored[..1], &[(None, 0)], on_a_gpu);
    }
    compare("tables", "llama3", &["tables"], &[(Some(7), 1)], on_a_gpu);
    // As for many sequences, few and more.
    for sessions in [2, 9] {
        let on: fn(LoadOptions) -> LoadOptions = match sessions {
            2 => |options| LoadOptions { batched: true, sessions: 2, ..on_a_gpu(options) },
            _ => |options| LoadOptions { batched: true, sessions: 9, ..on_a_gpu(options) },
        };
        compare("lora", "llama3", &["lora"], &[(None, 1)], on);
        compare("dora", "llama-bias", &["dora"], &[(None, 0)], on);
    }
}

/// A model of which each device has a share of every layer.
fn sharing(devices: &str, options: LoadOptions) -> LoadOptions {
    let device = devices.parse::<DeviceSpec>().unwrap();
    LoadOptions { device, split_mode: SplitMode::Tensor, ..options }
}

/// Each rank has its rows or columns of the factors; sums and logits are all ranks' together.
#[test]
fn ranks_share_adapters_with_their_matrices() {
    let two = |options| sharing("sim,sim", options);
    for name in [
        "lora",
        "dora",
        "tables",
        "fused",
        "experts",
        "experts-ranks",
        "experts-turned",
        "experts-weighed",
    ] {
        let (case, base, stored) = CASES.iter().find(|(case, ..)| *case == name).unwrap();
        compare(case, base, &stored[..1], &[(None, 0)], two);
    }
    compare("tables", "llama3", &["tables"], &[(Some(7), 1)], two);
    compare("anew", "llama3", &["anew"], &[(None, 1)], two);
    compare("biased", "llama-bias", &["biased"], &[(None, 0)], two);
    compare("three", "llama2", &["three"], &[(None, 0)], |options| sharing("sim,sim,sim", options));
    // Each expert has three blocks: one of four ranks has none in a layer.
    compare("experts-weighed", "llama4", &["experts-weighed"], &[(Some(7), 1)], |options| {
        sharing("sim,sim,sim,sim", options)
    });
    compare("dora", "llama-bias", &["dora"], &[(None, 1)], |options| LoadOptions {
        batched: true,
        sessions: 3,
        ..sharing("sim,sim", options)
    });
}

#[test]
fn adapters_come_and_go_while_ranks_run() {
    come_and_go(|options| sharing("sim,sim", options));
}

#[test]
fn adapters_are_shared_out_with_their_layers() {
    let several = |options| LoadOptions { device: "sim,sim".parse().unwrap(), ..options };
    compare("tables", "llama3", &["tables"], &[(None, 0)], several);
    let behind =
        |options| LoadOptions { device: "sim".parse().unwrap(), gpu_layers: Some(1), ..options };
    compare("lora", "llama3", &["lora"], &[(None, 1)], behind);
}

/// Models that are packed, whose activations are rounded to 16 bits.
#[test]
fn quantised_bases_on_a_gpu_keep_their_bits() {
    let path = root().join("qwen3/model.q8_0.gguf");
    let tokens: Vec<u32> = (0..30).map(|i| (i * 37 + 11) % 120 + 3).collect();
    for (batched, sessions) in [(false, 1), (true, 2), (true, 12)] {
        let of = |more| {
            let options = LoadOptions { batched, sessions, ..options(&[], more) };
            let options = LoadOptions { cache_type: CacheType::F16, ..options };
            both(&load(&path, &on_a_gpu(options)), None, &tokens)
        };
        assert!(of(0) == of(2), "a model with room for adapters, {sessions} sessions");
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
    let some = [None, Some(0), Some(1), Some(0), None];
    mix("llama3", &options(&["lora", "rslora"], 0), &some);
    // Gains need the residual, which rows beside them have overwritten by their products.
    mix("llama-bias", &options(&["dora"], 0), &[None, Some(0), None, Some(0)]);
    // As many rows as workers share out otherwise, of a quantised model.
    let many = [some; 3].concat();
    let mut quantised = options(&["floats"], 0);
    quantised.adapters.files.push(AdapterFile { scale: 0.5, ..file("floats") });
    mix("qwen3/model.q8_0.gguf", &quantised, &many);
}

/// Rows of several adapters and of none, in 16 bits and in 32, and as many as take other kernels.
#[test]
fn each_sequence_of_a_step_of_a_gpu_has_its_own() {
    for (sessions, cache_type) in [(6, CacheType::F32), (4, CacheType::F16), (12, CacheType::BF16)]
    {
        let options =
            LoadOptions { sessions, cache_type, batched: true, ..options(&["lora", "rslora"], 0) };
        // One is computed alone beside them.
        let some = &[None, Some(0), Some(1), Some(0), None][..(sessions - 1).min(5)];
        mix("llama3", &on_a_gpu(options), some);
    }
}

/// Sequences with these adapters compute together what each computes alone.
fn mix(base: &str, options: &LoadOptions, adapters: &[Option<usize>]) {
    let engine = load(&root().join(base), options);
    let prompt: Vec<u32> = (0..12).map(|i| i * 7 + 3).collect();
    let mut sessions: Vec<Session> = adapters.iter().map(|a| session(&engine, *a)).collect();
    for session in &mut sessions {
        session.logits(&prompt, LogitRows::Last(1)).unwrap();
    }
    let options = SamplingOptions::greedy();
    let chosen =
        Session::generate_together(&mut sessions, &vec![5; adapters.len()], 8, &options).unwrap();
    let mut found = Vec::new();
    for ((adapter, together), chosen) in adapters.iter().zip(&mut sessions).zip(&chosen) {
        let mut alone = session(&engine, *adapter);
        alone.logits(&prompt, LogitRows::Last(1)).unwrap();
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
    // Their blocks are others' now.
    drop(sessions);
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
    come_and_go(|options| options);
}

#[test]
fn adapters_come_and_go_while_a_gpu_runs() {
    come_and_go(on_a_gpu);
}

fn come_and_go(on: fn(LoadOptions) -> LoadOptions) {
    let engine = load(&root().join("llama3"), &on(options(&["lora"], 1)));
    let tokens: Vec<u32> = (0..9).map(|i| i * 11 + 4).collect();
    let logits = |adapter| {
        let mut session = engine.session();
        session.set_adapter(adapter).unwrap();
        session.logits(&tokens, LogitRows::All).unwrap().data
    };
    let compiled = {
        logits(None);
        logits(Some(engine.adapters()[0].clone()));
        engine.compiled()
    };
    let added = engine.adapt(&file("rslora")).unwrap();
    let fixed = load(&root().join("llama3"), &on(options(&["rslora"], 0)));
    let want = session(&fixed, Some(0)).logits(&tokens, LogitRows::All).unwrap().data;
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

/// GGUF files have these heads in another order than PEFT's factors.
#[test]
fn matrices_whose_heads_lie_otherwise_are_refused() {
    let path = root().join("gpt-neox/model.f32.gguf");
    let why = Engine::load(path, &options(&["neox"], 0)).err().unwrap().to_string();
    assert!(why.contains("rows lie alike") && why.contains("safetensors"), "{why}");
}

#[test]
fn a_session_that_changes_its_adapter_begins_anew() {
    let engine = load(&root().join("llama3"), &options(&["lora"], 0));
    let tokens: Vec<u32> = (0..9).map(|i| i * 11 + 4).collect();
    let mut one = session(&engine, Some(0));
    let adapted = one.logits(&tokens, LogitRows::Last(1)).unwrap().data;
    one.set_adapter(Some(engine.adapters()[0].clone())).unwrap();
    assert_eq!(one.tokens().len(), 9, "the same adapter changes nothing");
    one.set_adapter(None).unwrap();
    assert!(one.tokens().is_empty());
    assert!(one.logits(&tokens, LogitRows::Last(1)).unwrap().data != adapted);
}

#[test]
fn an_adapter_that_says_so_is_its_models_alone() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(fixtures().join("lora").join(name), folder.path().join(name)).unwrap();
    }
    let load = |any_base| {
        let path = folder.path().to_owned();
        let files = vec![AdapterFile { path, scale: 1.0, any_base }];
        let adapters = Adapters { files, ..Adapters::default() };
        Engine::load(root().join("llama3"), &LoadOptions { adapters, ..LoadOptions::default() })
    };
    let warned = |engine: &Engine| {
        engine.warnings().iter().any(|line| line.contains("does not say which model"))
    };
    let engine = load(false).unwrap();
    assert!(warned(&engine));
    let made_for = |text: String| std::fs::write(folder.path().join("delft.json"), text).unwrap();
    let says = |fingerprint: &str| {
        format!(r#"{{"made_of": {{"model": "a llama", "model_fingerprint": "{fingerprint}"}}}}"#)
    };
    made_for(says(engine.fingerprint()));
    assert!(!warned(&load(false).unwrap()));
    made_for(says("0123456789abcdef"));
    let why = load(false).err().unwrap().to_string();
    for part in ["made for this model", "a llama, 0123456789ab", "adapters of other models"] {
        assert!(why.contains(part) && !why.contains('\n'), "{why}");
    }
    assert!(!warned(&load(true).unwrap()));
    for (text, part) in [("{", "JSON"), ("{}", "made_of.model_fingerprint")] {
        made_for(text.to_owned());
        let why = load(true).err().unwrap().to_string();
        assert!(why.contains("delft.json") && why.contains(part), "{why}");
    }
}
