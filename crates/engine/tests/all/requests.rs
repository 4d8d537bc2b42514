//! Requests that are computed together: each gets what it gets alone, and its end.

use crate::common::{Counting, load, root};
use delft_engine::{
    CacheType, CancelToken, Constraint, ConstraintSource, DeviceSpec, Engine, Finish,
    GenerateOptions, Generating, LoadOptions, Miss, Progress, Request, SamplingOptions, Token,
    TokenSet,
};
use device::gpu::sim;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

fn engine(case: &str, sessions: usize, chunk: usize) -> Engine {
    let (cache_type, chunk) = (CacheType::F32, Some(chunk));
    load(&root().join(case), &LoadOptions { cache_type, chunk, sessions, ..Default::default() })
}

/// An engine for many requests on a simulated GPU.
fn on_sim(sessions: usize) -> Engine {
    let (chunk, context, batched) = (Some(64), Some(256), true);
    let on = LoadOptions::on("sim".parse().unwrap());
    load(&root().join("llama3"), &LoadOptions { chunk, context, sessions, batched, ..on })
}

fn options(seed: u64, max_tokens: usize) -> GenerateOptions {
    // Some take the likeliest token, some draw.
    let temperature = [0.0, 0.7, 1.5][seed as usize % 3];
    let sampling =
        SamplingOptions { temperature, seed, repetition_penalty: 1.1, ..Default::default() };
    GenerateOptions {
        sampling,
        max_tokens: Some(max_tokens),
        ignore_end: true,
        logprobs: true,
        ..Default::default()
    }
}

fn prompt(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11 + seed * (i % 7 + 1)) % 120).collect()
}

/// Tokens and log-probabilities.
type Answer = Vec<(u32, Option<f32>)>;

fn answer(generating: impl Iterator<Item = formats::Result<delft_engine::Token>>) -> Answer {
    generating.map(|token| token.map(|token| (token.id, token.logprob)).unwrap()).collect()
}

/// What a request gets from an engine that has nothing else to do and nothing cached.
fn alone(engine: &Engine, prompt: &[u32], options: &GenerateOptions) -> Answer {
    answer(engine.session().generate(prompt.to_vec(), options).unwrap())
}

/// Requests on the CPU get the bits that each gets alone, whatever its matrices are packed as, on
/// every instruction set of this processor: on each that is not the best one in a process of its
/// own.
#[test]
fn sixty_four_requests_get_the_bits_that_each_gets_alone() {
    let name = "requests::sixty_four_requests_get_the_bits_that_each_gets_alone";
    const VARIABLE: &str = "DELFT_ISA";
    let packed = "llama-k-quants/model.q4_k_m.gguf";
    if std::env::var_os(VARIABLE).is_some() {
        return get_the_bits_of_one(&[("llama3", 3), (packed, 2)]);
    }
    let sets = delft_engine::survey().processor.sets;
    let lesser = &sets[..sets.len() - 1];
    let child = |isa: &&'static str| {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        (*isa, child.args(["--exact", name]).env(VARIABLE, isa).output().unwrap())
    };
    std::thread::scope(|scope| {
        let children = scope.spawn(|| lesser.iter().map(child).collect::<Vec<_>>());
        get_the_bits_of_one(&[
            ("llama-long", 3),
            ("mistral-long", 2),
            ("qwen3.5-long", 3),
            (packed, 2),
        ]);
        for (isa, child) in children.join().unwrap() {
            let said = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && said.contains("1 passed"), "{isa}: {said}");
        }
    });
}

/// The same on the instruction set in use, of models and how many sessions have room for a context.
fn get_the_bits_of_one(models: &[(&str, usize)]) {
    for &(case, sessions) in models {
        let (engine, quiet) = (engine(case, sessions, 64), engine(case, 1, 64));
        let (context, vocab) = (engine.info().context, engine.info().vocab as u32);
        // Beginnings are shared, and together they are more than the cache has blocks for.
        let begun = Instant::now();
        let requests: Vec<_> = (0..64usize)
            .map(|i| {
                let shared = [0, 100, 300][i % 3].min(context / 2);
                let own = prompt(1 + i * 29 % (context / 3), i as u32);
                let tokens = [&prompt(shared, 1000 + i as u32 % 2)[..], &own].concat();
                let tokens: Vec<u32> = tokens.iter().map(|token| token % vocab).collect();
                let most = (1 + i * 13 % 60).min(context - tokens.len());
                (tokens, options(i as u64, most))
            })
            .collect();
        let together: Vec<Answer> = std::thread::scope(|scope| {
            let spawn = |(i, (tokens, options)): (usize, &(Vec<u32>, GenerateOptions))| {
                let (engine, tokens, options) = (&engine, tokens.clone(), options.clone());
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(i as u64 * 17 % 200));
                    let request = Request { caller: i as u64 % 4, ..Request::new(tokens, options) };
                    answer(engine.submit(request).unwrap())
                })
            };
            let threads: Vec<_> = requests.iter().enumerate().map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        println!("{case}: {:?}", begun.elapsed());
        for (i, ((tokens, options), together)) in requests.iter().zip(&together).enumerate() {
            let alone = alone(&quiet, tokens, options);
            assert_eq!(together.len(), alone.len(), "{case}, request {i}");
            for (one, other) in together.iter().zip(&alone) {
                let same = one.1.map(f32::to_bits) == other.1.map(f32::to_bits);
                assert!(one.0 == other.0 && same, "{case}, request {i}: {one:?} {other:?}");
            }
        }
        // All blocks are free again, or only the tree's: whole contexts fit as often as before.
        for i in 0..2 * sessions {
            let tokens = prompt(context - 2, 5000 + i as u32);
            let tokens: Vec<u32> = tokens.iter().map(|token| token % vocab).collect();
            assert_eq!(
                answer(engine.submit(Request::new(tokens, options(0, 2))).unwrap()).len(),
                2
            );
        }
    }
}

/// Where a GPU is loaded for many sequences, whatever else is computed leaves no trace in any bit:
/// arrivals at random, prefixes that are found, and sequences that are given up for want of blocks
/// and computed again. `DELFT_TEST_DEVICE` names another device.
#[test]
fn sixty_four_requests_on_a_batched_gpu_get_the_bits_that_each_gets_alone() {
    for (case, context) in [("mistral-long", 300), ("qwen3-moe", 256), ("qwen3.5-moe", 256)] {
        get_the_bits_that_each_gets_alone(case, context);
    }
}

fn get_the_bits_that_each_gets_alone(case: &str, context: usize) {
    let load_for = |sessions| {
        let device = std::env::var("DELFT_TEST_DEVICE").unwrap_or_else(|_| "sim".to_owned());
        let device: DeviceSpec = device.parse().unwrap();
        let (context, chunk, batched) = (Some(context), Some(48), true);
        let options = LoadOptions { context, chunk, sessions, batched, ..LoadOptions::on(device) };
        load(&root().join(case), &options)
    };
    let (engine, quiet) = (load_for(3), load_for(1));
    // It keeps its blocks, so that those that are left do not do for two sequences that become
    // long.
    let mut session = engine.session();
    let held = answer(session.generate(prompt(context - 40, 77), &options(0, 1)).unwrap()).len();
    assert_eq!(held, 1);
    let requests: Vec<_> = (0..64usize)
        .map(|i| {
            let (shared, own) =
                if i % 13 == 5 { (context - 70, 22) } else { ([0, 9, 20][i % 3], 1 + i % 7) };
            let tokens = [&prompt(shared, 1000)[..], &prompt(own, i as u32)].concat();
            (tokens, options(i as u64, if i % 13 == 5 { 9 } else { 1 + i % 5 }))
        })
        .collect();
    let bits = |answer: Answer| -> Vec<(u32, Option<u32>)> {
        answer.into_iter().map(|(id, logprob)| (id, logprob.map(f32::to_bits))).collect()
    };
    let submit = |engine: &Engine, i: usize| {
        let (tokens, options) = requests[i].clone();
        let request = Request { caller: i as u64 % 4, ..Request::new(tokens, options) };
        bits(answer(engine.submit(request).unwrap()))
    };
    let together: Vec<_> = std::thread::scope(|scope| {
        let spawn = |i: usize| {
            let (engine, submit) = (&engine, &submit);
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(i as u64 * 17 % 200));
                submit(engine, i)
            })
        };
        let threads: Vec<_> = (0..requests.len()).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (i, together) in together.into_iter().enumerate() {
        assert_eq!(together, submit(&quiet, i), "{case}, request {i}");
    }
    drop(session);
}

#[test]
fn a_prompt_that_comes_again_is_found_and_what_differs_is_told() {
    let engine = engine("llama-long", 2, 64);
    let tokens = prompt(400, 7);
    let run = |tokens: &[u32]| {
        let mut generating = engine.submit(Request::new(tokens.to_vec(), options(0, 3))).unwrap();
        let answer = answer(generating.by_ref());
        (answer, generating.metrics(), generating.missed())
    };
    let (first, metrics, missed) = run(&tokens);
    assert_eq!((metrics.prompt_tokens, metrics.reused_tokens), (400, 0));
    assert_eq!((metrics.computed_tokens, metrics.generated_tokens), (400, 3));
    assert_eq!(missed, Some(Miss::Nothing));
    let (again, metrics, _) = run(&tokens);
    assert_eq!(again, first);
    assert!(metrics.reused_tokens >= 256, "{metrics:?}");
    assert_eq!(metrics.reused_tokens + metrics.computed_tokens, 400);
    let mut other = tokens.clone();
    other[300] = 1;
    let (_, metrics, missed) = run(&other);
    assert!((256..=300).contains(&metrics.reused_tokens), "{metrics:?}");
    let differs = Miss::Differs { position: 300, cached: tokens[300], wanted: 1 };
    assert_eq!(missed, Some(differs));
}

#[test]
fn requests_end_as_generations_do() {
    let engine = engine("llama3", 2, 64);
    let finish = |options: &GenerateOptions, n: usize| {
        let mut generating = engine.submit(Request::new(prompt(n, 0), options.clone())).unwrap();
        let tokens = generating.by_ref().filter(Result::is_ok).count();
        let mut session = engine.session();
        let mut generation = session.generate(prompt(n, 0), options).unwrap();
        let expected = generation.by_ref().filter(Result::is_ok).count();
        assert_eq!((tokens, generating.finish()), (expected, generation.finish()));
        (tokens, generating.finish().cloned())
    };
    assert_eq!(finish(&options(0, 0), 9), (0, Some(Finish::Length)));
    assert_eq!(finish(&options(0, 5), 9), (5, Some(Finish::Length)));
    let context = engine.info().context;
    let full = finish(&options(0, usize::MAX), context - 3);
    assert_eq!(full, (4, Some(Finish::ContextFull)));
    let ending = GenerateOptions { ignore_end: false, ..options(2, 10_000) };
    finish(&ending, 9);
    let error = |tokens: Vec<u32>, options: GenerateOptions| {
        engine.submit(Request::new(tokens, options)).err().unwrap().to_string()
    };
    assert!(error(vec![], options(0, 1)).contains("at least one token"));
    assert!(error(vec![1 << 30], options(0, 1)).contains("ids below"));
    assert!(error(prompt(context + 1, 0), options(0, 1)).contains("more tokens (context"));
    let mut wrong = options(0, 1);
    wrong.sampling.top_p = 2.0;
    assert!(error(prompt(3, 0), wrong).contains("top_p"));
    let mut impossible = options(0, 3);
    let vocabulary = engine.info().vocab as u32;
    impossible.sampling.logit_bias = (0..vocabulary).map(|t| (t, f32::NEG_INFINITY)).collect();
    let mut generating = engine.submit(Request::new(prompt(3, 0), impossible)).unwrap();
    let error = generating.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("sampling: expected a token that may be chosen"), "{error}");
    assert_eq!((generating.next().is_none(), generating.finish()), (true, Some(&Finish::Failed)));
}

#[test]
fn a_batch_has_its_outcomes_in_order_and_each_its_own_error() {
    let engine = engine("llama-long", 3, 64);
    let asked: Vec<_> =
        (0..9u32).map(|i| (prompt(1 + 31 * i as usize, i), options(i.into(), 8))).collect();
    let mut requests: Vec<_> = asked
        .iter()
        .map(|(tokens, options)| Request::new(tokens.clone(), options.clone()))
        .collect();
    requests[4] = Request::new(vec![1 << 30], options(0, 1));
    requests[6].options.cancel.cancel();
    let outcomes = engine.batch_generate(requests);
    assert_eq!(outcomes.len(), asked.len());
    for (i, (outcome, (tokens, options))) in outcomes.iter().zip(&asked).enumerate() {
        let found: Answer = outcome.tokens.iter().map(|token| (token.id, token.logprob)).collect();
        match i {
            4 => {
                let error = outcome.error.as_ref().unwrap().to_string();
                assert!(error.contains("ids below") && outcome.finish == Finish::Failed, "{error}");
            }
            6 => assert_eq!((&outcome.finish, found.len()), (&Finish::Cancelled, 0)),
            _ => {
                assert!(outcome.error.is_none() && outcome.finish == Finish::Length);
                assert_eq!(found, alone(&engine, tokens, options), "request {i}");
                assert_eq!(outcome.metrics.generated_tokens, 8);
                let text: String = outcome.tokens.iter().map(|token| token.text.as_str()).collect();
                assert_eq!(outcome.text(), text);
            }
        }
    }
}

/// Requests that nobody waits for, more than the engine could hold.
#[test]
fn what_is_dropped_or_cancelled_gives_its_place_up() {
    let engine = engine("llama-long", 1, 64);
    let long = || Request::new(prompt(300, 3), options(1, usize::MAX));
    for _ in 0..20 {
        let mut dropped = engine.submit(long()).unwrap();
        dropped.next().unwrap().unwrap();
    }
    let waiting: Vec<Generating> = (0..20).map(|_| engine.submit(long()).unwrap()).collect();
    drop(waiting);
    let cancel = CancelToken::default();
    let mut request = long();
    request.options.cancel = cancel.clone();
    let mut cancelled = engine.submit(request).unwrap();
    cancelled.next().unwrap().unwrap();
    cancel.cancel();
    assert!(cancelled.by_ref().count() < engine.info().context);
    assert_eq!(cancelled.finish(), Some(&Finish::Cancelled));
    let last = engine.submit(Request::new(prompt(300, 4), options(0, 4))).unwrap();
    assert_eq!(answer(last).len(), 4);
}

#[test]
fn a_deadline_ends_a_request_whether_it_waits_or_runs() {
    let engine = engine("llama-long", 1, 64);
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let endless = Request { deadline, ..Request::new(prompt(3, 3), options(1, 1 << 20)) };
    let behind: Vec<Generating> = (0..3).map(|_| engine.submit(endless.clone()).unwrap()).collect();
    for generating in behind {
        let last = generating.last().unwrap();
        match last {
            Err(error) => assert!(error.to_string().contains("before its deadline"), "{error}"),
            // A fast machine fills the context before.
            Ok(_) => println!("no deadline was met"),
        }
    }
    let past = Request { deadline: Some(Instant::now()), ..endless };
    let error = engine.submit(past).unwrap().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("before its deadline"), "{error}");
}

#[test]
fn a_panic_of_one_request_is_its_own() {
    let engine = engine("llama-long", 4, 64);
    let mut hostile = Request::new(prompt(200, 9), options(0, 5));
    hostile.options.progress = Some(Progress::new(|_, _| panic!("on purpose")));
    let others: Vec<_> = (0..3)
        .map(|i| engine.submit(Request::new(prompt(150, i), options(0, 30))).unwrap())
        .collect();
    let error = engine.submit(hostile).unwrap().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("on purpose"), "{error}");
    for (i, other) in others.into_iter().enumerate() {
        let expected = alone(&engine, &prompt(150, i as u32), &options(0, 30));
        assert_eq!(answer(other), expected);
    }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_handle_may_be_polled() {
    let engine = engine("llama3", 2, 64);
    let counter = Arc::new(Counter::default());
    let waker = Waker::from(counter.clone());
    let mut generating = engine.submit(Request::new(prompt(20, 1), options(0, 6))).unwrap();
    let mut found = Vec::new();
    loop {
        let before = counter.0.load(Ordering::SeqCst);
        match generating.poll_next(&mut Context::from_waker(&waker)) {
            Poll::Ready(Some(token)) => found.push(token.unwrap().id),
            Poll::Ready(None) => break,
            Poll::Pending => {
                let late = Instant::now() + Duration::from_secs(60);
                while counter.0.load(Ordering::SeqCst) == before {
                    assert!(Instant::now() < late, "it is woken");
                    std::thread::yield_now();
                }
            }
        }
    }
    let expected = alone(&engine, &prompt(20, 1), &options(0, 6));
    assert_eq!(found, expected.iter().map(|(token, _)| *token).collect::<Vec<_>>());
    assert!(matches!(generating.try_next(), Poll::Ready(None)));
}

#[test]
fn an_engine_is_given_back_with_its_worker() {
    for _ in 0..3 {
        let engine = engine("llama3", 2, 64);
        let generating = engine.submit(Request::new(prompt(20, 1), options(0, 6))).unwrap();
        // The request keeps the engine.
        drop(engine);
        assert_eq!(answer(generating).len(), 6);
    }
}

#[test]
fn each_request_has_a_constraint_of_its_own() {
    have_constraints_of_their_own(&engine("llama-long", 8, 64), 2);
}

/// A GPU chooses under masks itself, unless it is asked for the likeliest tokens.
#[test]
fn each_request_on_a_gpu_has_a_constraint_of_its_own() {
    for top_logprobs in [0, 2] {
        have_constraints_of_their_own(&on_sim(8), top_logprobs);
    }
}

fn have_constraints_of_their_own(engine: &Engine, top_logprobs: usize) {
    let constrained = |seed: u64, panics_at: u32| {
        let counting = Counting { panics_at, ..Counting::default() };
        let start = move || Ok(Box::new(counting) as Box<dyn Constraint>);
        let constraint = Some(ConstraintSource::new(start));
        GenerateOptions { constraint, ignore_end: false, top_logprobs, ..options(seed, 12) }
    };
    let wanted: Vec<_> = (0..6u64)
        .map(|i| (prompt(20 + 40 * i as usize, i as u32), i))
        .map(|(tokens, i)| {
            (tokens, if i.is_multiple_of(2) { constrained(i, u32::MAX) } else { options(i, 12) })
        })
        .collect();
    let submit = |(tokens, options): &(Vec<u32>, GenerateOptions)| {
        engine.submit(Request::new(tokens.clone(), options.clone())).unwrap()
    };
    let running: Vec<_> = wanted.iter().map(submit).collect();
    let failing = submit(&(prompt(30, 9), constrained(0, 3)));
    for (i, (running, (tokens, options))) in running.into_iter().zip(&wanted).enumerate() {
        let together: Vec<_> = running.map(Result::unwrap).collect();
        let mut session = engine.session();
        let alone: Vec<_> =
            session.generate(tokens.clone(), options).unwrap().map(Result::unwrap).collect();
        assert_eq!(together.len(), alone.len(), "request {i}");
        for (at, (one, other)) in together.iter().zip(&alone).enumerate() {
            assert_eq!(one.id, other.id, "request {i}, token {at}");
            assert_eq!(one.logprob, other.logprob, "request {i}, token {at}");
            assert_eq!(one.top_logprobs.len(), options.top_logprobs);
            let ids =
                |token: &Token| token.top_logprobs.iter().map(|top| top.0).collect::<Vec<_>>();
            assert_eq!(ids(one), ids(other), "request {i}, token {at}");
            assert!(options.constraint.is_none() || one.id % 3 == at as u32 % 3);
        }
    }
    let outcome: Vec<_> = failing.collect();
    let error = outcome.last().unwrap().as_ref().unwrap_err().to_string();
    assert!(outcome.len() == 4 && error.contains("on purpose"), "{error}");
    let endless = GenerateOptions { ignore_end: true, ..constrained(0, u32::MAX) };
    let error = engine.submit(Request::new(prompt(3, 0), endless)).err().unwrap().to_string();
    assert!(error.contains("a constrained generation that may end"), "{error}");
}

/// Options with a constraint, for a text that does not end before its limit.
fn constrained(
    engine: &Engine,
    source: ConstraintSource,
    options: GenerateOptions,
) -> GenerateOptions {
    let ends = engine.end_tokens().iter().map(|end| (*end, f32::NEG_INFINITY));
    let sampling = SamplingOptions { logit_bias: ends.collect(), ..options.sampling };
    GenerateOptions { constraint: Some(source), ignore_end: false, sampling, ..options }
}

/// Counts the launches between being told a token and being asked what may come next, and between
/// that and being told the token.
#[derive(Default)]
struct Watching {
    counting: Counting,
    launches: Arc<Mutex<Vec<Launches>>>,
    request: usize,
    before: usize,
    /// Its second token waits until this many requests were submitted.
    submitted: Arc<AtomicUsize>,
    awaited: usize,
    told: usize,
}

/// Launches that the constraint of a request counted for a token.
#[derive(Debug, Clone, Copy)]
struct Launches {
    request: usize,
    before: usize,
    after: usize,
}

const MANY: usize = 1 << 40;

/// Launches on simulated GPUs by this thread since it was asked last.
fn launches() -> usize {
    sim::fail_after(Some(MANY)).map_or(0, |left| MANY - left)
}

impl Constraint for Watching {
    fn allow(&mut self, left: usize, allowed: &mut TokenSet) -> formats::Result<()> {
        self.before = launches();
        self.counting.allow(left, allowed)
    }

    fn accept(&mut self, token: u32) -> formats::Result<u32> {
        self.told += 1;
        let late = Instant::now() + Duration::from_secs(300);
        while self.told == 2 && self.submitted.load(Ordering::SeqCst) < self.awaited {
            assert!(Instant::now() < late, "no other request");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (request, before, after) = (self.request, self.before, launches());
        self.launches.lock().unwrap().push(Launches { request, before, after });
        self.counting.accept(token)
    }
}

/// Tries a few times what holds of constraints that are quick: where another program keeps one from
/// its core, it is taken for slow, and followed by another thread, whose launches are not counted.
fn holds_of_quick_ones(check: impl Fn() -> Result<(), String>) {
    let mut found = check();
    for _ in 0..9 {
        found = found.or_else(|_| check());
    }
    found.unwrap();
}

/// The logits of a token are submitted before a constraint is told the token in front of it, and it
/// is asked what may come next before one is chosen from them.
#[test]
fn what_a_constraint_allows_is_found_while_the_device_computes() {
    let engine = on_sim(4);
    holds_of_quick_ones(|| {
        let noted = Arc::new(Mutex::new(Vec::new()));
        let launches = noted.clone();
        let source = ConstraintSource::new(move || {
            let watching = Watching { launches: launches.clone(), ..Watching::default() };
            Ok(Box::new(watching) as Box<dyn Constraint>)
        });
        let options = constrained(&engine, source, options(0, 9));
        let count = engine.submit(Request::new(prompt(20, 1), options)).unwrap().count();
        let noted = noted.lock().unwrap();
        assert_eq!((count, noted.len()), (9, 9));
        // The first token is a prompt's, which is asked for before anything is submitted. What
        // chooses are few launches, and the last token has nothing behind it.
        let leads = |noted: &Launches| noted.before == 0 && noted.after > 5;
        let last = (3..=5).contains(&noted[8].after);
        if last && noted[1..8].iter().all(leads) { Ok(()) } else { Err(format!("{noted:?}")) }
    });
}

/// Requests with constraints share steps, whenever they came.
#[test]
fn requests_with_constraints_share_steps() {
    let engine = on_sim(8);
    holds_of_quick_ones(|| share_steps(&engine));
}

fn share_steps(engine: &Engine) -> Result<(), String> {
    let noted = Arc::new(Mutex::new(Vec::new()));
    let there = Arc::new(AtomicUsize::new(0));
    let mut running = Vec::new();
    for request in 0..3 {
        let (launches, submitted) = (noted.clone(), there.clone());
        let awaited = (request + 2).min(3);
        let source = ConstraintSource::new(move || {
            let (launches, submitted) = (launches.clone(), submitted.clone());
            let usual = Watching::default();
            let watching = Watching { launches, request, submitted, awaited, ..usual };
            Ok(Box::new(watching) as Box<dyn Constraint>)
        });
        let options = constrained(engine, source, options(request as u64, 30));
        let mut answer = engine.submit(Request::new(prompt(20, request as u32), options)).unwrap();
        there.fetch_add(1, Ordering::SeqCst);
        assert!(answer.next().is_some_and(|token| token.is_ok()));
        running.push(answer);
    }
    assert_eq!(running.into_iter().map(Iterator::count).sum::<usize>(), 3 * 29);
    // The first token that a step chose is the one with launches in front of it.
    let noted = noted.lock().unwrap();
    let steps: Vec<&[Launches]> = noted.chunk_by(|_, next| next.after == 0).collect();
    let mut told = [0; 3];
    for step in &steps {
        let begins = step.iter().any(|token| told[token.request] == 0);
        let others = told.iter().filter(|told| (1..30).contains(*told)).count();
        if !begins && step.len() != others {
            return Err(format!("{step:?} of {others}"));
        }
        step.iter().for_each(|token| told[token.request] += 1);
    }
    match steps.iter().any(|step| step.len() == 3) {
        true => Ok(()),
        false => Err(format!("they were there one after another: {noted:?}")),
    }
}

/// Allows every third token; the first time that it is asked beside the worker, it says so and
/// waits.
struct Late {
    counting: Counting,
    pause: Arc<Mutex<Option<Pause>>>,
    /// Whether it waits where it is told a token, instead of where it is asked.
    told: bool,
}

impl Late {
    fn wait(&self) {
        // Long enough that there is something left to do for others.
        std::thread::sleep(Duration::from_millis(1));
        let beside = std::thread::current().name() == Some("delft-follow");
        let pause = if beside { self.pause.lock().unwrap().take() } else { None };
        if let Some(Pause { begun, go }) = pause {
            begun.send(()).unwrap();
            go.recv_timeout(Duration::from_secs(300)).expect("others go on meanwhile");
        }
    }
}

/// Where a constraint says that it waits, and what it waits for.
struct Pause {
    begun: mpsc::Sender<()>,
    go: mpsc::Receiver<()>,
}

impl Constraint for Late {
    fn allow(&mut self, left: usize, allowed: &mut TokenSet) -> formats::Result<()> {
        if !self.told {
            self.wait();
        }
        self.counting.allow(left, allowed)
    }

    fn accept(&mut self, token: u32) -> formats::Result<u32> {
        if self.told {
            self.wait();
        }
        self.counting.accept(token)
    }
}

/// A step whose logits are there does not wait for one constraint: its row is computed again.
#[test]
fn a_constraint_that_is_late_for_a_step_is_left_out_of_it() {
    let engine = on_sim(8);
    [false, true].iter().for_each(|told| is_left_out(&engine, *told));
}

fn is_left_out(engine: &Engine, told: bool) {
    let (begun, waits) = mpsc::channel();
    let (goes, go) = mpsc::channel();
    let pause = Arc::new(Mutex::new(Some(Pause { begun, go })));
    let late = |seed: u64, pauses: bool| {
        let pause = if pauses { pause.clone() } else { Arc::default() };
        let source = ConstraintSource::new(move || {
            let (counting, pause) = (Counting::default(), pause.clone());
            Ok(Box::new(Late { counting, pause, told }) as Box<dyn Constraint>)
        });
        constrained(engine, source, options(seed, 12))
    };
    let submit = |seed: u64| {
        let request = Request::new(prompt(10, seed as u32), late(seed, true));
        engine.submit(request).unwrap()
    };
    let mut running: Vec<_> = (0..6).map(|seed| (submit(seed), Vec::new(), false)).collect();
    waits.recv_timeout(Duration::from_secs(300)).expect("one of them is asked beside the worker");
    let (end, mut ended) = (Instant::now() + Duration::from_secs(300), 0);
    while ended < 6 {
        assert!(Instant::now() < end, "{ended} ended");
        for (running, tokens, done) in &mut running {
            while !*done && let Poll::Ready(next) = running.try_next() {
                *done = next.is_none();
                tokens.extend(next.map(|token| token.unwrap()).map(|t| (t.id, t.logprob)));
                ended += usize::from(*done);
            }
        }
        if ended == 5 {
            let _ = goes.send(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    for (seed, (_, tokens, _)) in running.into_iter().enumerate() {
        let seed = seed as u64;
        let wanted = alone(engine, &prompt(10, seed as u32), &late(seed, false));
        assert_eq!(tokens, wanted, "{seed}, {told}");
    }
}

/// Sessions that compute beside requests make the device forget choices that are to come.
#[test]
fn requests_with_constraints_go_on_beside_sessions() {
    let engine = on_sim(4);
    let led = |seed: u64| {
        let start = || {
            let (counting, pause) = (Counting::default(), Arc::default());
            Ok(Box::new(Late { counting, pause, told: false }) as Box<dyn Constraint>)
        };
        constrained(&engine, ConstraintSource::new(start), options(seed, 20))
    };
    let wanted: Vec<_> =
        (0..2).map(|seed| alone(&engine, &prompt(10, seed as u32), &led(seed))).collect();
    let submit = |seed: u64| engine.submit(Request::new(prompt(10, seed as u32), led(seed)));
    let running: Vec<_> = (0..2).map(|seed| submit(seed).unwrap()).collect();
    let free = alone(&engine, &prompt(12, 5), &options(0, 30));
    for (running, wanted) in running.into_iter().zip(wanted) {
        assert_eq!(answer(running), wanted);
    }
    assert_eq!(free, alone(&engine, &prompt(12, 5), &options(0, 30)));
}

/// Allows everything. It takes long over its second and third tokens, and is done with its fourth
/// once it is told so.
struct Slow {
    accepted: usize,
    go: mpsc::Receiver<()>,
}

impl Constraint for Slow {
    fn allow(&mut self, _left: usize, allowed: &mut TokenSet) -> formats::Result<()> {
        (0..120).for_each(|token| allowed.insert(token));
        Ok(())
    }

    fn accept(&mut self, token: u32) -> formats::Result<u32> {
        self.accepted += 1;
        match self.accepted {
            2 | 3 => std::thread::sleep(Duration::from_millis(20)),
            4 => self.go.recv_timeout(Duration::from_secs(60)).expect("others go on meanwhile"),
            _ => {}
        }
        Ok(token)
    }
}

#[test]
fn a_constraint_that_takes_long_holds_nobody_up() {
    let engine = engine("llama-long", 8, 64);
    let (told, go) = mpsc::channel();
    let go = Mutex::new(Some(go));
    let source = ConstraintSource::new(move || {
        let go = go.lock().unwrap().take().unwrap_or_else(|| mpsc::channel().1);
        Ok(Box::new(Slow { accepted: 0, go }) as Box<dyn Constraint>)
    });
    let slow = GenerateOptions { constraint: Some(source), ignore_end: false, ..options(1, 9) };
    let mut slow = engine.submit(Request::new(prompt(20, 1), slow)).unwrap();
    let first: Vec<Token> = (0..3).map(|_| slow.next().unwrap().unwrap()).collect();
    // It is being told its fourth token, or about to be.
    for seed in 0..6 {
        let (own, wanted) = (prompt(30, seed), options(u64::from(seed), 8));
        let running = engine.submit(Request::new(own.clone(), wanted.clone())).unwrap();
        assert_eq!(answer(running), alone(&engine, &own, &wanted));
    }
    told.send(()).unwrap();
    let rest = answer(slow);
    assert!(first.len() == 3 && (1..=6).contains(&rest.len()), "{}", rest.len());
}

/// Allows anything, and behind every even token three that follow from it; tells of those ahead, or
/// allows them one after the other.
struct Leading {
    ahead: bool,
    next: VecDeque<u32>,
    asked: Arc<AtomicUsize>,
    /// Goes on by another token than the one that was chosen, where that is a multiple of this.
    instead: u32,
}

impl Constraint for Leading {
    fn allow(&mut self, _left: usize, allowed: &mut TokenSet) -> formats::Result<()> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.next.front() {
            Some(&token) => allowed.insert(token),
            None => (3..120).for_each(|token| allowed.insert(token)),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> formats::Result<u32> {
        match self.next.pop_front() {
            Some(next) => assert_eq!(next, token),
            None if token.is_multiple_of(2) => {
                self.next.extend((1..4).map(|i| 3 + (token * 5 + i * 17) % 117));
            }
            None if token.is_multiple_of(self.instead) => return Ok(token - 1),
            None => {}
        }
        Ok(token)
    }

    fn forced(&mut self, most: usize) -> formats::Result<Vec<u32>> {
        let count = if self.ahead { most.min(self.next.len()) } else { 0 };
        Ok(self.next.drain(..count).collect())
    }
}

/// What a constraint puts there is computed in runs and changes no token, whoever runs beside it
/// and whatever is computed again; and it makes no difference whether log-probabilities are asked
/// for.
#[test]
fn tokens_that_a_constraint_puts_there_are_those_that_it_would_allow_alone() {
    let context = 600;
    let load_for = |sessions| {
        let (cache_type, chunk, context) = (CacheType::F32, Some(64), Some(context));
        let options = LoadOptions { cache_type, chunk, context, sessions, ..Default::default() };
        load(&root().join("llama-long"), &options)
    };
    let (engine, quiet) = (load_for(3), load_for(1));
    // Too few blocks are left for three that become long.
    let mut held = engine.session();
    answer(held.generate(prompt(context - 20, 77), &options(0, 1)).unwrap()).clear();
    let led = |ahead: bool, seed: u64, logprobs: bool| {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let start = move || {
            let next = VecDeque::from([9, 8, 7]);
            let leading = Leading { ahead, next, asked: count.clone(), instead: u32::MAX };
            Ok(Box::new(leading) as Box<dyn Constraint>)
        };
        let constraint = Some(ConstraintSource::new(start));
        let options = options(seed, 270);
        (GenerateOptions { constraint, ignore_end: false, logprobs, ..options }, asked)
    };
    let submit = |ahead: bool, seed: u64, logprobs: bool| {
        let (options, asked) = led(ahead, seed, logprobs);
        let tokens = prompt(250, seed as u32);
        (engine.submit(Request::new(tokens, options)).unwrap(), asked)
    };
    let ids = |answer: Answer| answer.into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    let (mut preempted, mut recomputed) = (0, 0);
    for logprobs in [false, true] {
        let running: Vec<_> = (0..3).map(|seed| submit(true, seed, logprobs)).collect();
        for (seed, (mut running, asked)) in running.into_iter().enumerate() {
            let together = answer(running.by_ref());
            let metrics = running.metrics();
            preempted += metrics.preemptions;
            recomputed += metrics.recomputed_tokens;
            assert_eq!(metrics.generated_tokens, 270);
            assert_eq!(together[..3].iter().map(|token| token.0).collect::<Vec<_>>(), [9, 8, 7]);
            assert_eq!(running.finish(), Some(&Finish::Length));
            assert_eq!(together.iter().all(|token| token.1.is_some()), logprobs);
            let together = ids(together);
            for ahead in [false, true] {
                let (options, asked_alone) = led(ahead, seed as u64, false);
                assert_eq!(together, ids(alone(&quiet, &prompt(250, seed as u32), &options)));
                let (many, few) =
                    (asked_alone.load(Ordering::Relaxed), asked.load(Ordering::Relaxed));
                assert!(logprobs || ahead || few + 20 < many, "{few} {many}");
            }
        }
    }
    assert!(preempted > 0 && recomputed > 0, "{preempted} {recomputed}");
    // A text that is cut among them.
    for most in 1..6 {
        let (options, _) = led(true, 2, false);
        let options = GenerateOptions { max_tokens: Some(most), ..options };
        let cut = answer(engine.submit(Request::new(prompt(20, 1), options.clone())).unwrap());
        assert_eq!(cut.len(), most);
        assert_eq!(ids(cut), ids(alone(&quiet, &prompt(20, 1), &options)));
    }
}

/// Rows that are submitted before a constraint knows its token choose nothing if it adds tokens or
/// replaces the chosen one, and every request gets the tokens that it gets alone.
#[test]
fn requests_on_a_gpu_go_on_by_the_tokens_of_their_constraints() {
    let engine = on_sim(8);
    let led = |seed: u64, instead: u32| {
        let start = move || {
            let (next, asked) = (VecDeque::new(), Arc::default());
            Ok(Box::new(Leading { ahead: true, next, asked, instead }) as Box<dyn Constraint>)
        };
        let constraint = Some(ConstraintSource::new(start));
        GenerateOptions { constraint, ignore_end: false, logprobs: false, ..options(seed, 60) }
    };
    let of = |seed: u64| match seed % 3 {
        0 => GenerateOptions { logprobs: false, ..options(seed, 60) },
        // Every third token is replaced, or every thirteenth.
        1 => led(seed, 3),
        _ => led(seed, 13),
    };
    let submit = |seed: u64| engine.submit(Request::new(prompt(12, seed as u32), of(seed)));
    let running: Vec<_> = (0..8).map(|seed| submit(seed).unwrap()).collect();
    let together: Vec<Answer> = running.into_iter().map(answer).collect();
    for (seed, together) in together.into_iter().enumerate() {
        assert_eq!(together, alone(&engine, &prompt(12, seed as u32), &of(seed as u64)), "{seed}");
    }
}
