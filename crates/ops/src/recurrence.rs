//! How threadgroups walk over the rows of sequences with matrices that these carry: those of gated
//! delta nets ([`crate::delta_net`]) and of state spaces ([`crate::selective_scan`]), whose `B`, `C`
//! and `x` are what others call keys, queries and values.
//!
//! A simdgroup has some columns of a head's matrix `[keys, values]` in registers while all rows pass,
//! one after the other. Eight lanes share a column, by keys; sums over keys are theirs alone.

use tile::dsl::*;

use crate::states::{Chunk, States, each_row};
use crate::sweep::{begin, load, when};

mod staged;

pub(crate) use staged::{Columns, Passes, Piece, StagedRow, StagedRows, require_staged};

/// Lanes of a simdgroup that share a column, by keys; the others have other columns.
pub(crate) const KEY_LANES: u32 = 8;
/// Lanes of a simdgroup that have columns of their own, or several neighbouring ones.
pub(crate) const COLUMN_LANES: u32 = 32 / KEY_LANES;

/// The sum over the lanes that share a column.
#[track_caller]
pub(crate) fn over_keys(x: Val<f32>) -> Val<f32> {
    [1, 2, 4].into_iter().fold(x, |x, mask| x + shuffle_xor(x, mask))
}

/// A lane's share of a vector that the lanes of a column have together: runs of neighbouring
/// elements, by turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// Elements of the vector.
    pub(crate) len: u32,
    /// Elements of a run.
    pub(crate) run: u8,
}

impl Share {
    /// Elements that a lane has.
    pub(crate) fn own(self) -> u32 {
        self.len.div_ceil(KEY_LANES * u32::from(self.run)) * u32::from(self.run)
    }

    /// Calls `f` with the first element of each of the lane's runs, its number in registers, and
    /// whether it is one.
    #[track_caller]
    pub(crate) fn runs(self, mut f: impl FnMut(Val<u32>, u32, Option<Val<bool>>)) {
        let wide = u32::from(self.run);
        for run in 0..self.own() / wide {
            let first = (lane_id() % KEY_LANES + run * KEY_LANES) * wide;
            let whole = (run + 1) * KEY_LANES * wide <= self.len;
            f(first, run * wide, (!whole).then(|| Order::lt(first, self.len)));
        }
    }

    /// The lane's elements of a vector that begins at `from`; zeros behind the last.
    #[track_caller]
    pub(crate) fn load(self, x: impl Elements<f32>, from: Val<u32>) -> Vec<Val<f32>> {
        let mut found = Vec::new();
        self.runs(|first, _, exists| {
            let first = exists.map_or(first, |exists| select(exists, first, 0u32));
            let values = load(x, from + first, self.run);
            let kept = values
                .into_iter()
                .map(|value| exists.map_or(value, |exists| select(exists, value, 0.0)));
            found.extend(kept);
        });
        found
    }
}

/// The products of the lane's columns of a matrix with a vector, summed over the lanes that share
/// them: `x` and `matrix` are its shares, `wide` columns side by side.
#[track_caller]
pub(crate) fn products(matrix: Regs, x: &[Val<f32>], wide: u32) -> Vec<Val<f32>> {
    (0..wide).map(|column| over_keys(part_of_product(matrix, x, column, wide))).collect()
}

/// The lane's parts of the products of its columns with a vector; see [`products`].
#[track_caller]
pub(crate) fn parts_of_products(matrix: Regs, x: &[Val<f32>], wide: u32) -> Vec<Val<f32>> {
    (0..wide).map(|column| part_of_product(matrix, x, column, wide)).collect()
}

/// The lane's part of the product of one of `wide` columns with a vector.
#[track_caller]
fn part_of_product(matrix: Regs, x: &[Val<f32>], column: u32, wide: u32) -> Val<f32> {
    // Two sums hide the latency of the additions.
    let mut sums = [0.0f32.val(), 0.0f32.val()];
    for (i, &x) in (0u32..).zip(x) {
        let sum = &mut sums[i as usize % 2];
        *sum = matrix.get(i * wide + column).fma(x, *sum);
    }
    sums[0] + sums[1]
}

/// A lane's part of a head's matrix `[share.len, width]`: its share of the rows, and neighbouring
/// columns.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) share: Share,
    /// Neighbouring columns that a lane has.
    pub(crate) columns: u8,
    pub(crate) states: States,
    pub(crate) head: Val<u32>,
    pub(crate) heads: Val<u32>,
    /// Columns of a matrix.
    pub(crate) width: Val<u32>,
    /// Its first column.
    pub(crate) column: Val<u32>,
}

/// A walk that has begun.
struct Entered {
    chunk: Chunk,
    matrix: Regs,
    /// Of the first row, if there is one.
    position: Val<u32>,
}

impl Part {
    /// Moves the matrix over the rows of `sequence`, and writes its columns of `y`
    /// `[tokens, heads * width]`; idle rows become zeros. `ask` reads the `count` numbers that a
    /// row has for the lane, `start` gives what moves the matrix by them and answers.
    #[track_caller]
    pub(crate) fn walk<A>(
        &self,
        sequence: Val<u32>,
        tokens: Val<u32>,
        y: Out,
        count: u32,
        ask: impl Fn(Val<u32>) -> Vec<Val<f32>>,
        start: impl FnOnce() -> A,
    ) where
        A: Fn(Regs, &[Val<f32>]) -> Vec<Val<f32>>,
    {
        let States { positions, block, .. } = self.states;
        let Entered { chunk, matrix, .. } = self.enter(sequence, tokens, y);
        when(Order::lt(chunk.first, chunk.end), || {
            let advance = start();
            each_row([chunk.first, chunk.end], false, count, ask, |row, values| {
                self.put(y, row, 1, &advance(matrix, values));
                let position = positions.get(row);
                let last = Order::eq((position + 1u32) % block, 0u32);
                when(last | Order::eq(row + 1u32, chunk.end), || {
                    self.leave(matrix, self.states.behind(&chunk, position));
                });
            });
        });
    }

    /// Takes up the matrix in front of the rows of `sequence`, begins, and sees to an idle row.
    #[track_caller]
    fn enter(&self, sequence: Val<u32>, tokens: Val<u32>, y: Out) -> Entered {
        let wide = u32::from(self.columns);
        let chunk = self.states.chunk(sequence);
        let matrix = Regs::new(self.share.own() * wide, 0.0);
        // An earlier step wrote it, before the kernel in front: it is asked for before that is
        // done.
        let position = self.states.positions.get(chunk.first.min(tokens - 1u32));
        let before = Order::lt(chunk.first, chunk.end) & Order::gt(position, 0u32);
        when(before, || {
            let behind = self.states.behind(&chunk, position.max(1u32) - 1u32);
            self.take_up(matrix, self.states.states, behind);
        });
        begin();
        // A sequence of no rows has an idle row to see to, perhaps.
        when(chunk.is_empty() & Order::lt(sequence, tokens), || {
            self.states.when_idle(sequence, || {
                self.put(y, sequence, 1, &vec![0.0f32.val(); wide as usize]);
            });
        });
        Entered { chunk, matrix, position }
    }

    /// Calls `f` with the place of each of its vectors of a matrix that is there, and its number in
    /// registers.
    #[track_caller]
    fn places(&self, state: Val<u32>, f: impl Fn(Val<u32>, u32)) {
        let from = state + self.head * self.share.len * self.width + self.column;
        let column = Order::lt(self.column, self.width);
        self.share.runs(|first, number, exists| {
            when(exists.map_or(column, |exists| exists & column), || {
                for row in 0..u32::from(self.share.run) {
                    let at = from + (first + row) * self.width;
                    f(at, (number + row) * u32::from(self.columns));
                }
            });
        });
    }

    /// Reads its part of a matrix from matrices of all heads that begin at `first`.
    #[track_caller]
    fn take_up(&self, matrix: Regs, from: impl Elements<f32>, first: Val<u32>) {
        self.places(first, |at, number| {
            let values = load(from, at, self.columns);
            (number..).zip(values).for_each(|(i, value)| matrix.set(i, value));
        });
    }

    /// Its part of matrices of all heads, `[heads, share.len, width]`; zeros where it has none.
    #[track_caller]
    pub(crate) fn of(&self, matrices: In) -> Regs {
        let own = Regs::new(self.share.own() * u32::from(self.columns), 0.0);
        self.take_up(own, matrices, 0u32.val());
        own
    }

    /// Writes its part of a matrix to a state.
    #[track_caller]
    fn leave(&self, matrix: Regs, state: Val<u32>) {
        let wide = u32::from(self.columns);
        self.places(state, |at, number| {
            let values: Vec<Val<f32>> = (number..number + wide).map(|i| matrix.get(i)).collect();
            self.states.states.set_vec(at, &values);
        });
    }

    /// Writes its columns of a row of `y`, with the first `lanes` of those that share them.
    #[track_caller]
    fn put(&self, y: Out, row: Val<u32>, lanes: u32, values: &[Val<f32>]) {
        let lane = lane_id() % KEY_LANES;
        let own = if lanes == 1 { Order::eq(lane, 0u32) } else { Order::lt(lane, lanes) };
        let own = own & Order::lt(self.column, self.width);
        let at = (row * self.heads + self.head) * self.width + self.column;
        when(own, || y.set_vec(at, values));
    }
}
