//! Sampling for steps of many sequences: rows of any slots in any step, with tokens that pass from
//! one step to the next without the host.
//!
//! Each row with logits has its own settings among the step's words. The last kernel of a step
//! writes each chosen token to the word of its slot, where the first kernel of a later step finds
//! it if the token is [`CHOSEN`]; to the end of the slot's history, which penalties look back on;
//! and to pinned memory for the host. So a step can be submitted before the tokens of the step
//! before it are known, whichever sequences are in either.
//!
//! A step may be submitted in two parts: what computes its logits, and behind it, once the masks of
//! its rows are known, what chooses from them. The second part is a class of its own, with the
//! words of the first one's class; it must follow before any other step writes over the logits. Its
//! rows are remembered in between, so that who submits it need not have the step any more.
//!
//! Histories and biases are divided into as many regions as there are rows. A slot that needs a
//! region keeps it until it is the least recently used. The host writes a region anew when a
//! sequence begins or the region is full; in between the device extends it. Masks, which change
//! with every token, are sent with the words of a step, one after the other.

use std::collections::VecDeque;
use std::ops::Range;

use formats::{Error, Result};
use ops::sample::Options;
use ops::sample::kernels::SETTINGS;
use ops::sample::kernels::advance::{EMPTY, NOTES};
use ops::sample::kernels::hand_on::{NONE, TARGETS};
use ops::sample::kernels::settings;
use program::{CHOSEN, Choose, Choosing, Sequence, Step};

use super::Backend;
use super::executor::{Class, GpuExecutor};
use super::lower::{Key, Room, Samples, Sampling};
use super::run::{Staged, filters, told};
use crate::choose::chosen;
use crate::{Ticket, Watch};

/// Free tokens of a history when it is written, beyond those that penalties look back on.
const AHEAD: usize = 64;

/// The slots' state on the device, and the steps whose tokens the host has not yet read.
#[derive(Default)]
pub(super) struct Many {
    /// For each slot, whether the device has the token that it chose last.
    on_device: Vec<bool>,
    regions: Vec<Region>,
    pending: VecDeque<Pending>,
    /// Spare buffers for later steps.
    spare: Vec<Vec<Row>>,
    /// Number of steps that chose tokens so far.
    steps: u64,
    /// Memory for the inputs of a step's choices.
    inputs: Inputs,
    /// The last step, if its choices are still to be submitted.
    unchosen: Option<Unchosen>,
    /// Memory for the rows of another such step.
    lasts: Vec<Option<Last>>,
    strides: Vec<usize>,
    /// Empty notes for all rows.
    empty: Vec<u8>,
}

/// A part of the histories and of the biases.
#[derive(Clone, Default)]
struct Region {
    /// The slot that owns it.
    slot: Option<u32>,
    /// The last step that used it.
    used: u64,
    /// The range in the region of the tokens that penalties look back on, if they are there.
    window: Option<Range<usize>>,
    /// The look-back of the penalties, in tokens.
    span: usize,
    /// The position of the token that follows the range.
    next: u64,
    /// The biases that are there.
    biases: Vec<(u32, f32)>,
}

/// The inputs of the kernels that choose a step's tokens.
#[derive(Default)]
struct Inputs {
    /// The settings and the targets of every row with logits.
    settings: Vec<u32>,
    targets: Vec<u32>,
    /// The bytes of the masks, one after the other.
    masks: Vec<u8>,
    /// The rows for which the device chooses.
    rows: Vec<Row>,
}

/// A step that was submitted without its choices.
struct Unchosen {
    /// Number of its ticket.
    number: u64,
    key: Key,
    /// The last row of each sequence, if it has logits.
    lasts: Vec<Option<Last>>,
}

/// The last row of a sequence, with logits.
#[derive(Clone, Copy)]
pub(super) struct Last {
    /// Its index among the rows with logits.
    pub(super) output: usize,
    pub(super) slot: u32,
    /// One past its cache index.
    pub(super) end: u32,
    /// Its token, unless that is what the slot chose last.
    pub(super) given: Option<u32>,
}

impl Last {
    /// A sequence's last row and its index among the rows with logits: see [`Step::last`].
    fn new(step: &Step<'_>, sequence: &Sequence<'_>, (row, output): (usize, usize)) -> Last {
        let given = Some(step.tokens[row]).filter(|token| *token != CHOSEN);
        Last { output, slot: sequence.slot, end: sequence.end(), given }
    }
}

/// The rows of a step that choose a token, and how.
pub(super) fn choosing<'a>(
    step: &Step<'a>,
) -> impl Iterator<Item = (Last, &'a Choose<'a>)> + Clone + use<'a> {
    let step = *step;
    step.choosing().map(move |Choosing { row, output, sequence, choose }| {
        (Last::new(&step, sequence, (row, output)), choose)
    })
}

/// A step whose tokens the host has not yet read.
struct Pending {
    /// Number of its ticket.
    number: u64,
    rows: Vec<Row>,
}

/// A row that chooses a token.
#[derive(Clone, Copy)]
struct Row {
    slot: u32,
    /// Index of its note, in words of pinned memory.
    note: usize,
    /// Index of the row among those that choose.
    index: usize,
    /// The look-back of its sampling chain, in tokens.
    looks_back: usize,
}

/// The penalties' look-back in tokens, as the device counts it.
fn span(options: &Options) -> usize {
    if options.penalises() { options.last_n.min(u32::MAX as usize) } else { 0 }
}

impl Many {
    /// For steps with at most `masks` bytes of masks.
    pub(super) fn new(room: Room, masks: usize) -> Many {
        let rows = if room.slots > 0 { room.rows } else { 0 };
        Many {
            on_device: vec![false; room.slots],
            regions: vec![Region::default(); rows],
            pending: VecDeque::with_capacity(NOTES as usize),
            spare: (0..NOTES).map(|_| Vec::with_capacity(rows)).collect(),
            inputs: Inputs {
                settings: Vec::with_capacity(rows * SETTINGS as usize),
                targets: Vec::with_capacity(rows * TARGETS as usize),
                masks: Vec::with_capacity(if room.slots > 0 { masks } else { 0 }),
                rows: Vec::new(),
            },
            unchosen: None,
            lasts: Vec::with_capacity(rows),
            strides: Vec::new(),
            empty: EMPTY.to_le_bytes().repeat(2 * rows),
            steps: 0,
        }
    }

    /// Forgets the state on the device, and steps in flight.
    pub(super) fn forget(&mut self) {
        self.on_device.fill(false);
        self.forget_unchosen();
        self.regions.fill(Region::default());
        let rows = self.pending.drain(..).map(|pending| pending.rows);
        self.spare.extend(rows);
    }

    /// Forgets the step whose choices are still to be submitted; returns its number.
    fn forget_unchosen(&mut self) -> Option<u64> {
        let Unchosen { number, key, lasts } = self.unchosen.take()?;
        (self.lasts, self.strides) = (lasts, key.strides);
        Some(number)
    }

    /// The region of a slot: its own, else a free one, else the least recently used.
    fn region(&mut self, slot: u32) -> Result<usize> {
        let rank =
            |region: &Region| (region.slot != Some(slot), region.slot.is_some(), region.used);
        let found = (0..self.regions.len()).min_by_key(|at| rank(&self.regions[*at]));
        let found = found.ok_or_else(|| Error::new("choose", "room for a history", "none"))?;
        let region = &mut self.regions[found];
        if region.slot != Some(slot) {
            region.slot = Some(slot);
            region.window = None;
            region.biases.clear();
        }
        region.used = self.steps;
        Ok(found)
    }
}

impl<B: Backend> GpuExecutor<B> {
    /// Submits a step of many sequences; false if it was stopped.
    pub(super) fn submit_many(
        &mut self,
        step: &Step<'_>,
        ticket: Ticket,
        watch: &Watch<'_>,
    ) -> Result<bool> {
        self.find_tokens(step, ticket)?;
        let mut key = self.key(step);
        let inputs = self.inputs(choosing(step), ticket, key.outputs)?;
        key.samples = self.samples(&inputs, false);
        let tokens = std::mem::take(&mut self.tokens);
        let Inputs { settings, targets, masks, .. } = &inputs;
        let staged = Staged::Rows { settings, targets, masks };
        let whole = self.replay_as(key, &Step { tokens: &tokens, ..*step }, staged, watch)?;
        self.tokens = tokens;
        self.expect(inputs, ticket, whole);
        if !whole {
            return Ok(false);
        }
        self.choose_by_host(choosing(step), ticket).map(|()| true)
    }

    /// Submits a step without its choices.
    pub(super) fn forward_many(&mut self, step: &Step<'_>, ticket: Ticket) -> Result<()> {
        self.drop_unchosen();
        self.latest.clear();
        self.find_tokens(step, ticket)?;
        let key = self.key(step);
        let many = &mut self.chooser.many;
        let (mut lasts, mut strides) =
            (std::mem::take(&mut many.lasts), std::mem::take(&mut many.strides));
        lasts.clear();
        lasts.extend(step.placed().map(|(first, sequence)| {
            step.last(first, sequence).map(|last| Last::new(step, sequence, last))
        }));
        strides.clear();
        strides.extend(&key.strides);
        let own = Key { strides, ..key };
        let tokens = std::mem::take(&mut self.tokens);
        let given = Step { tokens: &tokens, ..*step };
        self.replay_as(key, &given, Staged::Nothing, &Watch::NONE)?;
        self.tokens = tokens;
        self.chooser.many.unchosen = Some(Unchosen { number: ticket.number(), key: own, lasts });
        Ok(())
    }

    /// Submits the choices of the step that was submitted last, without them: for each of its
    /// sequences how it chooses, if it does.
    pub(super) fn choose_many(
        &mut self,
        choices: &[Option<Choose<'_>>],
        ticket: Ticket,
    ) -> Result<()> {
        let Some(unchosen) = self.chooser.many.unchosen.take() else {
            return Err(ticket.unknown());
        };
        let Unchosen { mut key, lasts, .. } = unchosen;
        let rows = lasts.iter().zip(choices);
        let rows = rows.filter_map(|(last, choose)| Some(((*last)?, choose.as_ref()?)));
        let inputs = self.inputs(rows.clone(), ticket, key.outputs)?;
        key.samples = self.samples(&inputs, true);
        if key.samples.is_some() {
            let (known, mut class) = self.class(&key)?;
            self.send_inputs(&class, &inputs)?;
            // It has no exchange with other devices, for which the step would be needed.
            let nothing =
                Step { kind: key.kind, tokens: &[], sequences: &[], outputs: &[], input: &[] };
            self.launch(&mut class, &nothing, &Watch::NONE)?;
            self.keep(known, class);
        }
        self.expect(inputs, ticket, true);
        self.choose_by_host(rows, ticket)?;
        let many = &mut self.chooser.many;
        (many.lasts, many.strides) = (lasts, key.strides);
        Ok(())
    }

    /// Checks the choices of the step that was submitted without them.
    pub(super) fn check_choices(
        &self,
        choices: &[Option<Choose<'_>>],
        ticket: Ticket,
    ) -> Result<()> {
        let own = self.chooser.many.unchosen.as_ref();
        let own = own.filter(|unchosen| unchosen.number == ticket.number());
        let lasts = &own.ok_or_else(|| ticket.unknown())?.lasts;
        let wrong = |expected: &str, found: String| Err(Error::new("step", expected, found));
        if lasts.len() != choices.len() {
            let expected = "a choice, or none, for each of its sequences";
            return wrong(expected, format!("{} for {}", choices.len(), lasts.len()));
        }
        for (last, choose) in lasts.iter().zip(choices) {
            let Some(choose) = choose else { continue };
            choose.check(&self.limits)?;
            if last.is_none() {
                let expected = "logits of the last row of a sequence that chooses";
                return wrong(expected, "none".to_owned());
            }
        }
        Ok(())
    }

    /// Forgets the choices of a step that was submitted without them: another step writes over its
    /// logits.
    pub(super) fn drop_unchosen(&mut self) {
        if let Some(number) = self.chooser.many.forget_unchosen() {
            self.chooser.outcomes.forget_one(number);
        }
    }

    /// Makes room for a step, and finds its tokens as far as the device does not have them.
    fn find_tokens(&mut self, step: &Step<'_>, ticket: Ticket) -> Result<()> {
        self.chooser.outcomes.begin(ticket);
        self.make_room_for(step)?;
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.clear();
        tokens.extend_from_slice(step.tokens);
        for (first, sequence) in step.placed() {
            let slot = sequence.slot;
            if tokens[first] == CHOSEN && !self.chooser.many.on_device[slot as usize] {
                self.settle_slot(slot)?;
                tokens[first] = chosen(Some(self.chooser.slot(slot)), slot)?;
            }
        }
        self.tokens = tokens;
        self.prepare(step)
    }

    /// The inputs of the choices of these rows, of a step that has `outputs` rows of logits.
    fn inputs<'a>(
        &mut self,
        rows: impl Iterator<Item = (Last, &'a Choose<'a>)>,
        ticket: Ticket,
        outputs: usize,
    ) -> Result<Inputs> {
        while self.chooser.many.pending.len() >= NOTES as usize {
            self.settle_first()?;
        }
        let mut inputs = std::mem::take(&mut self.chooser.many.inputs);
        inputs.settings.clear();
        inputs.settings.resize(outputs * SETTINGS as usize, 0);
        inputs.targets.clear();
        inputs.targets.resize(outputs * TARGETS as usize, NONE);
        inputs.masks.clear();
        inputs.rows = self.chooser.many.spare.pop().unwrap_or_default();
        inputs.rows.clear();
        let turn = (self.chooser.many.steps % u64::from(NOTES)) as usize;
        let first_note = turn * self.limits.outputs;
        for (index, (last, choose)) in rows.enumerate() {
            let Last { output, slot, .. } = last;
            if let Some(choices) = self.chooser.outcomes.get_mut(ticket.number()) {
                choices.push(choose);
            }
            if choose.needs_host() {
                // The host must know the tokens that it looks back on.
                self.settle_slot(slot)?;
                self.chooser.many.on_device[slot as usize] = false;
                continue;
            }
            let first = choose.mask.map(|_| (inputs.masks.len() / 4) as u32);
            let mask = choose.mask.map(|mask| &mask[..self.mask_words()]);
            let mask = mask.unwrap_or_default().iter();
            inputs.masks.extend(mask.flat_map(|word| word.to_le_bytes()));
            let (own, place) = self.place(last, choose, first)?;
            let note = first_note + output;
            inputs.settings[output * SETTINGS as usize..][..own.len()].copy_from_slice(&own);
            let target = [slot, place, note as u32];
            inputs.targets[output * TARGETS as usize..][..target.len()].copy_from_slice(&target);
            let looks_back = choose.options.looks_back();
            inputs.rows.push(Row { slot, note: 2 * note, index, looks_back });
        }
        if !inputs.rows.is_empty() {
            let mail = self.chooser.buffer(Sampling::Mail, 0)?;
            let empty = &self.chooser.many.empty[..8 * outputs];
            self.backend.write_pinned(&mail, 2 * first_note, empty)?;
        }
        Ok(inputs)
    }

    /// How a step with these inputs chooses, if the device chooses for any of its rows; `alone` if
    /// its logits are there.
    fn samples(&self, inputs: &Inputs, alone: bool) -> Option<Samples> {
        let filters = inputs.settings.chunks_exact(SETTINGS as usize).any(filters);
        (!inputs.rows.is_empty()).then_some(Samples { filters, seat: None, alone })
    }

    /// Sends the inputs of choices to a class that does nothing else.
    fn send_inputs(&mut self, class: &Class<B>, inputs: &Inputs) -> Result<()> {
        let words = inputs.settings.iter().chain(&inputs.targets);
        self.staged.clear();
        self.staged.extend(words.flat_map(|word| word.to_le_bytes()));
        let (own_settings, own_targets) = self.staged.split_at(4 * inputs.settings.len());
        let settings = class.part(self, &class.words.settings)?;
        let targets = class.part(self, &class.words.targets)?;
        let masks = self.chooser.buffer(Sampling::Masks, 0)?;
        let pieces =
            [(&settings, own_settings), (&targets, own_targets), (&masks, &inputs.masks[..])];
        self.ring.send(&*self.backend, self.sizes.slot, &pieces)
    }

    /// Expects the notes of a step whose choices were submitted, if it was not stopped, and keeps
    /// the memory of its inputs.
    fn expect(&mut self, mut inputs: Inputs, ticket: Ticket, submitted: bool) {
        let many = &mut self.chooser.many;
        let rows = std::mem::take(&mut inputs.rows);
        many.inputs = inputs;
        if rows.is_empty() || !submitted {
            many.spare.push(rows);
            return;
        }
        rows.iter().for_each(|row| many.on_device[row.slot as usize] = true);
        many.pending.push_back(Pending { number: ticket.number(), rows });
        many.steps += 1;
    }

    /// Makes room for the histories and biases of a step's rows.
    fn make_room_for(&mut self, step: &Step<'_>) -> Result<()> {
        let (mut history, mut biases) = (0, 0);
        for Choosing { sequence, choose, .. } in step.choosing() {
            let window = span(choose.options).min(sequence.end() as usize);
            history = history.max(if window > 0 { window + AHEAD } else { 0 });
            biases = biases.max(choose.options.logit_bias.len());
        }
        self.make_room(history, biases)
    }

    /// The settings of a row for which the device chooses, whose mask begins at the word `mask`,
    /// and the index of its token in the histories, or `NONE`.
    fn place(
        &mut self,
        last: Last,
        choose: &Choose<'_>,
        mask: Option<u32>,
    ) -> Result<([u32; SETTINGS as usize], u32)> {
        let Last { slot, end, given, .. } = last;
        let (options, position) = (choose.options, u64::from(end));
        let (span, pairs) = (span(options), options.logit_bias.len());
        if given.is_some() {
            self.settle_slot(slot)?;
        }
        let last = self.chooser.slot(slot).token;
        if given.is_some() && span == 0 {
            self.chooser.slot(slot).begin(choose);
        }
        if span == 0 && pairs == 0 {
            return Ok((settings(options, position, 0..0, 0..0, mask), NONE));
        }
        let Room { history, biases, .. } = self.chooser.room;
        let at = self.chooser.many.region(slot)?;
        if self.chooser.many.regions[at].biases != options.logit_bias {
            self.write_biases(at, &options.logit_bias)?;
        }
        let first = (at * biases) as u32;
        let own_biases = first..first + pairs as u32;
        if span == 0 {
            self.chooser.many.regions[at].window = None;
            return Ok((settings(options, position, 0..0, own_biases, mask), NONE));
        }
        let region = &self.chooser.many.regions[at];
        // The region continues if the token at this position is the one that was chosen for it.
        let follows =
            region.span == span && region.next == position && (given.is_none() || given == last);
        let known = region.window.clone().filter(|window| follows && window.end < history);
        let window = match known {
            Some(window) => window,
            None => self.write_history(at, slot, given.map(|_| choose))?,
        };
        let region = &mut self.chooser.many.regions[at];
        let end = window.end + 1;
        region.window = Some(end.saturating_sub(span).max(window.start)..end);
        (region.span, region.next) = (span, position + 1);
        let start = at * history;
        let own = (start + window.start) as u32..(start + window.end) as u32;
        let place = own.end;
        Ok((settings(options, position, own, own_biases, mask), place))
    }

    /// Writes the history of a slot to its region: the given tokens, or those that it chose itself.
    /// Returns the range in the region.
    fn write_history(
        &mut self,
        region: usize,
        slot: u32,
        given: Option<&Choose<'_>>,
    ) -> Result<Range<usize>> {
        self.settle_slot(slot)?;
        if let Some(choose) = given {
            self.chooser.slot(slot).begin(choose);
        }
        let tokens = std::mem::take(&mut self.chooser.slot(slot).history);
        let count = tokens.len();
        let words = tokens.iter().copied();
        let sent = self.send_words(Sampling::History, region * self.chooser.room.history, words);
        self.chooser.slot(slot).history = tokens;
        sent.map(|()| 0..count)
    }

    fn write_biases(&mut self, region: usize, biases: &[(u32, f32)]) -> Result<()> {
        let words = biases.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]);
        self.send_words(Sampling::Biases, 2 * region * self.chooser.room.biases, words)?;
        let kept = &mut self.chooser.many.regions[region].biases;
        kept.clear();
        kept.extend_from_slice(biases);
        Ok(())
    }

    /// Sends words to an array, from index `first` on.
    fn send_words(
        &mut self,
        to: Sampling,
        first: usize,
        words: impl Iterator<Item = u32>,
    ) -> Result<()> {
        let mut bytes = std::mem::take(&mut self.staged);
        bytes.clear();
        bytes.extend(words.flat_map(u32::to_le_bytes));
        let buffer = self.chooser.buffer(to, 0)?;
        let range = 4 * first..4 * first + bytes.len();
        let sent = match range.is_empty() {
            true => Ok(()),
            false => self.backend.part(&buffer, range).and_then(|part| self.send(&part, &bytes)),
        };
        self.staged = bytes;
        sent
    }

    /// Waits for the tokens of the earliest pending step.
    fn settle_first(&mut self) -> Result<()> {
        let Some(Pending { number, rows }) = self.chooser.many.pending.pop_front() else {
            return Ok(());
        };
        let mail = self.chooser.buffer(Sampling::Mail, 0)?;
        for &Row { slot, note, index, looks_back } in &rows {
            let found = self.await_note(&mail, note)?;
            self.chooser.slot(slot).push(found[0], looks_back);
            let choices = self.chooser.outcomes.get_mut(number);
            if let Some(chosen) = choices.and_then(|choices| choices.chosen.get_mut(index)) {
                chosen.choice = told(found);
            }
        }
        self.chooser.many.spare.push(rows);
        Ok(())
    }

    /// Waits for the tokens of all steps up to a ticket's number.
    pub(super) fn settle_many(&mut self, number: u64) -> Result<()> {
        while self.chooser.many.pending.front().is_some_and(|first| first.number <= number) {
            self.settle_first()?;
        }
        Ok(())
    }

    /// Waits for the tokens of a slot.
    fn settle_slot(&mut self, slot: u32) -> Result<()> {
        let has = |pending: &&Pending| pending.rows.iter().any(|row| row.slot == slot);
        let last = self.chooser.many.pending.iter().rev().find(has);
        last.map(|pending| pending.number).map_or(Ok(()), |number| self.settle_many(number))
    }
}
