//! A mixture's experts on the CPU beside a simulated GPU. What Transformers computes, fixture by
//! fixture: in the engine's tests.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use formats::Tensors;
use program::{Program, Sequence, Step, StepKind, Table};

use super::{factors, recorded, together};
use crate::{CacheType, Device, DeviceSpec, Executor, ExecutorOptions, Offload, Seats, Watch};

fn open(name: &str) -> Box<dyn Device> {
    name.parse::<DeviceSpec>().unwrap().open(Some(2)).unwrap()
}

/// Where the GPU is for many sequences; else near each other, as without the CPU.
#[test]
fn experts_beside_a_batched_gpu_give_a_row_the_same_bits_whatever_is_beside_it() {
    let offload = |layers| Offload::experts(open("sim"), open("cpu"), layers);
    let (count, longest) = (10, 70);
    let (many, f16, f32) = (together::SEQUENCES, CacheType::F16, CacheType::F32);
    for (model, layers, sequences, cache_type, batched) in [
        ("qwen3-moe", usize::MAX, many, f16, true),
        ("qwen3-moe", 2, 3, f16, true),
        ("qwen3-next", usize::MAX, 3, f16, true),
        ("gpt-oss", usize::MAX, many, f32, false),
    ] {
        let close = if batched { 0.0 } else { 1e-5 };
        let case = together::Case {
            model,
            cache_type,
            count,
            longest,
            batched,
            sequences,
            close,
            adapted: false,
        };
        together::compare(case, &offload(layers), &[&offload(layers)]);
    }
}

/// Logits of a prompt and of a token behind it, with an adapter of attention's matrices on the one
/// seat, or without.
fn logits(device: &dyn Device, program: &Program, tensors: &Tensors, adapted: bool) -> Vec<f32> {
    let options = ExecutorOptions {
        cache_type: CacheType::F32,
        rows: (16, 16),
        blocks: vec![1],
        context: vec![1],
        seats: Seats { count: 1, rank: 2 },
        ..ExecutorOptions::default()
    };
    let mut executor = device.load(program.clone(), tensors, options, &mut |_, _| {}).unwrap();
    executor.seat(1, Some(&factors(program))).unwrap();
    let tables = [Table { blocks: &[0], oldest: 0 }];
    let mut all = Vec::new();
    for (kind, tokens, start) in
        [(StepKind::Prompt, &[3, 1, 4, 1, 5, 9][..], 0), (StepKind::Decode, &[2], 6)]
    {
        let sequence = Sequence::new(tokens.len(), start, &tables);
        let sequences = &[Sequence { adapter: u32::from(adapted), ..sequence }];
        let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
        let step = Step { kind, tokens, sequences, outputs: &outputs, input: &[] };
        let ticket = executor.submit(&step).unwrap();
        all.extend_from_slice(executor.read(ticket, 0).unwrap());
    }
    all
}

#[test]
fn adapters_of_what_stays_on_the_gpu_are_applied() {
    let (program, tensors) = recorded("qwen3-moe");
    let program = program.with_sites(&|name| name.contains("attention"));
    assert!(program.sites.len() >= 12, "{}", program.sites.len());
    let offload = Offload::experts(open("sim"), open("cpu"), usize::MAX);
    let (alone, both) = (open("sim"), &offload as &dyn Device);
    let of = |device: &dyn Device, adapted| logits(device, &program, &tensors, adapted);
    let (wanted, found, plain) = (of(&*alone, true), of(both, true), of(both, false));
    let range = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
    let apart = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / range
    };
    assert!(apart(&found, &wanted) < 1e-4, "{}", apart(&found, &wanted));
    assert!(apart(&plain, &wanted) > 1e-2, "the adapter changes something");
}

/// Between the mixtures, whether or not the GPU is for many sequences; and begins again.
#[test]
fn a_prompt_can_be_given_up() {
    let (program, tensors) = recorded("qwen3-moe");
    let offload = Offload::experts(open("sim"), open("cpu"), usize::MAX);
    for batched in [false, true] {
        let options = ExecutorOptions {
            rows: (16, 1),
            blocks: vec![1],
            context: vec![1],
            batched,
            ..ExecutorOptions::default()
        };
        let load =
            || offload.load(program.clone(), &tensors, options.clone(), &mut |_, _| {}).unwrap();
        let (tables, tokens) =
            ([Table { blocks: &[0], oldest: 0 }], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]);
        let sequences = &[Sequence::new(tokens.len(), 0, &tables)];
        let kind = StepKind::Prompt;
        let step = Step { kind, tokens: &tokens, sequences, outputs: &[9], input: &[] };
        let logits = |executor: &mut dyn Executor| {
            let ticket = executor.submit(&step).unwrap();
            executor.read(ticket, 0).unwrap().to_vec()
        };
        let wanted = logits(&mut *load());
        let (mut executor, stop, told) = (load(), AtomicBool::new(false), AtomicUsize::new(0));
        let progress = |done: f64| {
            assert!(done > 0.0 && done < 1.0, "{done}");
            told.fetch_add(1, Ordering::Relaxed);
            stop.store(true, Ordering::Relaxed);
        };
        let watch = Watch { stop: &stop, progress: &progress };
        assert!(executor.submit_watched(&step, &watch).unwrap().is_none(), "{batched}");
        assert_eq!(told.load(Ordering::Relaxed), 1, "not at the second mixture");
        assert_eq!(logits(&mut *executor), wanted, "{batched}");
    }
}

#[test]
fn what_cannot_be_moved_is_refused_by_name() {
    let offload = |layers| Offload::experts(open("sim"), open("cpu"), layers);
    for (model, layers, says) in [
        ("llama3", 9, "experts on the CPU: expected a mixture of experts"),
        ("qwen3-moe", 1, "experts on the CPU: expected experts in the first 1 layers, found none"),
    ] {
        let (program, _) = recorded(model);
        let why = offload(layers).check(&program).unwrap_err().to_string();
        assert!(why.starts_with(says), "{why}");
    }
}
