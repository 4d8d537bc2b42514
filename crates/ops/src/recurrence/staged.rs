//! Walks over many rows, which shared memory brings to all simdgroups of a threadgroup.
//!
//! Rows come in tiles, those whose positions have the same quotient. While one passes, a simdgroup
//! of its own computes what the next needs for each row, and the one after that is being copied.
//! What is computed, and in which order, is what [`Part::walk`] computes: the bits are the same.

use tile::dsl::*;
use tile::launch::Requirement;

use super::{COLUMN_LANES, Entered, Part, Share, over_keys};
use crate::states::Chunk;
use crate::sweep::{load, when};

/// Tiles in shared memory: one that passes, one that is prepared, one on its way.
const STAGES: u32 = 3;
/// Numbers of a row in shared memory.
const NUMBERS: u32 = 4;
/// The most elements of all tiles, so that Apple's GPUs hold them, too.
const MOST: u32 = 7936;

/// What a row has in a buffer.
pub(crate) struct Piece<'a> {
    pub(crate) from: In,
    /// Elements.
    pub(crate) len: u32,
    /// Where they begin for a row; a multiple of 4 if `len` is.
    pub(crate) at: &'a dyn Fn(Val<u32>) -> Val<u32>,
}

impl Piece<'_> {
    /// Elements that are copied at once.
    fn unit(&self) -> u32 {
        if self.len.is_multiple_of(4) { 4 } else { 1 }
    }
}

/// Threadgroups that fill a GPU, with a simdgroup for each scheduler of its processors.
const GROUPS: usize = 96;

/// The most elements of a matrix in a lane's registers.
const REGISTERS: u32 = 64;

/// How simdgroups share the columns of staged rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    /// Neighbouring columns of a lane.
    pub(crate) each: u8,
    /// Simdgroups of a threadgroup that have columns.
    pub(crate) simds: u32,
}

impl Columns {
    /// For `heads` matrices of `width` columns, if their rows can be staged; lanes have `share` of a
    /// column, and `starts` are what the places of rows of matrices are multiples of. Lanes have as
    /// many columns as registers hold and leave a GPU full: each reads a row's vectors once for all
    /// of them.
    pub(crate) fn of(
        heads: usize,
        width: usize,
        share: Share,
        starts: &[usize],
    ) -> Option<Columns> {
        let fits = |&(each, simds): &(u8, u32)| {
            let group = (simds * COLUMN_LANES) as usize * usize::from(each);
            let aligned = starts.iter().all(|n| n.is_multiple_of(usize::from(each)));
            let full = each < 4 || heads * width / group >= GROUPS;
            let held = share.own() * u32::from(each) <= REGISTERS;
            width.is_multiple_of(group) && aligned && full && held
        };
        let ways = [(4, 4), (2, 4), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)];
        let whole = share.run == 4 && width.is_multiple_of(4);
        let (each, simds) = ways.into_iter().find(fits).filter(|_| whole)?;
        Some(Columns { each, simds })
    }
}

/// The contract of a walk over rows of `len` elements in all.
pub(crate) fn require_staged(len: u32) {
    require(Requirement::Divisible(dim("block"), rows_of_tile(len)));
}

/// Rows of a tile, each of `len` elements.
fn rows_of_tile(len: u32) -> u32 {
    if STAGES * 8 * len.next_multiple_of(4) <= MOST { 8 } else { 4 }
}

/// The tiles of a sequence's rows.
#[derive(Clone, Copy)]
struct Tiles<'a> {
    pieces: &'a [Piece<'a>],
    chunk: Chunk,
    /// Places in the first tile that are no row of the sequence.
    skipped: Val<u32>,
    /// Places up to the last row.
    places: Val<u32>,
    /// `[STAGES, rows, stride]`.
    array: Shared,
    /// `[2, rows, NUMBERS]`.
    numbers: Shared,
    rows: u32,
    /// Elements between rows in shared memory.
    stride: u32,
}

/// A tile whose rows have arrived.
#[derive(Clone, Copy)]
pub(crate) struct StagedRows<'a> {
    tiles: Tiles<'a>,
    number: Val<u32>,
}

/// A row that has arrived.
pub(crate) struct StagedRow<'a> {
    tiles: Tiles<'a>,
    /// Where it begins in shared memory.
    first: Val<u32>,
    /// Where its numbers begin.
    numbers: Val<u32>,
}

impl<'a> Tiles<'a> {
    /// The row at a place, or the nearest one of the sequence.
    #[track_caller]
    fn row(&self, place: Val<u32>) -> Val<u32> {
        let place = place.max(self.skipped).min(self.places - 1u32);
        self.chunk.first + place - self.skipped
    }

    /// Whether a tile has rows.
    #[track_caller]
    fn exists(&self, number: Val<u32>) -> Val<bool> {
        Order::lt(number * self.rows, self.places)
    }

    /// Begins to copy a tile, if it is there, with the lanes of one simdgroup.
    #[track_caller]
    fn stage(&self, number: Val<u32>) {
        when(self.exists(number), || self.copy(number));
        copy_commit();
    }

    #[track_caller]
    fn copy(&self, number: Val<u32>) {
        let slot = number % STAGES * (self.rows * self.stride);
        let mut before = 0;
        for piece in self.pieces {
            let units = piece.len / piece.unit();
            let all = units * self.rows;
            for done in (0..all).step_by(32) {
                let unit = lane_id() + done;
                let copy = || {
                    let (row, element) = (unit / units, unit % units * piece.unit());
                    let to = slot + row * self.stride + before + element;
                    let from = (piece.at)(self.row(number * self.rows + row)) + element;
                    copy_async(self.array, to, piece.from, from, piece.unit() as u8, None);
                };
                match done + 32 <= all {
                    true => copy(),
                    false => when(Order::lt(unit, all), copy),
                }
            }
            before += piece.len;
        }
    }

    fn tile(self, number: Val<u32>) -> StagedRows<'a> {
        StagedRows { tiles: self, number }
    }
}

impl<'a> StagedRows<'a> {
    /// How many there are.
    pub(crate) fn len(&self) -> u32 {
        self.tiles.rows
    }

    /// One of them, counted from the tile's first place.
    #[track_caller]
    pub(crate) fn row(&self, index: impl IntoVal<u32>) -> StagedRow<'a> {
        let Tiles { rows, stride, .. } = self.tiles;
        let index = index.val();
        StagedRow {
            tiles: self.tiles,
            first: self.number % STAGES * (rows * stride) + index * stride,
            numbers: (self.number % 2u32 * rows + index) * NUMBERS,
        }
    }
}

impl StagedRow<'_> {
    /// Where a piece begins.
    #[track_caller]
    fn at(&self, piece: usize) -> Val<u32> {
        let before: u32 = self.tiles.pieces[..piece].iter().map(|piece| piece.len).sum();
        self.first + before
    }

    /// The lane's share of a piece.
    #[track_caller]
    pub(crate) fn share(&self, piece: usize, share: Share) -> Vec<Val<f32>> {
        share.load(self.tiles.array, self.at(piece))
    }

    /// `lanes` neighbouring elements of a piece.
    #[track_caller]
    pub(crate) fn elements(&self, piece: usize, index: Val<u32>, lanes: u8) -> Vec<Val<f32>> {
        load(self.tiles.array, self.at(piece) + index, lanes)
    }

    /// The one element of a piece.
    #[track_caller]
    pub(crate) fn element(&self, piece: usize) -> Val<f32> {
        self.tiles.array.get(self.at(piece))
    }

    /// Its first `count` numbers.
    #[track_caller]
    pub(crate) fn numbers(&self, count: u8) -> Vec<Val<f32>> {
        load(self.tiles.numbers, self.numbers, count)
    }

    /// One of its numbers.
    #[track_caller]
    pub(crate) fn number(&self, index: u32) -> Val<f32> {
        self.tiles.numbers.get(self.numbers + index)
    }

    /// Sets a number.
    #[track_caller]
    pub(crate) fn set_number(&self, index: u32, value: Val<f32>) {
        self.tiles.numbers.set(self.numbers + index, value);
    }
}

/// How a kernel passes staged rows.
pub(crate) trait Passes {
    /// Computes the numbers of a tile's rows, with the lanes of one simdgroup, each of which has
    /// waited for its own copies: those of a row's single elements are the lane's with its number.
    fn prepare(&self, rows: StagedRows<'_>);
    /// Reads what a row has for the lane.
    fn ask(&self, row: &StagedRow<'_>) -> Vec<Val<f32>>;
    /// Moves the lane's columns of the matrix by what was asked, and gives its part of what each
    /// says: the sum over the lanes that share the column is the whole.
    fn advance(&self, matrix: Regs, values: &[Val<f32>]) -> Vec<Val<f32>>;
    /// The answers of a row by what columns say.
    fn answer(&self, row: &StagedRow<'_>, said: Vec<Val<f32>>) -> Vec<Val<f32>>;
}

impl Part {
    /// Whether the simdgroup is the one that brings rows, behind `simds` that have columns, and the
    /// part of each: that one has no columns.
    #[track_caller]
    pub(crate) fn staged(self, simds: u32) -> (Val<bool>, Part) {
        let brings = Order::eq(simd_id(), simds);
        (brings, Part { column: select(brings, self.width, self.column), ..self })
    }

    /// As [`Part::walk`], for many rows, whose `pieces` come through shared memory. The last of the
    /// threadgroup's simdgroups has no columns: it brings the rows, and prepares them, while the
    /// others pass.
    #[track_caller]
    pub(crate) fn walk_staged(
        &self,
        [sequence, tokens]: [Val<u32>; 2],
        y: Out,
        brings: Val<bool>,
        pieces: &[Piece<'_>],
        passes: &impl Passes,
    ) {
        let len: u32 = pieces.iter().map(|piece| piece.len).sum();
        let (rows, stride) = (rows_of_tile(len), len.next_multiple_of(4));
        let array = Shared::named("rows", STAGES * rows * stride);
        let numbers = Shared::named("numbers", 2 * rows * NUMBERS);
        let Entered { chunk, matrix, position } = self.enter(sequence, tokens, y);
        when(Order::lt(chunk.first, chunk.end), || {
            let skipped = position % rows;
            let places = skipped + (chunk.end - chunk.first);
            let tiles = Tiles { pieces, chunk, skipped, places, array, numbers, rows, stride };
            let prepare = |number: Val<u32>| {
                copy_wait((STAGES - 2) as u8);
                when(tiles.exists(number), || passes.prepare(tiles.tile(number)));
            };
            when(brings, || {
                (0..STAGES - 1).for_each(|number| tiles.stage(number.val()));
                prepare(0u32.val());
            });
            range(0u32, (places + (rows - 1)) / rows).each(|number| {
                // The tile is there, and all are done with the one before.
                barrier();
                let bring = || {
                    tiles.stage(number + (STAGES - 1));
                    prepare(number + 1u32);
                };
                let pass = || {
                    let end = self.pass(&tiles.tile(number), matrix, y, passes);
                    let behind = position + end - skipped;
                    let last = Order::eq(behind % self.states.block, 0u32);
                    when(last | Order::eq(end, places), || {
                        self.leave(matrix, self.states.behind(&chunk, behind - 1u32));
                    });
                };
                test(brings).then(bring).otherwise(pass);
            });
        });
    }

    /// Passes a tile's rows; gives the place behind the last.
    #[track_caller]
    fn pass(&self, tile: &StagedRows<'_>, matrix: Regs, y: Out, passes: &impl Passes) -> Val<u32> {
        let Tiles { rows, chunk, skipped, places, .. } = tile.tiles;
        let start = tile.number * rows;
        let put = |index: Val<u32>, lanes: u32, said: Vec<Val<f32>>| {
            let answers = passes.answer(&tile.row(index), said);
            self.put(y, chunk.first + (start + index) - skipped, lanes, &answers);
        };
        // Of a whole tile a row is asked for before the one in front of it passes, and what all
        // said is summed at the end.
        let all = || {
            let mut ahead = passes.ask(&tile.row(0u32));
            let mut said = Vec::new();
            for next in 1..=rows {
                let values = ahead;
                ahead = if next < rows { passes.ask(&tile.row(next)) } else { Vec::new() };
                said.push(passes.advance(matrix, &values));
            }
            put(lane_id() % rows, rows, each_over_keys(said));
        };
        let some = |index: Val<u32>| {
            let said = passes.advance(matrix, &passes.ask(&tile.row(index)));
            put(index, 1, said.into_iter().map(over_keys).collect());
        };
        let first = start.max(skipped) - start;
        let end = (start + rows).min(places) - start;
        test(Order::eq(end - first, rows)).then(all).otherwise(|| range(first, end).each(some));
        start + end
    }
}

/// The sums over the lanes that share columns of what they have of each row, of which a lane gets
/// those of the row that has its number among these lanes. Lanes exchange the halves that are not
/// for them, which takes fewer exchanges than to have all sums everywhere, and adds in the same
/// order.
#[track_caller]
fn each_over_keys(mut rows: Vec<Vec<Val<f32>>>) -> Vec<Val<f32>> {
    for mask in [1, 2, 4] {
        if rows.len() == 1 {
            rows[0].iter_mut().for_each(|x| *x = *x + shuffle_xor(*x, mask));
            continue;
        }
        let odd = Order::ne(lane_id() & u32::from(mask), 0u32);
        let add = |(even, other): (&Val<f32>, &Val<f32>)| {
            let (keep, send) = (select(odd, *other, *even), select(odd, *even, *other));
            keep + shuffle_xor(send, mask)
        };
        let both = |pair: &[Vec<Val<f32>>]| pair[0].iter().zip(&pair[1]).map(add).collect();
        rows = rows.chunks_exact(2).map(both).collect();
    }
    rows.swap_remove(0)
}
