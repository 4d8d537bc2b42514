//! A replay of a shape class seen before allocates nothing and compiles nothing.

mod common;

use common::{load, root};
use delft_engine::{
    AdapterFile, Adapters, Engine, GenerateOptions, Generating, LoadOptions, Request,
    SamplingOptions,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts allocations of every thread.
struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: defers to the system allocator; the counter is no part of the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// The only test of this binary: another's allocations would be counted too.
#[test]
fn decoding_allocates_nothing() {
    // To take an engine down is work of a thread of its own, which is not counted with the next
    // one's steps.
    let mut engines = Vec::new();
    for (case, adapter) in [
        ("llama3", None),
        ("qwen3", None),
        ("mistral-long", None),
        ("qwen3.5-long", None),
        ("llama3", Some("lora")),
    ] {
        let path = |name| root().join("../adapters").join(name);
        let files = adapter.iter().map(|name| AdapterFile {
            path: path(name),
            scale: 1.0,
            any_base: false,
        });
        let adapters = Adapters { files: files.collect(), ..Adapters::default() };
        let options = LoadOptions { chunk: Some(64), adapters, ..Default::default() };
        let engine = load(&root().join(case), &options);
        let mut session = engine.session();
        session.set_adapter(engine.adapters().first().cloned()).unwrap();
        let prompt: Vec<u32> = (0..300).map(|i| i % 100).collect();
        let tokens: Vec<u32> =
            prompt.iter().take(200 % engine.info().context.max(1)).copied().collect();
        session.evaluate(&tokens[..64], 63, &mut |_, _| {}).unwrap();
        session.evaluate(&tokens[64..66], 1, &mut |_, _| {}).unwrap();
        session.evaluate(&tokens[66..67], 0, &mut |_, _| {}).unwrap();
        let (compiled, before) = (engine.compiled(), COUNT.load(Relaxed));
        let mut sum = 0.0;
        // The timeline itself grows by doubling; within its capacity no step allocates.
        for &token in &tokens[67..100] {
            session.evaluate(&[token], 0, &mut |_, row| sum += row[0]).unwrap();
        }
        let allocated = COUNT.load(Relaxed) - before;
        assert!(allocated == 0, "{case}: {allocated} allocations");
        assert_eq!(engine.compiled(), compiled, "{case}");
        assert!(f32::is_finite(sum));
        requests(case, &engine, &tokens);
        drop(session);
        engines.push(engine);
    }
}

/// Requests that are computed together allocate nothing between their beginning and their end.
fn requests(case: &str, engine: &Engine, tokens: &[u32]) {
    let options = GenerateOptions {
        sampling: SamplingOptions {
            temperature: 0.8,
            repetition_penalty: 1.1,
            ..Default::default()
        },
        max_tokens: Some(240),
        ignore_end: true,
        logprobs: true,
        ..Default::default()
    };
    let adapter = engine.adapters().first().cloned();
    let request = |n: usize| Request::new(tokens[..n].to_vec(), options.clone());
    let submit = |n| engine.submit(Request { adapter: adapter.clone(), ..request(n) }).unwrap();
    let mut handles: Vec<Generating> = (10..14).map(submit).collect();
    let mut take = |tokens: usize| {
        for _ in 0..tokens {
            handles.iter_mut().for_each(|handle| assert!(handle.next().unwrap().is_ok()));
        }
    };
    take(20);
    let before = COUNT.load(Relaxed);
    take(40);
    let allocated = COUNT.load(Relaxed) - before;
    assert!(allocated == 0, "{case}: {allocated} allocations");
    // What the worker does at their end is not counted with the next model's steps.
    handles.iter_mut().for_each(|handle| {
        handle.cancel();
        handle.for_each(drop);
    });
}
