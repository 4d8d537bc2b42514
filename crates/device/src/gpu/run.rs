//! Choosing tokens on the device: steps that feed the next one, with a note to the host for each.
//!
//! A run is staged once. Every step of it ends with kernels that choose a token, write it where the next step reads its own,
//! and leave a note in a mailbox. Two steps are under way at a time, so that the device never waits for the host; a step
//! too many, after the last token that anybody wants, costs its time and nothing else.
//!
//! A few runs are kept, each in a seat: words, history, biases and mailbox of its own. So sessions that take turns find their
//! answers there, and nothing is staged again. A run ends where somebody else writes to the blocks of its cache, since
//! what it has computed ahead would be of another past; where all seats are taken, the one that waits longest goes.

use ops::sample::kernels::advance::{EMPTY, NOTES};
use ops::sample::kernels::settings;
use ops::sample::{Choice, Options};
use program::{Arguments, BLOCK_TOKENS, Table};

use formats::{Error, Result};

use super::Backend;
use super::executor::GpuExecutor;
use super::lower::{Key, SEATS, Samples, Sampling};

/// Steps under way at a time, of a run.
const AHEAD: usize = 2;
/// Steps before a run is staged again: room in the history for as many tokens.
pub(super) const STEPS: usize = 1024;

/// What choosing works with, and the runs that are under way.
pub(super) struct Chooser<B: Backend> {
    /// Of every part, as many as it has [copies](Sampling::copies).
    buffers: Vec<Vec<B::Buffer>>,
    /// Words that a history has, and pairs that biases have.
    room: (usize, usize),
    seats: [Option<Run>; SEATS],
    /// Answers given so far.
    answers: u64,
}

impl<B: Backend> Default for Chooser<B> {
    fn default() -> Self {
        Chooser { buffers: Vec::new(), room: (0, 0), seats: Default::default(), answers: 0 }
    }
}

/// What a step that chooses is staged with besides its arguments.
pub(super) struct Choosing<'a> {
    pub(super) seat: usize,
    pub(super) settings: &'a [u32],
    /// How many tokens penalties look back on.
    pub(super) span: u32,
    /// Those tokens, and pairs of token and bias: words as bytes.
    pub(super) window: &'a [u8],
    pub(super) biases: &'a [u8],
}

/// Steps that follow from one another.
struct Run {
    key: Key,
    options: Options,
    /// The blocks of every table.
    tables: Vec<Vec<u32>>,
    /// The token and its position that the next answer is about.
    token: u32,
    position: usize,
    /// Steps submitted whose answer is not yet given.
    under_way: usize,
    /// The first position that this run cannot compute.
    end: usize,
    /// Whether somebody else has written to its blocks, so that it has no more answers.
    over: bool,
    /// Which answer of all its last one was.
    last: u64,
}

impl Run {
    /// Whether a step is the one that this run comes to next.
    fn continues(&self, arguments: &Arguments<'_>, options: &Options) -> bool {
        let step = arguments.tokens == [self.token]
            && arguments.positions == [self.position as u32]
            && arguments.outputs == [0];
        step && !self.over
            && self.position < self.end
            && *options == self.options
            && self.tables.len() == arguments.tables.len()
            && self.tables.iter().zip(arguments.tables).all(|(a, b)| a == b.blocks)
    }

    /// Whether it has one of these blocks.
    fn shares(&self, tables: &[Table<'_>]) -> bool {
        let both = |(own, table): (&Vec<u32>, &Table<'_>)| {
            own.iter().any(|block| table.blocks.contains(block))
        };
        self.tables.iter().zip(tables).any(both)
    }
}

impl<B: Backend> Chooser<B> {
    /// What a part is bound to, in a seat.
    pub(super) fn buffer(&self, part: Sampling, seat: usize) -> Result<B::Buffer> {
        let missing = || Error::new("sampling", "its buffers", "none");
        let copies = self.buffers.get(part as usize).ok_or_else(missing)?;
        copies.get(seat.min(part.copies() - 1)).cloned().ok_or_else(missing)
    }

    /// Ends all runs. What is still under way leaves its notes in mailboxes that nobody may be given again.
    pub(super) fn forget(&mut self) {
        self.seats = Default::default();
    }

    /// Ends the runs that have blocks of these tables, since a step writes to them.
    pub(super) fn overtake(&mut self, tables: &[Table<'_>]) {
        let runs = self.seats.iter_mut().flatten();
        runs.filter(|run| run.shares(tables)).for_each(|run| run.over = true);
    }
}

/// Where a seat's note of the token chosen at a position lies: they are by the position of that token.
fn note(position: usize) -> usize {
    2 * ((position + 1) % NOTES as usize)
}

fn bytes(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

impl<B: Backend> GpuExecutor<B> {
    /// See [`crate::Executor::choose`].
    pub(super) fn chosen(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Result<Choice> {
        let continues =
            |run: &Option<Run>| run.as_ref().is_some_and(|r| r.continues(arguments, options));
        let seat = match self.chooser.seats.iter().position(continues) {
            Some(seat) => seat,
            None => self.begin(arguments, options, history)?,
        };
        self.go_on(seat)
    }

    /// Stages a run; returns its seat.
    fn begin(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Result<usize> {
        self.prepare(arguments)?;
        let (&[token], &[position], &[0]) =
            (arguments.tokens, arguments.positions, arguments.outputs)
        else {
            let found = format!("{} tokens", arguments.tokens.len());
            return Err(Error::new("choose", "one token with logits", found));
        };
        let position = position as usize;
        let kept = if options.penalises() { history.len().min(options.last_n) } else { 0 };
        self.make_room(kept + STEPS + 1, options.logit_bias.len().max(1))?;
        let seat = self.free_seat()?;
        // The token to choose has the position after this one.
        let settings = settings(
            options,
            position as u64 + 1,
            0..kept as u32,
            0..options.logit_bias.len() as u32,
        );
        let span = if options.penalises() { options.last_n.min(u32::MAX as usize) } else { 0 };
        let biases = options.logit_bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]);
        let choosing = Choosing {
            seat,
            settings: &settings,
            span: span as u32,
            window: &bytes(history[history.len() - kept..].iter().copied()),
            biases: &bytes(biases),
        };
        // 1: top-k, 2: top-p, each off at its greatest; 0: whether anything is drawn.
        let filters = settings[0] != 0 && (settings[1] != u32::MAX || settings[2] != u32::MAX);
        let mut key = self.key(arguments);
        key.samples = Some(Samples { filters, seat });
        let (known, class) = self.class(&key)?;
        self.stage(&class, arguments, Some(&choosing))?;
        self.classes.insert(known, class);
        // A table that wraps goes on for ever; another ends with its last block. The class ends with its length.
        let reach = |table: &Table<'_>| {
            let room = table.blocks.len() * BLOCK_TOKENS;
            if position >= room { usize::MAX } else { room }
        };
        // A step whose rows come from elsewhere cannot be followed by one of its own.
        let steps = if self.lowering.program.input.is_some() { 1 } else { STEPS };
        let end = arguments.tables.iter().map(reach).min().unwrap_or(usize::MAX);
        self.chooser.seats[seat] = Some(Run {
            end: end.min(key.length).min(position + steps),
            options: options.clone(),
            tables: arguments.tables.iter().map(|t| t.blocks.to_vec()).collect(),
            token,
            position,
            under_way: 0,
            over: false,
            last: self.chooser.answers,
            key,
        });
        Ok(seat)
    }

    /// A seat that nobody needs, or the one whose run has waited longest.
    fn free_seat(&mut self) -> Result<usize> {
        // One that was used before has classes that are compiled.
        let rank = |run: &Option<Run>| match run {
            Some(run) if run.over => (0, 0),
            None => (1, 0),
            Some(run) => (2, run.last),
        };
        let seats = &mut self.chooser.seats;
        let seat = (0..SEATS).min_by_key(|seat| rank(&seats[*seat])).unwrap_or(0);
        if let Some(mut run) = seats[seat].take() {
            // A note that comes late would be taken for one of the next run.
            while run.under_way > 0 {
                self.answer(seat, &mut run)?;
            }
        }
        Ok(seat)
    }

    /// Submits what there is room for, and waits for the oldest answer.
    fn go_on(&mut self, seat: usize) -> Result<Choice> {
        let mail = self.chooser.buffer(Sampling::Mail, seat)?;
        let none = || Error::new("choose", "a run", "none");
        // Taken out: whoever fails leaves no run behind.
        let mut run = self.chooser.seats[seat].take().ok_or_else(none)?;
        let (key, mut class) = self.class(&run.key)?;
        while run.under_way < AHEAD && run.position + run.under_way < run.end {
            let at = note(run.position + run.under_way);
            self.backend.poke(&mail, at, &EMPTY.to_le_bytes())?;
            self.launch(&mut class)?;
            run.under_way += 1;
        }
        self.classes.insert(key, class);
        let choice = self.answer(seat, &mut run)?;
        self.chooser.answers += 1;
        run.last = self.chooser.answers;
        self.chooser.seats[seat] = Some(run);
        Ok(choice)
    }

    /// Waits for what the oldest step of a run chose.
    fn answer(&self, seat: usize, run: &mut Run) -> Result<Choice> {
        let mail = self.chooser.buffer(Sampling::Mail, seat)?;
        let [token, logprob] = loop {
            if let Some(found) = self.backend.peek(&mail, note(run.position))? {
                break found;
            }
            std::hint::spin_loop();
        };
        run.under_way -= 1;
        run.position += 1;
        run.token = token;
        Ok(Choice { token, logprob: f32::from_bits(logprob) })
    }

    /// Sees to it that histories have so many words and biases so many pairs.
    pub(super) fn make_room(&mut self, history: usize, biases: usize) -> Result<()> {
        let (had_history, had_biases) = self.chooser.room;
        if !self.chooser.buffers.is_empty() && history <= had_history && biases <= had_biases {
            return Ok(());
        }
        let room = (
            history.next_power_of_two().max(had_history),
            biases.next_power_of_two().max(had_biases),
        );
        let vocab = self.lowering.program.shape(self.lowering.program.results[0]).width;
        let buffers = |part: &Sampling| {
            let words = part.words(vocab, room.0, room.1);
            let buffer = |_| match part {
                Sampling::Mail => self.backend.mailbox(words),
                _ => self.backend.buffer(4 * words),
            };
            (0..part.copies()).map(buffer).collect::<Result<Vec<_>>>()
        };
        let buffers = Sampling::ALL.iter().map(buffers).collect::<Result<_>>()?;
        // Whatever is bound or under way has the old ones.
        self.classes.clear();
        self.chooser.forget();
        self.chooser.buffers = buffers;
        self.chooser.room = room;
        Ok(())
    }
}
