//! Steps as each way of dispatch gives them: the same answers, nothing allocated, and no slot
//! written that is still wanted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::*;
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
    Faulty::new(Sim::new(Engine::Interpreter))
}

/// Part of a prompt, of which nobody wants logits.
fn rows(executor: &mut GpuExecutor<Faulty>, block: u32, start: u32, tokens: &[u32]) -> Result<()> {
    let tables = [Table { blocks: &[block], oldest: 0 }];
    let sequence = Sequence::new(tokens.len(), start as usize, &tables);
    let sequences = &[Sequence { slot: block, ..sequence }];
    let step = Step { kind: Kind::Prompt, tokens, sequences, outputs: &[], input: &[] };
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
    let options = LoadOptions { dispatch, ..options() };
    let away = LoadOptions { blocks: vec![], context: vec![], ..options.clone() };
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
    let cpu = "cpu".parse::<crate::Place>().unwrap().open(Some(2)).unwrap();
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
                for block in [0, 3] {
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

/// What was chosen ahead from a past that is no more is not told to who gives a token.
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
    let options = LoadOptions { dispatch, sequences: 4, batched: true, ..options() };
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
    let blocks: Vec<u32> = members.iter().map(|(session, ..)| *session as u32).collect();
    let tables: Vec<[Table<'_>; 1]> =
        blocks.chunks(1).map(|blocks| [Table { blocks, oldest: 0 }]).collect();
    let choose = |&(session, _, _, history): &(usize, u32, u32, _)| Choose {
        options: &chains[session],
        history,
        mask: None,
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
    executor.submit(&Step { kind: Kind::Decode, tokens: &tokens, sequences, outputs, input: &[] })
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
    for dispatch in Dispatch::ALL {
        for when in [When::Now, When::Late] {
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
                ahead.push_back((decode(&mut executor, &chains, &step).unwrap(), members));
                members.iter().for_each(|session| steps[*session] += 1);
                if ahead.len() > 2 {
                    read(&mut executor, ahead.pop_front().unwrap());
                }
            }
            ahead.into_iter().for_each(|step| read(&mut executor, step));
            for (session, found) in found.iter().enumerate() {
                assert_eq!(found[..], alone[session][..found.len()], "{dispatch:?} {session}");
            }
        }
    }
}

#[test]
fn steps_of_many_allocate_nothing() {
    for dispatch in [Dispatch::Arguments, Dispatch::Graph] {
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
                    let submitted = decode(&mut executor, &chains, &members).unwrap();
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
        // `decode` makes six lists.
        let own = 6 * MEMBERS.len();
        steps(0, 8);
        let bound = backend.calls("bind");
        assert_eq!(steps(8, 30), 22 * own, "{dispatch:?}");
        assert_eq!(backend.calls("bind"), bound, "{dispatch:?}: nothing is bound again");
    }
}
