//! What a replay is given, and what a device asks of it before it looks at anything.

use formats::{Error, Result};

/// Where a session's keys and values lie, for the layers of one group.
///
/// Position `p` lies in block `blocks[(p / BLOCK_TOKENS) % blocks.len()]`: a table that stopped growing is a ring.
#[derive(Debug, Clone, Copy, Default)]
pub struct Table<'a> {
    /// Block numbers in the pool.
    pub blocks: &'a [u32],
    /// The first position that the ring still holds once this step is written.
    pub oldest: u32,
}

/// What one replay is given: the step-arguments buffer.
#[derive(Debug, Clone, Copy)]
pub struct Arguments<'a> {
    /// Token ids, one per row.
    pub tokens: &'a [u32],
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// Row numbers whose logits are wanted, ascending.
    pub outputs: &'a [u32],
    /// Block table of each cache group; see [`Program::groups`](crate::Program::groups).
    pub tables: &'a [Table<'a>],
    /// The Program's [`input`](crate::Program::input), `[rows, width]`; empty where it has none.
    pub input: &'a [f32],
}

/// The most that a loaded Program was given room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Rows of a replay.
    pub tokens: usize,
    /// Rows of them with logits.
    pub outputs: usize,
    /// Blocks of each cache group.
    pub blocks: Vec<usize>,
    /// Width of the Program's input; 0 where it has none.
    pub input: usize,
    /// Positions that a token may have: the rows of a table of learned positions; usize::MAX where
    /// there is none.
    pub positions: usize,
}

impl Arguments<'_> {
    /// Checks that a replay is within `limits` and that its parts agree.
    ///
    /// # Errors
    /// What is too much, or does not fit.
    pub fn check(&self, limits: &Limits) -> Result<()> {
        let (tokens, outputs) = (self.tokens.len(), self.outputs.len());
        if tokens == 0 || tokens > limits.tokens || outputs > limits.outputs.min(tokens) {
            let expected = format!(
                "1..={} rows, at most {} of them with logits",
                limits.tokens, limits.outputs
            );
            let found = format!("{tokens} rows, {outputs} with logits");
            return Err(Error::new("step", expected, found));
        }
        let fits = self.positions.len() == tokens
            && self.positions.windows(2).all(|pair| pair[1] == pair[0] + 1)
            && self.outputs.iter().all(|&row| (row as usize) < tokens)
            && self.tables.len() == limits.blocks.len()
            && self.input.len() == tokens * limits.input;
        if !fits {
            let expected = "consecutive positions, outputs among the rows, a table per group, a row of input per token";
            return Err(Error::new("step", expected, "others"));
        }
        let last = self.positions.last().map_or(0, |&position| position as usize);
        if last >= limits.positions {
            let expected = format!("positions below {}", limits.positions);
            return Err(Error::new("step", expected, last));
        }
        for (table, &blocks) in self.tables.iter().zip(&limits.blocks) {
            if table.blocks.is_empty() || table.blocks.iter().any(|&b| b as usize >= blocks) {
                let expected = format!("cache blocks below {blocks}");
                return Err(Error::new("step", expected, format!("{table:?}")));
            }
        }
        Ok(())
    }
}
