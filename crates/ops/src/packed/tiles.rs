//! Tiles: matrices of which eight rows by four runs lie in one piece.
//!
//! A simdgroup that reads a run with each lane, four of each of eight rows, finds them in one piece
//! of memory, and the numbers that go with them behind. In rows these would be many short pieces,
//! and copying them takes longer than computing with them.
//!
//! ```text
//! matrix  the tiles of the first eight rows from left to right, then of the next eight
//! tile    base [8][4][4] | high [8][4][n] | [8] { entries, supers }       in words
//! ```
//!
//! A matrix in rows has the same words. A word of entries or of supers that several tiles of a
//! row share is in each of them.

use super::{Format, Layout};

/// Rows of a tile.
pub(super) const ROWS: u32 = 8;
/// Runs of each of its rows.
pub(super) const RUNS: u32 = 4;

/// The parts of a tile of a format, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    /// Words of each row, in each plane.
    counts: [u32; 4],
    /// Words of each run, in each plane.
    pub(super) per_run: [u32; 4],
    /// Neighbouring runs that have the same words of a plane.
    sharing: [u32; 4],
}

impl Tile {
    /// The tile of a format in tiles.
    pub(super) fn of(format: Format) -> Option<Tile> {
        matches!(format, Format::Tiles(_)).then(|| {
            let (run, per) = (format.run(), format.per_word());
            Tile {
                counts: per.map(|per| (RUNS * run).checked_div(per).map_or(0, |n| n.max(1))),
                per_run: format.counts(),
                sharing: per.map(|per| (per / run).max(1)),
            }
        })
    }

    /// Words from one row to the next, in each plane.
    fn apart(&self, plane: usize) -> u32 {
        if plane < 2 { self.counts[plane] } else { self.counts[2] + self.counts[3] }
    }

    /// The first word of a plane.
    fn start(&self, plane: usize) -> u32 {
        let [base, high, entries, _] = self.counts;
        [0, ROWS * base, ROWS * (base + high), ROWS * (base + high) + entries][plane]
    }

    /// All its words: a multiple of 8.
    pub(super) fn words(&self) -> u32 {
        ROWS * self.counts.iter().sum::<u32>()
    }

    /// The words of a plane that a row begins with, and how far apart rows and the words of runs
    /// are; `sharing` neighbouring runs have the same.
    pub(super) fn plane(&self, plane: usize) -> Plane {
        let [start, row] = [self.start(plane), self.apart(plane)];
        Plane { start, row, run: self.per_run[plane], sharing: self.sharing[plane] }
    }

    /// Runs `f` with each piece of a row that lies in one plane of a tile, for the tiles of eight
    /// rows of a matrix in tiles: the row, and where the piece is in that row and among the tiles.
    fn each(&self, layout: &Layout, mut f: impl FnMut(usize, [usize; 2], usize)) {
        let rows = layout.format.in_rows();
        let (per, starts) = (rows.per_word(), rows.starts(0, layout.cols as u32));
        let elements = RUNS * rows.run();
        for tile in 0..layout.cols as u32 / elements {
            for plane in (0..4).filter(|plane| self.counts[*plane] > 0) {
                let from = starts[plane] + tile * elements / per[plane];
                let (to, count) = (tile * self.words() + self.start(plane), self.counts[plane]);
                for row in 0..ROWS {
                    let to = to + row * self.apart(plane);
                    f(row as usize, [from, to].map(|word| word as usize), count as usize);
                }
            }
        }
    }

    /// Eight rows, one after another, in tiles.
    pub(super) fn fill(&self, layout: &Layout, rows: &[[u8; 4]], tiles: &mut [[u8; 4]]) {
        let per_row = rows.len() / ROWS as usize;
        self.each(layout, |row, [from, to], count| {
            tiles[to..to + count].copy_from_slice(&rows[row * per_row + from..][..count]);
        });
    }

    /// The words of one row of eight in tiles, as they are in rows.
    pub(super) fn row(&self, layout: &Layout, tiles: &[[u8; 4]], wanted: usize) -> Vec<[u8; 4]> {
        let end = layout.format.in_rows().starts(0, layout.cols as u32)[4];
        let mut words = vec![[0; 4]; end as usize];
        self.each(layout, |row, [from, to], count| {
            if row == wanted {
                words[from..from + count].copy_from_slice(&tiles[to..to + count]);
            }
        });
        words
    }
}

/// Where the words of a plane are in a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plane {
    /// The first.
    pub(super) start: u32,
    /// Words between rows.
    pub(super) row: u32,
    /// Words of a run.
    pub(super) run: u32,
    /// Neighbouring runs that have the same.
    pub(super) sharing: u32,
}
