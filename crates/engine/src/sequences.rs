//! The sequences of requests while they run: their block tables, and their part in the prefix tree.
//!
//! This is the [`Cache`] that the scheduler asks; it knows no device. A position is computed by a
//! step of one kind, noted beside its token. What is recomputed after a preemption is computed by
//! steps of the kind that computed it first, so that a request's tokens do not depend on who ran
//! beside it.

use crate::pool::{BlockTable, Copy, Pool, returns_to};
use crate::prefix::{Key, Miss, Prefixes};
use crate::schedule::{Cache, Id, Pending};
use program::{BLOCK_TOKENS, CHOSEN, Group};
use std::collections::HashMap;

/// A request's sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    adapter: u64,
    /// The prompt's tokens and those chosen since, then one [`CHOSEN`] for each that is still being
    /// chosen.
    tokens: Vec<u32>,
    /// For each token whether a decode step computes it.
    decoded: Vec<bool>,
    /// Positions whose computation has been claimed.
    computed: usize,
    /// Positions whose computation was submitted to the device.
    submitted: usize,
    /// Whether cached positions count only where a step of the same kind computed them.
    exact: bool,
    /// Whether its cache may hold what must not be reused.
    spoiled: bool,
    /// Whether nothing of it is to be computed for now.
    held: bool,
    /// One for each cache group while it runs; else none.
    tables: Vec<BlockTable>,
    /// Positions found in the cache when it was first admitted, and why no more; none before.
    reused: Option<(usize, Option<Miss>)>,
    /// Positions that it had when it was preempted last, and how many it has lost in all.
    had: usize,
    lost: usize,
}

impl Sequence {
    /// A sequence that begins with a prompt, with room for `most` more tokens. `exact`: prompts
    /// reuse only what prompts computed.
    pub(crate) fn new(adapter: u64, prompt: Vec<u32>, most: usize, exact: bool) -> Sequence {
        // Longer ones make room as they grow.
        const ROOM: usize = 1 << 16;
        let (mut tokens, mut decoded) = (prompt, Vec::new());
        tokens.reserve_exact(most.min(ROOM));
        decoded.reserve_exact(tokens.len() + most.min(ROOM));
        decoded.resize(tokens.len(), false);
        Sequence {
            adapter,
            decoded,
            tokens,
            computed: 0,
            submitted: 0,
            exact,
            spoiled: false,
            held: false,
            tables: Vec::new(),
            reused: None,
            had: 0,
            lost: 0,
        }
    }

    /// Appends the token that is being chosen, as [`CHOSEN`]: a step can compute it before it is
    /// known.
    pub(crate) fn promise(&mut self) {
        self.tokens.push(CHOSEN);
        self.decoded.push(true);
    }

    /// Takes the token that was chosen: in the place of the first that was promised, or as one
    /// more.
    pub(crate) fn push(&mut self, token: u32) {
        let known = self.known();
        match self.tokens.get_mut(known) {
            Some(promised) => *promised = token,
            None => {
                self.tokens.push(token);
                self.decoded.push(true);
            }
        }
    }

    /// How many of its tokens are known: all but those that were promised.
    pub(crate) fn known(&self) -> usize {
        let promised = self.tokens.iter().rev().take_while(|token| **token == CHOSEN);
        self.tokens.len() - promised.count()
    }

    /// Takes back what was promised, and the row from which the first of it was to be chosen: it is
    /// computed again.
    pub(crate) fn recall(&mut self) {
        self.take_back(self.known().saturating_sub(1));
    }

    /// Takes back what was promised, and the rows that were computed of it.
    pub(crate) fn withdraw(&mut self) {
        self.take_back(self.known());
    }

    /// Takes back what was promised, and all rows but the first `computed`.
    fn take_back(&mut self, computed: usize) {
        let known = self.known();
        self.tokens.truncate(known);
        self.decoded.truncate(known);
        let computed = self.computed.min(computed);
        if computed < self.computed && !self.tables.is_empty() {
            let computed = returns_to(&self.tables, computed);
            self.tables.iter_mut().for_each(|table| table.truncate(computed));
            (self.computed, self.submitted) = (computed, self.submitted.min(computed));
        }
    }

    /// Keeps it from being computed, or no longer does.
    pub(crate) fn hold(&mut self, held: bool) {
        self.held = held;
    }

    /// Keeps its cache from being reused by anybody.
    pub(crate) fn spoil(&mut self) {
        self.spoiled = true;
    }

    /// Its tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Positions whose computation has been claimed.
    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    /// Whether a decode step computes a position.
    #[cfg(test)]
    pub(crate) fn is_decoded(&self, position: usize) -> bool {
        self.decoded.get(position).is_some_and(|&decoded| decoded)
    }

    /// One for each cache group; empty unless it runs.
    pub(crate) fn tables(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Positions that are computed again since the cache has lost them after a preemption.
    pub(crate) fn recomputed(&self) -> usize {
        self.lost
    }

    /// Positions found in the cache when it was first admitted, and why no more.
    pub(crate) fn reused(&self) -> Option<(usize, Option<Miss>)> {
        self.reused
    }

    /// The positions that the cache holds, as a key of the prefix tree.
    fn cached(&self) -> Key<'_> {
        let len = self.submitted.min(self.known());
        let (tokens, decoded) = (&self.tokens[..len], &self.decoded[..len]);
        Key { adapter: self.adapter, tokens, images: &[], decoded }
    }
}

/// The sequences of all requests, and the cache that the running ones share.
#[derive(Debug)]
pub(crate) struct Sequences {
    pool: Pool,
    prefixes: Prefixes,
    /// The epoch in which they are computed: see `Shared::executor_of`.
    epoch: u64,
    /// Each cache group, with the number of positions that its tables are made for.
    groups: Vec<(Group, usize)>,
    /// Rows of a step at most.
    chunk: usize,
    sequences: HashMap<Id, Sequence>,
    /// Copies that the device has to make before the next step, in this order.
    pub(crate) copies: Vec<Copy>,
}

impl Sequences {
    /// No sequences, on a pool with these groups: the window of each, and the positions that a
    /// table is made for.
    pub(crate) fn new(
        pool: Pool,
        prefixes: Prefixes,
        epoch: u64,
        groups: &[(Group, usize)],
        chunk: usize,
    ) -> Sequences {
        Sequences {
            pool,
            prefixes,
            epoch,
            groups: groups.to_vec(),
            chunk,
            sequences: HashMap::new(),
            copies: Vec::new(),
        }
    }

    /// Takes a sequence in.
    pub(crate) fn insert(&mut self, id: Id, sequence: Sequence) {
        self.sequences.insert(id, sequence);
    }

    /// A sequence.
    pub(crate) fn get(&self, id: Id) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// A sequence, to be changed.
    pub(crate) fn get_mut(&mut self, id: Id) -> Option<&mut Sequence> {
        self.sequences.get_mut(&id)
    }

    /// Takes a sequence out that no longer runs.
    pub(crate) fn remove(&mut self, id: Id) -> Option<Sequence> {
        self.sequences.remove(&id)
    }

    /// Notes that the device was given all that a sequence has claimed.
    pub(crate) fn submitted(&mut self, id: Id) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.submitted = sequence.computed;
        }
    }

    /// Lets others share what a running sequence has computed so far.
    pub(crate) fn keep(&mut self, id: Id) {
        let sequence = self.sequences.get(&id).filter(|sequence| !sequence.spoiled);
        if let Some((sequence, mut tree)) = sequence.zip(self.prefixes.tree_of(self.epoch)) {
            tree.insert(&sequence.cached(), &sequence.tables);
        }
    }

    /// Lets others share the states that a running sequence passed in its last rows, which it is
    /// about to drop.
    pub(crate) fn keep_states(&mut self, id: Id, rows: usize) {
        if !self.groups.iter().any(|(kind, _)| kind.carried) {
            return;
        }
        let sequence = self.sequences.get(&id).filter(|sequence| !sequence.spoiled);
        let Some(sequence) = sequence else { return };
        let mut cached = sequence.cached();
        let whole = cached.tokens.len() / BLOCK_TOKENS * BLOCK_TOKENS;
        if whole + rows <= cached.tokens.len() {
            return;
        }
        (cached.tokens, cached.decoded) = (&cached.tokens[..whole], &cached.decoded[..whole]);
        if let Some(mut tree) = self.prefixes.tree_of(self.epoch) {
            tree.insert(&cached, &sequence.tables);
        }
    }

    /// Extends a running sequence's tables; false, with nothing changed, if there are too few
    /// blocks.
    fn extend(&mut self, id: Id, rows: usize) -> bool {
        let Sequences { prefixes, sequences, copies, .. } = self;
        let Some(sequence) = sequences.get_mut(&id) else { return false };
        let (start, end) = (sequence.computed, sequence.computed + rows);
        let mut tables = sequence.tables.iter_mut();
        if tables.any(|table| prefixes.extend(table, start, end, copies).is_err()) {
            sequence.tables.iter_mut().for_each(|table| table.truncate(start));
            return false;
        }
        sequence.computed = end;
        true
    }
}

impl Cache for Sequences {
    fn fits(&mut self, id: Id) -> bool {
        let Some(sequence) = self.sequences.get(&id) else { return false };
        let end = sequence.tokens.len() + 1;
        (0..self.groups.len()).all(|group| {
            let table = |sequence: &Sequence, end: usize| {
                sequence.tables.get(group).map_or(0, |table| table.needs(sequence.computed, end))
            };
            let promised = |other: &Sequence| table(other, other.tokens.len() + 1);
            let promised: usize = self.sequences.values().map(promised).sum();
            let (kind, context) = self.groups[group];
            let empty = BlockTable::new(&self.pool, group, kind, context, self.chunk);
            let cached = self.prefixes.tree().evictable(group);
            promised + empty.needs(0, end) <= self.pool.free(group) + cached
        })
    }

    fn admit(&mut self, id: Id) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let table = |(group, &(kind, context)): (usize, &(Group, usize))| {
            BlockTable::new(&self.pool, group, kind, context, self.chunk)
        };
        sequence.tables = self.groups.iter().enumerate().map(table).collect();
        let (tokens, decoded) = (&sequence.tokens[..], &sequence.decoded[..]);
        let key = Key { adapter: sequence.adapter, tokens, images: &[], decoded };
        // One position is left to compute, so that there are logits. Who was preempted goes on with
        // the bits that it had.
        let most = sequence.tokens.len().saturating_sub(1);
        let exact = sequence.exact || sequence.reused.is_some();
        // Work of another epoch fails before it is computed.
        let Some(mut tree) = self.prefixes.tree_of(self.epoch) else { return };
        let found = tree.find(&key, most, exact);
        tree.adopt(&found, &mut sequence.tables);
        let kinds = tree.decoded(&found);
        sequence.decoded.iter_mut().zip(kinds).for_each(|(own, kind)| *own = kind);
        (sequence.computed, sequence.submitted) = (found.len, found.len);
        sequence.lost += std::mem::take(&mut sequence.had).saturating_sub(found.len);
        sequence.reused.get_or_insert((found.len, found.miss));
    }

    fn pending(&self, id: Id) -> Pending {
        let sequence = self.sequences.get(&id).filter(|sequence| !sequence.held);
        let Some(sequence) = sequence else { return Pending::Nothing };
        let rest = sequence.decoded.get(sequence.computed..).unwrap_or_default();
        let Some(&decoded) = rest.first() else { return Pending::Nothing };
        let rows = rest.iter().take_while(|&&kind| kind == decoded).count();
        if decoded { Pending::Decode(rows) } else { Pending::Prompt(rows) }
    }

    fn claim(&mut self, id: Id, rows: usize) -> bool {
        self.extend(id, rows)
    }

    fn release(&mut self, id: Id) {
        self.keep(id);
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.tables.clear();
        sequence.had = sequence.submitted;
        (sequence.computed, sequence.submitted) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promised_tokens_are_told_in_their_order_or_taken_back() {
        let mut sequence = Sequence::new(0, vec![1, 2, 3], 10, false);
        sequence.promise();
        sequence.promise();
        assert_eq!((sequence.known(), sequence.tokens().len()), (3, 5));
        sequence.push(7);
        assert_eq!(sequence.tokens(), [1, 2, 3, 7, CHOSEN]);
        sequence.computed = 5;
        sequence.recall();
        assert_eq!((sequence.tokens(), sequence.known()), (&[1, 2, 3, 7][..], 4));
        sequence.push(8);
        assert_eq!(sequence.tokens(), [1, 2, 3, 7, 8]);
        let decoded = (0..5).map(|position| sequence.is_decoded(position));
        assert!(decoded.eq([false, false, false, true, true]));
        sequence.promise();
        sequence.withdraw();
        assert_eq!((sequence.tokens(), sequence.known()), (&[1, 2, 3, 7, 8][..], 5));
        sequence.push(9);
        assert_eq!(sequence.tokens(), [1, 2, 3, 7, 8, 9]);
    }
}
