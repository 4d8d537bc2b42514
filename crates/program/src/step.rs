//! A step: the inputs of one replay of a Program, and their validation.
//!
//! A step consists of rows of one or more sequences, all of one [`StepKind`]. Three numbers of a
//! row are distinct: its index in the step, its index in the cache ([`Sequence::start`]) and its
//! rotary position ([`Sequence::position`]).

mod sent;

use formats::{Error, Result};
use ops::sample::Options;

use crate::BLOCK_TOKENS;

/// Stands in for a token: the token that this sequence's slot chose last.
pub const CHOSEN: u32 = u32::MAX;

/// How the rows of a step are computed. A row's bits depend on its tokens, its cache and its kind,
/// and not on the step's other rows, their number, or where a prompt is cut into steps. (A GPU
/// guarantees this only if loaded for many sequences.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum StepKind {
    /// Generated tokens: one row of each sequence, or several to verify drafts or to recompute.
    Decode,
    /// Prompt tokens: a chunk of each sequence.
    Prompt,
}

/// The block table of a sequence, for the layers of one group.
///
/// Cache index `p` lies in block `blocks[(p / BLOCK_TOKENS) % blocks.len()]`: a table that has
/// stopped growing is a ring.
#[derive(Debug, Clone, Copy, Default)]
pub struct Table<'a> {
    /// Block numbers in the pool.
    pub blocks: &'a [u32],
    /// The first cache index that the ring still holds after this step.
    pub oldest: u32,
}

/// How a sequence's next token is chosen from the logits of its last row.
#[derive(Debug, Clone, Copy)]
pub struct Choose<'a> {
    /// The sampling chain.
    pub options: &'a Options,
    /// All tokens of the sequence up to and including its last row, for penalties. Ignored if that
    /// row is [`CHOSEN`]: the slot then continues its own history, to which it has added the tokens
    /// it chose.
    pub history: &'a [u32],
    /// The allowed tokens, one bit each, starting at the lowest bit of the first word; `None`
    /// allows all.
    pub mask: Option<&'a [u32]>,
    /// Requests log-probabilities, which may take another pass over the vocabulary: of the chosen
    /// token, and of this many most likely tokens. They are the model's own: at temperature 1,
    /// without penalties, biases or mask.
    pub logprobs: Option<usize>,
}

impl Choose<'_> {
    /// Whether it needs more than the sampling chain that every device has: the most likely tokens,
    /// or a sampler that only the host has.
    pub fn needs_host(&self) -> bool {
        let likeliest = self.logprobs.is_some_and(|likeliest| likeliest > 0);
        likeliest || self.options.needs_host()
    }

    /// Checks that it is within `limits`.
    ///
    /// # Errors
    /// A mask with fewer bits than the vocabulary has tokens.
    pub fn check(&self, limits: &Limits) -> Result<()> {
        match (self.mask, limits.vocab) {
            (Some(mask), Some(vocab)) if mask.len() < vocab.div_ceil(32) => {
                let expected = format!("a mask of {vocab} bits");
                Err(Error::new("step", expected, format!("{} words", mask.len())))
            }
            _ => Ok(()),
        }
    }
}

/// The rows of one sequence in a step, at consecutive cache indices.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    /// Number of rows.
    pub rows: u32,
    /// Cache index of the first row.
    pub start: u32,
    /// Rotary position of the first row.
    pub position: u32,
    /// Block table of each cache group; see [`Program::groups`](crate::Program::groups).
    pub tables: &'a [Table<'a>],
    /// The slot in which a device keeps the sequence's state between steps, such as the token it
    /// chose last.
    pub slot: u32,
    /// The seat of its adapter, from 1; 0 means none.
    pub adapter: u32,
    /// How its next token is chosen; `None` if no token is.
    pub choose: Option<&'a Choose<'a>>,
}

impl<'a> Sequence<'a> {
    /// Rows from a cache index on, which is also their rotary position; in slot 0, without adapter
    /// or sampling.
    pub fn new(rows: usize, start: usize, tables: &'a [Table<'a>]) -> Self {
        let start = start as u32;
        let (rows, position) = (rows as u32, start);
        Sequence { rows, start, position, tables, slot: 0, adapter: 0, choose: None }
    }

    /// One past the cache index of the last row.
    pub fn end(&self) -> u32 {
        self.start.saturating_add(self.rows)
    }

    /// The blocks of a table that the rows are written to.
    fn written(&self, table: &'a Table<'a>) -> impl Iterator<Item = u32> + Clone + use<'a> {
        let (first, last) = (self.start, self.end().saturating_sub(1));
        let blocks = table.blocks;
        let all = first as usize / BLOCK_TOKENS..last as usize / BLOCK_TOKENS + 1;
        all.take(blocks.len()).map(move |block| blocks[block % blocks.len()])
    }
}

/// A sequence that chooses its next token.
#[derive(Debug, Clone, Copy)]
pub struct Choosing<'a> {
    /// The index of its last row.
    pub row: usize,
    /// The index of that row in [`Step::outputs`].
    pub output: usize,
    /// The sequence.
    pub sequence: &'a Sequence<'a>,
    /// How it chooses.
    pub choose: &'a Choose<'a>,
}

/// The inputs of one replay.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// How its rows are computed.
    pub kind: StepKind,
    /// Token ids, one per row. The first of a sequence may be [`CHOSEN`] in a step of
    /// [`StepKind::Decode`].
    pub tokens: &'a [u32],
    /// The sequences, each at most once; their rows follow each other and cover the step.
    pub sequences: &'a [Sequence<'a>],
    /// Indices of the rows whose logits are requested, ascending; the last row of each sequence
    /// that chooses is among them.
    pub outputs: &'a [u32],
    /// The Program's [`input`](crate::Program::input), `[rows, width]`; empty if it has none.
    pub input: &'a [f32],
}

/// The limits that a loaded Program was allocated for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most rows of a replay.
    pub tokens: usize,
    /// Most rows with logits.
    pub outputs: usize,
    /// Most sequences of a replay.
    pub sequences: usize,
    /// Number of slots.
    pub slots: usize,
    /// Number of adapter seats.
    pub seats: usize,
    /// Number of blocks of each cache group.
    pub blocks: Vec<usize>,
    /// The window of each cache group.
    pub windows: Vec<Option<usize>>,
    /// Width of the Program's input; 0 if it has none.
    pub input: usize,
    /// Number of learned positions; `usize::MAX` if there are none.
    pub positions: usize,
    /// Size of the vocabulary, if the first result is logits.
    pub vocab: Option<usize>,
}

impl<'a> Step<'a> {
    /// Each sequence with the number of its first row.
    pub fn placed(&self) -> impl Iterator<Item = (usize, &'a Sequence<'a>)> + Clone + use<'a> {
        self.sequences.iter().scan(0, |next, sequence| {
            let first = *next;
            *next += sequence.rows as usize;
            Some((first, sequence))
        })
    }

    /// The row of a sequence that is its last, and the row's index in [`Step::outputs`]; none if its
    /// logits are not requested. `first` is the sequence's first row.
    pub fn last(&self, first: usize, sequence: &Sequence<'_>) -> Option<(usize, usize)> {
        let row = first + sequence.rows as usize - 1;
        Some((row, self.outputs.binary_search(&(row as u32)).ok()?))
    }

    /// The sequences that choose a token.
    pub fn choosing(&self) -> impl Iterator<Item = Choosing<'a>> + Clone + use<'a> {
        let step = *self;
        self.placed().filter_map(move |(first, sequence)| {
            let (row, output) = step.last(first, sequence)?;
            Some(Choosing { row, output, sequence, choose: sequence.choose? })
        })
    }

    /// Checks that a step is within `limits` and consistent.
    ///
    /// # Errors
    /// The limit that is exceeded, or the parts that do not fit.
    pub fn check(&self, limits: &Limits) -> Result<()> {
        let (rows, outputs, sequences) =
            (self.tokens.len(), self.outputs.len(), self.sequences.len());
        let few = rows <= limits.tokens && outputs <= limits.outputs.min(rows);
        if rows == 0 || !few || sequences == 0 || sequences > limits.sequences {
            let expected = format!(
                "1..={} rows of 1..={} sequences, at most {} rows with logits",
                limits.tokens, limits.sequences, limits.outputs
            );
            let found = format!("{rows} rows of {sequences} sequences, {outputs} with logits");
            return Err(Error::new("step", expected, found));
        }
        let of_sequences: u64 = self.sequences.iter().map(|s| u64::from(s.rows)).sum();
        let ascending = self.outputs.is_sorted_by(|a, b| a < b);
        let among = self.outputs.last().is_none_or(|&row| (row as usize) < rows);
        let fits = of_sequences == rows as u64
            && self.sequences.iter().all(|s| s.rows > 0)
            && ascending
            && among
            && self.input.len() == rows * limits.input;
        if !fits {
            let expected = "a row or more of each sequence, which cover all rows, outputs ascending among the rows, a row of input per token";
            return Err(Error::new("step", expected, "others"));
        }
        for (first, sequence) in self.placed() {
            self.check_sequence(first, sequence, limits)?;
        }
        self.check_apart()
    }

    fn check_sequence(&self, first: usize, sequence: &Sequence<'_>, limits: &Limits) -> Result<()> {
        let wrong = |expected: String, found: String| Err(Error::new("step", expected, found));
        let rows = &self.tokens[first..first + sequence.rows as usize];
        if sequence.tables.len() != limits.blocks.len() {
            let expected = format!("a table of each of {} cache groups", limits.blocks.len());
            return wrong(expected, format!("{} tables", sequence.tables.len()));
        }
        if sequence.slot as usize >= limits.slots {
            return wrong(format!("slots below {}", limits.slots), sequence.slot.to_string());
        }
        if sequence.adapter as usize > limits.seats {
            let expected = format!("an adapter on one of {} seats", limits.seats);
            return wrong(expected, format!("seat {}", sequence.adapter));
        }
        let most = u32::MAX - sequence.rows;
        if sequence.start > most || sequence.position > most {
            return wrong(format!("positions up to {most}"), sequence.start.to_string());
        }
        let last = (sequence.position + sequence.rows - 1) as usize;
        if last >= limits.positions {
            return wrong(format!("positions below {}", limits.positions), last.to_string());
        }
        let decodes = self.kind == StepKind::Decode;
        if rows[1..].contains(&CHOSEN) || (rows[0] == CHOSEN && !decodes) {
            let expected = "a chosen token in the first row of a sequence that decodes";
            return wrong(expected.to_owned(), "one elsewhere".to_owned());
        }
        let groups = sequence.tables.iter().zip(&limits.blocks).zip(&limits.windows);
        for ((table, &blocks), window) in groups {
            if table.blocks.is_empty() || table.blocks.iter().any(|&b| b as usize >= blocks) {
                return wrong(format!("cache blocks below {blocks}"), format!("{table:?}"));
            }
            let seen = window.map_or(0, |w| (sequence.start as usize + 1).saturating_sub(w));
            if table.oldest as usize > seen {
                let expected = format!("a table that holds position {seen}, which is seen");
                return wrong(expected, format!("those from {}", table.oldest));
            }
        }
        let Some(choose) = sequence.choose else { return Ok(()) };
        let last = (first + rows.len() - 1) as u32;
        if limits.vocab.is_some() && self.outputs.binary_search(&last).is_err() {
            let expected = "logits of the last row of a sequence that chooses";
            return wrong(expected.to_owned(), "none".to_owned());
        }
        choose.check(limits)
    }

    /// Checks that each sequence occurs once, and that no block is written that another sequence
    /// has.
    fn check_apart(&self) -> Result<()> {
        for (i, one) in self.sequences.iter().enumerate() {
            if self.sequences[..i].iter().any(|other| other.slot == one.slot) {
                let expected = "each slot once";
                return Err(Error::new("step", expected, format!("slot {} twice", one.slot)));
            }
            for (group, table) in one.tables.iter().enumerate() {
                let others = self.sequences.iter().enumerate().filter(|(j, _)| *j != i);
                for block in one.written(table) {
                    // Debug builds also check blocks that others only read, of which there are
                    // many.
                    let taken = |other: &Sequence<'_>| match cfg!(debug_assertions) {
                        true => other.tables[group].blocks.contains(&block),
                        false => other.written(&other.tables[group]).any(|b| b == block),
                    };
                    if let Some((_, other)) = others.clone().find(|(_, other)| taken(other)) {
                        let found = format!("slots {} and {}", one.slot, other.slot);
                        let expected =
                            format!("block {block}, which is written, to be of one sequence");
                        return Err(Error::new("step", expected, found));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Reusable memory for the borrowed parts of a step, so that passing a step on allocates nothing.
#[derive(Debug, Default)]
pub struct StepMemory {
    tables: Vec<Table<'static>>,
    chooses: Vec<Choose<'static>>,
    sequences: Vec<Sequence<'static>>,
}

/// Reuses the memory of a vector for elements of another lifetime: collecting the iterator of an
/// emptied vector reuses its allocation.
pub fn recycle<A, B>(mut memory: Vec<A>) -> Vec<B> {
    memory.clear();
    memory.into_iter().map(|_| unreachable!("it is empty")).collect()
}

impl StepMemory {
    /// Calls `f` with the step as a part of the Program sees it: with the tables of the given
    /// `groups` only, and with its own `outputs` and `input`.
    pub fn part<T>(
        &mut self,
        step: &Step<'_>,
        groups: &[usize],
        outputs: &[u32],
        input: &[f32],
        f: impl FnOnce(&Step<'_>) -> T,
    ) -> T {
        let mut tables: Vec<Table<'_>> = recycle(std::mem::take(&mut self.tables));
        let mut sequences: Vec<Sequence<'_>> = recycle(std::mem::take(&mut self.sequences));
        for sequence in step.sequences {
            let own = groups.iter().map(|group| sequence.tables.get(*group));
            tables.extend(own.map(|table| table.copied().unwrap_or_default()));
        }
        for (i, sequence) in step.sequences.iter().enumerate() {
            let tables = &tables[i * groups.len()..][..groups.len()];
            sequences.push(Sequence { tables, ..*sequence });
        }
        let result = f(&Step { sequences: &sequences, outputs, input, ..*step });
        self.sequences = recycle(sequences);
        self.tables = recycle(tables);
        result
    }
}

/// A step that owns its parts except the Program's input, and reuses its memory.
#[derive(Debug, Clone)]
pub struct OwnedStep {
    kind: StepKind,
    tokens: Vec<u32>,
    outputs: Vec<u32>,
    sequences: Vec<OwnedSequence>,
    /// Number of valid sequences; further ones are spare memory.
    count: usize,
}

#[derive(Debug, Clone, Default)]
struct OwnedSequence {
    rows: u32,
    start: u32,
    position: u32,
    slot: u32,
    adapter: u32,
    /// Blocks and oldest index of each group; the first `groups` are valid.
    tables: Vec<(Vec<u32>, u32)>,
    groups: usize,
    chooses: bool,
    options: Options,
    history: Vec<u32>,
    masked: bool,
    mask: Vec<u32>,
    logprobs: Option<usize>,
}

impl Default for OwnedStep {
    fn default() -> Self {
        let (tokens, outputs, sequences) = Default::default();
        OwnedStep { kind: StepKind::Decode, tokens, outputs, sequences, count: 0 }
    }
}

fn copy(to: &mut Vec<u32>, from: &[u32]) {
    to.clear();
    to.extend_from_slice(from);
}

impl OwnedStep {
    /// Copies `step`, without its input.
    pub fn set(&mut self, step: &Step<'_>) {
        self.kind = step.kind;
        copy(&mut self.tokens, step.tokens);
        copy(&mut self.outputs, step.outputs);
        self.count = step.sequences.len();
        self.sequences.resize_with(self.sequences.len().max(self.count), Default::default);
        for (to, from) in self.sequences.iter_mut().zip(step.sequences) {
            (to.rows, to.start, to.position) = (from.rows, from.start, from.position);
            (to.slot, to.adapter, to.groups) = (from.slot, from.adapter, from.tables.len());
            to.tables.resize_with(to.tables.len().max(to.groups), Default::default);
            for ((blocks, oldest), table) in to.tables.iter_mut().zip(from.tables) {
                copy(blocks, table.blocks);
                *oldest = table.oldest;
            }
            to.chooses = from.choose.is_some();
            let Some(choose) = from.choose else { continue };
            to.options.clone_from(choose.options);
            copy(&mut to.history, choose.history);
            to.masked = choose.mask.is_some();
            copy(&mut to.mask, choose.mask.unwrap_or_default());
            to.logprobs = choose.logprobs;
        }
    }

    /// Calls `f` with the step.
    pub fn with<T>(&self, memory: &mut StepMemory, f: impl FnOnce(&Step<'_>) -> T) -> T {
        let mut tables: Vec<Table<'_>> = recycle(std::mem::take(&mut memory.tables));
        let mut chooses: Vec<Choose<'_>> = recycle(std::mem::take(&mut memory.chooses));
        let mut sequences: Vec<Sequence<'_>> = recycle(std::mem::take(&mut memory.sequences));
        let own = &self.sequences[..self.count];
        for s in own {
            let all = s.tables[..s.groups].iter();
            tables.extend(all.map(|(blocks, oldest)| Table { blocks, oldest: *oldest }));
            chooses.push(Choose {
                options: &s.options,
                history: &s.history,
                mask: s.masked.then_some(&s.mask),
                logprobs: s.logprobs,
            });
        }
        let mut rest = &tables[..];
        for (s, choose) in own.iter().zip(&chooses) {
            let (tables, behind) = rest.split_at(s.groups);
            rest = behind;
            sequences.push(Sequence {
                rows: s.rows,
                start: s.start,
                position: s.position,
                tables,
                slot: s.slot,
                adapter: s.adapter,
                choose: s.chooses.then_some(choose),
            });
        }
        let result = f(&Step {
            kind: self.kind,
            tokens: &self.tokens,
            sequences: &sequences,
            outputs: &self.outputs,
            input: &[],
        });
        memory.sequences = recycle(sequences);
        memory.chooses = recycle(chooses);
        memory.tables = recycle(tables);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            tokens: 8,
            outputs: 4,
            sequences: 3,
            slots: 4,
            seats: 2,
            blocks: vec![6],
            windows: vec![Some(300)],
            input: 0,
            positions: 1000,
            vocab: Some(40),
        }
    }

    /// Two sequences that decode, the first in blocks 0 and 1, the second in block 2.
    fn checked(change: impl FnOnce(&mut Step<'_>, &mut [Sequence<'_>; 2])) -> Result<()> {
        let first = [Table { blocks: &[0, 1], oldest: 0 }];
        let second = [Table { blocks: &[2], oldest: 0 }];
        let mut sequences = [
            Sequence { slot: 3, ..Sequence::new(1, 256, &first) },
            Sequence { slot: 1, ..Sequence::new(2, 7, &second) },
        ];
        let mut step = Step {
            kind: StepKind::Decode,
            tokens: &[CHOSEN, 5, 6],
            sequences: &[],
            outputs: &[0, 2],
            input: &[],
        };
        change(&mut step, &mut sequences);
        step.sequences = &sequences;
        step.check(&limits())
    }

    #[test]
    fn a_step_whose_parts_do_not_agree_is_refused() {
        checked(|_, _| {}).unwrap();
        type Change = fn(&mut Step<'_>, &mut [Sequence<'_>; 2]);
        let cases: [(&str, Change); 14] = [
            ("rows", |step, _| step.tokens = &[]),
            ("rows", |step, _| step.tokens = &[5; 9]),
            ("cover all rows", |step, _| step.tokens = &[5; 4]),
            ("ascending", |step, _| step.outputs = &[2, 0]),
            ("among the rows", |step, _| step.outputs = &[3]),
            ("a row of input", |step, _| step.input = &[1.0]),
            ("the first row", |step, _| step.tokens = &[4, 5, CHOSEN]),
            ("that decodes", |step, _| step.kind = StepKind::Prompt),
            ("each slot once", |_, sequences| sequences[0].slot = 1),
            ("slots below 4", |_, sequences| sequences[0].slot = 4),
            ("one of 2 seats", |_, sequences| sequences[0].adapter = 3),
            ("a table of each", |_, sequences| sequences[0].tables = &[]),
            ("positions below 1000", |_, sequences| sequences[1].position = 999),
            ("positions up to", |_, sequences| sequences[1].start = u32::MAX - 1),
        ];
        for (expected, change) in cases {
            let why = checked(change).unwrap_err().to_string();
            assert!(why.contains(expected), "{expected}: {why}");
        }
    }

    /// A sequence at index 7 of block 2 with some tables, beside one that writes to block 2 or 1.
    fn tables(
        tables: &[Table<'_>],
        beside: &[u32],
        choose: Option<&Choose<'_>>,
        outputs: &[u32],
    ) -> String {
        let beside = [Table { blocks: beside, oldest: 0 }];
        let sequences = [
            Sequence { slot: 3, ..Sequence::new(1, 256, &beside) },
            Sequence { slot: 1, choose, ..Sequence::new(1, 400, tables) },
        ];
        let tokens = &[1, 2];
        let step =
            Step { kind: StepKind::Prompt, tokens, sequences: &sequences, outputs, input: &[] };
        step.check(&limits()).err().map(|why| why.to_string()).unwrap_or_default()
    }

    #[test]
    fn blocks_that_are_written_belong_to_one_sequence() {
        let own = |blocks, oldest| [Table { blocks, oldest }];
        assert_eq!(tables(&own(&[2, 4], 0), &[0, 1], None, &[]), "");
        assert_eq!(tables(&own(&[2, 4], 0), &[2, 1], None, &[]), "", "both read block 2");
        assert!(tables(&own(&[2, 1], 0), &[0, 1], None, &[]).contains("of one sequence"));
        assert!(tables(&own(&[1, 4], 0), &[0, 1], None, &[]).contains("of one sequence"));
        assert!(tables(&own(&[2, 6], 0), &[0, 1], None, &[]).contains("cache blocks below 6"));
        assert!(tables(&own(&[], 0), &[0, 1], None, &[]).contains("cache blocks below 6"));
        assert!(tables(&own(&[2, 4], 102), &[0, 1], None, &[]).contains("holds position 101"));
        let options = Options::default();
        let mut choose = Choose { options: &options, history: &[], mask: None, logprobs: None };
        let found = tables(&own(&[2, 4], 0), &[0, 1], Some(&choose), &[0]);
        assert!(found.contains("logits of the last row"), "{found}");
        assert_eq!(tables(&own(&[2, 4], 0), &[0, 1], Some(&choose), &[1]), "");
        choose.mask = Some(&[7]);
        let found = tables(&own(&[2, 4], 0), &[0, 1], Some(&choose), &[1]);
        assert!(found.contains("a mask of 40 bits"), "{found}");
    }

    #[test]
    fn an_owned_step_is_the_step() {
        let (first, second) = ([Table { blocks: &[0, 1], oldest: 3 }], [Table::default(); 2]);
        let options = Options { temperature: 0.5, ..Options::default() };
        let choose =
            Choose { options: &options, history: &[1, 2], mask: Some(&[9]), logprobs: Some(3) };
        let sequences = [
            Sequence { slot: 3, choose: Some(&choose), ..Sequence::new(1, 256, &first) },
            Sequence { position: 5, adapter: 2, ..Sequence::new(2, 7, &second) },
        ];
        let step = Step {
            kind: StepKind::Prompt,
            tokens: &[1, 2, 3],
            sequences: &sequences,
            outputs: &[0, 2],
            input: &[],
        };
        let (mut owned, mut memory) = (OwnedStep::default(), StepMemory::default());
        for step in [step, Step { sequences: &sequences[..1], tokens: &[4], ..step }, step] {
            owned.set(&step);
            owned.with(&mut memory, |found| assert_eq!(format!("{found:?}"), format!("{step:?}")));
        }
        let part = memory.part(&step, &[0], &[], &[0.5], |part| format!("{part:?}"));
        let tables = second;
        let other = [sequences[0], Sequence { tables: &tables[..1], ..sequences[1] }];
        let wanted = Step { sequences: &other, outputs: &[], input: &[0.5], ..step };
        assert_eq!(part, format!("{wanted:?}"));
    }
}
