//! Choosing tokens on the device: steps that feed the next one, with a note to the host for each.
//!
//! A run is staged once. Every step of it ends with kernels that choose a token, write it where the next step reads its own,
//! and leave a note in a mailbox. Two steps are under way at a time, so that the device never waits for the host; a step
//! too many, after the last token that anybody wants, costs its time and nothing else.

use ops::sample::kernels::advance::{EMPTY, NOTES};
use ops::sample::kernels::settings;
use ops::sample::{Choice, Options};
use program::{Arguments, BLOCK_TOKENS};

use formats::{Error, Result};

use super::Backend;
use super::executor::GpuExecutor;
use super::lower::{Key, Sampling};

/// Steps under way at a time.
const AHEAD: usize = 2;
/// Steps before a run is staged again: room in the history for as many tokens.
pub(super) const STEPS: usize = 1024;

/// What choosing works with, and the run that is under way.
pub(super) struct Chooser<B: Backend> {
    buffers: Vec<B::Buffer>,
    /// Words that the history has, and pairs that the biases have.
    room: (usize, usize),
    run: Option<Run>,
}

impl<B: Backend> Default for Chooser<B> {
    fn default() -> Self {
        Chooser { buffers: Vec::new(), room: (0, 0), run: None }
    }
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
}

impl Run {
    /// Whether a step is the one that this run comes to next.
    fn continues(&self, arguments: &Arguments<'_>, options: &Options) -> bool {
        let step = arguments.tokens == [self.token]
            && arguments.positions == [self.position as u32]
            && arguments.outputs == [0];
        step && self.position < self.end
            && *options == self.options
            && self.tables.len() == arguments.tables.len()
            && self.tables.iter().zip(arguments.tables).all(|(a, b)| a == b.blocks)
    }
}

impl<B: Backend> Chooser<B> {
    pub(super) fn buffer(&self, part: Sampling) -> Result<B::Buffer> {
        let missing = || Error::new("sampling", "its buffers", "none");
        self.buffers.get(part as usize).cloned().ok_or_else(missing)
    }

    /// Ends the run.
    pub(super) fn forget(&mut self) {
        self.run = None;
    }
}

impl<B: Backend> GpuExecutor<B> {
    /// See [`crate::Executor::choose`].
    pub(super) fn chosen(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Result<Choice> {
        let continues = self.chooser.run.as_ref().is_some_and(|r| r.continues(arguments, options));
        if !continues {
            self.begin(arguments, options, history)?;
        }
        self.go_on()
    }

    /// Stages a run.
    fn begin(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Result<()> {
        self.prepare(arguments)?;
        let (&[token], &[position], &[0]) =
            (arguments.tokens, arguments.positions, arguments.outputs)
        else {
            let found = format!("{} tokens", arguments.tokens.len());
            return Err(Error::new("choose", "one token with logits", found));
        };
        let position = position as usize;
        let kept = if options.penalises() { history.len().min(options.last_n) } else { 0 };
        let window = &history[history.len() - kept..];
        self.make_room(kept + STEPS + 1, options.logit_bias.len().max(1))?;
        // The token to choose has the position after this one.
        let settings = settings(
            options,
            position as u64 + 1,
            0..kept as u32,
            0..options.logit_bias.len() as u32,
        );
        let span = if options.penalises() { options.last_n.min(u32::MAX as usize) } else { 0 };
        let biases: Vec<u32> =
            options.logit_bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]).collect();
        for (part, words) in [
            (Sampling::Settings, &settings[..]),
            (Sampling::Spans, &[span as u32]),
            (Sampling::History, window),
            (Sampling::Biases, &biases),
        ] {
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            if !bytes.is_empty() {
                self.backend.write(&self.chooser.buffer(part)?, &bytes)?;
            }
        }
        let mut key = self.key(arguments);
        // 1: top-k, 2: top-p, each off at its greatest; 0: whether anything is drawn.
        let filters = settings[0] != 0 && (settings[1] != u32::MAX || settings[2] != u32::MAX);
        key.samples = Some(filters);
        let class = self.class(&key)?;
        self.stage(&class, arguments)?;
        self.classes.insert(key.clone(), class);
        // A table that wraps goes on for ever; another ends with its last block. The class ends with its length.
        let reach = |table: &program::Table<'_>| {
            let room = table.blocks.len() * BLOCK_TOKENS;
            if position >= room { usize::MAX } else { room }
        };
        // A step whose rows come from elsewhere cannot be followed by one of its own.
        let steps = if self.lowering.program.input.is_some() { 1 } else { STEPS };
        let end = arguments.tables.iter().map(reach).min().unwrap_or(usize::MAX);
        self.chooser.run = Some(Run {
            end: end.min(key.length).min(position + steps),
            options: options.clone(),
            tables: arguments.tables.iter().map(|t| t.blocks.to_vec()).collect(),
            token,
            position,
            under_way: 0,
            key,
        });
        Ok(())
    }

    /// Submits what there is room for, and waits for the oldest answer.
    fn go_on(&mut self) -> Result<Choice> {
        let mail = self.chooser.buffer(Sampling::Mail)?;
        // Notes are by the position of the token that was chosen.
        let note = |position: usize| 2 * ((position + 1) % NOTES as usize);
        let GpuExecutor { backend, dispatch, classes, chooser, .. } = self;
        let none = || Error::new("choose", "a run", "none");
        let run = chooser.run.as_mut().ok_or_else(none)?;
        let class = classes.get_mut(&run.key).ok_or_else(none)?;
        while run.under_way < AHEAD && run.position + run.under_way < run.end {
            backend.poke(&mail, note(run.position + run.under_way), EMPTY)?;
            class.launch(&**backend, *dispatch, &run.key)?;
            run.under_way += 1;
        }
        let [token, logprob] = loop {
            if let Some(note) = backend.peek(&mail, note(run.position))? {
                break note;
            }
            std::hint::spin_loop();
        };
        run.under_way -= 1;
        run.position += 1;
        run.token = token;
        Ok(Choice { token, logprob: f32::from_bits(logprob) })
    }

    /// Sees to it that the history has so many words and the biases so many pairs.
    pub(super) fn make_room(&mut self, history: usize, biases: usize) -> Result<()> {
        let (had_history, had_biases) = self.chooser.room;
        if !self.chooser.buffers.is_empty() && history <= had_history && biases <= had_biases {
            return Ok(());
        }
        let room = (history.next_power_of_two().max(had_history), biases.next_power_of_two());
        let vocab = self.lowering.program.shape(self.lowering.program.results[0]).width;
        let buffer = |part: &Sampling| {
            let words = part.words(vocab, room.0, room.1);
            match part {
                Sampling::Mail => self.backend.mailbox(words),
                _ => self.backend.buffer(4 * words),
            }
        };
        let buffers = Sampling::ALL.iter().map(buffer).collect::<Result<_>>()?;
        // Whatever is bound has the old addresses.
        self.classes.clear();
        self.chooser.buffers = buffers;
        self.chooser.room = room;
        Ok(())
    }
}
