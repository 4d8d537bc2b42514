//! One timeline of tokens and the cache that holds it.

use crate::generate::{GenerateOptions, Generation};
use crate::load::{OUTPUT_ROWS, Shared};
use crate::pool::{BlockTable, Copy};
use crate::profile::Profiler;
use crate::prompt::Prompt;
use device::Executor;
use formats::Result;
use ops::sample::{Choice, Options};
use program::{Arguments, Table};
use std::sync::Arc;

/// Positions that a device may compute beyond those asked for.
const AHEAD: usize = 2;

/// Which rows' logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Of the last `n` tokens.
    Last(usize),
    /// Of every token.
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
    tokens: Vec<u32>,
    tables: Vec<BlockTable>,
    /// Step arguments, kept so that a replay allocates nothing.
    positions: Vec<u32>,
    outputs: Vec<u32>,
    /// Copies of shared blocks that the device has to make first.
    copies: Vec<Copy>,
}

impl Session {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let (context, chunk) = (shared.info.context, shared.options.chunk());
        let table = |(group, &window): (usize, &Option<usize>)| {
            let (window, context) = shared.options.span(window, context);
            BlockTable::new(&shared.pool, group, window, context, chunk)
        };
        let tables = shared.groups.iter().enumerate().map(table).collect();
        let (positions, outputs) = (Vec::with_capacity(chunk), Vec::with_capacity(OUTPUT_ROWS));
        Session { tokens: Vec::new(), tables, positions, outputs, copies: Vec::new(), shared }
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

    /// Keeps the first `len` tokens, or none if the cache no longer holds what continuing from there needs.
    pub fn truncate(&mut self, len: usize) {
        let len = len.min(self.tokens.len());
        let len = if self.tables.iter().all(|t| t.can_return_to(len)) { len } else { 0 };
        self.tokens.truncate(len);
        self.tables.iter_mut().for_each(|t| t.truncate(len));
    }

    /// Goes back to the longest prefix shared with `tokens` and returns its length. At least one token is left to
    /// compute, so that there are logits.
    pub(crate) fn reuse(&mut self, tokens: &[u32]) -> usize {
        let shared = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.truncate(shared.min(tokens.len().saturating_sub(1)));
        self.tokens.len()
    }

    /// Computes `tokens` after those already here and shows `visit` the logits of each from index `from` on.
    ///
    /// # Errors
    /// A token outside the vocabulary, or more tokens than the context has room for: nothing is computed then.
    pub fn evaluate(
        &mut self,
        tokens: &[u32],
        from: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.check(tokens)?;
        let mut done = 0;
        while done < tokens.len() {
            done += self.step(&tokens[done..], from.saturating_sub(done), done, visit)?;
        }
        Ok(())
    }

    /// Takes the blocks that positions below `end` need, or none.
    fn extend(&mut self, end: usize) -> Result<()> {
        let (start, copies) = (self.tokens.len(), &mut self.copies);
        let prefixes = &self.shared.prefixes;
        let extend = |table| prefixes.extend(table, start, end, copies);
        let taken = self.tables.iter_mut().try_for_each(extend);
        if taken.is_err() {
            self.truncate(self.tokens.len());
        }
        taken
    }

    pub(crate) fn check(&self, tokens: &[u32]) -> Result<()> {
        self.shared.check(tokens, self.tokens.len())
    }

    /// Computes one chunk of `tokens`, with logits from index `from` on; returns its length.
    pub(crate) fn step(
        &mut self,
        tokens: &[u32],
        from: usize,
        base: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<usize> {
        let run = &mut |executor: &mut dyn Executor, arguments: &Arguments<'_>| {
            executor.run(arguments).map(|()| true)
        };
        self.step_by(tokens, from, base, run, visit)
    }

    /// [`Session::step`] with a replay of the caller's choice, which tells whether it took place: if not, nothing has changed, and
    /// the length is 0.
    pub(crate) fn step_by(
        &mut self,
        tokens: &[u32],
        from: usize,
        base: usize,
        run: &mut dyn FnMut(&mut dyn Executor, &Arguments<'_>) -> Result<bool>,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<usize> {
        let shared = self.shared.clone();
        let mut rows = tokens.len().min(shared.options.chunk());
        if from < rows {
            rows = rows.min((from + OUTPUT_ROWS).max(1));
        }
        let start = self.tokens.len();
        self.positions.clear();
        self.positions.extend((start..start + rows).map(|p| p as u32));
        self.outputs.clear();
        self.outputs.extend((from.min(rows)..rows).map(|r| r as u32));
        self.extend(start + rows)?;
        let mut executor = shared.executor();
        let tables = tables(&self.tables);
        let arguments = Arguments {
            tokens: &tokens[..rows],
            positions: &self.positions,
            outputs: &self.outputs,
            tables: &tables[..self.tables.len()],
            input: &[],
        };
        let done = run(&mut **executor, &arguments);
        if !matches!(done, Ok(true)) {
            self.truncate(start);
            return done.map(|_| 0);
        }
        self.tokens.extend(&tokens[..rows]);
        let vocab = shared.config.vocab;
        for (&row, logits) in self.outputs.iter().zip(executor.result(0).chunks_exact(vocab)) {
            visit(base + row as usize, logits);
        }
        Ok(rows)
    }

    /// Computes `token` after those already here and has the device choose the next; None if the device does not choose, and
    /// then nothing is computed. `sequence` is all tokens up to and with this one.
    pub(crate) fn choose(
        &mut self,
        token: u32,
        options: &Options,
        sequence: &[u32],
    ) -> Result<Option<Choice>> {
        if options.needs_host() {
            return Ok(None);
        }
        let shared = self.shared.clone();
        let start = self.tokens.len();
        // Room for the steps that the device takes ahead.
        let end = start + 1 + AHEAD.min(self.room().saturating_sub(1));
        self.extend(end)?;
        let tables = tables(&self.tables);
        let arguments = Arguments {
            tokens: &[token],
            positions: &[start as u32],
            outputs: &[0],
            tables: &tables[..self.tables.len()],
            input: &[],
        };
        let chosen = shared.executor().choose(&arguments, options, sequence).transpose();
        if chosen.is_err() {
            self.truncate(start);
        }
        let chosen = chosen?;
        if chosen.is_some() {
            self.tokens.push(token);
        }
        Ok(chosen)
    }

    /// Logits of `tokens` as one sequence, whatever was here before; a shared prefix outside the rows asked for is
    /// not computed again.
    pub fn logits(&mut self, tokens: &[u32], rows: Rows) -> Result<Logits> {
        let first = match rows {
            Rows::All => 0,
            Rows::Last(n) => tokens.len().saturating_sub(n),
        };
        let reused = self.reuse(&tokens[..tokens.len().min(first + 1)]);
        let vocab = self.shared.config.vocab;
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
        Ok(Profiler::new(self, sampling.clone()))
    }

    /// Traced value `index` of the last step: `[rows, width]`. See [`crate::LoadOptions::trace`].
    pub fn traced(&self, index: usize) -> Vec<f32> {
        self.shared.executor().result(1 + index).to_vec()
    }

    /// Continues `prompt`. The prompt is a whole sequence: what it shares with the tokens already here is reused.
    ///
    /// # Errors
    /// A prompt that cannot be encoded, is empty, or does not fit the context.
    pub fn generate(
        &mut self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<Generation<'_>> {
        let shared = self.shared.clone();
        let tokens = prompt.into().encode(shared.tokenizer.as_ref(), shared.template())?;
        Generation::new(self, shared, tokens, options)
    }
}

/// Cache groups that a model may have: one for each kind of window. Models have one or two.
pub(crate) const GROUPS: usize = 4;

/// The tables as a replay takes them, the first of so many; on the stack, since a replay allocates nothing.
pub(crate) fn tables(of: &[BlockTable]) -> [Table<'_>; GROUPS] {
    let mut tables = [Table::default(); GROUPS];
    for (table, blocks) in tables.iter_mut().zip(of) {
        *table = blocks.table();
    }
    tables
}
