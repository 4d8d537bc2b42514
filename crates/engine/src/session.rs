//! One timeline of tokens and the cache that holds it.

use crate::adapters::{self, Adapter};
use crate::generate::{GenerateOptions, Generation, refused};
use crate::load::{OUTPUT_ROWS, Shared};
use crate::pool::{BlockTable, Copy, returns_to};
use crate::prefix::Key;
use crate::profile::Profiler;
use crate::prompt::Prompt;
use crate::slots::Slot;
use device::{Executor, Refusal, Ticket, Watch};
use formats::{Error, ErrorKind, Result};
use ops::sample::{Choice, Options};
use program::{CHOSEN, Choose, Group, Sequence, Step, StepKind, Table};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Which rows' logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// The rows of the last `n` tokens.
    Last(usize),
    /// The rows of every token.
    All,
}

/// Logits of consecutive tokens: `[rows, vocab]`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// Width of a row.
    pub vocab: usize,
    /// All rows, one after the other.
    pub data: Vec<f32>,
}

impl Logits {
    /// The rows.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.vocab)
    }
}

/// A mutable timeline: tokens, and their keys and values in the engine's pool.
pub struct Session {
    shared: Arc<Shared>,
    /// The epoch in which its tokens were cached: see [`Shared::executor_of`].
    epoch: u64,
    adapter: Option<Adapter>,
    tokens: Vec<u32>,
    tables: Vec<BlockTable>,
    /// Its place on the device, from its first step on.
    slot: Option<Slot>,
    /// The step behind the last token, where it was submitted before that token was known.
    ahead: Option<Ticket>,
    /// The last step, and rows with logits: kept so that a step allocates nothing.
    last: Option<Ticket>,
    outputs: Vec<u32>,
    /// Copies of shared blocks that the device has to make first.
    copies: Vec<Copy>,
    /// The likeliest tokens in the place of the one that was chosen last.
    likeliest: Vec<Choice>,
}

/// How a step is submitted; no ticket if it was stopped.
pub(crate) type Submit<'a> = dyn FnMut(&mut dyn Executor, &Step<'_>) -> Result<Option<Ticket>> + 'a;

/// The callback of a step: it is told the step's ticket and rows with logits.
pub(crate) type Then<'a> = dyn FnMut(&mut dyn Executor, Ticket, &[u32]) -> Result<()> + 'a;

impl Session {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let (context, chunk) = (shared.info.context, shared.options.chunk());
        let table = |(group, &kind): (usize, &Group)| {
            let (kind, context) = shared.options.span(kind, context);
            BlockTable::new(&shared.pool, group, kind, context, chunk)
        };
        let tables = shared.groups.iter().enumerate().map(table).collect();
        let outputs = Vec::with_capacity(OUTPUT_ROWS);
        let (adapter, tokens, slot, ahead, last, copies, likeliest) = Default::default();
        let epoch = shared.epoch();
        Session {
            shared,
            epoch,
            adapter,
            tokens,
            tables,
            slot,
            ahead,
            last,
            outputs,
            copies,
            likeliest,
        }
    }

    /// The adapter that it computes with.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// From now on computes with another adapter of the engine, or with none. Its timeline is empty
    /// then, unless it is the same.
    ///
    /// # Errors
    /// An adapter of another engine.
    pub fn set_adapter(&mut self, adapter: Option<Adapter>) -> Result<()> {
        self.shared.seats.check(adapter.as_ref())?;
        if self.adapter != adapter {
            self.clear();
            self.adapter = adapter;
        }
        Ok(())
    }

    /// The tokens whose keys and values are cached.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Positions left before the context is full; unlimited when it rotates.
    pub fn room(&self) -> usize {
        self.shared.room(self.tokens.len())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `len` tokens, or none if the cache no longer holds what continuing from
    /// there needs. A model that carries a state from token to token goes back to the last place
    /// before `len` whose state was kept: the end of a prompt, or a multiple of 256.
    pub fn truncate(&mut self, len: usize) {
        self.ahead = None;
        let len = len.min(self.tokens.len());
        // A block whose copy was not made holds nothing yet.
        let len = if self.copies.is_empty() { returns_to(&self.tables, len) } else { 0 };
        self.copies.clear();
        self.tokens.truncate(len);
        self.tables.iter_mut().for_each(|t| t.truncate(len));
    }

    /// How many tokens its timeline begins with that `tokens` begins with too.
    pub fn shares(&self, tokens: &[u32]) -> usize {
        self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count()
    }

    /// Goes back to the longest prefix shared with `tokens` and returns its length. At least one
    /// token is left to compute, so that there are logits.
    pub(crate) fn reuse(&mut self, tokens: &[u32]) -> usize {
        self.renew();
        self.truncate(self.shares(tokens).min(tokens.len().saturating_sub(1)));
        self.tokens.len()
    }

    /// Forgets everything if the executor was replaced since it was computed. Returns whether it
    /// was.
    fn renew(&mut self) -> bool {
        let now = self.shared.epoch();
        let stale = std::mem::replace(&mut self.epoch, now) != now;
        if stale {
            (self.last, self.slot) = (None, None);
            self.clear();
        }
        stale
    }

    /// Checks that what it has cached is still there.
    ///
    /// # Errors
    /// If the executor was replaced since it was computed: the session is empty then.
    fn current(&mut self) -> Result<()> {
        let held = self.tokens.len();
        if self.renew() && held > 0 {
            let expected = "tokens cached since the model was loaded again";
            let error = Error::new("session", expected, format!("{held} tokens from before"));
            return Err(error.hint("give it the whole text anew"));
        }
        Ok(())
    }

    /// Computes `tokens` after those already here and shows `visit` the logits of each from index
    /// `from` on. One token is a step of decoding, several are a prompt: see [`StepKind`].
    ///
    /// # Errors
    /// A token outside the vocabulary, or more tokens than the context has room for: nothing is
    /// computed then. Failures of the device.
    pub fn evaluate(
        &mut self,
        tokens: &[u32],
        from: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.shared.ready()?;
        self.current()?;
        self.check(tokens)?;
        let kind = if tokens.len() == 1 { StepKind::Decode } else { StepKind::Prompt };
        let width = self.shared.width();
        let mut done = 0;
        while done < tokens.len() {
            let mut then = |executor: &mut dyn Executor, ticket, outputs: &[u32]| {
                // Who wants none of them does not wait.
                let Some(_) = outputs.first() else { return Ok(()) };
                let rows = executor.read(ticket, 0)?.chunks_exact(width);
                outputs.iter().zip(rows).for_each(|(&row, x)| visit(done + row as usize, x));
                Ok(())
            };
            let submit =
                &mut |executor: &mut dyn Executor, step: &Step<'_>| executor.submit(step).map(Some);
            let rest = &tokens[done..];
            done += self.step(kind, rest, from.saturating_sub(done), None, submit, &mut then)?;
        }
        Ok(())
    }

    /// Another timeline with the same tokens, which goes its own way from here. Both read what is
    /// cached; whoever goes on inside a block that they share copies it first.
    pub fn fork(&self) -> Session {
        let mut fork = Session::new(self.shared.clone());
        fork.tables = self.tables.iter().map(|table| table.fork(self.tokens.len())).collect();
        fork.tokens.clone_from(&self.tokens);
        fork.adapter.clone_from(&self.adapter);
        fork.epoch = self.epoch;
        fork
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Takes the blocks of `tokens`, as if they had been computed, in an empty session.
    pub(crate) fn claim(&mut self, tokens: Vec<u32>) -> Result<()> {
        self.renew();
        let chunk = self.shared.options.chunk();
        while self.tokens.len() < tokens.len() {
            let done = self.tokens.len();
            let end = (done + chunk).min(tokens.len());
            self.extend(end)?;
            self.tokens.extend(&tokens[done..end]);
        }
        Ok(())
    }

    /// Takes what the engine has cached of a sequence's beginning, in an empty session.
    pub(crate) fn adopt(&mut self, tokens: &[u32]) {
        let (adapter, decoded) =
            (adapters::number(self.adapter.as_ref()), &vec![false; tokens.len()]);
        let key = Key { adapter, tokens, images: &[], decoded };
        let Some(mut tree) = self.shared.prefixes.tree_of(self.epoch) else { return };
        let found = tree.find(&key, tokens.len(), false);
        tree.adopt(&found, &mut self.tables);
        self.tokens.extend(&tokens[..found.len]);
    }

    /// Lets all requests of the engine share what is here. It counts as computed by decode steps,
    /// so that it is never taken for a prompt's exact bits.
    pub(crate) fn share(&self) {
        let adapter = adapters::number(self.adapter.as_ref());
        let decoded = &vec![true; self.tokens.len()];
        let key = Key { adapter, tokens: &self.tokens, images: &[], decoded };
        if let Some(mut tree) = self.shared.prefixes.tree_of(self.epoch) {
            tree.insert(&key, &self.tables);
        }
    }

    /// Appends block `b` of a cache layer, which is of `group`: see `device::Executor::read_block`.
    pub(crate) fn read(
        &self,
        layer: usize,
        group: usize,
        b: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let block = self.tables[group].number(b).ok_or_else(|| dropped(b))?;
        self.shared.executor_of(self.epoch)?.read_block(layer, block, bytes)
    }

    /// Replaces block `b` of a cache layer.
    pub(crate) fn write(&self, layer: usize, group: usize, b: usize, bytes: &[u8]) -> Result<()> {
        let block = self.tables[group].number(b).ok_or_else(|| dropped(b))?;
        self.shared.executor_of(self.epoch)?.write_block(layer, block, bytes)
    }

    /// Takes the blocks that positions below `end` need, or none.
    fn extend(&mut self, end: usize) -> Result<()> {
        let (start, copies) = (self.tokens.len(), &mut self.copies);
        let prefixes = &self.shared.prefixes;
        let extend = |table| prefixes.extend(table, start, end, copies);
        let taken = self.tables.iter_mut().try_for_each(extend);
        if taken.is_err() {
            self.tables.iter_mut().for_each(|table| table.disclaim(start));
            self.truncate(start);
        }
        taken
    }

    pub(crate) fn check(&self, tokens: &[u32]) -> Result<()> {
        self.shared.check(tokens, self.tokens.len())
    }

    /// Submits one chunk of `tokens`, with logits from index `from` on, and has the token after the
    /// last one chosen if asked to; returns its length. If it was stopped nothing has changed, and
    /// the length is 0.
    pub(crate) fn step(
        &mut self,
        kind: StepKind,
        tokens: &[u32],
        from: usize,
        choose: Option<&Choose<'_>>,
        submit: &mut Submit<'_>,
        then: &mut Then<'_>,
    ) -> Result<usize> {
        let shared = self.shared.clone();
        self.current()?;
        let mut rows = tokens.len().min(shared.options.chunk());
        if from < rows {
            rows = rows.min((from + OUTPUT_ROWS).max(1));
        }
        let start = self.tokens.len();
        self.outputs.clear();
        self.outputs.extend((from.min(rows)..rows).map(|r| r as u32));
        let last = rows == tokens.len();
        let choose = choose.filter(|_| last);
        self.ahead = None;
        self.extend(start + rows)?;
        let slot = self.slot()?;
        let tables = tables(&self.tables);
        let tables = &tables[..self.tables.len()];
        let adapter = adapters::seat(self.adapter.as_ref());
        let sequences = [Sequence { slot, adapter, choose, ..Sequence::new(rows, start, tables) }];
        let (tokens, outputs) = (&tokens[..rows], &self.outputs[..]);
        let step = Step { kind, tokens, sequences: &sequences, outputs, input: &[] };
        let mut executor = shared.executor_of(self.epoch)?;
        let submitted = copy(&mut self.copies, &mut **executor);
        let submitted = submitted.and_then(|()| submit(&mut **executor, &step));
        let done = match submitted {
            Ok(Some(ticket)) => {
                self.last = Some(ticket);
                then(&mut **executor, ticket, outputs).map(|()| rows)
            }
            Ok(None) => Ok(0),
            Err(why) => Err(why),
        };
        drop(executor);
        if done.is_err() {
            shared.failed();
        }
        match done {
            Ok(rows) if rows > 0 => self.tokens.extend(tokens),
            _ => self.truncate(start),
        }
        if kind == StepKind::Prompt && last {
            self.tables.iter_mut().for_each(BlockTable::keep);
        }
        done
    }

    /// Computes rows of several prompts in one step, each behind what its session holds, and shows
    /// `visit` the first result's row for each row in its range, part by part.
    ///
    /// # Errors
    /// As [`Session::evaluate`]; sessions keep what they had.
    pub(crate) fn prompts_together(
        parts: &mut [(&mut Session, &[u32], Range<usize>)],
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        let Some(shared) = parts.first().map(|(session, ..)| session.shared.clone()) else {
            return Ok(());
        };
        let done = Session::submit_prompts(parts, &shared, visit);
        if done.is_err() {
            shared.failed();
        }
        for (session, tokens, _) in parts {
            match done {
                Ok(()) => {
                    session.tokens.extend_from_slice(tokens);
                    // What is computed together may be gone back to, as the prompt of labels is.
                    session.tables.iter_mut().for_each(BlockTable::keep);
                }
                Err(_) => session.truncate(session.tokens.len()),
            }
        }
        done
    }

    fn submit_prompts(
        parts: &mut [(&mut Session, &[u32], Range<usize>)],
        shared: &Shared,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        for (session, tokens, _) in &mut *parts {
            session.current()?;
            session.ahead = None;
            session.extend(session.tokens.len() + tokens.len())?;
            session.slot()?;
        }
        let epoch = parts.iter().map(|(session, ..)| session.epoch).min().unwrap_or(0);
        let mut executor = shared.executor_of(epoch)?;
        for (session, ..) in &mut *parts {
            copy(&mut session.copies, &mut **executor)?;
        }
        let all: Vec<_> = parts.iter().map(|(session, ..)| tables(&session.tables)).collect();
        let sequences: Vec<Sequence<'_>> = parts
            .iter()
            .zip(&all)
            .map(|((session, tokens, _), tables)| Sequence {
                slot: session.slot.as_ref().map_or(0, |slot| slot.number),
                adapter: adapters::seat(session.adapter.as_ref()),
                ..Sequence::new(tokens.len(), session.tokens.len(), &tables[..session.tables.len()])
            })
            .collect();
        let tokens: Vec<u32> = parts.iter().flat_map(|(_, tokens, _)| *tokens).copied().collect();
        let (mut outputs, mut first) = (Vec::new(), 0);
        for (_, tokens, wanted) in parts.iter() {
            outputs.extend(wanted.clone().map(|row| (first + row) as u32));
            first += tokens.len();
        }
        let kind = StepKind::Prompt;
        let step =
            Step { kind, tokens: &tokens, sequences: &sequences, outputs: &outputs, input: &[] };
        let ticket = executor.submit(&step)?;
        if outputs.is_empty() {
            return Ok(());
        }
        executor.read(ticket, 0)?.chunks_exact(shared.width()).for_each(visit);
        Ok(())
    }

    /// Computes a token of each of several sessions of an engine, together in one step of decoding,
    /// then the token that each chooses behind it, and so on, until each has chosen `count`. They
    /// choose what they would choose alone. Returns what each chose; the last of them is not
    /// computed.
    ///
    /// # Errors
    /// Sessions of several engines or more than the engine was loaded for, a token outside the
    /// vocabulary, a context that is full, and logits of which nothing can be chosen: sessions keep
    /// what they had.
    pub fn generate_together(
        sessions: &mut [Session],
        tokens: &[u32],
        count: usize,
        options: &Options,
    ) -> Result<Vec<Vec<u32>>> {
        let Some(shared) = of_one_engine(sessions)? else { return Ok(Vec::new()) };
        if sessions.len() != tokens.len() {
            let found = format!("{} sessions, {} tokens", sessions.len(), tokens.len());
            return Err(Error::new("step", "a token for each session", found));
        }
        let mut histories: Vec<Vec<u32>> = sessions
            .iter()
            .zip(tokens)
            .map(|(session, token)| [&session.tokens[..], &[*token]].concat())
            .collect();
        let done = Session::choose_together(sessions, &shared, &mut histories, count, options);
        for (session, history) in sessions.iter_mut().zip(&histories) {
            let start = session.tokens.len();
            match done {
                // The token that was chosen last is nowhere in the cache.
                Ok(()) => session.tokens.extend(&history[start..start + count]),
                Err(_) => session.truncate(start),
            }
        }
        done?;
        Ok(histories.into_iter().map(|history| history[history.len() - count..].to_vec()).collect())
    }

    /// Appends `count` tokens that each session chooses to its history, whose last token is not yet
    /// computed.
    fn choose_together(
        sessions: &mut [Session],
        shared: &Shared,
        histories: &mut [Vec<u32>],
        count: usize,
        options: &Options,
    ) -> Result<()> {
        for (session, history) in sessions.iter_mut().zip(&*histories) {
            session.begin_together(history[history.len() - 1])?;
        }
        let ahead = shared.executor().ahead();
        let mut submitted = VecDeque::new();
        for n in 0..count + ahead {
            if n < count {
                let choose = |history| Choose { options, history, mask: None, logprobs: None };
                let chooses: Vec<Choose<'_>> =
                    histories.iter().map(Vec::as_slice).map(choose).collect();
                let known = histories.iter().zip(&*sessions);
                let token = |(history, session): (&Vec<u32>, &Session)| {
                    history.get(session.tokens.len() + n).copied().unwrap_or(CHOSEN)
                };
                let tokens: Vec<u32> = known.map(token).collect();
                let submit = |executor: &mut dyn Executor, step: &Step<'_>| executor.submit(step);
                let wanted: Vec<Option<&Choose<'_>>> = chooses.iter().map(Some).collect();
                let ticket = Session::submit_together(sessions, &tokens, n, &wanted, submit)?;
                submitted.push_back(ticket);
            }
            if n < ahead {
                continue;
            }
            let Some(ticket) = submitted.pop_front() else { break };
            let mut executor = shared.executor_of(epoch(sessions))?;
            let outcome = executor.wait(ticket)?;
            for (i, history) in histories.iter_mut().enumerate() {
                let choice = outcome.choice(i).map_err(|why| refused(why, history.len() - 1))?;
                history.push(choice.token);
            }
        }
        Ok(())
    }

    /// Makes ready for `token` in a step with other sessions.
    pub(crate) fn begin_together(&mut self, token: u32) -> Result<()> {
        self.current()?;
        self.ahead = None;
        self.check(&[token])?;
        self.slot().map(drop)
    }

    /// Submits a token of each session, `behind` tokens behind what it holds, with what is to be
    /// chosen behind it.
    pub(crate) fn submit_together<T>(
        sessions: &mut [Session],
        tokens: &[u32],
        behind: usize,
        chooses: &[Option<&Choose<'_>>],
        submit: impl FnOnce(&mut dyn Executor, &Step<'_>) -> Result<T>,
    ) -> Result<T> {
        for session in &mut *sessions {
            session.extend(session.tokens.len() + behind + 1)?;
        }
        let Some(shared) = sessions.first().map(|session| session.shared.clone()) else {
            return Err(Error::new("step", "at least one session", "none"));
        };
        let mut executor = shared.executor_of(epoch(sessions))?;
        for session in &mut *sessions {
            copy(&mut session.copies, &mut **executor)?;
        }
        let tables: Vec<_> = sessions.iter().map(|session| tables(&session.tables)).collect();
        let sequences: Vec<Sequence<'_>> = sessions
            .iter()
            .zip(tables.iter().zip(chooses))
            .map(|(session, (tables, choose))| Sequence {
                slot: session.slot.as_ref().map_or(0, |slot| slot.number),
                adapter: adapters::seat(session.adapter.as_ref()),
                choose: *choose,
                ..Sequence::new(1, session.tokens.len() + behind, &tables[..session.tables.len()])
            })
            .collect();
        let outputs: Vec<u32> = (0..sessions.len() as u32).collect();
        let (kind, sequences, outputs) = (StepKind::Decode, &sequences[..], &outputs[..]);
        submit(&mut **executor, &Step { kind, tokens, sequences, outputs, input: &[] })
    }

    /// Notes that a step with other sessions computed `token`, or takes back what it was to have.
    pub(crate) fn end_together(&mut self, token: Option<u32>) {
        match token {
            Some(token) => self.tokens.push(token),
            None => self.truncate(self.tokens.len()),
        }
    }

    /// This session's slot.
    fn slot(&mut self) -> Result<u32> {
        if self.slot.is_none() {
            self.slot = Some(self.shared.slots.take()?);
        }
        Ok(self.slot.as_ref().map_or(0, |slot| slot.number))
    }

    /// The likeliest tokens in the place of the one that was chosen last, as many as were asked
    /// for.
    pub(crate) fn likeliest(&self) -> &[Choice] {
        &self.likeliest
    }

    /// Notes the likeliest tokens in the place of the one that was chosen.
    pub(crate) fn tell_likeliest(&mut self, likeliest: &[Choice]) {
        self.likeliest.clear();
        self.likeliest.extend_from_slice(likeliest);
    }

    /// Computes `token`, the last of `sequence`, after those already here, and has the next one
    /// chosen; None if it was stopped, and then nothing has changed. Where it pays and `more` will
    /// be wanted, the step behind the next token is submitted too: until something else is done
    /// with this session, the token after it must be the one that was chosen.
    pub(crate) fn next(
        &mut self,
        token: u32,
        choose: &Choose<'_>,
        more: bool,
        watch: &Watch<'_>,
    ) -> Result<Option<std::result::Result<Choice, Refusal>>> {
        let shared = self.shared.clone();
        self.current()?;
        let (start, adapter) = (self.tokens.len(), adapters::seat(self.adapter.as_ref()));
        let mut executor = shared.executor_of(self.epoch)?;
        // A state that has gone on does not come back.
        let stays = shared.groups.iter().all(|group| !group.carried);
        let runs_ahead = stays && executor.ahead() > 0;
        // What a mask allows behind the next token is not known before it.
        let alone = choose.needs_host() || choose.mask.is_some();
        let further = usize::from(more && !alone && self.room() > 1 && runs_ahead);
        let before = self.ahead.take().filter(|ticket| executor.keeps(*ticket));
        let mut submit = |session: &mut Session, token: u32, start: usize| {
            copy(&mut session.copies, &mut **executor)?;
            let slot = session.slot()?;
            let tables = tables(&session.tables);
            let tables = &tables[..session.tables.len()];
            let sequences = [Sequence {
                slot,
                adapter,
                choose: Some(choose),
                ..Sequence::new(1, start, tables)
            }];
            let (kind, tokens) = (StepKind::Decode, &[token]);
            let step = Step { kind, tokens, sequences: &sequences, outputs: &[0], input: &[] };
            let ticket = executor.submit_watched(&step, watch)?;
            session.last = ticket;
            Ok(ticket)
        };
        let mut both = |session: &mut Session| {
            session.extend(start + 1 + further)?;
            let now = match before {
                Some(ticket) => Some(ticket),
                None => submit(session, token, start)?,
            };
            let ahead = match now {
                Some(_) if further > 0 => submit(session, CHOSEN, start + 1)?,
                _ => None,
            };
            Ok(now.map(|now| (now, ahead)))
        };
        let done = both(self).and_then(|submitted: Option<(Ticket, Option<Ticket>)>| {
            let Some((now, ahead)) = submitted else { return Ok(None) };
            let outcome = executor.wait(now)?;
            self.likeliest.clear();
            self.likeliest.extend_from_slice(outcome.likeliest(0));
            Ok(Some((outcome.choice(0), ahead)))
        });
        drop(executor);
        if done.is_err() {
            shared.failed();
        }
        match done {
            Ok(Some((choice, ahead))) => {
                self.tokens.push(token);
                self.ahead = ahead;
                Ok(Some(choice))
            }
            other => {
                self.truncate(start);
                other.map(|_| None)
            }
        }
    }

    /// Logits of `tokens` as one sequence, whatever was here before, `[rows, vocab]` of the rows
    /// asked for; a shared prefix outside them is not computed again.
    ///
    /// # Errors
    /// As [`Session::evaluate`].
    pub fn logits(&mut self, tokens: &[u32], rows: LogitRows) -> Result<Logits> {
        let first = match rows {
            LogitRows::All => 0,
            LogitRows::Last(n) => tokens.len().saturating_sub(n),
        };
        let reused = self.reuse(&tokens[..tokens.len().min(first + 1)]);
        let vocab = self.shared.width();
        let mut logits =
            Logits { vocab, data: Vec::with_capacity((tokens.len() - first).min(1 << 12) * vocab) };
        self.evaluate(&tokens[reused..], first - reused, &mut |_, row| {
            logits.data.extend_from_slice(row)
        })?;
        Ok(logits)
    }

    /// Steps that tell where their time goes, tokens being chosen by `sampling`.
    ///
    /// # Errors
    /// Settings that make no sense, such as a negative temperature.
    pub fn profiler(&mut self, sampling: &Options) -> Result<Profiler<'_>> {
        sampling.validate(self.shared.config.vocab)?;
        Ok(Profiler::new(std::slice::from_mut(self), sampling.clone()))
    }

    /// As [`Session::profiler`], for steps of a token of each of these sessions.
    ///
    /// # Errors
    /// None or those of several engines, and as [`Session::profiler`].
    pub fn profiler_together<'a>(
        sessions: &'a mut [Session],
        sampling: &Options,
    ) -> Result<Profiler<'a>> {
        let shared = of_one_engine(sessions)?
            .ok_or_else(|| Error::new("a timed step", "at least one session", "none"))?;
        sampling.validate(shared.config.vocab)?;
        Ok(Profiler::new(sessions, sampling.clone()))
    }

    /// Traced value `index` of the last step: `[rows, width]`. See [`crate::LoadOptions::trace`].
    ///
    /// # Errors
    /// If there was no step, or another session's behind it.
    pub fn traced(&self, index: usize) -> Result<Vec<f32>> {
        let none = || Error::new("a traced value", "a step before", "none");
        let ticket = self.last.ok_or_else(none)?;
        self.shared.executor_of(self.epoch)?.read(ticket, 1 + index).map(<[f32]>::to_vec)
    }

    /// Continues `prompt`. The prompt is a whole sequence: what it shares with the tokens already
    /// here is reused.
    ///
    /// # Errors
    /// A prompt that cannot be encoded, is empty, or does not fit the context.
    pub fn generate(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<Generation<'_>> {
        let shared = self.shared.clone();
        let tokens = shared.encode(&prompt.into())?;
        Generation::new(self, shared, tokens, options)
    }
}

/// What the sessions of one engine share; `None` of none.
fn of_one_engine(sessions: &[Session]) -> Result<Option<Arc<Shared>>> {
    let Some(shared) = sessions.first().map(|session| session.shared.clone()) else {
        return Ok(None);
    };
    if sessions.iter().all(|session| Arc::ptr_eq(&session.shared, &shared)) {
        return Ok(Some(shared));
    }
    Err(Error::new("step", "sessions of one engine", "several engines' sessions"))
}

/// The earliest load of the model that one of these sessions belongs to.
fn epoch(sessions: &[Session]) -> u64 {
    sessions.iter().map(|session| session.epoch).min().unwrap_or(0)
}

/// Makes the copies of shared blocks that are due.
fn copy(copies: &mut Vec<Copy>, executor: &mut dyn Executor) -> Result<()> {
    for copy in copies.iter() {
        executor.copy_blocks(copy.group, &[(copy.from.number(), copy.to)])?;
    }
    copies.clear();
    Ok(())
}

/// The error of a block that a session does not hold.
fn dropped(b: usize) -> Error {
    Error::new("cache", "a block that is held", format!("block {b} of the sequence"))
        .of(ErrorKind::Internal)
}

/// Cache groups that a model may have: one for each kind of window. Models have one or two.
pub(crate) const GROUPS: usize = 4;

/// The tables of a sequence as a replay takes them, one for each cache group; on the stack, since a
/// replay allocates nothing.
pub(crate) fn tables(of: &[BlockTable]) -> [Table<'_>; GROUPS] {
    let mut tables = [Table::default(); GROUPS];
    for (table, blocks) in tables.iter_mut().zip(of) {
        *table = blocks.table();
    }
    tables
}
