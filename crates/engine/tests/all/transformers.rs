//! The CPU device against Hugging Face Transformers: logits of a prefill and of ten decode steps,
//! per architecture.

use crate::common::{Expected, cases, error, load, root, simulates, twin_truth, twins, wanted};
use delft_engine::{CacheType, Engine, LoadOptions, LogitRows, SplitMode};
use std::path::{Path, PathBuf};

/// Runs a case in chunks of `chunk` and returns the worst error relative to the logit range.
fn worst(path: &Path, expected: &Expected, options: &LoadOptions) -> f32 {
    let engine = load(path, options);
    let mut session = engine.session();
    let prompt = expected.ids("input_ids");
    let first = expected.ids("first_row")[0] as usize;
    let logits = session.logits(&prompt, LogitRows::Last(prompt.len() - first)).unwrap();
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

/// The case's truth, beside its checkpoint.
fn expected(case: &Path) -> Expected {
    Expected::open(&case.join("expected.safetensors"))
}

fn f32_checkpoint_agrees_to_1e_4(case: &Path) {
    // bf16 and f16 checkpoints are exact in f32 too: products take stored weights as they are.
    for chunk in [512, 7] {
        let (cache_type, chunk) = (CacheType::F32, Some(chunk));
        let options = LoadOptions { cache_type, chunk, ..Default::default() };
        let worst = worst(case, &expected(case), &options);
        assert!(worst <= 1e-4, "chunks of {chunk:?}: {worst:e}");
    }
}
testing::fixtures!(f32_checkpoints_agree_to_1e_4: f32_checkpoint_agrees_to_1e_4);

fn f16_cache_stays_within_2e_3(case: &Path) {
    let worst = worst(case, &expected(case), &LoadOptions::default());
    // Scores that are not scaled: what rounding changes in keys counts four times as much.
    let most = if case.ends_with("gpt-neo") { 8e-3 } else { 2e-3 };
    assert!(worst <= stepped(case, most), "{worst:e}");
}
testing::fixtures!(an_f16_cache_stays_within_2e_3: f16_cache_stays_within_2e_3);

#[test]
fn bf16_arithmetic_agrees_to_2e_2() {
    let mut seen = 0;
    for case in cases() {
        let expected = expected(&case);
        let Some(want) = expected.floats("logits_bf16") else { continue };
        let engine = load(&case, &LoadOptions::default());
        let prompt = expected.ids("input_ids");
        let got = engine.session().logits(&prompt, LogitRows::All).unwrap();
        let worst = error(&got.data, &want);
        assert!(worst <= 2e-2, "{}: {worst:e}", case.display());
        seen += 1;
    }
    assert!(seen >= 1);
}

fn twin_agrees(path: &Path) {
    let (truth, bound) = truth(path);
    let options = LoadOptions { cache_type: CacheType::F32, ..Default::default() };
    let worst = worst(path, &Expected::open(&truth), &options);
    assert!(worst <= bound, "{worst:e}");
}
testing::fixtures!(twins_agree: twin_agrees, twins);

/// Where the truth about a checkpoint or a twin is, and how near an f32 cache comes to it.
/// Quantised products round the activations to eight bits, as llama.cpp's do: see the fixtures'
/// README.
fn truth(path: &Path) -> (PathBuf, f32) {
    match twin_truth(path) {
        None => (path.join("expected.safetensors"), 1e-4),
        Some((truth, true)) => (truth, 1e-4),
        // Its nets make more of what rounding activations to eight bits leaves: 5.7e-2 with every
        // instruction set.
        Some((truth, false)) if path.ends_with("qwen3.5-shared/model.q8_0.gguf") => (truth, 7e-2),
        Some((truth, false)) => (truth, stepped(path, 3e-2)),
    }
}

/// LongRoPE's factors are those of the context that is loaded, and a line says which.
#[test]
fn a_rotation_that_follows_the_context_is_told() {
    let case = root().join("phi3");
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

/// How far from the truth a model may be whose numbers are rounded on the way, usually `bound`: more
/// where it rounds rows to 8 bits itself, since what is near the middle between two steps goes to
/// the other one.
fn stepped(path: &Path, bound: f32) -> f32 {
    let steps =
        ["bitnet", "bitnet-blocks/folder", "bitnet-online"].iter().any(|name| path.ends_with(name));
    if steps { bound.max(6e-2) } else { bound }
}

/// Caches, and how much worse than with an f32 cache each may be; and whole prompts and prompts in
/// chunks.
fn variants(path: &Path, exact: f32) -> [(CacheType, f32, usize); 3] {
    // On a GPU products' operands have 16 bits then, too.
    let rounded = stepped(path, 2.5e-2_f32.max(exact));
    [(CacheType::F32, exact, 512), (CacheType::F32, exact, 7), (CacheType::F16, rounded, 512)]
}

/// The variants of a fixture on several devices: each fixture has one of them in its turn, or all
/// with `DELFT_ALL_FIXTURES` or on a named device. A device alone has them all: [`simulated`].
fn variants_apart(path: &Path, exact: f32) -> Vec<(CacheType, f32, usize)> {
    let variants = variants(path, exact);
    if testing::all_fixtures() || std::env::var_os("DELFT_TEST_DEVICE").is_some() {
        return variants.to_vec();
    }
    let name = path.strip_prefix(root()).unwrap().as_os_str().as_encoded_bytes();
    let turn: usize = name.iter().map(|byte| usize::from(*byte)).sum();
    vec![variants[turn % variants.len()]]
}

/// The shared GPU lowering, kernel by kernel.
fn simulated(device: &str, path: &Path) {
    let (truth, exact) = truth(path);
    for (cache_type, bound, chunk) in variants(path, exact) {
        let on = LoadOptions::on(device.parse().unwrap());
        let options = LoadOptions { cache_type, chunk: Some(chunk), ..on };
        let worst = worst(path, &Expected::open(&truth), &options);
        println!("{device}, {cache_type:?} in chunks of {chunk}: {worst:e}");
        assert!(worst <= bound, "{device}, {cache_type:?} in chunks of {chunk}: {worst:e}");
    }
}

/// Everything in a fixture's folder: the checkpoint and its GGUF files.
fn all_of(folder: &str) -> Vec<PathBuf> {
    let path = root().join(folder);
    let files = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|file| twin_truth(file).is_some()).chain([path.clone()]).collect()
}

fn all_simulated(device: &str, folders: &[&str]) {
    let paths: Vec<PathBuf> = folders.iter().flat_map(|folder| all_of(folder)).collect();
    assert!(paths.len() >= 2, "{folders:?}");
    if simulates(device) {
        paths.iter().for_each(|path| simulated(device, path));
    }
}

fn on_a_simulated_gpu(path: &Path) {
    simulated("sim", path);
}
testing::fixtures!(a_simulated_gpu_agrees: on_a_simulated_gpu);
testing::fixtures!(a_simulated_gpu_agrees_with_twins: on_a_simulated_gpu, twins);

#[test]
fn metal_text_agrees() {
    all_simulated("sim-metal", &["llama3", "qwen3"]);
}

#[test]
fn cuda_text_agrees() {
    all_simulated("sim-cuda", &["qwen3"]);
}

/// Two layers and the head on two devices and on three; the device's own tests do this with every
/// fixture.
#[test]
fn layers_on_several_devices_agree() {
    for device in ["sim,sim", "sim,sim,sim"] {
        all_simulated(device, &["llama3", "mistral-full", "qwen3"]);
    }
}

/// The same, with the value at the cut handed over by the host, as between devices that do not
/// reach each other.
#[test]
fn layers_on_devices_that_do_not_reach_each_other_agree() {
    all_simulated("sim-metal,sim-metal", &["llama3"]);
}

const HEADS: &str = "query heads that 2 GPUs can share";
const BLOCKS: &str = "parts of whole blocks of";
const NORMS: &str = "norms of heads, that 2 GPUs can share";
const LATENT: &str = "heads that ranks can share, found a whole value";
/// Half of a matrix of heads is too narrow.
const COLUMNS: &str = "expected columns in multiples of 8";

/// Fixtures that two ranks cannot share, and what the refusal says.
const REFUSED: &[(&str, &str)] = &[
    ("axk1", HEADS),
    ("baichuan2-sloped", HEADS),
    ("biogpt", HEADS),
    ("bitnet", NORMS),
    ("bitnet-blocks/folder", NORMS),
    ("bitnet-online", HEADS),
    ("bitnet-plain", "project: expected a whole value"),
    ("bitnet-silu", "project: expected a whole value"),
    ("bitnet-silu/model.f32.gguf", "project: expected a whole value"),
    ("chatglm", HEADS),
    ("deepseek2-lite", HEADS),
    ("deepseek_v32", HEADS),
    ("deepseek_v32/model.f32.gguf", HEADS),
    ("deepseek2-lite/model.f32.gguf", HEADS),
    ("ernie4_5", HEADS),
    ("ernie4_5/model.f32.gguf", HEADS),
    ("ernie4_5_vl_moe", HEADS),
    ("exaone4-full", HEADS),
    ("exaone4-full/model.f32.gguf", HEADS),
    ("falcon", HEADS),
    ("falcon-h1-normed", COLUMNS),
    ("falcon/model.f32.gguf", HEADS),
    ("flex_olmo", NORMS),
    ("gemma", HEADS),
    ("gemma/model.f32.gguf", HEADS),
    ("gemma3-vision", HEADS),
    ("glm", HEADS),
    ("glm/model.f32.gguf", HEADS),
    ("glm4-moe-lite", HEADS),
    ("glm4-moe-lite/model.f32.gguf", HEADS),
    ("glm4v", HEADS),
    ("glm4v_moe", HEADS),
    ("glm_moe_dsa", HEADS),
    ("glm_moe_dsa/model.f32.gguf", HEADS),
    ("glm_ocr", HEADS),
    ("gpt-neox-in-turn", HEADS),
    ("gpt2", HEADS),
    ("gpt2-scaled", HEADS),
    ("gpt2/model.f32.gguf", HEADS),
    ("gptj", HEADS),
    ("granite4-hybrid-moe", HEADS),
    ("helium", HEADS),
    ("hunyuan-alpha", HEADS),
    ("hunyuan-moe", HEADS),
    ("hunyuan_vl", HEADS),
    ("jais", HEADS),
    ("jais/model.f32.gguf", HEADS),
    ("lfm2-adjusted", HEADS),
    ("llama-256", HEADS),
    ("llama-40", HEADS),
    ("llama-96", HEADS),
    ("llama-k-quants/model.q4_k_m.gguf", BLOCKS),
    ("llama-linear", HEADS),
    ("llama2", HEADS),
    ("mpt", HEADS),
    ("mpt/model.f32.gguf", HEADS),
    ("minimax-m2", NORMS),
    ("ministral3", HEADS),
    ("ministral3/folder", HEADS),
    ("ministral3/model.f32.gguf", HEADS),
    ("mistral4", HEADS),
    ("mlx-gpt2/folder", HEADS),
    ("mlx-qwen2-moe/folder", BLOCKS),
    ("mlx-qwen3-moe/folder", HEADS),
    ("nanochat", HEADS),
    ("olmo2", NORMS),
    ("olmo2/model.f32.gguf", NORMS),
    ("olmo3", NORMS),
    ("olmo3/model.f32.gguf", NORMS),
    ("olmo_hybrid", NORMS),
    ("olmoe", NORMS),
    ("olmoe/model.f32.gguf", NORMS),
    ("openai-gpt", HEADS),
    ("opt", HEADS),
    ("opt-sums", HEADS),
    ("paddleocr_vl", HEADS),
    ("persimmon", HEADS),
    ("phi", HEADS),
    ("phi/model.f32.gguf", HEADS),
    ("qwen2", HEADS),
    ("qwen2/model.f16.gguf", HEADS),
    ("qwen3-moe-all", HEADS),
    ("qwen3-moe-all/model.f32.gguf", HEADS),
    ("qwen3-moe-window", HEADS),
    ("qwen3-untied", HEADS),
    ("qwen3-vl", HEADS),
    ("qwen3-vl-moe", HEADS),
    ("qwen3.5-shared/model.q8_0.gguf", BLOCKS),
    ("qwen3/model.q8_0.gguf", BLOCKS),
    ("sarvam_mla", HEADS),
    ("smolvlm", HEADS),
    ("stablelm-beside", HEADS),
    ("xglm", HEADS),
    ("youtu", HEADS),
    ("zamba2", LATENT),
];

/// Every layer shared by the ranks of a list of devices. Heads that two cannot share are refused, and
/// so are blocks that a cut would go through.
fn shared_on(device: &str, path: &Path) {
    let (truth, exact) = truth(path);
    let refused = REFUSED.iter().find(|(name, _)| path == root().join(name));
    for (cache_type, bound, chunk) in variants_apart(path, exact) {
        let on = LoadOptions::on(device.parse().unwrap());
        let split_mode = SplitMode::Tensor;
        let options = LoadOptions { split_mode, cache_type, chunk: Some(chunk), ..on };
        match (Engine::prepare(path, &options), refused) {
            (Ok(_), None) => {}
            (Err(why), Some((_, known))) if why.to_string().contains(known) => continue,
            // A cut goes through groups where one matrix of the folder is narrow.
            (Err(why), None) if path.ends_with("folder") && why.to_string().contains(BLOCKS) => {
                continue;
            }
            (Err(why), _) => panic!("refused: {why}"),
            (Ok(_), Some((_, known))) => panic!("not refused: {known}"),
        }
        let worst = worst(path, &Expected::open(&truth), &options);
        println!("{cache_type:?} in chunks of {chunk}: {worst:e}");
        assert!(worst <= bound, "{cache_type:?} in chunks of {chunk}: {worst:e}");
    }
}

fn shared_by_two(path: &Path) {
    shared_on("sim,sim", path);
}
testing::fixtures!(layers_shared_by_two_ranks_agree: shared_by_two);
testing::fixtures!(layers_shared_by_two_ranks_agree_with_twins: shared_by_two, twins);

/// Experts of three blocks, of which one rank of four has none in a layer, beside shared experts as
/// narrow, with biases and without; and experts of four blocks and of five.
#[test]
fn experts_with_fewer_blocks_than_ranks_agree() {
    for name in ["afmoe", "cohere2_moe", "dots1", "gpt-oss", "phimoe", "llama4"] {
        shared_on("sim,sim,sim,sim", &root().join(name));
    }
}

/// The first layer on the CPU, the last on the GPU: as near as on either alone.
fn on_two_devices_with(device: &str, case: &Path) {
    for (cache_type, bound, chunk) in variants_apart(case, 1e-4) {
        let on = LoadOptions::on(device.parse().unwrap());
        let options = LoadOptions { gpu_layers: Some(1), cache_type, chunk: Some(chunk), ..on };
        let read = ["gemma3n", "gemma4-small", "zamba2", "zamba2-plain"];
        if read.iter().any(|name| case.ends_with(name)) {
            // Inputs of all layers are made of the first one's.
            let why = Engine::prepare(case, &options).err().unwrap().to_string();
            return assert!(why.contains("one value between the layers"), "{why}");
        }
        let worst = worst(case, &expected(case), &options);
        assert!(worst <= bound, "{cache_type:?} in chunks of {chunk}: {worst:e}");
    }
}

fn on_two_devices(case: &Path) {
    on_two_devices_with("sim", case);
}
testing::fixtures!(a_model_on_two_devices_agrees: on_two_devices);

/// A mixture's experts on the CPU, all else on the GPU: of all layers, and of the first two alone,
/// where they have any.
fn experts_on_the_cpu_with(device: &str, path: &Path) {
    let (truth, exact) = truth(path);
    for (cpu_experts, (cache_type, bound, chunk)) in [usize::MAX, 2]
        .into_iter()
        .flat_map(|blocks| variants_apart(path, exact).into_iter().map(move |v| (blocks, v)))
    {
        let on = LoadOptions::on(device.parse().unwrap());
        let options = LoadOptions { cpu_experts, cache_type, chunk: Some(chunk), ..on };
        match Engine::prepare(path, &options) {
            Ok(prepared) => assert_eq!(prepared.plan().len(), 2),
            Err(why) => {
                let why = why.to_string();
                let reason = match cpu_experts {
                    usize::MAX => "found a model without experts",
                    _ => "found none there",
                };
                return assert!(why.contains(reason), "{why}");
            }
        }
        let worst = worst(path, &Expected::open(&truth), &options);
        println!("{cpu_experts} blocks, {cache_type:?} in chunks of {chunk}: {worst:e}");
        assert!(worst <= bound, "{cache_type:?} in chunks of {chunk}: {worst:e}");
    }
}

fn experts_on_the_cpu(path: &Path) {
    experts_on_the_cpu_with("sim", path);
}
testing::fixtures!(experts_on_the_cpu_agree: experts_on_the_cpu);
testing::fixtures!(experts_on_the_cpu_agree_with_twins: experts_on_the_cpu, twins);

/// A cache of bf16, everywhere: eight bits of keys and values.
fn bf16_cache_stays_within_3e_2(case: &Path) {
    for device in ["cpu", "sim"] {
        let on = LoadOptions::on(device.parse().unwrap());
        let options = LoadOptions { cache_type: CacheType::BF16, ..on };
        let worst = worst(case, &expected(case), &options);
        assert!(worst <= stepped(case, 3e-2), "{device}: {worst:e}");
    }
}
testing::fixtures!(a_bf16_cache_stays_within_3e_2: bf16_cache_stays_within_3e_2);

/// The device that `DELFT_TEST_DEVICE` names, such as `cuda`: nothing runs without it. One test,
/// since a GPU's memory and its kernels' compilation are shared.
#[test]
fn the_named_device_agrees() {
    let Ok(device) = std::env::var("DELFT_TEST_DEVICE") else {
        return testing::skipped("DELFT_TEST_DEVICE is not set");
    };
    for path in cases().iter().chain(&twins()).filter(|path| wanted(path)) {
        println!("{}", path.display());
        simulated(&device, path);
        if !device.contains(',') {
            experts_on_the_cpu_with(&device, path);
        }
        match device.contains(',') {
            true => shared_on(&device, path),
            false if path.is_dir() => on_two_devices_with(&device, path),
            false => {}
        }
    }
}
