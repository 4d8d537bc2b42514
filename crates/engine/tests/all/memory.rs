//! What a device's memory is said to hold, beside what it holds.

use crate::common::{load, root};
use delft_engine::{
    Adapters, CacheType, DeviceSpec, Engine, GenerateOptions, LoadOptions, Plan, SamplingOptions,
    SplitMode, Trace,
};

fn sim() -> DeviceSpec {
    "sim".parse().unwrap()
}

/// The plan made before loading is within 5% of the peak once a whole context has been used and
/// tokens were chosen.
#[test]
fn the_plan_is_the_peak() {
    let all: fn(LoadOptions) -> LoadOptions = |options| options;
    let last: fn(LoadOptions) -> LoadOptions =
        |options| LoadOptions { gpu_layers: Some(1), ..options };
    let without_experts: fn(LoadOptions) -> LoadOptions =
        |options| LoadOptions { cpu_experts: usize::MAX, ..options };
    let tensor: fn(LoadOptions) -> LoadOptions =
        |options| LoadOptions { split_mode: SplitMode::Tensor, ..options };
    for (case, context, cache_type, share, device) in [
        ("llama-long", 600, CacheType::F16, all, "sim"),
        ("llama-long", 1000, CacheType::F32, all, "sim"),
        ("mistral-long", 500, CacheType::BF16, all, "sim"),
        ("qwen2-window", 300, CacheType::F16, all, "sim"),
        ("llama-long", 600, CacheType::F16, last, "sim"),
        ("qwen3-moe", 250, CacheType::F16, without_experts, "sim"),
        ("llama-long", 600, CacheType::F16, all, "sim,sim"),
        ("llama-long", 600, CacheType::F16, all, "sim,sim,sim"),
        ("llama-long", 600, CacheType::F16, last, "sim,sim"),
        ("llama-long", 600, CacheType::F16, tensor, "sim,sim"),
        ("mixtral", 60, CacheType::F16, tensor, "sim,sim"),
    ] {
        let device: DeviceSpec = device.parse().unwrap();
        let options = share(LoadOptions {
            context: Some(context),
            chunk: Some(64),
            cache_type,
            ..LoadOptions::on(device)
        });
        let path = root().join(case);
        let prepared = Engine::prepare(&path, &options).unwrap();
        let planned = prepared.plan().to_vec();
        assert_eq!(planned.len(), prepared.places().len());
        let gpus = prepared.places().iter().filter(|place| **place != DeviceSpec::Cpu);
        assert_eq!(gpus.copied().collect::<Vec<_>>(), device.each());
        let shared = options.gpu_layers.is_some() || options.cpu_experts > 0;
        assert_eq!(prepared.places().contains(&DeviceSpec::Cpu), shared);
        // What the machine has left changes from one moment to the next.
        let lasting = |plan: &Plan| Plan { free: plan.free.filter(|_| !plan.host), ..*plan };
        let engine = load(&path, &options);
        let lasts = |plans: &[Plan]| plans.iter().map(lasting).collect::<Vec<_>>();
        assert_eq!(lasts(engine.plan()), lasts(&planned), "{case}");
        let mut session = engine.session();
        let prompt: Vec<u32> = (0..context as u32 - 4).map(|i| i * 7 % 100).collect();
        let generate = GenerateOptions {
            sampling: SamplingOptions { top_k: 5, ..SamplingOptions::default() },
            ignore_end: true,
            ..GenerateOptions::default()
        };
        // What choosing works with is there before the cache grows, as it is on a GPU.
        let first =
            session.generate(vec![1], &GenerateOptions { max_tokens: Some(2), ..generate.clone() });
        assert_eq!(first.unwrap().filter(Result::is_ok).count(), 2);
        let tokens = session.generate(prompt, &generate).unwrap();
        let tokens: Vec<_> = tokens.map(|token| token.unwrap().id).collect();
        assert_eq!(tokens.len(), 5, "{case}");
        let used = engine.memory().device.unwrap();
        let weights: usize = planned.iter().map(|plan| plan.weights).sum();
        assert_eq!(engine.memory().weights, weights, "{case}, {device}");
        let planned: usize = planned.iter().filter(|plan| !plan.host).map(Plan::peak).sum();
        let (planned, peak) = (planned as f64, used.peak as f64);
        assert!(
            (planned / peak - 1.0).abs() <= 0.05,
            "{case}, {device}: planned {planned}, peak {peak}"
        );
        assert!(used.active <= used.peak && used.peak <= used.limit);
    }
}

/// Each of several ranks plans and holds its share of every expert. What experts take is what one GPU
/// has less without them.
#[test]
fn ranks_have_their_shares_of_experts() {
    for (case, ranks) in
        [("mixtral", 2), ("mixtral", 4), ("llama4", 2), ("mixtral/model.q8_0-split.gguf", 2)]
    {
        let path = root().join(case);
        let planned = |device: &str, cpu_experts: usize, split_mode| -> Vec<usize> {
            let on = LoadOptions::on(device.parse().unwrap());
            let options = LoadOptions { cpu_experts, split_mode, ..on };
            let plan = Engine::prepare(&path, &options).unwrap().plan().to_vec();
            plan.iter().filter(|plan| !plan.host).map(|plan| plan.weights).collect()
        };
        let whole = planned("sim", 0, SplitMode::Layer)[0];
        let rest = planned("sim", usize::MAX, SplitMode::Layer)[0];
        let shares = planned(&vec!["sim"; ranks].join(","), 0, SplitMode::Tensor);
        assert_eq!(shares.len(), ranks);
        let experts = whole - rest;
        println!("{case}: {experts} of {whole} bytes are experts'; ranks have {shares:?}");
        for share in &shares {
            assert!(*share <= rest + experts.div_ceil(ranks), "{case}: {shares:?} of {whole}");
        }
        // No rank has another's: all have what is whole on each, and the experts once.
        let all: usize = shares.iter().sum();
        assert!((whole..ranks * rest + experts + 1).contains(&all), "{case}: {shares:?}");
    }
}

/// The CPU caches a row of latents for all heads, twice, and GPUs once where they are loaded for many
/// sequences; other GPUs, and loads with room for adapters, cache each head's keys and values.
#[test]
fn latents_are_cached_once_for_all_heads() {
    for case in ["deepseek3", "deepseek3/model.q8_0.gguf", "minicpm3"] {
        let path = root().join(case);
        let planned = |device: &str, batched: bool, adapters: Adapters| {
            let (cache_type, context) = (CacheType::F32, Some(256));
            let on = LoadOptions::on(device.parse().unwrap());
            let options = LoadOptions { adapters, cache_type, context, batched, ..on };
            Engine::prepare(&path, &options).unwrap().plan()[0].cache
        };
        let none = Adapters::default;
        let room = Adapters { more: 1, rank: 4, ..none() };
        let (latents, heads) = (planned("cpu", false, none()), planned("cpu", false, room));
        println!("{case}: {latents} bytes for {heads}");
        assert!(latents < heads, "{case}: {latents} of {heads}");
        assert!(planned("sim", false, none()) > 2 * latents, "{case}");
        let crowded = planned("sim", true, none());
        assert!(crowded < latents, "{case}: {crowded}, {latents} twice");
    }
}

#[test]
fn the_cpu_plans_what_its_executor_holds() {
    for (case, context, rotate) in [
        ("llama3", 500, false),
        ("llama-k-quants/model.q4_k_m.gguf", 300, false),
        ("mistral-long", 900, false),
        ("mistral-long", 100, true),
    ] {
        let path = root().join(case);
        let (context, chunk) = (Some(context), Some(64));
        let options = LoadOptions { context, chunk, rotate, ..LoadOptions::default() };
        let engine = load(&path, &options);
        let [plan] = engine.plan() else { panic!("{case}: one plan") };
        assert!(plan.host && plan.free.is_none_or(|free| free > plan.needed()));
        let mut session = engine.session();
        // Once around where it rotates; the last few with logits.
        let tokens = if rotate { 700 } else { engine.info().context as u32 };
        let tokens: Vec<u32> = (0..tokens).map(|i| i * 7 % 60).collect();
        session.evaluate(&tokens, tokens.len() - 64, &mut |_, _| {}).unwrap();
        let held = engine.memory();
        assert_eq!((plan.weights, held.device), (held.weights, None), "{case}");
        assert_eq!(plan.cache, held.cache, "{case}: every block of it was used");
        assert!(plan.arena >= held.arena && held.arena > 0, "{case}: {plan:?}, {held:?}");
    }
}

#[test]
fn what_the_machine_has_no_memory_for_is_refused_before_it_is_taken() {
    let path = root().join("llama3");
    let options = LoadOptions { context: Some(1 << 40), ..LoadOptions::default() };
    let prepared = Engine::prepare(&path, &options).unwrap();
    if prepared.plan()[0].free.is_none() {
        return testing::skipped("this system does not tell what memory is free");
    }
    let why = prepared.load(&mut |_, _| panic!("weights are read")).err().unwrap().to_string();
    assert!(why.starts_with("cpu: expected ") && why.contains(" free (hint: context "), "{why}");
    let told: usize =
        why.split("hint: context ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let fits = LoadOptions { context: Some(told), ..LoadOptions::default() };
    assert!(told.is_power_of_two() && Engine::load(&path, &fits).is_ok(), "{why}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let path = root().join("llama3");
    let refused = |options: LoadOptions| {
        Engine::load(&path, &options).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let gpu_layers = Some(1);
    let why = refused(LoadOptions { gpu_layers, ..LoadOptions::default() });
    assert!(why.contains("a GPU to put layers on"), "{why}");
    let why = refused(LoadOptions { gpu_layers, trace: Trace::Layers, ..LoadOptions::on(sim()) });
    assert!(why.contains("one device"), "{why}");
    let several = || "sim,sim".parse().unwrap();
    let why = refused(LoadOptions { trace: Trace::Layers, ..LoadOptions::on(several()) });
    assert!(why.contains("one device"), "{why}");
    let why = refused(LoadOptions::on("sim,sim,sim,sim".parse().unwrap()));
    assert!(why.contains("1 to 3 devices"), "{why}");
    let split_mode = SplitMode::Tensor;
    let why = refused(LoadOptions { split_mode, ..LoadOptions::on(sim()) });
    assert!(why.contains("split mode tensor: expected several"), "{why}");
    let why = refused(LoadOptions { split_mode, gpu_layers, ..LoadOptions::on(several()) });
    assert!(why.contains("all layers on the GPUs"), "{why}");
    let three = "sim,sim,sim".parse().unwrap();
    let why = refused(LoadOptions { split_mode, ..LoadOptions::on(three) });
    assert!(why.contains("heads that 3 GPUs can share") && why.contains("hint"), "{why}");
    // Heads of eight elements, on the GPU and on the CPU.
    let cache_type = CacheType::Q8_0;
    let why = refused(LoadOptions { cache_type, ..LoadOptions::on(sim()) });
    assert!(why.contains("a multiple of 32") && why.contains("cache type"), "{why}");
    let why = refused(LoadOptions { cache_type, ..LoadOptions::default() });
    assert!(why.contains("a multiple of 32") && why.contains("cache type"), "{why}");
    let cache_type = CacheType::Turbo;
    let why = refused(LoadOptions { cache_type, ..LoadOptions::on(sim()) });
    assert!(why.contains("a cache of turbo") && why.contains("cache type"), "{why}");
    // As many layers as there are, or more: all of the model.
    for layers in [0, 2, 99] {
        let options = LoadOptions { gpu_layers: Some(layers), ..LoadOptions::on(sim()) };
        let engine = Engine::load(&path, &options).unwrap();
        assert_eq!(engine.info().device.name, if layers == 0 { "cpu" } else { "sim" });
    }
}
