//! States in the cache: how kernels find what a sequence carries from position to position.
//!
//! A layer's states are a pool of blocks, `[blocks, size]` in f32. The block of a sequence's
//! positions `n * block..` holds the state behind the last of them that was computed, so that the
//! states at multiples of `block` stay. The same numbers are computed in the same order wherever a
//! chunk begins or ends: bits do not depend on where a prompt is cut.

use std::ops::Range;

use tile::case::Buffer;
use tile::dsl::*;
use tile::launch::Numbers;

use crate::sweep::{require_lengths, when};

/// The buffers that a kernel with a recurrent state binds, and their addresses.
#[derive(Clone, Copy)]
pub(crate) struct States {
    /// `[blocks, size]`.
    pub(crate) states: InOut,
    /// `[tokens]`: the position of each row in its sequence.
    pub(crate) positions: In<u32>,
    /// `[tokens]`: the sequence of each row. Idle rows name sequences that have no rows.
    pub(crate) sequences: In<u32>,
    /// `[batch + 1]`: the first row of each sequence.
    pub(crate) starts: In<u32>,
    /// `[batch, stride]`: the pool's block that holds each block of positions.
    pub(crate) table: In<u32>,
    /// Blocks per row of `table`.
    pub(crate) stride: Val<u32>,
    /// Positions per block.
    pub(crate) block: Val<u32>,
    /// Elements of all parts of a layer's state.
    pub(crate) size: Val<u32>,
    /// Where the kernel's part begins.
    pub(crate) start: Val<u32>,
}

/// Calls `body` with each row from `first` to `end`, of which there are some, the last first if
/// `back`, and with the `count` numbers that `ask` reads of it. A row is asked for before the one in
/// front of it is dealt with.
#[track_caller]
pub(crate) fn each_row(
    [first, end]: [Val<u32>; 2],
    back: bool,
    count: u32,
    ask: impl Fn(Val<u32>) -> Vec<Val<f32>>,
    body: impl Fn(Val<u32>, &[Val<f32>]),
) {
    let ahead = Regs::<f32>::uninit(count);
    let ask = |row| (0u32..).zip(ask(row)).for_each(|(i, x)| ahead.set(i, x));
    ask(if back { end - 1u32 } else { first });
    range(first, end).each(|turn| {
        let row = if back { end - 1u32 - (turn - first) } else { turn };
        let values: Vec<Val<f32>> = (0..ahead.len()).map(|i| ahead.get(i)).collect();
        ask(match back {
            true => row.max(first + 1u32) - 1u32,
            false => (row + 1u32).min(end - 1u32),
        });
        body(row, &values);
    });
}

/// The rows of a sequence in this step, one position after the other.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    /// Which sequence.
    sequence: Val<u32>,
    /// Its first row, and the row behind its last.
    pub(crate) first: Val<u32>,
    pub(crate) end: Val<u32>,
}

impl Chunk {
    /// Whether there are no rows: an idle row's sequence.
    #[track_caller]
    pub(crate) fn is_empty(&self) -> Val<bool> {
        Order::ge(self.first, self.end)
    }
}

impl States {
    /// The contract: what the arrays hold.
    pub(crate) fn require() {
        require_lengths(&[
            ("positions", dim("tokens")),
            ("sequences", dim("tokens")),
            ("starts", dim("batch") + 1),
            ("table", dim("batch") * dim("stride")),
        ]);
    }

    /// The rows of a sequence.
    #[track_caller]
    pub(crate) fn chunk(&self, sequence: Val<u32>) -> Chunk {
        let (first, end) = (self.starts.get(sequence), self.starts.get(sequence + 1u32));
        Chunk { sequence, first, end }
    }

    /// The first element of the part, behind some position of a chunk's sequence.
    #[track_caller]
    pub(crate) fn behind(&self, chunk: &Chunk, position: Val<u32>) -> Val<u32> {
        let entry = chunk.sequence * self.stride + (position / self.block) % self.stride;
        self.table.get(entry) * self.size + self.start
    }

    /// Records `f` of a row where it is idle.
    #[track_caller]
    pub(crate) fn when_idle(&self, row: Val<u32>, f: impl FnOnce()) {
        when(self.chunk(self.sequences.get(row)).is_empty(), f);
    }
}

/// Rows of a sequence for [`Trial::of`], one for each position.
pub(crate) fn chunk(sequence: u32, positions: Range<u32>) -> Vec<(u32, u32)> {
    positions.map(|position| (sequence, position)).collect()
}

/// A step and a pool of states to try kernels on.
pub(crate) struct Trial {
    /// Sequence and position of each row.
    rows: Vec<(u32, u32)>,
    /// Sequences, the one of idle rows among them.
    batch: usize,
    block: usize,
    stride: usize,
    /// Elements of a state.
    pub(crate) size: usize,
}

impl Trial {
    /// The sequence of idle rows.
    pub(crate) const IDLE: u32 = 4;

    /// Rows of sequences 0 to 3, each in one chunk, and idle ones behind them: rings of four blocks
    /// of 16 positions.
    pub(crate) fn of(rows: &[(u32, u32)], size: usize) -> Trial {
        Trial { rows: rows.to_vec(), batch: Trial::IDLE as usize + 1, block: 16, stride: 4, size }
    }

    /// One sequence: `rows` rows, from a position inside a block on.
    pub(crate) fn one(rows: usize, size: usize) -> Trial {
        let first = 100;
        let positions = (first as u32..).take(rows).map(|position| (0, position)).collect();
        Trial { rows: positions, batch: 1, block: 256, stride: (first + rows).div_ceil(256), size }
    }

    /// Elements of the pool, which has one block more than the sequences.
    pub(crate) fn elements(&self) -> usize {
        (self.batch * self.stride + 1) * self.size
    }

    /// The pool's blocks, the last first.
    fn table(&self) -> Vec<u32> {
        (1..=(self.batch * self.stride) as u32).rev().collect()
    }

    /// Positions, sequences, starts and table, in binding order.
    pub(crate) fn buffers(&self) -> [Buffer; 4] {
        let (sequences, positions): (Vec<u32>, Vec<u32>) = self.rows.iter().copied().unzip();
        let mut starts = vec![0; self.batch + 1];
        for (at, &(sequence, _)) in (0u32..).zip(&self.rows).filter(|(_, row)| row.0 != Trial::IDLE)
        {
            let sequence = sequence as usize;
            if starts[sequence + 1] <= starts[sequence] {
                starts[sequence] = at;
            }
            starts[sequence + 1] = at + 1;
        }
        [positions, sequences, starts, self.table()].map(|words| Buffer::words(&words))
    }

    /// The numbers of a launch.
    pub(crate) fn numbers(&self) -> Numbers {
        Numbers::new()
            .with("tokens", self.rows.len() as u32)
            .with("batch", self.batch as u32)
            .with("stride", self.stride as u32)
            .with("block", self.block as u32)
            .with("size", self.size as u32)
    }

    /// The content of the pool after the step, each row of which updates a part of it by `advance`,
    /// and the result of that for each row, `width` elements; zeros for idle rows.
    pub(crate) fn walk(
        &self,
        before: &Buffer,
        part: Range<usize>,
        width: usize,
        advance: impl Fn(usize, &mut Vec<f64>) -> Vec<f64>,
    ) -> (Vec<f64>, Vec<f64>) {
        let (mut pool, mut y) = (before.to_f64(), Vec::new());
        for (row, &(sequence, position)) in self.rows.iter().enumerate() {
            if sequence == Trial::IDLE {
                y.resize(y.len() + width, 0.0);
                continue;
            }
            let place = |position: usize| {
                let entry = sequence as usize * self.stride + position / self.block % self.stride;
                let first = self.table()[entry] as usize * self.size;
                first + part.start..first + part.end
            };
            let position = position as usize;
            let mut state = match position {
                0 => vec![0.0; part.len()],
                _ => pool[place(position - 1)].to_vec(),
            };
            y.extend(advance(row, &mut state));
            pool[place(position)].copy_from_slice(&state);
        }
        (pool, y)
    }
}
