//! Random traces: nothing starves, nothing leaks, gaps are bounded, and tokens do not depend on
//! neighbours.
//!
//! `DELFT_TEST_TRACES` sets how many traces of the scheduler alone are run.

use super::*;
use crate::pool::{Pool, first_seen};
use crate::prefix::Prefixes;
use crate::sequences::{Sequence, Sequences};
use ops::sample::philox::bits;
use program::{BLOCK_TOKENS, Group, Table};

/// Random numbers in their order.
struct Random(u64, u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        (bits(self.0, self.1) % n.max(1) as u64) as usize
    }
}

const LIMITS: Limits = Limits {
    sequences: 4,
    decode_rows: 8,
    prompt_rows: 40,
    shared_rows: 12,
    patience: 20,
    gather: 3,
    gather_rows: 10,
};

/// A request of the fake cache: a prompt, then tokens one by one.
#[derive(Debug, Clone, Copy, Default)]
struct Fake {
    prompt: usize,
    /// Tokens that are known.
    len: usize,
    most: usize,
    computed: usize,
    blocks: usize,
    running: bool,
}

/// A cache of blocks of four positions that only counts them.
#[derive(Debug, Default)]
struct Counting {
    requests: HashMap<Id, Fake>,
    free: usize,
}

impl Counting {
    const BLOCK: usize = 4;
}

impl Cache for Counting {
    fn fits(&mut self, id: Id) -> bool {
        self.requests[&id].len.div_ceil(Self::BLOCK) < self.free
    }

    fn admit(&mut self, id: Id) {
        let request = self.requests.get_mut(&id).unwrap();
        assert!(!request.running && request.blocks == 0);
        request.running = true;
    }

    fn pending(&self, id: Id) -> Pending {
        let request = &self.requests[&id];
        assert!(request.running);
        match (request.computed, request.prompt) {
            (done, _) if done == request.len => Pending::Nothing,
            (done, prompt) if done < prompt => Pending::Prompt(prompt - done),
            (done, _) => Pending::Decode(request.len - done),
        }
    }

    fn claim(&mut self, id: Id, rows: usize) -> bool {
        let request = self.requests.get_mut(&id).unwrap();
        let more = (request.computed + rows).div_ceil(Self::BLOCK) - request.blocks;
        if more > self.free {
            return false;
        }
        self.free -= more;
        request.blocks += more;
        request.computed += rows;
        true
    }

    fn release(&mut self, id: Id) {
        let request = self.requests.get_mut(&id).unwrap();
        assert!(request.running);
        self.free += request.blocks;
        *request = Fake { blocks: 0, computed: 0, running: false, ..*request };
    }
}

/// One trace; the steps that it took, and those in which prompts waited for others.
fn trace(seed: u64) -> (u64, u64) {
    let mut random = Random(seed, 0);
    let blocks = 20 + random.below(30);
    let mut cache = Counting { free: blocks, ..Counting::default() };
    let mut scheduler = Scheduler::new(LIMITS);
    scheduler.gathering.rate = random.below(4) as f64;
    let arrivals = 1 + random.below(20) as u64;
    let (mut arrived, mut step, mut gone) = (0, 0u64, 0);
    let mut gaps: HashMap<Id, usize> = HashMap::new();
    let (mut waited, mut held) = (0, 0);
    while gone < arrivals {
        step += 1;
        assert!(step < 5_000, "{seed}: {gone} of {arrivals} requests came to their end");
        while arrived < arrivals && random.below(3) == 0 {
            let deadline = (random.below(12) == 0).then(|| step + random.below(30) as u64);
            let (caller, priority) = (random.below(3) as u64, random.below(3) as i32);
            let longest = if random.below(5) == 0 { 60 } else { 20 };
            let prompt = 1 + random.below(longest);
            let most = 1 + random.below(18);
            cache.requests.insert(arrived, Fake { prompt, len: prompt, most, ..Fake::default() });
            scheduler.submit(Arrival { id: arrived, caller, priority, deadline });
            arrived += 1;
        }
        if arrived > 0 && random.below(25) == 0 {
            let id = random.below(arrived as usize) as u64;
            if scheduler.requests.contains_key(&id) {
                scheduler.remove(id, &mut cache);
                cache.requests.remove(&id);
                gone += 1;
            }
        }
        let ready: Vec<Id> = scheduler.running.iter().map(|(_, id)| *id).collect();
        let ready: Vec<Id> = ready
            .into_iter()
            .filter(|id| matches!(cache.pending(*id), Pending::Decode(_)))
            .collect();
        let plan = scheduler.next(step, &mut cache).clone();
        let prompts = |(_, id): &(u64, Id)| matches!(cache.pending(*id), Pending::Prompt(_));
        let waits = plan.prompt.is_empty() && scheduler.running.iter().any(prompts);
        assert!(!waits || !plan.decode.is_empty(), "{seed}: a prompt waits for nobody");
        waited = if waits { waited + 1 } else { 0 };
        held += u64::from(waits);
        assert!(waited <= LIMITS.gather, "{seed}: prompts waited for {waited} steps");
        for id in ready {
            let planned = plan.decode.iter().any(|work| work.id == id);
            let lists = [&plan.expired, &plan.preempted, &plan.refused];
            let left = lists.iter().any(|list| list.contains(&id));
            assert!(planned != left, "{seed}: decoding goes first");
        }
        let rows = |works: &[Work]| works.iter().map(|work| work.rows).sum::<usize>();
        assert!(rows(&plan.decode) <= LIMITS.decode_rows && plan.refused.is_empty());
        let bound = if plan.decode.is_empty() { LIMITS.prompt_rows } else { LIMITS.shared_rows };
        assert!(rows(&plan.prompt) <= bound, "{seed}: a gap is bounded");
        assert!(scheduler.counts().1 <= LIMITS.sequences);
        for id in &plan.expired {
            cache.requests.remove(id);
            gone += 1;
        }
        for id in &plan.preempted {
            gaps.remove(id);
        }
        let mut ended = Vec::new();
        for work in plan.decode.iter().chain(&plan.prompt) {
            let request = cache.requests.get_mut(&work.id).unwrap();
            assert!(work.rows > 0 && request.running);
            if request.computed < request.len {
                continue;
            }
            // A prompt's step comes after the tokens of decode steps, and with those that it ends
            // with.
            let behind = if plan.decode.contains(work) { rows(&plan.prompt) } else { 0 };
            if let Some(before) = gaps.insert(work.id, behind) {
                assert!(before <= LIMITS.shared_rows, "{seed}: {before} rows between two tokens");
            }
            request.len += 1;
            if request.len - request.prompt >= request.most {
                ended.push(work.id);
            }
        }
        for id in ended {
            scheduler.remove(id, &mut cache);
            cache.requests.remove(&id);
            gaps.remove(&id);
            gone += 1;
        }
        let held: usize = cache.requests.values().map(|request| request.blocks).sum();
        assert_eq!(held + cache.free, blocks, "{seed}: blocks in = blocks out");
    }
    let Scheduler { requests, queues, running, deadlines, callers, .. } = &scheduler;
    assert!(requests.is_empty() && queues.is_empty() && running.is_empty());
    assert!(deadlines.is_empty() && callers.is_empty());
    (step, held)
}

#[test]
fn every_request_comes_to_its_end_whatever_comes() {
    let traces =
        std::env::var("DELFT_TEST_TRACES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let (mut steps, mut held) = (0, 0);
    for (all, waits) in (0..traces).map(trace) {
        steps += all;
        held += waits;
    }
    println!("{traces} traces, {steps} steps, prompts waited for others in {held}");
    assert!(held * 100 > steps, "{held} of {steps}");
}

/// Streams that ask anew when their texts of `tokens` (half to one and a half times as many) end,
/// on a device whose steps read all weights. Tokens for each unit of time, the time of a decode
/// step, and the decode steps that first tokens took at the median and at most.
fn streams(streams: usize, tokens: usize, prompt: usize, gather: u64) -> (f64, [u64; 2]) {
    let mut random = Random(7, 0);
    let mut cache = Counting { free: 1 << 20, ..Counting::default() };
    let limits = Limits {
        sequences: 64,
        decode_rows: 72,
        prompt_rows: 512,
        shared_rows: 512,
        patience: 200,
        gather,
        gather_rows: 256,
    };
    let mut scheduler = Scheduler::new(limits);
    let (mut next, mut time, mut made) = (0, 0.0, 0);
    let mut first = HashMap::new();
    let mut firsts = Vec::new();
    for step in 0..4_000 {
        while scheduler.requests.len() < streams {
            let most = tokens / 2 + random.below(tokens);
            cache.requests.insert(next, Fake { prompt, len: prompt, most, ..Fake::default() });
            scheduler.submit(Arrival { id: next, caller: 0, priority: 0, deadline: None });
            first.insert(next, step);
            next += 1;
        }
        let plan = scheduler.next(step, &mut cache).clone();
        for works in [&plan.decode, &plan.prompt].into_iter().filter(|works| !works.is_empty()) {
            let rows: usize = works.iter().map(|work| work.rows).sum();
            time += 1.0 + rows as f64 / 256.0;
            for Work { id, .. } in works {
                let request = cache.requests.get_mut(id).unwrap();
                if request.computed == request.len {
                    request.len += 1;
                    made += 1;
                    firsts.extend(first.remove(id).filter(|_| step > 500).map(|at| step - at));
                    if request.len - request.prompt >= request.most {
                        scheduler.remove(*id, &mut cache);
                        cache.requests.remove(id);
                    }
                }
            }
        }
    }
    firsts.sort();
    (made as f64 / time, [firsts[firsts.len() / 2], firsts[firsts.len() - 1]])
}

#[test]
fn short_prompts_wait_for_one_another_where_that_pays() {
    for (count, tokens, prompt, gain) in
        [(32, 128, 20, 1.08), (64, 128, 20, 1.1), (16, 32, 30, 1.05), (64, 500, 20, 1.03)]
    {
        let (alone, [_, none]) = streams(count, tokens, prompt, 0);
        let (together, waits @ [_, most]) = streams(count, tokens, prompt, 16);
        let won = together / alone;
        println!("{count} streams, {tokens} tokens: {won:.3} times, waits {waits:?}");
        assert!(won > gain && none == 0 && most <= 16, "{count} streams: {won}, {waits:?}");
    }
    // Few streams, long texts or long prompts gain nothing, so that nobody waits.
    for (count, tokens, prompt) in [(4, 128, 20), (8, 128, 20), (16, 400, 20), (32, 128, 300)] {
        let alone = streams(count, tokens, prompt, 0);
        assert_eq!(streams(count, tokens, prompt, 16), alone, "{count} streams, {tokens} tokens");
    }
}

/// A scheduler whose requests all have one block and run one step, one at a time; the order in
/// which they go.
fn order(arrivals: &[(u64, i32)], patience: u64, each_step: Option<(u64, i32)>) -> Vec<Id> {
    let mut cache = Counting { free: 100, ..Counting::default() };
    let mut scheduler = Scheduler::new(Limits { sequences: 1, patience, ..LIMITS });
    let mut next = 0;
    let mut submit = |scheduler: &mut Scheduler, cache: &mut Counting, (caller, priority)| {
        cache.requests.insert(next, Fake { prompt: 2, len: 2, most: 1, ..Fake::default() });
        scheduler.submit(Arrival { id: next, caller, priority, deadline: None });
        next += 1;
    };
    arrivals.iter().for_each(|&arrival| submit(&mut scheduler, &mut cache, arrival));
    let mut went = Vec::new();
    for step in 0..60 {
        each_step.into_iter().for_each(|arrival| submit(&mut scheduler, &mut cache, arrival));
        let Some(&Work { id, .. }) = scheduler.next(step, &mut cache).prompt.first() else { break };
        scheduler.remove(id, &mut cache);
        went.push(id);
    }
    went
}

#[test]
fn callers_take_turns_and_priorities_go_first() {
    let from = |callers: &[u64]| callers.iter().map(|&caller| (caller, 0)).collect::<Vec<_>>();
    assert_eq!(order(&from(&[7, 7, 7, 7, 8, 9, 8]), 1000, None), [0, 4, 5, 1, 6, 2, 3]);
    assert_eq!(order(&[(7, 0), (8, 0), (7, 5), (8, -1), (9, 1)], 1000, None), [2, 4, 1, 0, 3]);
}

#[test]
fn what_has_waited_long_goes_before_higher_priorities() {
    let went = order(&[(7, 0)], 10, Some((8, 5)));
    assert_eq!(went.iter().position(|&id| id == 0), Some(10));
    let went = order(&[(7, 0)], 10, Some((7, 5)));
    assert_eq!(went.iter().position(|&id| id == 0), Some(10), "also of the same caller");
}

#[test]
fn a_request_that_finds_no_blocks_alone_is_refused() {
    let mut cache = Counting { free: 3, ..Counting::default() };
    let mut scheduler = Scheduler::new(LIMITS);
    cache.requests.insert(0, Fake { prompt: 30, len: 30, most: 1, ..Fake::default() });
    scheduler.submit(Arrival { id: 0, caller: 0, priority: 0, deadline: None });
    assert_eq!(scheduler.next(0, &mut cache).refused, [0]);
    assert_eq!((scheduler.counts(), cache.free), ((0, 0), 3));
}

/// The cache's contents in each block of each group, where a position's entry follows from its
/// token, the kind of step that computed it, and what the layers saw: the first and the last
/// position before it.
struct Device {
    memory: Vec<Vec<[u64; BLOCK_TOKENS]>>,
    groups: Vec<Group>,
}

fn mix(values: [u64; 4]) -> u64 {
    values.into_iter().fold(1, |hash: u64, value| {
        (hash ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
    })
}

impl Device {
    fn at(table: Table<'_>, p: usize) -> (usize, usize) {
        assert!(p >= table.oldest as usize);
        (table.blocks[p / BLOCK_TOKENS % table.blocks.len()] as usize, p % BLOCK_TOKENS)
    }

    /// Computes rows of a sequence up to `end`; what the last one has.
    fn compute(&mut self, sequences: &mut Sequences, id: Id, rows: usize) -> u64 {
        for copy in sequences.copies.drain(..) {
            let (from, to) = (copy.from.number() as usize, copy.to as usize);
            let from = self.memory[copy.group][from];
            self.memory[copy.group][to].copy_from_slice(&from);
        }
        let sequence = sequences.get(id).unwrap();
        let tokens = sequence.tokens();
        let mut last = 0;
        for p in sequence.computed() - rows..sequence.computed() {
            let decoded = sequence.is_decoded(p);
            last = 0;
            for (group, table) in sequence.tables().iter().enumerate() {
                let Group { window, carried } = self.groups[group];
                let first = first_seen(window, p);
                // A state is one entry of its block, which each position replaces.
                let place = |q: usize| {
                    let (block, offset) = Self::at(table.table(), q);
                    (block, if carried { 0 } else { offset })
                };
                let seen = |q: usize| {
                    let (block, offset) = place(q);
                    self.memory[group][block][offset]
                };
                let (a, b) = if first < p { (seen(first), seen(p - 1)) } else { (0, 0) };
                let own = mix([tokens[p].into(), decoded.into(), a, b]);
                let (block, offset) = place(p);
                self.memory[group][block][offset] = own;
                last = mix([last, own, 0, 0]);
            }
        }
        sequences.submitted(id);
        last
    }
}

const VOCABULARY: u64 = 50;

/// The tokens that a request generates when it is alone.
fn alone(prompt: &[u32], most: usize, windows: &[Option<usize>]) -> Vec<u32> {
    let mut own: Vec<Vec<u64>> = vec![Vec::new(); windows.len()];
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + most {
        let mut last = 0;
        for p in own[0].len()..tokens.len() {
            last = 0;
            for (own, &window) in own.iter_mut().zip(windows) {
                let first = first_seen(window, p);
                let (a, b) = if first < p { (own[first], own[p - 1]) } else { (0, 0) };
                own.push(mix([tokens[p].into(), (p >= prompt.len()).into(), a, b]));
                last = mix([last, own[p], 0, 0]);
            }
        }
        tokens.push((last % VOCABULARY) as u32);
    }
    tokens.split_off(prompt.len())
}

#[test]
fn tokens_do_not_depend_on_neighbours_prefixes_or_preemption() {
    let (mut preempted, mut reused, mut kept) = (0, 0, 0);
    for seed in 0..150 {
        let mut random = Random(seed, 0);
        let windows = [vec![None], vec![None, Some(300)], vec![Some(100)], vec![None, Some(2)]]
            [seed as usize % 4]
            .clone();
        // The last of them carries a state.
        let group = |&window: &Option<usize>| Group { window, carried: window == Some(2) };
        let kinds: Vec<Group> = windows.iter().map(group).collect();
        let (chunk, context, blocks) = (200, 2000, 8 + random.below(4));
        let pool = Pool::new(&vec![blocks; windows.len()]);
        let groups: Vec<_> = kinds.iter().map(|&kind| (kind, context)).collect();
        let prefixes = Prefixes::new(&kinds);
        let mut sequences = Sequences::new(pool.clone(), prefixes.clone(), 0, &groups, chunk);
        let limits = Limits { prompt_rows: chunk, shared_rows: 70, ..LIMITS };
        let mut scheduler = Scheduler::new(limits);
        let memory = vec![vec![[0; BLOCK_TOKENS]; blocks]; windows.len()];
        let mut device = Device { memory, groups: kinds };
        let mut prompts: Vec<(Vec<u32>, usize)> = Vec::new();
        let mut answers: HashMap<Id, Vec<u32>> = HashMap::new();
        let mut ended = 0;
        let mut step = 0;
        while ended < 10 {
            step += 1;
            assert!(step < 20_000, "{seed}: {ended} ended");
            if prompts.len() < 10 && random.below(4) == 0 {
                let mut prompt: Vec<u32> = match random.below(3) {
                    0 => Vec::new(),
                    // As much as another one has, and what came of it.
                    _ if !prompts.is_empty() => {
                        let other = random.below(prompts.len());
                        let (old, answer) = (&prompts[other].0, answers.get(&(other as u64)));
                        let all = [&old[..], answer.map_or(&[], |a| a)].concat();
                        all[..random.below(all.len() + 1)].to_vec()
                    }
                    _ => Vec::new(),
                };
                prompt.truncate(700);
                prompt.extend((0..1 + random.below(300)).map(|_| random.below(50) as u32));
                let (id, most) = (prompts.len() as u64, 1 + random.below(900));
                sequences.insert(id, Sequence::new(0, prompt.clone(), most, true));
                scheduler.submit(Arrival { id, caller: 0, priority: 0, deadline: None });
                prompts.push((prompt, most));
                answers.insert(id, Vec::new());
            }
            let plan = scheduler.next(0, &mut sequences).clone();
            assert!(plan.refused.is_empty() && plan.expired.is_empty());
            preempted += plan.preempted.len();
            for Work { id, rows } in plan.decode.into_iter().chain(plan.prompt) {
                let last = device.compute(&mut sequences, id, rows);
                sequences.keep_states(id, rows);
                let sequence = sequences.get_mut(id).unwrap();
                if sequence.computed() < sequence.tokens().len() {
                    continue;
                }
                let token = (last % VOCABULARY) as u32;
                sequence.push(token);
                let (answer, most) = (answers.get_mut(&id).unwrap(), prompts[id as usize].1);
                answer.push(token);
                if answer.len() == 1 {
                    sequences.keep(id);
                    kept += 1;
                }
                if answer.len() == most {
                    reused += sequences.get(id).unwrap().reused().unwrap().0;
                    scheduler.remove(id, &mut sequences);
                    sequences.remove(id);
                    ended += 1;
                }
            }
        }
        for (id, (prompt, most)) in prompts.iter().enumerate() {
            assert!(answers[&(id as u64)] == alone(prompt, *most, &windows), "{seed}, {id}");
        }
        prefixes.tree().clear();
        sequences.copies.clear();
        assert!((0..windows.len()).all(|group| pool.free(group) == blocks), "{seed}: a leak");
    }
    assert!(preempted > 100 && reused > 10_000 && kept == 1500, "{preempted} {reused} {kept}");
}
