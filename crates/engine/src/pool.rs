//! The pool of cache blocks, and the tables through which sequences hold them.
//!
//! Blocks are counted, since sequences and the prefix tree share them. A position that several
//! holders may read is never written again: a sequence that goes on inside a shared block takes a
//! copy ([`Copy`]) of what it shares, unless it is the only sequence that has the block and the
//! prefix tree reads nothing behind it. So what is shared is counted in tokens, not in blocks.
//!
//! One mechanism, two policies: a table *grows* block by block up to a bound; at its bound it drops
//! its oldest block for each one that it takes. Sliding windows always do so; a whole context only
//! where the caller asked.
//!
//! A block of a group that carries a state holds the one behind its last position that was
//! computed, which the next position replaces. It is shared as a whole: whoever goes on inside one
//! that somebody else holds copies it. A sequence goes back to multiples of [`BLOCK_TOKENS`], whose
//! states stay, and to the lengths that it was told to [keep](BlockTable::keep).

use formats::{Error, Result};
use program::{BLOCK_TOKENS, Group, Table};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One block of the pool.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// Tables and [`Block`]s that refer to it; 0: it is free.
    holders: u32,
    /// Holders that are tables, which may write to it.
    tables: u32,
    /// Its positions that have been claimed for writing: all below this one.
    written: usize,
}

/// The blocks of one cache group.
#[derive(Debug, Default)]
struct Blocks {
    /// The lowest first: a device that makes room block by block shall have as few as there are in
    /// use.
    released: BinaryHeap<Reverse<u32>>,
    /// All that were ever taken.
    states: Vec<State>,
    limit: usize,
}

impl Blocks {
    fn free(&self) -> usize {
        self.limit.saturating_sub(self.states.len()) + self.released.len()
    }

    /// A block for one table; none if all are in use.
    fn take(&mut self) -> Option<u32> {
        let block = match self.released.pop() {
            Some(Reverse(block)) => block,
            None if self.states.len() < self.limit => {
                self.states.push(State::default());
                // Giving back allocates nothing.
                self.released.reserve(self.states.len());
                (self.states.len() - 1) as u32
            }
            None => return None,
        };
        self.states[block as usize] = State { holders: 1, tables: 1, written: 0 };
        Some(block)
    }

    fn hold(&mut self, block: u32) {
        self.states[block as usize].holders += 1;
    }

    /// A table holds a block that others have written.
    fn join(&mut self, block: u32) {
        self.states[block as usize].tables += 1;
        self.hold(block);
    }

    /// A table gives a block back.
    fn leave(&mut self, block: u32) {
        self.states[block as usize].tables -= 1;
        self.release(block);
    }

    fn release(&mut self, block: u32) {
        let holders = &mut self.states[block as usize].holders;
        *holders -= 1;
        if *holders == 0 {
            self.released.push(Reverse(block));
        }
    }

    fn full(&self) -> Error {
        let expected = format!("at most {} blocks in use", self.limit);
        Error::new("cache", expected, "all of them in use")
            .hint("end other sessions, or load the model for more of them")
    }
}

/// The blocks of every group, shared by an engine's sequences.
#[derive(Debug, Clone)]
pub(crate) struct Pool(Arc<Vec<Mutex<Blocks>>>);

impl Pool {
    /// A pool with a number of blocks for each group.
    pub(crate) fn new(limits: &[usize]) -> Self {
        // Block numbers have 32 bits.
        let limit = |&limit: &usize| limit.min(u32::MAX as usize);
        let blocks = |of| Mutex::new(Blocks { limit: limit(of), ..Blocks::default() });
        Pool(Arc::new(limits.iter().map(blocks).collect()))
    }

    /// Free blocks of a group.
    pub(crate) fn free(&self, group: usize) -> usize {
        self.group(group).free()
    }

    /// Blocks that a group has in all.
    #[cfg(test)]
    pub(crate) fn limit(&self, group: usize) -> usize {
        self.group(group).limit
    }

    fn group(&self, group: usize) -> MutexGuard<'_, Blocks> {
        // No change of a group's blocks is left half-done by a panic elsewhere.
        self.0[group].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block that is held until it is dropped.
#[derive(Debug)]
pub(crate) struct Block {
    pool: Pool,
    group: usize,
    number: u32,
}

impl Block {
    /// Its number in the pool.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Whether this is its only holder.
    pub(crate) fn is_sole(&self) -> bool {
        self.pool.group(self.group).states[self.number as usize].holders == 1
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        self.pool.group(self.group).hold(self.number);
        Block { pool: self.pool.clone(), ..*self }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.group(self.group).release(self.number);
    }
}

/// A copy that the device has to make before it writes: a block that others hold too,
/// of which this sequence keeps the first positions.
#[derive(Debug)]
pub(crate) struct Copy {
    /// The cache group of both blocks.
    pub(crate) group: usize,
    /// The source. It is held, so that it is not given out and overwritten before it is copied.
    pub(crate) from: Block,
    /// The destination.
    pub(crate) to: u32,
}

/// Lengths besides multiples of [`BLOCK_TOKENS`] that a sequence keeps the states behind.
const KEPT: usize = 2;

/// Blocks that one sequence takes at most: a whole context, or what holds the window of a chunk's
/// first token while its last is written; and the states that it keeps.
pub(crate) fn most(kind: Group, context: usize, chunk: usize) -> usize {
    bound(kind, context, chunk).saturating_add(if kind.carried { KEPT } else { 0 })
}

/// Blocks at which a table stops growing.
fn bound(kind: Group, context: usize, chunk: usize) -> usize {
    match kind.window {
        Some(window) if window < context => (window + chunk).div_ceil(BLOCK_TOKENS) + 1,
        _ => context.div_ceil(BLOCK_TOKENS).max(1),
    }
}

/// A sequence's blocks in one group.
///
/// Block `b` of the sequence holds its positions from `256 b` on.
#[derive(Debug)]
pub(crate) struct BlockTable {
    pool: Pool,
    group: usize,
    /// Block `b` of the sequence lies in entry `b % entries.len()`. Where that block is not held,
    /// being older than the window or beyond the end, the entry has the number of one that is.
    entries: Vec<u32>,
    /// Blocks of the sequence that are held.
    held: Range<usize>,
    /// Blocks at which the table stops growing.
    bound: usize,
    /// How far a position looks back, and whether blocks hold states.
    kind: Group,
    /// One past the last position that this table has claimed for writing.
    reached: usize,
    /// Lengths that are no multiples of [`BLOCK_TOKENS`] with the states behind them, the latest
    /// last.
    kept: Vec<(usize, Block)>,
}

impl BlockTable {
    /// An empty table for a context of `context` positions written in chunks of at most `chunk`.
    pub(crate) fn new(
        pool: &Pool,
        group: usize,
        kind: impl Into<Group>,
        context: usize,
        chunk: usize,
    ) -> Self {
        let kind = kind.into();
        BlockTable {
            pool: pool.clone(),
            group,
            entries: Vec::new(),
            held: 0..0,
            bound: bound(kind, context, chunk),
            kind,
            reached: 0,
            kept: Vec::new(),
        }
    }

    /// Claims positions `start..end` for writing: takes the blocks that they need, or none. `start`
    /// is the sequence's length; `copies` receives what the device has to copy first.
    ///
    /// # Errors
    /// Too few free blocks: nothing has changed then, but that states that were kept are given up.
    pub(crate) fn extend(
        &mut self,
        start: usize,
        end: usize,
        copies: &mut Vec<Copy>,
    ) -> Result<()> {
        loop {
            let extended = self.claim(start, end, copies);
            if extended.is_ok() || self.kept.is_empty() {
                return extended;
            }
            self.kept.remove(0);
        }
    }

    fn claim(&mut self, start: usize, end: usize, copies: &mut Vec<Copy>) -> Result<()> {
        let pool = self.pool.clone();
        let mut blocks = pool.group(self.group);
        let range = start / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS);
        if range.len() > self.bound {
            let expected = format!("positions in at most {} blocks at a time", self.bound);
            return Err(Error::new("cache", expected, range.len()));
        }
        let dropped = self.held.start..range.end.saturating_sub(self.bound).min(self.held.end);
        let sole = |b: &usize| blocks.states[self.entry(*b) as usize].holders == 1;
        let freed = dropped.clone().filter(sole).count();
        let fresh = range.clone().filter(|&b| !self.may_write(&blocks, b, start)).count();
        if blocks.free() + freed < fresh {
            return Err(blocks.full());
        }
        for b in dropped {
            blocks.leave(self.entry(b));
            self.held.start = b + 1;
        }
        for b in range.clone() {
            if self.may_write(&blocks, b, start) {
                continue;
            }
            let Some(number) = blocks.take() else { return Err(blocks.full()) };
            if self.held.contains(&b) {
                let (group, shared) = (self.group, self.entry(b));
                blocks.hold(shared);
                blocks.leave(shared);
                if start <= b * BLOCK_TOKENS {
                    blocks.release(shared);
                } else {
                    let from = Block { pool: self.pool.clone(), group, number: shared };
                    copies.push(Copy { group, from, to: number });
                }
            }
            self.put(b, number);
        }
        self.reached = self.reached.max(end);
        for b in range {
            let written = (self.reached - b * BLOCK_TOKENS).min(BLOCK_TOKENS);
            let state = &mut blocks.states[self.entry(b) as usize];
            let others = if state.holders > 1 { state.written } else { 0 };
            state.written = written.max(others);
        }
        if fresh > 0 {
            self.fill();
        }
        Ok(())
    }

    /// Whether block `b` is held and positions from `start` on may be written to it: no other table
    /// holds it; or no other table does, and nobody has written there, or this table was the last
    /// that did.
    fn may_write(&self, blocks: &Blocks, b: usize, start: usize) -> bool {
        if !self.held.contains(&b) {
            return false;
        }
        let State { holders, tables, written } = blocks.states[self.entry(b) as usize];
        if self.kind.carried {
            return holders == 1;
        }
        let first = b * BLOCK_TOKENS;
        let own = self.reached.saturating_sub(first).min(BLOCK_TOKENS);
        let last = start < self.reached && written == own;
        let free = written <= start.saturating_sub(first) || last;
        holders == 1 || (tables == 1 && free)
    }

    fn entry(&self, b: usize) -> u32 {
        self.entries[b % self.entries.len()]
    }

    /// Makes a block of the pool, which the table now holds, block `b` of the sequence.
    fn put(&mut self, b: usize, number: u32) {
        let stride = (b + 1).min(self.bound);
        if self.entries.len() < stride {
            self.entries.resize(stride, number);
        }
        let entry = b % self.entries.len();
        self.entries[entry] = number;
        if self.held.is_empty() {
            self.held = b..b;
        }
        self.held.end = self.held.end.max(b + 1);
    }

    /// The first position still held.
    fn oldest(&self) -> usize {
        self.held.start * BLOCK_TOKENS
    }

    /// Blocks that [`BlockTable::extend`] takes at most to come from `start` to `end`, in chunks,
    /// beyond those held.
    pub(crate) fn needs(&self, start: usize, end: usize) -> usize {
        let first = self.held.end.max(start / BLOCK_TOKENS);
        let more = end.div_ceil(BLOCK_TOKENS).saturating_sub(first);
        // A block in which the sequence goes on has to be copied, unless it is its own.
        let (inside, b) = (!start.is_multiple_of(BLOCK_TOKENS), start / BLOCK_TOKENS);
        let copies = inside
            && self.held.contains(&b)
            && !self.may_write(&self.pool.group(self.group), b, start);
        more.min(self.bound.saturating_sub(self.held.len())) + usize::from(copies)
    }

    /// Its cache group.
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// The most positions up to `end` that the sequence can go back to and continue from.
    pub(crate) fn returns_to(&self, end: usize) -> usize {
        if !self.kind.carried {
            return if first_seen(self.kind.window, end) >= self.oldest() { end } else { 0 };
        }
        if end == self.reached {
            return end;
        }
        let multiple = end / BLOCK_TOKENS * BLOCK_TOKENS;
        let held = multiple > 0 && self.held.contains(&(multiple / BLOCK_TOKENS - 1));
        let kept = self.kept.iter().map(|(len, _)| *len).filter(|len| *len <= end);
        kept.chain(held.then_some(multiple)).max().unwrap_or(0)
    }

    /// Whether the sequence can go back to `end` positions and continue from there.
    #[cfg(test)]
    pub(crate) fn can_return_to(&self, end: usize) -> bool {
        self.returns_to(end) == end
    }

    /// Takes back a claim of positions from `start` on that were not computed.
    pub(crate) fn disclaim(&mut self, start: usize) {
        self.reached = self.reached.min(start);
    }

    /// Keeps the state behind all positions claimed so far, which have been computed, so that the
    /// sequence can go back to there. Of other groups nothing needs to be kept.
    pub(crate) fn keep(&mut self) {
        let len = self.reached;
        if !self.kind.carried || len.is_multiple_of(BLOCK_TOKENS) {
            return;
        }
        self.kept.retain(|(other, _)| *other != len);
        let Some(block) = self.share(len / BLOCK_TOKENS, len) else { return };
        self.kept.push((len, block));
        if self.kept.len() > KEPT {
            self.kept.remove(0);
        }
    }

    /// Puts the state behind `end`, if it was kept, in the place of what came after it.
    fn put_back(&mut self, end: usize) {
        let Some((_, block)) = self.kept.iter().find(|(len, _)| *len == end) else { return };
        let (b, number, pool) = (end / BLOCK_TOKENS, block.number, self.pool.clone());
        let mut blocks = pool.group(self.group);
        blocks.join(number);
        if self.held.contains(&b) {
            blocks.leave(self.entry(b));
        }
        self.put(b, number);
        self.fill();
    }

    /// Gives back the blocks beyond `end`, and everything when `end` is 0.
    pub(crate) fn truncate(&mut self, end: usize) {
        self.kept.retain(|(len, _)| *len <= end);
        let before = std::mem::replace(&mut self.reached, end);
        self.drop_behind(end);
        if end < before {
            self.put_back(end);
        }
    }

    fn drop_behind(&mut self, end: usize) {
        let keep = end.div_ceil(BLOCK_TOKENS).max(self.held.start);
        let pool = self.pool.clone();
        let mut blocks = pool.group(self.group);
        if end == 0 {
            self.held.clone().for_each(|b| blocks.leave(self.entry(b)));
            self.held = 0..0;
        } else {
            (keep..self.held.end).for_each(|b| blocks.leave(self.entry(b)));
            self.held.end = self.held.end.min(keep);
        }
        if self.held.is_empty() {
            return self.entries.clear();
        }
        if self.held.end <= self.bound {
            self.entries.truncate(self.held.end);
        }
        self.fill();
    }

    /// Points entries without a held block at one that is held: a table names no block that others
    /// may write to.
    fn fill(&mut self) {
        let stride = self.entries.len();
        for b in self.held.end..self.held.start + stride {
            self.entries[b % stride] = self.entry(self.held.end - 1);
        }
    }

    /// A table with the same first `end` positions, which both then share.
    pub(crate) fn fork(&self, end: usize) -> BlockTable {
        let mut fork = BlockTable {
            pool: self.pool.clone(),
            entries: self.entries.clone(),
            held: self.held.clone(),
            kept: self.kept.clone(),
            ..*self
        };
        let mut blocks = self.pool.group(self.group);
        fork.held.clone().for_each(|b| blocks.join(self.entry(b)));
        drop(blocks);
        fork.truncate(end);
        fork
    }

    /// Block `b` of a sequence of which `len` positions are computed, for another holder; none if
    /// the table no longer has it, or not yet, or if it holds another state than the one behind its
    /// last position, or the sequence's.
    pub(crate) fn share(&self, b: usize, len: usize) -> Option<Block> {
        let passed = (b + 1) * BLOCK_TOKENS <= len;
        if !self.held.contains(&b) || (self.kind.carried && !passed && len != self.reached) {
            return None;
        }
        let number = self.entry(b);
        self.pool.group(self.group).hold(number);
        Some(Block { pool: self.pool.clone(), group: self.group, number })
    }

    /// Makes an empty table one of `len` positions that others have written, in the sequence's
    /// blocks from `first` on.
    pub(crate) fn adopt(&mut self, first: usize, shared: impl Iterator<Item = Block>, len: usize) {
        self.truncate(0);
        for (b, block) in (first..).zip(shared) {
            self.pool.group(self.group).join(block.number);
            self.put(b, block.number);
        }
        if self.held.is_empty() {
            self.held = first..first;
        }
        self.reached = len;
    }

    /// The number of the pool's block that is block `b` of the sequence; none if it is not held.
    pub(crate) fn number(&self, b: usize) -> Option<u32> {
        self.held.contains(&b).then(|| self.entry(b))
    }

    /// Its window; none: all positions are seen.
    #[cfg(test)]
    pub(crate) fn window(&self) -> Option<usize> {
        self.kind.window
    }

    /// The table as a replay takes it.
    pub(crate) fn table(&self) -> Table<'_> {
        Table { blocks: &self.entries, oldest: self.oldest() as u32 }
    }
}

/// The most positions up to `len` that a sequence of these tables can go back to and continue from.
pub(crate) fn returns_to(tables: &[BlockTable], mut len: usize) -> usize {
    loop {
        match tables.iter().map(|table| table.returns_to(len)).min() {
            Some(least) if least < len => len = least,
            _ => return len,
        }
    }
}

/// The first cached position that the query at `position` sees.
pub(crate) fn first_seen(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

#[cfg(test)]
mod tests;
