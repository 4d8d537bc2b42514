//! Steps as each way of dispatch gives them: the same answers, nothing allocated, and no slot
//! written that is still wanted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ops::sample::Sampler;

use super::*;
use crate::Refusal;
use crate::gpu::lower::SEATS;
use crate::gpu::ring::SLOTS;

/// Counts allocations of each thread.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: defers to the system allocator; the counter is no part of the contract, and allocates
// nothing itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
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

fn faulty() -> Arc<Faulty> {
    Faulty::new(Sim::new(KernelRunner::Interpreter))
}

/// Part of a prompt, of which nobody wants logits.
fn rows(executor: &mut GpuExecutor<Faulty>, block: u32, start: u32, tokens: &[u32]) -> Result<()> {
    let tables = [Table { blocks: &[block], oldest: 0 }];
    let sequence = Sequence::new(tokens.len(), start as usize, &tables);
    let sequences = &[Sequence { slot: block, ..sequence }];
    let step = Step { kind: StepKind::Prompt, tokens, sequences, outputs: &[], input: &[] };
    executor.submit(&step).map(drop)
}

/// A prompt in parts of two rows, and the logits after it.
fn prompt(executor: &mut GpuExecutor<Faulty>, block: u32) -> Vec<f32> {
    for (i, tokens) in FIRST.chunks(2).enumerate() {
        rows(executor, block, 2 * i as u32, tokens).unwrap();
    }
    logits(executor, block, FIRST.len() as u32, &[4]).unwrap()
}

#[test]
fn a_slot_is_written_again_once_nobody_wants_it() {
    let wanted = prompt(&mut load(&faulty()), 0);
    let backend = faulty();
    let mut executor = load_as(&backend, Dispatch::Arguments);
    // Once as it is, so that all that follows is compiled and has its memory.
    assert_eq!(prompt(&mut executor, 0), wanted);
    *backend.when.lock().unwrap() = When::Late;
    let done = || backend.done.load(Ordering::Relaxed);
    let per_step = {
        rows(&mut executor, 0, 0, &FIRST[..2]).unwrap();
        backend.jobs.lock().unwrap().len()
    };
    for i in 1..SLOTS as u32 {
        rows(&mut executor, 0, 2 * i, &FIRST[2 * i as usize..][..2]).unwrap();
    }
    assert_eq!(done(), 0, "the host is ahead of the device");
    assert_eq!(backend.jobs.lock().unwrap().len(), SLOTS * per_step);
    let at = 2 * SLOTS as u32;
    rows(&mut executor, 0, at, &FIRST[at as usize..][..2]).unwrap();
    assert_eq!(done(), 1, "the first step's copy, and no more, was waited for");
    assert_eq!(prompt(&mut executor, 0), wanted);
    // Without the wait, late steps read the arguments of later ones.
    *backend.when.lock().unwrap() = When::Hasty;
    assert_ne!(prompt(&mut executor, 0), wanted);
}

#[test]
fn a_late_device_chooses_the_same_tokens() {
    let run = |when, dispatch| {
        let backend = faulty();
        let mut executor = load_as(&backend, dispatch);
        *backend.when.lock().unwrap() = when;
        prompt(&mut executor, 0);
        logits(&mut executor, 1, 0, SECOND).unwrap();
        let mut found = Vec::new();
        for (block, start) in [(0, 13), (1, 3), (0, 15), (0, 13), (1, 5)] {
            found.extend(chosen(&mut executor, block, start, 30).unwrap());
        }
        found
    };
    let wanted = run(When::Now, Dispatch::Graph);
    for dispatch in Dispatch::ALL {
        for when in [When::Now, When::Late] {
            assert_eq!(run(when, dispatch), wanted, "{dispatch:?} {when:?}");
        }
    }
}

/// A mixture whose experts another device computes.
fn load_without_experts(
    backend: &Arc<Faulty>,
    dispatch: Dispatch,
    other: &dyn Device,
) -> GpuExecutor<Faulty> {
    let (program, tensors) = recorded("qwen3-moe");
    let both = program.offload(&|_, node| node.op.name() == "experts").unwrap();
    let options = ExecutorOptions { dispatch, ..options() };
    let away = ExecutorOptions { blocks: vec![], context: vec![], ..options.clone() };
    let other = other.load(both.away, &tensors, away, &mut |_, _| {}).unwrap();
    let backend = Arc::clone(backend);
    let store = Store::<Faulty>::default();
    let home = GpuExecutor::load(backend, both.home, &tensors, options, &store, &mut |_, _| {});
    let mut home = home.unwrap();
    home.join(other).unwrap();
    home
}

#[test]
fn steps_allocate_nothing() {
    let cpu = "cpu".parse::<crate::DeviceSpec>().unwrap().open(Some(2)).unwrap();
    for (dispatch, moved) in [
        (Dispatch::Arguments, false),
        (Dispatch::Graph, false),
        (Dispatch::Arguments, true),
        (Dispatch::Graph, true),
    ] {
        let backend = faulty();
        let mut executor = match moved {
            true => load_without_experts(&backend, dispatch, &*cpu),
            false => load_as(&backend, dispatch),
        };
        *backend.when.lock().unwrap() = When::Never;
        let options = Options { top_k: 5, ..Options::default() };
        let mut steps = |from: u32, to: u32| {
            for position in from..to {
                rows(&mut executor, 1, position, &[3, 5, 9]).unwrap();
                let ticket = submit(&mut executor, 2, position, &[4], None).unwrap();
                executor.read(ticket, 0).unwrap();
            }
            // Every token is 0, says a device that does nothing.
            let choose = Choose { options: &options, history: &[], mask: None, logprobs: None };
            let mut before = None;
            for position in from..to {
                for block in [0, 3, 4] {
                    // The last has a mask, and is staged with each step.
                    let mask = (block == 4).then_some(&[u32::MAX; 4][..]);
                    let choose = Choose { mask, ..choose };
                    let token = if position == 0 { 0 } else { CHOSEN };
                    let next = submit(&mut executor, block, position, &[token], Some(&choose));
                    // A step is under way while the one before it, of the other slot, is waited
                    // for.
                    let ticket = before.replace(next.unwrap());
                    ticket.map(|ticket| executor.wait(ticket).unwrap().choice(0).unwrap());
                }
            }
        };
        // The first token that is chosen makes room for choosing, and steps bound before it are
        // bound anew.
        steps(0, 3);
        steps(3, 6);
        let (before, bound) = (COUNT.get(), backend.calls("bind"));
        steps(6, 40);
        assert_eq!(COUNT.get() - before, 0, "{dispatch:?}, experts moved: {moved}");
        assert_eq!(backend.calls("bind"), bound, "{dispatch:?}: nothing is bound again");
    }
}

/// The tokens that a session chooses alone.
fn alone(block: u32, first: u32, steps: usize) -> Vec<u32> {
    let mut executor = load(&faulty());
    let mut timeline = Timeline::new(&mut executor, block, first);
    (0..steps).map(|_| timeline.step(&mut executor, true)).collect()
}

/// A session that is fed what was chosen.
struct Timeline {
    block: u32,
    tokens: Vec<u32>,
}

impl Timeline {
    fn new(executor: &mut GpuExecutor<Faulty>, block: u32, first: u32) -> Timeline {
        let tokens = vec![first, 9, first + 2];
        logits(executor, block, 0, &tokens).unwrap();
        Timeline { block, tokens: [&tokens[..], &[first + 7]].concat() }
    }

    /// The next token; of the step, `known` says whether it is given the token or goes on with what
    /// was chosen.
    fn step(&mut self, executor: &mut GpuExecutor<Faulty>, known: bool) -> u32 {
        let seed = self.block.into();
        let options = Options { seed, repetition_penalty: 1.3, last_n: 5, ..Options::default() };
        let at = self.tokens.len() as u32 - 1;
        let token = if known { self.tokens[at as usize] } else { CHOSEN };
        let found = choice(executor, self.block, at, token, &options, &self.tokens).unwrap();
        self.tokens.push(found.token);
        found.token
    }
}

#[test]
fn sessions_that_take_turns_choose_what_they_choose_alone() {
    const STEPS: usize = 8;
    for dispatch in Dispatch::ALL {
        // As many as have seats, and more.
        for sessions in [2, SEATS as u32 + 1] {
            let backend = faulty();
            let mut executor = load_as(&backend, dispatch);
            let mut timelines: Vec<Timeline> =
                (0..sessions).map(|i| Timeline::new(&mut executor, i, 11 * i + 3)).collect();
            let mut found = vec![vec![]; timelines.len()];
            let mut staged = 0;
            for step in 0..STEPS {
                for (timeline, found) in timelines.iter_mut().zip(&mut found) {
                    found.push(timeline.step(&mut executor, step == 0));
                }
                if step == 0 {
                    staged = backend.calls("write") + backend.calls("copy");
                }
            }
            let again = backend.calls("write") + backend.calls("copy") - staged;
            assert_eq!(again == 0, sessions as usize <= SEATS, "staged {again} times again");
            for (i, found) in found.iter().enumerate() {
                assert_eq!(*found, alone(i as u32, 11 * i as u32 + 3, STEPS), "{dispatch:?} {i}");
            }
        }
    }
}

/// A choice made ahead from a past that is no more is not told to who gives a token.
#[test]
fn a_past_that_changed_changes_the_choice() {
    let choose = |executor: &mut GpuExecutor<Faulty>, position: u32, token: u32| {
        choice(executor, 0, position, token, &Options::greedy(), &[]).unwrap()
    };
    for dispatch in Dispatch::ALL {
        let mut executor = load_as(&faulty(), dispatch);
        logits(&mut executor, 0, 0, FIRST).unwrap();
        let at = FIRST.len() as u32;
        let next = choose(&mut executor, at, 4);
        let options = Options::greedy();
        let ahead = Choose { options: &options, history: &[], mask: None, logprobs: None };
        submit(&mut executor, 0, at + 1, &[CHOSEN], Some(&ahead)).unwrap();
        // Another past, in the same block, whose next step happens to look the same.
        let other: Vec<u32> = FIRST.iter().map(|token| token + 1).collect();
        logits(&mut executor, 0, 0, &[&other[..], &[4]].concat()).unwrap();
        let found = choose(&mut executor, at + 1, next.token);
        let mut fresh = load_as(&faulty(), dispatch);
        logits(&mut fresh, 0, 0, &[&other[..], &[4]].concat()).unwrap();
        assert_eq!(found, choose(&mut fresh, at + 1, next.token), "{dispatch:?}");
        let mut first = load_as(&faulty(), dispatch);
        logits(&mut first, 0, 0, &[FIRST, &[4]].concat()).unwrap();
        assert_ne!(found, choose(&mut first, at + 1, next.token), "the pasts differ");
    }
}

fn load_batched(backend: &Arc<Faulty>, dispatch: Dispatch) -> GpuExecutor<Faulty> {
    let (program, tensors) = model();
    let options = ExecutorOptions { dispatch, sequences: 4, batched: true, ..options() };
    let (backend, store) = (Arc::clone(backend), Store::<Faulty>::default());
    let load = GpuExecutor::load(backend, program, &tensors, options, &store, &mut |_, _| {});
    load.unwrap()
}

/// Sessions whose chains differ: two of them look back, one has a bias.
fn chains() -> [Options; 3] {
    let penalties = Options { repetition_penalty: 1.4, last_n: 3, seed: 8, ..Options::default() };
    let bias = Options { logit_bias: vec![(7, 3.0), (9, -2.0)], seed: 9, ..Options::default() };
    [
        Options::greedy(),
        Options { top_k: 40, ..penalties },
        Options { top_p: 0.9, frequency_penalty: 0.5, last_n: 100, ..bias },
    ]
}

/// A step of a token of each of some sessions, which are also their blocks and slots: its number,
/// position, token, and what came before.
fn decode(
    executor: &mut GpuExecutor<Faulty>,
    chains: &[Options],
    members: &[(usize, u32, u32, &[u32])],
) -> Result<Ticket> {
    decode_masked(executor, chains, &[], members)
}

/// As [`decode`], with the masks of the first sessions, where they have one.
fn decode_masked(
    executor: &mut GpuExecutor<Faulty>,
    chains: &[Options],
    masks: &[Option<&[u32]>],
    members: &[(usize, u32, u32, &[u32])],
) -> Result<Ticket> {
    decoding(chains, masks, members, |step| executor.submit(step))
}

/// Calls `f` with the step of [`decode_masked`].
fn decoding<T>(
    chains: &[Options],
    masks: &[Option<&[u32]>],
    members: &[(usize, u32, u32, &[u32])],
    f: impl FnOnce(&Step<'_>) -> T,
) -> T {
    let blocks: Vec<u32> = members.iter().map(|(session, ..)| *session as u32).collect();
    let tables: Vec<[Table<'_>; 1]> =
        blocks.chunks(1).map(|blocks| [Table { blocks, oldest: 0 }]).collect();
    let choose = |&(session, _, _, history): &(usize, u32, u32, _)| Choose {
        options: &chains[session],
        history,
        mask: masks.get(session).copied().flatten(),
        logprobs: Some(0),
    };
    let chooses: Vec<Choose<'_>> = members.iter().map(choose).collect();
    let sequence = |(i, (_, position, ..)): (usize, &(usize, u32, u32, _))| Sequence {
        slot: blocks[i],
        choose: Some(&chooses[i]),
        ..Sequence::new(1, *position as usize, &tables[i])
    };
    let sequences: Vec<Sequence<'_>> = members.iter().enumerate().map(sequence).collect();
    let tokens: Vec<u32> = members.iter().map(|member| member.2).collect();
    let outputs: Vec<u32> = (0..members.len() as u32).collect();
    let (sequences, outputs) = (&sequences[..], &outputs[..]);
    f(&Step { kind: StepKind::Decode, tokens: &tokens, sequences, outputs, input: &[] })
}

/// How the sequences of a step choose.
fn choices<'a>(step: &Step<'a>) -> Vec<Option<Choose<'a>>> {
    step.sequences.iter().map(|sequence| sequence.choose.copied()).collect()
}

/// Who is in each step: sessions come and go while their tokens are still being chosen.
const MEMBERS: [&[usize]; 10] =
    [&[0, 1], &[1, 2], &[0, 1, 2], &[2], &[2, 0], &[1], &[0, 1, 2], &[1, 0], &[1, 2], &[2, 1, 0]];

#[test]
fn tokens_go_from_step_to_step_whichever_sessions_are_in_them() {
    let chains = chains();
    let prompts = [FIRST, SECOND, &FIRST[3..9]];
    let mut alone = vec![vec![]; 3];
    for (session, prompt) in prompts.iter().enumerate() {
        let mut executor = load_batched(&faulty(), Dispatch::Graph);
        logits(&mut executor, session as u32, 0, prompt).unwrap();
        let mut tokens = [*prompt, &[4]].concat();
        for _ in 0..MEMBERS.len() {
            let (at, last) = (tokens.len() as u32 - 1, tokens[tokens.len() - 1]);
            let ticket = decode(&mut executor, &chains, &[(session, at, last, &tokens)]).unwrap();
            let choice = executor.wait(ticket).unwrap().choice(0).unwrap();
            tokens.push(choice.token);
            alone[session].push(choice);
        }
    }
    let ways = [When::Now, When::Late].into_iter().flat_map(|when| [(when, false), (when, true)]);
    for dispatch in Dispatch::ALL {
        for (when, apart) in ways.clone() {
            let backend = faulty();
            let mut executor = load_batched(&backend, dispatch);
            for (session, prompt) in prompts.iter().enumerate() {
                logits(&mut executor, session as u32, 0, prompt).unwrap();
            }
            *backend.when.lock().unwrap() = when;
            let (mut found, mut steps) = (vec![vec![]; 3], [0; 3]);
            let mut ahead: VecDeque<(Ticket, &[usize])> = VecDeque::new();
            let mut read = |executor: &mut GpuExecutor<Faulty>,
                            (ticket, members): (_, &[usize])| {
                let outcome = executor.wait(ticket).unwrap();
                for (i, session) in members.iter().enumerate() {
                    found[*session].push(outcome.choice(i).unwrap());
                }
            };
            for members in MEMBERS {
                let histories = prompts.map(|prompt| [prompt, &[4]].concat());
                let member = |&session: &usize| {
                    let at = (prompts[session].len() + steps[session]) as u32;
                    let token = if steps[session] == 0 { 4 } else { CHOSEN };
                    (session, at, token, &histories[session][..])
                };
                let step: Vec<_> = members.iter().map(member).collect();
                // In one part; or in two, between which the host hears of the tokens before.
                let ticket = if apart {
                    let forward = |step: &Step<'_>| executor.forward(step);
                    let ticket = decoding(&chains, &[], &step, forward).unwrap();
                    ahead.drain(..).for_each(|step| read(&mut executor, step));
                    let choose = |step: &Step<'_>| executor.choose(ticket, &choices(step));
                    decoding(&chains, &[], &step, choose).unwrap();
                    ticket
                } else {
                    decode(&mut executor, &chains, &step).unwrap()
                };
                ahead.push_back((ticket, members));
                members.iter().for_each(|session| steps[*session] += 1);
                if ahead.len() > 2 {
                    read(&mut executor, ahead.pop_front().unwrap());
                }
            }
            ahead.into_iter().for_each(|step| read(&mut executor, step));
            for (session, found) in found.iter().enumerate() {
                let what = format!("{dispatch:?} {apart} {session}");
                assert_eq!(found[..], alone[session][..found.len()], "{what}");
            }
        }
    }
}

#[test]
fn choices_are_forgotten_once_another_step_writes_over_the_logits() {
    let chains = [Options::greedy(), Options::greedy()];
    let mut executor = load_batched(&faulty(), Dispatch::Graph);
    let [one, other] = [(0, 0, 5, &[5][..]), (1, 0, 7, &[7][..])].map(|member| [member]);
    let forward = |executor: &mut GpuExecutor<Faulty>, member: &[(usize, u32, u32, &[u32])]| {
        decoding(&chains, &[], member, |step| executor.forward(step)).unwrap()
    };
    let first = forward(&mut executor, &one);
    assert!(executor.keeps(first));
    let whole = decode(&mut executor, &chains, &other).unwrap();
    assert!(!executor.keeps(first));
    let choose =
        |executor: &mut GpuExecutor<Faulty>, ticket, member: &[(usize, u32, u32, &[u32])]| {
            decoding(&chains, &[], member, |step| executor.choose(ticket, &choices(step)))
        };
    assert!(choose(&mut executor, first, &one).is_err());
    // Nothing else is lost by that.
    let wanted = executor.wait(whole).unwrap().choice(0).unwrap();
    let (second, third) = (forward(&mut executor, &one), forward(&mut executor, &other));
    assert!(!executor.keeps(second));
    choose(&mut executor, third, &other).unwrap();
    assert!(choose(&mut executor, third, &other).is_err(), "a second time");
    assert_eq!(executor.wait(third).unwrap().choice(0), Ok(wanted));
    // Who is left out chooses nothing.
    let both = [one[0], other[0]];
    let ticket = forward(&mut executor, &both);
    assert!(executor.choose(ticket, &[None]).is_err(), "one for each sequence");
    let left = |step: &Step<'_>| executor.choose(ticket, &[None, choices(step)[1]]);
    decoding(&chains, &[], &both, left).unwrap();
    let outcome = executor.wait(ticket).unwrap();
    assert_eq!((outcome.len(), outcome.choice(0)), (1, Ok(wanted)));
}

#[test]
fn steps_of_many_allocate_nothing() {
    for (dispatch, apart) in [
        (Dispatch::Arguments, false),
        (Dispatch::Graph, false),
        (Dispatch::Arguments, true),
        (Dispatch::Graph, true),
    ] {
        let backend = faulty();
        let mut executor = load_batched(&backend, dispatch);
        *backend.when.lock().unwrap() = When::Never;
        let chains = chains();
        let mut counted = 0;
        let mut steps = |from: u32, to: u32| {
            for position in from..to {
                let mut tickets = [None; MEMBERS.len()];
                for (members, ticket) in MEMBERS.iter().zip(&mut tickets) {
                    let token = if position == 0 { 4 } else { CHOSEN };
                    let members: Vec<(usize, u32, u32, &[u32])> = members
                        .iter()
                        .map(|session| (*session, position, token, &[][..]))
                        .collect();
                    // What the test itself allocates for a step does not count.
                    let before = COUNT.get();
                    let masks = [None, Some(&[u32::MAX; 4][..])];
                    let submitted = if apart {
                        let both = |step: &Step<'_>| {
                            let ticket = executor.forward(step)?;
                            executor.choose(ticket, &choices(step)).map(|()| ticket)
                        };
                        decoding(&chains, &masks, &members, both)
                    } else {
                        decode_masked(&mut executor, &chains, &masks, &members)
                    };
                    let submitted = submitted.unwrap();
                    counted += COUNT.get() - before;
                    *ticket = Some(submitted);
                }
                let before = COUNT.get();
                for ticket in tickets.into_iter().flatten() {
                    executor.wait(ticket).unwrap().choice(0).unwrap();
                }
                counted += COUNT.get() - before;
            }
            std::mem::take(&mut counted)
        };
        // `decode` makes six lists, and choices apart from a step one more.
        let own = (6 + usize::from(apart)) * MEMBERS.len();
        steps(0, 8);
        let bound = backend.calls("bind");
        assert_eq!(steps(8, 30), 22 * own, "{dispatch:?} {apart}");
        assert_eq!(backend.calls("bind"), bound, "{dispatch:?}: nothing is bound again");
    }
}

/// Masks of three sessions in their `step`-th step: of some tokens; of all in every other step; of
/// one token, or of none.
fn masks(step: usize) -> [Option<Vec<u32>>; 3] {
    let some: Vec<u32> = (0..4).map(|i| 0x9908_b0df_u32.rotate_left(5 * i + step as u32)).collect();
    let one =
        |token: usize| (0..4).map(move |i| if i == token / 32 { 1 << (token % 32) } else { 0 });
    let few = if step == 5 { vec![0; 4] } else { one(17 * step % 128).collect() };
    [Some(some.clone()), step.is_multiple_of(2).then_some(some), Some(few)]
}

/// The choices expected of a device: the host's from the same logits.
fn by_host(
    logits: &[f32],
    history: &[u32],
    options: &Options,
    mask: Option<&[u32]>,
) -> std::result::Result<Choice, Refusal> {
    let position = history.len() as u64;
    Sampler::new().sample(logits, history, position, options, mask).ok_or(Refusal::Nothing)
}

/// Compares two choices: tokens as they are, log-probabilities but for what sums in f32 lose.
fn assert_chose(
    found: std::result::Result<Choice, Refusal>,
    wanted: std::result::Result<Choice, Refusal>,
    what: &str,
) {
    let token = |choice: std::result::Result<Choice, Refusal>| choice.map(|choice| choice.token);
    assert_eq!(token(found), token(wanted), "{what}");
    if let (Ok(found), Ok(wanted)) = (found, wanted) {
        assert!((found.logprob - wanted.logprob).abs() < 1e-4, "{what}: {found:?} {wanted:?}");
    }
}

#[test]
fn many_rows_with_and_without_masks_get_what_the_host_chooses() {
    let chains = chains();
    let prompts = [FIRST, SECOND, &FIRST[3..9]];
    let ways = [When::Now, When::Late].into_iter().flat_map(|when| [(when, false), (when, true)]);
    for dispatch in Dispatch::ALL {
        for (when, apart) in ways.clone() {
            let backend = faulty();
            let mut executor = load_batched(&backend, dispatch);
            for (session, prompt) in prompts.iter().enumerate() {
                logits(&mut executor, session as u32, 0, prompt).unwrap();
            }
            *backend.when.lock().unwrap() = when;
            let mut histories = prompts.map(|prompt| [prompt, &[4]].concat());
            for step in 0..7 {
                let masks = masks(step);
                let masks = [0, 1, 2].map(|session| masks[session].as_deref());
                let members: Vec<_> = histories
                    .iter()
                    .enumerate()
                    .map(|(session, history)| {
                        let told = step == 0 || (step + session).is_multiple_of(3);
                        let last = history[history.len() - 1];
                        let token = if told || step == 6 { last } else { CHOSEN };
                        (session, history.len() as u32 - 1, token, &history[..])
                    })
                    .collect();
                let read = backend.calls("read");
                // In one part, or in two, of which the first knows no masks.
                let ticket = if apart {
                    let forward = |step: &Step<'_>| executor.forward(step);
                    let ticket = decoding(&chains, &[], &members, forward).unwrap();
                    let choose = |step: &Step<'_>| executor.choose(ticket, &choices(step));
                    decoding(&chains, &masks, &members, choose).unwrap();
                    ticket
                } else {
                    decode_masked(&mut executor, &chains, &masks, &members).unwrap()
                };
                let outcome = executor.wait(ticket).unwrap();
                let found = [0, 1, 2].map(|i| outcome.choice(i));
                assert_eq!(backend.calls("read"), read, "no logits are read");
                let rows = executor.read(ticket, 0).unwrap().to_vec();
                for (session, row) in rows.chunks(rows.len() / 3).enumerate() {
                    let history = &mut histories[session];
                    let wanted = by_host(row, history, &chains[session], masks[session]);
                    let what = format!("{dispatch:?} {when:?} {apart}, {session}, step {step}");
                    assert_chose(found[session], wanted, &what);
                    assert_eq!(wanted.is_err(), (session, step) == (2, 5), "{what}");
                    history.push(wanted.map_or(3, |choice| choice.token));
                }
            }
        }
    }
}

#[test]
fn a_run_with_and_without_masks_gets_what_the_host_chooses() {
    for dispatch in Dispatch::ALL {
        for when in [When::Now, When::Late] {
            let backend = faulty();
            let mut executor = load_as(&backend, dispatch);
            logits(&mut executor, 0, 0, FIRST).unwrap();
            *backend.when.lock().unwrap() = when;
            let mut history = [FIRST, &[4]].concat();
            let chains = chains();
            for step in 0..12 {
                let masks = masks(step % 6);
                let mask = masks[if step < 5 { 0 } else { 1 + step % 2 }].as_deref();
                let options = &chains[1 + step / 6];
                let told = step == 0 || step % 4 == 3 || step == 6;
                let token = if told { history[history.len() - 1] } else { CHOSEN };
                let choose = Choose { options, history: &history, mask, logprobs: Some(0) };
                let at = history.len() as u32 - 1;
                let read = backend.calls("read");
                let ticket = submit(&mut executor, 0, at, &[token], Some(&choose)).unwrap();
                let found = executor.wait(ticket).unwrap().choice(0);
                assert_eq!(backend.calls("read"), read, "no logits are read");
                let row = executor.read(ticket, 0).unwrap().to_vec();
                let wanted = by_host(&row, &history, options, mask);
                assert_chose(found, wanted, &format!("{dispatch:?} {when:?}, step {step}"));
                history.push(wanted.map_or(0, |choice| choice.token));
            }
        }
    }
}

/// Biases that exclude every token leave nothing to choose.
#[test]
fn rows_of_which_nothing_is_left_are_refused() {
    let banned: Vec<(u32, f32)> = (0..128).map(|token| (token, f32::NEG_INFINITY)).collect();
    let choose =
        |temperature| Options { logit_bias: banned.clone(), temperature, ..Options::default() };
    for options in [choose(0.0), choose(1.0)] {
        let mut executor = load_as(&faulty(), Dispatch::Graph);
        logits(&mut executor, 0, 0, FIRST).unwrap();
        let choose = Choose { options: &options, history: FIRST, mask: None, logprobs: None };
        let ticket = submit(&mut executor, 0, 12, &[4], Some(&choose)).unwrap();
        assert_eq!(executor.wait(ticket).unwrap().choice(0), Err(Refusal::Nothing));
        let mut executor = load_batched(&faulty(), Dispatch::Graph);
        let chains = [options, Options::greedy()];
        let members: [(usize, u32, u32, &[u32]); 2] = [(0, 0, 5, &[5]), (1, 0, 7, &[7])];
        let ticket = decode(&mut executor, &chains, &members).unwrap();
        let outcome = executor.wait(ticket).unwrap();
        assert_eq!(outcome.choice(0), Err(Refusal::Nothing));
        assert!(outcome.choice(1).is_ok());
    }
}
