//! Transformers' results on several simulated devices: by layers, and by ranks.

mod offload;
mod operations;
mod shared;
pub(crate) mod together;

use std::path::{Path, PathBuf};

use formats::safetensors::Safetensors;
use formats::{DType, Result, Tensors};
use ops::low_rank::Delta;
use ops::operation::StateAccess;
use program::{AdapterFactors, BLOCK_TOKENS, Program, Sequence, Site, Step, StepKind, Table};

use crate::{CacheType, Device, DeviceSpec, Executor, ExecutorOptions};

/// Folders of the reference checkpoints.
fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
    let folders = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut cases: Vec<PathBuf> = folders.filter(|p| p.join("config.json").exists()).collect();
    cases.sort();
    assert!(cases.len() >= 12, "{cases:?}");
    cases
}

/// A fixture's Program, fused, and its weights.
pub(crate) fn recorded(name: &str) -> (Program, Tensors) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
    let tensors = Tensors::open(root.join(name)).unwrap();
    let model = models::load(&tensors, &models::ReadOptions::default()).unwrap();
    (program::fuse(&model.record(false).unwrap()), tensors)
}

/// Factors of rank 2 beside all of a Program's sites, and of each expert.
pub(crate) fn factors(program: &Program) -> AdapterFactors {
    let wave = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin() * 0.3).collect();
    let delta = |site: &Site| {
        let [down, up] = [site.input, site.output].map(|n| wave(2 * n * site.matrices()));
        let delta = Delta { rank: 2, down, up, scale: 1.0, gain: None, element: DType::F32 };
        (site.name.clone(), delta)
    };
    AdapterFactors { deltas: program.sites.iter().map(delta).collect() }
}

/// The largest difference of any logit of a prompt, in chunks, and of ten steps behind it, in the
/// range of the logits.
pub(crate) fn worst(device: &dyn Device, case: &Path, chunk: usize) -> Result<f32> {
    let expected = Safetensors::open(&case.join("expected.safetensors")).unwrap();
    let floats = |name: &str| expected.get(name).unwrap().to_f32().unwrap();
    let ids = |name: &str| -> Vec<u32> {
        let bytes = expected.get(name).unwrap().bytes;
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    };
    let tensors = Tensors::open(case).unwrap();
    let options = models::ReadOptions { context: testing::context(case), ..Default::default() };
    let program = program::fuse(&models::load(&tensors, &options).unwrap().record(false).unwrap());
    let (prompt, steps) = (ids("input_ids"), ids("decode.tokens"));
    let blocks = (prompt.len() + steps.len()).div_ceil(BLOCK_TOKENS);
    let groups = program.groups().len();
    let options = ExecutorOptions {
        cache_type: CacheType::F32,
        rows: (chunk, chunk),
        blocks: vec![blocks; groups],
        context: vec![blocks; groups],
        ..ExecutorOptions::default()
    };
    device.plan(&program, &tensors, &options)?;
    let mut executor = device.load(program, &tensors, options, &mut |_, _| {})?;
    let all: Vec<u32> = (0..blocks as u32).collect();
    let tables = vec![Table { blocks: &all, oldest: 0 }; groups];
    let mut logits = Vec::new();
    let prompts = prompt.chunks(chunk).map(|tokens| (StepKind::Prompt, tokens));
    let mut start = 0;
    for (kind, tokens) in prompts.chain(steps.chunks(1).map(|token| (StepKind::Decode, token))) {
        let sequences = &[Sequence::new(tokens.len(), start, &tables)];
        let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
        let step = Step { kind, tokens, sequences, outputs: &outputs, input: &[] };
        let ticket = executor.submit(&step)?;
        logits.extend_from_slice(executor.read(ticket, 0)?);
        start += tokens.len();
    }
    let vocab = logits.len() / (prompt.len() + steps.len());
    let first = ids("first_row")[0] as usize;
    let wanted = [floats("logits"), floats("decode.logits")].concat();
    let found = &logits[first * vocab..];
    assert_eq!(found.len(), wanted.len());
    let (low, high) = wanted.iter().fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
    let differences = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
    Ok(differences.fold(0.0, |a: f32, b| if b.is_nan() { b } else { a.max(b) }) / (high - low))
}

#[test]
fn layers_on_several_devices_are_transformers() {
    for places in ["sim,sim", "sim,sim,sim"] {
        let device = places.parse::<DeviceSpec>().unwrap().open(None).unwrap();
        for case in cases() {
            for chunk in [512, 7] {
                let worst = worst(&*device, &case, chunk);
                if program_of(&case).layers.len() + 1 < places.split(',').count() {
                    let why = worst.unwrap_err().to_string();
                    assert!(why.contains("one for each layer and the head"), "{why}");
                    continue;
                }
                let read = ["gemma3n", "gemma4-small", "zamba2", "zamba2-plain"];
                if read.iter().any(|name| case.ends_with(name)) {
                    // Inputs of all layers are made of the first one's.
                    let why = worst.unwrap_err().to_string();
                    assert!(why.contains("one value between the layers"), "{why}");
                    continue;
                }
                let worst = worst.unwrap();
                println!("{places}: {} in chunks of {chunk}: {worst:e}", case.display());
                assert!(worst <= 1e-4, "{places}: {}: {worst:e}", case.display());
            }
        }
    }
}

/// Kernels for other numbers of rows add in other orders, so that logits are near each other and
/// tokens the same; with a cache of 16 bits, operands of many rows have 16 bits too, which moves
/// logits as far as it does from Transformers'.
#[test]
fn sequences_on_a_gpu_compute_together_what_each_computes_alone() {
    let sim = "sim".parse::<DeviceSpec>().unwrap().open(None).unwrap();
    let ranks = "sim,sim".parse::<DeviceSpec>().unwrap().open_ranks().unwrap();
    let case = |model, cache_type, close| together::Case {
        model,
        cache_type,
        count: 10,
        longest: 33,
        batched: false,
        sequences: together::SEQUENCES,
        close,
        adapted: false,
    };
    together::compare(case("llama3", CacheType::F32, 1e-5), &*sim, &[&*sim, &*ranks]);
    together::compare(case("mistral-long", CacheType::F16, 2e-2), &*sim, &[&*sim]);
    together::compare(case("qwen3.5", CacheType::F32, 1e-5), &*sim, &[&*sim]);
}

/// Where a GPU is loaded for many sequences, bits do not depend on how many rows there are: neither
/// by the kernels of many rows, nor by those of a few, to which rows that decode go where it is for
/// so few sequences.
#[test]
fn rows_on_a_batched_gpu_are_the_same_bits_whatever_is_beside_them() {
    let sim = "sim".parse::<DeviceSpec>().unwrap().open(None).unwrap();
    let ranks = "sim,sim".parse::<DeviceSpec>().unwrap().open_ranks().unwrap();
    let case = |model, cache_type, sequences| together::Case {
        model,
        cache_type,
        count: 14,
        longest: 260,
        batched: true,
        sequences,
        close: 0.0,
        adapted: false,
    };
    for sequences in [together::SEQUENCES, 8, 3] {
        together::compare(case("llama3", CacheType::F32, sequences), &*sim, &[&*sim]);
    }
    together::compare(case("qwen3.5-long", CacheType::F32, together::SEQUENCES), &*sim, &[&*sim]);
    let chosen = case("deepseek_v32-chosen", CacheType::F16, together::SEQUENCES);
    together::compare(together::Case { longest: 65, ..chosen }, &*sim, &[&*sim]);
    // As many as need more turns than one.
    together::compare(case("llama3", CacheType::BF16, 96), &*sim, &[&*sim]);
    for sequences in [together::SEQUENCES, 8] {
        together::compare(case("llama3", CacheType::F16, sequences), &*ranks, &[&*ranks]);
        together::compare(case("mistral-long", CacheType::F16, sequences), &*sim, &[&*sim]);
    }
}

/// Mixtures of experts, too: with biases, beside a state, and of packed matrices.
#[test]
fn experts_on_a_batched_gpu_give_a_row_the_same_bits_whatever_is_beside_it() {
    let sim = "sim".parse::<DeviceSpec>().unwrap().open(None).unwrap();
    for (model, cache_type) in [
        ("qwen3-moe", CacheType::F32),
        ("qwen3-moe", CacheType::BF16),
        ("gpt-oss", CacheType::F16),
        ("qwen3-next", CacheType::F16),
        ("granite4-hybrid", CacheType::F16),
        ("mixtral/model.q8_0-split.gguf", CacheType::F16),
    ] {
        for sequences in [together::SEQUENCES, 3] {
            let (batched, close, adapted) = (true, 0.0, false);
            let (count, longest) = (10, 70);
            let case = together::Case {
                model,
                cache_type,
                count,
                longest,
                batched,
                sequences,
                close,
                adapted,
            };
            together::compare(case, &*sim, &[&*sim]);
        }
    }
}

/// More rows that decode than kernels of a few take: in turns, with the bits that each has alone.
#[test]
fn rows_that_decode_take_turns() {
    let sim = "sim".parse::<DeviceSpec>().unwrap().open(None).unwrap();
    for (model, cache_type) in [
        ("llama3", CacheType::F32),
        ("llama-k-quants/model.q4_k_m.gguf", CacheType::F16),
        ("qwen3/model.q8_0.gguf", CacheType::BF16),
    ] {
        let (program, tensors) = recorded(model);
        let groups = program.groups().len();
        let load = || {
            let options = ExecutorOptions {
                cache_type,
                rows: (16, 16),
                sequences: 1,
                blocks: vec![4; groups],
                context: vec![4; groups],
                batched: true,
                ..ExecutorOptions::default()
            };
            sim.load(program.clone(), &tensors, options, &mut |_, _| {}).unwrap()
        };
        let tables = vec![Table { blocks: &[0, 1], oldest: 0 }; groups];
        let tokens: Vec<u32> = (3..16).collect();
        let run = |executor: &mut dyn Executor, rows: usize| -> Vec<u32> {
            let parts = tokens.chunks(rows).enumerate();
            let logits = parts.flat_map(|(i, tokens)| {
                let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
                let sequences = [Sequence::new(tokens.len(), i * rows, &tables)];
                let (kind, sequences) = (StepKind::Decode, &sequences[..]);
                let step = Step { kind, tokens, sequences, outputs: &outputs, input: &[] };
                let ticket = executor.submit(&step).unwrap();
                executor.read(ticket, 0).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            logits.collect()
        };
        let alone = run(&mut *load(), 1);
        for rows in [3, 12] {
            assert!(run(&mut *load(), rows) == alone, "{rows} rows");
        }
    }
}

/// The Program of a fixture.
fn program_of(case: &Path) -> Program {
    let tensors = Tensors::open(case).unwrap();
    models::load(&tensors, &models::ReadOptions::default()).unwrap().record(false).unwrap()
}

/// Whether a fixture has an odd number of query heads.
fn has_odd_heads(case: &Path) -> bool {
    let program = program_of(case);
    let odd = |node: &program::Node| match node.op.cache().map(|cache| cache.access) {
        Some(StateAccess::Read { head_dim, .. }) => {
            program.shape(node.inputs[0]).width / head_dim % 2 == 1
        }
        _ => false,
    };
    program.nodes.iter().any(odd)
}

/// Two ranks; models whose heads two cannot share say so, and those whose norms are over all heads.
#[test]
fn layers_shared_by_ranks_are_transformers() {
    let device = "sim,sim".parse::<DeviceSpec>().unwrap().open_ranks().unwrap();
    // Queries to which something is added.
    let whole = |case: &Path| case.ends_with("zamba2");
    let (mut refused, mut mixtures) = (0, 0);
    for case in cases() {
        let norms = ["bitnet", "flex_olmo", "minimax-m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe"]
            .iter()
            .any(|name| case.ends_with(name));
        let expected = match (has_odd_heads(&case), norms) {
            (true, _) => Some("query heads that 2 GPUs can share"),
            (false, true) => Some("norms of heads, that 2 GPUs can share"),
            (false, false) if whole(&case) => Some("heads that ranks can share"),
            (false, false) if ["bitnet-plain", "bitnet-silu"].iter().any(|n| case.ends_with(n)) => {
                Some("a whole value")
            }
            (false, false) if case.ends_with("falcon-h1-normed") => {
                Some("columns in multiples of 8")
            }
            (false, false) => None,
        };
        for chunk in [512, 7] {
            match (worst(&*device, &case, chunk), expected) {
                (Ok(worst), None) => {
                    println!("{} in chunks of {chunk}: {worst:e}", case.display());
                    assert!(worst <= 1e-4, "{}: {worst:e}", case.display());
                    mixtures += usize::from(shares_experts(&case, 2));
                }
                (Err(why), Some(expected)) => {
                    assert!(why.to_string().contains(expected), "{}: {why}", case.display());
                    refused += 1;
                }
                (other, _) => panic!("{}: {other:?}", case.display()),
            }
        }
    }
    // Three, five or seven query heads: llama2, gpt2, qwen2, qwen3-untied and more.
    assert!(refused >= 2 * 6, "{refused}");
    assert!(mixtures >= 2 * 20, "{mixtures}");
}

/// Whether a fixture has mixtures; each of whose matrices has all its bytes on one rank or another,
/// and on none more than blocks of its columns make necessary.
fn shares_experts(case: &Path, ranks: usize) -> bool {
    let (program, tensors) = recorded(&case.file_name().unwrap().to_string_lossy());
    let block = |weight: &program::Weight| crate::gpu::column_block(weight, &tensors);
    let shard = |rank| program.shard(rank, ranks, &block).unwrap();
    let shards: Vec<Program> = (0..ranks).map(shard).collect();
    let bytes = |of: &Program, name: &str| {
        let weight = of.weights.iter().find(|weight| weight.name == name);
        weight.map_or(0, |weight| weight.stored_bytes(&tensors).unwrap())
    };
    let mut mixtures = false;
    for node in program.nodes.iter().filter(|node| matches!(node.op, ops::Op::Experts(_))) {
        mixtures = true;
        let ff = program.mixture(node).unwrap().ff;
        let block = block(&program.weights[node.weights[2].0]).unwrap();
        let most = (ff.div_ceil(block).div_ceil(ranks) * block).min(ff) as u64;
        for weight in node.weights.iter().take(3).map(|weight| &program.weights[weight.0]) {
            let whole = bytes(&program, &weight.name);
            let each: Vec<u64> = shards.iter().map(|shard| bytes(shard, &weight.name)).collect();
            assert_eq!(each.iter().sum::<u64>(), whole, "{}: {each:?}", weight.name);
            let own = each.iter().all(|own| own * ff as u64 <= whole * most);
            assert!(own, "{}: {each:?} of {whole}", weight.name);
        }
    }
    mixtures
}
