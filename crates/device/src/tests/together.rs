//! Sequences of unlike lengths, in steps of any grouping and prompts in any chunks, compute and
//! choose what each does alone: bit for bit.

use ops::sample::Options;
use program::{BLOCK_TOKENS, CHOSEN, Choose, Sequence, Step, StepKind, Table};

use super::{factors, recorded};
use crate::{CacheType, Device, Executor, ExecutorOptions, Seats};

/// Reproducible numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }
}

/// The most rows and sequences of a step, and the rows of the longest prompt.
const ROWS: usize = 96;
pub(crate) const SEQUENCES: usize = 24;
const LONGEST: usize = 300;
/// Blocks of each timeline.
const BLOCKS: usize = LONGEST.div_ceil(BLOCK_TOKENS);

/// A prompt and what follows it.
#[derive(Clone)]
struct Timeline {
    prompt: Vec<u32>,
    options: Options,
    /// Words of its masks; 0 if all tokens are allowed.
    masks: usize,
    /// Tokens to choose.
    wanted: usize,
    blocks: Vec<u32>,
    /// Rows computed.
    done: usize,
    /// The tokens chosen, and the bits of the logits that they were chosen from.
    chosen: Vec<u32>,
    logits: Vec<Vec<u32>>,
    /// Goes on with tokens that do not depend on logits.
    forced: bool,
    /// The seat of its adapter; 0: none.
    adapter: u32,
}

impl Timeline {
    fn kind(&self) -> Option<StepKind> {
        match self.done {
            done if done < self.prompt.len() => Some(StepKind::Prompt),
            _ if self.chosen.len() < self.wanted => Some(StepKind::Decode),
            _ => None,
        }
    }

    /// Tokens that may be chosen next: every third token, others each time.
    fn mask(&self) -> Option<Vec<u32>> {
        let third = 0x4924_9249_u32.rotate_left((self.prompt.len() + self.chosen.len()) as u32);
        (self.masks > 0).then(|| vec![third; self.masks])
    }
}

/// Timelines whose prompts have lengths around what kernels treat as few, a group, a tile and a
/// block; up to a longest one.
fn timelines(count: usize, vocab: usize, longest: usize) -> Vec<Timeline> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 63, 65, 250, 256, 290];
    let timeline = |i: usize| {
        let len = lengths.get(i).copied().filter(|len| *len <= longest);
        let len = len.unwrap_or(1 + random.below(longest.min(60)));
        let prompt = (0..len).map(|_| random.below(vocab) as u32).collect();
        let options = match i % 3 {
            0 => Options::greedy(),
            1 => Options { seed: i as u64, top_p: 0.9, ..Options::default() },
            _ => Options { repetition_penalty: 1.2, last_n: 9, seed: 5, ..Options::default() },
        };
        let blocks = (0..BLOCKS).map(|block| (i * BLOCKS + block) as u32).collect();
        let wanted = 2 + random.below(8);
        let masks = if i % 4 == 1 { vocab.div_ceil(32) } else { 0 };
        let (done, chosen, logits) = Default::default();
        let (forced, adapter) = (false, 0);
        Timeline { prompt, options, masks, wanted, blocks, done, chosen, logits, forced, adapter }
    };
    (0..count).map(timeline).collect()
}

/// One step of some timelines, by their numbers and with so many rows of each. Every other token is
/// not told, but chosen.
fn step(
    executor: &mut dyn Executor,
    kind: StepKind,
    timelines: &mut [Timeline],
    of: &[(usize, usize)],
    groups: usize,
) {
    let vocab = |logits: &[f32], rows: usize| logits.len() / rows.max(1);
    let (mut tokens, mut outputs) = (vec![], vec![]);
    let tables: Vec<Vec<Table<'_>>> = of
        .iter()
        .map(|(i, _)| vec![Table { blocks: &timelines[*i].blocks, oldest: 0 }; groups])
        .collect();
    let histories: Vec<Vec<u32>> = of
        .iter()
        .map(|(i, _)| [&timelines[*i].prompt[..], &timelines[*i].chosen].concat())
        .collect();
    let masks: Vec<_> = of.iter().map(|(i, _)| timelines[*i].mask()).collect();
    let chooses: Vec<Choose<'_>> = of
        .iter()
        .zip(histories.iter().zip(&masks))
        .map(|((i, _), (history, mask))| {
            let options = &timelines[*i].options;
            Choose { options, history, mask: mask.as_deref(), logprobs: None }
        })
        .collect();
    let mut sequences = vec![];
    for (n, &(i, rows)) in of.iter().enumerate() {
        let timeline = &timelines[i];
        let last = match kind {
            StepKind::Prompt => {
                tokens.extend(&timeline.prompt[timeline.done..][..rows]);
                timeline.done + rows == timeline.prompt.len()
            }
            StepKind::Decode => {
                let told = timeline.forced || (i + timeline.done).is_multiple_of(2);
                let known = timeline.chosen.last().filter(|_| told);
                tokens.push(known.copied().unwrap_or(CHOSEN));
                true
            }
        };
        if last {
            outputs.push(tokens.len() as u32 - 1);
        }
        sequences.push(Sequence {
            slot: i as u32,
            choose: last.then_some(&chooses[n]),
            adapter: timeline.adapter,
            ..Sequence::new(rows, timeline.done, &tables[n])
        });
    }
    let step = Step { kind, tokens: &tokens, sequences: &sequences, outputs: &outputs, input: &[] };
    let ticket = executor.submit(&step).unwrap();
    let chose: Vec<usize> = of
        .iter()
        .zip(&sequences)
        .filter(|(_, s)| s.choose.is_some())
        .map(|((i, _), _)| *i)
        .collect();
    let logits = executor.read(ticket, 0).unwrap().to_vec();
    let outcome = executor.wait(ticket).unwrap();
    assert_eq!(outcome.len(), chose.len());
    let found: Vec<u32> =
        (0..chose.len()).map(|n| outcome.choice(n).expect("a choice").token).collect();
    let width = vocab(&logits, chose.len());
    for (n, (&i, token)) in chose.iter().zip(found).enumerate() {
        let row = logits[n * width..][..width].iter().map(|x| x.to_bits()).collect();
        let timeline = &mut timelines[i];
        let other = (7 * i + 5 * timeline.chosen.len()) % width;
        timeline.chosen.push(if timeline.forced { other as u32 } else { token });
        timeline.logits.push(row);
    }
    of.iter().for_each(|(i, rows)| timelines[*i].done += rows);
}

/// Every timeline by itself, prompts in as few steps as there is room for.
fn alone(executor: &mut dyn Executor, timelines: &mut [Timeline], groups: usize) {
    for i in 0..timelines.len() {
        while let Some(kind) = timelines[i].kind() {
            let left = timelines[i].prompt.len().saturating_sub(timelines[i].done);
            let rows = if kind == StepKind::Prompt { left.min(ROWS) } else { 1 };
            step(executor, kind, timelines, &[(i, rows)], groups);
        }
    }
}

/// All timelines in steps of some of them at a time.
fn together(
    executor: &mut dyn Executor,
    timelines: &mut [Timeline],
    (groups, sequences): (usize, usize),
    seed: u64,
) {
    let mut random = Random(seed);
    while timelines.iter().any(|timeline| timeline.kind().is_some()) {
        let kind = if random.below(2) == 0 { StepKind::Prompt } else { StepKind::Decode };
        let mut ready: Vec<usize> =
            (0..timelines.len()).filter(|i| timelines[*i].kind() == Some(kind)).collect();
        let most = 1 + random.below(sequences);
        let (mut of, mut room) = (vec![], 1 + random.below(ROWS));
        while room > 0 && of.len() < most && !ready.is_empty() {
            let i = ready.swap_remove(random.below(ready.len()));
            let left = timelines[i].prompt.len().saturating_sub(timelines[i].done);
            let rows = if kind == StepKind::Prompt { 1 + random.below(left.min(room)) } else { 1 };
            of.push((i, rows));
            room -= rows;
        }
        if !of.is_empty() {
            step(executor, kind, timelines, &of, groups);
        }
    }
}

/// A comparison: some timelines of a model.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) model: &'a str,
    pub(crate) cache_type: CacheType,
    pub(crate) count: usize,
    /// Rows of the longest prompt, up to [`LONGEST`].
    pub(crate) longest: usize,
    /// Whether the devices are loaded for many sequences.
    pub(crate) batched: bool,
    /// The most sequences of a step.
    pub(crate) sequences: usize,
    /// By how much logits may differ, in their range; 0: not in a bit.
    pub(crate) close: f32,
    /// Whether most sequences have an adapter of all matrices.
    pub(crate) adapted: bool,
}

/// Runs a case's timelines alone on one device and together on others.
pub(crate) fn compare(case: Case<'_>, first: &dyn Device, others: &[&dyn Device]) {
    let Case { model, cache_type, count, longest, batched, sequences, close, adapted } = case;
    let (program, tensors) = recorded(model);
    let program = if adapted { program.with_sites(&|_| true) } else { program };
    let adapter = adapted.then(|| factors(&program));
    let groups = program.groups().len();
    let vocab = program.shape(program.results[0]).width;
    let load = |device: &dyn Device| {
        let options = ExecutorOptions {
            cache_type,
            rows: (ROWS, sequences),
            sequences,
            blocks: vec![count * BLOCKS; groups],
            context: vec![BLOCKS; groups],
            batched,
            seats: Seats { count: usize::from(adapted), rank: 2 },
            ..ExecutorOptions::default()
        };
        let mut executor = device.load(program.clone(), &tensors, options, &mut |_, _| {}).unwrap();
        if adapted {
            executor.seat(1, adapter.as_ref()).unwrap();
        }
        executor
    };
    // Tokens that are almost as likely may change places.
    let begin = || {
        let mut all = timelines(count, vocab, longest);
        for (i, timeline) in all.iter_mut().enumerate() {
            timeline.forced = close > 1e-4;
            timeline.adapter = u32::from(adapted && i % 3 < 2);
        }
        all
    };
    let mut wanted = begin();
    alone(&mut *load(first), &mut wanted, groups);
    for (i, device) in others.iter().enumerate() {
        let mut found = begin();
        together(&mut *load(*device), &mut found, (groups, sequences), 77 + i as u64);
        for (n, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let here = format!("{model} on {}: sequence {n}", device.about());
            let len = wanted.prompt.len();
            for (at, (found, wanted)) in found.logits.iter().zip(&wanted.logits).enumerate() {
                let float = |bits: &u32| f32::from_bits(*bits);
                let range = wanted.iter().map(float).fold(0f32, |most, x| most.max(x.abs()));
                let far = |(a, b): &(&u32, &u32)| {
                    a != b && (close == 0.0 || (float(a) - float(b)).abs() > close * range)
                };
                let differs = found.iter().zip(wanted).filter(far).count();
                assert_eq!(differs, 0, "{here}, of {len} tokens: logits that differ at {at}");
            }
            assert_eq!(found.chosen, wanted.chosen, "{here}");
        }
    }
}
