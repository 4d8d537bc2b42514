//! Sampling on the device: each step feeds the next one, and reports its token to the host.
//!
//! A *run* is a chain of such steps of one slot. Its first step is staged by the host. Every step
//! ends with kernels that choose a token, write it to the next step's inputs, and write a note
//! (token and log-probability) to pinned memory. The next step of the slot, whose token is
//! [`CHOSEN`], is then submitted without writing anything: the host need not know the token, and
//! the device never waits for the host.
//!
//! A step with a mask is a run of its own, since the next one's mask is not known yet; its mask is
//! sent with its words.
//!
//! A few runs are kept at a time, each with its own words, history, biases and pinned notes, so
//! that slots that take turns continue where they were. If all are taken, the least recently used
//! run ends. A run is staged anew when its block tables or its class change, and whenever the host
//! gives a token.

use std::collections::VecDeque;

use ops::sample::Choice;
use ops::sample::kernels::advance::{EMPTY, NOTES};
use ops::sample::kernels::settings;
use program::{BLOCK_TOKENS, CHOSEN, Choose, Choosing, Sequence, Step, StepKind, Table};

use formats::{Error, Result};

use super::Backend;
use super::exchange::one_row;
use super::executor::GpuExecutor;
use super::lower::{Key, Room, SEATS, Samples, Sampling, mask_words};
use super::many::{Last, Many};
use crate::choose::{Carried, HostSampler, Outcomes, Refusal, chosen};
use crate::{IN_FLIGHT, Ticket, Watch};

/// Steps of a run before it is staged again; its history has room for as many tokens.
pub(super) const STEPS: usize = 1024;

/// The buffers of sampling, and the runs in progress.
pub(super) struct Chooser<B: Backend> {
    /// For each buffer kind, its [copies](Sampling::copies).
    buffers: Vec<Vec<B::Buffer>>,
    pub(super) room: Room,
    seats: [Option<Run>; SEATS],
    /// Steps of all runs so far; orders runs by last use.
    steps: u64,
    pub(super) outcomes: Outcomes,
    /// The state of each slot, as far as the host knows it.
    pub(super) slots: Vec<Carried>,
    /// Samples on the host, for rows that need it.
    sampler: HostSampler,
    /// Memory for the inputs of a run's first step.
    beside: Beside,
    /// Device-side state of the slots in steps of many sequences.
    pub(super) many: Many,
}

/// Inputs of a step in addition to its rows.
#[derive(Clone, Copy)]
pub(super) enum Staged<'a> {
    /// None: the step does not choose.
    Nothing,
    /// The step is the first of a run.
    Run(&'a Sampled<'a>),
    /// The step chooses for rows of many sequences: their settings, and where their tokens are
    /// written; and the bytes of their masks, one after the other.
    Rows { settings: &'a [u32], targets: &'a [u32], masks: &'a [u8] },
}

/// Inputs of the first step of a run.
pub(super) struct Sampled<'a> {
    pub(super) seat: usize,
    pub(super) settings: &'a [u32],
    /// The penalties' look-back, in tokens.
    pub(super) span: u32,
    pub(super) beside: &'a Beside,
}

/// The inputs of a run's first step besides its words, as bytes. The memory is kept, so that steps
/// allocate nothing.
#[derive(Default)]
pub(super) struct Beside {
    /// The tokens looked back on.
    pub(super) window: Vec<u8>,
    /// Pairs of token and bias.
    pub(super) biases: Vec<u8>,
    /// The mask; empty if there is none.
    pub(super) mask: Vec<u8>,
}

/// A chain of steps, each of which chooses the next one's token.
struct Run {
    slot: u32,
    /// The seat of the adapter, or 0.
    adapter: u32,
    key: Key,
    /// The look-back of its sampling chain, in tokens.
    looks_back: usize,
    /// The block table of each group.
    tables: Vec<Vec<u32>>,
    /// The position of the next step's token.
    position: usize,
    /// In-flight steps whose note has not been read: ticket number and position of the step's
    /// token.
    under_way: VecDeque<(u64, usize)>,
    /// The first position that this run cannot compute.
    end: usize,
    /// The value of `steps` at its last step.
    last: u64,
}

impl Run {
    /// Whether the sequence's next row is the one that this run computes next.
    fn continues(&self, sequence: &Sequence<'_>) -> bool {
        self.adapter == sequence.adapter
            && self.position == sequence.start as usize
            && self.position < self.end
            && self.tables.len() == sequence.tables.len()
            && self.tables.iter().zip(sequence.tables).all(|(a, b)| a == b.blocks)
    }
}

impl<B: Backend> Chooser<B> {
    /// Reserves `room` at the first use; a step has at most `masks` bytes of masks.
    pub(super) fn new(room: Room, masks: usize) -> Self {
        Chooser {
            buffers: Vec::new(),
            room,
            seats: Default::default(),
            steps: 0,
            outcomes: Outcomes::new(room.rows),
            slots: Vec::new(),
            sampler: HostSampler::default(),
            beside: Beside::default(),
            many: Many::new(room, masks),
        }
    }

    /// The buffer of a kind, for a run.
    pub(super) fn buffer(&self, part: Sampling, seat: usize) -> Result<B::Buffer> {
        let missing = || Error::new("sampling", "its buffers", "none");
        let copies = self.buffers.get(part as usize).ok_or_else(missing)?;
        copies.get(seat.min(copies.len() - 1)).cloned().ok_or_else(missing)
    }

    /// Ends all runs. Steps in flight still write their notes, to pinned memory that no new run may
    /// use.
    pub(super) fn forget(&mut self) {
        self.seats = Default::default();
        self.slots.iter_mut().for_each(|slot| slot.token = None);
        self.many.forget();
        // Steps in flight have no result either; the caller submits them again.
        self.outcomes.forget();
    }

    /// The state of a slot.
    pub(super) fn slot(&mut self, slot: u32) -> &mut Carried {
        let slot = slot as usize;
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, Carried::default);
        }
        &mut self.slots[slot]
    }

    /// Ends the run of a slot. All its notes must have been read.
    pub(super) fn end(&mut self, slot: u32) {
        if let Some(seat) = self.seat(slot) {
            self.seats[seat] = None;
        }
    }

    /// The index of a slot's run.
    fn seat(&self, slot: u32) -> Option<usize> {
        self.seats.iter().position(|run| run.as_ref().is_some_and(|run| run.slot == slot))
    }
}

/// Whether a row with these settings has filters. Words 1 and 2 are top-k and top-p, which are off
/// at their maxima; word 0 says whether the token is drawn at random.
pub(super) fn filters(settings: &[u32]) -> bool {
    settings[0] != 0 && (settings[1] != u32::MAX || settings[2] != u32::MAX)
}

/// Decodes a note: a token and the bits of its log-probability.
pub(super) fn told([token, logprob]: [u32; 2]) -> std::result::Result<Choice, Refusal> {
    let choice = Choice { token, logprob: f32::from_bits(logprob) };
    // A log-probability of minus infinity marks a row without a possible token.
    match choice.logprob {
        logprob if logprob.is_nan() => Err(Refusal::Broken(logprob)),
        f32::NEG_INFINITY => Err(Refusal::Nothing),
        _ => Ok(choice),
    }
}

/// Index of the note for the token chosen at `position`; notes are indexed by the position of the
/// chosen token.
fn note(position: usize) -> usize {
    2 * ((position + 1) % NOTES as usize)
}

/// Fills a buffer with the bytes of words.
fn put(bytes: &mut Vec<u8>, words: impl Iterator<Item = u32>) {
    bytes.clear();
    bytes.extend(words.flat_map(u32::to_le_bytes));
}

impl<B: Backend> GpuExecutor<B> {
    /// The one decode row of a step, if the device can choose its token without the host.
    pub(super) fn fed<'a>(&self, step: &Step<'a>) -> Option<Choosing<'a>> {
        let one =
            step.kind == StepKind::Decode && step.tokens.len() == 1 && step.outputs.len() == 1;
        let choosing = step.choosing().next().filter(|_| one && self.chooses())?;
        (!choosing.choose.needs_host()).then_some(choosing)
    }

    /// Submits a step whose token the device chooses.
    pub(super) fn feed(
        &mut self,
        step: &Step<'_>,
        choosing: &Choosing<'_>,
        ticket: Ticket,
    ) -> Result<()> {
        let Choosing { sequence, choose, .. } = choosing;
        self.chooser.outcomes.begin(ticket).push(choose);
        let seat = self.chooser.seat(sequence.slot);
        let goes_on = |seat: &usize| {
            let run = self.chooser.seats[*seat].as_ref();
            choose.mask.is_none()
                && step.tokens == [CHOSEN]
                && run.is_some_and(|run| run.continues(sequence))
        };
        let seat = match seat.filter(goes_on) {
            Some(seat) => seat,
            None => {
                let token = self.known(step.tokens[0], sequence.slot)?;
                if step.tokens[0] != CHOSEN {
                    self.chooser.slot(sequence.slot).begin(choose);
                }
                self.stage_run(&Step { tokens: &[token], ..*step }, sequence, choose)?
            }
        };
        self.launch_run(seat, ticket)
    }

    /// A token, or the token that the slot chose last; waits for the device if need be.
    pub(super) fn known(&mut self, token: u32, slot: u32) -> Result<u32> {
        if let Some(seat) = self.chooser.seat(slot) {
            self.settle(seat, u64::MAX)?;
        }
        if token != CHOSEN {
            return Ok(token);
        }
        chosen(Some(self.chooser.slot(slot)), slot)
    }

    /// Stages the first step of a run; returns the run's index.
    fn stage_run(
        &mut self,
        step: &Step<'_>,
        sequence: &Sequence<'_>,
        choose: &Choose<'_>,
    ) -> Result<usize> {
        self.prepare(step)?;
        let (options, slot) = (choose.options, sequence.slot);
        let position = sequence.start as usize;
        let kept = self.chooser.slot(slot).history.len();
        self.make_room(kept + STEPS + 1, options.logit_bias.len().max(1))?;
        let (seat, before) = self.free_seat(slot)?;
        let (mut tables, mut under_way) = (Vec::new(), VecDeque::new());
        let mut strides = Vec::new();
        if let Some(before) = before {
            (tables, under_way, strides) = (before.tables, before.under_way, before.key.strides);
        }
        let mut beside = std::mem::take(&mut self.chooser.beside);
        put(&mut beside.window, self.chooser.slot(slot).history.iter().copied());
        let pairs = options.logit_bias.iter();
        put(&mut beside.biases, pairs.flat_map(|(token, bias)| [*token, bias.to_bits()]));
        let mask = choose.mask.map(|mask| &mask[..self.mask_words()]);
        put(&mut beside.mask, mask.unwrap_or_default().iter().copied());
        // The token to be chosen has the position after this one.
        let biases = 0..options.logit_bias.len() as u32;
        let window = 0..kept as u32;
        let settings = settings(options, position as u64 + 1, window, biases, mask.map(|_| 0));
        let span = if options.penalises() { options.last_n.min(u32::MAX as usize) } else { 0 };
        let sampled = Sampled { seat, settings: &settings, span: span as u32, beside: &beside };
        let filters = filters(&settings);
        // The key keeps its memory.
        std::mem::swap(&mut self.strides, &mut strides);
        let mut key = self.key(step);
        self.strides = strides;
        key.samples = Some(Samples { filters, seat: Some(seat), alone: false });
        let (known, class) = self.class(&key)?;
        self.stage(&class, step, Staged::Run(&sampled))?;
        self.classes.insert(known, class);
        self.chooser.beside = beside;
        // A wrapping table has no end; other tables end with their last block. The class ends at
        // its context length.
        let reach = |table: &Table<'_>| {
            let room = table.blocks.len() * BLOCK_TOKENS;
            if position >= room { usize::MAX } else { room }
        };
        // A step with an input from another device, or with a mask, cannot be followed by one of
        // this run.
        let alone = self.lowering.program.input.is_some() || choose.mask.is_some();
        let steps = if alone { 1 } else { STEPS };
        let end = sequence.tables.iter().map(reach).min().unwrap_or(usize::MAX);
        tables.resize_with(sequence.tables.len(), Vec::new);
        for (kept, table) in tables.iter_mut().zip(sequence.tables) {
            kept.clear();
            kept.extend_from_slice(table.blocks);
        }
        under_way.reserve(IN_FLIGHT);
        self.chooser.seats[seat] = Some(Run {
            slot,
            adapter: sequence.adapter,
            end: end.min(key.length).min(position + steps),
            looks_back: options.looks_back(),
            tables,
            position,
            under_way,
            last: self.chooser.steps,
            key,
        });
        Ok(seat)
    }

    /// The index of a slot's run: the one that it had, else a free one, else the least recently
    /// used run's. The run that was there ends, and its memory is for the next one.
    fn free_seat(&mut self, slot: u32) -> Result<(usize, Option<Run>)> {
        let rank = |run: &Option<Run>| match run {
            Some(run) if run.slot == slot => (0, 0),
            None => (1, 0),
            Some(run) => (2, run.last),
        };
        let seats = &self.chooser.seats;
        let seat = (0..SEATS).min_by_key(|seat| rank(&seats[*seat])).unwrap_or(0);
        // Read all notes first: a late one would be taken for a note of the next run.
        self.settle(seat, u64::MAX)?;
        Ok((seat, self.chooser.seats[seat].take()))
    }

    /// Launches a run's next step.
    fn launch_run(&mut self, seat: usize, ticket: Ticket) -> Result<()> {
        let mail = self.chooser.buffer(Sampling::Mail, seat)?;
        let none = || Error::new("choose", "a run", "none");
        let under_way = |run: &Option<Run>| run.as_ref().map_or(0, |run| run.under_way.len());
        if under_way(&self.chooser.seats[seat]) >= IN_FLIGHT {
            self.settle(seat, u64::MAX)?;
        }
        // Take the run out, so that a failure ends it.
        let mut run = self.chooser.seats[seat].take().ok_or_else(none)?;
        let (key, mut class) = self.class(&run.key)?;
        self.backend.write_pinned(&mail, note(run.position), &EMPTY.to_le_bytes())?;
        one_row(run.position, |step| self.launch(&mut class, step, &Watch::NONE))?;
        self.note_results(&class, 1, 1);
        self.classes.insert(key, class);
        run.under_way.push_back((ticket.number(), run.position));
        run.position += 1;
        self.chooser.steps += 1;
        run.last = self.chooser.steps;
        self.chooser.seats[seat] = Some(run);
        Ok(())
    }

    /// Reads the notes of a run's steps up to a ticket's number.
    fn settle(&mut self, seat: usize, last: u64) -> Result<()> {
        loop {
            let Some(run) = self.chooser.seats[seat].as_ref() else { return Ok(()) };
            let Some(&(number, position)) =
                run.under_way.front().filter(|(number, _)| *number <= last)
            else {
                return Ok(());
            };
            let mail = self.chooser.buffer(Sampling::Mail, seat)?;
            let found = self.await_note(&mail, note(position))?;
            let Chooser { seats, outcomes, slots, .. } = &mut self.chooser;
            let Some(run) = seats[seat].as_mut() else { return Ok(()) };
            run.under_way.pop_front();
            if let Some(slot) = slots.get_mut(run.slot as usize) {
                slot.push(found[0], run.looks_back);
            }
            if let Some(chosen) = outcomes.get_mut(number).and_then(|c| c.chosen.first_mut()) {
                chosen.choice = told(found);
            }
        }
    }

    /// Waits for a note.
    pub(super) fn await_note(&self, mail: &B::Buffer, word: usize) -> Result<[u32; 2]> {
        loop {
            if let Some(found) = self.backend.read_pinned(mail, word)? {
                return Ok(found);
            }
            std::hint::spin_loop();
        }
    }

    /// Waits for the token that a step chose.
    pub(super) fn settle_ticket(&mut self, ticket: Ticket) -> Result<()> {
        let number = ticket.number();
        let has = |run: &Run| run.under_way.iter().any(|(of, _)| *of == number);
        let seat = self.chooser.seats.iter().position(|run| run.as_ref().is_some_and(has));
        seat.map_or(Ok(()), |seat| self.settle(seat, number))
    }

    /// Samples on the host from the rows of the last submitted step: all rows, or those that need
    /// it if the device chooses for the others.
    pub(super) fn choose_by_host<'a>(
        &mut self,
        rows: impl Iterator<Item = (Last, &'a Choose<'a>)> + Clone,
        ticket: Ticket,
    ) -> Result<()> {
        let Some(vocab) = self.limits.vocab else { return Ok(()) };
        let all = !self.lowering.batched;
        let hosts = move |choose: &Choose<'_>| all || choose.needs_host();
        if !rows.clone().any(|(_, choose)| hosts(choose)) {
            return Ok(());
        }
        self.read_result(0)?;
        let logits = std::mem::take(&mut self.results[0]);
        let mut sampler = std::mem::take(&mut self.chooser.sampler);
        for (i, (Last { output, slot: own, end, given }, choose)) in rows.enumerate() {
            if !hosts(choose) {
                continue;
            }
            let slot = self.chooser.slot(own);
            if given.is_some() {
                slot.begin(choose);
            }
            let history = std::mem::take(&mut slot.history);
            let row = &logits[output * vocab..][..vocab];
            let Some(choices) = self.chooser.outcomes.get_mut(ticket.number()) else { continue };
            let chosen = &mut choices.chosen[i];
            let likeliest = &mut choices.likeliest[chosen.range()];
            chosen.choice = sampler.choose(row, &history, u64::from(end), choose, likeliest);
            let choice = chosen.choice;
            let slot = self.chooser.slot(own);
            slot.history = history;
            match choice {
                Ok(choice) => slot.push(choice.token, choose.options.looks_back()),
                Err(_) => slot.token = None,
            }
        }
        self.results[0] = logits;
        self.chooser.sampler = sampler;
        Ok(())
    }

    /// Words of a row's mask.
    pub(super) fn mask_words(&self) -> usize {
        mask_words(self.limits.vocab.unwrap_or(0))
    }

    /// Makes room for histories of `history` words and for `biases` pairs of biases.
    pub(super) fn make_room(&mut self, history: usize, biases: usize) -> Result<()> {
        let had = self.chooser.room;
        if !self.chooser.buffers.is_empty() && history <= had.history && biases <= had.biases {
            return Ok(());
        }
        let room = Room {
            history: history.next_power_of_two().max(had.history),
            biases: biases.next_power_of_two().max(had.biases),
            ..had
        };
        let vocab = self.lowering.program.shape(self.lowering.program.results[0]).width;
        let buffers = |part: &Sampling| {
            let words = part.words(vocab, room);
            let buffer = |_| match part {
                Sampling::Mail => self.backend.pinned(words),
                _ => self.backend.buffer(4 * words),
            };
            (0..part.copies(room)).map(buffer).collect::<Result<Vec<_>>>()
        };
        let buffers = Sampling::ALL.iter().map(buffers).collect::<Result<_>>()?;
        // Bound launches and steps in flight use the old buffers.
        for seat in 0..SEATS {
            self.settle(seat, u64::MAX)?;
        }
        self.settle_many(u64::MAX)?;
        self.chooser.many.forget();
        self.classes.clear();
        self.chooser.seats = Default::default();
        self.chooser.buffers = buffers;
        self.chooser.room = room;
        Ok(())
    }
}
