//! Sessions: what is reused, what is refused, what rotates, and what a replay allocates.

use crate::common::{Counting, load, root, simulates};
use delft_engine::{
    CacheType, Constraint, ConstraintSource, Engine, Finish, GenerateOptions, LoadOptions,
    LogitRows, Progress, SamplingOptions, TokenSet,
};
use std::sync::{Arc, Mutex};

fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        sampling: SamplingOptions { temperature: 0.0, ..Default::default() },
        max_tokens: Some(max_tokens),
        ignore_end: true,
        ..Default::default()
    }
}

fn engine(case: &str, options: LoadOptions) -> Engine {
    load(&root().join(case), &options)
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + 11) % 120).collect()
}

/// Greedy continuation of a prompt, in a session of its own.
fn continuation(engine: &Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut session = engine.session();
    let generation = session.generate(prompt.to_vec(), &greedy(n)).unwrap();
    generation.map(|t| t.unwrap().id).collect()
}

#[test]
fn a_shared_prefix_is_reused_and_changes_nothing() {
    for case in ["llama3", "mistral", "qwen3"] {
        let engine = engine(case, LoadOptions { cache_type: CacheType::F32, ..Default::default() });
        let mut session = engine.session();
        let first = prompt(20);
        let mut generation = session.generate(first.clone(), &greedy(5)).unwrap();
        let told: Vec<u32> = generation.by_ref().map(|t| t.unwrap().id).collect();
        assert_eq!(generation.metrics().reused_tokens, 0);
        assert_eq!(told, continuation(&engine, &first, 5));
        // The same beginning with another end, then a longer one that contains the first answer.
        let other = [&first[..12], &[3, 4, 5]].concat();
        let mut generation = session.generate(other.clone(), &greedy(5)).unwrap();
        let again: Vec<u32> = generation.by_ref().map(|t| t.unwrap().id).collect();
        assert_eq!(generation.metrics().reused_tokens, 12, "{case}");
        assert_eq!(again, continuation(&engine, &other, 5), "{case}");
        let longer = [&other[..], &again, &[7, 8]].concat();
        let mut generation = session.generate(longer.clone(), &greedy(4)).unwrap();
        let more: Vec<u32> = generation.by_ref().map(|t| t.unwrap().id).collect();
        assert_eq!(generation.metrics().reused_tokens, other.len() + 4, "{case}");
        assert_eq!(more, continuation(&engine, &longer, 4), "{case}");
    }
}

#[test]
fn a_state_goes_back_to_where_it_was_kept() {
    for (case, chunk, device) in [
        ("qwen3.5-long", 512, "cpu"),
        ("qwen3.5-long", 64, "cpu"),
        ("qwen3-next", 512, "cpu"),
        ("granite4-hybrid", 64, "cpu"),
        ("qwen3.5-long", 64, "sim"),
        ("granite4-hybrid", 64, "sim"),
    ] {
        let (cache_type, chunk) = (CacheType::F32, Some(chunk));
        let on = || LoadOptions::on(device.parse().unwrap());
        // The least that there can be: states that are kept must not keep it from going on.
        let sessions = 1;
        let context = Some(600);
        let engine = engine(case, LoadOptions { cache_type, chunk, sessions, context, ..on() });
        let base = prompt(300);
        let mut session = engine.session();
        let mut turn = |tokens: &[u32], reused: usize, why: &str| {
            let mut generation = session.generate(tokens.to_vec(), &greedy(5)).unwrap();
            let told: Vec<u32> = generation.by_ref().map(|t| t.unwrap().id).collect();
            assert_eq!(generation.metrics().reused_tokens, reused, "{case}: {why}");
            let options = LoadOptions { cache_type, context, ..on() };
            let fresh = load(&root().join(case), &options);
            assert_eq!(told, continuation(&fresh, tokens, 5), "{case}: {why}");
            told
        };
        let told = turn(&base, 0, "a first turn");
        let longer = [&base[..], &told, &[3, 4, 5]].concat();
        turn(&longer, 304, "it goes on");
        let behind = |more: &[u32]| [&longer[..], more].concat();
        turn(&behind(&[9, 8]), longer.len(), "without the answer: the end of a prompt");
        turn(&behind(&[7, 8]), longer.len(), "the end of the prompt before");
        turn(&[&base[..], &[7, 8]].concat(), 256, "prompts before the last two are not kept");
        turn(&[&base[..290], &[7, 8]].concat(), 256, "a multiple of 256");
        turn(&base[..200], 0, "before all that was kept");
    }
}

#[test]
fn chunked_prefill_equals_whole_and_steps() {
    for case in ["llama-long", "mistral-long", "qwen3.5-long"] {
        let whole = engine(case, LoadOptions { cache_type: CacheType::F32, ..Default::default() });
        let chunked = engine(
            case,
            LoadOptions { cache_type: CacheType::F32, chunk: Some(64), ..Default::default() },
        );
        let tokens = prompt(400);
        let a = whole.session().logits(&tokens, LogitRows::Last(3)).unwrap();
        let b = chunked.session().logits(&tokens, LogitRows::Last(3)).unwrap();
        let mut stepped = whole.session();
        let mut c = Vec::new();
        for token in &tokens {
            c.clear();
            stepped.evaluate(&[*token], 0, &mut |_, row| c.extend_from_slice(row)).unwrap();
        }
        assert!(crate::common::error(&b.data, &a.data) < 1e-4, "{case}");
        assert!(crate::common::error(&c, &a.data[2 * a.vocab..]) < 1e-4, "{case}");
    }
}

#[test]
fn a_full_context_says_so() {
    let engine = engine("llama3", LoadOptions { context: Some(24), ..Default::default() });
    let mut session = engine.session();
    let error = session.generate(prompt(25), &greedy(1)).err().unwrap().to_string();
    assert!(error.contains("at most 24 more tokens") && error.contains("context"), "{error}");
    let mut generation = session.generate(prompt(20), &greedy(100)).unwrap();
    assert_eq!(generation.by_ref().filter(Result::is_ok).count(), 5);
    assert_eq!(generation.finish(), Some(&Finish::ContextFull));
}

#[test]
fn a_rotating_context_goes_on() {
    let options =
        LoadOptions { context: Some(256), rotate: true, chunk: Some(64), ..Default::default() };
    let engine = engine("llama3", options);
    let mut session = engine.session();
    session.logits(&prompt(40), LogitRows::Last(1)).unwrap();
    let one_block = engine.memory().cache;
    let mut generation = session.generate(prompt(40), &greedy(1500)).unwrap();
    assert_eq!(generation.by_ref().filter(Result::is_ok).count(), 1500);
    assert_eq!(generation.finish(), Some(&Finish::Length));
    assert_eq!(session.tokens().len(), 1539);
    // Blocks in use stay bounded: 256 positions, a chunk, and the block being written.
    assert_eq!(engine.memory().cache, 3 * one_block);
}

#[test]
fn sessions_do_not_disturb_each_other() {
    let engine = engine("qwen2", LoadOptions::default());
    let (a, b) = (prompt(9), prompt(15));
    let (alone_a, alone_b) = (continuation(&engine, &a, 12), continuation(&engine, &b, 12));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| continuation(&engine, &a, 12));
        let second = scope.spawn(|| continuation(&engine, &b, 12));
        assert_eq!(first.join().unwrap(), alone_a);
        assert_eq!(second.join().unwrap(), alone_b);
    });
}

#[test]
fn cancelling_stops_before_the_next_token() {
    let engine = engine("llama3", LoadOptions::default());
    let mut session = engine.session();
    let options = greedy(100);
    let mut generation = session.generate(prompt(4), &options).unwrap();
    generation.next().unwrap().unwrap();
    options.cancel.cancel();
    assert!(generation.next().is_none());
    assert_eq!(generation.finish(), Some(&Finish::Cancelled));
}

/// All that a progress was told.
type Told = Arc<Mutex<Vec<(usize, usize)>>>;

/// Notes what it is told, and cancels once it has been told `calls` times.
fn telling(options: &mut GenerateOptions, calls: usize) -> Told {
    let told = Told::default();
    let (list, cancel) = (told.clone(), options.cancel.clone());
    options.progress = Some(Progress::new(move |done, all| {
        let mut list = list.lock().unwrap();
        list.push((done, all));
        if list.len() == calls {
            cancel.cancel();
        }
    }));
    told
}

#[test]
fn progress_tells_of_the_tokens_that_are_computed_and_of_no_others() {
    for (place, options) in [
        ("cpu", LoadOptions { chunk: Some(8), ..LoadOptions::default() }),
        ("sim", LoadOptions { chunk: Some(8), ..LoadOptions::on("sim".parse().unwrap()) }),
        ("cpu", LoadOptions { chunk: Some(512), ..LoadOptions::default() }),
    ] {
        let engine = engine("llama3", LoadOptions { context: Some(64), ..options });
        let mut session = engine.session();
        for (prompt, reused) in [(prompt(21), 0), (prompt(37), 21), (prompt(37), 36)] {
            let all = prompt.len() - reused;
            let mut options = greedy(1);
            let told = telling(&mut options, usize::MAX);
            let mut generation = session.generate(prompt, &options).unwrap();
            while generation.next().is_some() {}
            let metrics = generation.metrics();
            assert_eq!((metrics.reused_tokens, metrics.computed_tokens), (reused, all), "{place}");
            assert!(metrics.computing <= metrics.prefill);
            let told = told.lock().unwrap();
            assert!(told.is_sorted() && told.iter().all(|told| told.1 == all), "{told:?}");
            assert_eq!(told.last(), Some(&(all, all)), "{place}");
        }
    }
}

#[test]
fn a_prompt_that_is_given_up_leaves_what_was_computed_and_nothing_false() {
    let prompt = prompt(40);
    let options = LoadOptions {
        chunk: Some(8),
        context: Some(64),
        cache_type: CacheType::F32,
        ..Default::default()
    };
    for threads in [1, 2] {
        let engine = engine("llama3", LoadOptions { threads: Some(threads), ..options.clone() });
        let wanted = continuation(&engine, &prompt, 9);
        let mut session = engine.session();
        let mut before = 0;
        // After operations of a step, and around its end.
        for calls in [1, 3, 7, 14, 15, 16, 17] {
            let mut options = greedy(9);
            let told = telling(&mut options, calls);
            let mut generation = session.generate(prompt.clone(), &options).unwrap();
            assert!(generation.next().is_none(), "{calls} calls");
            assert_eq!(generation.finish(), Some(&Finish::Cancelled));
            let metrics = generation.metrics();
            // A step whose last operation it was is over, and says so.
            assert!(told.lock().unwrap().len() <= calls + 1, "nothing is computed after that");
            assert_eq!(metrics.reused_tokens, before);
            assert_eq!(metrics.computed_tokens % 8, 0, "whole steps");
            drop(generation);
            before += metrics.computed_tokens;
            assert_eq!(session.tokens(), &prompt[..before]);
            if calls == 1 {
                assert_eq!((metrics.computed_tokens, metrics.prefill_rate()), (0, 0.0));
            }
            let mut other = engine.session();
            let found: Vec<u32> = other
                .generate(prompt.clone(), &greedy(9))
                .unwrap()
                .map(|token| token.unwrap().id)
                .collect();
            assert_eq!(found, wanted, "others do not notice");
        }
        assert!((8..40).contains(&before), "{before}");
        let rest = session.generate(prompt.clone(), &greedy(9)).unwrap();
        assert_eq!(rest.map(|token| token.unwrap().id).collect::<Vec<_>>(), wanted);
    }
}

#[test]
fn seeds_decide_samples_and_nothing_else_does() {
    let one = engine("qwen3", LoadOptions { threads: Some(1), ..Default::default() });
    let two =
        engine("qwen3", LoadOptions { threads: Some(2), chunk: Some(5), ..Default::default() });
    let sample = |engine: &Engine, seed| {
        let sampling = SamplingOptions { temperature: 1.0, seed, ..Default::default() };
        let options = GenerateOptions { sampling, ..greedy(20) };
        engine
            .session()
            .generate(prompt(11), &options)
            .unwrap()
            .map(|t| t.unwrap().id)
            .collect::<Vec<u32>>()
    };
    assert_eq!(sample(&one, 1), sample(&two, 1));
    assert_ne!(sample(&one, 1), sample(&one, 2));
}

#[test]
fn ids_outside_the_vocabulary_are_refused() {
    let engine = engine("llama3", LoadOptions::default());
    let mut session = engine.session();
    let error = session.logits(&[1, 5000], LogitRows::All).unwrap_err().to_string();
    assert!(error.contains("ids below 128") && error.contains("5000"), "{error}");
    assert!(session.generate(Vec::new(), &greedy(1)).is_err());
    assert!(session.generate("text", &greedy(1)).err().unwrap().to_string().contains("tokenizer"));
}

#[test]
fn a_constraint_decides_what_may_come_next() {
    for place in ["cpu", "sim-cuda"].into_iter().filter(|place| simulates(place)) {
        let options = LoadOptions::on(place.parse().unwrap());
        let engine = engine("llama3", options);
        let mut session = engine.session();
        let counting = |most| {
            let counting = Counting { most, ..Counting::default() };
            let start = move || Ok(Box::new(counting) as Box<dyn Constraint>);
            Some(ConstraintSource::new(start))
        };
        for temperature in [0.0, 5.0] {
            let constraint = counting(100);
            let mut options = GenerateOptions { constraint, ignore_end: false, ..greedy(7) };
            options.sampling.temperature = temperature;
            options.logprobs = true;
            let ends = engine.end_tokens().iter();
            options.sampling.logit_bias = ends.map(|end| (*end, f32::NEG_INFINITY)).collect();
            let tokens: Vec<_> = session.generate(prompt(9), &options).unwrap().collect();
            let tokens: Vec<_> = tokens.into_iter().map(|token| token.unwrap()).collect();
            assert_eq!(tokens.len(), 7, "{place}");
            for (i, token) in tokens.iter().enumerate() {
                assert_eq!(token.id % 3, i as u32 % 3, "{place}");
                assert!(token.logprob.unwrap() < 0.0, "{place}");
            }
        }
        // Nothing is allowed after two tokens: the generation fails, and the session goes on.
        let constraint = counting(2);
        let options = GenerateOptions { constraint, ignore_end: false, ..greedy(7) };
        let mut generation = session.generate(prompt(9), &options).unwrap();
        let failed = generation.by_ref().find_map(|token| token.err()).unwrap().to_string();
        assert!(failed.starts_with("sampling: expected a token that may be chosen"), "{failed}");
        assert_eq!(generation.finish(), Some(&Finish::Failed));
        assert_eq!(session.generate(prompt(9), &greedy(3)).unwrap().count(), 3, "{place}");
    }
}

/// Allows everything before its third token, and every third token from then on.
#[derive(Default)]
struct Closing(u32);

impl Constraint for Closing {
    fn allow(&mut self, _: usize, allowed: &mut TokenSet) -> formats::Result<()> {
        match self.0 {
            0 | 1 => allowed.insert_all(),
            _ => (0..1000).filter(|token| token % 3 == 1).for_each(|token| allowed.insert(token)),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> formats::Result<u32> {
        assert!(self.0 < 2 || token % 3 == 1, "{token}");
        self.0 += 1;
        Ok(token)
    }
}

/// A device that runs ahead does not run ahead of a constraint.
#[test]
fn a_constraint_that_allows_everything_may_allow_less_later() {
    for place in ["cpu", "sim"] {
        let engine = engine("llama3", LoadOptions::on(place.parse().unwrap()));
        let start = || Ok(Box::new(Closing::default()) as Box<dyn Constraint>);
        for seed in 0..4 {
            let constraint = Some(ConstraintSource::new(start));
            let mut options = GenerateOptions { constraint, ignore_end: false, ..greedy(8) };
            let ends = engine.end_tokens().iter();
            options.sampling.logit_bias = ends.map(|end| (*end, f32::NEG_INFINITY)).collect();
            (options.sampling.temperature, options.sampling.seed) = (2.0, seed);
            let mut session = engine.session();
            let tokens: Vec<_> = session.generate(prompt(9), &options).unwrap().collect();
            let tokens: Vec<_> = tokens.into_iter().map(|token| token.unwrap().id).collect();
            assert_eq!(tokens.len(), 8, "{place}");
            assert!(tokens[2..].iter().all(|token| token % 3 == 1), "{place}: {tokens:?}");
        }
    }
}

#[test]
fn the_likeliest_tokens_are_told_with_each() {
    for case in ["llama3", "qwen3"] {
        let engine = engine(case, LoadOptions { cache_type: CacheType::F32, ..Default::default() });
        let mut session = engine.session();
        let options = GenerateOptions { logprobs: true, top_logprobs: 4, ..greedy(5) };
        let tokens: Vec<_> = session.generate(prompt(9), &options).unwrap().collect();
        let mut sequence = prompt(9);
        for token in tokens {
            let token = token.unwrap();
            let logits = engine.session().logits(&sequence, LogitRows::Last(1)).unwrap().data;
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            assert_eq!(token.top_logprobs.len(), 4);
            assert_eq!(token.top_logprobs[0], (token.id, token.logprob.unwrap()), "greedy");
            for &(id, logprob) in &token.top_logprobs {
                let expected = f64::from(logits[id as usize]) - sum.ln();
                assert!((f64::from(logprob) - expected).abs() < 1e-3, "{case} {id}");
            }
            assert!(token.top_logprobs.is_sorted_by(|a, b| a.1 >= b.1));
            sequence.push(token.id);
        }
    }
}
