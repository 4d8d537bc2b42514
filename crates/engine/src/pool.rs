//! The pool of cache blocks, and the tables through which sessions hold them.
//!
//! One mechanism, two policies: a table *grows* block by block up to a bound; at its bound it is a ring that *rotates*
//! over the oldest positions. Sliding windows rotate always; a whole context rotates only where the caller asked.

use formats::{Error, Result};
use program::{BLOCK_TOKENS, Table};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex};

/// Free blocks of one cache group.
#[derive(Debug, Default)]
struct Free {
    /// The lowest first: a device that makes room block by block shall have as few as there are in use.
    released: BinaryHeap<Reverse<u32>>,
    created: u32,
    limit: usize,
}

/// Block numbers of every group, shared by an engine's sessions.
#[derive(Debug, Clone)]
pub(crate) struct Pool(Arc<Vec<Mutex<Free>>>);

impl Pool {
    /// A pool with so many blocks in each group.
    pub(crate) fn new(blocks: &[usize]) -> Self {
        let free = |&limit: &usize| Mutex::new(Free { limit, ..Free::default() });
        Pool(Arc::new(blocks.iter().map(free).collect()))
    }

    fn group(&self, group: usize) -> std::sync::MutexGuard<'_, Free> {
        // A panic elsewhere cannot leave the list half-changed: both operations are single pushes.
        self.0[group].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take(&self, group: usize) -> Result<u32> {
        let mut free = self.group(group);
        if let Some(Reverse(block)) = free.released.pop() {
            return Ok(block);
        }
        if free.created as usize >= free.limit {
            return Err(Error::new(
                "cache",
                format!("at most {} blocks in use", free.limit),
                "all of them in use",
            )
            .hint("end other sessions, or load the model for more of them"));
        }
        free.created += 1;
        Ok(free.created - 1)
    }
}

/// Blocks that one session takes at most: a whole context, or a ring that holds the window of a chunk's first token
/// while its last is written.
pub(crate) fn bound(window: Option<usize>, context: usize, chunk: usize) -> usize {
    match window {
        Some(window) if window < context => (window + chunk).div_ceil(BLOCK_TOKENS) + 1,
        _ => context.div_ceil(BLOCK_TOKENS).max(1),
    }
}

/// A session's blocks in one group.
#[derive(Debug)]
pub(crate) struct BlockTable {
    pool: Pool,
    group: usize,
    blocks: Vec<u32>,
    /// Blocks at which the table stops growing.
    bound: usize,
    /// Positions before this one are needed by no query at or after the end.
    window: Option<usize>,
    /// One past the highest position ever written since the table was last emptied.
    reached: usize,
}

impl BlockTable {
    /// A table for a context of `context` positions written in chunks of at most `chunk`.
    pub(crate) fn new(
        pool: &Pool,
        group: usize,
        window: Option<usize>,
        context: usize,
        chunk: usize,
    ) -> Self {
        // A ring must hold the window of the chunk's first token while its last is written.
        let span = window.map_or(context, |w| context.min(w)).saturating_add(chunk);
        let bound = if window.is_some_and(|w| w < context) {
            span.div_ceil(BLOCK_TOKENS) + 1
        } else {
            context.div_ceil(BLOCK_TOKENS)
        };
        BlockTable {
            pool: pool.clone(),
            group,
            blocks: Vec::new(),
            bound: bound.max(1),
            window,
            reached: 0,
        }
    }

    /// Takes the blocks that positions below `end` need.
    pub(crate) fn extend(&mut self, end: usize) -> Result<()> {
        while self.blocks.len() < end.div_ceil(BLOCK_TOKENS).min(self.bound) {
            self.blocks.push(self.pool.take(self.group)?);
        }
        self.reached = self.reached.max(end);
        Ok(())
    }

    /// The first position still held.
    fn oldest(&self) -> usize {
        // The block being written has lost its old positions from its first slot on.
        self.reached.saturating_sub(self.blocks.len() * BLOCK_TOKENS)
    }

    /// Whether the session can go back to `end` positions and continue from there.
    pub(crate) fn can_return_to(&self, end: usize) -> bool {
        self.window.map_or(0, |w| (end + 1).saturating_sub(w)) >= self.oldest()
    }

    /// Gives back the blocks beyond `end`, and everything when `end` is 0.
    pub(crate) fn truncate(&mut self, end: usize) {
        if self.reached > self.bound * BLOCK_TOKENS && end > 0 {
            // A ring keeps its blocks; positions past `end` are overwritten before they are read again.
            return;
        }
        let keep = end.div_ceil(BLOCK_TOKENS).min(self.blocks.len());
        self.pool.group(self.group).released.extend(self.blocks.drain(keep..).map(Reverse));
        self.reached = end;
    }

    /// The table as a replay takes it.
    pub(crate) fn table(&self) -> Table<'_> {
        Table { blocks: &self.blocks, oldest: self.oldest() as u32 }
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.pool.group(self.group).released.extend(self.blocks.drain(..).map(Reverse));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_table_returns_what_it_drops() {
        let pool = Pool::new(&[8]);
        let mut table = BlockTable::new(&pool, 0, None, 4096, 512);
        table.extend(1000).unwrap();
        assert_eq!(table.table().blocks, [0, 1, 2, 3]);
        assert!(table.can_return_to(0) && table.can_return_to(999));
        table.truncate(300);
        assert_eq!(table.table().blocks, [0, 1]);
        let mut other = BlockTable::new(&pool, 0, None, 4096, 512);
        other.extend(600).unwrap();
        assert_eq!(other.table().blocks, [2, 3, 4]);
        assert_eq!(pool.group(0).created, 5);
        assert!(other.extend(4096).unwrap_err().to_string().contains("at most 8 blocks"));
        drop(table);
        drop(other);
        assert_eq!(pool.group(0).released.len(), 8);
    }

    #[test]
    fn a_window_rotates_and_forgets() {
        let pool = Pool::new(&[8]);
        let mut table = BlockTable::new(&pool, 0, Some(300), 1 << 20, 128);
        table.extend(10_000).unwrap();
        assert_eq!(table.table().blocks.len(), 3);
        assert_eq!(table.table().oldest, 10_000 - 3 * 256);
        assert!(table.can_return_to(9_999));
        assert!(!table.can_return_to(9_000));
        table.truncate(9_999);
        assert_eq!(table.table().blocks.len(), 3);
        table.truncate(0);
        assert!(table.table().blocks.is_empty() && table.can_return_to(0));
    }
}
