//! Columns that ranks share, in whole blocks: rank `r` has a run of them, and no rank has more than
//! one block more than another.

use std::ops::Range;

/// Columns `0..width`, dealt out in blocks of `block`; the last block may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Partition {
    /// Columns of all ranks together.
    pub width: usize,
    /// Columns that stay together; at least 1.
    pub block: usize,
    /// How many ranks share them; at least 1.
    pub ranks: usize,
}

impl Partition {
    /// The columns of a rank. Where there are fewer blocks than ranks, the last ones have none.
    pub fn range(&self, rank: usize) -> Range<usize> {
        let (fewest, longer) = self.blocks();
        let at = |rank: usize| self.width.min(self.block * (rank * fewest + rank.min(longer)));
        at(rank)..at(rank + 1)
    }

    /// How many columns each rank has, in the order of ranks.
    pub fn widths(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks).map(|rank| self.range(rank).len())
    }

    /// Whether all ranks have as many columns.
    pub fn is_even(&self) -> bool {
        self.widths().all(|width| width == self.range(0).len())
    }

    /// The blocks that every rank has at least, and how many ranks have one more: the first.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        let blocks = self.width.div_ceil(self.block.max(1));
        (blocks / self.ranks.max(1), blocks % self.ranks.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_is_one_ranks() {
        for (width, block, ranks) in
            [(8, 1, 2), (100, 32, 2), (100, 32, 3), (100, 32, 7), (1, 1, 1), (151_936, 32, 5)]
        {
            let partition = Partition { width, block, ranks };
            let mut next = 0;
            for (rank, count) in partition.widths().enumerate() {
                let range = partition.range(rank);
                assert_eq!((range.start, range.len()), (next, count), "{partition:?}");
                assert!(range.end == width || range.end.is_multiple_of(block), "{partition:?}");
                next = range.end;
            }
            assert_eq!(next, width, "{partition:?}");
            let even = width == ranks * partition.range(0).len();
            assert_eq!(partition.is_even(), even, "{partition:?}");
        }
        let uneven = Partition { width: 100, block: 32, ranks: 3 };
        assert_eq!(uneven.widths().collect::<Vec<_>>(), [64, 32, 4]);
    }
}
